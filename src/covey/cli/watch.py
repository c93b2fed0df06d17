"""`covey watch`: runs in the browser; `covey report`: the same page as one file."""

from __future__ import annotations

import importlib.util
import secrets
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from covey.errors import ConfigError
from covey.observe.console import say

_WANTED = ("fastapi", "uvicorn")

out = Console()


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; they may be running, or copied from elsewhere.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = 8001,
    token: Annotated[
        str | None, typer.Option(envvar="COVEY_WATCH_TOKEN", help="Token that the page asks with; default: a new one.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Show runs in the browser, live while they train: curves, completions, tokens, questions, seconds, the doctor.

    It reads the run folders and nothing else; no request leaves this machine.
    """
    missing = [name for name in _WANTED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"covey watch needs {', '.join(missing)}; pip install 'covey[serve]'")
    from covey.serving.client import check_token
    from covey.serving.connections import ConnectionLimits, listen, uvicorn_server
    from covey.watch.app import create_app
    from covey.watch.reader import TableReader
    from covey.watch.run import WatchedRun

    check_token(token or None)
    secret = token or secrets.token_urlsafe(16)
    reader = TableReader()
    app = create_app([WatchedRun(run, reader) for run in runs], secret)
    listening = listen(host, port)
    listening.listen(128)
    address, bound = listening.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{bound}/#token={secret}"
    say(out, f"{url}  (Ctrl-C to stop)")
    if not no_browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    uvicorn_server(app, ConnectionLimits()).run(sockets=[listening])


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; they may be running, or copied from elsewhere.")],
    path: Annotated[Path, typer.Option("--output", "-o", help="The file; one that is there is replaced.")] = Path(
        "report.html"
    ),
) -> None:
    """Write runs as one HTML file to send: curves, settings, completions, tokens, the doctor. It opens offline.

    Of long runs it has some steps, and says which; it is what covey watch shows.
    """
    from covey.watch.export import export_runs
    from covey.watch.reader import TableReader
    from covey.watch.run import WatchedRun

    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {path}: the file is a page; give it a name that ends in .html")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: {'it is a folder' if path.is_dir() else 'its folder does not exist'}")
    reader = TableReader()
    try:
        left_out = export_runs([WatchedRun(run, reader) for run in runs], path)
    finally:
        reader.close()
    say(out, f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    for sentence in left_out:
        say(out, sentence)

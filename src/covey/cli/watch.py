"""`covey watch`: runs in the browser."""

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

out = Console()


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; they may be running, or copied from elsewhere.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = 8001,
    token: Annotated[
        str | None, typer.Option(envvar="COVEY_WATCH_TOKEN", help="Token of the page; default: a new one.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Show runs in the browser, live during training: curves, completions, tokens, questions, times, diagnoses.

    It reads the run folders and nothing else; no request leaves this machine.
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"covey watch needs {', '.join(missing)}; pip install 'covey[serve]'")
    from covey.serving.client import check_token
    from covey.serving.connections import ConnectionLimits, listen, uvicorn_server
    from covey.watch.app import create_app
    from covey.watch.run import WatchedRun
    from covey.watch.tables import TableReader

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

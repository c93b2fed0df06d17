"""`covey mcp`: the commands as tools of the Model Context Protocol, for assistants that drive runs over stdio.

What computes runs in a process of its own, so that a tool that fails or hangs costs its answer and not the server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from covey import __version__
from covey.cli.weights import err, recipe_file
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, CoveyError, RunFolderError
from covey.files import explained, no_path
from covey.observe.folder_lock import FolderLock
from covey.observe.records import Record, plain
from covey.observe.run_folder import STARTED_LOG, RunFolder

_SECONDS = 900.0
"""The longest that a tool may compute."""
_STOPPING = 120.0
_OUTPUT = 4_000
"""Characters of a run's output that are told."""


def mcp() -> None:
    """Let an assistant drive runs: a server of the Model Context Protocol over stdin and stdout.

    Its tools are plan, start, follow, doctor, report and stop. Runs that it started go on when it ends. An assistant's
    settings name it as `{"command": "covey", "args": ["mcp"]}`.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("covey mcp needs mcp; pip install 'covey[mcp]'")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer(
        "covey",
        version=__version__,
        instructions="Train language models with GRPO. Plan a recipe (a TOML file), start it, follow it to its end, "
        "and ask the doctor when rewards do not rise. Settings are SECTION.FIELD=VALUE.",
    )
    started = Started()
    for tool in (plan, started.start, started.follow, doctor, report, started.stop):
        server.tool()(_told(tool))
    try:
        server.run("stdio")
    except* BrokenPipeError:
        err.print("covey: the client of covey mcp is gone")
        os._exit(0)  # what its questions had begun would end in tracebacks


def _told(tool: Any) -> Any:
    """Errors are the tool's answer, without a traceback."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    async def told(**named: Any) -> dict[str, Any]:
        try:
            for name in ("run", "runs", "recipe"):
                if problem := no_path(named.get(name)):
                    raise ConfigError(f"{name}={named[name]!r:.100}: {problem}")
            return dict(plain(await tool(**named)))
        except (CoveyError, OSError, ValueError, RuntimeError) as error:  # a setting of 300 kB, a link to itself
            raise ToolError(str(error)) from error

    return told


async def plan(recipe: str, settings: list[str] | None = None) -> dict[str, Any]:
    """Take two trial steps of a recipe: time and memory of a step, and problems of the recipe."""
    return dict(await _covey("doctor", "--json", "--", recipe, *(settings or [])))


async def doctor(run: str) -> dict[str, Any]:
    """Problems of a run, from its metrics: each finding has an explanation and a fix."""
    RunFolder.read(run)  # a recipe is for plan
    return dict(await _covey("doctor", "--json", "--", run))


async def report(runs: Annotated[list[str], Field(min_length=1)]) -> dict[str, Any]:
    """Compare runs: metrics, settings that differ, held-out accuracy, paired tests on the same questions."""
    return dict(await _covey("report", "--json", "--", *runs))


class Started:
    """The runs that this server has started."""

    def __init__(self) -> None:
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._replaced: dict[Path, bytes] = {}  # versions.json of the run that a started one takes the place of

    async def start(self, recipe: str, settings: list[str] | None = None) -> dict[str, Any]:
        """Start training with a recipe in the background. Returns the run's folder, for the other tools."""
        config = GRPOConfig.from_toml(recipe_file(Path(recipe)), overrides=settings or [])
        folder = Path(config.run.output_dir).expanduser().absolute()
        path = folder.resolve()
        for other, before in self._processes.items():
            if before.poll() is None and (path.is_relative_to(other) or other.is_relative_to(path)):
                told = f"process {before.pid}, started here, trains into {other}; follow or stop it first"
                raise ConfigError(f"{folder}: {told}")
        RunFolder.check_new(folder, overwrite=config.run.overwrite)
        self._replaced[path] = (path / "versions.json").read_bytes() if RunFolder.is_run(path) else b""
        log = folder / STARTED_LOG
        command = [sys.executable, "-m", "covey", "train", "--", recipe, *(settings or [])]
        with explained(log):
            folder.mkdir(parents=True, exist_ok=True)
            opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        with os.fdopen(opened, "ab") as output:
            self._processes[path] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        return {"run": str(folder), "output": str(log), "max_steps": config.schedule.max_steps}

    async def follow(self, run: str, steps: Annotated[int, Field(ge=1)] = 5) -> dict[str, Any]:
        """How far a run is: metrics of its last steps, last events, and its state, which is starting, running,
        finished, stopped (also by an error, see the events), or not started here (it runs elsewhere or was killed).
        """
        path = Path(run).expanduser().resolve()
        process = self._processes.get(path)
        found: dict[str, Any] = {"state": "starting", "metrics": [], "events": []}
        begun = RunFolder.is_run(path) and (path / "versions.json").read_bytes() != self._replaced.get(path)
        if process is None or begun:
            folder = RunFolder.read(run)
            metrics: list[Record] = folder.read_metrics()
            found |= {"step": folder.last_logged_step(), "metrics": metrics[-steps:]}
            found["held_out"] = [record for record in metrics if "eval/reward" in record][-1:]
            found["events"] = folder.read_events()[-5:]
            ended = {"finished": "finished", "stopped": "stopped", "failed": "stopped"}
            found["state"] = "running" if process else ended.get(folder.last_state(), "not started here")
        if process is not None and process.poll() is not None:
            found["exit_status"] = process.returncode
            found["state"] = "finished" if process.returncode == 0 else "stopped"
            found["output"] = (path / STARTED_LOG).read_text(errors="replace")[-_OUTPUT:]
        return found

    async def stop(self, run: str) -> dict[str, Any]:
        """Stop a run of this machine, after a checkpoint of its last step; `covey resume` continues it."""
        path = Path(run).expanduser().resolve()
        process = self._processes.get(path)
        writer = process.pid if process else RunFolder.is_run(path) and _writer(path)
        if not writer:
            raise ConfigError(f"{run}: this server did not start it, and no process writes it: nothing is to stop")
        end = process.send_signal if process else partial(os.kill, writer)
        end(signal.SIGINT if process else signal.SIGTERM)  # a script's background jobs ignore the first
        for _ in range(round(10 * _STOPPING)):
            if process.poll() is not None if process else _writer(path) != writer:
                return await self.follow(run)
            await asyncio.sleep(0.1)
        raise ConfigError(f"{run}: it still runs {_STOPPING:g} s after the signal; ask again")


def _writer(run: Path) -> int:
    """The process of covey on this machine that writes a run, 0 = none. Raises `CoveyError`: another one does."""
    try:
        FolderLock(run).release()
    except RunFolderError as error:
        told = str(error).rpartition("; wait")[0]
        number = (re.findall(rf" by process (\d+) on {re.escape(socket.gethostname())}$", told) or ["0"])[0]
        words = Path("/proc", number, "cmdline")
        if words.exists() and re.match(rb"[^\0]+\0(-u\0)?(-m\0|[^\0]*/)covey\0", words.read_bytes()):
            return int(number)
        raise ConfigError(f"{told or error}; end it there: kill and that number") from error
    return 0


async def _covey(*words: str) -> Any:
    """What a command prints with --json."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "covey", *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        printed, said = await asyncio.wait_for(process.communicate(), _SECONDS)
    except TimeoutError:
        raise ConfigError(f"covey {' '.join(words):.300}: ended after {_SECONDS:g} s, its limit") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return json.loads(printed)
    except ValueError:
        why = said.decode(errors="replace").strip().removeprefix("covey: ") or f"exit status {process.returncode}"
        raise ConfigError(why[-_OUTPUT:]) from None

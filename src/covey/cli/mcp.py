"""`covey mcp`: the commands as tools of the Model Context Protocol, for assistants that drive runs over stdio.

What computes runs in a process of its own, so that a tool that fails or hangs costs its answer and not the server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from covey.cli.weights import recipe_file
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, CoveyError
from covey.observe.records import Record, plain
from covey.observe.run_folder import RunFolder

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
        instructions="Train language models with GRPO. Begin with plan on a recipe, then start it, follow it until it "
        "has finished, and ask the doctor when rewards do not rise. A recipe is a TOML file; settings are "
        "SECTION.FIELD=VALUE.",
    )
    started = Started()
    for tool in (plan, started.start, started.follow, doctor, report, started.stop):
        server.tool()(_told(tool))
    server.run("stdio")


def _told(tool: Any) -> Any:
    """Errors of ours are the tool's answer, without a traceback."""
    from functools import wraps

    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    async def told(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = plain(await tool(*args, **named))
        except CoveyError as error:
            raise ToolError(str(error)) from error
        return found

    return told


async def plan(recipe: str, settings: list[str] | None = None) -> dict[str, Any]:
    """Take two trial steps of a recipe: time and memory of a step, and problems of the recipe."""
    return dict(await _covey("doctor", "--json", "--", recipe, *(settings or [])))


async def doctor(run: str) -> dict[str, Any]:
    """Problems of a run, from its metrics: each finding has an explanation and a fix."""
    return dict(await _covey("doctor", "--json", "--", run))


async def report(runs: list[str]) -> dict[str, Any]:
    """Compare runs: metrics, settings that differ, held-out accuracy, paired tests on the same questions."""
    return dict(await _covey("report", "--json", "--", *runs))


class Started:
    """The runs that this server has started."""

    def __init__(self) -> None:
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}

    async def start(self, recipe: str, settings: list[str] | None = None) -> dict[str, Any]:
        """Start training with a recipe in the background. Returns the run's folder, for the other tools."""
        config = GRPOConfig.from_toml(recipe_file(Path(recipe)), overrides=settings or [])
        folder = Path(config.run.output_dir).absolute()
        RunFolder.check_new(folder)
        log = folder.with_name(folder.name + ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "covey", "train", "--", recipe, *(settings or [])]
        with log.open("wb") as output:
            self._processes[folder.resolve()] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        return {"run": str(folder), "output": str(log), "max_steps": config.schedule.max_steps}

    async def follow(self, run: str, steps: int = 5) -> dict[str, Any]:
        """How far a run is: state (starting, running, finished, stopped), metrics of its last steps, last events."""
        path = Path(run).resolve()
        process = self._processes.get(path)
        found: dict[str, Any] = {"state": "starting", "metrics": [], "events": []}
        if process is None or RunFolder.is_run(run):
            folder = RunFolder.read(run)
            metrics: list[Record] = folder.read_metrics()
            found |= {"step": folder.last_logged_step(), "metrics": metrics[-max(steps, 1) :]}
            found["held_out"] = [record for record in metrics if "eval/reward" in record][-1:]
            found["events"] = folder.read_events()[-5:]
            found["state"] = "finished" if folder.is_finished() else "running" if process else "not started here"
        if process is not None and process.poll() is not None:
            found["exit_status"] = process.returncode
            found["state"] = "finished" if process.returncode == 0 else "stopped"
            found["output"] = path.with_name(path.name + ".log").read_text(errors="replace")[-_OUTPUT:]
        return found

    async def stop(self, run: str) -> dict[str, Any]:
        """Stop a run that was started here, after a checkpoint of its last step; `covey resume` continues it."""
        process = self._processes.get(Path(run).resolve())
        if process is None:
            raise ConfigError(f"{run}: this server did not start it; stop it where it was started, with Ctrl-C")
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            await asyncio.to_thread(process.wait, _STOPPING)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{run}: it still runs {_STOPPING:g} s after the signal; ask again") from None
        return await self.follow(run)


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

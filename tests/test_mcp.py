"""`covey mcp`, asked over stdio as an assistant would: a run is planned, started, followed, stopped and looked at."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.observe.run_folder import RunFolder

mcp = pytest.importorskip("mcp")
# httpx2, which the client has for other transports
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
TOOLS = ("doctor", "follow", "plan", "report", "start", "stop")


class Assistant:
    def __init__(self, session: Any) -> None:
        self._session = session

    async def __call__(self, tool: str, **arguments: Any) -> Any:
        """The answer as values; of an error its text."""
        found = await self._session.call_tool(tool, arguments)
        text = "".join(part.text for part in found.content)
        return text if found.is_error else json.loads(text)

    async def until(self, run: Path, is_so: Any) -> Any:
        for _ in range(600):
            found = await self("follow", run=str(run), steps=2)
            if is_so(found):
                return found
            await asyncio.sleep(0.2)
        raise AssertionError(found)


def ask(story: Any) -> None:
    async def asked() -> None:
        server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "covey", "mcp"], env=dict(os.environ))
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            assert (await session.initialize()).server_info.version == covey.__version__
            assert tuple(sorted(tool.name for tool in (await session.list_tools()).tools)) == TOOLS
            await story(Assistant(session))

    asyncio.run(asyncio.wait_for(asked(), 240))


def test_what_cannot_be_is_an_error_in_words_and_the_server_goes_on(recipe_folder: Path, tmp_path: Path) -> None:
    for name, end in (("ended", "failed"), ("killed", "started")):
        with RunFolder.create(tmp_path / name) as run:
            run.append_event("run", end)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    held = RunFolder.create(tmp_path / "held")
    precious, linked, taken = tmp_path / "precious.txt", tmp_path / "linked", tmp_path / "taken"
    precious.write_text("mine")
    for folder in (linked, taken):
        folder.mkdir()
    (linked / "mcp.log").symlink_to(precious)
    (taken / "mcp.log").mkdir()

    async def story(tool: Assistant) -> None:
        for name, state in (("ended", "stopped"), ("killed", "not started here")):
            assert (await tool("follow", run=str(tmp_path / name)))["state"] == state
        recipe, here = {"recipe": str(recipe_folder)}, f"{os.getpid()} on {os.uname().nodename}"

        def into(folder: Path) -> dict[str, Any]:
            return recipe | {"settings": [f"run.output_dir={folder}"]}

        for name, arguments, words in (
            ("start", into(linked), "linked/mcp.log: cannot write: it is a link"),
            ("start", into(taken), "taken/mcp.log: cannot write: it is a folder"),
            ("follow", {"run": "a\0b"}, "run='a\\x00b': holds a NUL"),
            ("plan", {"recipe": "a\0b"}, "recipe='a\\x00b': holds a NUL"),
            ("report", {"runs": ["a\0b"]}, "holds a NUL"),
            ("report", {"runs": []}, "at least 1 item"),
            ("plan", recipe | {"settings": [f"run.run_name={'x' * 300_000}"]}, "Argument list too long"),
            ("follow", {"run": str(tmp_path / "ended"), "steps": 0}, "greater than or equal to 1"),
            ("doctor", {"run": str(recipe_folder)}, "holds no run"),
            ("start", {"recipe": "/nowhere.toml"}, "/nowhere.toml"),
            ("start", {"recipe": str(recipe_folder), "settings": ["optim.learning_rat=1"]}, "did you mean"),
            ("follow", {"run": str(tmp_path)}, "holds no run"),
            ("stop", {"run": str(tmp_path)}, "did not start it"),
            ("stop", {"run": str(tmp_path / "ended")}, "no process writes it"),
            ("stop", {"run": str(tmp_path / "held")}, f"process {here}; end it there: kill"),
            ("follow", {"run": str(tmp_path / "loop")}, "loop"),
            ("start", into(tmp_path / "loop"), "loop"),
            ("start", recipe | {"settings": ["run.run_name=a\0b"]}, "holds a NUL"),
            ("doctor", {"run": "--help"}, "--help holds no run"),
        ):
            assert words in str(await tool(name, **arguments)), name

    with held:
        ask(story)
    assert precious.read_text() == "mine"


def test_folders_of_two_runs_lie_side_by_side_and_a_run_outlives_a_server(recipe_folder: Path, tmp_path: Path) -> None:
    recipe, run = str(recipe_folder), tmp_path / "run"

    def settings(folder: Path) -> list[str]:
        return [f"run.output_dir={folder}", "schedule.max_steps=1000"]

    async def begins(tool: Assistant) -> None:
        await tool("start", recipe=recipe, settings=settings(run))
        for other in (run, run / "below", tmp_path):
            assert f"trains into {run}" in str(await tool("start", recipe=recipe, settings=settings(other)))
        await tool.until(run, lambda found: found.get("step", 0) >= 1)

    async def ends(tool: Assistant) -> None:
        assert (await tool("stop", run=str(run)))["state"] == "stopped"

    ask(begins)
    ask(ends)


def test_a_client_that_goes_away_is_one_line() -> None:
    hello = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    asked = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}).encode() + b"\n"
    end, gone = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "covey", "mcp"]
    done = subprocess.run(command, input=asked, stdout=gone, stderr=subprocess.PIPE, timeout=120)
    os.close(gone)
    assert (done.returncode, done.stderr) == (0, b"covey: the client of covey mcp is gone\n")


@pytest.mark.slow
def test_a_run_from_plan_to_report(recipe_folder: Path, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", str(recipe_folder)
    settings = [f"run.output_dir={run}", "schedule.max_steps=1000"]

    async def story(tool: Assistant) -> None:
        assert "findings" in (await tool("plan", recipe=recipe, settings=settings))
        begun = await tool("start", recipe=recipe, settings=settings)
        assert begun == {"run": str(run), "output": f"{run}/mcp.log", "max_steps": 1000}
        assert f"{run}: process" in str(await tool("start", recipe=recipe, settings=settings))
        seen = await tool.until(run, lambda found: found.get("step", 0) >= 3)
        assert (seen["state"], len(seen["metrics"])) == ("running", 2)
        ended = await tool("stop", run=str(run))
        assert (ended["state"], ended["exit_status"]) == ("stopped", 130)
        assert "continue with" in "".join(event["message"] for event in ended["events"])
        assert (await tool("doctor", run=str(run)))["steps"] >= 3
        assert (await tool("report", runs=[str(run)]))["runs"] == ["run"]
        assert RunFolder.read(run).last_state() == "stopped"
        assert "holds another run" in str(await tool("start", recipe=recipe, settings=settings))
        await tool("start", recipe=recipe, settings=[settings[0], "schedule.max_steps=1", "run.overwrite=true"])
        assert await tool("follow", run=str(run)) == {"state": "starting", "metrics": [], "events": []}
        ended = await tool.until(run, lambda found: "exit_status" in found)
        assert (ended["state"], ended["exit_status"], ended["step"]) == ("finished", 0, 1)

    ask(story)

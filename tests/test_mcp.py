"""`covey mcp`, asked over stdio as an assistant would: a run is planned, started, followed, stopped and looked at."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

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
            await session.initialize()
            assert tuple(sorted(tool.name for tool in (await session.list_tools()).tools)) == TOOLS
            await story(Assistant(session))

    asyncio.run(asyncio.wait_for(asked(), 240))


def test_what_cannot_be_is_an_error_in_words_and_the_server_goes_on(recipe_folder: Path, tmp_path: Path) -> None:
    async def story(tool: Assistant) -> None:
        for name, arguments, words in (
            ("start", {"recipe": "/nowhere.toml"}, "/nowhere.toml"),
            ("start", {"recipe": str(recipe_folder), "settings": ["optim.learning_rat=1"]}, "did you mean"),
            ("follow", {"run": str(tmp_path)}, "holds no run"),
            ("stop", {"run": str(tmp_path)}, "did not start it"),
            ("doctor", {"run": "--help"}, "--help: is neither"),
        ):
            assert words in str(await tool(name, **arguments)), name

    ask(story)


@pytest.mark.slow
def test_a_run_from_plan_to_report(recipe_folder: Path, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", str(recipe_folder)
    settings = [f"run.output_dir={run}", "schedule.max_steps=1000"]

    async def story(tool: Assistant) -> None:
        assert "findings" in (await tool("plan", recipe=recipe, settings=settings))
        begun = await tool("start", recipe=recipe, settings=settings)
        assert begun == {"run": str(run), "output": f"{run}.log", "max_steps": 1000}
        seen = await tool.until(run, lambda found: found.get("step", 0) >= 3)
        assert (seen["state"], len(seen["metrics"])) == ("running", 2)
        assert "holds" in str(await tool("start", recipe=recipe, settings=settings))  # the folder is taken
        ended = await tool("stop", run=str(run))
        assert (ended["state"], ended["exit_status"]) == ("stopped", 130)
        assert "continue with" in "".join(event["message"] for event in ended["events"])
        assert (await tool("doctor", run=str(run)))["steps"] >= 3
        assert (await tool("report", runs=[str(run)]))["runs"] == ["run"]
        await tool("start", recipe=recipe, settings=[f"run.output_dir={tmp_path / 'short'}", "schedule.max_steps=1"])
        ended = await tool.until(tmp_path / "short", lambda found: "exit_status" in found)
        assert (ended["state"], ended["exit_status"]) == ("finished", 0)

    ask(story)
    assert not RunFolder.read(run).is_finished()

"""Tools of a real MCP server over stdio: what comes back, what is new for an episode, and what is killed."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError, EpisodeError
from covey.rollout.mcp import McpTools
from fakes import raises

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow  # a server starts in seconds
SHOP = Path(__file__).parent / "mcp_shop.py"
SLIP = {"coins": 3, "kind": "cash"}


def servers() -> list[str]:
    """Process numbers of the shop's servers."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(SHOP) in line]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[McpTools]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    found = McpTools([f"python {SHOP}"], seconds=30)
    yield found
    found.close()
    until = time.monotonic() + 20
    while servers() and time.monotonic() < until:
        time.sleep(0.1)
    assert servers() == []


def call(tools: McpTools, name: str, **arguments: Any) -> Any:
    return tools.call({0: [(name, arguments)]})[0]


def test_calls_results_and_episodes(tools: McpTools) -> None:
    parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in tools.schemas}
    assert list(parameters) == ["price", "pay", "trouble"]
    assert parameters["price"]["properties"]["item"]["enum"] == ["apple", "pear"]
    assert parameters["pay"]["$defs"]["Slip"]["properties"]["kind"]["enum"] == ["cash", "card"]
    for place in (0, 1):
        tools.begin(place)
    both = tools.call({0: [("price", {"item": "apple"}), ("pay", {"slip": SLIP})], 1: [("pay", {"slip": SLIP})]})
    assert both == {0: [("3", False), ("paid [3]", False)], 1: [("paid [3]", False)]}  # each has a till of its own
    ((told, failed),) = call(tools, "price", item="plum")
    assert failed
    assert "Input should be 'apple' or 'pear'" in told
    assert call(tools, "pay", slip=SLIP) == [("paid [3, 3]", False)]
    tools.begin(0)
    assert call(tools, "pay", slip=SLIP) == [("paid [3]", False)]  # another episode
    ((names, _),) = call(tools, "trouble", kind="environment")
    assert "PATH" in names
    assert "OPENAI_API_KEY" not in names
    assert set(names.split(",")) <= {"HOME", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    ((long, _),) = call(tools, "trouble", kind="2000000")
    assert long == "x" * 100_000


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("die", "did not answer trouble: .*the till is broken"),
        ("hang", "did not answer trouble within 1 s"),
    ],
)
def test_a_server_that_is_lost_costs_its_episode(tools: McpTools, kind: str, words: str) -> None:
    tools.begin(0)
    assert call(tools, "pay", slip=SLIP) == [("paid [3]", False)]
    if kind == "hang":
        tools.seconds = 1.0
    with pytest.raises(EpisodeError, match=words):
        raise call(tools, "trouble", kind=kind)
    tools.seconds = 30.0
    tools.begin(0)
    assert call(tools, "pay", slip=SLIP) == [("paid [3]", False)]


def test_servers_that_do_not_start() -> None:
    raises(ConfigError, "no such thing.* did not start: .*No such file", McpTools, ["'no such thing' --fast"], 5)
    raises(ConfigError, "did not start: .*can't open file", McpTools, [f"python {SHOP}.gone"], 20)
    raises(ConfigError, "did not start: .*[Cc]onnect", McpTools, ["http://127.0.0.1:9/mcp"], 20)

"""Tools of a real MCP server over stdio: what comes back, what is new for an episode, and what is killed."""

import base64
import io
import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from covey.errors import ConfigError, EpisodeError
from covey.rollout.mcp import McpTools
from fakes import raises

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow  # a server starts in seconds
SHOP = Path(__file__).parent / "mcp_shop.py"
LISTS = """
import json, sys, time

pages = json.loads(sys.argv[1])
for line in sys.stdin:
    asked, answer = json.loads(line), "result"
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        found = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    elif asked["method"] == "tools/list":
        if not pages:
            time.sleep(600)
        page = int(asked.get("params", {}).get("cursor") or 0)
        found = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in pages[page]]}
        if page + 1 < len(pages):
            found["nextCursor"] = str(page + 1)
    else:
        answer, found = "error", {"code": -32601, "message": "no such method"}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], answer: found}), flush=True)
"""
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
    return texts(tools.call({0: [(name, arguments)]})[0])


def texts(found: Any) -> Any:
    """Text and failure of each result."""
    return [(each.text, each.failed) for each in found] if isinstance(found, list) else found


def test_calls_results_and_episodes(tools: McpTools) -> None:
    parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in tools.schemas}
    assert list(parameters) == ["price", "pay", "trouble", "look"]
    assert parameters["price"]["properties"]["item"]["enum"] == ["apple", "pear"]
    assert parameters["pay"]["$defs"]["Slip"]["properties"]["kind"]["enum"] == ["cash", "card"]
    for place in (0, 1):
        tools.begin(place)
    both = tools.call({0: [("price", {"item": "apple"}), ("pay", {"slip": SLIP})], 1: [("pay", {"slip": SLIP})]})
    shown = {place: texts(found) for place, found in both.items()}
    assert shown == {0: [("3", False), ("paid [3]", False)], 1: [("paid [3]", False)]}  # each has a till of its own
    ((told, failed),) = call(tools, "price", item="plum")
    assert failed
    assert "Input should be 'apple' or 'pear'" in told
    assert call(tools, "pay", slip=SLIP) == [("paid [3, 3]", False)]
    tools.begin(0)
    assert call(tools, "pay", slip=SLIP) == [("paid [3]", False)]  # another episode
    ((names, _),) = call(tools, "trouble", kind="environment")
    assert "PATH" in names
    assert "OPENAI_API_KEY" not in names
    assert set(names.split(",")) <= {"COVEY_SERVER", "HOME", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    ((long, _),) = call(tools, "trouble", kind="2000000")
    assert long == "x" * 100_000
    assert call(tools, "trouble", kind="fork") == [("forked", False)]  # its child ends, as the fixture sees


def test_pictures_are_read_where_the_model_takes_them() -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    for sees, text, sizes in ((True, "this", [(3, 2)]), (False, "this\n[image]", [])):
        tools = McpTools([f"python {SHOP}"], 30, sees=sees)
        data = base64.b64encode(file.getvalue()).decode()
        good, *wrong = tools.call({0: [("look", {"data": each}) for each in (data, "?", "eA==")]})[0]
        assert (good.text, good.failed, [each.size for each in good.pictures]) == (text, False, sizes)
        assert [each.failed for each in wrong] == [sees, sees]
        assert not sees or all("it returned a picture that" in each.text for each in wrong)
        tools.close()


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


def test_tools_are_listed_on_pages_and_must_have_names(tmp_path: Path) -> None:
    (tmp_path / "lists.py").write_text(LISTS)

    def lists(pages: list[list[str]], seconds: float = 20) -> McpTools:
        return McpTools([f"python {tmp_path}/lists.py {shlex.quote(json.dumps(pages))}"], seconds)

    found = lists([["a"], [], ["b.c-D_9"]])
    assert [schema["function"]["name"] for schema in found.schemas] == ["a", "b.c-D_9"]
    found.close()
    raises(ConfigError, "lists.py.* lists more than 1000 tools or 100 pages", lists, [["a"]] * 101)
    raises(ConfigError, "lists more than 1000 tools", lists, [[f"t{n}" for n in range(1_001)]])
    raises(ConfigError, "lists.py.* has no tools", lists, [[]])
    for name in ("add two", "add\n<|im_end|>", "", "a" * 65):
        raises(ConfigError, "has a tool '.*; a name is 1 to 64 of", lists, [["a", name]])
    raises(ConfigError, r"lists.py.* did not start within 4.5 s \(see environment.step_seconds\)", lists, [], 1.5)

"""The examples of docs/agents.md, docs/data.md and docs/losses.md run as they are printed."""

import asyncio
import json
import re
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from covey import GRPOConfig
from covey.environments import get_world
from covey.errors import ConfigError
from covey.functions import load_function
from covey.rewards.code import CodeReward
from covey.tasks import get_task
from covey.training.setup import check_estimator
from covey.training.tools import tool_schema

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The pages' code by file name, or by number where it has none; files stand in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {}
    for page in ("agents", "data", "losses"):
        printed = re.findall(r"^```(\w+)\n(.*?)^```", (DOCS / f"{page}.md").read_text(), flags=re.M | re.S)
        for number, (language, body) in enumerate(printed):
            named = re.match(r"# (\w+\.(?:py|toml))\n", body)
            name = named[1] if named else f"{page}{number}.{language}"
            found[name] = body
            Path(name).write_text(body)
    return found


def test_rewards_of_the_page_and_its_verifier_in_processes(blocks: dict[str, str], monkeypatch: Any) -> None:
    chats = [[{"role": "assistant", "content": text}] for text in ("it is 41", "none", "so 42")]
    correct, close = (load_function(f"my_rewards.py:{name}") for name in ("correct", "close"))
    assert correct(completions=chats, answer=["42"] * 3) == [0.0, 0.0, 1.0]
    assert close(completions=chats, answer=["42"] * 3) == [0.5, 0.0, 1.0]
    at_once: list[str] = []

    async def answer(client: Any, url: str, json: dict[str, str]) -> httpx.Response:
        at_once.append(json["text"])
        await asyncio.sleep(0)
        return httpx.Response(200, json={"score": len(at_once)}, request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx.AsyncClient, "post", answer)
    graded = load_function("api_rewards.py:graded")
    assert asyncio.run(graded(prompts=[], completions=chats)) == [3, 3, 3]  # all three had been sent
    space: dict[str, Any] = {}
    exec(next(code for code in blocks.values() if "reward_funcs = [json_reward" in code), space)
    topic, total, tags = space["reward_funcs"]
    assert topic(completions=['{"topic": "refund"}', '{"topic": "other"}']) == [1.0, 0.0]
    assert total(completions=["that makes 18"], total=[18]) == [1.0]
    assert tags(completions=["<think>a</think> <answer>b</answer>", "b"]) == [1.0, 0.0]
    with closing(load_function("my_verifiers.py:is_even")) as is_even:
        assert is_even(prompts=["a", "a"], completions=["14", "15"]) == [1.0, 0.0]


def test_tools_and_world_of_the_page(blocks: dict[str, str]) -> None:
    (name,) = GRPOConfig.from_toml("tools.toml").environment.tools
    multiply, right = load_function(name), load_function("tools.py:right")
    assert tool_schema(multiply)["function"]["parameters"]["required"] == ["a", "b"]
    said = [{"role": "assistant", "content": ""}, {"role": "tool", "content": str(multiply(23, 17))}]
    assert right([[*said, {"role": "assistant", "content": "It is 391."}], said[:1]], product=[391, 391]) == [1.0, 0.0]
    Path("guess.py").write_text(next(code for code in blocks.values() if "class Guess(World)" in code))
    world = get_world("guess.py:Guess")
    environment = world.make()
    environment.reset(world.eval_tasks()[0], seed=0)
    assert [environment.step(each)[:3] for each in "23"][1] == ("Right!", 1.0, True)


def test_task_of_the_page_is_a_task_and_its_programs_are_tested(blocks: dict[str, str], capsys: Any) -> None:
    riddles = get_task("riddles.py:Riddles")
    row = riddles.train_rows(seed=0)[21]
    assert (row["answer"], len(riddles.eval_rows())) == ("42", 10)
    assert riddles.is_correct(" 42", row)
    assert not riddles.is_correct("41", row)
    assert riddles.reward_funcs[0](completions=[[{"role": "assistant", "content": "42"}]], answer=["42"]) == [1.0]
    code = next(code for code in blocks.values() if "with TestHarness() as harness" in code)
    exec(code, {})
    assert capsys.readouterr().out.strip() == re.search(r"print\(result\)  # (.*)", code)[1]  # type: ignore[index]
    tests = [json.loads(line) for line in next(b for name, b in blocks.items() if name.endswith(".json")).splitlines()]
    adding = "def add(a, b):\n    return a + b"  # called, and followed by statements
    reading = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    with closing(CodeReward(workers=1)) as reward:
        assert reward([adding, adding, reading], tests=tests) == [1.0, 1.0, 1.0]


def test_recipes_loss_and_estimator_of_the_pages_are_tried_before_training(blocks: dict[str, str]) -> None:
    for name, body in blocks.items():
        if name.endswith(".toml"):
            tomllib.loads(body)
            check_estimator(GRPOConfig.from_toml(name), None)
    check_estimator(GRPOConfig(loss_type="my_loss.py:gmpo", loss_parameters={"clip": 0.3}), None)
    recipe = (DOCS.parent / "recipes" / "gmpo" / "gmpo.py").read_text()
    without = re.sub(r'\A""".*?"""\n\n|\n    """.*?"""', "", recipe, flags=re.S)
    assert blocks["my_loss.py"].removeprefix("# my_loss.py\n") == without
    check_estimator(GRPOConfig(adv_estimator="my_advantages.py:against_the_batch", num_generations=1), None)
    Path("wrong.py").write_text("def short(step):\n    return step.rewards[:2]\n")
    with pytest.raises(ConfigError, match=r"returned shape \(2,\) for 4 completions"):
        check_estimator(GRPOConfig(adv_estimator="wrong.py:short"), None)

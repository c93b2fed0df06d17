"""Tools in recipes: what the model reads, what is recorded and scored, and runs that go on with the same numbers.

The model is real and so are its log-probabilities; only which token is drawn is written down, so that there are calls.
"""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import END_ID, tiny_model, tiny_tokenizer
from training_runs import Settings, StopAt, same_weights, steps_of

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.environments.actions import Call
from covey.errors import ConfigError, GenerationError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import device as engine_device
from covey.pytorch.engine.sampling import Draw
from covey.rollout.calls import AsyncRunner
from covey.rollout.tools import Calls, Order, Tool
from covey.rollout.turns import Row
from covey.training.setup import sampling_settings
from fakes import raises, slow

TOOLS = '''
import time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def repeat(times: int) -> str:
    """Say it again.

    Args:
        times: How often.
    """
    return "again " * times

def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "waited"

def rewarded(completions, answer, **columns):
    return [float(str(right) in said[-1]["content"]) + len(said) / 100 for said, right in zip(completions, answer)]
'''
ROWS = [
    {"prompt": "What is 3 + 4?", "answer": 7},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], "answer": 4},
]
SHOP = Path(__file__).parents[1] / "rollout" / "mcp_shop.py"
Script = Callable[[int, int], str]
"""(sample, turn) -> what is said in that turn."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def says(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """Engines draw a script's text and an end token, each with the model's own log-probability."""
    tokenizer = tiny_tokenizer()

    def draw(rows: list[Row], logits: torch.Tensor) -> Draw:
        chosen = [[*tokenizer(script(*row.stream[-2:])).input_ids, END_ID][row.sampled] for row in rows]
        tokens = torch.tensor(chosen)
        return Draw(tokens.numpy(), logits.float().log_softmax(-1)[torch.arange(len(rows)), tokens].numpy(), None)

    monkeypatch.setattr(engine_device, "draw_tokens", draw)


@pytest.fixture
def acting(settings: Settings, tmp_path: Path) -> Settings:
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    own = {"model": str(tmp_path / "model"), "dataset": str(tmp_path / "rows.jsonl"), "max_completion_length": 200}
    own |= {
        "tools": [f"{tmp_path}/tools.py:{name}" for name in ("add", "repeat", "wait")],
        "prompt_order": "given",
    }
    own |= {"functions": f"{tmp_path}/tools.py:rewarded", "max_conversation_tokens": 2000, "num_generations": 2}
    own |= {"prompt_order": "given"}
    return settings | own


def trainer(settings: Settings, **changes: Any) -> GRPOTrainer:
    callbacks = changes.pop("callbacks", None)
    return GRPOTrainer(args=GRPOConfig(**(settings | changes)), callbacks=callbacks)


def adding(sample: int, turn: int) -> str:
    return call("add", a=3, b=4) if (sample, turn) == (0, 0) else "It is 7." if sample == 0 else "Who knows?"


def test_what_is_read_recorded_and_scored(acting: Settings, monkeypatch: Any, covey: Command) -> None:
    says(monkeypatch, adding)
    run = trainer(acting, max_steps=1)
    run.train()
    folder = RunFolder.read(acting["output_dir"])
    rows = folder.read_completions(1)
    assert rows[0]["completion"] == f"> {call('add', a=3, b=4)}\n7\n> It is 7.\n(done)"
    assert [row["reward"] for row in rows] == pytest.approx([1.03, 0.01, 0.03, 0.01])
    assert [(turn["seen"], turn["said"]) for turn in json.loads(rows[0]["play"])] == [
        ("", call("add", a=3, b=4)),
        ("7", "It is 7."),
    ]
    assert [(row["turns"], row["ended"], row["error"]) for row in rows[:2]] == [(2, "done", ""), (1, "done", "")]
    (record,) = steps_of(run)
    assert (record["tools/call_frequency"], record["tools/failure_frequency"]) == (0.5, 0.0)
    assert record["sampling/sampling_logp_difference/max"] < 1e-4
    first, second = sampled(run)
    text = run.policy.tokenizer.decode(first.episodes[0].token_ids)
    assert text.startswith(
        "<|im_start|>system\nYou may call these functions:\n" + '{"name": "add", "description": "Add'
    )
    told = "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert (
        f"<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n{call('add', a=3, b=4)}"
        in text
    )
    assert text.endswith(f"{call('add', a=3, b=4)}<|im_end|>\n{told}It is 7.<|im_end|>")
    assert run.policy.tokenizer.decode(second.episodes[0].token_ids).startswith(
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:"
    )
    run.close()
    told = f"prompt: What is 3 + 4?\nmodel: {call('add', a=3, b=4)}\ntools: 7\nmodel: It is 7."
    assert covey("sample", acting["output_dir"], "What is 3 + 4?")[1].startswith(told)


def test_what_goes_wrong_is_told_and_the_answer_goes_on(acting: Settings, monkeypatch: Any, caplog: Any) -> None:
    told = {
        call("add", a=3): "missing a required argument: 'b'",
        call("subtract", a=3): "There is no tool subtract. There are: add, repeat, wait.",
        "<tool_call>{oops</tool_call>": "it is not JSON",
        call("wait", seconds=60): "wait took longer than 0.2 s",
        call("repeat", times=100): "again again again",
    }
    says(monkeypatch, lambda sample, turn: [*told, "done"][turn] if sample == 0 else "done")
    run = trainer(acting, step_seconds=0.2, max_observation_tokens=80)
    with caplog.at_level(logging.WARNING):
        group, _ = sampled(run)
    turns = group.with_tools[0].turns
    assert [words in turn.observation for words, turn in zip(told.values(), turns[1:], strict=True)] == [True] * 5
    assert len(turns[5].observation) == 80 + len(" [...]")
    assert group.episodes[0].text == "done"
    assert "the tool wait raised TimeoutError: wait took longer than 0.2 s" in caplog.text
    run.close()


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise self


def test_what_cannot_be_read_is_a_failure_and_calls_that_never_end_stop_the_run(caplog: Any) -> None:
    never = threading.Event()
    asked: dict[str, Tool] = {
        "text": lambda: UnreadableError(),
        "generator": lambda: (n for n in range(3)),
        "waits": never.wait,
    }

    async def soon() -> Any:
        return UnreadableError()

    def fails(error: Exception) -> None:
        raise error

    asked |= {
        "soon": soon,
        "error": lambda: fails(UnreadableError()),
        "long": lambda: fails(ValueError("x" * 5_000_000)),
    }
    calls = Calls(AsyncRunner(), 0.2)
    told = calls.run([Order(0, Call(name), asked) for name in asked])
    assert all(result.failed for result in told)
    assert "it returned a generator" in told[1].text
    assert [len(told[-1].text) < 101_000, len(caplog.text) < 50_000] == [True, True]
    again = [Order(0, Call("waits"), asked)] * 3
    raises(GenerationError, "tool 'waits': 3 calls that took longer than environment.step_seconds", calls.run, again)
    never.set()


def test_a_limit_of_turns(acting: Settings, monkeypatch: Any) -> None:
    says(monkeypatch, lambda sample, turn: call("add", a=turn, b=0))
    run = trainer(acting, max_turns=2)
    assert [len(trajectory.turns) for group in sampled(run) for trajectory in group.with_tools] == [2] * 4
    assert {episode.text for group in sampled(run) for episode in group.episodes} == {""}  # a call is no answer
    run.close()


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(acting: Settings, monkeypatch: Any) -> None:
    def script(sample: int, turn: int) -> str:
        return call("add", a=sample, b=turn) if turn < 1 + sample else f"It is {sample + turn}."

    says(monkeypatch, script)
    acting |= {"max_steps": 3, "save_steps": 1}
    whole = trainer(acting)
    whole.train()
    acting["output_dir"] += "-again"
    with pytest.raises(KeyboardInterrupt):
        trainer(acting, callbacks=[StopAt(2)]).train()
    again = trainer(acting)
    again.train(resume_from_checkpoint=True)
    assert same_weights(whole, again)
    same = ("loss", "reward", "tools/call_frequency", "grad_norm")
    assert [[step[name] for name in same] for step in steps_of(again)] == [
        [step[name] for name in same] for step in steps_of(whole)
    ]
    assert steps_of(whole)[0]["grad_norm"] > 0


@pytest.mark.slow
def test_a_server_that_dies_costs_its_episode(acting: Settings, monkeypatch: Any) -> None:
    pytest.importorskip("mcp")

    def script(sample: int, turn: int) -> str:
        first = call("trouble", kind="die") if sample == 1 else call("price", item="apple")
        return first if turn == 0 else "It is 7."

    says(monkeypatch, script)
    run = trainer(acting, tools=[f"mcp:python {SHOP}", *acting["tools"]], max_steps=2, parallel_episodes=3)
    run.train()
    rows = RunFolder.read(acting["output_dir"]).read_completions(1)
    assert [row["ended"] for row in rows] == ["done", "failed"] * 2
    assert rows[0]["completion"].startswith(f"> {call('price', item='apple')}\n3\n> It is 7.")
    assert "the till is broken" in rows[1]["error"]
    assert [row["reward"] is None or row["reward"] != row["reward"] for row in rows] == [False, True] * 2
    (first, _) = steps_of(run)
    assert (first["tools/failed_episodes"], first["tools/call_frequency"]) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": "house"}, "a world brings its own actions"),
        ({"history_length": 2}, "answers with tools are one conversation"),
        ({"action_format": "tags"}, "action_format='tags': calls are read as"),
        ({"show_actions": False}, "show_actions=False: it acts in worlds alone; remove"),
        ({"invalid_action_penalty": 0.1}, "invalid_action_penalty=0.1: it acts in worlds alone"),
        ({"tools": ["mcp:"]}, "names no tool"),
        ({"tools": ["tools.py:nothing"]}, "tools.py"),
        ({"tools": [f"{__file__}:ROWS"]}, "not a function"),
        ({"tools": [f"{__file__}:call"]}, "cannot be described to the model"),
        slow({"tools": ["mcp:nothing-at-all"]}, "did not start"),
    ],
)
def test_settings_that_cannot_be(acting: Settings, changes: Settings, words: str) -> None:
    raises(ConfigError, words, trainer, acting, **changes)


def test_names_of_tools_have_whole_paths(acting: Settings, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        '[environment]\ntools = ["tools.py:add", "mcp:python tools.py --fast", "mcp:http://a/b"]'
    )
    tools = GRPOConfig.from_toml(tmp_path / "recipe.toml").environment.tools
    assert tools == (f"{tmp_path}/tools.py:add", f"mcp:python {tmp_path}/tools.py --fast", "mcp:http://a/b")
    raises(ConfigError, "action_format='tool': must be tags . text . turn . call", GRPOConfig, action_format="tool")


def sampled(run: GRPOTrainer) -> Any:
    """Groups of two answers to each row."""
    streams = [(0, 0, n) for n in range(len(run.prompts))]
    how: dict[str, Any] = {"num_generations": 2, "streams": streams, "policy_version": run.state.policy_version}
    return run.collect(run.prompts, sampling_settings(run.args, run.policy, 1.0), **how).groups

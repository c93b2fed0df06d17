"""Agents written for TRL: tools, environments, rollout functions; and chat templates, tried when a trainer is made.

The model is real and so are its log-probabilities; only which token is drawn is written down, so that there are calls.
"""

import json
import logging
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_models import END_ID, tiny_model
from trl_runs import OPENS, TOOLS, TURNS, Seen, add, made, messages, moved_by_training, tokenizer_of, weights

import covey
from covey.environments.actions import Call, calls_in, parse_action
from covey.errors import ConfigError, DataError, GenerationError
from covey.pytorch.engine import device as engine_device
from covey.pytorch.engine.sampling import Draw
from covey.rollout.toolchat import ToolChat
from covey.rollout.turns import Row
from covey.tasks import build_prompts
from covey.training.tools import tool_schema
from covey.trl import GRPOTrainer
from covey.trl.loading import RewardModel
from covey.trl.rewards import think_format_reward
from fakes import raises

TEMPLATE = TOOLS + TURNS + OPENS
ROWS = [{"prompt": [{"role": "user", "content": text}], "secret": n} for n, text in enumerate(["Add", "Sum", "Plus"])]
NESTED = "<function=say>\n<parameter=text>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>"
SMALL = {"learning_rate": 0.01, "max_completion_length": 200, "max_steps": 1}
Script = Callable[[int, int], str]
"""(sample, turn) -> what is said in that turn."""
Agent = Callable[..., GRPOTrainer]


async def later(a: int, b: int) -> int:
    return a + b


later.__doc__ = add.__doc__


def broken(a: int) -> int:
    """Never works.

    Args:
        a: A number.
    """
    raise RuntimeError(f"no {a} today")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """A trainer whose engine draws a script's text and an end token, each with the model's own log-probability."""

    def make(script: Script | None, reward: Any = messages, rows: Any = ROWS, **what: Any) -> GRPOTrainer:
        tokenizer = tokenizer_of(TEMPLATE)

        def draw(rows: list[Row], logits: torch.Tensor) -> Draw:
            chosen = []
            for row in rows:
                _, _, _, sample, *turn = row.stream
                ids = tokenizer(script(sample, turn[0] if turn else 0))["input_ids"]  # type: ignore[misc]
                chosen.append([*ids, END_ID][row.sampled])
            tokens = torch.tensor(chosen)
            return Draw(tokens.numpy(), logits.float().log_softmax(-1)[torch.arange(len(rows)), tokens].numpy(), None)

        if script is not None:
            monkeypatch.setattr(engine_device, "draw_tokens", draw)
        model, out = tiny_model("llama", max_position_embeddings=4096), Path(tempfile.mkdtemp(dir=tmp_path))
        trainer: GRPOTrainer = made(model, out, reward, rows, **(SMALL | {"processing_class": tokenizer} | what))
        return trainer

    return make


def text_of(trainer: GRPOTrainer, episode: Any, sampled: bool = True) -> str:
    """What the policy has said, or all else."""
    return str(trainer.processing_class.decode(episode.token_ids[episode.sampled == sampled]))


def said(first: str, *others: str) -> Script:
    """Sample 0 calls, the others do not."""
    return lambda sample, turn: [first, *others][turn] if sample == 0 else ["no", "idea"][sample - 1]


def called(calls: float, failures: float) -> Any:
    return {"tools/call_frequency": pytest.approx(calls), "tools/failure_frequency": pytest.approx(failures)}


class TestTools:
    def test_what_is_trained_and_what_rewards_see(self, agent: Agent) -> None:
        seen = Seen()
        trainer = agent(said(f"Well. {call('add', a=3, b=4)}", "It is 7."), seen, tools=[add])
        rollout = trainer.run.rollout()
        (group,) = rollout.groups
        prompt, episode = group.prompt.content[0]["content"], group.episodes[0]
        asked = f"<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        first, second = f"Well. {call('add', a=3, b=4)}<|im_end|>", "It is 7.<|im_end|>"
        text = str(trainer.processing_class.decode(episode.token_ids))
        assert text == f"{asked}{first}\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n{second}"
        assert (text_of(trainer, episode), episode.finish_reason) == (first + second, "stop")
        completion, plain, _ = seen.all("completions")
        assert seen.all("prompts")[0] == [{"role": "user", "content": prompt}]
        function = {"name": "add", "arguments": {"a": 3, "b": 4}}
        assert completion == [
            {"role": "assistant", "content": "Well.", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "name": "add", "content": "7"},
            {"role": "assistant", "content": "It is 7."},
        ]
        assert (plain, group.rewards.tolist()) == ([{"role": "assistant", "content": "no"}], [3.0, 1.0, 1.0])
        assert (rollout.metrics, [tool.__name__ for tool in trainer.tools]) == (called(1 / 3, 0), ["add"])

    @pytest.mark.parametrize("lora", [False, True])
    def test_training(self, lora: bool, agent: Agent) -> None:
        def results(completions: list[Any], **_: Any) -> list[float]:
            return [sum(float(m["content"]) for m in completion if m["role"] == "tool") for completion in completions]

        def script(sample: int, turn: int) -> str:
            return call("add" if sample else "later", a=sample, b=turn) if turn < 2 else "done"

        peft = LoraConfig(target_modules=["q_proj", "v_proj"]) if lora else None
        trainer = agent(script, results, max_steps=2, logging_steps=1, tools=[add, later], peft_config=peft)
        assert moved_by_training(trainer) == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        record = trainer.state.log_history[0]
        assert (record["tools/call_frequency"], record["tools/failure_frequency"]) == (2.0, 0.0)
        # What the engine computed turn by turn is what the trainer computes of the whole sequence.
        assert record["sampling/sampling_logp_difference/max"] < 1e-4
        assert record["ratio/mean"] == pytest.approx(1, abs=1e-4)

    def test_a_generate_that_was_replaced(self, agent: Agent) -> None:
        """It is asked for all first turns at once, then for the next ones of those that have called."""
        trainer, asked = agent(None, tools=[add]), []

        def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            kept = zip(input_ids, attention_mask > 0, strict=True)
            asked.append([trainer.processing_class.decode(ids[mask]) for ids, mask in kept])
            turns = [call("add", a=3, b=4), "no", call("add", a=3, c=4)] if len(input_ids) == 3 else ["It is 7.", "Oh"]
            ids = [[*trainer.processing_class(turn)["input_ids"], END_ID] for turn in turns]
            return torch.cat([input_ids, torch.tensor([each + [0] * (99 - len(each)) for each in ids])], dim=1)

        trainer.model.generate = generate
        rollout = trainer.run.rollout()
        texts = [text_of(trainer, episode) for episode in rollout.groups[0].episodes]
        wrong = f"{call('add', a=3, c=4)}<|im_end|>Oh<|im_end|>"
        assert texts == [f"{call('add', a=3, b=4)}<|im_end|>It is 7.<|im_end|>", "no<|im_end|>", wrong]
        assert [len(prompts) for prompts in asked] == [3, 2]
        assert asked[1][0].endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
        assert rollout.metrics == called(2 / 3, 1 / 2)

    def test_failures(self, agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
        told = {
            call("broken", a=1): "{'error': 'no 1 today'}",
            call("broken", a=2): "no 2 today",
            call("add", a=3, c=4): "'b'",
            call("nothing"): "There is no tool nothing",
            "<tool_call>{oops</tool_call>": "it is not JSON",
            '<tool_call>{"a": 1}</tool_call>': "look like",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "object",
            call("add", a=1, b=1): "2",
        }
        seen = Seen()
        trainer = agent(said(*told, "done"), seen, tools=[add, broken], max_completion_length=2000)
        with caplog.at_level(logging.WARNING):
            rollout = trainer.run.rollout()
        texts = [message["content"] for message in seen.all("completions")[0] if message["role"] == "tool"]
        assert all(part in text for part, text in zip(told.values(), texts, strict=True)), texts
        assert (texts[0], texts[7]) == ("{'error': 'no 1 today'}", "2")
        assert rollout.metrics["tools/failure_frequency"] == pytest.approx(7 / 8)
        (spoken,) = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
        assert all(words in spoken for words in ("no 1 today", "test_trl_tools.py"))

    def test_several_calls_at_once_and_a_name_that_is_no_tool(self, agent: Agent) -> None:
        """Calls keep their order. U+2402 marks places of results in a template, and is not written there as a name."""
        calls = call("later", a=1, b=1) + call("add", a=2, b=2), call("\u24020\u2402")
        trainer = agent(said(*calls, "ok"), tools=[add, later], max_completion_length=2000)
        told = text_of(trainer, trainer.run.rollout().groups[0].episodes[0], sampled=False)
        two, wrong = told.split("<|im_start|>assistant")[1:3]
        assert two == "\n\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        assert (wrong.count("There is no tool"), wrong.count("<|im_start|>")) == (1, 1)

    def test_limits(self, agent: Agent) -> None:
        """`max_tool_calling_iterations` counts rounds, `max_completion_length` every token after the prompt."""

        def script(sample: int, turn: int) -> str:
            return call("add", a=sample, b=turn)

        trainer = agent(script, tools=[add], max_completion_length=400, max_tool_calling_iterations=2)
        rollout = trainer.run.rollout()
        assert rollout.metrics["tools/call_frequency"] == 2
        text = text_of(trainer, rollout.groups[0].episodes[0])
        assert text == "".join(f"{call('add', a=0, b=turn)}<|im_end|>" for turn in range(3))
        turn, reply = len(call("add", a=0, b=0)) + 1, len("\n\x00tool\n0\x00\n\x00assistant\n")
        for limit, trained in [(turn, turn), (turn + reply, turn), (turn + reply + 5, turn + 5), (turn - 3, turn - 3)]:
            (episode, *_) = agent(script, tools=[add], max_completion_length=limit).run.rollout().groups[0].episodes
            assert episode.num_sampled == trained, limit
            assert len(episode.token_ids) - episode.prompt_length <= limit
            assert episode.sampled[-1]
            assert episode.finish_reason == ("stop" if limit in (turn, turn + reply) else "length")

    def test_the_completion_that_calls(self, agent: Agent) -> None:
        callers = []

        def note(text: str, _completion_idx: int) -> str:
            """Note something.

            Args:
                text: What.
            """
            callers.append((_completion_idx, text, threading.current_thread() is threading.main_thread()))
            return "noted"

        trainer = agent(lambda sample, turn: "ok" if turn else call("note", text=str(sample)), tools=[note, add])
        trainer.run.rollout()
        assert sorted(callers) == [(0, "0", True), (1, "1", True), (2, "2", True)]
        assert trainer._tools_accept_completion_idx == {"note": True, "add": False}
        assert list(tool_schema(note)["function"]["parameters"]["properties"]) == ["text"]

    def test_a_tokenizer_that_reads_calls_itself(self, agent: Agent) -> None:
        trainer = agent(said("[[add]]", "ok"), tools=[add])
        function = {"name": "{content}", "arguments": {"a": 1, "b": 2}}
        calls = {"open": "[[", "close_pattern": r"\]\]", "repeats": True, "content": "text"}
        calls |= {"transform": {"type": "function", "function": function}}
        trainer.processing_class.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {"tool_calls": calls, "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
        }
        assert trainer.run.rollout().metrics == called(1 / 3, 0)

    def test_forms_of_calls(self) -> None:
        properties = {"text": {"type": "string"}, "n": {"type": "integer"}}
        schemas = [{"type": "function", "function": {"name": "say", "parameters": {"properties": properties}}}]
        for text, arguments in (
            ('x <tool_call>\n{"name": "say", "arguments": {"text": "1", "n": 2}}\n</tool_call>', {"text": "1", "n": 2}),
            ('x <tool_call>{"name": "say", "arguments": "{\\"n\\": 2}"}', {"n": 2}),
            (f"x <tool_call>\n{NESTED}\n</tool_call>", {"text": "1", "n": 2}),
            ('{"name": "say", "parameters": {"n": 2}}', {"n": 2}),
            ('{"name": "say", "arguments": {"n": 2}}', {"n": 2}),
            ('```json\n{"name": "say", "arguments": {"n": 2}}\n```', {"n": 2}),
            ('x\n```json\n{"name": "say", "arguments": {"n": 2}}\n```', None),
            ('```JSON\n{"name": "say", "arguments": {"n": 2}, "why": 1}```', {"n": 2}),
            ('x <tool_call>{"name": "say", "parameters": {"n": 2}}', {"n": 2}),
            ('[{"name": "say", "arguments": null}]', {}),
            ('{"name": "say", "n": 2}', None),
            ('x {"name": "say", "parameters": {"n": 2}}', None),
            ("x", None),
        ):
            content, calls = calls_in(text, schemas, ended=True, bare=True)
            assert calls == ([] if arguments is None else [Call("say", arguments)]), text
            assert content == (text if arguments is None else "x" if text.startswith("x") else "")
            assert (parse_action(text, "call") is None) == (arguments is None), text  # worlds read them alike
        both = calls_in(
            '<tool_call>[{"name": "f"}, {"name": "g", "arguments": 3}]</tool_call>', (), ended=True, bare=True
        )
        assert [(call.name, bool(call.problem)) for call in both[1]] == [("f", False), ("g", True)]
        for number in ("1e999", "NaN", "[-1e999]"):
            bare = f'{{"name": "say", "arguments": {{"n": {number}}}}}'
            for text in (bare, f"<tool_call>{bare}</tool_call>"):
                assert "not finite" in calls_in(text, schemas, ended=True, bare=True)[1][0].problem
                assert parse_action(text, "call") is None

    def test_calls_that_nobody_reads(self, caplog: pytest.LogCaptureFixture) -> None:
        """One that was cut off is none; of forms that are not read a warning tells."""
        cut = '<tool_call>{"name": "f"'
        assert calls_in(cut, (), ended=False, bare=True)[1] == []
        assert calls_in(cut, (), ended=True, bare=True)[1][0].problem
        ToolChat(tokenizer_of(TEMPLATE), (END_ID,), {})
        assert not caplog.records
        ToolChat(tokenizer_of(TEMPLATE.replace("tool_call>", "other>")), (END_ID,), {})
        assert "response_template" in caplog.text


class Counter:
    """Counts; the episode earns the count."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.resets: list[dict[str, Any]] = []

    def reset(self, **row: Any) -> str | None:
        self.count = 0
        self.resets.append(row)
        return f" {row['secret']}" if "secret" in row else None

    def increment(self, step: int) -> int:
        """Count on.

        Args:
            step: By so many.
        """
        self.count += step
        return self.count

    def _hidden(self) -> None: ...

    @property
    def never(self) -> int:
        raise AssertionError("properties are not looked at")


class Paid(Counter):
    def get_reward(self) -> float:
        return float(self.count)


class PaidLater(Counter):
    async def wait(self) -> str:
        """Wait for a while."""
        return "waited"

    async def get_reward(self) -> float:
        return float(2 * self.count)


class Looking(Counter):
    def look(self) -> str:
        """Look around."""
        return "a hall"


class Raising(Paid):
    def reset(self, **row: Any) -> str | None:
        raise OSError("no room")


def counting(sample: int, turn: int) -> str:
    return call("increment", step=sample + 1) if turn < 2 else "ok"


class TestEnvironments:
    def test_tools_resets_and_rewards(self, agent: Agent) -> None:
        Counter.made = 0
        seen = Seen(lambda environments, **_: [float(environment.count) for environment in environments])
        trainer = agent(counting, seen, environment_factory=Counter, tools=[add], max_steps=2)
        (group,) = trainer.run.rollout().groups
        text = trainer.processing_class.decode(group.episodes[0].token_ids[: group.episodes[0].prompt_length])
        system = "".join(f"<|im_start|>system\n{name}<|im_end|>\n" for name in ("add", "increment"))
        asked = f"{group.prompt.content[0]['content']} {group.prompt.columns['secret']}"
        assert text == f"{system}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        trainer.train()
        assert (Counter.made, [e.count for e in trainer.environments or []]) == (3, [2, 4, 6])
        assert [tool.__name__ for tool in trainer.tools] == ["add", "increment"]
        row, *others = seen.all("environments")[0].resets
        assert (row.keys(), len(others)) == ({"prompt", "secret"}, 2)
        assert seen.all("prompts")[0][-1]["content"] == f"{row['prompt'][-1]['content']} {row['secret']}"
        assert (trainer.reward_func_names, trainer.state.log_history[-1]["rewards/seen/mean"]) == (["seen"], 4)

    @pytest.mark.parametrize(("factory", "factor"), [(Paid, 1), (PaidLater, 2)])
    def test_rewards_of_their_own(self, factory: Any, factor: int, agent: Agent) -> None:
        """Without reward functions and without data."""
        trainer = agent(counting, None, None, environment_factory=factory)
        assert trainer.reward_func_names == [factory.__name__]
        trainer.train()
        last = trainer.state.log_history[-1]
        assert last[f"rewards/{factory.__name__}/mean"] == last["reward"] == 4 * factor

    def test_weights_beside_reward_functions(self, agent: Agent) -> None:
        trainer = agent(counting, environment_factory=Paid, reward_weights=[0.5])
        assert trainer.reward_weights.tolist() == [0.5, 1.0]
        assert trainer.run.rollout().groups[0].rewards.tolist() == [0.5 * 5 + 2, 0.5 * 5 + 4, 0.5 * 5 + 6]

    def test_several_kinds(self, agent: Agent) -> None:
        rows = [{"environment": "paid", "level": 1}, {"environment": "other", "level": 2}]
        kinds = {"environment_factory": {"paid": Paid, "other": Looking}, "shuffle_dataset": False}
        trainer = agent(said(call("look"), "ok"), messages, rows, generation_batch_size=6, **kinds)
        paid, other = trainer.run.rollout().groups
        assert trainer.reward_func_names == ["messages", "Paid"]
        assert np.isnan(other.reward_parts["Paid"]).all()
        assert paid.reward_parts["Paid"].tolist() == [0, 0, 0]
        texts = [trainer.processing_class.decode(group.episodes[0].token_ids) for group in (paid, other)]
        for text, name, told in zip(texts, ("increment", "look"), ("error", "a hall"), strict=True):
            assert all(words in text for words in (f"{name}<|im_end|>", told))
        assert [e.resets[0]["level"] for e in trainer.environments or []] == [1, 1, 1, 2, 2, 2]
        with pytest.raises(ValueError, match="is none of those"):
            trainer.run.rollout([{"prompt": ROWS[0]["prompt"], "environment": "third"}])

    def test_evaluations(self, agent: Agent) -> None:
        rows = [{"secret": n} for n in range(5)]
        trainer = agent(counting, None, rows, eval_dataset=rows, environment_factory=Paid)
        metrics = trainer.evaluate()
        assert (metrics["eval_rewards/Paid/mean"], metrics["eval_tools/call_frequency"]) == (4, 2)
        assert len(trainer.environments or []) == 3  # no more at once than a training step has


WRONG_ROLLOUTS = [({"logprobs": None}, "logprobs has a NoneType"), ({"logprobs": [[-1.0]] * 3}, "equally many")]
WRONG_ROLLOUTS += [({"completion_ids": [[1]]}, "completion_ids has 1 for 3 prompts")]
WITHOUT_RESULTS = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}"


def test_what_cannot_be(agent: Agent) -> None:
    for what, rows, message in (
        ({"tools": [add], "processing_class": tokenizer_of(WITHOUT_RESULTS)}, ROWS, "tool"),
        ({"tools": [lambda x: x]}, ROWS, "Args"),
        ({"tools": [add], "rollout_func": lambda prompts, trainer: {}}, ROWS, "leave one out"),
        ({"environment_factory": object}, ROWS, "no method reset"),
        ({"environment_factory": Counter, "reward": None}, ROWS, "without a reward"),
        ({"environment_factory": Paid, "reward": None, "max_steps": -1}, None, "max_steps"),
        ({"environment_factory": {"a": Paid}, "reward": None}, None, "name one"),
    ):
        raises(ValueError, message, agent, None, rows=rows, **what)


def test_episodes_that_cannot_begin(agent: Agent) -> None:
    raises(RuntimeError, r"no room at .*test_trl_tools.py", agent(None, None, environment_factory=Raising).train)
    raises(ValueError, "plain text", agent(None, rows=[{"prompt": "text"}], environment_factory=Counter).run.rollout)


class TestRolloutFunctions:
    @pytest.mark.parametrize(("told", "least", "most"), [(-100.0, 70, 100), (None, 0, 1e-5), (float("nan"), 0, 1e-5)])
    def test_training(self, told: float | None, least: float, most: float, agent: Agent) -> None:
        """What is told is compared with the policy's own; one that is not told is the policy's own."""
        asked: list[Any] = []

        def roll(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
            asked.append((prompts, trainer.num_generations))
            return {
                "prompt_ids": [[5, 6, 7]] * len(prompts),
                "completion_ids": [[20 + n, 21, 22, END_ID] for n in range(len(prompts))],
                "logprobs": [[told] * 4] * len(prompts),
                "env_mask": [[1, 0, 1, 1]] * len(prompts),
                "earned": [float(n) for n in range(len(prompts))],
                "note": "shared",
            }

        def reward(completions: list[Any], earned: list[float], note: list[str], **_: Any) -> list[float]:
            assert (set(note), completions[0][0]["role"]) == ({"shared"}, "assistant")
            return earned

        trainer = agent(None, reward, rollout_func=roll, logging_steps=1)
        assert moved_by_training(trainer) == set(weights(trainer))
        (prompts, group), *_ = asked
        assert (len(prompts), group, prompts[0]) == (3, 3, prompts[2])
        record = trainer.state.log_history[0]
        assert (record["rewards/reward/mean"], record["completions/mean_length"]) == (1, 3)
        assert record["ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert least <= record["sampling/sampling_logp_difference/max"] <= most

    @pytest.mark.parametrize(("change", "message"), WRONG_ROLLOUTS, ids=str)
    def test_what_is_wrong_is_said(self, change: dict[str, Any], message: str, agent: Agent) -> None:
        whole = {"prompt_ids": [[5]] * 3, "completion_ids": [[6, 7]] * 3, "logprobs": [[-1.0, -1.0]] * 3}
        raises(GenerationError, message, agent(None, rollout_func=lambda prompts, trainer: whole | change).train)


FOLLOWED = "{% if loop.nextitem is defined and loop.nextitem['role'] == 'tool' and m['role'] == 'tool' %}"
LAST_ONLY = TURNS.replace("{{ '<|im_start|>'", FOLLOWED + "{% else %}{{ '<|im_start|>'")
LAST_ONLY = LAST_ONLY.replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
HIDDEN = TURNS.replace("messages %}", "messages if m['role'] != 'tool' %}", 1)
ASKED = [
    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}},
    {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
]
TRACE: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?", "tool_calls": None, "name": None},
    {"role": "assistant", "content": None, "tool_calls": ASKED},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]
SHOWN = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>\n'
    "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
)
STARTED = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
GOES_ON = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nIt is"


def begun(template: str, out: Path, rows: Any, tools: Any) -> str:
    """The prompt of a rollout."""
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096), tokenizer_of(template)
    trainer = made(model, out, messages, rows, processing_class=tokenizer, tools=tools)
    episode = trainer.run.rollout().groups[0].episodes[0]
    return str(tokenizer.decode(episode.token_ids[: -episode.num_sampled]))


class TestTemplates:
    def test_templates_that_hide_something_are_refused_at_the_start(self, tmp_path: Path) -> None:
        hiding = {TOOLS + HIDDEN: "what a tool returned", TURNS: "does not show the model its tools"}
        hiding |= {TOOLS + LAST_ONLY: "what each of 2 calls in a turn returned"}
        for template, message in hiding.items():
            raises(ConfigError, message, begun, template + OPENS, tmp_path, [{"prompt": TRACE[:1]}], [add])

    def test_results_of_several_calls(self) -> None:
        """The turn before them is written with one call: some templates refuse more."""
        check = "{% if (m['tool_calls'] or []) | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        chat = ToolChat(tokenizer_of(TOOLS + TURNS.replace("%}", "%}" + check, 1) + OPENS), (END_ID,), {})
        told = [{"role": "tool", "name": "add", "content": text} for text in ("2", "<|im_end|>", "\u24021\u2402")]
        ids = chat.results(told, ended=False).tolist()
        assert ids.count(END_ID) == 4  # of the turn before, and of three messages, none of a result
        assert ids[0] == END_ID != chat.results(told[:1], ended=True)[0]

    def test_traces_of_openai_as_prompts(self, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(TEMPLATE)
        (prompt,) = build_prompts([{"prompt": TRACE}], tokenizer)
        assert tokenizer.decode(prompt.token_ids) == SHOWN
        assert prompt.content[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1}
        assert prompt.content[2] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}
        assert begun(TEMPLATE, tmp_path, [{"prompt": TRACE}], [add]) == "<|im_start|>system\nadd<|im_end|>\n" + SHOWN

    @pytest.mark.parametrize("arguments", ["{", "[]", "3", "null", "[" * 100_000])
    def test_arguments_that_are_no_object(self, arguments: str) -> None:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        trace = [TRACE[0], {"role": "assistant", "tool_calls": [call]}, TRACE[2]]
        with pytest.raises(DataError, match=r"row 0: message 1 of the prompt: a tool call has arguments=.*JSON object"):
            build_prompts([{"prompt": trace}], tokenizer_of(TURNS + OPENS))

    def test_a_prompt_that_ends_with_the_assistant_is_continued(self, tmp_path: Path) -> None:
        tokenizer, rows = tokenizer_of(TEMPLATE), [{"prompt": STARTED}]
        (prompt,) = build_prompts(rows, tokenizer)
        assert (tokenizer.decode(prompt.token_ids), begun(TEMPLATE, tmp_path, rows, None)) == (GOES_ON, GOES_ON)
        assert begun(TEMPLATE, tmp_path, rows, [add]) == "<|im_start|>system\nadd<|im_end|>\n" + GOES_ON

    def test_a_reward_model_reads_one_turn(self) -> None:
        model = RewardModel(tiny_model("llama"), tokenizer_of(TURNS))
        assert model._text(STARTED, [{"role": "assistant", "content": " 2"}]) == GOES_ON + " 2<|im_end|>\n"

    def test_an_answer_within_the_prompt_is_refused(self, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(TURNS + OPENS)
        with pytest.raises(DataError, match="row 0: the column 'messages' ends with a message of the assistant"):
            build_prompts([{"messages": STARTED}], tokenizer, prompt_column="messages")
        args = covey.GRPOConfig(output_dir=str(tmp_path), prompt_column="messages", num_generations=2)
        with pytest.raises(DataError, match="an answer leaves nothing to ask"):
            covey.GRPOTrainer(tiny_model("llama"), messages, args, [{"messages": STARTED}], processing_class=tokenizer)
        for last in (TRACE[1], {"role": "assistant", "content": " \n"}):
            with pytest.raises(DataError, match="ends with a message of the assistant"):
                build_prompts([{"prompt": [TRACE[0], last]}], tokenizer)
        assert build_prompts([{"messages": STARTED[:1]}], tokenizer, prompt_column="messages")

    def test_the_run_knows_that_the_template_opened_the_thought(self, model_folder: Path, tmp_path: Path) -> None:
        seen = Seen(think_format_reward)
        opening = {"processing_class": tokenizer_of("{{ messages[0]['content'] }}{{ ' <think>' }}"), "logging_steps": 1}
        made(model_folder, tmp_path, seen, ROWS, **opening, max_completion_length=4, max_steps=1).train()
        assert all(end.endswith("<think>") for end in seen.all("prompt_ends"))
        first = (tmp_path / "covey" / "metrics.jsonl").read_text().splitlines()[0]
        assert json.loads(first)["prompts/opened_tag"] == 1.0

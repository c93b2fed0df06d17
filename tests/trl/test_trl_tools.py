"""Agents written for TRL: tools, environments and rollout functions, on a tiny model whose tokens are dictated.

The model is real and so are its log-probabilities; only which token is drawn is written down, so that there are calls.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import END_ID, tiny_model, tiny_tokenizer
from trl_runs import SMALL as SMALL_RUN

from covey.errors import GenerationError
from covey.pytorch.engine import device as engine_device
from covey.pytorch.engine.sampling import Draw
from covey.rollout.turns import Row
from covey.trl import GRPOConfig, GRPOTrainer
from covey.trl.toolchat import ToolChat, calls_in
from covey.trl.tools import Call, tool_schema

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool['function']['name'] + '\n' }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [{"prompt": [{"role": "user", "content": text}], "secret": n} for n, text in enumerate(["Add", "Sum", "Plus"])]
SMALL = SMALL_RUN | {"learning_rate": 0.01, "max_completion_length": 200, "max_steps": 1}
Script = Callable[[int, int], str]
"""(sample, turn) -> what is said in that turn."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


async def later(a: int, b: int) -> int:
    """Add two numbers, in time.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def broken(a: int) -> int:
    """Never works.

    Args:
        a: A number.
    """
    raise RuntimeError(f"no {a} today")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def messages(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def dictate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], None]:
    """Sets what the engine draws: the script's text and an end token, each with the model's own log-probability."""
    tokenizer = tiny_tokenizer()

    def install(script: Script) -> None:
        def draw(rows: list[Row], logits: torch.Tensor) -> Draw:
            chosen = []
            for row in rows:
                _, _, _, sample, *turn = row.stream
                ids = tokenizer(script(sample, turn[0] if turn else 0))["input_ids"]
                chosen.append([*ids, END_ID][row.sampled])
            tokens = torch.tensor(chosen)
            logprobs = logits.float().log_softmax(-1)[torch.arange(len(rows)), tokens]
            return Draw(tokens.numpy(), logprobs.numpy(), None)

        monkeypatch.setattr(engine_device, "draw_tokens", draw)

    return install


def trainer_of(
    folder: Path, reward: Any = messages, rows: Any = ROWS, /, *, more: Any = None, **what: Any
) -> GRPOTrainer:
    args = GRPOConfig(str(folder.parent / "out"), **(SMALL | (more or {})))
    return GRPOTrainer(str(folder), reward, args, rows, **what)


def trained_text(trainer: GRPOTrainer, episode: Any) -> str:
    return str(trainer.processing_class.decode(episode.token_ids[episode.sampled]))


def said(first: str, *others: str) -> Script:
    """Sample 0 calls, the others do not."""
    return lambda sample, turn: [first, *others][turn] if sample == 0 else ["no", "idea"][sample - 1]


class TestTools:
    def test_what_is_trained_and_what_rewards_see(
        self, folder: Path, dictate: Callable[[Script], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        dictate(said(f"Well. {call('add', a=3, b=4)}", "It is 7."))
        seen: list[Any] = []

        def reward(prompts: list[Any], completions: list[Any], secret: list[int], **_: Any) -> list[float]:
            seen.extend(zip(prompts, completions, strict=True))
            return [float(len(completion)) for completion in completions]

        trainer = trainer_of(folder, reward, tools=[add])
        rollout = trainer.run.rollout()
        episode = rollout.groups[0].episodes[0]
        text = str(trainer.processing_class.decode(episode.token_ids))
        prompt = rollout.groups[0].prompt.content[0]["content"]
        asked = f"<|im_start|>system\nadd\n<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        first, second = f"Well. {call('add', a=3, b=4)}<|im_end|>", "It is 7.<|im_end|>"
        assert text == f"{asked}{first}\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n{second}"
        assert trained_text(trainer, episode) == first + second
        assert episode.finish_reason == "stop"
        (asked_for, completion), (_, plain), _ = seen
        assert asked_for == [{"role": "user", "content": prompt}]
        function = {"name": "add", "arguments": {"a": 3, "b": 4}}
        assert completion == [
            {"role": "assistant", "content": "Well.", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "name": "add", "content": "7"},
            {"role": "assistant", "content": "It is 7."},
        ]
        assert plain == [{"role": "assistant", "content": "no"}]
        assert rollout.groups[0].rewards.tolist() == [3.0, 1.0, 1.0]
        assert rollout.metrics == {"tools/call_frequency": pytest.approx(1 / 3), "tools/failure_frequency": 0.0}
        assert [tool.__name__ for tool in trainer.tools] == ["add"]

    @pytest.mark.parametrize("lora", [False, True])
    def test_training(self, lora: bool, folder: Path, dictate: Callable[[Script], None]) -> None:
        from peft import LoraConfig

        dictate(lambda sample, turn: call("add" if sample else "later", a=sample, b=turn) if turn < 2 else "done")
        peft = {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])} if lora else {}
        trainer = trainer_of(
            folder, lengths_of_results, more={"max_steps": 2, "logging_steps": 1}, tools=[add, later], **peft
        )
        before = {name: p.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        assert all(not torch.equal(old, trainer.model.get_parameter(name)) for name, old in before.items())
        record = trainer.state.log_history[0]
        assert (record["tools/call_frequency"], record["tools/failure_frequency"]) == (2.0, 0.0)
        # What the engine computed turn by turn is what the trainer computes of the whole sequence.
        assert record["sampling/sampling_logp_difference/max"] < 1e-4
        assert record["ratio/mean"] == pytest.approx(1, abs=1e-4)

    def test_a_generate_that_was_replaced(self, folder: Path) -> None:
        """It is asked for all first turns at once, then for the next ones of those that have called."""
        trainer, asked = trainer_of(folder, tools=[add]), []

        def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            kept = zip(input_ids, attention_mask > 0, strict=True)
            asked.append([trainer.processing_class.decode(ids[mask]) for ids, mask in kept])
            turns = [call("add", a=3, b=4), "no", call("add", a=3, c=4)] if len(input_ids) == 3 else ["It is 7.", "Oh"]
            ids = [[*trainer.processing_class(turn)["input_ids"], END_ID] for turn in turns]
            return torch.cat([input_ids, torch.tensor([each + [0] * (99 - len(each)) for each in ids])], dim=1)

        trainer.model.generate = generate
        rollout = trainer.run.rollout()
        texts = [trained_text(trainer, episode) for episode in rollout.groups[0].episodes]
        wrong = f"{call('add', a=3, c=4)}<|im_end|>Oh<|im_end|>"
        assert texts == [f"{call('add', a=3, b=4)}<|im_end|>It is 7.<|im_end|>", "no<|im_end|>", wrong]
        assert [len(prompts) for prompts in asked] == [3, 2]
        assert asked[1][0].endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
        assert rollout.metrics == {
            "tools/call_frequency": pytest.approx(2 / 3),
            "tools/failure_frequency": pytest.approx(1 / 2),
        }

    def test_failures(self, folder: Path, dictate: Callable[[Script], None], caplog: pytest.LogCaptureFixture) -> None:
        calls = [
            call("broken", a=1),
            call("broken", a=2),
            call("add", a=3, c=4),
            call("nothing"),
            "<tool_call>{oops</tool_call>",
            '<tool_call>{"a": 1}</tool_call>',
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            call("add", a=1, b=1),
            "done",
        ]
        dictate(said(*calls))
        seen: list[Any] = []

        def reward(completions: list[Any], **_: Any) -> list[float]:
            seen.extend(completions)
            return [0.0] * len(completions)

        trainer = trainer_of(folder, reward, tools=[add, broken], more={"max_completion_length": 2000})
        with caplog.at_level(logging.WARNING):
            rollout = trainer.run.rollout()
        told = [message["content"] for message in seen[0] if message["role"] == "tool"]
        assert told[0] == "{'error': 'no 1 today'}"
        for text, part in zip(
            told[2:], ["'b'", "There is no tool nothing", "no JSON", "look like", "object"], strict=False
        ):
            assert part in text
        assert told[7] == "2"
        assert rollout.metrics["tools/failure_frequency"] == pytest.approx(7 / 8)
        spoken = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
        assert len(spoken) == 1
        assert "no 1 today" in spoken[0]
        assert "test_trl_tools.py" in spoken[0]

    def test_several_calls_at_once_keep_their_order(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        dictate(said(call("later", a=1, b=1) + call("add", a=2, b=2), "ok"))
        trainer = trainer_of(folder, tools=[add, later])
        (episode, *_) = trainer.run.rollout().groups[0].episodes
        text = trainer.processing_class.decode(episode.token_ids[~episode.sampled])
        assert text.endswith("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")

    def test_a_name_that_is_no_tool_is_not_written_into_the_template(
        self, folder: Path, dictate: Callable[[Script], None]
    ) -> None:
        """U+2402 marks the places of results in a template; in a name it would move them."""
        dictate(said(call("\u24020\u2402"), "ok"))
        trainer = trainer_of(folder, tools=[add])
        episode = trainer.run.rollout().groups[0].episodes[0]
        told = trainer.processing_class.decode(episode.token_ids[~episode.sampled])
        assert told.count("There is no tool") == 1
        assert told.count("<|im_start|>assistant") == 2  # the prompt's, and that of the second turn

    def test_limits(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        """`max_tool_calling_iterations` counts rounds, `max_completion_length` every token after the prompt."""
        dictate(lambda sample, turn: call("add", a=sample, b=turn))
        trainer = trainer_of(folder, tools=[add], more={"max_completion_length": 400, "max_tool_calling_iterations": 2})
        rollout = trainer.run.rollout()
        assert rollout.metrics["tools/call_frequency"] == 2
        (episode, *_) = rollout.groups[0].episodes
        assert trained_text(trainer, episode) == "".join(f"{call('add', a=0, b=turn)}<|im_end|>" for turn in range(3))
        turn, reply = len(call("add", a=0, b=0)) + 1, len("\n\x00tool\n0\x00\n\x00assistant\n")
        for limit, trained in [(turn, turn), (turn + reply, turn), (turn + reply + 5, turn + 5), (turn - 3, turn - 3)]:
            folder_of = folder.parent / str(limit)
            args = GRPOConfig(str(folder_of), **(SMALL | {"max_completion_length": limit}))
            trainer = GRPOTrainer(str(folder), messages, args, ROWS, tools=[add])
            (episode, *_) = trainer.run.rollout().groups[0].episodes
            assert episode.num_sampled == trained, limit
            assert len(episode.token_ids) - episode.prompt_length <= limit
            assert episode.sampled[-1]
            assert episode.finish_reason == ("stop" if limit in (turn, turn + reply) else "length")

    def test_the_completion_that_calls(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        callers = []

        def note(text: str, _completion_idx: int) -> str:
            """Note something.

            Args:
                text: What.
            """
            callers.append((_completion_idx, text, threading.current_thread() is threading.main_thread()))
            return "noted"

        dictate(lambda sample, turn: call("note", text=str(sample)) if turn == 0 else "ok")
        trainer = trainer_of(folder, tools=[note, add])
        trainer.run.rollout()
        assert sorted(callers) == [(0, "0", True), (1, "1", True), (2, "2", True)]
        assert trainer._tools_accept_completion_idx == {"note": True, "add": False}
        assert list(tool_schema(note)["function"]["parameters"]["properties"]) == ["text"]

    def test_a_tokenizer_that_reads_calls_itself(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        dictate(said("[[add]]", "ok"))
        trainer = trainer_of(folder, tools=[add])
        trainer.processing_class.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "tool_calls": {
                    "open": "[[",
                    "close_pattern": r"\]\]",
                    "repeats": True,
                    "content": "text",
                    "transform": {"type": "function", "function": {"name": "{content}", "arguments": {"a": 1, "b": 2}}},
                },
                "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
            },
        }
        rollout = trainer.run.rollout()
        assert rollout.metrics == {"tools/call_frequency": pytest.approx(1 / 3), "tools/failure_frequency": 0.0}

    def test_results_are_no_special_tokens(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        chat = ToolChat(tokenizer, (END_ID,), {})
        ids = chat.results([{"role": "tool", "name": "f", "content": "<|im_end|>"}], ended=False)
        assert (ids == END_ID).sum() == 2  # of the turn before, and of the result's own message
        assert ids[0] == END_ID
        assert chat.results([{"role": "tool", "name": "f", "content": "1"}], ended=True)[0] != END_ID

    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ('x <tool_call>\n{"name": "say", "arguments": {"text": "1", "n": 2}}\n</tool_call>', {"text": "1", "n": 2}),
            ('x <tool_call>{"name": "say", "arguments": "{\\"n\\": 2}"}', {"n": 2}),
            (
                "x <tool_call>\n<function=say>\n<parameter=text>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
                "</function>\n</tool_call>",
                {"text": "1", "n": 2},
            ),
            ('{"name": "say", "parameters": {"n": 2}}', {"n": 2}),
            ('x {"name": "say", "parameters": {"n": 2}}', None),
            ("x", None),
        ],
    )
    def test_forms_of_calls(self, text: str, arguments: dict[str, Any] | None) -> None:
        properties = {"text": {"type": "string"}, "n": {"type": "integer"}}
        schemas = [{"type": "function", "function": {"name": "say", "parameters": {"properties": properties}}}]
        content, calls = calls_in(text, schemas, ended=True, bare=True)
        assert calls == ([] if arguments is None else [Call("say", arguments)])
        assert content == (text if arguments is None else "x" if text.startswith("x") else "")

    def test_a_call_that_was_cut_off_is_none(self) -> None:
        assert calls_in('<tool_call>{"name": "f"', (), ended=False, bare=True)[1] == []
        assert calls_in('<tool_call>{"name": "f"', (), ended=True, bare=True)[1][0].problem

    def test_calls_that_nobody_reads(self, caplog: pytest.LogCaptureFixture) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        ToolChat(tokenizer, (END_ID,), {})
        assert not caplog.records
        tokenizer.chat_template = TEMPLATE.replace("tool_call>", "other>")
        ToolChat(tokenizer, (END_ID,), {})
        assert "response_template" in caplog.text

    def test_a_template_that_cannot(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}"
        with pytest.raises(ValueError, match="tool"):
            trainer_of(folder, tools=[add], processing_class=tokenizer)
        with pytest.raises(ValueError, match="Args"):
            trainer_of(folder, tools=[lambda x: x])
        with pytest.raises(ValueError, match="leave one out"):
            trainer_of(folder, tools=[add], rollout_func=lambda prompts, trainer: {})


def lengths_of_results(completions: list[Any], **_: Any) -> list[float]:
    return [sum(float(m["content"]) for m in completion if m["role"] == "tool") for completion in completions]


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


def counting(sample: int, turn: int) -> str:
    return call("increment", step=sample + 1) if turn < 2 else "ok"


class TestEnvironments:
    def test_tools_resets_and_rewards(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        dictate(counting)
        Counter.made = 0
        seen: list[Any] = []

        def reward(prompts: list[Any], completions: list[Any], environments: list[Counter]) -> list[float]:
            seen.extend(zip(prompts, environments, strict=True))
            return [float(environment.count) for environment in environments]

        trainer = trainer_of(folder, reward, environment_factory=Counter, more={"max_steps": 2})
        trainer.train()
        assert Counter.made == 3
        assert {"count": [e.count for e in trainer.environments or []]} == {"count": [2, 4, 6]}
        assert [tool.__name__ for tool in trainer.tools] == ["increment"]
        row = seen[0][1].resets[0]
        assert row.keys() == {"prompt", "secret"}
        assert seen[0][0][-1]["content"] == f"{row['prompt'][-1]['content']} {row['secret']}"
        assert len(seen[0][1].resets) == 2
        assert trainer.reward_func_names == ["reward"]
        assert trainer.state.log_history[-1]["rewards/reward/mean"] == 4

    def test_the_model_reads_what_a_reset_says(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        dictate(counting)
        trainer = trainer_of(folder, environment_factory=Counter, tools=[add])
        group = trainer.run.rollout().groups[0]
        text = trainer.processing_class.decode(group.episodes[0].token_ids[: group.episodes[0].prompt_length])
        asked = f"{group.prompt.content[0]['content']} {group.prompt.columns['secret']}"
        assert text == (
            f"<|im_start|>system\nadd\nincrement\n<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    @pytest.mark.parametrize(("factory", "factor"), [(Paid, 1), (PaidLater, 2)])
    def test_rewards_of_their_own(
        self, factory: Any, factor: int, folder: Path, dictate: Callable[[Script], None]
    ) -> None:
        """Without reward functions and without data."""
        dictate(counting)
        trainer = trainer_of(folder, None, None, environment_factory=factory)
        assert trainer.reward_func_names == [factory.__name__]
        trainer.train()
        assert trainer.state.log_history[-1][f"rewards/{factory.__name__}/mean"] == 4 * factor
        assert trainer.state.log_history[-1]["reward"] == 4 * factor

    def test_weights_beside_reward_functions(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        dictate(counting)
        trainer = trainer_of(folder, messages, environment_factory=Paid, more={"reward_weights": [0.5]})
        assert trainer.reward_weights.tolist() == [0.5, 1.0]
        assert trainer.run.rollout().groups[0].rewards.tolist() == [0.5 * 5 + 2, 0.5 * 5 + 4, 0.5 * 5 + 6]

    def test_several_kinds(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        class Other(Counter):
            def look(self) -> str:
                """Look around."""
                return "a hall"

        dictate(lambda sample, turn: call("look") if turn == 0 else "ok")
        rows = [{"environment": "paid", "level": 1}, {"environment": "other", "level": 2}]
        trainer = trainer_of(
            folder,
            messages,
            rows,
            environment_factory={"paid": Paid, "other": Other},
            more={"generation_batch_size": 6, "shuffle_dataset": False},
        )
        paid, other = trainer.run.rollout().groups
        assert trainer.reward_func_names == ["messages", "Paid"]
        assert np.isnan(other.reward_parts["Paid"]).all()
        assert paid.reward_parts["Paid"].tolist() == [0, 0, 0]
        decode = trainer.processing_class.decode
        assert "increment\n<|im_end|>" in decode(paid.episodes[0].token_ids)
        assert "look\n<|im_end|>" in decode(other.episodes[0].token_ids)
        assert "error" in decode(paid.episodes[0].token_ids)
        assert "a hall" in decode(other.episodes[0].token_ids)
        assert [e.resets[0]["level"] for e in trainer.environments or []] == [1, 1, 1, 2, 2, 2]
        with pytest.raises(ValueError, match="is none of those"):
            trainer.run.rollout([{"prompt": ROWS[0]["prompt"], "environment": "third"}])

    def test_evaluations(self, folder: Path, dictate: Callable[[Script], None]) -> None:
        dictate(counting)
        rows = [{"secret": n} for n in range(5)]
        trainer = trainer_of(folder, None, rows, eval_dataset=rows, environment_factory=Paid)
        metrics = trainer.evaluate()
        assert metrics["eval_rewards/Paid/mean"] == 4
        assert metrics["eval_tools/call_frequency"] == 2
        assert len(trainer.environments or []) == 3  # no more at once than a training step has

    def test_what_cannot_be(self, folder: Path) -> None:
        class Bare:
            pass

        class Raises(Paid):
            def reset(self, **row: Any) -> str | None:
                raise OSError("no room")

        with pytest.raises(ValueError, match="no method reset"):
            trainer_of(folder, environment_factory=Bare)
        with pytest.raises(ValueError, match="without a reward"):
            trainer_of(folder, None, environment_factory=Counter)
        with pytest.raises(ValueError, match="max_steps"):
            trainer_of(folder, None, None, environment_factory=Paid, more={"max_steps": -1})
        with pytest.raises(ValueError, match="name one"):
            trainer_of(folder, None, None, environment_factory={"a": Paid})
        with pytest.raises(RuntimeError, match=r"no room at .*test_trl_tools.py"):
            trainer_of(folder, None, environment_factory=Raises).train()
        with pytest.raises(ValueError, match="plain text"):
            trainer_of(folder, messages, [{"prompt": "text"}], environment_factory=Counter).run.rollout()


class TestRolloutFunctions:
    @pytest.mark.parametrize(("told", "least", "most"), [(-100.0, 70, 100), (None, 0, 1e-5), (float("nan"), 0, 1e-5)])
    def test_training(self, told: float | None, least: float, most: float, folder: Path) -> None:
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
            assert set(note) == {"shared"}
            assert completions[0][0]["role"] == "assistant"
            return earned

        trainer = trainer_of(folder, reward, rollout_func=roll, more={"logging_steps": 1})
        before = {name: p.clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        (prompts, group), *_ = asked
        assert (len(prompts), group, prompts[0]) == (3, 3, prompts[2])
        assert all(not torch.equal(old, trainer.model.get_parameter(name)) for name, old in before.items())
        record = trainer.state.log_history[0]
        assert record["rewards/reward/mean"] == 1
        assert record["completions/mean_length"] == 3
        assert record["ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert least <= record["sampling/sampling_logp_difference/max"] <= most

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"logprobs": None}, "logprobs has a NoneType"),
            ({"completion_ids": [[1]]}, "completion_ids has 1 for 3 prompts"),
            ({"logprobs": [[-1.0]] * 3}, "equally many"),
        ],
        ids=str,
    )
    def test_what_is_wrong_is_said(self, change: dict[str, Any], message: str, folder: Path) -> None:
        def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            whole = {"prompt_ids": [[5]] * 3, "completion_ids": [[6, 7]] * 3, "logprobs": [[-1.0, -1.0]] * 3}
            return whole | change

        with pytest.raises(GenerationError, match=message):
            trainer_of(folder, rollout_func=roll).train()

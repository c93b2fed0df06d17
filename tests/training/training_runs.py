"""Runs of a few steps that the tests of this room make, and what they look at in them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from covey import GRPOConfig, GRPOTrainer
from covey.observe.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))  # for its worlds

Settings = dict[str, Any]
ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
HOUSE: Settings = {"world": "house:rooms=2,num_train=6,num_eval=3", "action_format": "choice"}
HOUSE |= {"max_conversation_tokens": 600, "max_completion_length": 16}


def rewarding(name: str, score: Callable[[str], float | None]) -> Any:
    """A reward function of each completion by itself."""

    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        return [score(text) for text in completions]

    reward.__name__ = name
    return reward


letters = rewarding("letters", lambda text: sum(c.isalpha() for c in text) / 8)
distinct = rewarding("distinct", lambda text: len(set(text)) / 8)
few_vowels = rewarding("few_vowels", lambda text: sum(c not in "aeiou" for c in text) / max(len(text), 1))
first_letter_early = rewarding("first_letter_early", lambda text: float(text[:1].lower() < "n"))
always = rewarding("always", lambda text: 1.0)


def failing_at(call: int) -> Any:
    """A reward function, named fragile, that raises in its `call`-th call."""
    calls: list[int] = []

    def fragile(completions: list[str], **columns: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError("no such luck")
        return letters(completions)

    return fragile


class StopAt:
    """A callback: Ctrl+C at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def build(settings: Settings, rewards: Any = letters, held_out: int = 0, name: str = "", **changes: Any) -> GRPOTrainer:
    """A trainer on `ROWS`, or on the world that the settings name; in a folder `name` beside the settings' own."""
    data: Settings = {"callbacks": changes.pop("callbacks", None)}
    if name:
        changes["output_dir"] = str(Path(settings["output_dir"]).with_name(name))
    args = GRPOConfig(**(settings | changes))
    if not args.world:
        data |= {"reward_funcs": rewards, "train_dataset": ROWS, "eval_dataset": ROWS[:held_out] or None}
    return GRPOTrainer(args=args, **data)


def trained(*arguments: Any, resume: Any = False, **changes: Any) -> GRPOTrainer:
    """`resume`: a step, or True for the last checkpoint."""
    trainer = build(*arguments, **changes)
    if type(resume) is int:
        resume = Path(trainer.args.output_dir, "checkpoints", f"step_{resume:06d}")
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_of(run: GRPOTrainer | Path | str) -> list[dict[str, Any]]:
    """What is recorded of a run's steps, without its evaluations."""
    records = run.state.log_history if isinstance(run, GRPOTrainer) else RunFolder.read(run).read_metrics()
    return [record for record in records if "loss" in record]


def events(run: Path | str, kind: str) -> list[str]:
    return [event["message"] for event in RunFolder.read(run).read_events() if event["kind"] == kind]


def same_weights(*runs: Any) -> bool:
    """Of two trainers, or of tensors by their names."""
    one, other = (run.policy.state_dict() if isinstance(run, GRPOTrainer) else run for run in runs)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

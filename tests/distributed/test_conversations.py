"""Agents on a fleet: turns go to the conversation's member, and to another one if that dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from covey import GRPOConfig, GRPOTrainer
from covey.distributed import start
from covey.distributed.fleet import Fleet
from covey.distributed.members import Held, Member, MemberError, done, in_thread
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND
from covey.rollout.learning import TrainedPolicy
from covey.types import Completion, Progress, Request, SamplingSettings


class EngineMember:
    """An engine of its own, behind a thread; `dies` says which of all calls it does not survive."""

    def __init__(
        self, engine: Any, calls: Counter[str], asked: dict[tuple[int, ...], set[int]], dies: set[int]
    ) -> None:
        self.engine, self.calls, self.asked, self.dies = engine, calls, asked, dies
        self.name, self.context_length = f"engine {id(self):x}", engine.context_length

    def load(self, held: Held) -> Future[str]:
        self.engine.publish(held.weights)
        return done(held.sha256)

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        self.calls["begun"] += 1
        if self.calls["begun"] in self.dies:
            future: Future[list[Completion]] = Future()
            future.set_exception(MemberError("died"))
            return future
        for request in requests:
            self.asked.setdefault(tuple(request.stream[:-1]), set()).add(id(self))
        return in_thread(lambda: self.engine(requests, settings, policy_version=version))

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None: ...


@pytest.fixture
def play(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def played(name: str, dies: Sequence[int] = (), **changes: Any) -> tuple[list[list[str]], Any, GRPOTrainer]:
        asked: dict[tuple[int, ...], set[int]] = {}
        calls: Counter[str] = Counter()

        def fleet(config: GRPOConfig, policy: TrainedPolicy) -> Fleet:
            def make(again: bool) -> Future[Member]:
                engine = BACKEND.make_sampler(config, policy)
                return done(EngineMember(engine, calls, asked, set(dies)))

            return start._fleet(config, [make] * (config.distributed.samplers or 0))

        monkeypatch.setattr(start, "_actors", fleet)
        world = {
            "world": "house:rooms=2,num_train=6,num_eval=3",
            "max_conversation_tokens": 600,
            "max_completion_length": 16,
            "eval_on_start": False,
            "output_dir": str(tmp_path / name),
        }
        trainer = GRPOTrainer(args=GRPOConfig(**(settings | world | changes)))
        trainer.train()
        folder = RunFolder.read(trainer.args.run.output_dir)
        return [[row["completion"] for row in folder.read_completions(step)] for step in (1, 2)], asked, trainer

    return played


@pytest.mark.parametrize(
    "how", [{"action_format": "choice"}, {"action_format": "tags", "stop_strings": ("e",)}], ids=str
)
def test_agents_play_as_in_one_process(play: Any, how: dict[str, Any]) -> None:
    here, _, _ = play("here", **how)
    there, asked, _ = play("there", samplers=3, **how)
    assert there[0] == here[0]
    assert sum(a == b for a, b in zip(there[1], here[1], strict=True)) >= 7  # weights differ in the last digits
    assert {len(members) for members in asked.values()} == {1}  # a conversation stays where it is
    assert len(set.union(*asked.values())) == 3


def test_a_death_costs_turns_and_no_episode(play: Any) -> None:
    here, _, _ = play("here", action_format="choice")
    there, _, trainer = play("there", dies=[2, 5, 9], samplers=2, action_format="choice")
    assert there[0] == here[0]
    assert sum(a == b for a, b in zip(there[1], here[1], strict=True)) >= 7
    steps = [record for record in trainer.state.log_history if "loss" in record]
    assert sum(record["samplers/restarts"] for record in steps) == 3
    assert all(record["agent/failed_episodes"] == 0 for record in steps)


def test_histories_that_start_anew_each_turn(play: Any) -> None:
    how = {"history_length": 1, "max_conversation_tokens": 400, "action_format": "choice"}
    here, _, _ = play("here", **how)
    there, _, _ = play("there", samplers=2, **how)
    assert there[0] == here[0]

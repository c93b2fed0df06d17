"""Agents on a fleet and on ranks: who samples, who dies, and how fast worlds are change nothing that is said."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from runs import ended_well, learned, train

from covey import GRPOConfig, GRPOTrainer
from covey.distributed import in_turns, start
from covey.distributed.fleet import Fleet
from covey.distributed.members import Held, Member, MemberError, done, in_thread
from covey.distributed.ranks import Ranks
from covey.environments.pool import EnvironmentPool
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND
from covey.rollout.learning import TrainedPolicy
from covey.training.launch import RanksBackend
from covey.types import Completion, Progress, Request, SamplingSettings
from fakes import slow

WORLD = {"world": "house:rooms=2,num_train=6,num_eval=3", "max_conversation_tokens": 600}
WORLD |= {"max_completion_length": 16, "eval_on_start": False}
CHOICE = {"action_format": "choice"}
STEPS = {"history_length": 1, "max_conversation_tokens": 400, **CHOICE}


Asked = dict[tuple[int, ...], set[int]]
"""Conversation -> members that were asked for it."""


class EngineMember:
    """An engine of its own, behind a thread; `dies` says which of all calls it does not survive."""

    def __init__(self, engine: Any, calls: Iterator[int], asked: Asked, dies: Sequence[int]) -> None:
        self.engine, self.calls, self.asked, self.dies = engine, calls, asked, dies
        self.name, self.context_length = f"engine {id(self):x}", engine.context_length

    def load(self, held: Held) -> Future[str]:
        self.engine.publish(held.weights)
        return done(held.sha256)

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        if next(self.calls) in self.dies:
            future: Future[list[Completion]] = Future()
            future.set_exception(MemberError("died"))
            return future
        for request in requests:
            self.asked.setdefault(tuple(request.stream[:-1]), set()).add(id(self))
        return in_thread(lambda: self.engine(requests, settings, policy_version=version))

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None: ...


@pytest.fixture
def play(settings: dict[str, Any], tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def played(name: str, *, ranks: bool = False, **changes: Any) -> GRPOTrainer:
        args = GRPOConfig(**(settings | WORLD | changes | {"output_dir": str(tmp_path / name)}))
        trainer = GRPOTrainer(args=args, backend=RanksBackend(Ranks()) if ranks else None)
        trainer.train()
        return trainer

    return played


def said(trainer: GRPOTrainer) -> list[list[str]]:
    folder = RunFolder.read(trainer.args.run.output_dir)
    return [[row["completion"] for row in folder.read_completions(step)] for step in (1, 2)]


def assert_alike(here: GRPOTrainer, there: GRPOTrainer) -> None:
    """In the first step: then weights differ in their last digits."""
    ours, theirs = said(here), said(there)
    assert theirs[0] == ours[0]
    assert sum(a == b for a, b in zip(theirs[1], ours[1], strict=True)) >= 7


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Samplers are engines of this process, of which some calls die."""

    def made(*dies: int) -> Asked:
        asked, calls = Asked(), itertools.count(1)

        def actors(config: GRPOConfig, policy: TrainedPolicy) -> Fleet:
            def make(again: bool) -> Future[Member]:
                return done(EngineMember(BACKEND.make_sampler(config, policy), calls, asked, dies))

            return start._fleet(config, [make] * (config.distributed.samplers or 0))

        monkeypatch.setattr(start, "_actors", actors)
        return asked

    return made


TAGS = {"action_format": "tags", "stop_strings": ("e",)}


@pytest.mark.parametrize("how", [CHOICE, slow(TAGS), slow(STEPS)], ids=str)
def test_agents_play_as_in_one_process(play: Any, fleet: Any, how: dict[str, Any]) -> None:
    here, asked = play("here", **how), fleet()
    assert_alike(here, play("there", samplers=3, **how))
    assert {len(members) for members in asked.values()} == {1}  # a conversation stays where it is
    assert len(set.union(*asked.values())) == 3
    fleet(2, 5, 9)
    killed = play("killed", samplers=2, **how)
    assert_alike(here, killed)
    steps = [record for record in killed.state.log_history if "loss" in record]
    assert sum(record["samplers/restarts"] for record in steps) == 3
    assert all(record["agent/failed_episodes"] == 0 for record in steps)


def numbers(trainer: GRPOTrainer | Path) -> Any:
    folder = trainer if isinstance(trainer, Path) else trainer.args.run.output_dir
    return learned(folder, without=("agent/waiting_share", "eval/agent/waiting_share"))


@pytest.mark.parametrize("how", [CHOICE, STEPS, {"action_format": "tags", "parallel_episodes": 3}], ids=str)
@pytest.mark.slow
def test_speed_and_who_samples_change_nothing(play: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = play("first", ranks=True, **how)
    assert_alike(play("here", **how), first)
    wait, luck, held = EnvironmentPool.wait, random.Random(5), list[Any]()

    def one_at_a_time(pool: EnvironmentPool, seconds: float | None = None) -> list[Any]:
        if not held:
            held.extend(wait(pool, seconds))
        return [held.pop(luck.randrange(len(held)))] if held else []

    def backwards(ranks: Ranks, sizes: list[int], work: Any) -> list[Any]:
        found = {number: result for number in reversed(range(len(sizes))) for result in work([number])}
        return [found[number] for number in range(len(sizes))]

    monkeypatch.setattr(EnvironmentPool, "wait", one_at_a_time)
    monkeypatch.setattr(in_turns, "run_shared", backwards)
    again = play("again", ranks=True, **how)
    assert (numbers(again), said(again)) == (numbers(first), said(first))


@pytest.mark.slow
def test_one_and_two_ranks_have_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f'[model]\nmodel = "{model_folder}"\nlora_r = 4\n')
    chosen = {"sampling.num_generations": 4, "sampling.max_completion_length": 16, "data.prompts_per_step": 2}
    chosen |= {"environment.max_conversation_tokens": 600, "schedule.max_steps": 2, "distributed.groups_per_unit": 1}
    words = {"environment.world": WORLD["world"], "environment.action_format": "choice"}
    words |= {"evaluation.eval_on_start": "false"}
    for ranks in (1, 2):
        ended_well(train(ranks, tmp_path, tmp_path / f"run-{ranks}", **chosen, **words))
    assert numbers(tmp_path / "run-1") == numbers(tmp_path / "run-2")

"""Scoring by pieces gives what scoring in one call gives. (In Ray actors: test_ray.py.)"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import data, learned

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.reward_workers import RewardHost, Rewards, RewardWorkers
from covey.distributed.start import scale_scoring
from covey.errors import ConfigError, RewardError
from covey.functions import USER_FILES, load_function
from covey.observe.doctor import diagnose
from covey.rollout.scoring import Asked, Scorer
from covey.types import Episode, Prompt
from fakes import raises


def by_row(completions: list[str], answer: list[str | None], **columns: Any) -> list[float | None]:
    return [None if a is None else len(c) / 3 + (c == a) for c, a in zip(completions, answer, strict=True)]


def by_group(prompts: list[str], completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
    """How much longer than the mean of its group a completion is."""
    log_extra("length", [len(c) for c in completions])
    for completion in completions:
        log_metric("length", len(completion) / 7)
    means = {p: np.mean([len(c) for q, c in zip(prompts, completions, strict=True) if q == p]) for p in prompts}
    return [float(len(c) - means[p]) for p, c in zip(prompts, completions, strict=True)]


async def later(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    return [trainer_state.global_step + ("e" in c) for c in completions]


def ranks(completions: list[str]) -> list[float]:
    """Compares the rows of all groups."""
    order = sorted(range(len(completions)), key=lambda n: (len(completions[n]), n))
    return [float(order.index(n)) for n in range(len(completions))]


ranks.whole_batch = True  # type: ignore[attr-defined]


def rows(groups: int, size: int = 2) -> tuple[list[Prompt], list[Episode]]:
    rng = np.random.default_rng(groups)
    prompts, episodes = [], []
    for group in range(groups):
        columns = {} if group % 3 == 2 else {"answer": "e" * (group % 4)}
        prompts += [Prompt(np.arange(1, 4), f"say {group}", columns, str(group))] * size
        for _ in range(size):
            text = "".join(rng.choice(list("aeiou"), size=int(rng.integers(0, 6))))
            ids = np.arange(3 + len(text) + 1)
            episodes.append(Episode(ids, ids >= 3, np.zeros(len(ids), np.float32), text, "stop", 1))
    return prompts, episodes


FUNCTIONS = [by_row, ranks, by_group, later]


def scorer(functions: Any = FUNCTIONS) -> Scorer:
    made = Scorer(functions, timeout=20.0)
    made.trainer_state = SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])
    return made


def in_pieces(unit_size: int = 4, functions: Any = FUNCTIONS) -> Scorer:
    made = scorer(functions)
    made.elsewhere = RewardWorkers.here(scorer(functions), unit_size)
    return made


def found(one: Scorer, groups: int) -> tuple[Any, ...]:
    rewards, parts = one.score(*rows(groups))
    logged = one.take_logged()
    return rewards.tobytes(), {name: values.tobytes() for name, values in parts.items()}, logged.metrics, logged.columns


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.sampled_from([1, 2, 4, 100]))
def test_pieces_score_as_one_call(groups: int, unit_size: int) -> None:
    one = in_pieces(unit_size)
    assert found(one, groups) == found(scorer(), groups)
    one.close()


def test_pieces_are_whole_groups_and_the_first_two_are_compared_once() -> None:
    asked, whole = list[int](), in_pieces(3)
    made: Any = whole.elsewhere
    score = made._score
    made._score = lambda pieces: asked.extend(len(piece.asked.episodes) for piece in pieces) or score(pieces)
    for _ in range(2):
        whole.score(*rows(5))
    assert asked == [4, 4, 2, 8, 4, 4, 2]


def test_one_that_compares_groups_and_does_not_say_so_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def rank(completions: list[str]) -> list[float]:
        return ranks(completions)

    in_pieces(4, [rank, by_row]).score(*rows(4))
    (warning,) = [record.getMessage() for record in caplog.records if "reward function" in record.getMessage()]
    assert warning.startswith("reward function 'rank' gave sample ")
    assert "set rank.whole_batch = True" in warning
    caplog.clear()
    in_pieces().score(*rows(4))
    assert "reward function" not in caplog.text


def test_an_error_names_the_sample_of_the_step() -> None:
    def strict(completions: list[str]) -> list[Any]:
        return [float(len(c)) if len(c) < 5 else "long" for c in completions]

    prompts, episodes = rows(8)
    first = next(n for n, episode in enumerate(episodes) if len(episode.text) >= 5)
    assert first >= 4
    with pytest.raises(RewardError, match=rf"reward function 'strict' .*is {first} of the step") as raised:
        in_pieces(4, [strict]).score(prompts, episodes)
    assert (raised.value.sample, raised.value.function) == (first, "strict")


@pytest.mark.parametrize("changes", [pytest.param({"max_staleness": 1}, marks=pytest.mark.slow), {}], ids=str)
def test_a_run_by_pieces_is_the_run_in_one_call(by_units: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for name, workers in (("whole", None), ("pieces", 0)):
        args = GRPOConfig(**(by_units | changes | {"reward_workers": workers, "output_dir": str(tmp_path / name)}))
        GRPOTrainer(args=args, **data()).train()
        runs.append(learned(tmp_path / name))
    assert runs[0] == runs[1]


def test_what_compares_the_whole_batch_is_left_to_this_process() -> None:
    assert [spec.whole_batch for spec in Scorer([partial(ranks), by_row]).specs] == [True, False]
    with pytest.raises(ConfigError, match=r"distributed.reward_workers=2: ranks has whole_batch = True"):
        scale_scoring(GRPOConfig(reward_workers=2), Scorer(ranks), named=False)


def test_files_must_be_there_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "mine.py", "def correct(completions, **columns):\n    return [1.0 for c in completions]\n"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("covey.functions.USER_FILES", USER_FILES)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    load_function("mine.py:correct")
    try:
        sent = Rewards.of(GRPOConfig(functions=("mine.py:correct",)), b"")
        (function,) = sent.make()
        assert function(["a"]) == [1.0]
        path.write_text(text.replace("1.0", "2.0"))
        raises(ConfigError, r"mine.py: on .* it is another file; copy it to every machine", sent.make)
        path.unlink()
        raises(ConfigError, r"mine.py: on .* there is no such file; copy it", sent.make)
        raises(ConfigError, "no such task", replace(sent, hashes={}, config=GRPOConfig(task="riddle")).make)
    finally:
        USER_FILES.pop(next(name for name, file in USER_FILES.items() if file == str(path)))


def test_slow_scoring_is_named() -> None:
    def said(**metrics: float) -> list[str]:
        steps = [{"loss": 0.1, "step_time": 20.0, "time/sampling": 9.0, **metrics}] * 6
        return [each.fix for each in diagnose(steps) if each.code == "scoring_slow"]

    assert said(**{"time/scoring": 1.9}) == []
    (fix,) = said(**{"time/scoring": 2.1})
    assert "distributed.reward_workers" in fix
    assert said(**{"time/scoring": 9.0, "time/waiting_for_samples": 0.3}) == []  # beside the update
    assert said(**{"time/scoring": 0.2, "step_time": 0.9}) == []


def test_warnings_of_workers_are_heard_here(caplog: pytest.LogCaptureFixture) -> None:
    def grumbling(completions: list[str]) -> list[float]:
        logging.getLogger("mine").warning("a strange completion")
        return [0.0 for _ in completions]

    host = RewardHost(Rewards.of(GRPOConfig(), b""))
    host._scorer = scorer([grumbling])
    scored, warnings = host.score(Asked(*rows(1), None, (), None))
    assert warnings == [("mine", logging.WARNING, "a strange completion")]
    assert np.isfinite(scored.parts["grumbling"]).all()

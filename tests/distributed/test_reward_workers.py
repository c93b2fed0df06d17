"""Scoring by workers gives what scoring in one call gives, whatever happens to the workers."""

from __future__ import annotations

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
from reward_cases import Workplace, by_group, by_row, later, ranks, rows
from run_cases import events, learned
from test_one_process import data

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.reward_workers import Rewards
from covey.distributed.start import scale_scoring
from covey.errors import ConfigError, RewardError
from covey.functions import USER_FILES, load_function
from covey.observe.doctor import diagnose
from covey.rollout.scoring import Scorer

FUNCTIONS = [by_row, ranks, by_group, later]


def scorer(functions: Any = FUNCTIONS) -> Scorer:
    made = Scorer(functions, timeout=20.0)
    made.trainer_state = SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])
    return made


def found(one: Scorer, groups: int) -> tuple[Any, ...]:
    rewards, parts = one.score(*rows(groups))
    logged = one.take_logged()
    return rewards.tobytes(), {name: values.tobytes() for name, values in parts.items()}, logged.metrics, logged.columns


def pooled(place: Workplace, workers: int, functions: Any = FUNCTIONS, **options: Any) -> Scorer:
    made = scorer(functions)
    made.elsewhere = place.workers(workers, **options)
    return made


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["", "", "die", "hang", "late", "too few"]), max_size=12).filter(
        lambda faults: sum(map(bool, faults)) < 3
    ),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([1, 2, 4, 100]),
)
def test_workers_score_as_one_process(faults: list[str], workers: int, groups: int, unit_size: int) -> None:
    place = Workplace(scorer())
    one = pooled(place, workers, unit_size=unit_size)
    place.faults += faults
    assert found(one, groups) == found(scorer(), groups)
    one.close()


def test_pieces_are_whole_groups_and_the_first_two_are_compared_once() -> None:
    place = Workplace(scorer())
    one = pooled(place, 1, unit_size=3)
    for _ in range(2):
        one.score(*rows(5))
    assert place.pieces == [4, 4, 2, 8, 4, 4, 2]


def test_one_that_compares_groups_and_does_not_say_so_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def rank(completions: list[str]) -> list[float]:
        return ranks(completions)

    one = pooled(Workplace(scorer([rank, by_row])), 2, [rank, by_row])
    one.score(*rows(4))
    (warning,) = [record.getMessage() for record in caplog.records if "reward function" in record.getMessage()]
    assert warning.startswith("reward function 'rank' gave sample ")
    assert "set rank.whole_batch = True" in warning
    caplog.clear()
    pooled(Workplace(scorer()), 2).score(*rows(4))
    assert "reward function" not in caplog.text


def test_the_whole_batch_of_a_partial() -> None:
    assert [spec.whole_batch for spec in Scorer([partial(ranks), by_row]).specs] == [True, False]


def test_an_error_names_the_sample_of_the_step() -> None:
    def strict(completions: list[str]) -> list[Any]:
        return [float(len(c)) if len(c) < 5 else "long" for c in completions]

    prompts, episodes = rows(8)
    first = next(n for n, episode in enumerate(episodes) if len(episode.text) >= 5)
    assert first >= 4
    one = pooled(Workplace(scorer([strict])), 1, [strict])
    with pytest.raises(RewardError, match=rf"reward function 'strict' .*is {first} of the step") as raised:
        one.score(prompts, episodes)
    assert raised.value.sample == first
    assert raised.value.function == "strict"
    place = Workplace(scorer())
    assert found(pooled(place, 1), 8) == found(scorer(), 8)  # and nothing is left of it


def test_three_workers_that_fail_at_the_same_rows() -> None:
    place = Workplace(scorer())
    one = pooled(place, 2, unit_size=100)
    place.faults += ["die", "", "die", "", "die"]
    with pytest.raises(RewardError, match=r"3 reward workers failed one after another while they scored .*rows 0, 1;"):
        one.score(*rows(2))


def test_what_happened_is_told_and_counted() -> None:
    place = Workplace(scorer())
    workers = place.workers(2)
    one = scorer()
    one.elsewhere = workers
    place.faults += ["hang"]
    one.score(*rows(6))
    (sentence,) = workers.take_news()
    assert sentence.startswith("reward worker 1 (fake) failed while scoring: silent for 10 s")
    counted = workers.take_metrics()
    assert counted["reward_workers/reissued_units"] == counted["reward_workers/restarts"] == 1
    assert counted["time/reward_workers_waiting"] > 0


@pytest.mark.parametrize("changes", [{}, {"max_staleness": 1}], ids=str)
def test_a_run_by_pieces_is_the_run_in_one_call(
    by_units: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for name, workers in (("whole", None), ("pieces", 0)):
        args = GRPOConfig(**(by_units | changes | {"reward_workers": workers, "output_dir": str(tmp_path / name)}))
        GRPOTrainer(args=args, **data()).train()
        runs.append(learned(tmp_path / name, without=("reward_workers/",)))
    assert runs[0] == runs[1]
    assert events(tmp_path / "pieces", "reward worker") == []


def test_nothing_is_left_for_workers() -> None:
    with pytest.raises(ConfigError, match=r"distributed.reward_workers=2: ranks has whole_batch = True"):
        scale_scoring(GRPOConfig(reward_workers=2), Scorer(ranks), named=False)


def test_files_must_be_there_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def correct(completions, **columns):\n    return [1.0 for c in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("covey.functions.USER_FILES", USER_FILES)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    load_function("mine.py:correct")
    try:
        sent = Rewards.of(GRPOConfig(functions=("mine.py:correct",)), b"")
        (function,) = sent.make()
        assert function(["a"]) == [1.0]
        path.write_text("def correct(completions, **columns):\n    return [2.0 for c in completions]\n")
        with pytest.raises(ConfigError, match=r"mine.py: on .* it is another file; copy it to every machine"):
            sent.make()
        path.unlink()
        with pytest.raises(ConfigError, match=r"mine.py: on .* there is no such file; copy it"):
            sent.make()
        with pytest.raises(ConfigError, match="no such task"):
            replace(sent, hashes={}, config=GRPOConfig(task="riddle")).make()
    finally:
        USER_FILES.pop(next(name for name, file in USER_FILES.items() if file == str(path)))


def test_slow_scoring_is_named() -> None:
    def said(**metrics: float) -> list[str]:
        steps = [{"loss": 0.1, "step_time": 20.0, "time/sampling": 9.0, **metrics}] * 6
        return [each.fix for each in diagnose(steps) if each.code == "scoring_slow"]

    assert said(**{"time/scoring": 1.9}) == []
    (fix,) = said(**{"time/scoring": 2.1})
    assert "distributed.reward_workers" in fix
    (fix,) = said(**{"time/scoring": 2.1, "reward_workers/restarts": 0.0})
    assert fix == "Use more distributed.reward_workers"
    assert said(**{"time/scoring": 9.0, "time/waiting_for_samples": 0.3}) == []  # beside the update
    assert said(**{"time/scoring": 0.2, "step_time": 0.9}) == []


def test_warnings_of_workers_are_heard_here(caplog: pytest.LogCaptureFixture) -> None:
    from covey.distributed.reward_workers import RewardHost
    from covey.rollout.scoring import Asked

    def grumbling(completions: list[str]) -> list[float]:
        logging.getLogger("mine").warning("a strange completion")
        return [0.0 for _ in completions]

    host = RewardHost(Rewards.of(GRPOConfig(), b""))
    host._scorer = scorer([grumbling])
    prompts, episodes = rows(1)
    _, warnings = host.score(Asked(prompts, episodes, None, (), None))
    assert warnings == [("mine", logging.WARNING, "a strange completion")]
    assert np.isfinite(one_score(host, prompts, episodes)).all()


def one_score(host: Any, prompts: Any, episodes: Any) -> Any:
    from covey.rollout.scoring import Asked

    return host.score(Asked(prompts, episodes, None, (), None))[0].parts["grumbling"]

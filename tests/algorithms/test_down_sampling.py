"""Which completions of a group are trained on: rules by hand and by trying all, and what they leave of a batch."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey import GRPOConfig
from covey.algorithms.down_sampling import DOWN_SAMPLING, find_down_sampling
from covey.config.algorithm import AlgorithmConfig
from covey.config.data import RewardConfig
from covey.config.environment import EnvironmentConfig
from covey.errors import ConfigError
from covey.rollout.batching import make_batch
from covey.training.step import episode_credit
from covey.types import Batch, Episode, Group, Trajectory, Turn
from fakes import fake_prompt


def group(rewards: list[float], lengths: list[int] | None = None) -> Group:
    episodes = tuple(
        Episode(np.arange(n + 1), np.arange(n + 1) > 0, np.full(n + 1, -0.5, np.float32), "", "stop", 0)
        for n in lengths or [2] * len(rewards)
    )
    values = np.array(rewards, np.float64)
    return Group(fake_prompt(), episodes, values, {"reward": values})


def chosen(rule: str, size: int, rewards: list[float], lengths: list[int] | None = None) -> list[int]:
    return np.flatnonzero(find_down_sampling(f"{rule}:{size}")(group(rewards, lengths))).tolist()


def batch_of(groups: list[Group], **changes: Any) -> Batch:
    section = AlgorithmConfig(**{"scale_rewards": "none"} | changes)
    more = {"reward_weights": (1.0,), "max_completion_length": 64}
    return make_batch(groups, section, RewardConfig(), EnvironmentConfig(), **more)


def test_rules_by_hand() -> None:
    assert chosen("max_variance", 2, [0, 0, 1, 2]) == [0, 3]
    assert chosen("max_variance", 4, [1, 1, 0, 1, 1, 0, 1]) == [0, 1, 2, 5]
    assert chosen("largest_advantage", 2, [0, 0.4, 0.5, 3]) == [0, 3]
    assert chosen("shortest", 2, [0, 1, 1, 0], [5, 4, 3, 4]) == [1, 2]
    assert chosen("token_efficiency", 2, [0, 1, 1, 3], [1, 4, 3, 30]) == [1, 2]
    assert chosen("first", 2, [0, 1, 1, 3]) == [0, 1]


@pytest.mark.parametrize("rule", DOWN_SAMPLING)
def test_what_could_not_be_scored_is_never_chosen(rule: str) -> None:
    nan = float("nan")
    assert chosen(rule, 2, [nan, 1, 0, nan]) == chosen(rule, 3, [nan, 1, 0, nan]) == [1, 2]
    assert chosen(rule, 2, [nan] * 3) == chosen(rule, 4, [1, 0, 1]) == chosen(rule, 4, [0, 1, 2, nan, nan]) == [0, 1, 2]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=8), st.integers(1, 7))
def test_no_subset_varies_more(rewards: list[int], size: int) -> None:
    kept = chosen("max_variance", size, list(map(float, rewards)))
    assert len(kept) == min(size, len(rewards))
    best = max(np.var([rewards[n] for n in some]) for some in combinations(range(len(rewards)), len(kept)))
    assert np.var([rewards[n] for n in kept]) == pytest.approx(best)


def test_statistics_are_of_the_group_or_as_if_only_the_chosen_had_been_sampled() -> None:
    groups = [group([0, 0, 0, 1])]
    among = batch_of(groups, down_sampling="max_variance:2")
    np.testing.assert_allclose(among.advantages, [[-0.5] * 2, [0] * 2, [0] * 2, [0.5] * 2])
    whole = batch_of(groups, down_sampling="max_variance:2:group")
    np.testing.assert_allclose(whole.advantages, [[-0.25] * 2, [0] * 2, [0] * 2, [0.75] * 2])
    for batch in (among, whole):
        assert batch.mask.tolist() == [[True] * 2, [False] * 2, [False] * 2, [True] * 2]
        assert batch.excluded["down_sampling"].tolist() == (~batch.mask).tolist()
        assert batch.sampled.all()
    assert batch_of(groups, down_sampling="largest_advantage:2").advantages[3, 0] == 0.75
    groups = [group([0, 0, 2, 1], [3, 1, 2, 2]), group([1, 1, 0], [4, 2, 1])]
    options = {"adv_estimator": "opo", "mask_truncated_completions": True}
    batch = batch_of(groups, down_sampling="shortest:2", **options)
    alone = batch_of([group([0, 2], [1, 2]), group([1, 0], [2, 1])], **options)
    rows = batch.mask.any(axis=1)
    assert np.flatnonzero(rows).tolist() == [1, 2, 5, 6]
    np.testing.assert_array_equal(batch.advantages[rows][:, :2], alone.advantages)
    assert batch.group.tolist() == [0] * 4 + [1] * 3


def test_of_agents_whole_episodes_are_chosen() -> None:
    def play(rewards: list[float]) -> Trajectory:
        turns = tuple(Turn("hall", "say", "say", reward, True, row, 0) for row, reward in enumerate(rewards))
        return Trajectory(group([0] * len(rewards)).episodes, turns, rewards[-1] > 0, "done")

    played = [play([0, 1]), play([0]), play([0, 0, 0])]
    episodes = tuple(e for t in played for e in t.episodes)
    agents = Group(fake_prompt(), episodes, np.array([t.reward for t in played]), {}, tuple(played))
    batch = batch_of([agents], down_sampling="max_variance:2", adv_estimator="naive_grpo")
    assert batch.mask.any(axis=1).tolist() == [True, True, True, False, False, False]
    np.testing.assert_allclose(batch.advantages[:3, 0], [0.5, 0.5, -0.5])
    # what tables show of GiGPO's two parts is of the same episodes
    settings = {"world": "house", "adv_estimator": "gigpo", "scale_rewards": "none", "num_generations": 3}
    credit = episode_credit([agents], GRPOConfig(**settings, down_sampling="max_variance:2"))
    assert credit is not None
    np.testing.assert_allclose(credit, batch.advantages)


RULE = """
import numpy as np
def longest(group, size): return np.argsort([-e.num_sampled for e in group.episodes], kind="stable")[:size]
def far(group, size): return [99]
def twice(group, size): return [0, 0]
def many(group, size): return np.arange(size + 1)
def fails(group, size): raise KeyError("no")
def nothing(group, size): return []
def cheats(group, size): group.rewards[:] = 9.0
def cheats_in_parts(group, size): group.reward_parts["own"][:] = 9.0
def leaves(group, size): raise SystemExit(3)
"""


def test_a_rule_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rules.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    groups = [group([0, 1, 1], [1, 2, 3])]
    assert batch_of(groups, down_sampling="own_rules.py:longest:2").mask.any(axis=1).tolist() == [False, True, True]
    assert not batch_of(groups, down_sampling="own_rules.py:nothing:2").mask.any()
    groups[0].reward_parts["own"] = np.array([0.0, 1.0, 1.0])
    said = {"far": "from 0 to 2", "twice": "each once", "many": "3 indices", "fails": "KeyError"}
    said |= {"leaves": "own_rules.py:leaves.* raised SystemExit", "cheats": "read-only", "cheats_in_parts": "read-only"}
    for name, words in said.items():
        with pytest.raises(ConfigError, match=words):
            batch_of(groups, down_sampling=f"own_rules.py:{name}:2")
    assert groups[0].rewards.tolist() == [0, 1, 1]


def test_settings_that_cannot_be_meant() -> None:
    for words, rule, more in (
        ("leaves none out", "max_variance:8", {"num_generations": 8}),
        (r"at most 12 completions \(sampling.max_ge", "max_variance:12", {"num_generations": 4, "max_generations": 12}),
        ("max_variance", "max_varianz", {"num_generations": 8}),
    ):
        with pytest.raises(ConfigError, match=words):
            GRPOConfig(down_sampling=rule, **more)

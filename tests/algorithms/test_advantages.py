"""Advantages against numbers worked by hand, what must hold for all rewards, and which rewards are tied."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import algorithms as alg
from covey.algorithms.advantages import discounted_returns, gigpo_advantages
from covey.algorithms.down_sampling import max_variance
from covey.errors import ConfigError, DataError
from covey.observe.doctor import diagnose
from covey.types import Group, equal_rewards
from covey.watch.tables import Wanted, groups
from fakes import fake_episode, fake_prompt, raises

NAN = float("nan")
FOUND = {name: alg.find_estimator(name) for name in sorted(alg.ADVANTAGE_ESTIMATORS)}
WITHIN_GROUPS = [n for n, e in FOUND.items() if e.group_relative and not e.needs_turns and not e.needs_sum_pi_squared]
BOUNDED = settings(max_examples=30, deadline=None, derandomize=True)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
some_reward = st.one_of(st.just(NAN), st.integers(-3, 3).map(float), st.floats(-1e3, 1e3))
reward_lists = st.lists(st.tuples(st.integers(0, 3), some_reward), min_size=1, max_size=12)
TIED: list[list[float]] = [[0.1 + 0.2, 0.3, 0.3], [-0.3, -(0.1 + 0.2), -0.3], [1e300 * 3, 3e300, 3e300]]
TIED += [[1e-9 * 3, 3e-9, 3e-9], [sum([0.1] * 10), 1.0, NAN], [0.0, -0.0, 0.0], [NAN, NAN, 0.3]]
DIFFERENT: list[list[float]] = [[1e-9, 2e-9, 1e-9], [1e6, 1e6 + 0.5, 1e6], [0.0, 1e-15, 0.0]]
DIFFERENT += [[-1e-12, 1e-12, NAN], [1e308, -1e308, 0.0], [0.3, 0.3 + 1e-9, 0.3]]


def estimate_by(name: str, rewards: Any, groups: Any, **settings: Any) -> Any:
    return alg.ADVANTAGE_ESTIMATORS[name](alg.Outcomes(rewards, groups, **settings))


def check(found: Any, expected: Any, rtol: float = 1e-7, atol: float = 0.0) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rtol, atol=atol)


def test_group_and_scale_by_hand() -> None:
    rewards, groups = [0.0, 0.0, 3.0, 1.0, 2.0], [7, 7, 7, 4, 4]
    centred, three, two = np.array([-1, -1, 2, -0.5, 0.5]), math.sqrt(3), math.sqrt(2)
    # means 1 and 1.5; sample stds sqrt((1 + 1 + 4) / 2) = sqrt 3 and sqrt(0.5); no epsilon
    check(alg.group_advantages(rewards, groups, epsilon=0.0), centred / [three, three, three, 1 / two, 1 / two])
    # population stds sqrt 2 and 0.5
    check(alg.group_advantages(rewards, groups, correction=0, epsilon=0.0), centred / [two, two, two, 0.5, 0.5])
    check(alg.group_advantages(rewards, groups, scale="none"), centred)
    # batch: mean 1.2, squares 1.44 + 1.44 + 3.24 + 0.04 + 0.64 = 6.8, over 4 = 1.7
    check(alg.group_advantages(rewards, groups, scale="batch", epsilon=0.0), centred / math.sqrt(1.7))
    # epsilon is added to the std, not to the variance: ±0.5 / (0.5 + 0.5)
    check(alg.group_advantages([1, 2], [0, 0], correction=0, epsilon=0.5), [-0.5, 0.5])
    # leave one out: others' means 1.5, 1.5, 0; and 2, 1
    check(alg.rloo_advantages(rewards, groups), [-1.5, -1.5, 3.0, -1.0, 1.0])
    # groups may be of any whole type
    for ids in (torch.tensor([False, False, True, True]), torch.tensor([1, 1, 2, 2], dtype=torch.uint8)):
        check(alg.group_advantages(torch.tensor([0.0, 1.0, 0.0, 2.0]), ids, scale="none"), [-0.5, 0.5, -1.0, 1.0])


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_what_cannot_be_scored_is_left_out_of_its_group(name: str) -> None:
    with_none = estimate_by(name, [1.0, None, 2.0, math.inf, 6.0], [0] * 5, scale="group", correction=1)
    one, two, three = estimate_by(name, [1.0, 2.0, 6.0], [0] * 3, scale="group", correction=1)
    check(with_none, [one, 0, two, 0, three])
    assert max(map(abs, (one, two, three))) > 0.1


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@pytest.mark.parametrize("rewards", [[5.0], [NAN], [NAN] * 3, [1.0, NAN], [0.1] * 3, [1 / 3] * 7, [1e8 + 0.1] * 3, []])
def test_a_group_without_relative_information_gets_exactly_zero(name: str, rewards: list[float]) -> None:
    for scale in ("group", "batch", "none"):
        # another group, so that the batch has a spread
        both = estimate_by(name, [*rewards, 0.0, 1.0], [*[0] * len(rewards), 1, 1], scale=scale)
        assert (both[: len(rewards)] == 0).all()
        assert both[-1] > 0
        assert estimate_by(name, rewards, [0] * len(rewards), scale=scale).tolist() == [0] * len(rewards)


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@BOUNDED
@given(rows=reward_lists, data=st.data())
def test_properties_of_all_estimators(name: str, rows: list[tuple[int, float]], data: st.DataObject) -> None:
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    estimate = partial(estimate_by, name)
    advantages = estimate(rewards, groups)
    assert np.isfinite(advantages).all()
    assert (advantages[np.isnan(rewards)] == 0).all()
    for group in set(groups):
        inside = advantages[groups == group]
        assert name == "grpo_passk" or abs(inside.sum()) <= 1e-9 * max(1.0, np.abs(inside).max())
    order = np.asarray(data.draw(st.permutations(range(len(rows)))))
    check(estimate(rewards[order], groups[order]), advantages[order], **CLOSE)
    # the names of the groups do not matter
    np.testing.assert_array_equal(estimate(rewards, [f"uid-{g}" for g in groups]), advantages)


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.sampled_from([NAN, 0.0, 0.1, 2.0])), min_size=1),
    st.sampled_from([0, 1]),
)
def test_each_group_by_itself(rows: list[tuple[int, int, float]], correction: int) -> None:
    """Against loops over the groups, with numbers of groups and episodes that begin anywhere."""
    groups, episodes = np.array([row[:2] for row in rows]).T
    rewards = np.array([row[2] for row in rows])

    def expected(counted: np.ndarray) -> np.ndarray:
        found = np.zeros(len(rows))
        for group in set(groups.tolist()):
            inside = groups == group
            scored = rewards[inside & counted & ~np.isnan(rewards)]
            if len(set(scored)) > 1:
                std = scored.std(ddof=correction)
                found[inside] = np.nan_to_num((rewards[inside] - scored.mean()) / (std + 1e-6))
        return found

    once, seen = np.zeros(len(rows), bool), set()
    for row, key in enumerate(zip(groups.tolist(), episodes.tolist(), strict=True)):
        if key not in seen and not np.isnan(rewards[row]):
            seen.add(key)
            once[row] = True
    check(alg.group_advantages(rewards, groups, correction=correction), expected(np.ones(len(rows), bool)), **CLOSE)
    check(alg.episode_advantages(rewards, groups, episodes, correction=correction), expected(once), **CLOSE)


@pytest.mark.parametrize("name", sorted(set(FOUND) - {"gigpo"}))
def test_all_libraries_agree(name: str) -> None:
    rng = np.random.default_rng(1)
    step = {"rewards": rng.normal(size=20), "groups": rng.integers(0, 5, 20), "greedy": rng.normal(size=20)}
    p = rng.dirichlet(np.ones(5), size=(20, 6))  # distributions over five tokens, of which the first is drawn
    step |= {"mask": np.arange(6) < rng.integers(1, 7, (20, 1)), "logprobs": np.log(p[..., 0])}
    step |= {"sum_pi_squared": (p**2).sum(axis=-1)}
    step["rewards"][[2, 11]] = NAN
    for scale in ("group", "batch", "none"):
        estimate = partial(estimate_by, name, scale=scale)
        expected, by_torch = estimate(**step), estimate(**{n: torch.from_numpy(x) for n, x in step.items()})
        by_jax = jax.jit(estimate)(**{n: jnp.asarray(x) for n, x in step.items()})
        assert isinstance(by_torch, torch.Tensor)
        check(by_torch, expected, rtol=0, atol=1e-10)
        check(by_jax, expected, rtol=0, atol=1e-10)
    check(alg.group_advantages(torch.tensor([1, 2]), [0, 0], correction=0), [-1, 1], atol=1e-5)


def test_an_episode_counts_once_however_many_steps_it_has() -> None:
    # group 0: episode 8 (reward 4) has three rows, episode 9 (reward 0) one; group 1 has an 8 of its own
    rewards, groups, episodes = [4.0, 0.0, 4.0, 4.0, 1.0, 3.0], [0, 0, 0, 0, 1, 1], [8, 9, 8, 8, 8, 5]
    # mean 2, not 3; sample std sqrt(8) resp. sqrt(2)
    unit = np.array([1, -1, 1, 1, -1, 1]) / math.sqrt(2)
    check(alg.episode_advantages(rewards, groups, episodes, epsilon=0.0), unit)
    # the first row of episode 8 could not be scored: the next one speaks for it
    check(alg.episode_advantages([NAN, *rewards[1:]], groups, episodes, epsilon=0.0)[:4], [0, *unit[1:4]])
    groups, episodes = torch.arange(3000) // 6, torch.arange(3000) // 3 % 2
    for dtype in (torch.float16, torch.bfloat16):  # narrow types count them too
        found = alg.episode_advantages((episodes + groups % 2).to(dtype), groups, episodes, scale="none")
        np.testing.assert_array_equal(found.float().numpy(), np.where(episodes.numpy() == 1, 0.5, -0.5))


def test_several_rewards_by_hand_of_which_a_wide_one_drowns_no_other_when_each_is_normalised_first() -> None:
    parts = [[1.0, 0.0, None, None], [10.0, 30.0, 20.0, None]]
    np.testing.assert_array_equal(alg.combine_rewards(parts, [2.0, 0.1]), [3.0, 3.0, 2.0, NAN])
    summed = alg.group_advantages(alg.combine_rewards(parts, [2.0, 0.1]), [0] * 4, epsilon=0.0)
    # 3 3 2: mean 8/3, sample std sqrt(1/3)
    check(summed, np.array([1, 1, -2, 0]) / 3 / math.sqrt(1 / 3), atol=1e-12)
    # x, -x and 0, then normalised over the batch: the sample std of x -x 0 is x.
    for scale in ("group", "batch", "none"):
        found = estimate_by("gdpo", None, [0] * 4, parts=parts, weights=[2.0, 0.1], scale=scale, epsilon=0.0)
        check(found, [1.0, -1.0, 0.0, 0.0], atol=1e-12)
    # GDPO, equations 4 to 6: one reward differs in the first group, both do in the second
    parts = [[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    found = estimate_by("gdpo", None, [0, 0, 1, 1], parts=parts, weights=[1.0, 1.0], epsilon=1e-12)
    # sums -a a -2a 2a with a = sqrt(1/2); their sample std is sqrt(10 a^2 / 3)
    check(found, np.array([-1, 1, -2, 2]) / math.sqrt(10 / 3))
    parts = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1000.0, 1000.0]])
    together = alg.group_advantages(alg.combine_rewards(parts, [1.0, 1.0]), [0] * 4)
    apart = estimate_by("gdpo", None, [0] * 4, parts=parts, weights=[1.0, 1.0])
    assert together[2] - together[3] < 0.01
    assert apart[2] - apart[3] > 1.0


def test_the_signatures_of_the_documents_and_the_spreads_that_they_divide_by() -> None:
    mask, u = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]), np.array(["u", "u", "u"], dtype=object)
    rewards, episodes = np.array([1.0, 2.0, 2.0]), np.array(["a", "b", "b"])
    advantages, returns = alg.compute_naive_grpo_outcome_advantage(rewards, mask, u, episodes)
    assert advantages.dtype == torch.float32
    check(advantages, [[-1.0, -1, 0], [1, 0, 0], [1, 1, 1]], atol=1e-5, rtol=0)
    assert torch.equal(advantages, returns)
    given = ([1.0, 2.0], mask[:2], [0, 0], [0, 1])
    centred, _ = alg.compute_naive_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False)
    assert centred.tolist() == [[-0.5, -0.5, 0], [0.5, 0, 0]]
    # rows are steps: scores 1 and 2 in group u; a group of one has no relative information
    rewards = np.array([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [5.0, 0.0, 0.0]])
    steps = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    advantages, returns = alg.compute_grpo_outcome_advantage(rewards, steps, ["u", "u", "v"], correction=0)
    check(advantages, [[-1, -1, 0], [1, 1, 1], [0, 0, 0]], atol=1e-5)
    np.testing.assert_array_equal(advantages, returns)
    sample, _ = alg.compute_grpo_outcome_advantage(rewards, steps, ["u", "u", "v"])
    check(sample[0], [-math.sqrt(0.5), -math.sqrt(0.5), 0], atol=1e-5)
    # as docs/agents.md says: the population's for the one that its document defines so, the sample's as in runs
    ids, ones = np.zeros(4, np.int64), np.ones((4, 1))
    rewards, episodes = np.array([0.0, 0.0, 1.0, 1.0]), np.arange(4)
    naive = alg.compute_naive_grpo_outcome_advantage(rewards, ones, ids, episodes)[0]
    of_steps = alg.compute_grpo_outcome_advantage(rewards[:, None], ones, ids)[0]
    check(naive[:, 0], [-1, -1, 1, 1], atol=5e-4)
    check(of_steps[:, 0], [-0.866, -0.866, 0.866, 0.866], atol=5e-4)
    check(FOUND["naive_grpo"](alg.Outcomes(rewards, ids)), of_steps[:, 0])
    check(alg.compute_naive_grpo_outcome_advantage(rewards, ones, ids, episodes, correction=1)[0], of_steps)


def test_errors_name_the_value_and_the_fix() -> None:
    raises(ConfigError, "did you mean 'batch'", alg.group_advantages, [1.0], [0], scale="bach")
    raises(DataError, r"\(2,\).*\(1,\)", alg.group_advantages, [1.0, 2.0], [0])
    raises(DataError, "one weight", alg.combine_rewards, [[1.0], [2.0]], [1.0])


def test_returns_and_the_steps_that_began_alike_which_gigpo_adds() -> None:
    assert discounted_returns([0.0, 0.0, 1.0], 1.0).tolist() == [1.0, 1.0, 1.0]
    assert discounted_returns([1.0, 0.0, 4.0], 0.5).tolist() == [2.0, 2.0, 4.0]
    assert discounted_returns([1.0, 2.0], 0.0).tolist() == [1.0, 2.0]
    assert discounted_returns([], 1.0).tolist() == []
    # two episodes of one group: both begin in "hall", only the first goes on to "attic"
    rewards = np.array([1.0, 1.0, 0.0])
    steps = (rewards, rewards, np.array([0, 0, 0]), np.array([0, 0, 1]), ["hall", "attic", "hall"])
    # episodes: +0.5, +0.5, -0.5; hall: +0.5 and -0.5, twice; attic was seen once: nothing to compare
    check(gigpo_advantages(*steps, scale="none", omega=2.0), [1.5, 0.5, -1.5])
    check(gigpo_advantages(*steps, scale="none", omega=0.0), [0.5, 0.5, -0.5])
    # an excluded episode counts nowhere
    rewards, zeros = np.array([1.0, 0.0, NAN]), np.array([0, 0, 0])
    check(gigpo_advantages(rewards, rewards, zeros, np.arange(3), ["hall"] * 3, scale="none"), [1.0, -1.0, 0.0])
    nothing, ids = np.zeros(0), np.zeros(0, np.int64)
    assert gigpo_advantages(nothing, nothing, ids, ids, ids).shape == (0,)


@pytest.mark.parametrize("low", [-1, 0, 2**31 - 3])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_equal_observations_of_other_groups_are_other_anchors_whatever_their_names(low: int, convert: Any) -> None:
    ids = ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0])  # groups, episodes, observations
    names = [convert(np.array([low + n for n in each], np.int32)) for each in ids]
    values = convert(np.array([1.0, 0.0, 5.0, 9.0]))
    check(gigpo_advantages(values, values, *names, scale="none"), [1, -1, -4, 4])


def group_of(rewards: list[float]) -> Group:
    episodes = tuple(fake_episode("text") for _ in rewards)
    return Group(fake_prompt("?"), episodes, np.array(rewards), {"own": np.array(rewards)})


def tied_in_tables(rewards: list[float]) -> bool:
    return groups([{"group": 0, "reward": None if r != r else r} for r in rewards], Wanted())[0]["tied"]


@pytest.mark.parametrize("rewards", TIED, ids=str)
def test_tied_rewards_teach_nothing(rewards: list[float]) -> None:
    group, greedy = group_of(rewards), np.full(3, next(r for r in rewards if r == r))
    assert group.is_tied
    more = {"logprobs": -np.resize([0.1, 0.9, 0.4], (3, 2)), "sum_pi_squared": np.full((3, 2), 0.4)}
    step = alg.Outcomes(np.array(rewards), np.zeros(3, np.int64), greedy=greedy, mask=np.ones((3, 2), np.bool_), **more)
    for name in set(alg.ADVANTAGE_ESTIMATORS) - {"gigpo"}:
        estimator = alg.find_estimator(name)
        assert not np.any(estimator(step)), name
        across_groups = name in ("remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        assert across_groups or not estimator.teaches(group), name
    assert tied_in_tables(rewards)


@pytest.mark.parametrize("rewards", DIFFERENT, ids=str)
def test_rewards_that_differ_are_not_tied(rewards: list[float]) -> None:
    assert not group_of(rewards).is_tied
    assert alg.find_estimator("grpo").teaches(group_of(rewards))
    if max(map(abs, rewards[:2])) < 1e100:
        assert not tied_in_tables(rewards)
        assert np.any(alg.group_advantages(rewards, [0, 0, 0]))


@pytest.mark.parametrize("library", [torch.tensor, jnp.array], ids=["torch", "jax"])
def test_the_rule_in_float32(library: Any) -> None:
    """Rounded to float32, 0.1 + 0.2 is one digit away from 0.3; 1e6 + 0.5 is eight digits away from 1e6."""
    narrow = {torch.tensor: torch.float32, jnp.array: jnp.float32}[library]
    low, high = (library(x, dtype=narrow) for x in ([0.3, 1e6], [0.3 * (1 + 1e-7), 1e6 + 0.5]))
    assert equal_rewards(low, high).tolist() == [True, False]


def test_down_sampling_grown_groups_pass_at_k_and_the_doctor_call_rewards_equal_by_the_same_rule() -> None:
    assert sorted(max_variance(group_of([0.0, 0.0, 1e-9, 2e-9]), 2).tolist()) in ([0, 3], [1, 3])
    group = group_of([0.3, 0.3])
    assert group.grown_by(replace(group, rewards=np.array([0.1 + 0.2, 0.3]))).is_tied
    rewards = [0.1 + 0.2, 0.3, 0.0]  # pass@k: two best ones that differ by rounding have no lead
    assert not np.any(alg.find_estimator("grpo_passk")(alg.Outcomes(np.array(rewards), np.zeros(3, np.int64))))
    assert not alg.find_estimator("grpo_passk").teaches(group_of(rewards))
    step = {"reward": 0.1 + 0.2, "reward_std": 1e-17, "frac_reward_zero_std": 1.0, "accuracy": 0.0}
    alike = [step | {"reward": 0.3} if n % 2 else step for n in range(40)]
    assert "reward_constant" in {each.code for each in diagnose(alike)}
    small = [step | {"reward": 1e-10 * n, "reward_std": 5e-10, "frac_reward_zero_std": 0.0} for n in range(40)]
    assert not {each.code for each in diagnose(small)} & {"reward_constant", "groups_all_wrong", "groups_tied"}

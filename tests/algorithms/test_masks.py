"""Masks by hand, and the reasons that they leave; which completions down-sampling trains on."""

from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey import GRPOConfig
from covey import algorithms as alg
from covey.algorithms.down_sampling import DOWN_SAMPLING, find_down_sampling
from covey.errors import ConfigError
from covey.rollout.batching import make_batch
from covey.training.step import episode_credit
from covey.types import Batch, Episode, Group, Trajectory, Turn
from fakes import fake_prompt, raises

NAN = float("nan")
T, F = True, False
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def test_off_policy_drops_stale_bad_sequences_only_and_reference_drift_by_mean_and_by_sum() -> None:
    old = np.zeros((4, 3))
    logp = np.array([[-1.0, -0.2, NAN], [-1.0, -0.2, NAN], [-0.3, -0.5, NAN], [NAN, NAN, NAN]])
    mask, advantages = np.array([[T, T, F]] * 3 + [[F, F, F]]), np.array([-1.0, 1.0, -1.0, -1.0])
    # means of old - logp: 0.6, 0.6 (but A > 0), 0.4
    keep = alg.off_policy_mask(logp, old, advantages, mask, threshold=0.5)
    np.testing.assert_array_equal(keep, [[F] * 3, [T] * 3, [T] * 3, [T] * 3])
    per_token = np.array([[-1.0, 1.0, 0.0]] * 4)
    np.testing.assert_array_equal(alg.off_policy_mask(logp, old, per_token, mask, 0.5)[0], [F, T, T])
    ref, logp = np.zeros((3, 2)), np.array([[0.3, 0.3], [0.6, 0.6], [-9.0, -9.0]])
    mask = np.ones((3, 2), dtype=bool)
    np.testing.assert_array_equal(alg.reference_drift_mask(logp, ref, mask)[:, 0], [T, F, T])  # 0.3, 0.6, -9
    by_sum = alg.reference_drift_mask(logp, ref, mask, reduction="sum")
    np.testing.assert_array_equal(by_sum[:, 0], [F, F, T])  # 0.6, 1.2, -18
    with pytest.raises(ConfigError, match="did you mean 'per_token_mean'"):
        alg.reference_drift_mask(logp, ref, mask, reduction="token_mean")


def test_every_excluded_token_carries_each_of_its_reasons() -> None:
    base, truncated = np.array([[T, T, F], [T, T, T]]), np.array([F, T])
    keep = {"mask_truncated_completions": truncated, "top_entropy_quantile": np.array([[F, T, F], [T, F, T]])}
    mask, excluded = alg.combine_masks(base, keep)
    np.testing.assert_array_equal(mask, [[F, F, F], [T, F, T]])
    np.testing.assert_array_equal(excluded["mask_truncated_completions"], [[T, T, F], [F, F, F]])
    np.testing.assert_array_equal(excluded["top_entropy_quantile"], [[T, F, F], [F, T, F]])
    # a NumPy keep-mask and a torch base mask meet in torch
    tensor, _ = alg.combine_masks(torch.from_numpy(base), {"validity_mask": np.array([F, T])})
    np.testing.assert_array_equal(tensor.numpy(), [[F, F, F], [T, T, T]])
    assert alg.combine_masks(base, {})[1] == {}


def test_top_entropy_takes_its_quantile_over_active_tokens() -> None:
    entropy, mask = np.array([[1.0, 5.0, 99.0], [3.0, 2.0, 4.0]]), np.array([[T, T, F], [T, T, T]])
    # active, sorted: 1 2 3 4 5; q = 0.4 keeps from position 0.6 · 4 = 2.4 on, i.e. from 3.4
    np.testing.assert_array_equal(alg.top_entropy_mask(entropy, mask, 0.4) & mask, [[F, T, F], [F, F, T]])
    assert (alg.top_entropy_mask(entropy, mask, 1.0) & mask).sum() == 5
    np.testing.assert_array_equal(alg.top_entropy_mask(entropy, mask, 0.01) & mask, [[F, T, F], [F, F, F]])
    assert alg.top_entropy_mask(np.ones((2, 3)), mask, 0.2)[mask].all()  # all tie
    assert not (alg.top_entropy_mask(entropy, ~mask & mask, 0.5) & (~mask & mask)).any()
    for bad in (0.0, 1.1, NAN):
        raises(ConfigError, "0 < q <= 1", alg.top_entropy_mask, entropy, mask, bad)


def test_masks_agree_across_libraries() -> None:
    rng = np.random.default_rng(2)
    logp, other, entropy = (rng.normal(size=(6, 5)) for _ in range(3))
    arguments = (logp, other, entropy, rng.normal(size=6), rng.random((6, 5)) < 0.7)

    def all_masks(logp: Any, other: Any, entropy: Any, advantages: Any, mask: Any) -> list[Any]:
        found = [alg.mismatch_correction(logp, other, mask, mode, 1.5) for mode in MODES]
        found += [alg.off_policy_mask(logp, other, advantages, mask, 0.1), alg.top_entropy_mask(entropy, mask, 0.3)]
        return [*found, alg.reference_drift_mask(logp, other, mask, 0.1)]

    by_torch = all_masks(*(torch.from_numpy(x) for x in arguments))
    by_jax = jax.jit(all_masks)(*(jnp.asarray(x) for x in arguments))
    for numpy_one, torch_one, jax_one in zip(all_masks(*arguments), by_torch, by_jax, strict=True):
        np.testing.assert_allclose(torch_one.numpy(), numpy_one, rtol=0, atol=1e-10)
        np.testing.assert_allclose(jax_one, numpy_one, rtol=0, atol=1e-10)


def test_mismatch_correction_by_hand() -> None:
    # token ratios 2 and 4 (sequence 8); 0.5 and 3 (sequence 1.5)
    trainer, sampler = np.log([[2.0, 4.0, 7.0], [0.5, 3.0, 7.0]]), np.zeros((2, 3))
    mask = np.array([[T, T, F]] * 2)
    expected = {"token_truncate": [[2, 3, 1], [0.5, 3, 1]], "token_mask": [[2, 0, 1], [0.5, 3, 1]]}
    expected |= {"sequence_truncate": [[3], [1.5]], "sequence_mask": [[0], [1.5]]}
    for mode in MODES:
        np.testing.assert_allclose(alg.mismatch_correction(trainer, sampler, mask, mode, 3.0 + 1e-12), expected[mode])
        assert np.isfinite(alg.mismatch_correction(trainer + 1e4, sampler, mask, mode, 3.0)).all()
    tensor = torch.zeros(1, 1, requires_grad=True)
    factor = alg.mismatch_correction(tensor, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), MODES[0], 3.0)
    assert not factor.requires_grad
    with pytest.raises(ConfigError, match="importance_sampling_correction of at most 0"):
        alg.mismatch_correction(trainer, sampler, mask, MODES[0], 0.0)
    with pytest.raises(ConfigError, match="did you mean 'token_truncate'"):
        alg.mismatch_correction(trainer, sampler, mask, "token_truncat", 3.0)


def test_choice_letters_and_repetition_which_is_found_in_linear_time() -> None:
    chosen = ["The answer is A", "A. Myocardial infarction", "Based on the symptoms, A", "Answer: A"]
    chosen += ["answer is A because the pain radiates", "the most likely diagnosis is D. Aortic dissection."]
    others = ["A 45-year-old man with chest pain", "This patient could have several conditions.", "BAD CABD", ""]
    assert [alg.has_choice_letter(text) for text in [*chosen, *others]] == [T] * 6 + [F] * 4
    repetitive = ["the the the the the the", "I think it is A. " * 6, "hahahahahahahahahahahaha", "x" * 5000]
    others = ["", "The answer is D. Aortic dissection, given the sudden onset of pain radiating to the back."]
    others += ["10000000000000000 + 0 = 10000000000000000", "A\nB\nC\nD"]
    others += ["| - - - - - - - | ------------------------ |"]
    assert [alg.is_repetitive(text) for text in [*repetitive, *others]] == [T] * 4 + [F] * 5
    assert alg.is_repetitive("ab " * 3 + "".join(chr(97 + (i * i) % 26) for i in range(200_000))) in (T, F)


def test_masks_of_the_document_and_soft_overlong_punishment_by_hand() -> None:
    samples = ["The answer is B.", "B", "I do not know what it could be.", "The answer is C " * 10]
    assert alg.create_sampling_mask(samples).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert alg.create_sampling_mask(samples, min_length=1).tolist() == [T, T, F, F]
    lenient = alg.create_sampling_mask(samples, has_valid_answer=lambda _: "maybe", is_repetitive=lambda _: None)
    assert (lenient.tolist(), alg.create_sampling_mask([]).shape) == ([T, F, T, T], (0,))
    mask = alg.compute_off_policy_mask(torch.tensor([-1.0, -1.0, -9.0]), torch.tensor([-1.4, -1.6, -1.0]))
    assert torch.equal(mask, torch.tensor([1.0, 0.0, 1.0]))
    lengths = [0, 80, 90, 100, 101, 130]
    for each in (lengths, torch.tensor(lengths)):
        assert alg.soft_overlong_punishment(each, 100, 20).tolist() == [0, 0, -0.5, -1, -1, -1]
    for cache in (0, 101):
        raises(ConfigError, f"soft_overlong_cache={cache}", alg.soft_overlong_punishment, lengths, 100, cache)


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
    config = GRPOConfig(**{"scale_rewards": "none", "max_completion_length": 64} | changes)
    return make_batch(groups, config, reward_weights=(1.0,))


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
        raises(ConfigError, words, batch_of, groups, down_sampling=f"own_rules.py:{name}:2")
    assert groups[0].rewards.tolist() == [0, 1, 1]


def test_settings_that_cannot_be_meant() -> None:
    for words, rule, more in (
        ("leaves none out", "max_variance:8", {"num_generations": 8}),
        (r"at most 12 completions \(sampling.max_ge", "max_variance:12", {"num_generations": 4, "max_generations": 12}),
        ("max_variance", "max_varianz", {"num_generations": 8}),
    ):
        raises(ConfigError, words, GRPOConfig, down_sampling=rule, **more)

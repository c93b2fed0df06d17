"""Masks by hand, and the reasons that they leave."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from covey import algorithms as alg
from covey.errors import ConfigError

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
    base, truncated = np.array([[T, T, F], [T, T, T]]), alg.truncated_mask(["length", "stop"])
    assert truncated.tolist() == [F, T]
    keep = {"mask_truncated_completions": truncated, "top_entropy_quantile": np.array([[F, T, F], [T, F, T]])}
    mask, excluded = alg.combine_masks(base, keep)
    np.testing.assert_array_equal(mask, [[F, F, F], [T, F, T]])
    np.testing.assert_array_equal(excluded["mask_truncated_completions"], [[T, T, F], [F, F, F]])
    np.testing.assert_array_equal(excluded["top_entropy_quantile"], [[T, F, F], [F, T, F]])
    assert set(excluded) <= set(alg.MASK_REASONS)
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
        with pytest.raises(ConfigError, match="0 < q <= 1"):
            alg.top_entropy_mask(entropy, mask, bad)


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
    for given in (lengths, torch.tensor(lengths)):
        assert alg.soft_overlong_punishment(given, 100, 20).tolist() == [0, 0, -0.5, -1, -1, -1]
    for cache in (0, 101):
        with pytest.raises(ConfigError, match=f"soft_overlong_cache={cache}"):
            alg.soft_overlong_punishment(lengths, 100, cache)

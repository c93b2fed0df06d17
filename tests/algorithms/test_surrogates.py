"""Ratios and surrogates by hand; whole losses are compared with the textbook in test_objective."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from covey.algorithms import (
    LOG_RATIO_LIMIT,
    LOSS_PRESETS,
    SURROGATES,
    Objective,
    Surrogate,
    cispo_surrogate,
    clip_surrogate,
    gspo_token_ratio,
    make_objective,
    sapo_surrogate,
    sequence_ratio,
    token_ratio,
)
from covey.errors import ConfigError

RATIO = np.array([0.5, 0.9, 1.0, 1.1, 1.5, 4.0])


def test_ratios_by_hand() -> None:
    old = np.zeros((2, 3))
    logp = np.log([[2.0, 8.0, 5.0], [3.0, 1.0, 1.0]])
    mask = np.array([[True, True, False], [False, False, False]])
    np.testing.assert_allclose(token_ratio(logp, old, mask), [[2, 8, 1], [1, 1, 1]])
    np.testing.assert_allclose(sequence_ratio(logp, old, mask), [[4, 4, 4], [1, 1, 1]])  # sqrt(2 · 8)
    np.testing.assert_allclose(gspo_token_ratio(logp, old, mask), [[4, 4, 4], [1, 1, 1]])


def test_sequence_ratio_shares_its_gradient_and_the_token_form_does_not() -> None:
    old, mask = torch.zeros(1, 2), torch.tensor([[True, True]])
    logp = torch.log(torch.tensor([[2.0, 8.0]])).requires_grad_()
    (shared,) = torch.autograd.grad(sequence_ratio(logp, old, mask)[0, 0], logp)
    (own,) = torch.autograd.grad(gspo_token_ratio(logp, old, mask)[0, 0], logp)
    torch.testing.assert_close(shared, torch.tensor([[2.0, 2.0]]))  # w / 2 tokens
    torch.testing.assert_close(own, torch.tensor([[4.0, 0.0]]))  # w


def test_ordinary_ratios_are_not_touched_by_the_limit() -> None:
    d = np.array([[-700.0, -30.0, -5.0, 0.0, 5.0, 19.99, LOG_RATIO_LIMIT, 21.0]])
    ratio = token_ratio(d, np.zeros_like(d), np.ones_like(d, dtype=bool))
    np.testing.assert_array_equal(ratio[0, :-1], np.exp(d[0, :-1]))
    assert ratio[0, -1] == math.exp(LOG_RATIO_LIMIT)


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("delta", [None, 2.0])
def test_clip_is_the_printed_formula(advantage: float, delta: float | None) -> None:
    a = np.full_like(RATIO, advantage)
    w = RATIO if delta is None else np.minimum(RATIO, delta)
    printed = -np.minimum(w * a, np.clip(w, 1 - 0.2, 1 + 0.3) * a)
    np.testing.assert_allclose(clip_surrogate(RATIO, a, 0.2, 0.3, delta).loss, printed)


def test_where_the_clip_acts() -> None:
    up, down = np.ones_like(RATIO), -np.ones_like(RATIO)
    assert clip_surrogate(RATIO, up, 0.2, 0.3).high.tolist() == [False] * 4 + [True] * 2
    assert not clip_surrogate(RATIO, up, 0.2, 0.3).low.any()
    assert clip_surrogate(RATIO, down, 0.2, 0.3).low.tolist() == [True] + [False] * 5
    assert not clip_surrogate(RATIO, down, 0.2, 0.3).high.any()
    assert clip_surrogate(RATIO, down, 0.2, 0.3, 2.0).high.tolist() == [False] * 5 + [True]


def test_a_clip_range_of_zero_still_learns_on_policy() -> None:
    """A ratio exactly on a bound is not clipped; with epsilon 0 that is every ratio of the first pass."""
    ratio = torch.ones(2, requires_grad=True)
    loss = clip_surrogate(ratio, torch.tensor([1.0, -1.0]), 0.0, 0.0).loss.sum()
    (gradient,) = torch.autograd.grad(loss, ratio)
    assert gradient.tolist() == [-1.0, 1.0]


def test_cispo_keeps_the_gradient_of_capped_tokens() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ratio = torch.exp(logp - torch.tensor([-1.5, -5.0]))  # e^0.5 and e^3 = 20.1
    surrogate = cispo_surrogate(ratio, logp, torch.tensor([2.0, 2.0]), 5.0)
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), logp)
    assert gradient.tolist() == pytest.approx([-2 * math.exp(0.5), -10.0])
    assert surrogate.high.tolist() == [False, True]


def test_sapo_gate_by_hand() -> None:
    # at w = 1 the gate is 2 / tau and its slope 1
    a = np.array([1.0, -1.0])
    np.testing.assert_allclose(sapo_surrogate(np.ones(2), a, 1.0, 2.0).loss, [-2.0, 1.0])
    h = 1e-6
    slope = (sapo_surrogate(np.ones(2) + h, a, 1.0, 2.0).loss - sapo_surrogate(np.ones(2) - h, a, 1.0, 2.0).loss) / h
    np.testing.assert_allclose(slope / 2, -a, atol=1e-8)
    # sharp temperatures do not overflow
    assert np.isfinite(sapo_surrogate(np.array([0.0, 4e8], np.float32), a.astype(np.float32), 1e4, 1e4).loss).all()


def test_presets_are_the_table() -> None:
    table = {
        "grpo": ("clip", "token", "sequence_mean"),
        "bnpo": ("clip", "token", "token_mean"),
        "dapo": ("clip", "token", "token_mean"),
        "dr_grpo": ("clip", "token", "constant_length"),
        "gspo": ("clip", "sequence", "sequence_mean"),
        "gspo_token": ("clip", "gspo_token", "sequence_mean"),
        "cispo": ("cispo", "token", "token_mean"),
        "sapo": ("sapo", "token", "sequence_mean"),
        "reinforce": ("reinforce", "token", "sequence_sum_mean"),
        "reinforce_kept": ("reinforce", "token", "sequence_sum_kept"),
    }
    assert {
        name: (o.surrogate, o.importance_sampling_level, o.aggregation) for name, o in LOSS_PRESETS.items()
    } == table
    assert LOSS_PRESETS["dapo"].upper > LOSS_PRESETS["dapo"].eps_low
    assert hash(make_objective("grpo")) == hash(Objective())


def test_overrides() -> None:
    assert make_objective("dapo", epsilon=None, beta=None) == LOSS_PRESETS["dapo"]
    assert make_objective("grpo", epsilon=0.1).upper == 0.1
    assert make_objective("dapo", epsilon=0.2).upper == 0.28
    assert make_objective("dapo", epsilon=0.3).upper == 0.3
    assert make_objective("gspo", epsilon=0.2).upper == 0.2
    assert make_objective("gspo", epsilon=0.2, epsilon_high=0.25).upper == 0.25
    assert make_objective("grpo", importance_sampling_level="sequence").importance_sampling_level == "sequence"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "xyz"}, "loss_type='xyz'"),
        ({"loss_type": "grpoo"}, "did you mean 'grpo'"),
        ({"eps_hihg": 0.1}, "did you mean 'eps_high'"),
        ({"kl_estimator": "k3_unbias"}, "did you mean 'k3_unbiased'"),
        ({"aggregation": "token_men"}, "did you mean 'token_mean'"),
        ({"importance_sampling_level": "sequnce"}, "did you mean 'sequence'"),
        ({"surrogate": "clop"}, "did you mean 'clip'"),
        ({"epsilon": 1.5}, "epsilon=1.5"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1"),
        ({"delta": 1.1}, "delta=1.1: below 1 \\+ epsilon_high = 1.2"),
        ({"epsilon_max": 0.0}, "epsilon_max=0.0"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos=0.0"),
        ({"beta": -1.0}, "beta=-1.0"),
    ],
)
def test_errors_name_the_value_and_the_nearest_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_objective(**changes)


def test_a_new_surrogate_is_a_new_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(ratio: object, logp: object, advantages: object, objective: Objective) -> Surrogate:
        return Surrogate(-ratio * advantages, advantages != advantages, advantages != advantages)

    monkeypatch.setitem(SURROGATES, "linear", linear)
    assert make_objective("grpo", surrogate="linear").surrogate == "linear"

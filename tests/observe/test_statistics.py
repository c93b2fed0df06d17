import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.observe import mcnemar_exact, paired_difference, wilson_interval


def test_wilson_worked_by_hand():
    # p = 0.8, n = 10, z = 1.959964: centre (0.8 + 3.841459/20) / 1.3841459, half 1.959964/1.3841459
    # sqrt(0.016 + 0.0096036)
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.490162, abs=1e-6)
    assert high == pytest.approx(0.943318, abs=1e-6)
    # 0 of n: high = z² / (n + z²)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(3.841459 / 13.841459))
    assert wilson_interval(10, 10) == (pytest.approx(10 / 13.841459), 1.0)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="correct=3"):
        wilson_interval(3, 2)


@settings(deadline=None)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_are_where_the_score_test_just_rejects(counts):
    """Definition: the p0 with |p - p0| = z sqrt(p0 (1 - p0) / n)."""
    correct, total = counts
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(correct / total - end) == pytest.approx(
                1.959963985 * math.sqrt(end * (1 - end) / total), abs=1e-9
            )


def test_mcnemar_worked_by_hand():
    # 8 up, 2 down: 2 (C(10,0) + C(10,1) + C(10,2)) / 2^10 = 2 * 56 / 1024
    assert mcnemar_exact(8, 2) == 112 / 1024
    assert mcnemar_exact(2, 8) == 112 / 1024
    assert mcnemar_exact(5, 5) == 1.0
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(6, 0) == 2 / 64


def test_mcnemar_is_the_binomial_test():
    scipy = pytest.importorskip("scipy.stats")
    for gained, lost in ((0, 1), (3, 9), (9, 3), (17, 17), (40, 22), (1, 200)):
        expected = scipy.binomtest(gained, gained + lost, 0.5).pvalue
        assert mcnemar_exact(gained, lost) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("up", "down"), [(0.1, 0.1), (0.3, 0.1), (0.4, 0.3), (0.02, 0.25)])
def test_the_paired_interval_covers(up, down):
    """By brute force: the probability, over all outcomes of 40 problems that are gained with `up` and lost with `down`,
    that the interval holds the true difference.
    """
    total = 40
    covered = 0.0
    for gained in range(total + 1):
        for lost in range(total + 1 - gained):
            same = total - gained - lost
            ways = math.comb(total, gained) * math.comb(total - gained, lost)
            probability = ways * up**gained * down**lost * (1 - up - down) ** same
            if probability > 1e-12:
                found = paired_difference(
                    [0] * gained + [1] * lost + [1] * same, [1] * gained + [0] * lost + [1] * same
                )
                covered += probability * (found.low <= up - down <= found.high)
    assert 0.93 < covered < 0.995


def test_paired_right_and_wrong():
    before = [0, 0, 0, 0, 1, 1, 1, 1, 0, 1] * 2
    after = [1, 1, 1, 0, 1, 1, 1, 0, 0, 1] * 2  # 6 up, 2 down of 20
    result = paired_difference(before, after)
    assert (result.gained, result.lost, result.total) == (6, 2, 20)
    assert result.difference == pytest.approx(0.2)
    assert result.p_value == 2 * (1 + 8 + 28) / 256
    # Bonett and Price: 7/22 and 3/22, difference 4/22, se sqrt((10/22 - (4/22)²) / 22) = 0.138414
    assert result.low == pytest.approx(4 / 22 - 1.959964 * 0.138414, abs=1e-5)
    assert result.high == pytest.approx(4 / 22 + 1.959964 * 0.138414, abs=1e-5)


def test_paired_scores_by_bootstrap():
    random = np.random.default_rng(0)
    before = random.normal(0.0, 1.0, 100)
    shift = random.normal(0.5, 0.5, 100)
    result = paired_difference(before, before + shift)
    error = shift.std() / 10
    assert result.difference == pytest.approx(shift.mean())
    assert result.low == pytest.approx(shift.mean() - 1.96 * error, abs=0.02)
    assert result.high == pytest.approx(shift.mean() + 1.96 * error, abs=0.02)
    assert result.p_value < 0.001
    assert paired_difference(before, before + shift) == result
    same = paired_difference([0.5, 0.25, 0.3], [0.5, 0.25, 0.3])
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1.0)


def test_scores_that_do_not_pair_are_refused():
    for before, after in (([1], [1, 0]), ([], [])):
        with pytest.raises(ValueError, match="one value for each problem"):
            paired_difference(before, after)

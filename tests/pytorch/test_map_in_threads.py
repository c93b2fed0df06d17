"""Work side by side: order, bounds, errors, and a learner whose numbers do not depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner

from covey.algorithms import make_objective
from covey.pytorch.learner import Learner
from covey.pytorch.passes import map_in_threads
from covey.rollout.learning import Gradients


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_at_most_two_at_a_time_with_their_share_of_the_threads() -> None:
    lock, running, most, shares = threading.Lock(), 0, 0, set()

    def work(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            shares.add(torch.get_num_threads())
        time.sleep(0.02 if item % 2 else 0.001)
        with lock:
            running -= 1
        return item * item

    with torch.no_grad():
        assert list(map_in_threads(work, range(9), 2)) == [n * n for n in range(9)]
    assert most == 2
    assert shares == {1}
    assert torch.get_num_threads() == 2


def test_one_lane_is_the_callers_own_thread() -> None:
    assert set(map_in_threads(lambda _: threading.get_ident(), range(3), 1)) == {threading.get_ident()}


def test_an_error_arrives_when_nothing_is_under_way_any_more() -> None:
    ended = []

    def work(item: int) -> int:
        if item == 1:
            raise MemoryError("no room")
        time.sleep(0.05)
        ended.append(item)
        return item

    with pytest.raises(MemoryError, match="no room"):
        list(map_in_threads(work, range(50), 2))
    now = len(ended)
    assert now < 10
    time.sleep(0.1)
    assert len(ended) == now
    assert torch.get_num_threads() == 2


def gradients_of(learner: Learner, **changes: Any) -> tuple[Gradients, dict[str, torch.Tensor]]:
    batch = make_batch()
    found = learner.forward_backward(
        batch,
        np.arange(len(batch.episodes)),
        make_objective("dapo", **changes),
        temperature=1.0,
        max_completion_length=9,
    )
    return found, {
        name: p.grad.clone() for name, p in learner.policy.named_trainable_parameters() if p.grad is not None
    }


def lanes_of(learner: Learner, **options: Any) -> int:
    batch = make_batch()
    packs, lanes = learner._packs(batch.episodes, np.arange(len(batch.episodes)), **options)
    assert sum(len(pack.rows) for pack in packs) == len(batch.episodes)
    assert lanes == 1 or lanes * max(pack.num_tokens for pack in packs) <= learner.tokens_per_micro_batch
    return lanes


def budget(learner: Learner) -> int:
    """Twice the largest group: two lanes of whole groups."""
    batch = make_batch()
    groups = [np.flatnonzero(batch.group == g) for g in np.unique(batch.group)]
    learner.tokens_per_micro_batch = 10**6
    return 2 * max(sum(pack.num_tokens for pack in learner._packs(batch.episodes, rows)[0]) for rows in groups)


def test_gradients_scores_and_metrics_do_not_depend_on_the_lanes() -> None:
    learner = make_learner()
    learner.tokens_per_micro_batch = budget(learner)
    assert lanes_of(learner) == 2
    (found, grads), (again, same) = gradients_of(learner), gradients_of(learner)
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    assert found.metrics == again.metrics
    torch.set_num_threads(1)
    assert lanes_of(learner) == 1
    serial, expected = gradients_of(learner)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.logp, serial.logp, atol=1e-5)
    assert found.metrics == pytest.approx(serial.metrics, rel=1e-4)


def test_the_optimiser_takes_the_same_step() -> None:
    """Equal gradients are not enough: the fused AdamW reads their memory in order, whatever their strides are."""
    moved = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        learner = make_learner()
        learner.tokens_per_micro_batch = budget(learner)
        gradients_of(learner)
        assert all(p.grad is None or p.grad.is_contiguous() for p in learner.policy.trainable_parameters())
        learner.optim_step(1e-2)
        moved.append(learner.policy.state_dict())
    for name, value in moved[0].items():
        # the first step of AdamW is the sign of the gradient: where that is nearly 0 rounding decides
        assert float(((value - moved[1][name]).abs() > 1e-4).float().mean()) < 0.02, name


@pytest.mark.parametrize("reference", [False, True])
def test_scores_side_by_side(reference: bool) -> None:
    learner, batch = make_learner(), make_batch()
    learner.tokens_per_micro_batch = budget(learner)
    rows = np.arange(len(batch.episodes))
    found, _ = learner.scores(batch, rows, temperature=1.0, reference=reference)
    torch.set_num_threads(1)
    expected, _ = learner.scores(batch, rows, temperature=1.0, reference=reference)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not learner.policy.model.base_model.model.model.layers[0].mlp.up_proj.disable_adapters


def test_lanes_are_used_only_where_they_cannot_change_anything() -> None:
    learner = make_learner()
    learner.tokens_per_micro_batch = budget(learner)
    assert lanes_of(learner) == 2
    assert lanes_of(learner, exact_kl=True) == 1
    fused, learner.policy.held.fused = learner.policy.held.fused, None
    assert lanes_of(learner) == 1  # the model's own code makes no promise about threads
    learner.policy.held.fused = fused
    learner.tokens_per_micro_batch //= 2  # half of it holds no whole group: prompts would be repeated
    assert lanes_of(learner) == 1
    learner.tokens_per_micro_batch = 10**6  # everything fits into one pack, which would keep one lane waiting
    assert lanes_of(learner) == 2

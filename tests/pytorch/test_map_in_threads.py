"""Work side by side: order, bounds, errors, and a learner whose numbers do not depend on it."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import grads_of, make_batch, make_learner

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
    running, most, shares = set(), [], set()

    def work(item: int) -> int:
        running.add(item)
        most.append(len(running))
        shares.add(torch.get_num_threads())
        time.sleep(0.02 if item % 2 else 0.001)
        running.remove(item)
        return item * item

    with torch.no_grad():
        assert list(map_in_threads(work, range(9), 2)) == [n * n for n in range(9)]
    assert max(most) == 2
    assert shares == {1}
    assert torch.get_num_threads() == 2
    # one lane is the caller's own thread
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


def gradients_of(learner: Learner) -> tuple[Gradients, dict[str, torch.Tensor]]:
    batch, settings = make_batch(), {"temperature": 1.0, "max_completion_length": 9}
    found = learner.forward_backward(batch, np.arange(len(batch.episodes)), make_objective("dapo"), **settings)
    return found, grads_of(learner.policy)


def lanes_of(learner: Learner, **options: Any) -> int:
    batch = make_batch()
    packs, lanes = learner._packs(batch.episodes, np.arange(len(batch.episodes)), **options)
    assert sum(len(pack.rows) for pack in packs) == len(batch.episodes)
    assert lanes == 1 or lanes * max(pack.num_tokens for pack in packs) <= learner.tokens_per_micro_batch
    return lanes


def two_lanes() -> Learner:
    """A learner whose budget is twice the largest group: two lanes of whole groups."""
    learner, batch = make_learner(tokens_per_micro_batch=10**6), make_batch()
    groups = [np.flatnonzero(batch.group == g) for g in np.unique(batch.group)]
    largest = max(sum(pack.num_tokens for pack in learner._packs(batch.episodes, rows)[0]) for rows in groups)
    learner.tokens_per_micro_batch = 2 * largest
    return learner


def test_gradients_scores_and_metrics_do_not_depend_on_the_lanes() -> None:
    learner = two_lanes()
    assert lanes_of(learner) == 2
    (found, grads), (again, same) = gradients_of(learner), gradients_of(learner)
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    assert found.metrics == again.metrics
    torch.set_num_threads(1)
    assert lanes_of(learner) == 1
    serial, expected = gradients_of(learner)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.logp, serial.logp, atol=1e-5)
    assert found.metrics == pytest.approx(serial.metrics, rel=1e-4)


def test_the_optimiser_takes_the_same_step() -> None:
    """Equal gradients are not enough: the fused AdamW reads their memory in order, whatever their strides are."""
    moved = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        learner = two_lanes()
        gradients_of(learner)
        assert all(p.grad is None or p.grad.is_contiguous() for p in learner.policy.trainable_parameters())
        learner.optim_step(1e-2)
        moved.append(learner.policy.state_dict())
    for name, value in moved[0].items():
        # the first step of AdamW is the sign of the gradient: where that is nearly 0 rounding decides
        assert float(((value - moved[1][name]).abs() > 1e-4).float().mean()) < 0.02, name


@pytest.mark.parametrize("reference", [False, True])
def test_scores_side_by_side(reference: bool) -> None:
    learner, batch, found = two_lanes(), make_batch(), []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        found.append(learner.scores(batch, np.arange(len(batch.episodes)), temperature=1.0, reference=reference)[0])
    np.testing.assert_allclose(*found, atol=1e-5)
    assert not learner.policy.model.base_model.model.model.layers[0].mlp.up_proj.disable_adapters


def test_lanes_are_used_only_where_they_cannot_change_anything() -> None:
    learner = two_lanes()
    assert lanes_of(learner) == 2
    assert lanes_of(learner, exact_kl=True) == 1
    fused, learner.policy.held.fused = learner.policy.held.fused, None
    assert lanes_of(learner) == 1  # the model's own code makes no promise about threads
    learner.policy.held.fused = fused
    learner.tokens_per_micro_batch //= 2  # half of it holds no whole group: prompts would be repeated
    assert lanes_of(learner) == 1
    learner.tokens_per_micro_batch = 10**6  # everything fits into one pack, which would keep one lane waiting
    assert lanes_of(learner) == 2

"""Moments and reference in the host's memory: the same bits, and never more of them on the device than a slice.

There is no device here: "the host" is other memory of the same CPU, and the copies are counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_cases import make_batch
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from covey import GRPOConfig
from covey.config.algorithm import AlgorithmConfig
from covey.pytorch import optimizers
from covey.pytorch.learner import Learner
from covey.pytorch.optimizers import HostMemory, step_in_slices
from covey.pytorch.policy import Policy
from covey.pytorch.reference import Reference
from covey.rollout.learning import rows_with_gradient


class CountedMemory(HostMemory):
    """Counts what it moves."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.brought: list[int] = []
        self.kept: list[int] = []
        self.settled = 0

    def keep(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        self.kept.append(tensor.numel())
        return super().keep(tensor, into)

    def bring(self, held: Tensor) -> Tensor:
        self.brought.append(held.numel())
        return super().bring(held)

    def settle(self) -> None:
        self.settled += 1


def learner_of(host: HostMemory | None, *, use_peft: bool) -> Learner:
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), use_peft=use_peft, lora_r=4, seed=3)
    policy.host = host
    policy.reference = Reference(policy.model, update="ema", every=2, ema_decay=0.5, host=host)
    return Learner(policy, learning_rate=1e-2, weight_decay=0.1)


def train(learner: Learner, steps: range) -> None:
    objective = AlgorithmConfig(beta=0.1).objective()
    for step in steps:
        batch = make_batch(step)
        rows = rows_with_gradient(batch, objective)
        reference, _ = learner.scores(batch, rows, temperature=1.0, reference=True)
        learner.forward_backward(batch, rows, objective, temperature=1.0, max_completion_length=8, reference=reference)
        learner.optim_step(1e-2)


def all_of(learner: Learner) -> dict[str, Tensor]:
    return {f"{group}/{name}": t.clone() for group, held in learner.tensors().items() for name, t in held.items()}


def assert_equal(found: Learner, wanted: Learner) -> None:
    ours, theirs = all_of(found), all_of(wanted)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("use_peft", [True, False], ids=["adapter", "all weights"])
def test_steps_checkpoints_and_resuming_have_the_same_bits(use_peft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SLICE_BYTES", 8000)  # several slices, some parameters larger than one
    plain, moved, again = (learner_of(host, use_peft=use_peft) for host in (None, CountedMemory(), CountedMemory()))
    for learner in (plain, moved):
        train(learner, range(3))
    assert_equal(moved, plain)
    again.restore({group: dict(held) for group, held in moved.tensors().items()}, steps=3)
    for learner in (plain, again):
        train(learner, range(3, 5))
    assert_equal(again, plain)


def test_moments_come_over_in_slices_and_are_kept_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SLICE_BYTES", 4 * 100)
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (60, 40, 30, 300, 80)]
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
    optimizer, host, seen = torch.optim.AdamW(groups, lr=0.1), CountedMemory(), []
    optimizer.register_step_pre_hook(
        lambda made, *_: seen.append([p.numel() for group in made.param_groups for p in group["params"]])
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    step_in_slices(optimizer, host)
    assert seen == [[60, 40], [30], [300], [80]]
    assert (host.brought, sum(host.kept), host.settled) == ([], 2 * 510, 1)
    held = {id(p): optimizer.state[p]["exp_avg"].data_ptr() for p in parameters}
    step_in_slices(optimizer, host)
    assert sum(host.brought) == 2 * 510
    assert held == {id(p): optimizer.state[p]["exp_avg"].data_ptr() for p in parameters}
    assert [group["params"] for group in optimizer.param_groups] == [parameters[:2], parameters[2:]]


def test_what_was_restored_elsewhere_goes_to_the_host_with_the_next_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, device="meta"))
    host = HostMemory(torch.device("cpu"))
    assert host.keep(torch.ones(5), into=parameter.detach()).device.type == "cpu"


def test_a_reference_is_brought_for_its_passes_only() -> None:
    model, host = tiny_model("llama"), CountedMemory()
    reference = Reference(model, host=host)
    numbers = sum(p.numel() for p in model.parameters())
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert (sum(host.kept), host.brought, host.settled) == (numbers, [], 1)
    with reference.active():
        assert sum(host.brought) == numbers
        used = {name: p.data_ptr() for name, p in model.named_parameters()}
    kept = {name: t.data_ptr() for name, t in reference.named_parameters()}
    assert not set(used.values()) & (set(weights.values()) | set(kept.values()))
    assert weights == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_on_a_cpu_it_says_that_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=2, offload=True)
    assert policy.host is None
    assert "optim.offload has no effect" in caplog.text
    with pytest.warns(UserWarning, match=r"optim\.offload=True has no effect: .* the model is on a GPU"):
        GRPOConfig(offload=True, device="cpu")


def test_an_optimizer_of_your_own_keeps_its_moments(caplog: pytest.LogCaptureFixture) -> None:
    host = CountedMemory()
    learner = learner_of(host, use_peft=True)
    learner.use_optimizer(torch.optim.SGD(learner.policy.trainable_parameters(), lr=0.1, momentum=0.9))
    host.kept.clear()
    train(learner, range(1))
    assert host.kept == []
    assert "optim.offload" in caplog.text

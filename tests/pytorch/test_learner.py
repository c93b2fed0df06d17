"""The learner: gradients whatever the split, their sum in fixed point, the step, and moments in the host's memory (here
other memory of the same CPU, and the copies are counted). Steps as trees are as one sequence at a time, in float64.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import grads_of, make_batch, make_learner, sampled_of
from peft import LoraConfig
from tiny_models import FAMILIES, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from covey import GRPOConfig
from covey.algorithms import LOSSES, compute_unbiased_kl, make_objective
from covey.config.algorithm import AlgorithmConfig
from covey.pytorch import optimizers
from covey.pytorch.gradient_sum import QUANTUM, AloneInFixedPoint, ExactSum
from covey.pytorch.learner import Learner
from covey.pytorch.optimizers import HostMemory, step_in_slices
from covey.pytorch.passes import map_in_threads
from covey.pytorch.policy import Policy
from covey.pytorch.reference import Reference
from covey.rollout.learning import Correction, Gradients, rows_with_gradient
from covey.types import Batch, Episode, Support
from fakes import raises, slow

Found = tuple[Gradients, dict[str, torch.Tensor]]
SLOW = pytest.mark.slow
OFTEN = ("dapo", "gspo", "kl_cov")
TEMPERATURE = 0.8
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"tokens_per_micro_batch": 10_000},
    "walked": {"tokens_per_micro_batch": 16},
    "walked far": {"tokens_per_micro_batch": 3},
    "cut": {"tokens_per_micro_batch": 16, "share": AloneInFixedPoint()},
}
OBJECTIVES: dict[str, dict[str, Any]] = {name: {"loss_type": name} for name in sorted(LOSSES)}
KINDS = ("k1", "k2", "k3", "exact", "exact_weighted")
OBJECTIVES |= {f"beta {kind}": {"beta": 0.1, "kl_estimator": kind} for kind in KINDS} | {
    "entropy": {"entropy_coef": 0.05},
    "kept exact": {"loss_type": "reinforce_kept", "beta": 0.1, "kl_estimator": "exact_weighted"},
    "corrected": {"correction": Correction("token_truncate", 2.0)},
    "corrected by sequence": {"correction": Correction("sequence_mask", 1.5, 0.5), "loss_type": "gspo"},
}
TELLING = ("grpo", "gspo", "kept exact", "corrected by sequence")
"""With these every way is tried; with the others those that differ most."""


def gradient(learner: Learner, batch: Batch, loss_type: str, **options: Any) -> dict[str, torch.Tensor]:
    return run(learner, batch, loss_type, **options)[1]


def backward(learner: Learner, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    return grads_of(learner.policy)


def logits_of(model: Any, episode: Episode) -> torch.Tensor:
    found = model(input_ids=torch.from_numpy(episode.token_ids)[None]).logits[0, :-1] / 0.8
    return found[torch.from_numpy(episode.sampled[1:])]


def logp_of(logits: torch.Tensor, episode: Episode) -> torch.Tensor:
    said = torch.from_numpy(episode.token_ids[episode.sampled])[:, None]
    return torch.log_softmax(logits, -1).gather(1, said)[:, 0]


@pytest.mark.parametrize("loss_type", [*OFTEN, *(pytest.param(x, marks=SLOW) for x in sorted({*LOSSES} - {*OFTEN}))])
@pytest.mark.parametrize("agents", [False, True], ids=["one turn", "agents"])
def test_split_into_micro_batches_leaves_the_gradient(loss_type: str, agents: bool) -> None:
    batch = make_batch(agents=agents)
    whole, split = (gradient(make_learner(tokens_per_micro_batch=n), batch, loss_type, beta=0.1) for n in (10_000, 16))
    assert whole
    torch.testing.assert_close(whole, split, rtol=2e-4, atol=1e-6)


def test_gradient_matches_the_formula_on_the_plain_model() -> None:
    """Loss type grpo by its definition, one sequence at a time."""
    batch, learner, total = make_batch(), make_learner(), torch.zeros(())
    ours = gradient(learner, batch, "grpo")
    for row, episode in enumerate(batch.episodes):
        logp = logp_of(logits_of(learner.policy.model, episode), episode)
        ratio = torch.exp(logp - torch.from_numpy(batch.old_logprobs[row, : len(logp)]))
        advantage = float(batch.advantages[row, 0])
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total + per_token.mean() / len(batch.episodes)
    torch.testing.assert_close(ours, backward(learner, total), rtol=1e-3, atol=1e-6)


def test_gradient_of_the_usmle_document_on_the_plain_model() -> None:
    """usmle-qa.md: sums over kept sequences by their number, the KL of all tokens."""
    full, learner = make_batch(), make_learner()
    dropped = np.zeros(full.mask.shape, np.bool_)
    dropped[[1, 5, 6]] = full.mask[[1, 5, 6]]
    batch = replace(full, mask=full.mask & ~dropped, excluded={"validity_mask": dropped})
    ours = gradient(learner, batch, "reinforce_kept", beta=0.1, kl_estimator="exact_weighted")
    model, policy_loss, kl = learner.policy.model, torch.zeros((), dtype=torch.float64), []
    for row, episode in enumerate(batch.episodes):
        current = logits_of(model, episode).double()
        with torch.no_grad(), model.disable_adapter():
            frozen = logits_of(model, episode).double()
        sequence = logp_of(current, episode).sum()
        policy_loss = policy_loss - sequence * float(full.advantages[row, 0]) * (row not in (1, 5, 6)) / 9
        kl.append(compute_unbiased_kl(current, frozen))
    expected = backward(learner, policy_loss + 0.1 * torch.cat(kl).mean())
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=5e-5)


def test_rows_without_gradient_are_skipped_exactly() -> None:
    batch, objective, found = make_batch(), make_objective("dapo"), []
    batch.advantages[:4] = 0  # a tied group
    batch.mask[5] = False
    rows = rows_with_gradient(batch, objective)
    assert rows.tolist() == [4, 6, 7, 8, 9, 10, 11]
    assert rows_with_gradient(batch, make_objective("dapo", beta=0.1)).tolist() == [*range(5), *range(6, 12)]
    for chosen in (rows, np.arange(12)):
        learner = make_learner()
        learner.forward_backward(batch, chosen, objective, temperature=1.0, max_completion_length=12)
        found.append(grads_of(learner.policy))
    torch.testing.assert_close(*found, rtol=2e-4, atol=1e-7)


def test_correction_for_a_sampler_that_disagrees() -> None:
    """With the correction the ratio starts at 1 and the sampler's error enters through the bounded factor only."""
    learner = make_learner()
    settings = {"temperature": 1.0, "max_completion_length": 12, "correction": Correction("token_mask", 1e-9)}
    run = learner.forward_backward(make_batch(), np.arange(12), make_objective("grpo"), **settings)
    assert run.metrics["ratio_min"] == run.metrics["ratio_max"] == 1.0
    assert all(float(grad.abs().max()) == 0 for grad in grads_of(learner.policy).values())


def test_a_step_clips_refuses_what_is_not_finite_and_keeps_the_embeddings_ratio_of_rates() -> None:
    learner = make_learner(max_grad_norm=0.5)
    before, parameters = learner.policy.state_dict(), learner.policy.trainable_parameters()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert np.isnan(learner.optim_step(1e-2))
    assert all(torch.equal(before[name], value) for name, value in learner.policy.state_dict().items())
    assert learner.steps == 0
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert learner.optim_step(1e-2) == pytest.approx(sum(p.numel() for p in parameters) ** 0.5, rel=1e-4)
    assert learner.steps == 1
    # Adam's first step moves every weight by the learning rate.
    for name, value in learner.policy.state_dict().items():
        torch.testing.assert_close(before[name] - value, torch.full_like(value, 1e-2), rtol=1e-3, atol=0)
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), use_peft=False)
    learner = Learner(policy, learning_rate=1e-3, embedding_lr=1e-2)
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optim_step(5e-4)
    rates = {group["name"]: group["lr"] for group in learner.optimizer.param_groups}
    assert (rates["embeddings"], rates["weights"]) == pytest.approx((5e-3, 5e-4))


def parameters() -> list[Tensor]:
    return [torch.zeros(size, requires_grad=True) for size in ((3, 2), (5,), (1,))]


def pack(seed: int, scale: float) -> list[Tensor | None]:
    """Gradients of one pack: of the first two parameters only."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 2, generator=generator) * scale, torch.randn(5, generator=generator) * scale, None]


def added(packs: Sequence[Sequence[Tensor | None]], ranks: Sequence[Sequence[int]]) -> list[Tensor]:
    """The sum that each rank arrives at, when these packs are on these ranks."""
    own = [parameters() for _ in ranks]
    sums = [ExactSum(each, len(packs)) for each in own]
    for total, numbers in zip(sums, ranks, strict=True):
        for number in numbers:
            total.add(packs[number])
    together = torch.stack([total._total for total in sums]).sum(dim=0)
    for total in sums:
        total._reduce = lambda tensor: tensor.copy_(together)  # type: ignore[assignment, return-value]
        total.finish()
    for other in own[1:]:
        assert all(_equal(a.grad, b.grad) for a, b in zip(own[0], other, strict=True))
    return own[0]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or np.array_equal(one, other, equal_nan=True)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1e-12, 1e-6, 1.0, 1e3]), min_size=1, max_size=7), st.integers(1, 4), st.randoms())
def test_any_order_and_partition_gives_one_sum(scales: list[float], world: int, random: object) -> None:
    packs = [pack(seed, scale) for seed, scale in enumerate(scales)]
    order = list(range(len(packs)))
    one = added(packs, [order])
    random.shuffle(order)  # type: ignore[attr-defined]
    many = added(packs, [order[rank::world] for rank in range(world)])
    assert all(_equal(a.grad, b.grad) for a, b in zip(one, many, strict=True))
    true = [sum(each[number].double() for each in packs) for number in (0, 1)]  # type: ignore[union-attr]
    for parameter, expected in zip(one, true, strict=False):
        np.testing.assert_allclose(parameter.grad.double(), expected, rtol=2**-23, atol=len(packs) * QUANTUM)
    assert one[2].grad is None  # nothing depends on it: AdamW is to leave it alone


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**16)])
def test_what_is_out_of_range_makes_the_gradient_not_finite(value: float) -> None:
    broken = pack(0, 1.0)
    broken[1][2] = value  # type: ignore[index]
    for ranks in ([[0, 1]], [[0], [1]]):
        found = added([broken, pack(1, 1.0)], ranks)
        assert not any(torch.isfinite(p.grad).any() for p in found[:2] if p.grad is not None)
        assert found[0].grad is not None


class CountedMemory(HostMemory):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.brought, self.kept, self.settled = list[int](), list[int](), 0

    def keep(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        self.kept.append(tensor.numel())
        return super().keep(tensor, into)

    def bring(self, held: Tensor) -> Tensor:
        self.brought.append(held.numel())
        return super().bring(held)

    def settle(self) -> None:
        self.settled += 1


def hosted(host: HostMemory | None, *, use_peft: bool) -> Learner:
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


def assert_equal(found: Learner, wanted: Learner) -> None:
    ours, theirs = found.tensors(), wanted.tensors()
    assert [(group, *held) for group, held in ours.items()] == [(group, *held) for group, held in theirs.items()]
    assert all(torch.equal(ours[group][name], t) for group, held in theirs.items() for name, t in held.items())


@pytest.mark.parametrize("use_peft", [True, False], ids=["adapter", "all weights"])
def test_steps_checkpoints_and_resuming_have_the_same_bits(use_peft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "SLICE_BYTES", 8000)  # several slices, some parameters larger than one
    plain, moved, again = (hosted(host, use_peft=use_peft) for host in (None, CountedMemory(), CountedMemory()))
    for learner in (plain, moved):
        train(learner, range(3))
    assert_equal(moved, plain)
    again.restore({group: dict(held) for group, held in moved.tensors().items()}, steps=3)
    for learner in (plain, again):
        train(learner, range(3, 5))
    assert_equal(again, plain)


def test_moments_come_over_in_slices_and_a_reference_for_its_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # what was restored elsewhere goes to the host with the next step
    assert host.keep(torch.ones(5), into=torch.ones(5, device="meta")).device.type == "cpu"
    model, host = tiny_model("llama"), CountedMemory()
    reference, numbers = Reference(model, host=host), sum(p.numel() for p in model.parameters())
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert (sum(host.kept), host.brought, host.settled) == (numbers, [], 1)
    with reference.active():
        assert sum(host.brought) == numbers
        used = {name: p.data_ptr() for name, p in model.named_parameters()}
    kept = {name: t.data_ptr() for name, t in reference.named_parameters()}
    assert not set(used.values()) & (set(weights.values()) | set(kept.values()))
    assert weights == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_on_a_cpu_and_with_an_optimizer_of_your_own_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    assert Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=2, offload=True).host is None
    assert "optim.offload has no effect" in caplog.text
    with pytest.warns(UserWarning, match=r"optim\.offload=True has no effect: .* the model is on a GPU"):
        GRPOConfig(offload=True, device="cpu")
    caplog.clear()
    host = CountedMemory()
    learner = hosted(host, use_peft=True)
    learner.use_optimizer(torch.optim.SGD(learner.policy.trainable_parameters(), lr=0.1, momentum=0.9))
    host.kept.clear()
    train(learner, range(1))
    assert host.kept == []
    assert "optim.offload" in caplog.text


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_at_most_two_at_a_time_and_an_error_when_nothing_is_under_way_any_more() -> None:
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
    assert (max(most), shares, torch.get_num_threads()) == (2, {1}, 2)
    # one lane is the caller's own thread
    assert set(map_in_threads(lambda _: threading.get_ident(), range(3), 1)) == {threading.get_ident()}
    ended = []

    def work(item: int) -> int:
        if item == 1:
            raise MemoryError("no room")
        time.sleep(0.05)
        ended.append(item)
        return item

    raises(MemoryError, "no room", list, map_in_threads(work, range(50), 2))
    now = len(ended)
    time.sleep(0.1)
    assert now < 10
    assert (len(ended), torch.get_num_threads()) == (now, 2)


def gradients_of(learner: Learner) -> Found:
    batch, settings = make_batch(), {"temperature": 1.0, "max_completion_length": 9}
    found = learner.forward_backward(batch, np.arange(12), make_objective("dapo"), **settings)
    return found, grads_of(learner.policy)


def lanes_of(learner: Learner, **options: Any) -> int:
    packs, lanes = learner._packs(make_batch().episodes, np.arange(12), **options)
    assert sum(len(pack.rows) for pack in packs) == 12
    assert lanes == 1 or lanes * max(pack.num_tokens for pack in packs) <= learner.tokens_per_micro_batch
    return lanes


def two_lanes() -> Learner:
    """A learner whose budget is twice the largest group: two lanes of whole groups."""
    learner, batch = make_learner(tokens_per_micro_batch=10**6), make_batch()
    groups = [np.flatnonzero(batch.group == g) for g in np.unique(batch.group)]
    largest = max(sum(pack.num_tokens for pack in learner._packs(batch.episodes, rows)[0]) for rows in groups)
    learner.tokens_per_micro_batch = 2 * largest
    return learner


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


def test_lanes_are_used_only_where_they_change_no_gradient_score_or_metric() -> None:
    learner = two_lanes()
    assert (lanes_of(learner), lanes_of(learner, alone=True)) == (2, 1)
    fused, learner.policy.held.fused = learner.policy.held.fused, None
    assert lanes_of(learner) == 1  # the model's own code makes no promise about threads
    learner.policy.held.fused = fused
    learner.tokens_per_micro_batch //= 2  # half of it holds no whole group: prompts would be repeated
    assert lanes_of(learner) == 1
    learner.tokens_per_micro_batch = 10**6  # everything fits into one pack, which would keep one lane waiting
    assert lanes_of(learner) == 2
    learner = two_lanes()
    assert lanes_of(learner) == 2
    (found, grads), (again, same) = gradients_of(learner), gradients_of(learner)
    scores = [learner.scores(make_batch(), np.arange(12), temperature=1.0, reference=r)[0] for r in (False, True)]
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    assert found.metrics == again.metrics
    torch.set_num_threads(1)
    assert lanes_of(learner) == 1
    for reference, side_by_side in enumerate(scores):
        alone, _ = learner.scores(make_batch(), np.arange(12), temperature=1.0, reference=bool(reference))
        np.testing.assert_allclose(side_by_side, alone, atol=1e-5)
    assert not learner.policy.model.base_model.model.model.layers[0].mlp.up_proj.disable_adapters
    serial, expected = gradients_of(learner)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.logp, serial.logp, atol=1e-5)
    assert found.metrics == pytest.approx(serial.metrics, rel=1e-4)


def learner_of(family: str = "llama", *, model: Any = None, use_peft: bool = True, **options: Any) -> Learner:
    own = {name: options.pop(name) for name in ("tokens_per_micro_batch", "share") if name in options}
    model = model or tiny_model(family)
    if family != "gemma2":  # whose own code returns NaN for padding in float64
        model = model.double()
    policy = Policy.load(model, tiny_tokenizer(), lora_r=4, seed=3, use_peft=use_peft, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            if "lora_B" in name or not use_peft:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.05)
    return Learner(policy, learning_rate=1e-2, **own)


def tree_batch(seed: int, *, rows: int = 14, agents: bool = True, supports: bool = False) -> Batch:
    """Common instructions, prompts, forks within completions, equal completions, observations; numbers of their own."""
    rng = np.random.default_rng(seed)
    instructions = rng.integers(4, 97, 5)
    prompts = [rng.integers(4, 97, rng.integers(1, 4)) for _ in range(3)]
    episodes: list[Episode] = []
    for row in range(rows):
        before = [e for e in episodes if e.num_sampled > 1]
        if before and row % 3:
            other = before[rng.integers(len(before))]
            cut = int(rng.integers(int(np.argmax(other.sampled)), len(other.token_ids) + 1))
            ids, sampled = other.token_ids[:cut], other.sampled[:cut]
        else:
            ids = np.concatenate([instructions, prompts[row % 3]])
            sampled = np.zeros(len(ids), np.bool_)
        more = int(rng.integers(0 if sampled.any() else 1, 7))
        new = rng.random(more) < 0.7 if agents else np.ones(more, np.bool_)
        if not sampled.any():
            new[0] = True
        ids, sampled = np.concatenate([ids, rng.integers(4, 97, more)]), np.concatenate([sampled, new])
        logprobs, kept = np.where(sampled, rng.normal(-4, 0.4, len(ids)), 0).astype(np.float32), None
        if supports:
            choices = [np.unique([*rng.integers(4, 97, 2), token]) for token in ids[sampled]]
            kept = Support(np.concatenate(choices), np.cumsum([0, *map(len, choices)]))
        episodes.append(Episode(ids, sampled, logprobs, "", "stop", 1, kept))
    exists, old = sampled_of(episodes)
    advantages = np.where(exists, rng.normal(size=exists.shape), 0).astype(np.float32)
    masked = exists & (rng.random(exists.shape) < 0.15)
    return Batch(tuple(episodes), np.arange(rows) // 3, advantages, exists & ~masked, old, {"validity_mask": masked})


def run(learner: Learner, batch: Batch, loss_type: str = "grpo", correction: Any = None, **options: Any) -> Found:
    objective, rows = make_objective(loss_type, **options), np.arange(len(batch.episodes))
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "max_completion_length": 12, "correction": correction}
    logp, entropy = learner.scores(batch, rows, temperature=TEMPERATURE, entropy=True)
    if objective.estimates_kl:
        settings["reference"], _ = learner.scores(batch, rows, temperature=TEMPERATURE, reference=True)
    if objective.loss.select is not None:
        settings["selected"] = objective.select(logp, batch.old_logprobs, batch.advantages, batch.mask, entropy)
    found = learner.forward_backward(batch, rows, objective, **settings)
    np.testing.assert_allclose(found.logp, logp, rtol=0, atol=2e-6)
    return found, grads_of(learner.policy)


def assert_same(ours: Found, theirs: Found) -> None:
    (mine, grads), (other, expected) = ours, theirs
    np.testing.assert_array_equal(mine.scored, other.scored)
    for name in ("logp", "entropy", "kl"):
        if getattr(other, name) is not None:
            np.testing.assert_allclose(getattr(mine, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    assert mine.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-6)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-5 * largest)


@cache
def learner_in(way: str) -> Learner:
    return learner_of(**WAYS[way])


@pytest.fixture(scope="module")
def alone() -> Learner:
    return learner_of(prefix_sharing=False, tokens_per_micro_batch=1)


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        pytest.param(name, way, marks=() if name in TELLING[:1] or (way == "walked" and name in TELLING) else SLOW)
        for name in OBJECTIVES
        for way in WAYS
        if name in TELLING or way in ("whole", "walked")
    ],
)
def test_every_objective_is_that_of_one_sequence_at_a_time(objective: str, way: str, alone: Learner) -> None:
    ours = run(learner_in(way), tree_batch(0), **OBJECTIVES[objective])
    assert_same(ours, run(alone, tree_batch(0), **OBJECTIVES[objective]))
    tokens = ours[0].tokens
    assert (tokens.computed == tokens.unique) == (way != "cut")
    assert tokens.raw > 2 * tokens.unique


@pytest.mark.parametrize("way", [pytest.param("whole", marks=SLOW), "walked"])
@pytest.mark.parametrize("use_peft", [True, pytest.param(False, marks=SLOW)], ids=["lora", "full"])
@pytest.mark.parametrize("family", [slow(n) if n in ("qwen2", "qwen3", "mistral") else n for n in FAMILIES])
def test_every_family_with_windows_and_soft_caps(family: str, use_peft: bool, way: str) -> None:
    ways = (WAYS[way], {"prefix_sharing": False, "tokens_per_micro_batch": 1})
    learners = (learner_of(family, use_peft=use_peft, **each) for each in ways)
    assert_same(*(run(each, tree_batch(1), "dapo", beta=0.1, kl_estimator="exact") for each in learners))


@pytest.mark.parametrize("way", ["walked", *(pytest.param(way, marks=SLOW) for way in WAYS if way != "walked")])
def test_kept_supports(way: str, alone: Learner) -> None:
    """Equal tokens that were drawn from other ids have other probabilities, and are scored apart."""
    batch = tree_batch(2, supports=True)
    for objective in ({}, {"beta": 0.1, "kl_estimator": "exact"}, {"entropy_coef": 0.05}):
        assert_same(run(learner_in(way), batch, **objective), run(alone, batch, **objective))


@pytest.mark.parametrize("way", [pytest.param("whole", marks=SLOW), "walked"])
def test_slower_ways_give_the_same(way: str, alone: Learner) -> None:
    expected = run(alone, tree_batch(3), beta=0.1)
    for checkpointing, fused in ((True, True), (False, False), (True, False)):
        learner = learner_of(gradient_checkpointing=checkpointing, fused_layers=fused, **WAYS[way])
        assert_same(run(learner, tree_batch(3), beta=0.1), expected)


@pytest.mark.parametrize("seed", [4, 5, *(pytest.param(seed, marks=SLOW) for seed in range(6, 12))])
def test_random_trees_at_random_budgets(seed: int, alone: Learner) -> None:
    batch = tree_batch(seed, rows=20, agents=bool(seed % 2))
    budget = int(np.random.default_rng(seed).integers(1, 60))
    ours = run(learner_of(tokens_per_micro_batch=budget), batch, "cispo", beta=0.05)
    assert_same(ours, run(alone, batch, "cispo", beta=0.05))


@pytest.mark.parametrize("kind", ["adapter", pytest.param("copy", marks=SLOW)])
def test_trained_heads_where_a_trunk_scores_nothing(kind: str) -> None:
    """Prompts that part inside are trunks without a target: their backward begins at nothing but their followers."""
    options: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "v_proj", "lm_head"]}
    if kind == "copy":
        options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    found = []
    for shared, budget in ((True, 12), (False, 1)):
        model, config = tiny_model("llama", tie_word_embeddings=False), LoraConfig(r=2, **options)
        learner = learner_of(model=model, lora_config=config, prefix_sharing=shared, tokens_per_micro_batch=budget)
        found.append(run(learner, tree_batch(0), beta=0.1))
    assert_same(*found)


def test_rotations_that_depend_on_the_length_share_nothing_and_run_row_by_row() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 12}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    config = LlamaConfig(**(tiny_model("llama").config.to_dict() | {"rope_parameters": rope}))
    torch.manual_seed(0)
    policy = Policy.load(LlamaForCausalLM(config), tiny_tokenizer(), lora_r=4, seed=3)
    assert policy.prefix_sharing_obstacle == "rope type 'longrope' depends on the sequence length"
    batch = tree_batch(0)
    assert max(len(episode.token_ids) for episode in batch.episodes) > 14
    for budget in (10_000, 16):
        learner = Learner(policy, learning_rate=1e-2, tokens_per_micro_batch=budget)
        logp, _ = learner.scores(batch, np.arange(len(batch.episodes)), temperature=TEMPERATURE)
        for row, episode in enumerate(batch.episodes):
            at = np.flatnonzero(episode.sampled)
            with torch.no_grad():
                logits = policy.model(torch.from_numpy(episode.token_ids[None, : at[-1]])).logits[0] / TEMPERATURE
            own = logits.log_softmax(-1)[torch.from_numpy(at - 1), torch.from_numpy(episode.token_ids[at])]
            np.testing.assert_allclose(logp[row, : len(at)], own.numpy(), rtol=0, atol=1e-5)


def test_equal_completions_are_computed_once_and_counted_as_often_as_they_are(alone: Learner) -> None:
    batch = tree_batch(0, rows=1)
    whole = (batch.advantages, batch.mask | batch.excluded["validity_mask"], batch.old_logprobs)
    advantages, mask, old = (np.repeat(x, 4, 0) for x in whole)
    advantages *= np.arange(1, 5, dtype=np.float32)[:, None]
    four = Batch(batch.episodes * 4, np.zeros(4, np.int64), advantages, mask, old)
    ours = run(learner_of(), four)
    assert_same(ours, run(alone, four))
    one, tokens = np.flatnonzero(batch.episodes[0].sampled)[-1], ours[0].tokens
    assert (tokens.raw, tokens.unique, tokens.computed) == (4 * one, one, one)

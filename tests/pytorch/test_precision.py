"""Which numbers have which precision: masters, adapters, log-probabilities, moments, and the gradients of float16."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import fill, make_batch
from tiny_models import tiny_model, tiny_tokenizer

from covey.algorithms import make_objective
from covey.config import GRPOConfig
from covey.config.algorithm import AlgorithmConfig
from covey.errors import CheckpointError, ConfigError, ModelError
from covey.metric_names import describe_metric
from covey.pytorch.backend import BACKEND
from covey.pytorch.footprint import BYTES_PER_MOMENTS
from covey.pytorch.learner import Learner
from covey.pytorch.optimizers import LossScale, make_optimizer, optimizer_tensors
from covey.pytorch.policy import Policy
from covey.rollout.learning import rows_with_gradient
from covey.rollout.packing import pack_episodes
from covey.training.checkpoint import load_checkpoint, save_checkpoint
from covey.training.update import update
from fakes import raises

OBJECTIVE = make_objective("grpo")
(PACK,) = pack_episodes(make_batch().episodes)


def policy_of(*, use_peft: bool = True, lora_r: int = 4, **options: Any) -> Policy:
    model = tiny_model("llama", hidden_size=64)
    policy = Policy.load(model, tiny_tokenizer(), use_peft=use_peft, lora_r=lora_r, **options)
    return fill(policy) if use_peft else policy


def add_gradient(learner: Learner, seed: int = 0, scale: float = 1.0) -> None:
    batch = make_batch(seed)
    batch.advantages[:] *= scale
    rows = rows_with_gradient(batch, OBJECTIVE)
    learner.forward_backward(batch, rows, OBJECTIVE, temperature=0.8, max_completion_length=12)


def step(learner: Learner, seed: int) -> float:
    add_gradient(learner, seed)
    return learner.optim_step(1e-2)


def gradient(policy: Policy, loss_scale: LossScale | None = None, scale: float = 1.0) -> torch.Tensor:
    learner = Learner(policy, learning_rate=1e-2, loss_scale=loss_scale)
    add_gradient(learner, scale=scale)
    return torch.cat([torch.from_numpy(g).flatten() for g in learner.gradient().values()]).double() / scale


def stepped(config: GRPOConfig) -> tuple[Policy, Learner, dict[str, torch.Tensor]]:
    policy = BACKEND.make_policy(config, tiny_model("llama"), tiny_tokenizer())
    learner, before = BACKEND.make_learner(config, policy), policy.state_dict()
    while not learner.steps:  # float16's scale may have to come down first
        step(learner, 0)
    assert {m.dtype for s in learner.optimizer.state.values() for m in s.values()} == {torch.float32}
    return policy, learner, before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_under_autocast_and_adapters_of_a_narrow_base_are_float32(dtype: str) -> None:
    policy, learner, before = stepped(GRPOConfig(use_peft=False, autocast=dtype))
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert all(not torch.equal(before[name], p) for name, p in policy.named_trainable_parameters())
    assert learner.optimizer.defaults["fused"]
    policy, other, _ = stepped(GRPOConfig(dtype=dtype))
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters() if p.dim() > 1}
    assert kinds == {(True, torch.float32), (False, getattr(torch, dtype))}
    assert {each.loss_scale is not None for each in (learner, other)} == {dtype == "float16"}


def test_autocast_of_a_frozen_base_on_a_cpu_holds_it_in_bfloat16(model_folder: Path) -> None:
    policy = BACKEND.make_policy(GRPOConfig(model=str(model_folder), autocast="bfloat16", device="cpu"))
    assert {p.dtype for p in policy.model.parameters() if not p.requires_grad and p.dim() > 1} == {torch.bfloat16}
    assert policy.fused_obstacle is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", [{}, {"fused_layers": False}, {"prefix_sharing": False}], ids=str)
def test_log_probabilities_and_entropies_are_float32(dtype: str, how: dict[str, Any]) -> None:
    """Softmax and all before it but the hidden states; in the model's type they would be off by hundredths."""
    policy = policy_of(dtype=dtype, **how)
    is_narrow = dtype == "bfloat16"  # then products are rounded as they are made, and all else is in float32
    assert (policy.fused_obstacle is None) == (not how)
    with torch.no_grad():
        found = policy.score(PACK, temperature=0.7, entropy=True)
        hidden, head = policy.held.hidden(PACK), policy.held.lm.get_output_embeddings().weight
        product = (hidden.bfloat16() @ head.T).double() if is_narrow else hidden.double() @ head.double().T
        wide = (product / 0.7).log_softmax(-1)
        narrow = (hidden.to(head.dtype) @ head.T / 0.7).log_softmax(-1)
    targets = torch.from_numpy(PACK.targets)[:, None]
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    expected, rounded = wide.gather(1, targets)[:, 0], narrow.gather(1, targets)[:, 0]
    assert float((found.logp - expected).abs().max()) < 1e-5
    assert float((found.entropy + (wide.exp() * wide).sum(-1)).abs().max()) < 1e-5
    assert float((rounded - expected).abs().max()) > 1e-3


def learner_of(optimizer: str) -> Learner:
    if "8bit" in optimizer:
        pytest.importorskip("bitsandbytes")
    return Learner(policy_of(lora_r=64), learning_rate=1e-2, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_what_is_saved_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    unbroken, first, second = (learner_of(optimizer) for _ in range(3))
    for seed in range(4):
        step(unbroken, seed)
        if seed == 2:
            second.restore(load_checkpoint(save_checkpoint(tmp_path, 2, first.tensors(), {})).tensors, 2)
        step(first if seed < 2 else second, seed)
    mine, theirs = second.tensors(), unbroken.tensors()
    assert mine["optimizer"].keys() == theirs["optimizer"].keys()
    for group, tensors in theirs.items():
        for name, tensor in tensors.items():
            assert torch.equal(mine[group][name], tensor), name
            assert mine[group][name].dtype == tensor.dtype


def test_moments_of_eight_bits_take_a_quarter_lead_to_about_the_same_and_are_not_the_others() -> None:
    learners = {name: learner_of(name) for name in ("adamw", "adamw_8bit")}
    start = torch.cat([p.detach().flatten().clone() for p in learners["adamw"].policy.trainable_parameters()])
    moved, size = {}, {}
    for name, learner in learners.items():
        for seed in range(3):
            step(learner, seed)
        moved[name] = torch.cat([p.detach().flatten() for p in learner.policy.trainable_parameters()]) - start
        moments = {k: t for k, t in learner.tensors()["optimizer"].items() if not k.endswith("/step")}
        size[name] = sum(tensor.nbytes for tensor in moments.values())
    assert size["adamw"] == 8 * len(start)
    assert torch.nn.functional.cosine_similarity(*moved.values(), dim=0) > 0.99
    # A number takes 2 bytes and 8/256 of scales in place of 8; matrices of 32 x 64 numbers are too small for that.
    assert 3 < size["adamw"] / size["adamw_8bit"] < 4
    # so of one that is large enough, as the footprint counts it
    parameter = torch.nn.Parameter(torch.ones(256, 400))
    parameter.grad = torch.ones_like(parameter)
    options: dict[str, Any] = {"betas": (0.9, 0.999), "epsilon": 1e-8, "device": torch.device("cpu")}
    optimizer = make_optimizer("adamw_8bit", [{"params": [parameter], "lr": 1e-2, "weight_decay": 0.0}], **options)
    optimizer.step()
    held = sum(t.nbytes for k, t in optimizer_tensors(optimizer, [("", parameter)]).items() if not k.endswith("/step"))
    assert held / parameter.numel() == pytest.approx(BYTES_PER_MOMENTS["adamw_8bit"], rel=0.01)
    wide, narrow = learners.values()
    raises(CheckpointError, "those of bitsandbytes' optimizers", wide.restore, narrow.tensors(), 3)
    raises(CheckpointError, r"has exp_avg \(64, 64\).*the optimizer absmax1 \(16,\)", narrow.restore, wide.tensors(), 3)


def test_paged_moments_on_a_cpu_are_not_paged_and_a_missing_bitsandbytes_is_said(caplog: Any, monkeypatch: Any) -> None:
    with caplog.at_level(logging.WARNING):
        paged, plain = learner_of("paged_adamw_8bit"), learner_of("adamw_8bit")
    assert "a CPU has no paged memory, so it is adamw_8bit" in caplog.text
    assert step(paged, 0) == step(plain, 0)
    assert_equal(paged.policy, plain.policy.state_dict())
    policy = policy_of()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = r"'adamw_8bit': bitsandbytes is not installed; run pip install 'covey\[quant"
    raises(ConfigError, said, Learner, policy, learning_rate=1e-2, optimizer="adamw_8bit")
    # before anything is loaded
    raises(ConfigError, "bitsandbytes is not installed", BACKEND.check, GRPOConfig(optimizer="adamw_8bit"))
    raises(ModelError, "torchao is not installed", BACKEND.check, GRPOConfig(quantization="torchao_int8"))


def test_the_scale_moves_as_torch_s_does_and_small_gradients_survive_float16_by_it() -> None:
    ours, theirs, parameter = LossScale(), torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    overflows = {2, 3, *np.random.default_rng(0).integers(10, 5000, 3).tolist()}
    for number in range(8000):
        finite = number not in overflows
        theirs.scale(torch.ones(()))  # makes its tensors
        parameter.grad = torch.tensor([1.0 if finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        ours.after_step(finite=finite)
        assert ours.value == theirs.get_scale(), number
    assert ours.value > 2.0**12
    # losses of 1e-6, whose gradients in the layers are below float16's smallest number
    exact = gradient(policy_of(use_peft=False))
    plain, scaled = (gradient(policy_of(use_peft=False, autocast="float16"), x, 1e-6) for x in (None, LossScale()))
    assert float((plain - exact).norm() / exact.norm()) > 0.1
    assert float((scaled - exact).norm() / exact.norm()) < 0.02


def test_a_gradient_that_overflows_takes_no_step_and_is_said() -> None:
    policies = [policy_of(use_peft=False, autocast="float16") for _ in range(2)]
    learner, resumed = (Learner(policy, learning_rate=1e-2, loss_scale=LossScale()) for policy in policies)
    batch = make_batch()
    batch.advantages[:] *= 1e4
    before = learner.policy.state_dict()
    options: dict[str, Any] = {"temperature": 0.8, "max_completion_length": 12}
    done = update(learner, batch, AlgorithmConfig(), 1e-2, **options)
    assert done.optimizer_steps == learner.steps == 0
    assert "no optimiser step was taken, and float16's loss scale is halved to 32768" in done.skipped
    assert (done.metrics["loss_scale"], done.metrics["skipped_steps"]) == (2.0**15, 1)
    assert all(describe_metric(name) for name in done.metrics)
    assert_equal(learner.policy, before)
    while not (done := update(learner, batch, AlgorithmConfig(), 1e-2, **options)).optimizer_steps:
        assert done.skipped
    assert done.metrics["skipped_steps"] == 0
    assert 1 < learner.loss_scale.value < 2.0**15
    assert learner.loss_scale.good_steps == 1
    resumed.restore(learner.tensors(), learner.steps)
    assert (vars(resumed.loss_scale), step(resumed, 1)) == (vars(learner.loss_scale), step(learner, 1))
    assert_equal(learner.policy, resumed.policy.state_dict())


def assert_equal(policy: Policy, wanted: dict[str, torch.Tensor]) -> None:
    assert [name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, wanted[name])] == []

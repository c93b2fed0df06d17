"""The reference is the starting policy until its rule says otherwise, and never trains."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, trained
from torch import Tensor, nn

from covey.errors import ConfigError, ModelError
from covey.pytorch.models.lora import attach_lora
from covey.pytorch.reference import Reference

TOKENS = torch.arange(4, 12)[None]


def build(lora: bool) -> nn.Module:
    return attach_lora(tiny_model("llama"), r=2) if lora else tiny_model("llama")


def take_a_step(model: nn.Module, amount: float = 0.1) -> None:
    for parameter in trained(model).values():
        parameter.data.add_(amount)


def logits(model: nn.Module, reference: Reference | None = None) -> Tensor:
    with torch.no_grad(), reference.active() if reference else nullcontext():
        return model(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(("lora", "from_current"), [(True, False), (False, False), (True, True)])
def test_it_stays_the_starting_policy(lora: bool, from_current: bool) -> None:
    model = build(lora)
    if from_current:  # a starting adapter
        take_a_step(model)
    start = logits(model)
    reference = Reference(model, from_current=from_current)
    assert reference.is_base_model == (lora and not from_current)
    take_a_step(model)
    after = logits(model)
    assert not torch.allclose(after, start)
    assert torch.equal(logits(model, reference), start)
    assert torch.equal(logits(model), after)
    assert reference.after_step(1) is False
    assert torch.equal(logits(model, reference), start)


@pytest.mark.parametrize("lora", [True, False])
def test_copy_every_two_steps(lora: bool) -> None:
    model = build(lora)
    reference = Reference(model, update="copy", every=2)
    for step in (1, 2, 3, 4):
        take_a_step(model)
        assert reference.after_step(step) == (step % 2 == 0)
        own, old = logits(model), logits(model, reference)
        assert torch.equal(own, old) if step % 2 == 0 else not torch.allclose(own, old)


@pytest.mark.parametrize("lora", [True, False])
def test_the_moving_average_by_hand(lora: bool) -> None:
    """Start at x, policy at x + 1 after the step, decay 0.75: reference x + 0.25, then x + 0.4375."""
    model = build(lora)
    start = {name: p.detach().clone() for name, p in trained(model).items()}
    reference = Reference(model, update="ema", ema_decay=0.75)
    take_a_step(model, 1.0)
    for step, moved in ((1, 0.25), (2, 0.4375)):
        assert reference.after_step(step)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(value, start[name] + moved, rtol=1e-5, atol=1e-5)


def test_a_graph_built_before_is_walked_with_its_own_weights() -> None:
    found = []
    for use_reference_between in (False, True):
        model = build(False)
        reference = Reference(model)
        take_a_step(model)
        loss = model(TOKENS).logits.square().mean()
        if use_reference_between:
            logits(model, reference)
        loss.backward()
        found.append({name: p.grad for name, p in trained(model).items()})
    plain, between = found
    assert all(torch.equal(grad, between[name]) for name, grad in plain.items())


def test_no_gradients_inside_and_tied_weights_return_after_an_error() -> None:
    model: Any = tiny_model("llama", tie_word_embeddings=True)
    reference = Reference(model)
    take_a_step(model)
    before = logits(model)
    with reference.active():
        assert not torch.is_grad_enabled()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(KeyError), reference.active():
        raise KeyError
    assert torch.is_grad_enabled()
    assert torch.equal(logits(model), before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("update", ["none", "copy", "ema"])
def test_it_resumes_to_the_same_numbers(lora: bool, update: Any) -> None:
    model = build(lora)
    reference, resumed = (Reference(model, update=update, every=2) for _ in range(2))
    for step in (1, 2, 3):
        take_a_step(model)
        reference.after_step(step)
    resumed.load_state_dict(reference.state_dict())
    assert resumed.is_base_model == reference.is_base_model
    take_a_step(model)
    assert reference.after_step(4) == resumed.after_step(4)
    assert torch.equal(logits(model, reference), logits(model, resumed))


def test_what_is_wrong_is_named() -> None:
    reference = Reference(build(False))
    with pytest.raises(ModelError, match="tensors missing"):
        reference.load_state_dict({})
    state = reference.state_dict()
    with pytest.raises(ModelError, match="the model's is"):
        reference.load_state_dict({**state, next(iter(state)): torch.zeros(1)})
    for settings, words in (
        ({"update": "sometimes"}, "update='sometimes'"),
        ({"every": 0}, "reference_update_steps=0"),
        ({"ema_decay": 1.0}, r"reference_ema_decay=1\.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Reference(build(True), **settings)


def test_a_run_without_a_reference_holds_no_copy() -> None:
    reference = Reference(build(False), needed=False, update="ema")
    assert reference.state_dict() == {}
    assert reference.after_step(1) is False
    reference.load_state_dict({})
    with pytest.raises(ModelError, match="needs_reference"), reference.active():
        pass

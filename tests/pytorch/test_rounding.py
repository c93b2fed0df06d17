"""Rounding is told from mistakes: right ways are taken in every precision, wrong ones in none."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import DENSE, EVERY_FAMILY, UNSHARED, tiny_model, tiny_tokenizer

from covey.errors import ModelError
from covey.pytorch import Policy, fused
from covey.pytorch.engine import Engine, choose, fast_runner
from covey.pytorch.engine import engine as engine_module
from covey.pytorch.models import form
from covey.pytorch.models.form import LayerForm
from covey.pytorch.models.narrow import narrow
from covey.pytorch.rounding import computing_in, unexplained
from fakes import raises

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOW = pytest.mark.slow
SOME = tuple(pytest.param(d, marks=() if d == torch.bfloat16 else SLOW) for d in DTYPES)
CPU = torch.device("cpu")
Wrong = Callable[[pytest.MonkeyPatch, Any], None]
NO_NORMS = {"attention_norm": None, "output_norm": None}
OTHER = {form._SILU: form._GELU, form._GELU: form._SILU}
LLAMAS = ("llama", "qwen2", "qwen3", "mistral")


def runner_of(family: str) -> str:
    return "fast" if family in DENSE else "recompute" if family in UNSHARED else "general"


def assert_taken(family: str, model: Any, **options: Any) -> None:
    policy = Policy.load(model, tiny_tokenizer(), lora_r=4, **options)
    assert (policy.prefix_sharing_obstacle is None) == (family not in UNSHARED)
    assert (policy.fused_obstacle is None) == (family in DENSE)


@pytest.mark.parametrize("own", [torch.float32, *(pytest.param(d, marks=SLOW) for d in DTYPES[1:])], ids=str)
@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_the_fast_ways_are_taken_in_each_precision(family: str, dtype: torch.dtype, own: torch.dtype) -> None:
    assert Engine(tiny_model(family).to(own), dtype=dtype).runner == runner_of(family)
    if own == torch.float32:
        assert_taken(family, tiny_model(family).to(dtype))
    if own == torch.float32 and dtype == torch.bfloat16:
        assert Engine(narrow(tiny_model(family).to(dtype))).runner == runner_of(family)
        assert_taken(family, tiny_model(family), dtype="bfloat16")


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_improbable_tokens_do_not_decide(family: str) -> None:
    """Logits are as large as a trained model's: improbable tokens differ by half a nat from rounding alone."""
    model: Any = tiny_model(family, tie_word_embeddings=False)
    model.lm_head.weight.data.mul_(8)
    assert Engine(model, dtype=torch.bfloat16).runner == runner_of(family)
    assert_taken(family, model.bfloat16())


def described(change: Callable[[LayerForm], dict[str, Any]]) -> Wrong:
    """Let a module read another description of each layer than the model's own."""

    def mistake(patch: pytest.MonkeyPatch, module: Any) -> None:
        read = module.read_form

        def changed(base: Any) -> Any:
            found = read(base)
            return replace(found, layers=tuple(replace(layer, **change(layer)) for layer in found.layers))

        patch.setattr(module, "read_form", changed)

    return mistake


def with_rule(layer: LayerForm, **changes: Any) -> dict[str, Any]:
    return {"attention": replace(layer.attention, rule=layer.attention.rule._replace(**changes))}


def turned(*, pairs: bool = False, power: float = 1.0) -> Wrong:
    """Let a module turn the other pairs, or by other frequencies."""

    def mistake(patch: pytest.MonkeyPatch, module: Any) -> None:
        class Wrong(module.Rotary):  # type: ignore[misc]
            def __init__(self, rotary: Any, device: torch.device) -> None:
                super().__init__(replace(rotary, neighbours=rotary.neighbours ^ pairs), device)
                self._inverse_frequencies = self._inverse_frequencies**power

        patch.setattr(module, "Rotary", Wrong)

    return mistake


def without_biases(patch: pytest.MonkeyPatch, module: Any) -> None:
    patch.setattr(module._WeightReader, "biases", lambda self, modules: None)


def gate_and_up_swapped(patch: pytest.MonkeyPatch, module: Any) -> None:
    load, swap = module.Linear.load, {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}

    def swapped(self: Any, take: Any, modules: Any, scale: Any = None) -> None:
        load(self, take, [swap.get(name, name) for name in modules], scale)

    patch.setattr(module.Linear, "load", swapped)


def read_wrongly(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Wrong:
    """Let a module read other weights than the model's own, by their whole names."""

    def mistake(patch: pytest.MonkeyPatch, module: Any) -> None:
        taken = module._WeightReader.__call__

        def call(self: Any, name: str, *, copy: bool = False) -> torch.Tensor:
            return change(self._prefix + name, taken(self, name, copy=copy))

        patch.setattr(module._WeightReader, "__call__", call)

    return mistake


def one_norm_dropped(name: str, weight: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(weight) if "layers.1." in name and name.endswith("input_layernorm.weight") else weight


def heads_mapped_wrongly(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Four query heads over two key-value heads: 0 1 | 2 3 becomes 0 2 | 1 3."""
    swapped = weight.view(4, -1, weight.shape[-1])[[0, 2, 1, 3]] if "q_proj.weight" in name else weight
    return swapped.reshape(weight.shape)


def other_offset(layer: LayerForm) -> dict[str, Any]:
    return {"mlp_norm": replace(layer.mlp_norm, offset=1 - layer.mlp_norm.offset)}


DESCRIBED: dict[str, tuple[Wrong, tuple[str, ...]]] = {
    "no query-key norms": (described(lambda layer: {"head_norms": None}), ("qwen3", "olmo2")),
    "no window": (described(lambda layer: with_rule(layer, window=None)), ("mistral", "phi3", "gemma3")),
    "no norms of what is added": (described(lambda layer: NO_NORMS), ("olmo2", "gemma2", "glm4")),
    "norms that count from the other end": (described(other_offset), ("llama", "gemma2")),
    "everything turns": (described(lambda layer: {"rotary": ""}), ("smollm3",)),
    "no factor": (described(lambda layer: {"factor": 1.0}), ("granite",)),
    "other scores": (described(lambda layer: with_rule(layer, scale=layer.attention.dim**-0.5)), ("granite", "gemma3")),
    "no softcap": (described(lambda layer: with_rule(layer, softcap=None)), ("gemma2",)),
    "the other activation": (described(lambda layer: {"activation": OTHER[layer.activation]}), ("llama", "gemma3")),
    "other pairs turn": (turned(pairs=True), ("phi3", "glm4")),
    "another rotary base": (turned(power=float(np.log(5e5) / np.log(1e4))), LLAMAS),
}
MISTAKES = DESCRIBED | {
    "no biases": (without_biases, ("qwen2", "granite", "glm")),
    "gate and up swapped": (gate_and_up_swapped, LLAMAS),
    "one norm dropped": (read_wrongly(one_norm_dropped), LLAMAS),
    "heads mapped wrongly": (read_wrongly(heads_mapped_wrongly), LLAMAS),
}


@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize(("mistake", "family"), [(name, f) for name in MISTAKES for f in MISTAKES[name][1]])
def test_each_mistake_is_caught(family: str, mistake: str, dtype: torch.dtype, monkeypatch: Any, caplog: Any) -> None:
    make, _ = MISTAKES[mistake]
    make(monkeypatch, fast_runner)
    assert Engine(tiny_model(family), dtype=dtype).runner == "general"
    assert all(words in caplog.text for words in ("sampling with the general runner", "where rounding explains"))
    if mistake in DESCRIBED:
        make(monkeypatch, fused)
        policy = Policy.load(tiny_model(family).to(dtype), tiny_tokenizer(), lora_r=4)
        assert policy.prefix_sharing_obstacle is None
        assert "where rounding explains" in policy.fused_obstacle
        assert "model's own layers" in caplog.text


def test_the_fast_ways_say_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "is_emulated", lambda dtype, device: False)
    with caplog.at_level(logging.WARNING, logger="covey"):
        policies = [
            Policy.load(tiny_model("llama").bfloat16(), tiny_tokenizer(), lora_r=4),
            Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=4, dtype="bfloat16"),
        ]
        for policy in policies:
            Engine(policy.model)
    assert caplog.text == ""
    monkeypatch.setattr(engine_module, "is_emulated", lambda dtype, device: dtype == torch.bfloat16)
    for policy in policies:
        caplog.clear()
        Engine(policy.model)
        assert "sampling in torch.bfloat16, for which this processor has no instructions" in caplog.text


def test_what_rounding_explains_by_hand_and_a_model_that_overflows_is_told_so() -> None:
    truth = torch.tensor([[0.5, 0.5, 0.0]]).log()
    own = truth + torch.tensor([[0.01, -0.01, 0.0]])  # 0.5 * 0.01 + 0.5 * 0.01 = 0.01 nats
    assert unexplained(truth + 0.03, own, truth) == ""  # three times that
    assert "0.05 nats on average" in unexplained(truth + torch.tensor([[0.05, 0.05, 9.0]]), own, truth)
    assert "nan" in unexplained(truth * float("nan"), own, truth)
    raises(ModelError, "not finite", unexplained, own, truth * float("nan"), truth)
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1e6)
    raises(ModelError, "not finite in the precision", choose.choose_runner, model, torch.float16, CPU)
    assert Engine(model, dtype=torch.bfloat16).runner == "fast"


def test_computing_in_another_precision_leaves_the_weights_as_they_were() -> None:
    model = tiny_model("qwen3").bfloat16()
    before, ids = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}, torch.arange(4, 10)[None]
    with torch.no_grad(), computing_in(model, torch.float32):
        wide = model(input_ids=ids).logits
    assert wide.dtype == torch.float32
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
    with torch.no_grad():
        torch.testing.assert_close(wide, model.float()(input_ids=ids).logits)

"""What attends to whole packs: a right kernel is taken in each precision, a wrong one in none, and it is said why.

On a CPU: `flex_attention` as it is traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_policy import fill, gradients
from test_tree_attention import float64_policy, tree_pack
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from covey.pytorch import Policy
from covey.pytorch.attention import tree_attention, tree_flex, tree_parts, tree_whole
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.attention.tree_path import TreePath
from covey.pytorch.attention.tree_whole import Case, choose, draw, obstacle, unexplained
from covey.rollout.packing import Pack
from covey.rollout.walking import Piece, pieces_of, walk

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
CASE = Case(torch.device("cpu"), torch.float32, 4, 2, 16, 16, 0.25, windowed=True, softcap=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree_flex, "BACKEND", "eager")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windowed", [False, True], ids=["", "window"])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_right_kernels_are_taken_in_each_precision(dtype: torch.dtype, windowed: bool, softcap: float | None) -> None:
    case = replace(CASE, dtype=dtype, windowed=windowed, softcap=softcap)
    assert obstacle(tree_flex, case) == ""


Change = Callable[[Any], Any]


def changed(index: int, change: Change) -> Any:
    """The traced kernel with one of its gradients changed: of queries, keys, values, or the past's keys or values."""

    def differentiate(*arguments: Any, **rule: Any) -> tuple[Tensor, ...]:
        found = list(tree_flex.differentiate(*arguments, **rule))
        found[index] = change(found[index])
        return tuple(found)

    return SimpleNamespace(attend=tree_flex.attend, differentiate=differentiate)


def one_token_nan(grad: Tensor) -> Tensor:
    grad[17] = torch.nan
    return grad


def one_block_missing(grad: Tensor) -> Tensor:
    grad[:128] = 0
    return grad


def one_head_for_another(grad: Tensor) -> Tensor:
    return grad.flip(1)


NAMES = ("queries", "keys", "values", "past's keys", "past's values")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", [one_token_nan, one_block_missing, one_head_for_another, lambda grad: 1.2 * grad])
@pytest.mark.parametrize("index", range(5), ids=NAMES)
def test_a_wrong_gradient_is_refused(index: int, change: Change, dtype: torch.dtype) -> None:
    reason = obstacle(changed(index, change), replace(CASE, dtype=dtype))
    assert reason.startswith(f"its gradient of the {NAMES[index]} differs by")
    assert "where rounding explains" in reason


def other_rule(**other: Any) -> Any:
    """The traced kernel under another rule than it is asked for, in its backward only."""
    return SimpleNamespace(
        attend=tree_flex.attend, differentiate=lambda *a, **rule: tree_flex.differentiate(*a, **(rule | other))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", [{"window": None}, {"window": 69}, {"softcap": None}, {"scale": 0.23}], ids=str)
def test_a_wrong_backward_is_refused(other: dict[str, Any], dtype: torch.dtype) -> None:
    case = replace(CASE, dtype=dtype, softcap=20.0)
    assert "differs by" in obstacle(other_rule(**other), case)


def test_the_choice_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="covey.pytorch")
    assert choose(CASE) is tree_flex
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == "attention of packs on cpu (4 heads of 16, float32, windows) by flex_attention"
    caplog.clear()
    assert choose(CASE) is tree_flex  # and once
    assert not caplog.records

    wrong = changed(2, one_head_for_another)
    monkeypatch.setattr(tree_whole, "KERNEL", wrong)
    assert choose(replace(CASE, windowed=False)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "attention of packs on cpu (4 heads of 16, float32) part by part, which is slower; not by flex_attention: "
        "its gradient of the values differs"
    )


def test_a_kernel_that_does_not_run_is_passed_over() -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("No valid triton configs.\nOutOfMemoryError: out of resource")

    assert (
        obstacle(SimpleNamespace(attend=fails, differentiate=fails), CASE) == "RuntimeError: No valid triton configs."
    )


def test_what_rounding_explains_by_hand() -> None:
    """Two tokens of one head, float32: units of rounding are 1.2e-7."""
    truth = torch.tensor([[[3.0, 4.0]], [[0.0, 5.0]]], dtype=torch.float64)
    own = truth.float() + torch.tensor([[[0.01, 0.0]], [[0.0, 0.01]]])
    assert unexplained("output", own, own, truth) == ""
    found = truth.float() + torch.tensor([[[0.0299, 0.0]], [[0.0, 0.0299]]])  # three times that
    assert unexplained("output", found, own, truth) == ""
    found = truth.float() + torch.tensor([[[0.035, 0.0]], [[0.0, 0.035]]])
    assert unexplained("output", found, own, truth) == "its output differs by 0.007, where rounding explains 0.006"
    found = truth.float() + torch.tensor([[[0.05, 0.0]], [[0.0, 0.0]]])  # eight times at one token
    assert unexplained("output", found, own, truth) == ""
    found = own.clone()
    found[0, 0, 0] = torch.nan
    assert "nan" in unexplained("output", found, own, truth)


def test_the_probe_draws_its_own_numbers_and_is_not_seen_by_checkpointing() -> None:
    state = torch.random.get_rng_state()
    saved: list[Tensor] = []

    def save(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        choose(CASE)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not saved
    assert all(torch.equal(one, other) for one, other in zip(draw(CASE), draw(CASE), strict=True))


def test_a_cpu_goes_part_by_part() -> None:
    q, k = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
    assert tree_whole.kernel_for(q, k, k, scale=0.25, window=3, softcap=None) is None


# ---------------------------------------------------------------------- in models


@pytest.mark.parametrize("family", ["fused", "mistral", "gemma2"])
def test_models_compute_the_same_by_a_whole_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, where `flex_attention` runs under autograd itself, and along a walk."""
    policy = float64_policy("llama" if family == "fused" else family)
    pack = tree_pack()
    weights = torch.randn(len(pack.targets), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def hidden(tokens: Pack | Piece, layout: TreeLayout) -> Tensor:
        if family != "fused":
            return policy._hidden_packed(tokens, layout)
        assert policy._fused is not None
        return policy._fused.hidden(tokens, layout)

    by_parts = hidden(pack, TreeLayout.of(pack.branches))
    expected = gradients(policy, (by_parts * weights).sum())
    monkeypatch.setattr(tree_attention, "kernel_for", lambda *_, **__: tree_flex)
    monkeypatch.setattr(tree_parts, "forward", None)

    found = hidden(pack, TreeLayout.of(pack.branches))
    torch.testing.assert_close(found, by_parts, rtol=1e-12, atol=1e-12)
    same(gradients(policy, (found * weights).sum()), expected)

    path = TreePath(pack.num_tokens)

    def forward(piece: Piece) -> Tensor:
        return hidden(piece, TreeLayout.of(piece.branches, past=piece.past, path=path, trunk=piece.trunk))

    policy.model.zero_grad()
    walk(pieces_of(pack, 12), forward, lambda piece, out: (out * weights[piece.scored]).sum().backward())
    same({name: p.grad for name, p in policy.named_trainable_parameters() if p.grad is not None}, expected)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert float((grad - expected[name]).norm()) <= tolerance * float(expected[name].norm()), name


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_from_the_probe_to_a_models_gradients(
    checkpoint: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: the policy's own probe chooses at the start, and what was compiled then is what trains.

    Compiled at a checkpoint, it would be traced while somebody counts what autograd saves.
    """
    caplog.set_level(logging.INFO, logger="covey.pytorch")
    torch._dynamo.reset()
    monkeypatch.setattr(tree_flex, "BACKEND", "aot_eager")
    pack, found = tree_pack(), []
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(tree_whole, "DEVICES", devices)
        policy = Policy.load(
            tiny_model("gemma2", sliding_window=6), tiny_tokenizer(), lora_r=4, gradient_checkpointing=checkpoint
        )
        fill(policy, 1)
        compiled = graphs["unique_graphs"] - before
        hidden = policy._hidden_packed(pack)
        found.append(gradients(policy, hidden.square().sum()))
    assert "attention of packs on cpu (4 heads of 8, float32) by flex_attention" in caplog.text
    assert compiled == graphs["unique_graphs"] - before == 2  # without and with gradients, whatever the window
    same(found[1], found[0], tolerance=1e-4)


def test_a_models_own_code_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is given the precision of autocast, which does not reach into it."""
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=4, autocast="bfloat16")
    fill(policy, 1)
    pack = tree_pack()
    with torch.no_grad():
        by_parts = policy._hidden(pack)
    seen = []

    def attend(layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **rule: Any) -> Tensor:
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        out: Tensor = tree_flex.attend(layout, q, k, v, *rest, **rule)
        return out

    recorded = SimpleNamespace(attend=attend, differentiate=tree_flex.differentiate)
    monkeypatch.setattr(tree_attention, "kernel_for", lambda *_, **__: recorded)
    found = policy._hidden(pack)
    found.float().square().sum().backward()
    assert float((found.detach() - by_parts).norm()) < 0.02 * float(by_parts.norm())
    assert set(seen) == {(torch.bfloat16,) * 3 + (False,)}
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.trainable_parameters())

"""A pack by `flex_attention`, on a CPU: numbers, and how often it is compiled.

Backwards run in float64 in what PyTorch has for tracing, because compiled code refuses them on a CPU; the forward is
compiled for this processor too. Neither is the kernel of a GPU: that one is probed where it runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forests import Rule, assert_close, draw, expect, forest
from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

from covey.pytorch.attention import tree_flex, tree_parts
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.rollout.packing import Branch

# PyTorch hides this one of its own by a hook, which an error does not reach
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

PACKS = ((0, 6, None), (5, 60, 20), (130, 6, 3))
"""A past, the longest branch, a window: two to four blocks of queries, three to six of keys."""


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that is compiled from here on; they run as they were traced."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(tree_flex, "BACKEND", backend)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    return graphs


def packs() -> list[tuple[int, list[Branch], int | None]]:
    return [
        (past, forest(seed, past=past, longest=longest, depth=4, ordered=True), window)
        for seed, (past, longest, window) in enumerate(PACKS)
    ]


def find(branches: list[Branch], leaves: list[torch.Tensor], grad: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
    q, k, v, *above = leaves
    layout, past = TreeLayout.of(branches, past=len(above[0]) if above else 0), (above[0], above[1]) if above else None
    with torch.no_grad():
        out = tree_flex.attend(layout, q, k, v, past, **rule)
    return [out, *tree_flex.differentiate(layout, grad, q, k, v, past, **rule)]


@pytest.mark.parametrize(
    ("shape", "softcap"), [((4, 2, 3, 5), 1.5), ((3, 1, 8, 8), None), ((2, 2, 5, 4), None)], ids=str
)
def test_it_gives_the_same_and_is_compiled_once_for_all_packs(
    shape: tuple[int, int, int, int], softcap: float | None, compilations: list[Any]
) -> None:
    for seed, (past, branches, window) in enumerate(packs()):
        leaves, grad = draw(seed, branches, past, shape)
        rule: Rule = {"scale": 0.7, "window": window, "softcap": softcap}
        expected = expect(branches, leaves, grad, rule)
        assert_close(find(branches, leaves, grad, rule), [expected[0], *expected[2:]], tolerance=1e-9)
    assert len(compilations) == 2  # without and with gradients


def test_another_scale_is_another_constant(compilations: list[Any]) -> None:
    """One that the compiler made a symbol would not be taken by the kernel."""
    past, branches, _ = packs()[0]
    leaves, grad = draw(0, branches, past)
    for scale, softcap in ((0.7, 1.5), (0.3, 1.5), (0.3, 2.0)):
        rule: Rule = {"scale": scale, "window": None, "softcap": softcap}
        expected = expect(branches, leaves, grad, rule)
        assert_close(find(branches, leaves, grad, rule), [expected[0], *expected[2:]], tolerance=1e-9)
    assert len(compilations) == 6
    for graph in compilations:
        (call,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        assert isinstance(call.args[5], float)
        assert call.args[4][0] is not call.args[4][1]  # as many queries as keys would be a rule


def test_what_needs_no_gradient_does_not_compile_it_anew(compilations: list[Any]) -> None:
    """A layer whose keys are computed by frozen weights from a frozen embedding."""
    past, branches, _ = packs()[1]
    leaves, grad = draw(0, branches, past)
    rule: Rule = {"scale": 0.7, "window": None, "softcap": None}
    expected = expect(branches, leaves, grad, rule)
    find(branches, leaves, grad, rule)
    q = leaves[0].clone().requires_grad_()
    layout = TreeLayout.of(branches, past=past)
    tree_flex.attend(layout, q, leaves[1], leaves[2], (leaves[3], leaves[4]), **rule).backward(grad)
    assert q.grad is not None
    assert_close([q.grad], [expected[2]], tolerance=1e-9)
    assert len(compilations) == 2


def test_two_blocks_of_queries_and_more_keys_at_the_least() -> None:
    """Lengths of 1, and equal ones, would be rules for the compiler; short queries have a kernel of their own."""
    lists = tree_flex._lists(TreeLayout.of([Branch(0, 1, -1, 0)]), None)
    assert (len(lists.since), lists.keys.shape[1]) == (256, 384)
    assert lists.kv_indices.shape == (1, 1, 2, 3)
    assert (lists.kv_num_blocks + lists.full_kv_num_blocks).flatten().tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
@pytest.mark.skipif(not check_cpu_supported() or shutil.which("g++") is None, reason="needs AVX2 and a compiler")
def test_compiled_for_this_processor() -> None:
    """Forward only, which is all that PyTorch compiles here; the heads are Gemma's, small."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, (past, branches, window) in enumerate(packs()):
        leaves, _ = draw(seed, branches, past, (4, 2, 16, 16))
        q, k, v, *above = (leaf.float() for leaf in leaves)
        above_it = (above[0], above[1]) if above else None
        rule: Rule = {"scale": 0.25, "window": window, "softcap": 5.0}
        layout = TreeLayout.of(branches, past=past)
        with torch.no_grad():
            found = tree_flex.attend(layout, q, k, v, above_it, **rule)
        expected, _ = tree_parts.forward(layout, q, k, v, above_it, **rule)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1

"""A pack by `flex_attention`, on a CPU: its mask, its numbers, how often it is compiled, and the probe.

Backwards run in float64 in what PyTorch has for tracing, because compiled code refuses them on a CPU; the forward is
compiled for this processor too. Neither is the kernel of a GPU: that one is probed where it runs.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import episode, fill
from test_policy import assert_near, gradients
from test_tree_attention import assert_close, assert_walk, draw, expect, float64_policy, forest, tree_pack
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor
from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported
from torch.nn.attention.flex_attention import create_block_mask

from covey.pytorch import Policy
from covey.pytorch.attention import tree_attention, tree_flex, tree_parts
from covey.pytorch.attention.tree_flex import Case, Kernel, Lists, Mask, choose, obstacle, sees, unexplained
from covey.pytorch.attention.tree_layout import Rule, TreeLayout
from covey.rollout.packing import Branch, pack_episodes
from covey.rollout.walking import Piece, pieces_of

# PyTorch hides this one of its own by a hook, which an error does not reach
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

WINDOWS = st.sampled_from([None, None, 1, 3, 20])


def ancestors(branches: list[Branch], past: int, window: int | None) -> np.ndarray:
    """`[M, past + M]` whom each token sees: itself and all before it on its path, as far as the window."""
    length = branches[-1].stop
    found = np.zeros((length, past + length), np.bool_)
    paths: list[list[int]] = []  # to each branch's end, as places in past and pack
    for branch in branches:
        above = list(range(branch.at))
        if branch.parent >= 0:
            above = paths[branch.parent][: branch.at - branches[branch.parent].length or None]
        paths.append([*above, *range(past + branch.start, past + branch.stop)])
        for query in range(branch.start, branch.stop):
            seen = paths[-1][: len(above) + 1 + query - branch.start]
            found[query, seen if window is None else seen[-window:]] = True
    return found


def assert_seen(branches: list[Branch], past: int, window: int | None, block: int) -> None:
    length, mask = branches[-1].stop, Mask.of(branches, past, window, block)
    dense = mask.dense()
    assert not dense[:length, past : len(mask.first) - len(mask.since)].any()  # nobody sees what fills up the past
    own = dense[:, -len(mask.since) :]
    assert np.array_equal(own[length:], np.eye(len(own), dtype=np.bool_)[length:])  # what fills up the pack: itself
    assert not own[:length, length:].any()
    found = np.concatenate([dense[:length, :past], own[:length, :length]], axis=1)
    assert np.array_equal(found, ancestors(branches, past, window))


SEEDS = st.integers(0, 10**6)


@settings(deadline=None)
@given(seed=SEEDS, past=st.sampled_from([0, 1, 7, 12]), window=WINDOWS, block=st.sampled_from([4, 8, 128]))
def test_the_mask_is_that_of_a_walk_to_the_root(seed: int, past: int, window: int | None, block: int) -> None:
    assert_seen(forest(seed, past=past, depth=5, ordered=True), past, window, block)


SIZES = {"past": st.sampled_from([0, 1, 7, 40]), "longest": st.sampled_from([6, 30]), "block": st.sampled_from([4, 16])}


@settings(deadline=None)
@given(seed=SEEDS, window=WINDOWS, **SIZES)
def test_its_blocks_are_the_whole_masks(seed: int, past: int, window: int | None, longest: int, block: int) -> None:
    mask = Mask.of(forest(seed, past=past, longest=longest, depth=5, ordered=True), past, window, block)
    first, leave, position, since = map(torch.from_numpy, (mask.first, mask.leave, mask.position, mask.since))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = sees(query, since[query], first[key], leave[key], position[key])
        return found

    theirs = create_block_mask(visible, None, None, len(since), len(first), device="cpu", BLOCK_SIZE=block)
    for name, value in Lists.of(mask)._asdict().items():
        if "_" in name:
            assert torch.equal(value, getattr(theirs, name)), name


def test_three_tokens_by_hand() -> None:
    """A past of 2; a token after both, one after that, and one after the first of the past."""
    branches = [Branch(0, 2, -1, 2), Branch(2, 1, -1, 1)]
    mask = Mask.of(branches, 2, None, 2)
    assert mask.first.tolist() == [0, 0, 0, 1, 2, 3]
    assert mask.leave.tolist() == [3, 2, 2, 2, 3, 4]
    assert mask.position.tolist() == [0, 1, 2, 3, 1, 0]
    assert mask.since.tolist() == [0, 0, 0, 0]
    assert Mask.of(branches, 2, 2, 2).since.tolist() == [1, 2, 0, 0]
    partial, full = mask.blocks()
    assert partial.tolist() == [[False, True, False], [True, False, True]]
    assert full.tolist() == [[True, False, False], [False, False, False]]
    with pytest.raises(ValueError, match=r"leave the past after \[1, 2\] tokens: those that leave it last come first"):
        Mask.of([Branch(0, 2, -1, 1), Branch(2, 1, -1, 2)], 2, None, 128)


def all_of(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        yield from all_of(piece.followers)


@settings(deadline=None)
@given(seed=SEEDS, budget=st.integers(4, 40), window=WINDOWS)
def test_pieces_of_a_walk_are_in_that_order(seed: int, budget: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 2, rng.integers(3, 20)) for _ in range(rng.integers(2, 12))]
    episodes = [episode(ids, np.arange(len(ids)) > 0) for ids in rows]
    for pack in pack_episodes(episodes, tokens_per_pack=10**6, whole_trees=True):
        for piece in all_of(pieces_of(pack, budget)):
            assert_seen(list(piece.branches), piece.past, window, 4)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree_flex, "BACKEND", "eager")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, traced: None) -> list[Any]:
    """Every graph that is compiled from here on; they run as they were traced."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(tree_flex, "BACKEND", backend)
    return graphs


def packs() -> list[tuple[int, list[Branch], int | None]]:
    """A past, branches, a window: two to four blocks of queries, three to six of keys."""
    found = []
    for seed, (past, longest, window) in enumerate(((0, 6, None), (5, 60, 20), (130, 6, 3))):
        found.append((past, forest(seed, past=past, longest=longest, depth=4, ordered=True), window))
    return found


def attended(leaves: list[Tensor], branches: list[Branch]) -> tuple[Any, ...]:
    q, k, v, *above = leaves
    return TreeLayout.of(branches, past=len(above[0]) if above else 0), q, k, v, tuple(above) or None


def assert_right(leaves: list[Tensor], branches: list[Branch], grad: Tensor, rule: Rule) -> None:
    layout, *tensors = attended(leaves, branches)
    with torch.no_grad():
        out = tree_flex.attend(layout, *tensors, rule)
    out_and_grads = [out, *tree_flex.differentiate(layout, grad, *tensors, rule)]
    expected, _, *grads = expect(branches, leaves, grad, rule)
    assert_close(out_and_grads, [expected, *grads], tolerance=1e-9)


@pytest.mark.parametrize(
    ("shape", "softcap"), [((4, 2, 3, 5), 1.5), ((3, 1, 8, 8), None), ((2, 2, 5, 4), None)], ids=str
)
def test_it_gives_the_same_and_is_compiled_once_for_all_packs(
    shape: tuple[int, int, int, int], softcap: float | None, compilations: list[Any]
) -> None:
    for seed, (past, branches, window) in enumerate(packs()):
        leaves, grad = draw(seed, branches, past, shape)
        assert_right(leaves, branches, grad, Rule(0.7, window, softcap))
    assert len(compilations) == 2  # without and with gradients


def test_another_scale_is_another_constant(compilations: list[Any]) -> None:
    """One that the compiler made a symbol would not be taken by the kernel."""
    past, branches, _ = packs()[0]
    leaves, grad = draw(0, branches, past)
    for scale, softcap in ((0.7, 1.5), (0.3, 1.5), (0.3, 2.0)):
        assert_right(leaves, branches, grad, Rule(scale, None, softcap))
    assert len(compilations) == 6
    for graph in compilations:
        (call,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        assert isinstance(call.args[5], float)
        assert call.args[4][0] is not call.args[4][1]  # as many queries as keys would be a rule


def test_what_needs_no_gradient_does_not_compile_it_anew(compilations: list[Any]) -> None:
    """A layer whose keys are computed by frozen weights from a frozen embedding."""
    past, branches, _ = packs()[1]
    leaves, grad = draw(0, branches, past)
    rule = Rule(0.7, None, None)
    assert_right(leaves, branches, grad, rule)
    layout, q, *others = attended(leaves, branches)
    tree_flex.attend(layout, q := q.clone().requires_grad_(), *others, rule).backward(grad)
    assert_close([q.grad], [expect(branches, leaves, grad, rule)[2]], tolerance=1e-9)
    assert len(compilations) == 2


def test_two_blocks_of_queries_and_more_keys_at_the_least() -> None:
    """Lengths of 1, and equal ones, would be rules for the compiler; short queries have a kernel of their own."""
    lists = tree_flex._lists(TreeLayout.of([Branch(0, 1, -1, 0)]), None)
    assert (len(lists.since), lists.keys.shape[1], lists.kv_indices.shape) == (256, 384, (1, 1, 2, 3))
    assert (lists.kv_num_blocks + lists.full_kv_num_blocks).flatten().tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
@pytest.mark.skipif(not check_cpu_supported() or shutil.which("g++") is None, reason="needs AVX2 and a compiler")
def test_compiled_for_this_processor() -> None:
    """Forward only, which is all that PyTorch compiles here; the heads are Gemma's, small."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, (past, branches, window) in enumerate(packs()):
        leaves, _ = draw(seed, branches, past, (4, 2, 16, 16))
        given, rule = attended([leaf.float() for leaf in leaves], branches), Rule(0.25, window, 5.0)
        with torch.no_grad():
            found = tree_flex.attend(*given, rule)
        torch.testing.assert_close(found, tree_parts.forward(*given, rule)[0], rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


CASE = Case(torch.device("cpu"), torch.float32, 4, 2, 16, 16, Rule(0.25, 70))
SLOW = pytest.mark.slow
DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=SLOW))
ONE_DTYPE = [torch.bfloat16, *(pytest.param(d, marks=SLOW) for d in (torch.float32, torch.float16))]


@pytest.mark.parametrize("dtype", ONE_DTYPE, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_right_kernels_are_taken(dtype: torch.dtype, window: int | None, softcap: float | None, traced: None) -> None:
    assert obstacle(tree_flex.FLEX, CASE._replace(dtype=dtype, rule=Rule(0.25, window, softcap))) == ""


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one token is nan": lambda grad: grad.index_fill(0, torch.tensor(17), torch.nan),
    "one block is missing": lambda grad: grad.index_fill(0, torch.arange(128), 0),
    "one head for another": lambda grad: grad.flip(1),
    "a little more": lambda grad: 1.2 * grad,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_gradient_is_refused(dtype: torch.dtype, traced: None) -> None:
    """Of queries, keys, values, the past's keys or values: one of them is changed, in one of four ways."""
    case, right = CASE._replace(dtype=dtype), list[tuple[Tensor, ...]]()
    for index, name in enumerate(NAMES):
        for what, change in CHANGES.items():

            def differentiate(*given: Any, index: int = index, change: Any = change) -> tuple[Tensor, ...]:
                if not right:
                    right.append(tree_flex.differentiate(*given))
                return (*right[0][:index], change(right[0][index]), *right[0][index + 1 :])

            reason = obstacle(Kernel(tree_flex.attend, differentiate), case)
            assert reason.startswith(f"its gradient of the {name} differs by"), (name, what)
            assert "where rounding explains" in reason


NAMES = ("queries", "keys", "values", "past's keys", "past's values")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_backward_is_refused(dtype: torch.dtype, traced: None) -> None:
    """The traced kernel under another rule than it is asked for, in its backward only."""
    case = CASE._replace(dtype=dtype, rule=Rule(0.25, 70, 20.0))
    for other in (Rule(0.25, None, 20.0), Rule(0.25, 69, 20.0), Rule(0.25, 70), Rule(0.23, 70, 20.0)):
        wrong = Kernel(tree_flex.attend, lambda *a, other=other: tree_flex.differentiate(*a[:-1], other))
        assert "differs by" in obstacle(wrong, case), other


def test_the_choice_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    caplog.set_level(logging.INFO, logger="covey.pytorch")
    for _ in range(2):  # said once
        assert choose(CASE) is tree_flex.FLEX

    def wrong(*rest: Any) -> tuple[Tensor, ...]:
        q, k, v, *past = tree_flex.differentiate(*rest)
        return q, k, v.flip(1), *past

    monkeypatch.setattr(tree_flex, "FLEX", Kernel(tree_flex.attend, wrong))
    assert choose(CASE._replace(rule=Rule(0.25))) is None
    taken, refused = caplog.records
    assert (taken.levelno, refused.levelno) == (logging.INFO, logging.WARNING)
    assert taken.message == "attention of packs on cpu (4 heads of 16, float32, windows) by flex_attention"
    assert refused.message.startswith(
        "attention of packs on cpu (4 heads of 16, float32) part by part, which is slower; not by flex_attention: "
        "its gradient of the values differs"
    )


def test_a_kernel_that_does_not_run_is_passed_over() -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("No valid triton configs.\nOutOfMemoryError: out of resource")

    assert obstacle(Kernel(fails, fails), CASE) == "RuntimeError: No valid triton configs."


def test_what_rounding_explains_by_hand() -> None:
    """Two tokens of one head, float32: units of rounding are 1.2e-7."""
    truth = torch.tensor([[[3.0, 4.0]], [[0.0, 5.0]]], dtype=torch.float64)

    def said(first: float, second: float) -> str:
        own, found = (
            truth.float() + torch.tensor([[[a, 0.0]], [[0.0, b]]]) for a, b in ((0.01, 0.01), (first, second))
        )
        return unexplained("output", found, own, truth)

    assert said(0.01, 0.01) == said(0.0299, 0.0299) == ""  # as much, and three times that
    assert said(0.05, 0.0) == ""  # five times at one token
    assert said(0.035, 0.035) == "its output differs by 0.007, where rounding explains 0.006"
    assert "nan" in said(torch.nan, 0.01)


def test_the_probe_draws_its_own_numbers_and_is_not_seen_by_checkpointing(traced: None) -> None:
    state, saved = torch.random.get_rng_state(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        choose(CASE)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not saved
    assert all(torch.equal(one, other) for one, other in zip(tree_flex.draw(CASE), tree_flex.draw(CASE), strict=True))


def test_a_cpu_goes_part_by_part() -> None:
    q, k = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
    assert tree_flex.kernel_for(q, k, k, Rule(0.25, 3)) is None


@pytest.mark.parametrize("family", ["fused", *(pytest.param(name, marks=SLOW) for name in ("mistral", "gemma2"))])
def test_models_compute_the_same_by_a_whole_kernel(family: str, monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    """In one go, where `flex_attention` runs under autograd itself, and along a walk."""
    policy = float64_policy("llama" if family == "fused" else family)
    expected = assert_walk(policy, family == "fused")
    monkeypatch.setattr(tree_attention, "kernel_for", lambda *_: tree_flex.FLEX)
    monkeypatch.setattr(tree_parts, "forward", None)
    found = assert_walk(policy, family == "fused")
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=1e-12, atol=1e-12)
    assert_near(found, expected)


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=SLOW)], ids=["", "checkpoint"])
def test_from_the_probe_to_a_models_gradients(
    checkpoint: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, traced: None
) -> None:
    """As on a GPU: the policy's own probe chooses at the start, and what was compiled then is what trains.

    Compiled at a checkpoint, it would be traced while somebody counts what autograd saves.
    """
    caplog.set_level(logging.INFO, logger="covey.pytorch")
    torch._dynamo.reset()
    monkeypatch.setattr(tree_flex, "BACKEND", "aot_eager")
    graphs, found = torch._dynamo.utils.counters["stats"], []
    before = graphs["unique_graphs"]
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(tree_flex, "DEVICES", devices)
        model, options = tiny_model("gemma2", sliding_window=6), {"lora_r": 4, "gradient_checkpointing": checkpoint}
        policy = fill(Policy.load(model, tiny_tokenizer(), **options))
        compiled = graphs["unique_graphs"] - before
        found.append(gradients(policy, policy.held.hidden_packed(tree_pack()).square().sum()))
    assert "attention of packs on cpu (4 heads of 8, float32) by flex_attention" in caplog.text
    assert compiled == graphs["unique_graphs"] - before == 2  # without and with gradients, whatever the window
    assert_near(found[1], found[0], tolerance=1e-4)


def test_a_models_own_code_under_autocast(monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    """The kernel is given the precision of autocast, which does not reach into it."""
    policy = fill(Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=4, autocast="bfloat16"))
    pack, seen = tree_pack(), []
    with torch.no_grad():
        by_parts = policy.held.hidden(pack)

    def attend(layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        return tree_flex.attend(layout, q, k, v, *rest)

    monkeypatch.setattr(tree_attention, "kernel_for", lambda *_: Kernel(attend, tree_flex.differentiate))
    found = policy.held.hidden(pack)
    found.float().square().sum().backward()
    assert float((found.detach() - by_parts).norm()) < 0.02 * float(by_parts.norm())
    assert set(seen) == {(torch.bfloat16,) * 3 + (False,)}
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.trainable_parameters())

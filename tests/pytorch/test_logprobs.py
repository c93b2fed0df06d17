"""Chunked scores against the textbook formulas in float64, values and gradients; and products of matrices."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import LiveMemory
from torch import Tensor, nn

from covey.algorithms.kl import Distillation
from covey.pytorch import products
from covey.pytorch.logprobs import Head, ReferenceDistribution, score_tokens
from covey.types import Support

S, D, V = 7, 5, 11
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "bias": {"bias": True, "temperature": 1.3},
    "softcap": {"softcap": 2.0, "temperature": 0.7},
    "scale": {"scale": 0.25, "bias": True},
    "support": {"support": True, "temperature": 0.7},
    "everything": {"softcap": 3.0, "scale": 1.5, "bias": True, "support": True, "temperature": 0.8},
}


def make(*, bias: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    targets = torch.randint(0, V, (S,), generator=generator)
    return draw(S, D).requires_grad_(), targets, draw(V, D), draw(V) if bias else None


def a_support(targets: Tensor) -> Support:
    """Between 1 and 5 ids for each token, the target always among them."""
    rng = np.random.default_rng(0)
    kept = [np.union1d([int(y)], rng.integers(0, V, rng.integers(0, 5))) for y in targets]
    return Support(np.concatenate(kept).astype(np.int64), np.cumsum([0, *map(len, kept)]))


def textbook(hidden: Any, targets: Any, head: Head, temperature: float, support: Any, reference: Any) -> Any:
    """The definitions of ALGORITHMS.md, one row after the other."""

    def distribution(h: Tensor, weight: Tensor, bias: Tensor | None, t: int) -> Tensor:
        logits = head.scale * (weight @ h + (0 if bias is None else bias))
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logits = logits / temperature
        if support is not None:
            mask = torch.full_like(logits, -math.inf)
            mask[torch.from_numpy(support.ids[support.offsets[t] : support.offsets[t + 1]])] = 0
            logits = logits + mask
        return logits.softmax(0)

    logps, entropies, divergences = [], [], []
    for t in range(len(hidden)):
        p = distribution(hidden[t], head.weight, head.bias, t)
        logps.append(p[targets[t]].log())
        seen = p[p > 0]
        entropies.append(-(seen * seen.log()).sum())
        if reference is not None:
            q = distribution(reference.hidden[t], REFERENCE_WEIGHT, None if head.bias is None else REFERENCE_BIAS, t)
            kl = (seen * (seen.log() - q[p > 0].log())).sum()
            divergences.append(kl * (p / (q + 1e-8)).mean() if reference.how.estimator == "exact_weighted" else kl)
    return torch.stack(logps), torch.stack(entropies), torch.stack(divergences) if divergences else None


_, _, REFERENCE_WEIGHT, REFERENCE_BIAS = make(seed=5, bias=True)


def reference_of(head: Head, kind: Any) -> ReferenceDistribution:
    other = Head(REFERENCE_WEIGHT, None if head.bias is None else REFERENCE_BIAS, head.scale, head.softcap)
    return ReferenceDistribution(make(seed=6)[0].detach(), other.logits, Distillation(estimator=kind))


@pytest.mark.parametrize("kind", [None, "exact", "exact_weighted"])
@pytest.mark.parametrize("trainable", ["hidden", "head", "module"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_textbook_ones(case: str, trainable: str, kind: Any) -> None:
    options = CASES[case]
    hidden, targets, weight, bias = make(bias=options.get("bias", False))
    temperature = options.get("temperature", 1.0)
    support = a_support(targets) if options.get("support") else None
    leaves = own_leaves = [hidden]
    if trainable != "hidden":
        leaves += [x.requires_grad_() for x in (weight, bias) if x is not None]
    scale, softcap = options.get("scale", 1.0), options.get("softcap")
    head = plain_head = Head(weight, bias, scale, softcap)
    if trainable == "module":
        linear = nn.Linear(D, V, bias=bias is not None, dtype=torch.float64)
        linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        head, own_leaves = Head(None, None, scale, softcap, linear), [hidden, *linear.parameters()]
    reference = None if kind is None else reference_of(plain_head, kind)
    expected = textbook(hidden, targets, plain_head, temperature, support, reference)
    more = {"entropy": True, "entropy_grad": True, "support": support, "reference": reference, "chunk_rows": 3}
    scores = score_tokens(hidden, targets, head, temperature=temperature, **more)
    got = (scores.logp, scores.entropy, scores.exact_kl)
    weights = torch.linspace(-1, 2, S, dtype=torch.float64)

    def total(parts: tuple[Tensor | None, ...]) -> Tensor:
        return sum(((n + 1) * weights * x).sum() for n, x in enumerate(parts) if x is not None)  # type: ignore[return-value, misc]

    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    mine, theirs = torch.autograd.grad(total(got), own_leaves), torch.autograd.grad(total(expected), leaves)
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("head_is_trained", [False, True])
def test_finite_differences(head_is_trained: bool) -> None:
    hidden, targets, weight, bias = make(bias=True)
    reference = reference_of(Head(weight, bias, 0.5, 4.0), "exact_weighted")
    options: dict[str, Any] = {"entropy": True, "entropy_grad": True, "reference": reference, "chunk_rows": 4}

    def scores(*tensors: Tensor) -> tuple[Tensor, ...]:
        h, w, b = tensors if head_is_trained else (tensors[0], weight, bias)
        out = score_tokens(h, targets, Head(w, b, 0.5, 4.0), temperature=0.9, **options)
        return out.logp, out.entropy, out.exact_kl

    inputs = (hidden, weight.requires_grad_(), bias.requires_grad_()) if head_is_trained else (hidden,)
    assert torch.autograd.gradcheck(scores, inputs)


def test_a_uniform_distribution_and_a_support_of_one_id_by_hand() -> None:
    """Zero hidden states: probability 1/V, entropy log V, divergence 0 from itself."""
    zeros, head = torch.zeros(2, D), Head(torch.randn(V, D))
    reference = ReferenceDistribution(zeros, head.logits, Distillation())
    scores = score_tokens(zeros, torch.tensor([0, 3]), head, entropy=True, reference=reference)
    torch.testing.assert_close(scores.logp, torch.full((2,), -math.log(V)))
    torch.testing.assert_close(scores.entropy, torch.full((2,), math.log(V)))
    assert scores.exact_kl.abs().max() < 1e-6
    hidden, targets, weight, _ = make()
    only = Support(targets.numpy(), np.arange(S + 1))
    scores = score_tokens(hidden, targets, Head(weight), support=only, entropy=True, entropy_grad=True)
    (grad,) = torch.autograd.grad(scores.logp.sum() + scores.entropy.sum(), hidden)
    assert max(value.abs().max() for value in (scores.logp, scores.entropy, grad)) < 1e-12


def test_temperature_zero_is_scored_at_one_chunks_do_not_show_and_nothing_is_kept_without_gradients() -> None:
    hidden, targets, weight, _ = make()
    whole = score_tokens(hidden, targets, Head(weight), entropy=True)
    torch.testing.assert_close(score_tokens(hidden, targets, Head(weight), temperature=0.0).logp, whole.logp)
    for rows in (1, 2, 7, 100):
        parts = score_tokens(hidden, targets, Head(weight), entropy=True, chunk_rows=rows)
        torch.testing.assert_close((parts.logp, parts.entropy), (whole.logp, whole.entropy), rtol=1e-12, atol=1e-12)
    hidden, targets, weight, _ = make()
    for head in (Head(torch.randn(V, D)), Head(None, module=nn.Linear(D, V))):
        none = torch.zeros(0, D, requires_grad=True)
        assert score_tokens(none, torch.zeros(0, dtype=torch.long), head, entropy=True).logp.shape == (0,)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            scores = score_tokens(hidden, targets, Head(weight), entropy=True)
        assert scores.logp.requires_grad == grad
        assert not scores.entropy.requires_grad


def test_half_precision_is_accumulated_in_float32() -> None:
    generator, targets = torch.Generator().manual_seed(0), torch.arange(S)
    hidden = (4 * torch.randn(S, 64, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(V, 64, generator=generator).bfloat16()
    logp = score_tokens(hidden, targets, Head(weight)).logp
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[torch.arange(S), targets]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact, rtol=1e-5, atol=1e-4)
    (grad,) = torch.autograd.grad(logp.sum(), hidden)
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["frozen", "trained", "module"])
def test_logits_never_exist_whole(kind: str) -> None:
    tokens, width, vocabulary, rows = 64, 4, 32, 8
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.zeros(tokens, dtype=torch.long)
    weight = torch.randn(vocabulary, width, requires_grad=kind == "trained")
    head = Head(None, module=nn.Linear(width, vocabulary)) if kind == "module" else Head(weight)
    reference = ReferenceDistribution(hidden.detach(), Head(weight.detach()).logits, Distillation())
    with LiveMemory() as memory:
        scores = score_tokens(hidden, targets, head, entropy=True, reference=reference, chunk_rows=rows)
        (scores.logp.sum() + scores.exact_kl.sum()).backward()
    assert rows * vocabulary <= memory.largest <= 2 * rows * vocabulary < tokens * vocabulary


@pytest.fixture(params=[False, True], ids=["torch", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not products.can_pack():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: request.param)
    return bool(request.param)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 5, 7), (33, 48, 16), (130, 64, 300)])
def test_equal_to_float64(library: bool, rows: int, inner: int, outer: int) -> None:
    x, weight, bias, start = drawn(rows, inner), drawn(outer, inner), drawn(outer), drawn(rows, outer)
    right, turned = x.double() @ weight.double().T, weight.T.contiguous().T
    found = [products.linear(x, weight, bias) - bias, products.linear(x, turned), products.product(x, weight.T)]
    found += [products.product_into(torch.empty(rows, outer), x, weight.T)]
    found += [products.product(x.T.contiguous().T, turned.T)]
    found += [(products.add_product(start.clone(), x, weight.T, 0.5) - start) / 0.5]
    columns = torch.cat([drawn(outer, 3), weight, drawn(outer, 3)], dim=1)[:, 3 : 3 + inner]
    found += [products.linear(x, columns), products.product(columns, x.T).T]  # a part of a wider matrix
    for each in found:
        torch.testing.assert_close(each.double(), right, rtol=1e-5, atol=1e-5 * inner**0.5)


def test_wide_results_are_written_in_parts(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_COLUMNS", 64)
    x, weight, out = drawn(9, 20), drawn(150, 20), torch.empty(9, 150)
    assert products.product_into(out, x, weight.T) is out
    torch.testing.assert_close(out, x @ weight.T)


def test_what_is_differentiated_has_its_gradient_and_what_torch_must_do_is_left_to_it(library: bool) -> None:
    x, weight = drawn(6, 4).requires_grad_(), drawn(3, 4).requires_grad_()
    products.linear(x, weight).square().sum().backward()
    y = x.detach() @ weight.detach().T
    torch.testing.assert_close(x.grad, 2 * y @ weight.detach())
    torch.testing.assert_close(weight.grad, 2 * y.T @ x.detach())
    x, weight, wide = drawn(4, 8), drawn(10, 8), drawn(20).requires_grad_()
    found = products.linear(x, weight, wide[::2])
    torch.testing.assert_close(found, x @ weight.T + wide[::2])
    torch.testing.assert_close(products.linear(x, weight, drawn(1).expand(10)), x @ weight.T + drawn(1))
    found.sum().backward()
    assert (wide.grad[::2].tolist(), products.linear(drawn(0, 4), drawn(3, 4)).shape) == ([4.0] * 10, (0, 3))
    assert products.product(drawn(2, 4).double(), drawn(4, 3).double()).dtype == torch.float64

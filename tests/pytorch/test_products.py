"""Products of float32 on a CPU: the same numbers whichever library multiplies, and gradients where they are wanted."""

import pytest
import torch
from torch import Tensor

from covey.pytorch import products


@pytest.fixture(params=[False, True], ids=["torch", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each of the two, whatever the processor is."""
    if request.param and not products.can_pack():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: request.param)
    return bool(request.param)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 5, 7), (33, 48, 16), (130, 64, 300)])
def test_equal_to_float64(library: bool, rows: int, inner: int, outer: int) -> None:
    x, weight, bias, start = drawn(rows, inner), drawn(outer, inner), drawn(outer), drawn(rows, outer)
    right = x.double() @ weight.double().T
    turned = weight.T.contiguous().T
    found = [products.linear(x, weight, bias) - bias, products.linear(x, turned), products.product(x, weight.T)]
    found += [
        products.product_into(torch.empty(rows, outer), x, weight.T),
        products.product(x.T.contiguous().T, turned.T),
    ]
    found += [(products.add_product(start.clone(), x, weight.T, 0.5) - start) / 0.5]
    columns = torch.cat([drawn(outer, 3), weight, drawn(outer, 3)], dim=1)[:, 3 : 3 + inner]
    found += [products.linear(x, columns), products.product(columns, x.T).T]  # a part of a wider matrix
    for each in found:
        torch.testing.assert_close(each.double(), right, rtol=1e-5, atol=1e-5 * inner**0.5)


def test_wide_results_are_written_in_parts(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_COLUMNS", 64)
    x, weight = drawn(9, 20), drawn(150, 20)
    out = torch.empty(9, 150)
    assert products.product_into(out, x, weight.T) is out
    torch.testing.assert_close(out, x @ weight.T)


def test_what_is_differentiated_has_its_gradient(library: bool) -> None:
    x, weight = drawn(6, 4).requires_grad_(), drawn(3, 4).requires_grad_()
    products.linear(x, weight).square().sum().backward()
    y = x.detach() @ weight.detach().T
    torch.testing.assert_close(x.grad, 2 * y @ weight.detach())
    torch.testing.assert_close(weight.grad, 2 * y.T @ x.detach())


def test_a_bias_may_be_a_view_and_may_be_trained(library: bool) -> None:
    x, weight, wide = drawn(4, 8), drawn(10, 8), drawn(20).requires_grad_()
    found = products.linear(x, weight, wide[::2])
    torch.testing.assert_close(found, x @ weight.T + wide[::2])
    torch.testing.assert_close(products.linear(x, weight, drawn(1).expand(10)), x @ weight.T + drawn(1))
    found.sum().backward()
    assert wide.grad[::2].tolist() == [4.0] * 10


def test_nothing_and_other_types_are_left_to_torch(library: bool) -> None:
    assert products.linear(drawn(0, 4), drawn(3, 4)).shape == (0, 3)
    wide = products.product(drawn(2, 4).double(), drawn(4, 3).double())
    assert wide.dtype == torch.float64

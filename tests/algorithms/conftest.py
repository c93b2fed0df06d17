"""JAX in float64 for these tests only; the setting is thread-wide, so it is put back after each module."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def float64_in_jax() -> Iterator[None]:
    with jax.enable_x64(True):
        yield

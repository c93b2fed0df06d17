"""Compiling fast matters here, running fast does not: what one worker has compiled is kept in pytest's cache folder."""

import os
from collections.abc import Iterator

import jax
import jaxlib
import pytest

if jaxlib.__version__.startswith("0.10."):  # an unknown flag would end the process; this one halves the compile time
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


@pytest.fixture(autouse=True, scope="session")
def kept_programs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    name = f"jax_programs_{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    folder = tmp_path_factory.mktemp(name) if cache is None else cache.mkdir(name)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="module")
def compile_fast() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

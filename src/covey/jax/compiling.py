"""When programs are compiled, and where they are kept: on disk, so that the second run of a recipe starts at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_LARGEST = 1 << 30
_WORTH_KEEPING = 0.2  # seconds of compiling


def keep_programs() -> None:
    """Let JAX keep programs in the user's cache folder, unless `JAX_COMPILATION_CACHE_DIR` or a call said where.

    A folder that cannot be written costs a warning of JAX's, and nothing else.
    """
    said: Any = jax.config
    if said.jax_compilation_cache_dir is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "covey" / "xla"))
    jax.config.update("jax_compilation_cache_max_size", _LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_float32() -> None:
    """Let products of float32 be float32, unless `JAX_DEFAULT_MATMUL_PRECISION` or a call said how exact they are.

    Left alone, GPUs compute them in TF32, which keeps 10 bits of each factor's 23, and TPUs in bfloat16, with 7.
    """
    said: Any = jax.config
    if said.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")


class CompiledFunction:
    """A function compiled once for each shape of its arguments, ahead of time where asked, and not run for it."""

    def __init__(self, function: Callable[..., Any], settings: tuple[str, ...], donate: tuple[str, ...] = ()) -> None:
        self._jit = jax.jit(function, static_argnames=settings, donate_argnames=donate)
        self._programs: dict[Any, Any] = {}

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far."""
        return len(self._programs)

    def knows(self, *arguments: Any, **settings: Any) -> bool:
        """Whether there is a program for arguments of these shapes."""
        return self._key(arguments, settings) in self._programs

    def prepare(self, *arguments: Any, **settings: Any) -> None:
        """Compile the program for arguments of these shapes, unless there is one."""
        key = self._key(arguments, settings)
        if key not in self._programs:
            self._programs[key] = self._jit.lower(*arguments, **settings).compile()

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Run the program for arguments of these shapes, which is compiled first if there is none."""
        self.prepare(*arguments, **settings)
        return self._programs[self._key(arguments, settings)](*arguments)

    @staticmethod
    def _key(arguments: Any, settings: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        return tree, tuple((x.shape, x.dtype) for x in leaves), tuple(sorted(settings.items()))

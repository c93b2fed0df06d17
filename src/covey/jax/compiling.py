"""Compiled programs are kept on disk, so that the second run of a recipe, and a resumed one, start at once."""

from __future__ import annotations

import os
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

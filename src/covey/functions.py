"""Find a Python function by name: `my_rewards.py:correct` or `package.module:correct`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from covey.errors import ConfigError, raised_at


def load_function(name: str) -> Callable[..., Any]:
    """Import the object that `name` names.

    Args:
        name: `FILE.py:NAME`, relative to the working directory, or `MODULE:NAME`.

    Raises:
        ConfigError: wrong form, no such file, module or object, or the file raises when imported.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigError(
            f"{name!r} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION, e.g. my_rewards.py:correct"
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{name}: importing {where} failed with {type(error).__name__}: {error}{raised_at(error)}; correct it"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(
            f"{name}: {where} has no {attribute!r}; it has {', '.join(_functions(module)) or 'no function'}"
        )
    if not callable(found) and not hasattr(found, "batch_verify"):
        raise ConfigError(f"{name}: {attribute!r} is a {type(found).__name__}, not a function or verifier")
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give its path from the working directory, {Path.cwd()}")
    # A name of its own, so that a user's `random.py` does not hide a library's.
    name = f"covey_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _functions(module: ModuleType) -> list[str]:
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))

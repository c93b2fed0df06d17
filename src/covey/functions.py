"""Find Python objects by name: `my_rewards.py:correct` in a file of the user's, or `package.module:correct`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from covey.errors import ConfigError, raised_at


def load_function(name: str) -> Callable[..., Any]:
    """Import the function or verifier that `name` names; see `load_object`.

    Raises:
        ConfigError: also where it is something else.
    """
    found = load_object(name)
    if not callable(found) and not hasattr(found, "batch_verify"):
        attribute = name.rpartition(":")[2]
        raise ConfigError(f"{name}: {attribute!r} is a {type(found).__name__}, not a function or verifier")
    return found  # type: ignore[no-any-return]


def load_object(name: str, kind: str = "function") -> Any:
    """Import the object that `name` names.

    Args:
        name: `FILE.py:NAME`, relative to the working directory, or `MODULE:NAME`.
        kind: what it should be, for messages.

    Raises:
        ConfigError: wrong form, no such file, module or object, or the file raises when imported.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        example = ", e.g. my_rewards.py:correct" if kind == "function" else ""
        form = kind.upper()
        raise ConfigError(f"{name!r} names no {kind}: write FILE.py:{form} or MODULE:{form}{example}")
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
    return found


def names_file(name: str | None) -> bool:
    """True for `FILE.py:NAME`, with or without options after it."""
    return name is not None and name.partition(":")[0].endswith(".py")


def whole_path(name: str, folders: Sequence[Path]) -> str:
    """`FILE.py:...` with the whole path of the file in the first folder that has it; any other name as it is."""
    file, _, rest = name.partition(":")
    if names_file(name) and not Path(file).is_absolute():
        for folder in folders:
            if (folder / file).is_file():
                return f"{(folder / file).resolve()}:{rest}"
    return name


USER_FILES: dict[str, str] = {}
"""Modules of the user's files, by the names that they are imported under. Sent to another process (`update`), it can
unpickle what they define.
"""


class _UserFiles(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = USER_FILES.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_UserFiles())


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give its path from the working directory, {Path.cwd()}")
    # A name of its own, so that a user's `random.py` does not hide a library's.
    whole = str(path.resolve())
    name = f"covey_user_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    USER_FILES[name] = whole
    return importlib.import_module(name)


def _functions(module: ModuleType) -> list[str]:
    """What a module defines itself, without what it imports."""

    def imported(value: Any) -> bool:
        return isinstance(value, FunctionType | type) and value.__module__ != module.__name__

    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and not imported(value)
    )

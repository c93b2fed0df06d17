"""Find Python objects by name: `my_rewards.py:correct` in a file of the user's, or `package.module:correct`.

And make things of a kind that have options in their names: `gsm8k:num_eval=50`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from covey.errors import ConfigError, CoveyError, raised_at


def from_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a package whose names are those that its stub, `__init__.pyi`, imports: each is
    imported when it is first used.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8"))
    imports = (line for line in stub.body if isinstance(line, ast.ImportFrom) and line.module)
    homes = {alias.name: str(line.module) for line in imports for alias in line.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return sorted(homes), get


def unknown_name(package: str, name: str, advice: str) -> Exception:
    """What a package's `__getattr__` raises for a name that it does not have: an import is told the advice."""
    imported = sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(advice) if imported else AttributeError(f"module {package!r} has no attribute {name!r}")


def later(package: str, names: str) -> list[Any]:
    """Modules of a package, as in `later("covey.pytorch", "learner logprobs")`, each imported when it is first used."""
    return [_Later(f"{package}.{name}") for name in names.split()]


class _Later:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def load_function(name: str) -> Callable[..., Any]:
    """Import the function or verifier that `name` names; see `load_object`.

    Raises `ConfigError`: also where it is something else.
    """
    found = load_object(name)
    if not callable(found) and not hasattr(found, "batch_verify"):
        attribute = name.rpartition(":")[2]
        raise ConfigError(f"{name}: {attribute!r} is a {type(found).__name__}, not a function or verifier")
    return found  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    """The name under which `load_function` finds a function again: `MODULE:NAME`.

    Raises `ValueError`: it would not; the function has no name of its own at the top of a module.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if "<" in name or "." in name:
        raise ValueError(
            "a lambda, an object or a function inside another cannot be found again by a resumed run; define it with "
            "def at the top of a file"
        )
    return f"{module}:{name}"


def load_object(name: str, kind: str = "function") -> Any:
    """Import the object that `name` names.

    Raises `ConfigError`: wrong form, no such file, module or object, or the file raises when imported.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        example = ", e.g. my_rewards.py:correct" if kind == "function" else ""
        form = kind.upper()
        raise ConfigError(f"{name!r} names no {kind}: write FILE.py:{form} or MODULE:{form}{example}")
    if ".py:" in where:
        raise ConfigError(
            f"{name}: a {kind} takes no options after its name; of a loss and an estimator they are set in "
            "algorithm.loss_parameters and algorithm.adv_parameters"
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == where and Path(f"{where}.py").is_file():
            raise ConfigError(f"{name}: there is no such module, but a file; write {where}.py:{attribute}") from error
        raise ConfigError(
            f"{name}: importing {where} failed with {type(error).__name__}: {error}{raised_at(error)}; correct it"
        ) from error
    found = getattr(module, attribute, None)
    if found is None and where == "__main__":
        raise ConfigError(
            f"{name}: it stands in the program that began the run; go on with that program, "
            "trainer.train(resume_from_checkpoint=True)"
        )
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


def user_file_hashes() -> dict[str, str]:
    """Path -> SHA-256 of each file of the user's that was imported; one that is gone by now is left out."""
    return {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in USER_FILES.values()
        if Path(path).is_file()
    }


def require_files(hashes: Mapping[str, str]) -> None:
    """Make sure that this machine has the user's files that another process has imported.

    Raises `ConfigError`: one is missing, or another one.
    """
    for path, wanted in hashes.items():
        where = f"{path}: on {socket.gethostname()}"
        if not Path(path).is_file():
            raise ConfigError(f"{where} there is no such file; copy it to every machine")
        if hashlib.sha256(Path(path).read_bytes()).hexdigest() != wanted:
            raise ConfigError(f"{where} it is another file; copy it to every machine")


def _functions(module: ModuleType) -> list[str]:
    """What a module defines itself, without what it imports."""

    def imported(value: Any) -> bool:
        return isinstance(value, FunctionType | type) and value.__module__ != module.__name__

    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and not imported(value)
    )


Made = TypeVar("Made")
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,)}
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def find_factory(kind: str, name: str, factories: Mapping[str, Callable[..., Made] | str]) -> tuple[str, Any, str]:
    """What `name` begins with, the factory of that name or the object of a `FILE.py:NAME`, and the options after it.

    A factory may itself be a name, `MODULE:NAME`, which is imported when it is asked for.

    Raises `ConfigError`: there is no such thing.
    """
    base, _, listed = name.partition(":")
    if names_file(base):
        attribute, _, listed = listed.partition(":")
        base = f"{base}:{attribute}"
        return base, load_object(base, kind), listed
    if base not in factories:
        raise ConfigError(f"{kind}={base!r}: no such {kind}; {nearest(base, sorted(factories))}")
    factory = factories[base]
    return base, load_object(factory, kind) if isinstance(factory, str) else factory, listed


def make_named(
    kind: str, name: str, factories: Mapping[str, Callable[..., Made] | str], needs: type[Any], **options: Any
) -> Made:
    """Call the factory that `name` names.

    Raises `ConfigError`: no such thing, no such option, or a value that the factory refuses; or what the user's file
    has under that name is no such thing.
    """
    base, factory, listed = find_factory(kind, name, factories)
    options = read_options(kind, name, listed) | options
    wanted = [public for public in vars(needs) if not public.startswith("_")]
    if not isinstance(factory, type) and any(hasattr(factory, public) for public in wanted):
        if options:
            raise ConfigError(f"{kind}={name!r}: {base} is made already and takes no options; remove them")
        already: Made = _checked(kind, base, factory, wanted, needs)
        return already
    if not callable(factory):
        raise ConfigError(
            f"{kind}={name!r}: {base} is a {type(factory).__name__}, no {kind} and nothing that makes one"
        )
    if inspect.isabstract(factory):
        raise ConfigError(f"{kind}={name!r}: {base} lacks {', '.join(sorted(factory.__abstractmethods__))}; add it")
    parameters = inspect.signature(factory).parameters
    for option in options:
        if option not in parameters:
            raise ConfigError(f"{kind}={base!r} has no option {option!r}; {nearest(option, parameters)}")
    for option, parameter in parameters.items():
        if option not in options and parameter.default is parameter.empty and parameter.kind not in _COLLECTING:
            raise ConfigError(f"{kind}={name!r} lacks its option {option!r}; write {base}:{option}=VALUE")
    if problem := number_problem(factory, options):
        raise ConfigError(f"{kind}={name!r}: {problem}")
    try:
        made: Made = factory(**options)
    except TypeError as error:
        raise ConfigError(f"{kind}={name!r}: {error}; its options are {', '.join(parameters)}") from error
    except Exception as error:
        if isinstance(error, CoveyError) or not names_file(name):
            raise
        raise ConfigError(
            f"{kind}={name!r}: making it failed with {type(error).__name__}: {error}{raised_at(error)}; correct it"
        ) from error
    if names_file(name):
        _checked(kind, base, made, wanted, needs)
    return made


def number_problem(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """What is wrong with a value where the function's parameter is a number (or one `| None`); "" = nothing."""
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        note = parameters[name].annotation if name in parameters else ""
        kind, _, none = str(getattr(note, "__name__", note)).partition(" | ")
        allowed = _NUMBERS.get(kind)
        if allowed and type(value) not in allowed and not (none and value is None):
            return f"{name}={value!r:.80} is {type(value).__name__}, and must be {_WORDS[allowed[0]]}"
    return ""


def _checked(kind: str, base: str, made: Any, wanted: Sequence[str], needs: type[Any]) -> Any:
    missing = [public for public in wanted if not hasattr(made, public)]
    if missing:
        raise ConfigError(
            f"{kind}={base!r}: a {type(made).__name__} lacks {', '.join(missing)}; name a class derived "
            f"from {needs.__module__}.{needs.__name__}"
        )
    return made


def read_options(kind: str, name: str, listed: str) -> dict[str, Any]:
    """Options that are listed after a name, `a=1,b=true`. Raises `ConfigError`: one has no value, or is no name."""
    options: dict[str, Any] = {}
    for item in filter(None, listed.split(",")):
        option, equals, value = item.partition("=")
        if not equals or "|" in option:
            raise ConfigError(
                f"{kind}={name!r}: {item!r} is not an option; write name:option=value,option=value; a value cannot "
                "contain a comma"
            )
        options[option.strip()] = _read_value(value.strip())
    return options


def _read_value(text: str) -> Any:
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """What to write in place of a name that is not known, for an error."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known) or '(none)'}"

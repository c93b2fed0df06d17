"""Imports go downward only, without circles. Checked by parsing every file, imports inside functions included.

0   types, errors, files, functions, ...  (modules beside the rooms)
1   algorithms, observe, rewards
2   tasks, environments
3   config
4   rollout
5   backend
6   pytorch, jax                          (never each other)
7   serving
8   distributed, watch
9   training
10  cli, trl, and the names that `covey` exports
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import covey

SOURCE = Path(covey.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

ROOMS = (
    ("types", "errors", "files", "adapters", "functions", "hub", "metric_names", "overseer", "processes", "signals"),
    ("algorithms", "observe", "rewards"),
    ("tasks", "environments"),
    ("config",),
    ("rollout",),
    ("backend",),
    ("pytorch", "jax"),
    ("serving",),
    ("distributed", "watch"),
    ("training",),
    ("cli", "trl", "__main__", "__init__"),
)
LEVELS = {name: level for level, names in enumerate(ROOMS) for name in names}
MAY_PRINT = {"cli", "__main__", "trl"}
WITHOUT_TORCH = {
    "types",
    "errors",
    "files",
    "adapters",
    "functions",
    "environments",
    "algorithms",
    "rollout",
    "observe",
    "jax",
    "config",
    "backend",
    "watch",
}
HEAVY = ("torch", "transformers", "peft", "jax", "flax", "optax", "orbax")


@dataclass(frozen=True)
class Import:
    """One import statement.

    `module` is what is imported (`covey.types`), `typing_only` whether it stands below `if TYPE_CHECKING`,
    `deferred` whether it stands in a function, so that it runs when that is called.
    """

    line: int
    module: str
    typing_only: bool
    deferred: bool


def room(module: str) -> str:
    """`covey.rollout.packing` -> `rollout`; the package itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path, root: Path = SOURCE) -> str:
    parts = ["covey", *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, path: Path, root: Path = SOURCE) -> Iterator[Import]:
    """Every import in a file, `from covey import x` resolved to the module x where there is one."""
    module = module_of(path, root)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    guarded = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    deferred = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, node in guarded, node in deferred)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                inside = root.joinpath(*inner.split(".")[1:])
                is_module = base.split(".")[0] == "covey" and (inside.is_dir() or inside.with_suffix(".py").is_file())
                yield Import(node.lineno, inner if is_module else base, node in guarded, node in deferred)


def fault(importer: str, found: Import) -> str | None:
    """Why `importer` (a module) may not have this import, or None."""
    if found.module.split(".")[0] != "covey":
        return None
    ours, theirs = room(importer), room(found.module)
    if theirs not in LEVELS:
        return f"imports {found.module}, which has no level: add it to ROOMS"
    if LEVELS[theirs] < LEVELS[ours] or ours == theirs:
        return None
    if LEVELS[ours] == LEVELS[theirs] in (0, len(ROOMS) - 1):
        return None
    return f"(level {LEVELS[ours]}) imports {found.module} (level {LEVELS[theirs]})"


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, directly or through others (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for imported in imports[module]:
            if imported not in number:
                visit(imported)
            if imported in stack:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == number[module]:
            circle = [stack.pop()]
            while circle[-1] != module:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in imports:
        if module not in number:
            visit(module)
    return found


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_in(path: Path) -> tuple[Import, ...]:
    return tuple(imports_of(parse(path), path))


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 5


def test_every_module_has_a_level() -> None:
    rooms = {room(module_of(path)) for path in FILES}
    assert rooms <= set(LEVELS), f"give these a level in ROOMS: {sorted(rooms - set(LEVELS))}"


def test_imports_go_downward() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{found.line} {why}"
        for path in FILES
        for found in imports_in(path)
        if (why := fault(module_of(path), found))
    ]
    assert not faults, "\n".join(faults)


def test_no_module_imports_itself_through_others() -> None:
    """Neither at its top, nor in a function, nor for the type checker only."""
    modules = {module_of(path): path for path in FILES}
    imports = {
        module: {found.module for found in imports_in(path) if found.module in modules} - {module}
        for module, path in modules.items()
    }
    assert circles(imports) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_backends_stay_in_their_rooms() -> None:
    """JAX is imported in its own room only, torch nowhere below the torch backend nor in the other one."""
    faults = []
    for path in FILES:
        importer = room(module_of(path))
        for found in imports_in(path):
            library = found.module.split(".")[0]
            if found.typing_only or library not in HEAVY:
                continue
            if importer == "algorithms" and found.deferred:
                continue  # reached only with an array of that library in hand
            jax = library in ("jax", "flax", "optax", "orbax")
            base = "config" if importer.startswith("config") else importer
            if (jax and importer != "jax") or (not jax and base in WITHOUT_TORCH):
                faults.append(f"{path.relative_to(SOURCE)}:{found.line} imports {found.module}")
    assert not faults, "\n".join(faults)


def test_ray_is_imported_where_it_is_used() -> None:
    """Who has no cluster needs no Ray, and what is sampled does not depend on it."""
    inside = {f"covey.distributed.ray_{name}" for name in ("cluster", "members", "workers", "launch")}
    ray = {module_of(path) for path in FILES for found in imports_in(path) if found.module.split(".")[0] == "ray"}
    assert ray == inside
    doors = {
        (module_of(path), found.deferred)
        for path in FILES
        for found in imports_in(path)
        if found.module in inside and module_of(path) not in inside
    }
    assert doors == {("covey.distributed.start", True), ("covey.training.launch", True)}


def test_library_rooms_do_not_print() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        if room(module_of(path)) not in MAY_PRINT
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not faults, f"print() in {faults}: take a rich console, or return the text"


@pytest.mark.parametrize(
    ("importer", "code", "allowed"),
    [
        ("rollout/packing.py", "from covey.types import Batch", True),
        ("rollout/packing.py", "from covey.algorithms import kl", True),
        ("rollout/packing.py", "from covey.rollout import scoring", True),
        ("rollout/packing.py", "from . import scoring", True),
        ("rollout/packing.py", "import numpy", True),
        ("rollout/packing.py", "import covey.pytorch.policy", False),
        ("rollout/packing.py", "from ..pytorch import policy", False),
        ("rollout/packing.py", "from .. import training", False),
        ("rollout/packing.py", "def f():\n    from covey.training import trainer", False),
        ("rollout/__init__.py", "from .packing import Pack", True),
        ("rollout/__init__.py", "from ..serving import x", False),
        ("pytorch/policy.py", "from covey.rollout.packing import Pack", True),
        ("pytorch/policy.py", "from covey.jax import model", False),
        ("tasks/usmle.py", "from covey.rewards import Verifier", True),
        ("rewards/math.py", "from covey.tasks import usmle", False),
        ("algorithms/kl.py", "from covey.rewards import Verifier", False),
        ("types.py", "from covey.errors import DataError", True),
        ("types.py", "from covey import algorithms", False),
        ("training/trainer.py", "from covey.config import GRPOConfig", True),
        ("training/trainer.py", "from covey.pytorch.backend import BACKEND", True),
        ("config.py", "from covey.config.training import OptimConfig", True),
        ("config.py", "from covey.training.trainer import GRPOTrainer", False),
        ("config.py", "if TYPE_CHECKING:\n    from covey.training.trainer import GRPOTrainer", False),
        ("pytorch/backend.py", "from covey.config import GRPOConfig\nfrom covey.backend import Backend", True),
        ("jax/loading.py", "def f():\n    from covey.pytorch.models.loading import load_model", False),
        ("pytorch/backend.py", "from covey.jax.model import Transformer", False),
        ("rollout/packing.py", "if TYPE_CHECKING:\n    from covey.training import trainer", False),
        ("observe/doctor.py", "from covey.config import GRPOConfig", False),
        ("training/trainer.py", "def f():\n    from covey.cli.app import main", False),
        ("training/trainer.py", "if TYPE_CHECKING:\n    from covey.cli.app import main", False),
        ("training/trainer.py", "if not TYPE_CHECKING:\n    pass\nelse:\n    from covey.cli.app import X", False),
        ("training/trainer.py", "from covey import GRPOConfig", False),
        ("cli.py", "from covey import GRPOConfig\nfrom covey.training import trainer", True),
        ("training/trainer.py", "import covey.brand_new_room", False),
    ],
)
def test_the_checker(importer: str, code: str, allowed: bool) -> None:
    path = SOURCE / importer
    faults = [fault(module_of(path), found) for found in imports_of(ast.parse(code), path)]
    assert all(why is None for why in faults) == allowed


def test_one_version_number() -> None:
    project = SOURCE.parent.parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not run from a source tree")
    assert tomllib.loads(project.read_text())["project"]["version"] == covey.__version__

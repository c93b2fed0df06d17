"""Imports go downward only (`ROOMS`, from the lowest level up), without circles, those inside functions included."""

import ast
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import covey

SOURCE = Path(covey.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

FILES_AND_VALUES = ("types", "errors", "files", "adapters", "functions", "hub", "metric_names", "model_files")
ROOMS = (
    (*FILES_AND_VALUES, "overseer", "processes", "signals"),
    ("algorithms", "observe", "rewards"),
    ("tasks",),
    ("environments",),
    ("config",),
    ("rollout",),
    ("backend",),
    ("pytorch", "jax"),  # never each other
    ("serving",),
    ("distributed", "watch"),
    ("training",),
    ("cli", "trl", "__main__", "__init__"),
)
LEVELS = {name: level for level, names in enumerate(ROOMS) for name in names}
WITHOUT_TORCH = {"types", "errors", "files", "adapters", "functions", "environments", "algorithms", "rollout"}
WITHOUT_TORCH |= {"observe", "jax", "config", "backend", "watch"}
HEAVY = ("torch", "transformers", "peft", "jax", "flax", "optax", "orbax")


@dataclass(frozen=True)
class Import:
    """One import statement, of `module` (`covey.types`)."""

    line: int
    module: str
    typing_only: bool  # below `if TYPE_CHECKING`
    deferred: bool  # in a function: it runs when that is called


def room(module: str) -> str:
    """`covey.rollout.packing` -> `rollout`; the package itself is `__init__`."""
    return (*module.split("."), "__init__")[1]


def module_of(path: Path) -> str:
    parts = ["covey", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def below(tree: ast.Module, kinds: Any, holds: Callable[[Any], bool] = lambda branch: True) -> set[ast.AST]:
    """All nodes in the bodies of statements of these kinds."""
    branches = (node for node in ast.walk(tree) if isinstance(node, kinds) and holds(node))
    return {node for branch in branches for statement in branch.body for node in ast.walk(statement)}


def imports_of(tree: ast.Module, path: Path) -> Iterator[Import]:
    """Every import in a file, `from covey import x` resolved to the module x where there is one."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    guarded = below(tree, ast.If, lambda branch: ast.unparse(branch.test).endswith("TYPE_CHECKING"))
    deferred = below(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, node in guarded, node in deferred)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                inside = SOURCE.joinpath(*inner.split(".")[1:])
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


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Modules that import one another, directly or through others: those that import none go, and those that none
    imports, until nothing changes.
    """
    left = set(imports)
    while gone := {m for m in left if not imports[m] & left or not any(m in imports[other] for other in left)}:
        left -= gone
    return left


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def all_imports() -> list[tuple[Path, str, Import]]:
    """File, its module, and an import in it."""
    return [(path, module_of(path), found) for path in FILES for found in imports_of(parse(path), path)]


def test_every_module_has_a_level() -> None:
    assert len(FILES) > 5
    rooms = {room(module_of(path)) for path in FILES}
    assert rooms <= set(LEVELS), f"give these a level in ROOMS: {sorted(rooms - set(LEVELS))}"


def test_imports_go_downward() -> None:
    faults = [(path, found.line, fault(module, found)) for path, module, found in all_imports()]
    assert [f"{path.relative_to(SOURCE)}:{line} {why}" for path, line, why in faults if why] == []


def test_no_module_imports_itself_through_others() -> None:
    """Neither at its top, nor in a function, nor for the type checker only."""
    imports: dict[str, set[str]] = {module_of(path): set() for path in FILES}
    for _, module, found in all_imports():
        imports[module] |= {found.module} & imports.keys() - {module}
    assert (circles(imports), circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == (set(), {"b", "c"})


def test_backends_stay_in_their_rooms() -> None:
    """JAX is imported in its own room only, torch nowhere below the torch backend nor in the other one."""
    faults = []
    for path, module, found in all_imports():
        importer, library = room(module), found.module.split(".")[0]
        if found.typing_only or library not in HEAVY:
            continue
        if importer == "algorithms" and found.deferred:
            continue  # reached only with an array of that library in hand
        if importer != "jax" if library in HEAVY[3:] else importer in WITHOUT_TORCH:
            faults.append(f"{path.relative_to(SOURCE)}:{found.line} imports {found.module}")
    assert faults == []


def test_ray_is_imported_where_it_is_used() -> None:
    """Who has no cluster needs no Ray, and what is sampled does not depend on it."""
    inside = {f"covey.distributed.ray_{name}" for name in ("cluster", "members", "workers", "launch")}
    assert {module for _, module, found in all_imports() if found.module.split(".")[0] == "ray"} == inside
    doors = {(module, found.deferred) for _, module, found in all_imports() if found.module in inside - {module}}
    outside = {door for door in doors if door[0] not in inside}
    assert outside == {("covey.distributed.start", True), ("covey.training.launch", True)}


def test_library_rooms_do_not_print() -> None:
    assert [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        if room(module_of(path)) not in {"cli", "__main__", "trl"}
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ] == [], "take a rich console, or return the text"


ALLOWED = {
    "rollout/packing.py": (
        *("from covey.types import Batch", "from covey.algorithms import kl", "from covey.rollout import scoring"),
        *("from . import scoring", "import numpy"),
    ),
    "rollout/__init__.py": ["from .packing import Pack"],
    "pytorch/policy.py": ["from covey.rollout.packing import Pack"],
    "tasks/usmle.py": ["from covey.rewards import Verifier"],
    "types.py": ["from covey.errors import DataError"],
    "training/trainer.py": ["from covey.config import GRPOConfig", "from covey.pytorch.backend import BACKEND"],
    "config.py": ["from covey.config.training import OptimConfig"],
    "pytorch/backend.py": ["from covey.config import GRPOConfig\nfrom covey.backend import Backend"],
    "cli.py": ["from covey import GRPOConfig\nfrom covey.training import trainer"],
}
WHILE_TYPING, CALLED = "if TYPE_CHECKING:\n    ", "def f():\n    "
TRAINER = "from covey.training.trainer import GRPOTrainer"
FORBIDDEN = {
    "rollout/packing.py": (
        *("import covey.pytorch.policy", "from ..pytorch import policy", "from .. import training"),
        *(CALLED + "from covey.training import trainer", WHILE_TYPING + "from covey.training import trainer"),
    ),
    "rollout/__init__.py": ["from ..serving import x"],
    "pytorch/policy.py": ["from covey.jax import model"],
    "rewards/math.py": ["from covey.tasks import usmle"],
    "algorithms/kl.py": ["from covey.rewards import Verifier"],
    "types.py": ["from covey import algorithms"],
    "config.py": [TRAINER, WHILE_TYPING + TRAINER],
    "jax/loading.py": [CALLED + "from covey.pytorch.models.loading import load_model"],
    "pytorch/backend.py": ["from covey.jax.model import Transformer"],
    "observe/doctor.py": ["from covey.config import GRPOConfig"],
    "training/trainer.py": (
        *(CALLED + "from covey.cli.app import main", WHILE_TYPING + "from covey.cli.app import main"),
        "if not TYPE_CHECKING:\n    pass\nelse:\n    from covey.cli.app import X",
        *("from covey import GRPOConfig", "import covey.brand_new_room"),
    ),
}


def test_the_checker() -> None:
    for table, allowed in ((ALLOWED, True), (FORBIDDEN, False)):
        for importer, code in ((name, code) for name, codes in table.items() for code in codes):
            path = SOURCE / importer
            faults = [fault(module_of(path), found) for found in imports_of(ast.parse(code), path)]
            assert all(why is None for why in faults) == allowed, (importer, code)


def test_one_version_number() -> None:
    project = SOURCE.parent.parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not run from a source tree")
    assert tomllib.loads(project.read_text())["project"]["version"] == covey.__version__

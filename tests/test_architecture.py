"""Imports go downward only. Checked by parsing every file, imports inside functions included.

0  types, errors, files, adapters, functions, named, processes
1  algorithms, rewards, tasks, environments    (tasks and environments may use rewards)
2  rollout, pytorch, jax                       (a backend may use rollout, never the other one)
3  serving, observe
4  training, distributed
5  config, cli, demo, covey/__init__.py
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import covey

SOURCE = Path(covey.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

LEVELS = {
    **dict.fromkeys(("types", "errors", "files", "adapters", "functions", "named", "processes"), 0),
    **dict.fromkeys(("algorithms", "rewards", "tasks", "environments"), 1),
    **dict.fromkeys(("rollout", "pytorch", "jax"), 2),
    **dict.fromkeys(("serving", "observe"), 3),
    **dict.fromkeys(("training", "distributed"), 4),
    **dict.fromkeys(("config", "config_names", "config_documents", "config_effects", "config_trl", "config_text"), 5),
    **dict.fromkeys(
        ("cli", "cli_play", "cli_reports", "cli_seeds", "cli_serve", "cli_weights", "demo", "__main__", "__init__"), 5
    ),
}
SAME_LEVEL = {
    ("tasks", "rewards"),
    ("environments", "rewards"),
    ("pytorch", "rollout"),
    ("jax", "rollout"),
}
MAY_PRINT = {"cli", "demo", "__main__"}
WITHOUT_TORCH = {
    "types",
    "errors",
    "files",
    "adapters",
    "functions",
    "named",
    "environments",
    "algorithms",
    "rollout",
    "observe",
    "jax",
    "config",
}
HEAVY = ("torch", "transformers", "peft", "jax", "flax", "optax", "orbax")
MAX_LINES = 500


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
                is_module = base == "covey" and ((root / alias.name).is_dir() or (root / f"{alias.name}.py").is_file())
                yield Import(node.lineno, inner if is_module else base, node in guarded, node in deferred)


def fault(importer: str, found: Import) -> str | None:
    """Why `importer` (a room) may not have this import, or None."""
    if found.module.split(".")[0] != "covey":
        return None
    imported = room(found.module)
    if imported not in LEVELS:
        return f"imports {found.module}, which has no level: add it to LEVELS"
    if imported == importer or LEVELS[imported] < LEVELS[importer]:
        return None
    if LEVELS[importer] == 5 or (importer, imported) in SAME_LEVEL:
        return None
    if LEVELS[importer] == LEVELS[imported] == 0:
        return None
    if imported == "config" and (found.typing_only or (importer == "training" and found.deferred)):
        # A room may name the type of the composed config, which it is handed; the trainer makes one if it is
        # not.
        return None
    return f"(level {LEVELS[importer]}) imports {found.module} (level {LEVELS[imported]})"


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 5


def test_every_module_has_a_level() -> None:
    rooms = {room(module_of(path)) for path in FILES}
    assert rooms <= set(LEVELS), f"give these a level in LEVELS: {sorted(rooms - set(LEVELS))}"


def test_imports_go_downward() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{found.line} {why}"
        for path in FILES
        for found in imports_of(parse(path), path)
        if (why := fault(room(module_of(path)), found))
    ]
    assert not faults, "\n".join(faults)


def test_backends_stay_in_their_rooms() -> None:
    """JAX is imported in its own room only, torch nowhere below the torch backend nor in the other one."""
    faults = []
    for path in FILES:
        importer = room(module_of(path))
        for found in imports_of(parse(path), path):
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


def test_library_rooms_do_not_print() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        if room(module_of(path)) not in MAY_PRINT
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not faults, f"print() in {faults}: take a rich console, or return the text"


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_sections_need_pydantic_only() -> None:
    """Reading a config must stay quick: a room's config.py imports its own room and light libraries."""
    allowed = {"__future__", "typing", "pathlib", "pydantic"}
    for path in SOURCE.glob("*/config.py"):
        for found in imports_of(parse(path), path):
            own = found.module.startswith(f"covey.{room(module_of(path))}.")
            assert own or found.module in allowed, f"{path}: {found.module}"


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
        ("rollout/__init__.py", "from ..observe import x", False),
        ("pytorch/policy.py", "from covey.rollout.packing import Pack", True),
        ("pytorch/policy.py", "from covey.jax import model", False),
        ("jax/trainer.py", "from covey.pytorch import policy", False),
        ("tasks/usmle.py", "from covey.rewards import Verifier", True),
        ("rewards/math.py", "from covey.tasks import usmle", False),
        ("algorithms/kl.py", "from covey.rewards import Verifier", False),
        ("types.py", "from covey.errors import DataError", True),
        ("types.py", "from covey import algorithms", False),
        ("training/trainer.py", "from covey.config import GRPOConfig", False),
        ("training/trainer.py", "if TYPE_CHECKING:\n    from covey.config import GRPOConfig", True),
        ("training/trainer.py", "def f():\n    from covey.config import GRPOConfig", True),
        ("training/trainer.py", "def f():\n    from covey.cli import main", False),
        ("rollout/packing.py", "def f():\n    from covey.config import GRPOConfig", False),
        ("training/trainer.py", "if TYPE_CHECKING:\n    from covey.cli import main", False),
        (
            "training/trainer.py",
            "if not TYPE_CHECKING:\n    pass\nelse:\n    from covey.config import X",
            False,
        ),
        ("training/trainer.py", "from covey import GRPOConfig", False),
        ("cli.py", "from covey import GRPOConfig\nfrom covey.training import trainer", True),
        ("training/trainer.py", "import covey.brand_new_room", False),
    ],
)
def test_the_checker(importer: str, code: str, allowed: bool) -> None:
    path = SOURCE / importer
    faults = [fault(room(module_of(path)), found) for found in imports_of(ast.parse(code), path)]
    assert all(why is None for why in faults) == allowed


def test_one_version_number() -> None:
    project = SOURCE.parent.parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not run from a source tree")
    assert tomllib.loads(project.read_text())["project"]["version"] == covey.__version__

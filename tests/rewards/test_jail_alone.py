"""The jail's folder needs nothing of Covey: a copy of it runs, and it imports the standard library only."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

from covey.rewards import jail
from jails import needs_jail

FOLDER = Path(jail.__file__).parent
SCRIPT = """
import importlib.util, json
assert importlib.util.find_spec("covey") is None
from prison.harness import CallTests, TestHarness
from prison.sandbox import Limits

good = "def add(a, b):\\n    return a + b"
hostile = "import os, sys\\nopen('/etc/passwd').read()\\n" + good
with TestHarness(Limits(seconds=3), workers=2) as harness:
    tests = CallTests("add", (((1, 2), 3), ((0, 0), 0)))
    print(json.dumps([[result.score, result.status] for result in harness.run_all([(good, tests), (hostile, tests)])]))
"""


@needs_jail
def test_a_copy_under_another_name_runs_without_covey(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "prison", ignore=shutil.ignore_patterns("__pycache__"))
    script = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"
    command = [sys.executable, "-I", "-S", "-B", "-c", script]  # without site-packages, where Covey is
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[1.0, "passed"], [0.0, "error"]]


def test_it_imports_the_standard_library_and_itself() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= sys.stdlib_module_names, path.name
            elif isinstance(node, ast.ImportFrom):
                inside = node.level == 1 or (node.module or "").split(".")[0] in sys.stdlib_module_names
                assert inside, f"{path.name}: {ast.unparse(node)}"


def test_every_file_is_in_the_readme() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in told for path in FOLDER.glob("*.py") if path.name != "__init__.py")

"""The code verifier on HumanEval and MBPP: reference solutions pass, mutants fail, and how many programs a second.

    python benchmarks/verify_code.py humaneval.jsonl sanitized-mbpp.json

A mutant is the reference with one constant changed (a number by 1, a text by a letter, a truth value turned), chosen by
seed; solutions without a constant have none. Some mutants are right: a changed default that no test reaches, or a
start value that makes no difference. Writes `results/verify_code.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from covey.rewards.code import TestHarness, read_tests
from covey.rewards.jail.harness import Tests
from covey.rewards.jail.sandbox import Limits
from covey.tasks import load_rows
from covey.tasks.code import read_problem


def references(path: str) -> list[tuple[str, str, Tests]]:
    """Name, reference solution and tests of every problem of a file."""
    found = []
    for number, row in enumerate(load_rows(path)):
        _, spec = read_problem(row)
        code = row["code"] if "code" in row else row["prompt"] + row["canonical_solution"]
        found.append((str(row.get("task_id", number)), code, read_tests(spec)))
    return found


def mutant(code: str, draw: random.Random) -> str | None:
    """The program with one constant changed; None if it has none."""
    tree = ast.parse(code)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    constants = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in texts and isinstance(node.value, bool | int | float | str)
    ]
    if not constants:
        return None
    chosen = draw.choice(constants)
    value: Any = chosen.value
    if isinstance(value, bool):
        chosen.value = not value
    else:
        chosen.value = value + "x" if isinstance(value, str) else value + 1
    return ast.unparse(tree)


def measure(harness: TestHarness, programs: list[tuple[str, Tests]]) -> dict[str, Any]:
    """How many pass, how the others ended, and how long it took."""
    began = time.perf_counter()
    results = harness.run_all(programs)
    seconds = time.perf_counter() - began
    ends = Counter(result.status for result in results)
    return {
        "programs": len(programs),
        "passed": ends.pop("passed", 0),
        "others": dict(ends),
        "seconds": seconds,
        "per_second": len(programs) / seconds,
    }


def main() -> None:
    """Measure every file, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="in HumanEval's or MBPP's format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/verify_code.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with TestHarness(Limits(seconds=10)) as harness:
        harness.run_all([("x = 1", read_tests(["assert x == 1"]))])  # the workers are up
        for path in args.files:
            problems = references(path)
            draw = random.Random(args.seed)
            mutants = [(text, tests) for _, code, tests in problems if (text := mutant(code, draw)) is not None]
            results[Path(path).name] = {
                "references": measure(harness, [(code, tests) for _, code, tests in problems]),
                "mutants": measure(harness, mutants),
            }
        tiny = [("def f(x):\n    return x + 1", read_tests(["assert f(1) == 2", "assert f(2) == 3"]))] * 400
        results["one function, two tests"] = {"references": measure(harness, tiny)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, found in results.items():
        for kind, numbers in found.items():
            print(f"{name}: {numbers['passed']} of {numbers['programs']} {kind} pass; {numbers['per_second']:.0f}/s")


if __name__ == "__main__":
    main()

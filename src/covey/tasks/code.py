"""Programs that pass tests: problems from a file (own format, HumanEval, MBPP), or tiny functions made here.

{"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"]}                    own; see covey.rewards.code
{"task_id": ..., "prompt": ..., "canonical_solution": ..., "entry_point": ..., "test": ...}       HumanEval
{"task_id": ..., "prompt" or "text": ..., "code": ..., "test_list": [...], "test_imports": [...]} MBPP
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from covey.errors import ConfigError, DataError, RewardError
from covey.rewards.code import CodeReward, read_tests, split_check
from covey.rewards.jail.sandbox import Limits
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import FileTask, as_prompt
from covey.tasks.dataset import Row, load_rows


class _Family(NamedTuple):
    """Functions that differ by one value, `{n}` in the texts."""

    name: str
    argument: str
    description: str
    expression: str
    inputs: list[Any]
    values: Sequence[Any] = ("0",)


_NUMBERS = [0, 1, 5, -3, 12]
_NEAR = ["{n}", "{n} + 1", "{n} - 1", 0, 99]
_WORDS = ["hello", "Python", "abc", "a", "Level"]
_LISTS = [[3, 1, 2], [5], [4, -4, 0, 9], [7, 7, 2]]
_MANY, _FEW = list(range(2, 32)), list(range(1, 8))
_ENDINGS = ["!", "?", "s", "ed", "ing", ".txt", "y"]
_LETTERS = list("abehloty")

# fmt: off
_FAMILIES = [
    _Family("add", "x", "returns x plus {n}", "x + {n}", _NUMBERS, _MANY),
    _Family("subtract", "x", "returns x minus {n}", "x - {n}", _NUMBERS, _MANY),
    _Family("multiply", "x", "returns x times {n}", "x * {n}", _NUMBERS, _MANY),
    _Family("is_multiple", "x", "returns True if x is divisible by {n}, else False", "x % {n} == 0", _NEAR, _MANY),
    _Family("is_greater", "x", "returns True if x is greater than {n}, else False", "x > {n}", _NEAR, _MANY),
    _Family("remainder", "x", "returns the remainder of x divided by {n}", "x % {n}", [*_NEAR, 17], _MANY),
    _Family("larger", "x", "returns the larger of x and {n}", "max(x, {n})", _NEAR, _MANY),
    _Family("smaller", "x", "returns the smaller of x and {n}", "min(x, {n})", _NEAR, _MANY),
    _Family("repeat", "s", "returns the string s repeated {n} times", "s * {n}", _WORDS, _FEW),
    _Family("first", "s", "returns the first {n} characters of the string s", "s[:{n}]", _WORDS, _FEW),
    _Family("power", "x", "returns x to the power of {n}", "x ** {n}", [0, 1, 2, -3], _FEW),
    _Family("shift", "items", "returns a list with {n} added to each item of the list items", "[i + {n} for i in items]", _LISTS, _FEW),  # noqa: E501
    _Family("append_text", "s", 'returns the string s followed by "{n}"', "s + '{n}'", _WORDS, _ENDINGS),
    _Family("ends_with", "s", 'returns True if the string s ends with "{n}", else False', "s.endswith('{n}')", ["'a{n}'", "b", "'{n}'"], _ENDINGS),  # noqa: E501
    _Family("count_letter", "s", 'returns how often the letter "{n}" occurs in the string s', "s.count('{n}')", _WORDS, _LETTERS),  # noqa: E501
    _Family("has_letter", "s", 'returns True if the letter "{n}" is in the string s, else False', "'{n}' in s", _WORDS, _LETTERS),  # noqa: E501
    _Family("reverse", "s", "returns the string s reversed", "s[::-1]", _WORDS),
    _Family("upper", "s", "returns the string s in upper case", "s.upper()", _WORDS),
    _Family("lower", "s", "returns the string s in lower case", "s.lower()", _WORDS),
    _Family("length", "s", "returns the length of the string s", "len(s)", _WORDS),
    _Family("first_letter", "s", "returns the first character of the string s", "s[0]", _WORDS),
    _Family("last_letter", "s", "returns the last character of the string s", "s[-1]", _WORDS),
    _Family("total", "items", "returns the sum of the list items", "sum(items)", _LISTS),
    _Family("largest", "items", "returns the largest item of the list items", "max(items)", _LISTS),
    _Family("smallest", "items", "returns the smallest item of the list items", "min(items)", _LISTS),
    _Family("count", "items", "returns the number of items in the list items", "len(items)", _LISTS),
    _Family("ordered", "items", "returns the list items sorted in ascending order", "sorted(items)", _LISTS),
    _Family("last", "items", "returns the last item of the list items", "items[-1]", _LISTS),
    _Family("is_even", "x", "returns True if x is even, else False", "x % 2 == 0", [0, 1, 2, 7, 10]),
    _Family("is_odd", "x", "returns True if x is odd, else False", "x % 2 == 1", [0, 1, 2, 7, 10]),
    _Family("square", "x", "returns the square of x", "x * x", [0, 1, 5, -3]),
    _Family("negate", "x", "returns minus x", "-x", [0, 1, 5, -3]),
    _Family("absolute", "x", "returns the absolute value of x", "abs(x)", [0, 1, 5, -3]),
]
# fmt: on


def make_problems() -> list[Row]:
    """All of them, always the same: `{"prompt": ..., "tests": {...}, "solution": ..., "uid": ..., "family": ...}`."""
    return [_problem(family, str(value)) for family in _FAMILIES for value in family.values]


def _problem(family: _Family, value: str) -> Row:
    expression, description = (text.replace("{n}", value) for text in (family.expression, family.description))
    inputs = [eval(x.replace("{n}", value)) if isinstance(x, str) and "{n}" in x else x for x in family.inputs]
    cases = [[[given], eval(expression, {family.argument: given})] for given in inputs]
    signature = f"{family.name}({family.argument})"
    return {
        "prompt": f"Write a Python function {signature} that {description}.",
        "tests": {"kind": "call", "entry_point": family.name, "cases": cases},
        "solution": f"def {signature}:\n    return {expression}\n",
        "uid": f"{family.name}-{value}",
        "family": family.name,
    }


class Code(FileTask):
    """Problems whose answers are programs: `{"prompt": [...], "tests": {...}, "uid": ...}`.

    Args:
        path: a source for `load_rows`, in one of the formats above; None = tiny functions, made here.
        eval_path: held-out problems; None = hold out `num_eval` problems of `path`, those with the lowest hash.
        num_eval: number of held-out problems.
        partial_credit: reward the share of passed tests.
        seconds: time limit of a program, in seconds.
        memory_mb: memory limit of a program, in MiB.
        unprotected: run programs even if the host offers too little protection.
        packages: installed packages that programs may import, separated by spaces, such as "numpy scipy".
        system_prompt: put before each problem; None = none.

    Raises `ConfigError`: a number out of range.
    """

    name: ClassVar[str] = "code"

    def __init__(
        self,
        path: Any = None,
        eval_path: Any = None,
        num_eval: int = 100,
        partial_credit: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 256,
        unprotected: bool = False,
        packages: str = "",
        system_prompt: str | None = "Answer with Python code in one ```python block.",
    ) -> None:
        if num_eval < 1 or seconds <= 0 or memory_mb < 64:
            raise ConfigError(f"{num_eval=}, {seconds=}, {memory_mb=}: at least 1, above 0, at least 64")
        self.path, self.eval_path, self.num_eval, self.system_prompt = path, eval_path, num_eval, system_prompt
        how: dict[str, Any] = {"partial_credit": partial_credit, "unprotected": unprotected}
        limits = Limits(seconds=float(seconds), memory_mb=memory_mb)
        self._reward = CodeReward(limits=limits, packages=packages.split(), **how)

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Reward 1.0 if all tests pass, or with `partial_credit` the share of passed tests."""
        return [self._reward]

    def train_rows(self, seed: int) -> list[Row]:
        """The problems that are not held out, shuffled with the seed."""
        rows = super().train_rows(seed)
        random.Random(seed).shuffle(rows)
        return rows

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the program passes all tests."""
        (result,) = self._reward.results([text], tests=[row["tests"]])
        return result is not None and result.score == 1.0

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the completion may hold code."""
        return "def " in text or "```" in text or "print(" in text

    def read(self, source: Any, split: str) -> list[Row]:
        """The problems of a file; without a file, the tiny functions."""
        if source is None:
            return _rows(make_problems(), "functions")
        return _rows(load_rows(source, split=split), str(source))


def _rows(entries: list[Row], where: str) -> list[Row]:
    rows = []
    for number, entry in enumerate(entries, 1):
        try:
            question, tests = read_problem(entry)
            read_tests(tests)
        except (ValueError, SyntaxError, RewardError) as error:
            raise DataError(f"{where}: problem {number}: {error}; correct or remove it") from None
        uid = str(entry.get("task_id", entry.get("uid", number)))
        row = {"prompt": as_prompt(question), "question": question, "tests": tests, "uid": f"code-{uid}"}
        if "family" in entry:
            row |= {"family": entry["family"], "kind": entry["family"]}
        rows.append(row)
    return rows


def read_problem(entry: Mapping[str, Any]) -> tuple[str, Any]:
    """A problem of any of the formats as (question, tests).

    Raises `ValueError`: it has none of them; `RewardError`: humanEval's test code defines no `check`.
    """
    if isinstance(entry.get("test"), str) and isinstance(entry.get("entry_point"), str):
        return _humaneval(entry)
    if isinstance(entry.get("test_list"), list) and isinstance(entry.get("code"), str):
        return _mbpp(entry)
    question = entry.get("prompt", entry.get("question"))
    if not isinstance(question, str) or entry.get("tests") is None:
        raise ValueError(
            f"columns {', '.join(entry)}: a problem has a prompt (text) and tests, or HumanEval's or MBPP's columns"
        )
    return question, entry["tests"]


def _humaneval(entry: Mapping[str, Any]) -> tuple[str, Any]:
    prompt, name = str(entry["prompt"]), entry["entry_point"]
    setup, tests, argument = split_check(entry["test"])
    # helpers that the prompt defines are trusted; the function itself is the program's
    body = ast.parse(prompt + "    pass\n").body
    helpers = [ast.unparse(node) for node in body if not (isinstance(node, ast.FunctionDef) and node.name == name)]
    imports = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    # a test that calls the function by its own name compares it with itself: there the name is the reference's
    itself = name in {node.id for node in ast.walk(ast.parse(entry["test"])) if isinstance(node, ast.Name)}
    reference = [prompt + str(entry["canonical_solution"])] if itself and "canonical_solution" in entry else []
    spec = {
        "kind": "assert",
        "tests": list(tests),
        "setup": "\n".join([*helpers, *reference, setup]),
        "aliases": {argument: name},
        # a program that repeats only the function still needs the prompt's imports and helpers
        "prefix": "\n".join([*imports, *(text for text in helpers if text not in imports)]) + "\n",
    }
    return f"Complete this Python function.\n```python\n{prompt.strip()}\n```", spec


def _mbpp(entry: Mapping[str, Any]) -> tuple[str, Any]:
    tests = [str(test) for test in entry["test_list"]]
    reference = ast.parse(entry["code"]).body
    imports = [ast.unparse(node) for node in reference if isinstance(node, ast.Import | ast.ImportFrom)]
    defined = {node.name for node in reference if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.id for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    spec = {
        "kind": "assert",
        "tests": tests,
        "setup": "\n".join([*map(str, entry.get("test_imports") or []), *imports]),
        "entry_points": sorted(defined & used),
    }
    question = str(entry.get("prompt", entry.get("text")))
    return f"{question}\nYour code should pass this test:\n{tests[0]}", spec

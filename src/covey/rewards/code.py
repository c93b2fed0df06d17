r"""A reward for programs that pass their tests, with the tests in a dataset column as plain data.

    {"kind": "call", "entry_point": "add", "cases": [[[1, 2], 3], [[0, 0], 0]]}
    {"kind": "assert", "tests": ["assert add(1, 2) == 3"], "setup": "import math", "entry_points": ["add"]}
    {"kind": "program", "cases": [["1 2\n", "3\n"]]}

A list of texts is short for the second, with nothing but `tests`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from covey.errors import RewardError
from covey.rewards.extract import completion_text
from covey.rewards.jail import JailError, harness, sandbox
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests, TestResult, Tests, tester_order
from covey.rewards.jail.sandbox import Limits
from covey.rewards.text import column_of, say
from covey.types import Message

P = ParamSpec("P")
T = TypeVar("T")


def _translated(call: Callable[P, T]) -> Callable[P, T]:
    @wraps(call)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except JailError as error:
            raise RewardError(str(error), function="TestHarness") from None

    return translated


class Sandbox(sandbox.Sandbox):
    """`covey.rewards.jail.sandbox.Sandbox`, whose errors are a `RewardError`."""

    __init__ = _translated(sandbox.Sandbox.__init__)
    spawn = _translated(sandbox.Sandbox.spawn)


class TestHarness(harness.TestHarness):
    """`covey.rewards.jail.harness.TestHarness`, whose errors are a `RewardError`."""

    __init__ = _translated(harness.TestHarness.__init__)
    run = _translated(harness.TestHarness.run)


split_check = _translated(harness.split_check)
_KINDS = ("call", "assert", "program")
_REMEMBERED = 4096


class CodeReward:
    """Reward 1.0 if the program in a completion passes all tests of its row, else 0.0.

    Args:
        column: dataset column with the tests; a row without tests is not scored (None).
        partial_credit: reward the share of passed tests instead.
        limits: of each program.
        workers: number of programs at the same time; None = the machine's cores.
        unprotected: run even if the host offers too little protection; see `covey.rewards.jail`.
        packages: installed distributions that programs may import, such as "numpy".
    """

    __name__ = "passes_tests"

    def __init__(
        self,
        column: str = "tests",
        *,
        partial_credit: bool = False,
        limits: Limits | None = None,
        workers: int | None = None,
        unprotected: bool = False,
        packages: Sequence[str] = (),
    ) -> None:
        self.required_columns = (column,)
        self._column, self._partial = column, partial_credit
        self._start = partial(TestHarness, limits, workers=workers, unprotected=unprotected, packages=packages)
        self._harness: TestHarness | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], TestResult] = OrderedDict()

    @property
    def harness(self) -> TestHarness:
        """What runs the programs, started when first needed; `RewardError`: the host has too few protections."""
        with self._lock:
            if self._harness is None:
                self._harness = self._start()
            return self._harness

    def __call__(self, completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        """Score as a reward function does; `RewardError` names the `sample`: no column, or its tests are none."""
        results = self.results(completions, **columns)
        say(columns, self.__name__, results)
        return [None if result is None else self.score(result) for result in results]

    def results(self, completions: Sequence[str | list[Message]], **columns: Any) -> list[TestResult | None]:
        """The test results of each completion; recent results are reused for equal texts."""
        specs = column_of(columns, self._column, "programs are tested by", function=self.__name__)
        jobs: dict[tuple[str, str], tuple[str, Tests]] = {}
        keys: list[tuple[str, str] | None] = []
        for index, (completion, spec) in enumerate(zip(completions, specs, strict=True)):
            keys.append(None)
            if spec is not None:
                text = completion_text(completion)
                keys[-1] = key = (text, repr(spec))
                if key not in self._known and key not in jobs:
                    try:
                        jobs[key] = (text, read_tests(spec))
                    except ValueError as error:
                        raise RewardError(str(error), function=self.__name__, sample=index) from None
        found = dict(zip(jobs, self.harness.run_all(list(jobs.values())), strict=True)) if jobs else {}
        with self._lock:
            results = [None if key is None else found.get(key) or self._known[key] for key in keys]
            # a busy machine may have been too slow; the next run of the same text may not be
            self._known |= {key: result for key, result in found.items() if result.status != "timeout"}
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return results

    def score(self, result: TestResult) -> float:
        """The reward for a result: 1.0 or 0.0, or with `partial_credit` the share of passed tests."""
        return result.fraction if self._partial else result.score

    def close(self) -> None:
        """End the sandbox; the next call starts it again."""
        with self._lock:
            if self._harness is not None:
                self._harness.close()
                self._harness = None


def read_tests(spec: Any) -> Tests:
    """Tests from plain data; see the module docstring. Raises `ValueError`: it does not have that form."""
    if isinstance(spec, list | tuple):
        spec = {"kind": "assert", "tests": spec}
    if not isinstance(spec, Mapping) or spec.get("kind") not in _KINDS:
        raise ValueError(
            f"tests={spec!r:.200} is neither a list of assert statements nor an object with a kind of {_KINDS}"
        )
    values = dict(spec)
    kind = values.pop("kind")
    try:
        if kind == "call":
            cases = tuple((tuple(arguments), expected) for arguments, expected in values.pop("cases"))
            tests: Tests = CallTests(cases=cases, **values)
        elif kind == "assert":
            texts = {name: _texts(name, values.pop(name)) for name in ("tests", "entry_points") if name in values}
            tests = AssertTests(**texts, **values)  # type: ignore[arg-type]
            tester_order(tests)  # so that names which a program could supply are refused here
        else:
            pairs = tuple((str(given), str(wanted)) for given, wanted in values.pop("cases"))
            tests = ProgramTests(cases=pairs, **values)
    except (TypeError, KeyError, ValueError, JailError) as error:
        raise ValueError(f"tests={spec!r:.200}: {error}") from None
    if not (tests.tests if isinstance(tests, AssertTests) else tests.cases):
        raise ValueError(f"tests={spec!r:.200}: there is no test, so every program would pass")
    return tests


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of texts")
    return tuple(values)

r"""Test the program in a completion. Hostile programs are expected; see `sandbox`.

    harness = TestHarness()
    tests = AssertTests(("assert add(1, 2) == 3", "assert add(0, 0) == 0"))
    harness.run("```python\ndef add(a, b):\n    return a + b\n```", tests).score          # 1.0

Tests and expected results never enter the process that runs the program. Its results cross as plain values. They are
compared in the harness (`CallTests`, `ProgramTests`) or in a second confined process that runs the test code
(`AssertTests`). So a program cannot pass by patching `assert`, `==` or `unittest`, by leaving early, by printing or
forging a message of success, or by reading memory, files or the stack.

A program that attacks the tests scores 0, and the other programs are still scored. A value much longer than the
expected one is wrong and is not read.
"""

from __future__ import annotations

import ast
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

from . import JailEndedError, JailError, ProcessEndedError, messages
from .programs import extract_code, free_names, same_output, same_value
from .sandbox import Confined, Limits, Sandbox, parse_message

Status = Literal["passed", "wrong_answer", "error", "timeout", "memory", "syntax", "cheat"]
_REASONS: Mapping[str, Status] = {"timeout": "timeout", "forbidden": "cheat", "protocol": "cheat"}
_LONGEST_PROGRAM = 500_000
_MOST_OF_ANSWER = 16 << 10
_TIMES_EXPECTED = 8
"""A right answer's text is at most this many times as long as the expected one: 1.0000001 for 1."""
_WRONG = (b'{"value": null}', b'{"value": "\\u0000 a text that no test expects"}')
_NO_TEST = "none of these is a test: whatever a program's functions return, it passes them all"
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class CallTests:
    """Call a function and compare what it returns.

    Attributes:
        entry_point: the function's name.
        cases: `(arguments, expected)` pairs.
        tolerance: relative and absolute, between floats. Lists and tuples of equal items are equal.
    """

    entry_point: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]
    tolerance: float = 1e-6


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Run test code, such as the assert statements of MBPP or the `check` function of HumanEval.

    Attributes:
        tests: statements; each counts as one test.
        setup: trusted code that runs first, in the process of the tests: imports, helper functions.
        entry_points: names that the program defines, also if a builtin has the same name. Without `entry_points` and
            `aliases` these are all names that the tests do not define, except modules of the standard library.
        aliases: more names for what the program defines, e.g. `{"candidate": "add"}`.
        prefix: text put before the program, e.g. HumanEval's prompt.
    """

    tests: tuple[str, ...]
    setup: str = ""
    entry_points: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Run the program on inputs and compare its output line by line; white space at the end of lines is ignored.

    Attributes:
        cases: `(stdin, expected stdout)` pairs.
        tolerance: allowed difference between numbers; 0 = the texts must be equal.
    """

    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0


Tests = CallTests | AssertTests | ProgramTests


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one test, with an explanation ("" if it passed). `counts` is False for a test that a program
    passes by always returning None; such a test does not count.
    """

    status: Status
    text: str = ""
    counts: bool = True


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of each test of one completion, in order, and the beginning of the program's output."""

    __test__: ClassVar[bool] = False

    outcomes: tuple[Outcome, ...]
    printed: str = ""

    @property
    def status(self) -> Status:
        """The status of the first test that did not pass, else "passed"."""
        return next((o.status for o in self.outcomes if o.status != "passed"), "passed")

    @property
    def passed(self) -> int:
        """The number of passed tests."""
        return sum(outcome.status == "passed" for outcome in self.outcomes)

    @property
    def score(self) -> float:
        """1.0 if every test passed, else 0.0; see `fraction`."""
        return float(bool(self.outcomes) and self.passed == len(self.outcomes))

    @property
    def fraction(self) -> float:
        """The share of passed tests, without those that do not count; 0 for a program that tried to cheat."""
        cheated = any(outcome.status == "cheat" for outcome in self.outcomes)
        earned = sum(outcome.status == "passed" and outcome.counts for outcome in self.outcomes)
        failed = len(self.outcomes) - self.passed
        return self.score if cheated or not failed else earned / (earned + failed)

    def __str__(self) -> str:
        failed = [f"test {i + 1}: {o.status}: {o.text}" for i, o in enumerate(self.outcomes) if o.status != "passed"]
        return f"{self.passed} of {len(self.outcomes)} tests passed" + "".join(f"; {line}" for line in failed[:3])


class TestHarness:
    """Runs programs against tests, several at once.

    Raises `JailError`: the host does not offer the minimum of protections, or a package is not installed.

    Args:
        limits: of each program with all its tests; with `ProgramTests`, of each case. After a case that took too long,
            the next ones are not run.
        workers: number of programs at the same time; None = the machine's cores.
        unprotected: see `Sandbox`.
        packages: packages that programs may import; see `Sandbox`.
    """

    __test__: ClassVar[bool] = False  # its name begins as those that pytest collects

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        workers: int | None = None,
        unprotected: bool = False,
        packages: Sequence[str] = (),
    ) -> None:
        self._limits = limits or Limits()
        self._start = partial(Sandbox, unprotected=unprotected, packages=packages)
        self._sandbox = self._start()
        self._lock = threading.Lock()
        self._idle: dict[str, list[bool]] = {}
        self._pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="covey-harness")

    @property
    def protections(self) -> str:
        """The protections on this host, in words."""
        return str(self._sandbox.protections)

    def run(self, completion: str, tests: Tests) -> TestResult:
        """Extract the program from a completion and test it.

        Raises `JailError`: the tests themselves are broken, or the sandbox does not run.
        """
        code = extract_code(completion)
        count = len(tests.tests if isinstance(tests, AssertTests) else tests.cases)
        if len(code) > _LONGEST_PROGRAM:
            return TestResult((Outcome("error", f"a program of {len(code)} characters"),) * count)
        ended = ""
        for _ in range(2):  # the jail may be killed from outside; a program in whose time it ends twice is worth 0
            sandbox = self._sandbox
            try:
                return self._run(sandbox, code, tests)
            except JailEndedError as error:
                ended = str(error)
                self._replace(sandbox)
        return TestResult((Outcome("error", ended),) * count)

    def run_all(self, jobs: Sequence[tuple[str, Tests]]) -> list[TestResult]:
        """`run` for each (completion, tests), in order."""
        return list(self._pool.map(lambda job: self.run(*job), jobs))

    def close(self) -> None:
        """End the sandbox and all its processes."""
        self._pool.shutdown(cancel_futures=True)
        self._sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _replace(self, ended: Sandbox) -> None:
        """Start the jail anew, unless another thread has done so."""
        with self._lock:
            if self._sandbox is ended:
                ended.close()
                self._sandbox = self._start()

    def _run(self, sandbox: Sandbox, code: str, tests: Tests) -> TestResult:
        match tests:
            case CallTests():
                return self._run_calls(sandbox, code, tests)
            case AssertTests():
                return self._run_asserts(sandbox, code, tests)
            case ProgramTests():
                return self._run_program(sandbox, code, tests)

    def _run_calls(self, sandbox: Sandbox, code: str, tests: CallTests) -> TestResult:
        requests = [(_call(tests.entry_point, arguments), expected) for arguments, expected in tests.cases]
        with sandbox.spawn(self._limits) as process:
            outcomes: list[Outcome] = []
            try:
                failed = _load(process, code)
                for request, expected in requests if failed is None else ():
                    process.send_bytes(request)
                    outcomes.append(_judge(process.receive_bytes(), expected, tests.tolerance))
            except ProcessEndedError as ended:
                failed = _outcome(ended)
            idle = [expected is None for _, expected in tests.cases]
            return TestResult(_weighed(_filled(outcomes, len(tests.cases), failed), idle), process.printed)

    def _run_asserts(self, sandbox: Sandbox, code: str, tests: AssertTests) -> TestResult:
        order = tester_order(tests)
        with ExitStack() as stack:
            candidate = stack.enter_context(sandbox.spawn(self._limits))
            outcomes: list[Outcome] = []
            try:
                failed = _load(candidate, tests.prefix + code)
                if failed is None:
                    tester = stack.enter_context(sandbox.spawn(self._limits))
                    failed = _relay(tester, candidate, order, outcomes)
            except ProcessEndedError as ended:
                failed = _outcome(ended)
            found, printed = _filled(outcomes, len(tests.tests), failed), candidate.printed
        if any(outcome.status == "passed" for outcome in found):
            idle = self._passed_by_wrong(sandbox, order)
            found = (Outcome("error", _NO_TEST),) * len(found) if all(idle) else _weighed(found, idle)
        return TestResult(found, printed)

    def _passed_by_wrong(self, sandbox: Sandbox, order: dict[str, Any]) -> list[bool]:
        """Which tests None for every call passes, or, where that may be right since all pass, another wrong answer."""
        if (key := repr(order)) in self._idle:
            return self._idle[key]
        for answer in _WRONG:
            outcomes: list[Outcome] = []
            with sandbox.spawn(self._limits) as tester, suppress(ProcessEndedError):
                _relay(tester, answer, order, outcomes)
            passed = [o.status == "passed" for o in _filled(outcomes, len(order["tests"]), None)]
            if not all(passed):
                break
        if len(outcomes) == len(passed):  # else the machine may have been too busy
            if len(self._idle) >= _REMEMBERED:
                self._idle.clear()
            self._idle[key] = passed
        return passed

    def _run_program(self, sandbox: Sandbox, code: str, tests: ProgramTests) -> TestResult:
        outcomes: list[Outcome] = []
        failed, printed = None, ""
        for stdin, expected in tests.cases:
            with sandbox.spawn(self._limits) as process:
                try:
                    process.send({"role": "program", "code": code, "stdin": stdin})
                    answer = process.receive()
                    failed = _failure(answer)
                    if failed is None and answer.get("exit") != 0:
                        failed = Outcome("error", f"exit code {messages.shown(answer.get('exit'))[:20]}")
                except ValueError as error:
                    raise JailError(f"a program and its standard input are {error}") from None
                except ProcessEndedError as ended:
                    # leaving by os._exit(0) is the program's right: what it printed counts
                    failed = None if ended.reason == "exit" and process.stop() == (0, 0) else _outcome(ended)
                output = process.all_printed.decode("utf-8", "replace")
                printed = printed or process.printed
            if failed is None and not same_output(output, expected, tests.tolerance):
                failed = Outcome("wrong_answer", f"printed {output[:200]!r:.200}, not {expected[:200]!r:.200}")
            outcomes.append(failed or Outcome("passed"))
            if failed is not None and failed.status == "timeout":
                break
        idle = [not expected.strip() for _, expected in tests.cases]
        return TestResult(_weighed(_filled(outcomes, len(tests.cases), failed), idle), printed)


def tester_order(tests: AssertTests) -> dict[str, Any]:
    """The message to the process of the tests, which also says which names the program defines.

    Raises `JailError`: the tests are not Python, or use a name that a program could redefine to cheat.
    """
    named = {name: name for name in tests.entry_points} | dict(tests.aliases)
    free, modules, own = free_names(tests.setup, tests.tests, tuple(named))
    remote = named or {name: name for name in own}
    names = {"remote": remote, "named": list(named), "modules": modules, "used": free}
    return {"role": "tester", "setup": tests.setup, "tests": list(tests.tests)} | names


def split_check(source: str, function: str = "check") -> tuple[str, tuple[str, ...], str]:
    """HumanEval's test module as `(setup, tests, argument)`: each statement of the function's body is a test.

    Raises `JailError`: there is no such function of one argument.
    """
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function and len(node.args.args) == 1:
            setup = "\n".join(ast.unparse(other) for other in tree.body if other is not node)
            return setup, tuple(ast.unparse(statement) for statement in node.body), node.args.args[0].arg
    raise JailError(f"the test code defines no {function}(candidate)")


def _call(name: str, arguments: Sequence[Any]) -> bytes:
    try:
        tree = messages.Encoder(_no_handle)((list(arguments), {}))
    except messages.CodecError as error:
        raise JailError(f"the arguments of a call are {error}") from None
    request = json.dumps({"name": name, "arguments": tree, "changed": False}).encode("utf-8", "surrogatepass")
    if len(request) > messages.MAX_BYTES:
        raise JailError(f"the arguments of a call are {len(request)} bytes, at most {messages.MAX_BYTES} are passed on")
    return request


def _load(process: Confined, code: str) -> Outcome | None:
    process.send({"role": "candidate", "code": code})
    return _failure(process.receive())


def _relay(
    tester: Confined, candidate: Confined | bytes, order: dict[str, Any], outcomes: list[Outcome]
) -> Outcome | None:
    """Pass the tests' calls to the candidate and its answers, or one answer, back, until the tests are done."""
    try:
        tester.send(order)
    except ValueError as error:
        raise JailError(f"the test code is {error}") from None
    ready = False
    while True:
        try:
            message = tester.receive_bytes()
        except ProcessEndedError as ended:
            if ready or ended.reason != "exit":  # what a program answered may be too much for the tester
                raise
            raise JailError(f"the test code does not run: {tester.printed[-300:] or ended}") from None
        kind, body = message[:1], message[1:]
        if kind == b"C":
            if isinstance(candidate, Confined):
                candidate.send_bytes(body)
            tester.send_bytes(candidate.receive_bytes() if isinstance(candidate, Confined) else candidate)
        elif kind == b"R":
            result = parse_message(body)
            outcomes.append(Outcome(result["result"], _clean(result["text"])))
        elif kind == b"D":
            return None
        ready = True


def _failure(answer: Mapping[str, Any]) -> Outcome | None:
    """What a confined process says went wrong."""
    status = answer.get("failed")
    known: Status = status if status in ("syntax", "memory") else "error"
    return None if status is None else Outcome(known, _clean(str(answer.get("text"))[:500]))


def _clean(text: str) -> str:
    """Text that any file can hold: a program can name half of a character."""
    return text.encode("utf-8", "replace").decode()


def _judge(body: bytes, expected: Any, tolerance: float) -> Outcome:
    try:
        length = len(json.dumps(messages.Encoder(lambda value: 0, materialise=False)(expected)))
    except messages.CodecError as error:
        raise JailError(f"an expected result is {error}") from None
    if len(body) > _MOST_OF_ANSWER + _TIMES_EXPECTED * length:
        return Outcome("wrong_answer", f"returned {len(body)} bytes, the expected value has {length}")
    answer = parse_message(body)
    if (failed := _failure(answer)) is not None:
        return failed
    try:
        found = messages.Decoder(lambda number: _Handle())(answer.get("value"))
        if isinstance(found, type(iter([]))):
            found = list(found)
        if same_value(found, expected, tolerance):
            return Outcome("passed")
    except Exception as error:  # whatever a value does that nobody vouches for, it is not the expected one
        return Outcome("wrong_answer", _clean(f"returned what cannot be compared: {error}"[:500]))
    return Outcome("wrong_answer", _clean(f"returned {messages.shown(found)}, not {messages.shown(expected)}"))


def _outcome(ended: ProcessEndedError) -> Outcome:
    return Outcome(_REASONS.get(ended.reason, "error"), str(ended))


def _filled(outcomes: list[Outcome], count: int, failed: Outcome | None) -> tuple[Outcome, ...]:
    """All outcomes: where the process ended early, the tests that are left failed as it did."""
    return (*outcomes, *([failed or Outcome("error", "not run")] * (count - len(outcomes))))


def _weighed(outcomes: tuple[Outcome, ...], idle: Sequence[bool]) -> tuple[Outcome, ...]:
    """The outcomes, where those of tests that an idle program passes do not count."""
    return tuple(replace(outcome, counts=not passes) for outcome, passes in zip(outcomes, idle, strict=True))


class _Handle:
    """Something that stayed in the jail; equal to nothing."""

    def __repr__(self) -> str:
        return "an object that is not a plain value"


def _no_handle(value: Any) -> int:
    raise JailError(f"an argument of type {type(value).__name__} is not a plain value")

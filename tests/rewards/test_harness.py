"""Honest programs: what passes, what fails and how it is told."""

from __future__ import annotations

import collections
import itertools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import RewardError
from covey.rewards.code import TestHarness, split_check
from covey.rewards.jail import messages
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests
from covey.rewards.jail.programs import extract_code, same_output, same_value
from covey.rewards.jail.sandbox import Limits
from jails import missing

ADD = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def harness() -> Iterator[TestHarness]:
    if missing():
        pytest.skip(missing())
    with TestHarness(Limits(seconds=3.0), workers=2) as harness:
        yield harness


# ---------------------------------------------------------------- calls


def test_calls_are_compared(harness: TestHarness) -> None:
    tests = CallTests("add", (((1, 2), 3), (("a", "b"), "ab"), (([1], [2]), [1, 2]), ((0.1, 0.2), 0.3)))
    assert harness.run(ADD, tests).score == 1.0
    wrong = harness.run("def add(a, b):\n    return a - b if a == 1 else a + b", tests)
    assert (wrong.score, wrong.fraction, wrong.passed) == (0.0, 0.75, 3)
    assert str(wrong) == "3 of 4 tests passed; test 1: wrong_answer: returned -1, not 3"


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("def add(a, b):\n    retrun a", "syntax", "line 2"),
        ("def add(a, b):\n    return a / 0", "error", "ZeroDivisionError: division by zero (line 2)"),
        ("def plus(a, b):\n    return a", "error", "name 'add' is not defined"),
        ("import nothing_of_this_name", "error", "ModuleNotFoundError"),
        ("def add(a):\n    return a", "error", "TypeError"),
        ("def add(a, b):\n    return object()", "wrong_answer", "an object that is no plain value, not 3"),
        ("def add(a, b):\n    return add", "wrong_answer", "no plain value"),
        ("", "error", "not defined"),
    ],
)
def test_it_is_told_how_a_test_failed(harness: TestHarness, code: str, status: str, text: str) -> None:
    result = harness.run(code, CallTests("add", (((1, 2), 3),)))
    assert result.status == status
    assert text in result.outcomes[0].text


def test_a_test_that_never_returns_fails_the_ones_after_it(harness: TestHarness) -> None:
    code = "def add(a, b):\n    while a: pass\n    return b"
    result = harness.run(code, CallTests("add", (((0, 1), 1), ((1, 2), 3), ((0, 5), 5))))
    assert [outcome.status for outcome in result.outcomes] == ["passed", "timeout", "timeout"]
    assert result.fraction == pytest.approx(1 / 3)


def test_what_is_printed_is_kept(harness: TestHarness) -> None:
    result = harness.run("print('hello')\n" + ADD, CallTests("add", (((1, 2), 3),)))
    assert result.score == 1.0
    assert result.printed == "hello\n"


def test_results_come_in_order(harness: TestHarness) -> None:
    jobs = [(f"def f(): return {i % 3}", CallTests("f", (((), 0),))) for i in range(9)]
    assert [result.score for result in harness.run_all(jobs)] == [1.0, 0.0, 0.0] * 3


# ---------------------------------------------------------------- assert statements


def test_assert_statements(harness: TestHarness) -> None:
    tests = AssertTests(
        (
            "assert add(1, 2) == 3",
            "assert math.isclose(add(0.1, 0.2), 0.3)",
            "assert not add(0, 0)",
            "assert set(add([1], [2])) == {1, 2}, 'as a set'",
            "for i in range(3):\n    assert add(i, i) == 2 * i",
        ),
        setup="import math",
    )
    assert harness.run(ADD, tests).score == 1.0
    result = harness.run("def add(a, b):\n    return b", tests)
    assert [outcome.status for outcome in result.outcomes] == ["wrong_answer"] * 2 + ["passed"] + ["wrong_answer"] * 2
    assert result.outcomes[0].text == "add(1, 2) gave 2, not 3"
    assert result.outcomes[3].text == "as a set"


def test_objects_of_the_program_can_be_used_in_tests(harness: TestHarness) -> None:
    code = (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
        "    def total(self):\n        return self.a + self.b\n"
        "def best(pairs):\n    return max(pairs, key=Pair.total)"
    )
    tests = AssertTests(("assert best([Pair(1, 2), Pair(5, 1)]).total() == 6", "assert Pair(3, 4).a == 3"))
    assert harness.run(code, tests).score == 1.0


def test_arguments_that_are_changed_in_place(harness: TestHarness) -> None:
    tests = AssertTests(("x = [3, 1, 2]\nassert order(x) is None\nassert x == [1, 2, 3]",))
    assert harness.run("def order(x): x.sort()", tests).score == 1.0
    assert harness.run("def order(x): sorted(x)", tests).status == "wrong_answer"


def test_exceptions_reach_the_test(harness: TestHarness) -> None:
    tests = AssertTests(
        ("try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)",)
    )
    assert harness.run("def f(x):\n    raise ValueError('negative')", tests).score == 1.0
    assert harness.run("def f(x):\n    raise KeyError('negative')", tests).status == "error"
    # an AssertionError of the program is no failed comparison, and none that a test catches either
    assert harness.run("def f(x):\n    raise AssertionError", tests).status == "error"


def test_a_program_cannot_replace_what_tests_use(harness: TestHarness) -> None:
    code = "def close(a, b): return True\ndef abs(x): return 0\ndef f(x): return 7"
    tests = AssertTests(
        ("assert close(f(1), 1)", "assert abs(f(1) - 1) < 1e-6"), setup="def close(a, b):\n    return a == b"
    )
    assert harness.run(code, tests).passed == 0
    # a builtin's name counts as the program's where the tests say so
    named = AssertTests(("assert sum(2, 3) == 5",), entry_points=("sum",))
    assert harness.run("def sum(a, b): return a + b", named).score == 1.0


MATH = "class math:\n    @staticmethod\n    def isclose(*a, **k): return True\n"


@pytest.mark.parametrize("named", [(), ("f",)])
@pytest.mark.parametrize(
    ("code", "test", "setup"),
    [
        (MATH, "assert math.isclose(f(2), 1.5)", ""),
        (MATH, "assert near(f(2), 1.5)", "def near(a, b): return math.isclose(a, b)"),
        ("import sys\nsys.modules['math'] = None\n" + MATH, "import math\nassert math.isclose(f(2), 1.5)", ""),
        ("_compare_ = print\n", "assert f(2) == 1.5", ""),
        ("abs = round = lambda *a: 0\nimport builtins\nbuiltins.abs = abs\n", "assert abs(f(2) - 1.5) < 1e-6", ""),
    ],
)
def test_helpers_of_tests_are_not_the_programs(
    harness: TestHarness, named: tuple[str, ...], code: str, test: str, setup: str
) -> None:
    """The standard library's modules are, whether imported or not; and a right program passes."""
    tests = AssertTests((test,), setup=setup, entry_points=named)
    assert harness.run(code + "def f(x): return 0", tests).score == 0.0
    assert harness.run("def f(x): return x - 0.5", tests).score == 1.0


@pytest.mark.parametrize(
    ("test", "unknown"),
    [
        ("assert Counter(f('aa')) == Counter('aa')", "Counter"),
        ("assert isclose(f(2), 1.5)", "isclose"),
        ("assert np.allclose(f(2), 1.5)", "np"),
        ("assert f(2) == approx(1.5)", "approx"),
    ],
)
def test_helpers_that_nobody_defines_are_refused(harness: TestHarness, test: str, unknown: str) -> None:
    for tests in (
        AssertTests((test,)),
        AssertTests((test,), entry_points=("f",)),
        AssertTests((test,), aliases={"f": "g"}),
    ):
        with pytest.raises(RewardError, match=f"the tests use {unknown}, .*import or define it in setup, or name it"):
            harness.run("def f(x): return 0", tests)
    own = AssertTests((test,), entry_points=("f", unknown))
    assert harness.run(f"{unknown} = None\ndef f(x): return 0", own).status == "error"
    with pytest.raises(RewardError, match="the tests use close"):
        harness.run(ADD, AssertTests(("assert close(add(1, 2), 3)",), entry_points=("add",)))
    for test in (  # and without entry points
        "assert close(add(1, 2), 3)",
        "assert not differ(1, add(1, 2)), 'far'",
        "assert close(add(1, 2), 3) is True",
        "assert close(add(1, 2), 3) and add(1, 1) == 2",
        "assert all(close(add(n, 2), n + 2) for n in range(3))",
        "assert any([close(add(1, 2), 3)])",
        "if not close(add(1, 2), 3):\n    raise ValueError",
        "assert close(add(1, 2), 3) < 1e-6",
    ):
        with pytest.raises(RewardError, match=r"the tests use (close|differ)"):
            harness.run(ADD, AssertTests((test,)))
    tests = AssertTests(("assert isclose(add(1, 2), 3)",), setup="from collections import *")
    with pytest.raises(RewardError, match="the tests use isclose"):
        harness.run("def isclose(*a): return True\n" + ADD, tests)
    with pytest.raises(RewardError, match="the tests use close"):  # seen when the star is imported
        harness.run(
            ADD, AssertTests(("assert close(add(1, 2), 3)",), setup="from math import *", entry_points=("add",))
        )


def test_what_is_tested_by_itself_is_the_programs(harness: TestHarness) -> None:
    code = (
        "def compress(s): return s[::2]\ndef expand(s): return ''.join(c + c for c in s)\n"
        "def is_even(n): return n % 2 == 0\ndef double(n): return 2 * n"
    )
    tests = (
        "assert expand(compress('aabb')) == 'aabb'",
        "assert compress('aabb') == 'ab'",
        "assert is_even(double(3))",
        "assert not is_even(3)",
    )
    assert harness.run(code, AssertTests(tests)).score == 1.0
    stars = AssertTests(("assert isclose(double(1), 2)",), setup="from math import *")
    assert harness.run(code, stars).score == 1.0
    for more in ((), ("word = Counter('aa')",)):  # a statement that asserts nothing tests nothing
        with pytest.raises(RewardError, match="the tests use Counter"):
            harness.run(code, AssertTests((*more, "assert Counter(expand('a')) == Counter('aa')")))


def test_a_name_of_the_standard_library_can_be_the_programs(harness: TestHarness) -> None:
    gcd = "def gcd(a, b):\n    return gcd(b, a % b) if b else a"
    assert harness.run(gcd, AssertTests(("assert gcd(4, 6) == 2", "assert gcd(9, 6) == 3"))).score == 1.0
    counter = "class Counter:\n    def __init__(self): self.n = 7"
    assert harness.run(counter, AssertTests(("assert Counter().n == 7",))).score == 1.0


@pytest.mark.parametrize(
    ("tests", "fraction"),
    [
        (("assert True", "assert f(1) == 2"), 0.0),
        (("import math", "x = math.pi", "x = f(x)", "assert f(1) == 2"), 0.0),
        (("for x in []:\n    assert f(x) == 1", "assert f(2) == 3"), 0.0),
        (("try:\n    assert f(1) == 2\nexcept Exception: pass", "assert f(2) == 3"), 0.0),
        (("assert f(1) != 2", "assert not f(1)", "assert f(1) == f(2)", "assert f(2) == 3"), 0.0),
        (("assert f(1) is None", "assert f(2) == 3"), 0.0),  # right, and nothing that one must do something for
        (("assert f(1) is None", "assert f(2) is None"), 1.0),  # but where it is right everywhere
        (("assert True", "f(1)"), 0.0),
    ],
)
def test_what_a_program_that_does_nothing_passes_earns_nothing(
    harness: TestHarness, tests: tuple[str, ...], fraction: float
) -> None:
    result = harness.run("def f(x): pass", AssertTests(tests))
    assert (result.fraction, result.score) == (fraction, fraction)


def test_tests_that_any_program_passes_are_not_in_the_share(harness: TestHarness) -> None:
    tests = AssertTests(("assert True", "import math", "assert f(0) is None", "assert f(1) == 1", "assert f(2) == 3"))
    right = "def f(x): return {0: None, 1: 1, 2: 3}[x]"
    half = harness.run(right.replace("3}", "2}"), tests)
    assert (half.passed, half.fraction) == (4, 0.5)  # of f(1) and f(2)
    assert harness.run(right.replace("None", "0").replace("3}", "2}"), tests).fraction == pytest.approx(1 / 3)
    assert harness.run(right, tests).fraction == 1.0
    nothing = harness.run("def f(x): return 7", AssertTests(("assert True", "f(1)")))
    assert nothing.score == 0.0
    assert "none of these is a test" in str(nothing)
    for others in (CallTests("f", (((1,), None), ((2,), 3))), ProgramTests((("1", ""), ("2", "3")))):
        assert harness.run("def f(x): pass", others).fraction == 0.0
        assert harness.run("f = lambda x: 3\nprint(3)", others).fraction == 0.5
    assert harness.run("def f(x): pass", CallTests("f", (((1,), None),))).fraction == 1.0


def test_humaneval_style(harness: TestHarness) -> None:
    body = "    assert candidate(1) == 2\n    x = LIMIT\n    assert candidate(x) == x + 1\n"
    source = "LIMIT = 3\n\ndef check(candidate):\n" + body
    setup, tests, argument = split_check(source)
    assert (setup, argument, len(tests)) == ("LIMIT = 3", "candidate", 3)
    spec = AssertTests(tests, setup=setup, aliases={argument: "inc"}, prefix="def inc(x):\n")
    assert harness.run("    return x + 1", spec).score == 1.0
    spec = AssertTests(tests, setup=setup, aliases={argument: "inc"})
    assert harness.run("def inc(x):\n    return x + 1", spec).score == 1.0
    with pytest.raises(RewardError, match=r"defines no check\(candidate\)"):
        split_check("assert True")


def test_broken_tests_are_an_error_of_the_tests(harness: TestHarness) -> None:
    with pytest.raises(RewardError, match="test code does not run"):
        harness.run(ADD, AssertTests(("assert add(1, 2) == 3",), setup="import nothing_of_this_name"))


def test_what_the_setup_defines_is_not_the_programs(harness: TestHarness) -> None:
    """Names of a star import and of an asynchronous function are not seen by reading the setup."""
    cheat = "def f(x): return 0\ndef isclose(a, b): return True\ndef helper(*a): return True"
    star = AssertTests(("assert isclose(f(2), 1.4142, rel_tol=1e-3)",), setup="from math import *")
    assert harness.run(cheat, star).score == 0.0
    assert harness.run("def f(x): return x**0.5", star).score == 1.0
    later = AssertTests(("assert helper(3) is True",), setup="async def helper(x):\n    return 3")
    assert harness.run(cheat, later).score == 0.0


def test_classes_and_messages_of_the_program(harness: TestHarness) -> None:
    code = (
        "class S:\n    LIMIT = 3\n    @staticmethod\n    def add(a, b): return a + b\n"
        "    @classmethod\n    def of(cls, x):\n        s = cls()\n        s.x = x\n        return s\n"
        "def f(x): raise ValueError('bad %d' % x)"
    )
    tests = AssertTests(
        (
            "assert S.add(1, 2) == 3",
            "assert S.of(3).x == 3",
            "assert S.LIMIT == 3",
            "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'bad 1'",
        )
    )
    result = harness.run(code, tests)
    assert result.score == 1.0, result
    assert harness.run("def f(x): raise ValueError('bad')", AssertTests(("f(1)",))).outcomes[0].text == (
        "ValueError: bad (line 1)"
    )


def test_a_long_argument_and_a_short_result(harness: TestHarness) -> None:
    assert harness.run("def f(x): return sum(x)", CallTests("f", (((list(range(4000)),), 7998000),))).score == 1.0


def test_what_is_too_long(harness: TestHarness) -> None:
    """A completion's fault costs it the test, a test's fault is told."""
    long = "# " + "x" * 600_000
    assert harness.run(long, CallTests("f", (((1,), 1),))).outcomes[0].text == "a program of 600002 characters"
    with pytest.raises(RewardError, match="the arguments of a call are 90000"):
        harness.run(ADD, CallTests("add", ((("x" * 9_000_000, ""), ""),)))
    with pytest.raises(RewardError, match="a program and its standard input are a message of 90000"):
        harness.run(ADD, ProgramTests((("x" * 9_000_000, ""),)))


# ---------------------------------------------------------------- programs


def test_programs(harness: TestHarness) -> None:
    code = "import sys\nn = int(input())\nprint(sum(map(int, sys.stdin.read().split()[:n])))"
    tests = ProgramTests((("2\n3 4\n", "7"), ("1\n5", "5\n")))
    assert harness.run(code, tests).score == 1.0
    wrong = harness.run("print(input())", tests)
    assert wrong.outcomes[0].text == "printed '2\\n', not '7'"
    assert harness.run("import sys\nprint(7)\nsys.exit(1)", tests).outcomes[0].text == "exit code 1"
    assert harness.run("print(7); raise SystemExit", tests).outcomes[0].status == "passed"
    assert harness.run("import os\nos.write(1, b'7')\nos._exit(0)", tests).outcomes[0].status == "passed"
    assert harness.run("if __name__ == '__main__':\n    print(7)", tests).outcomes[0].status == "passed"
    assert harness.run("print(1 / 0)", tests).outcomes[0].status == "error"


def test_a_program_that_takes_too_long_is_not_run_on_what_follows() -> None:
    code = "n = int(input())\nwhile n: pass\nprint(n)"
    with TestHarness(Limits(seconds=0.5)) as own:
        began = time.monotonic()
        result = own.run(code, ProgramTests((("0", "0"), *[("1", "1")] * 20, ("0", "0"))))
    assert [outcome.status for outcome in result.outcomes] == ["passed"] + ["timeout"] * 21
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        ("a \nb\n\n", "a\nb", 0, True),
        ("a\nb", "a b", 0, False),
        ("0.30000001", "0.3", 1e-6, True),
        ("0.30000001", "0.3", 0, False),
        ("x 1.0", "y 1.0", 1e-6, False),
        ("1\n2", "1", 1e-6, False),
        ("", "", 0, True),
    ],
)
def test_same_output(found: str, expected: str, tolerance: float, same: bool) -> None:
    assert same_output(found, expected, tolerance) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ([1, [2.0000000001]], (1, (2.0,)), True),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), float("nan"), True),
        ("1", 1, False),
        ({1, 2}, {2, 1}, True),
        (None, 0, False),
        (1, 1.0, True),
        (math.inf, math.inf, True),
    ],
)
def test_same_value(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected, 1e-6) is same


# ---------------------------------------------------------------- extraction


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Sure!\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```text\nhello\n```\n```python\nx = 1\n```\n```\noutput\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),  # cut off at the length limit
        ("The function is\n\ndef f():\n    return 1\n", "def f():\n    return 1\n"),
        ("    return 1", "    return 1"),
        ("print('hello')\ndef f(): pass", "print('hello')\ndef f(): pass"),
        ("Here it is:\nfor i in range(3):\n    print(i)", "for i in range(3):\n    print(i)"),
        ("# add\nx = 1", "# add\nx = 1"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
    ],
)
def test_the_program_in_a_completion(text: str, code: str) -> None:
    assert extract_code(text) == code


# ---------------------------------------------------------------- values


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=4)
        | st.frozensets(st.integers() | st.text(), max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


def refuse(value: Any) -> int:
    raise AssertionError(value)


@given(PLAIN)
@settings(max_examples=200, deadline=None)
def test_plain_values_cross_unchanged(value: Any) -> None:
    crossed = messages.Decoder(refuse)(messages.Encoder(refuse)(value))
    assert crossed == value
    assert type(crossed) is type(value)


def test_other_values() -> None:
    encode, decode = messages.Encoder(lambda value: 7), messages.Decoder(lambda number: ("handle", number))
    assert decode(encode(object())) == ("handle", 7)
    assert list(decode(encode(iter([1, 2])))) == [1, 2]
    assert list(decode(encode({"a": 1}.keys()))) == ["a"]
    assert list(decode(encode(range(3)))) == [0, 1, 2]
    assert list(decode(encode(reversed([1, 2])))) == [2, 1]
    assert list(decode(encode(iter("ab")))) == ["a", "b"]
    assert list(decode(encode(itertools.accumulate([1, 2])))) == [1, 3]
    assert decode(encode(collections.Counter("aab"))) == {"a": 2, "b": 1}
    assert decode(encode(2**200)) == 2**200
    assert decode(encode(-(2**62))) == -(2**62)
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(set(range(50_000)))) == set(range(50_000))
    colliding = [n * sys.hash_info.modulus for n in range(2, 2000)]
    for tree in (
        {"x": []},
        {"d": [[[], 1]]},
        {"s": [[1]]},
        {"t": 3},
        {"i": "zz"},
        {"a": 1, "b": 2},
        {},
        encode(set(colliding)),
        encode(dict.fromkeys(colliding)),
    ):
        with pytest.raises(messages.CodecError):
            decode(tree)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for too_much in (deep, list(range(300_000)), (x for x in iter(int, 1))):
        with pytest.raises(messages.CodecError):
            encode(too_much)
    with pytest.raises(messages.CodecError):
        decode(deep)

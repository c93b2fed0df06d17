"""Honest programs: what passes, what fails and how it is told."""

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
from fakes import raises
from jails import missing

ADD = "def add(a, b):\n    return a + b"
MATH = "class math:\n    @staticmethod\n    def isclose(*a, **k): return True\n"
HELPERS = {
    "Counter": "assert Counter(f('aa')) == Counter('aa')",
    "isclose": "assert isclose(f(2), 1.5)",
    "np": "assert np.allclose(f(2), 1.5)",
    "approx": "assert f(2) == approx(1.5)",
}
EXTRACTED = {
    "Sure!\n```python\nx = 1\n```\nDone.": "x = 1\n",
    "```python\nx = 1\n```\nor\n```py\nx = 2\n```": "x = 2\n",
    "```\nx = 1\n```": "x = 1\n",
    "```text\nhello\n```\n```python\nx = 1\n```\n```\noutput\n```": "x = 1\n",
    "```python\nx = 1": "x = 1",  # cut off at the length limit
    "The function is\n\ndef f():\n    return 1\n": "def f():\n    return 1\n",
    "    return 1": "    return 1",
    "print('hello')\ndef f(): pass": "print('hello')\ndef f(): pass",
    "Here it is:\nfor i in range(3):\n    print(i)": "for i in range(3):\n    print(i)",
    "# add\nx = 1": "# add\nx = 1",
    "Read both.\na, b = map(int, input().split())\nprint(a + b)": "a, b = map(int, input().split())\nprint(a + b)",
    "Now, a = 3\nx = 1": "x = 1",
    "~~~python\nx = 1\n~~~": "x = 1\n",
}
KEYS = st.integers() | st.text()
SETS = st.frozensets(KEYS, max_size=4) | st.sets(KEYS, max_size=4)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | KEYS | st.binary() | st.complex_numbers(allow_nan=False),
    lambda some: st.lists(some, max_size=4) | st.tuples(some, some) | st.dictionaries(KEYS, some, max_size=4) | SETS,
    max_leaves=12,
)


@pytest.fixture(scope="module")
def harness() -> Iterator[TestHarness]:
    if missing():
        pytest.skip(missing())
    with TestHarness(Limits(seconds=3.0), workers=2) as harness:
        yield harness


def calls(name: str, *cases: tuple[tuple[Any, ...], Any]) -> CallTests:
    return CallTests(name, cases)


def asserts(*tests: str, **more: Any) -> AssertTests:
    return AssertTests(tests, **more)


def test_calls_are_compared(harness: TestHarness) -> None:
    tests = calls("add", ((1, 2), 3), (("a", "b"), "ab"), (([1], [2]), [1, 2]), ((0.1, 0.2), 0.3))
    assert harness.run(ADD, tests).score == 1.0
    wrong = harness.run("def add(a, b):\n    return a - b if a == 1 else a + b", tests)
    assert (wrong.score, wrong.fraction, wrong.passed) == (0.0, 0.75, 3)
    assert str(wrong) == "3 of 4 tests passed; test 1: wrong_answer: returned -1, not 3"
    assert harness.run("def f(x): return sum(x)", calls("f", ((list(range(4000)),), 7998000))).score == 1.0


def test_it_is_told_how_a_test_failed(harness: TestHarness) -> None:
    for code, status, text in (
        ("def add(a, b):\n    retrun a", "syntax", "line 2"),
        ("def add(a, b):\n    return a / 0", "error", "ZeroDivisionError: division by zero (line 2)"),
        ("def plus(a, b):\n    return a", "error", "name 'add' is not defined"),
        ("import nothing_of_this_name", "error", "ModuleNotFoundError"),
        ("def add(a):\n    return a", "error", "TypeError"),
        ("def add(a, b):\n    return object()", "wrong_answer", "an object that is not a plain value, not 3"),
        ("def add(a, b):\n    return add", "wrong_answer", "not a plain value"),
        ("", "error", "not defined"),
        ("# " + "x" * 600_000, "error", "a program of 600002 characters"),
    ):
        result = harness.run(code, calls("add", ((1, 2), 3)))
        assert (result.status, text in result.outcomes[0].text) == (status, True), result


def test_tests_that_are_broken_or_too_long_are_told(harness: TestHarness) -> None:
    with pytest.raises(RewardError, match="the arguments of a call are 90000"):
        harness.run(ADD, calls("add", (("x" * 9_000_000, ""), "")))
    with pytest.raises(RewardError, match="a program and its standard input are a message of 90000"):
        harness.run(ADD, ProgramTests((("x" * 9_000_000, ""),)))
    with pytest.raises(RewardError, match="test code does not run"):
        harness.run(ADD, asserts("assert add(1, 2) == 3", setup="import nothing_of_this_name"))


def test_a_test_that_never_returns_fails_the_ones_after_it(harness: TestHarness) -> None:
    code = "def add(a, b):\n    while a: pass\n    return b"
    result = harness.run(code, calls("add", ((0, 1), 1), ((1, 2), 3), ((0, 5), 5)))
    assert [outcome.status for outcome in result.outcomes] == ["passed", "timeout", "timeout"]
    assert result.fraction == pytest.approx(1 / 3)


def test_results_come_in_order_with_what_was_printed(harness: TestHarness) -> None:
    results = harness.run_all([(f"print('hello {i}')\ndef f(): return {i % 3}", calls("f", ((), 0))) for i in range(9)])
    assert [result.score for result in results] == [1.0, 0.0, 0.0] * 3
    assert [result.printed for result in results] == [f"hello {i}\n" for i in range(9)]


def test_assert_statements(harness: TestHarness) -> None:
    tests = asserts(
        "assert add(1, 2) == 3",
        "assert math.isclose(add(0.1, 0.2), 0.3)",
        "assert not add(0, 0)",
        "assert set(add([1], [2])) == {1, 2}, 'as a set'",
        "for i in range(3):\n    assert add(i, i) == 2 * i",
        setup="import math",
    )
    assert harness.run(ADD, tests).score == 1.0
    result = harness.run("def add(a, b):\n    return b", tests)
    assert [outcome.status for outcome in result.outcomes] == ["wrong_answer"] * 2 + ["passed"] + ["wrong_answer"] * 2
    assert (result.outcomes[0].text, result.outcomes[3].text) == ("add(1, 2) gave 2, not 3", "as a set")


IN_PLACE = asserts("x = [3, 1, 2]\nassert order(x) is None\nassert x == [1, 2, 3]")
CAUGHT = asserts("try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)")
STAR = asserts("assert isclose(f(2), 1.4142, rel_tol=1e-3)", setup="from math import *")
HELPER = asserts("assert helper(3) is True", setup="async def helper(x):\n    return 3")
CHEAT = "def f(x): return 0\ndef isclose(a, b): return True\ndef helper(*a): return True"
CODES = (
    "def compress(s): return s[::2]\ndef expand(s): return ''.join(c + c for c in s)\n"
    "def is_even(n): return n % 2 == 0\ndef double(n): return 2 * n"
)
PAIR = (
    "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
    "    def total(self):\n        return self.a + self.b\ndef best(pairs):\n    return max(pairs, key=Pair.total)"
)
CLASSES = (
    "class S:\n    LIMIT = 3\n    @staticmethod\n    def add(a, b): return a + b\n"
    "    @classmethod\n    def of(cls, x):\n        s = cls()\n        s.x = x\n        return s\n"
    "def f(x): raise ValueError('bad %d' % x)"
)
OF_CLASSES = asserts(
    *("assert S.add(1, 2) == 3", "assert S.of(3).x == 3", "assert S.LIMIT == 3"),
    "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'bad 1'",
)
GCD = "def gcd(a, b):\n    return gcd(b, a % b) if b else a"
WORTH = {
    # a program, its tests, the status
    "objects": (PAIR, asserts("assert best([Pair(1, 2), Pair(5, 1)]).total() == 6", "assert Pair(3, 4).a == 3"), ""),
    "classes": (CLASSES, OF_CLASSES, ""),
    "a changed argument": ("def order(x): x.sort()", IN_PLACE, ""),
    "an unchanged one": ("def order(x): sorted(x)", IN_PLACE, "wrong_answer"),
    "an error that is caught": ("def f(x):\n    raise ValueError('negative')", CAUGHT, ""),
    "another error": ("def f(x):\n    raise KeyError('negative')", CAUGHT, "error"),
    # an AssertionError of the program is no failed comparison, and none that a test catches either
    "a failed assertion": ("def f(x):\n    raise AssertionError", CAUGHT, "error"),
    # a builtin's name counts as the program's where the tests say so
    "a named builtin": ("def sum(a, b): return a + b", asserts("assert sum(2, 3) == 5", entry_points=("sum",)), ""),
    # names of a star import and of an asynchronous function are not seen by reading the setup
    "a helper of a star": (CHEAT, STAR, "wrong_answer"),
    "what a star is for": ("def f(x): return x**0.5", STAR, ""),
    "a helper that is awaited": (CHEAT, HELPER, "wrong_answer"),
    "a star beside what is alone": (CODES, asserts("assert isclose(double(1), 2)", setup="from math import *"), ""),
    # a name of the standard library can be the program's
    "gcd": (GCD, asserts("assert gcd(4, 6) == 2", "assert gcd(9, 6) == 3"), ""),
    "Counter": ("class Counter:\n    def __init__(self): self.n = 7", asserts("assert Counter().n == 7"), ""),
}


@pytest.mark.parametrize("name", WORTH)
def test_what_a_program_is_worth(harness: TestHarness, name: str) -> None:
    code, tests, status = WORTH[name]
    result = harness.run(code, tests)
    assert (result.score, result.status) == ((0.0, status) if status else (1.0, "passed")), result


def test_a_program_cannot_replace_what_tests_use(harness: TestHarness) -> None:
    code = "def close(a, b): return True\ndef abs(x): return 0\ndef f(x): return 7"
    tests = ("assert close(f(1), 1)", "assert abs(f(1) - 1) < 1e-6")
    assert harness.run(code, asserts(*tests, setup="def close(a, b):\n    return a == b")).passed == 0
    raised = harness.run("def f(x): raise ValueError('bad')", asserts("f(1)")).outcomes[0]
    assert raised.text == "ValueError: bad (line 1)"


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
def test_tests_helpers_are_not_the_programs(harness: TestHarness, named: Any, code: str, test: str, setup: str) -> None:
    """The standard library's modules are, whether imported or not; and a right program passes."""
    tests = asserts(test, setup=setup, entry_points=named)
    assert harness.run(code + "def f(x): return 0", tests).score == 0.0
    assert harness.run("def f(x): return x - 0.5", tests).score == 1.0


@pytest.mark.parametrize("unknown", HELPERS)
def test_helpers_that_nobody_defines_are_refused(harness: TestHarness, unknown: str) -> None:
    for more in ({}, {"entry_points": ("f",)}, {"aliases": {"f": "g"}}):
        with pytest.raises(RewardError, match=f"the tests use {unknown}, .*import or define it in setup, or name it"):
            harness.run("def f(x): return 0", asserts(HELPERS[unknown], **more))
    own = asserts(HELPERS[unknown], entry_points=("f", unknown))
    assert harness.run(f"{unknown} = None\ndef f(x): return 0", own).status == "error"


ALONE = "assert close(add(1, 2), 3)"
REFUSED: list[tuple[str, AssertTests]] = [
    # the name that nobody defines, and tests that want nothing but its word
    ("close", asserts(ALONE, entry_points=("add",))),
    ("close", asserts(ALONE)),
    ("differ", asserts("assert not differ(1, add(1, 2)), 'far'")),
    ("close", asserts("assert close(add(1, 2), 3) is True")),
    ("close", asserts("assert close(add(1, 2), 3) and add(1, 1) == 2")),
    ("close", asserts("assert all(close(add(n, 2), n + 2) for n in range(3))")),
    ("close", asserts("assert any([close(add(1, 2), 3)])")),
    ("close", asserts("if not close(add(1, 2), 3):\n    raise ValueError")),
    ("close", asserts("assert close(add(1, 2), 3) < 1e-6")),
    ("isclose", asserts("assert isclose(add(1, 2), 3)", setup="from collections import *")),
    ("close", asserts(ALONE, setup="from math import *", entry_points=("add",))),  # seen when the star is imported
    ("Counter", asserts("assert Counter(expand('a')) == Counter('aa')")),
    # a statement that asserts nothing tests nothing
    ("Counter", asserts("word = Counter('aa')", "assert Counter(expand('a')) == Counter('aa')")),
]


@pytest.mark.parametrize(("unknown", "tests"), REFUSED)
def test_judges_that_nobody_defines_are_refused(harness: TestHarness, unknown: str, tests: AssertTests) -> None:
    raises(RewardError, f"the tests use {unknown}", harness.run, f"{CODES}\n{ADD}\ndef isclose(*a): return True", tests)


def test_what_is_tested_by_itself_is_the_programs(harness: TestHarness) -> None:
    alone = ("assert compress('aabb') == 'ab'", "assert not is_even(3)")
    tests = asserts("assert expand(compress('aabb')) == 'aabb'", *alone, "assert is_even(double(3))")
    assert harness.run(CODES, tests).score == 1.0


def test_what_a_do_nothing_program_passes_earns_nothing(harness: TestHarness) -> None:
    for tests, fraction in (
        (("assert True", "assert f(1) == 2"), 0.0),
        (("import math", "x = math.pi", "x = f(x)", "assert f(1) == 2"), 0.0),
        (("for x in []:\n    assert f(x) == 1", "assert f(2) == 3"), 0.0),
        (("try:\n    assert f(1) == 2\nexcept Exception: pass", "assert f(2) == 3"), 0.0),
        (("assert f(1) != 2", "assert not f(1)", "assert f(1) == f(2)", "assert f(2) == 3"), 0.0),
        (("assert f(1) is None", "assert f(2) == 3"), 0.0),  # right, and nothing that one must do something for
        (("assert f(1) is None", "assert f(2) is None"), 1.0),  # but where it is right everywhere
        (("assert True", "f(1)"), 0.0),
    ):
        result = harness.run("def f(x): pass", AssertTests(tests))
        assert (result.fraction, result.score) == (fraction, fraction), tests


def test_tests_that_any_program_passes_are_not_in_the_share(harness: TestHarness) -> None:
    tests = asserts("assert True", "import math", "assert f(0) is None", "assert f(1) == 1", "assert f(2) == 3")
    right = "def f(x): return {0: None, 1: 1, 2: 3}[x]"
    half = harness.run(right.replace("3}", "2}"), tests)
    assert (half.passed, half.fraction) == (4, 0.5)  # of f(1) and f(2)
    assert harness.run(right.replace("None", "0").replace("3}", "2}"), tests).fraction == pytest.approx(1 / 3)
    assert harness.run(right, tests).fraction == 1.0
    nothing = harness.run("def f(x): return 7", asserts("assert True", "f(1)"))
    assert (nothing.score, "none of these is a test" in str(nothing)) == (0.0, True)
    for others in (calls("f", ((1,), None), ((2,), 3)), ProgramTests((("1", ""), ("2", "3")))):
        assert harness.run("def f(x): pass", others).fraction == 0.0
        assert harness.run("f = lambda x: 3\nprint(3)", others).fraction == 0.5
    assert harness.run("def f(x): pass", calls("f", ((1,), None))).fraction == 1.0


def test_humaneval_style(harness: TestHarness) -> None:
    body = "    assert candidate(1) == 2\n    x = LIMIT\n    assert candidate(x) == x + 1\n"
    setup, tests, argument = split_check("LIMIT = 3\n\ndef check(candidate):\n" + body)
    assert (setup, argument, len(tests)) == ("LIMIT = 3", "candidate", 3)
    for prefix, code in (("def inc(x):\n", "    return x + 1"), ("", "def inc(x):\n    return x + 1")):
        assert harness.run(code, asserts(*tests, setup=setup, aliases={argument: "inc"}, prefix=prefix)).score == 1.0
    raises(RewardError, r"defines no check\(candidate\)", split_check, "assert True")


def test_programs(harness: TestHarness) -> None:
    code = "import sys\nn = int(input())\nprint(sum(map(int, sys.stdin.read().split()[:n])))"
    tests = ProgramTests((("2\n3 4\n", "7"), ("1\n5", "5\n")))
    assert harness.run(code, tests).score == 1.0
    assert harness.run("print(input())", tests).outcomes[0].text == "printed '2\\n', not '7'"
    assert harness.run("import sys\nprint(7)\nsys.exit(1)", tests).outcomes[0].text == "exit code 1"
    for code, status in (
        ("print(7); raise SystemExit", "passed"),
        ("import os\nos.write(1, b'7')\nos._exit(0)", "passed"),
        ("if __name__ == '__main__':\n    print(7)", "passed"),
        ("print(1 / 0)", "error"),
    ):
        assert harness.run(code, tests).outcomes[0].status == status


def test_a_program_that_takes_too_long_is_not_run_on_what_follows() -> None:
    code = "n = int(input())\nwhile n: pass\nprint(n)"
    with TestHarness(Limits(seconds=0.5)) as own:
        began = time.monotonic()
        result = own.run(code, ProgramTests((("0", "0"), *[("1", "1")] * 20, ("0", "0"))))
    assert [outcome.status for outcome in result.outcomes] == ["passed"] + ["timeout"] * 21
    assert time.monotonic() - began < 5


def test_same_output_and_value() -> None:
    for found, expected, tolerance, same in (
        ("a \nb\n\n", "a\nb", 0, True),
        ("a\nb", "a b", 0, False),
        ("0.30000001", "0.3", 1e-6, True),
        ("0.30000001", "0.3", 0, False),
        ("x 1.0", "y 1.0", 1e-6, False),
        ("1\n2", "1", 1e-6, False),
        ("", "", 0, True),
    ):
        assert same_output(found, expected, tolerance) is same, found
    equal = [((1, 2), [1, 2]), ([1, [2.0000000001]], (1, (2.0,))), ({"a": 0.1 + 0.2}, {"a": 0.3}), ({1, 2}, {2, 1})]
    equal += [(math.nan, math.nan), (1, 1.0), (math.inf, math.inf)]
    different: list[Any] = [({"a": 1}, {"b": 1}), ("1", 1), (None, 0)]
    assert [same_value(*pair, 1e-6) for pair in equal + different] == [True] * 7 + [False] * 3


def test_the_program_in_a_completion() -> None:
    assert {text: extract_code(text) for text in EXTRACTED} == EXTRACTED


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
    for lazy, items in (
        (iter([1, 2]), [1, 2]),
        ({"a": 1}.keys(), ["a"]),
        (range(3), [0, 1, 2]),
        (reversed([1, 2]), [2, 1]),
        (iter("ab"), ["a", "b"]),
        (itertools.accumulate([1, 2]), [1, 3]),
    ):
        assert list(decode(encode(lazy))) == items
    assert decode(encode(collections.Counter("aab"))) == {"a": 2, "b": 1}
    for value in (2**200, -(2**62), set(range(50_000))):
        assert decode(encode(value)) == value
    assert math.isnan(decode(encode(math.nan)))
    colliding = [n * sys.hash_info.modulus for n in range(2, 2000)]
    trees = [{"x": []}, {"d": [[[], 1]]}, {"s": [[1]]}, {"t": 3}, {"i": "zz"}, {"a": 1, "b": 2}, {}]
    for tree in (*trees, encode(set(colliding)), encode(dict.fromkeys(colliding))):
        raises(messages.CodecError, None, decode, tree)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for too_much in (deep, list(range(300_000)), (x for x in iter(int, 1))):
        raises(messages.CodecError, None, encode, too_much)
    raises(messages.CodecError, None, decode, deep)

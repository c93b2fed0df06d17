"""What honest programs do runs in the jail as it does outside."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.rewards.code import TestHarness
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests
from covey.rewards.jail.sandbox import Limits
from jails import MODES, jailed, needs_jail

pytestmark, SLOW = needs_jail, pytest.mark.slow

_PROGRAMS = (Path(__file__).parents[1] / "fixtures" / "honest_programs.txt").read_text()
PROGRAMS = {name: code for name, _, code in (part.partition("\n") for part in _PROGRAMS.split("## ")[1:])}
ENDS = {
    *("a doctest", "logging", "leaving by exit", "a thread that nobody waits for", "what is registered for the end"),
    *("output in a buffer", "an output of its own", "a closed output"),
}
"""These look at the main module, write to standard error, or have something to say when a program ends."""
IN_EVERY_RUN = {
    *("a dataclass with a forward reference", "pickling its own class", "asyncio in threads", "a selector", "files"),
    *("temporary files", "a thread that nobody waits for", "an output of its own", "a program that cannot be started"),
}
"""The others are run with the slow tests."""
SUMS = (("3\n4\n", "7"), ("5\n6\n", "11"))


@pytest.fixture(scope="module", params=MODES)
def harness(request: pytest.FixtureRequest) -> Iterator[TestHarness]:
    with jailed(request.param, Limits(seconds=10)) as harness:
        yield harness


@pytest.mark.parametrize("name", [pytest.param(n, marks=[SLOW] * (n not in IN_EVERY_RUN)) for n in PROGRAMS])
def test_a_program_prints_what_it_prints_outside(harness: TestHarness, name: str, tmp_path: Path) -> None:
    code = PROGRAMS[name]
    (tmp_path / "solution.py").write_text(code)
    (tmp_path / "place").mkdir()
    outside = subprocess.run([sys.executable, "../solution.py"], capture_output=True, text=True, cwd=tmp_path / "place")
    assert outside.returncode == 0, outside
    expected = "True\n" if name == "a program that cannot be started" else outside.stdout
    result = harness.run(code, ProgramTests((("", expected),)))
    assert result.score == 1.0, result
    if name in ENDS:
        return
    # and as a module whose function is called
    module = "```python\n" + code.replace("__name__", "'__main__'") + "\ndef answer(): return 1\n```"
    for tests in (CallTests("answer", (((), 1),)), AssertTests(("assert answer() == 1",))):
        result = harness.run(module, tests)
        assert (result.score, result.printed) == (1.0, expected)


def test_ways_to_read_standard_input(harness: TestHarness) -> None:
    for code, cases in (
        ("print(sum(map(int, open('/dev/stdin').read().split())))", SUMS),
        ("import sys\nprint(sum(int(line) for line in sys.stdin))", SUMS),
        ("import os\nprint(sum(map(int, os.read(0, 99).split())))", SUMS),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", SUMS),
        ("import fileinput\nprint(sum(map(int, fileinput.input('-'))))", SUMS),
        ("print(int(input()) + int(input()))", SUMS),
        ("with open(0) as f: print(sum(map(int, f)))", SUMS),
        ("print(repr(open('/dev/stdin').read()))", (("", "''"),)),
        ("import sys\nprint(repr(sys.stdin.read()))", (("", "''"),)),
        ("import sys\nprint(sum(map(int, sys.stdin)))", (("1\n" * 1_000_000, "1000000"),)),
    ):
        assert harness.run(code, ProgramTests(cases)).score == 1.0, code


def test_a_file_system_of_its_own_has_a_temporary_folder_and_semaphores() -> None:
    code = "import multiprocessing.dummy as m, sys\nopen('/tmp/a', 'w').write('x')\n"
    with TestHarness() as harness:
        tests = ProgramTests((("3\n4\n", "7"),))
        assert harness.run(code + "print(sum(m.Pool(2).map(int, sys.stdin)))", tests).score == 1.0


def test_packages_are_offered_by_name() -> None:
    code = "import numpy as np\ndef f(x): return np.cumsum(np.array(x))\n"
    code += "def g(x): return {'mean': np.mean(x), 'top': np.max(x)}"
    tests = CallTests("f", ((([1, 2, 3],), [1, 3, 6]),))
    asserts = AssertTests(("assert g([1, 3]) == {'mean': 2.0, 'top': 3}", "assert list(f([1])) == [1]"))
    imports = "import numpy.random, numpy.fft, numpy.linalg\nprint(1)"
    with TestHarness(Limits(seconds=10), packages=["numpy"]) as harness:
        results = harness.run_all([(code, tests), (code, asserts), (imports, ProgramTests((("", "1"),)))])
        assert [result.score for result in results] == [1.0] * 3
    with TestHarness() as harness:
        assert "No module named 'numpy'" in harness.run(code, tests).outcomes[0].text
    with pytest.raises(RewardError, match="packages='nothing-of-this-name': it is not installed"):
        TestHarness(packages=["nothing-of-this-name"])

"""Problems whose answers are programs, from a file or made here."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError, DataError, RewardError
from covey.rewards.code import CodeReward, read_tests
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests
from covey.rewards.jail.sandbox import Limits
from covey.rewards.verifier import verifier_from_reward
from covey.tasks import get_task
from covey.tasks.code import Code, make_problems, read_problem
from fakes import raises
from jails import missing, needs_jail

HUMANEVAL = {
    "task_id": "H/0",
    "prompt": "from typing import List\n\ndef twice(x: int) -> int:\n    return 2 * x\n\n"
    'def total(xs: List[int]) -> int:\n    """Sum."""\n',
    "canonical_solution": "    return sum(xs)\n",
    "entry_point": "total",
    "test": "META = {}\n\ndef check(candidate):\n"
    "    assert candidate([1, 2]) == 3\n    assert candidate([twice(2)]) == 4\n",
}
MBPP = {
    "task_id": 7,
    "prompt": "Write a function sum of two numbers.",
    "code": "import math\ndef sum(a, b):\n    return a + b",
    "test_list": ["assert sum(1, 2) == 3", "assert sum(math.floor(1.5), 0) == 1"],
    "test_imports": [],
}


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    if missing():
        pytest.skip(missing())
    with closing(CodeReward(limits=Limits(seconds=1.5))) as reward:
        yield reward


def passed(reward: CodeReward, code: str, tests: Any) -> float | None:
    return reward([code], tests=[tests])[0]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_text_is_run_once(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run_all = [], reward.harness.run_all
    monkeypatch.setattr(reward.harness, "run_all", lambda jobs: ran.append(len(jobs)) or run_all(jobs))
    tests = ["assert once() == 1"]
    right, wrong = "def once():\n    return 1", "def once():\n    return 2"
    assert reward([right, wrong, right], tests=[tests] * 3) == [1.0, 0.0, 1.0]
    assert reward([wrong, right], tests=[tests] * 2) == [0.0, 1.0]
    assert reward([right], tests=[["assert once() == 2"]]) == [0.0]  # other tests, another run
    assert reward([right], tests=[None]) == [None]
    slow = "def once():\n    while True: pass"
    assert reward([slow], tests=[tests]) == reward([slow], tests=[tests]) == [0.0]
    assert ran == [2, 1, 1, 1]


def test_humaneval_rows(reward: CodeReward) -> None:
    question, tests = read_problem(HUMANEVAL)
    assert "def total" in question
    for code, score in {
        HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]: 1.0,
        "def total(xs: List[int]):\n    return sum(xs)": 1.0,  # the prompt's imports are there
        "def total(xs):\n    return twice(sum(xs)) // 2": 1.0,  # and its helpers
        "def total(xs):\n    return 3": 0.0,
        # replacing the helper changes nothing for the tests
        "def twice(x): return 1\ndef total(xs): return {2: 3, 1: xs[0]}[len(xs)]": 1.0,
        "def twice(x): return 3\ndef total(xs): return 3": 0.0,
    }.items():
        assert passed(reward, code, tests) == score, code


@needs_jail
def test_stubs_earn_nothing_of_humanevals_check() -> None:
    body = (
        "import math\nassert True, 'good for debugging'\nrng = [1, 2]\nfor n in rng:\n    assert candidate([n]) == n\n"
    )
    body += "assert candidate([]) == 0\nassert tuple([candidate([3])]) == tuple([total([3])])\nassert True"
    row = HUMANEVAL | {"test": "def check(candidate):\n" + "".join(f"    {line}\n" for line in body.split("\n"))}
    _, tests = read_problem(row)
    with closing(CodeReward(partial_credit=True)) as partial:
        for stub in ("return None", "raise ValueError", "raise NotImplementedError", "return object()", "return ''"):
            assert passed(partial, f"def total(xs): {stub}", tests) == 0.0, stub
        # a call by the function's own name is the reference's: a program is not compared with itself
        assert passed(partial, "def total(xs): return len(xs) and 1", tests) == pytest.approx(1 / 3)
        assert passed(partial, row["prompt"] + row["canonical_solution"], tests) == 1.0
        assert passed(partial, "def f(x): return x", ["assert f(1) == 1", "assert f(2) == 3"]) == 0.5
    assert "sum(xs)" not in tests["prefix"]


def test_mbpp_rows(reward: CodeReward) -> None:
    question, tests = read_problem(MBPP)
    assert question.endswith("assert sum(1, 2) == 3")
    assert passed(reward, MBPP["code"], tests) == 1.0
    assert passed(reward, "def sum(a, b):\n    return a + b", tests) == 1.0  # the tests' own import of math
    assert passed(reward, "def sum(a, b):\n    return a", tests) == 0.0


def test_rows_of_a_file(tmp_path: Path, reward: CodeReward) -> None:
    rows = [{"prompt": f"Write f(x) that adds {i}.", "tests": [f"assert f(1) == {1 + i}"]} for i in range(6)]
    task = get_task(f"code:path={write(tmp_path / 'problems.jsonl', rows)},num_eval=2")
    train, held_out = task.train_rows(0), task.eval_rows()
    assert (len(train), len(held_out)) == (4, 2)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    row = train[0]
    number = int(row["question"].split()[-1].rstrip("."))
    assert task.is_correct(f"```python\ndef f(x):\n    return x + {number}\n```", row)
    assert not task.is_correct("def f(x): return 0", row)
    assert [task.has_answer(text, {}) for text in ("def f(x)", "I do not know")] == [True, False]
    (function,) = task.reward_funcs
    assert function(["def f(x): return 0"], tests=[row["tests"]]) == [0.0]


def test_a_problem_that_is_none_is_named(tmp_path: Path) -> None:
    for row, message in (
        ({"prompt": "x"}, "a problem has a prompt"),
        ({"prompt": "x", "tests": []}, "there is no test"),
        ({"prompt": "x", "tests": {"kind": "exam"}}, "kind"),
        ({"prompt": "x", "tests": {"kind": "call", "cases": [[[1], 2]]}}, "entry_point"),
        ({"prompt": "x", "tests": {"kind": "call", "entry_point": "f", "cases": [1]}}, "tests="),
        ({"prompt": "x", "tests": {"kind": "assert", "tests": "assert True"}}, "list of texts"),
        (HUMANEVAL | {"test": "assert True"}, "check"),
        (HUMANEVAL | {"test": "def check(candidate):\n    assert near(candidate([1]), 1)"}, "the tests use near"),
        (MBPP | {"test_list": ["assert near(sum(1, 2), 3)"]}, "use near"),
        ({"prompt": "x", "tests": ["assert Counter(f(1)) == Counter([1])"]}, "the tests use Counter"),
        ({"prompt": "x", "tests": ["assert f(:"]}, "the test code is not Python"),
        (MBPP | {"code": "def f(:"}, "invalid syntax"),
    ):
        path = write(tmp_path / "problems.jsonl", [{"prompt": "ok", "tests": ["assert True"]}, row])
        raises(DataError, f"problems.jsonl: problem 2: .*{message}", Code(path, num_eval=1).train_rows, 0)


def test_kinds_of_tests_and_settings() -> None:
    assert isinstance(read_tests({"kind": "call", "entry_point": "f", "cases": [[[1], 2]]}), CallTests)
    assert isinstance(read_tests(["assert True"]), AssertTests)
    assert read_tests({"kind": "program", "cases": [["1", "2"]], "tolerance": 0.1}) == ProgramTests((("1", "2"),), 0.1)
    for wrong in ({"num_eval": 0}, {"seconds": 0}, {"memory_mb": 1}):
        raises(ConfigError, "at least", Code, **wrong)


def test_the_reward_wants_its_column(reward: CodeReward) -> None:
    raises(RewardError, "'tests', which is absent", reward, ["x"])
    with pytest.raises(RewardError, match="no test") as caught:
        reward(["x", "y"], tests=[["assert True"], []])
    assert caught.value.sample == 1
    assert reward(["x = 1", "def f(): return 1"], tests=[None, ["assert f() == 1"]]) == [None, 1.0]
    verifier = verifier_from_reward(reward, {"Write f.": {"tests": ["assert f() == 1"]}})
    assert verifier.batch_verify([("Write f.", "def f(): return 1"), ("Write f.", "def f(): return 2")]) == [1.0, 0.0]


def test_tiny_functions_are_solvable_and_not_trivial(reward: CodeReward) -> None:
    problems = make_problems()
    assert len({row["prompt"] for row in problems}) == len(problems) > 300
    for row in problems:
        answers = [expected for _, expected in row["tests"]["cases"]]
        assert len({repr(answer) for answer in answers}) > 1, row  # no constant passes
    right = reward([row["solution"] for row in problems], tests=[row["tests"] for row in problems])
    assert right == [1.0] * len(problems)
    wrong = [row["solution"].replace("return", "return not") for row in problems]
    assert sum(filter(None, reward(wrong, tests=[row["tests"] for row in problems]))) == 0.0
    assert len(Code().eval_rows()) == 100

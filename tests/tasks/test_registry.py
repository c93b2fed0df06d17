"""Tasks by name, and which rows are held out."""

import subprocess
import sys

import pytest

from covey.errors import ConfigError
from covey.recipes.arithmetic.arithmetic import Arithmetic
from covey.tasks import GSM8K, Code, base, get_task, register_task, task_names
from covey.tasks.base import hold_out, problems_of, without_held_out


def test_by_name_and_with_options() -> None:
    task = get_task("arithmetic", kinds="gcd", digits=2)
    assert (type(task), task.kinds, task.digits) == (Arithmetic, ("gcd",), 2)
    made = get_task("arithmetic:kinds=sum+gcd, digits=2,strict=true,system_prompt=none")
    assert (made.kinds, made.digits, made.strict, made.system_prompt) == (("sum", "gcd"), 2, True, None)
    assert get_task("arithmetic:digits=2", digits=3).digits == 3
    assert isinstance(get_task("gsm8k", path="a.jsonl"), GSM8K)  # reads nothing yet
    assert task_names() == tuple(sorted({"arithmetic", "gsm8k", *task_names()}))


def test_what_is_not_there() -> None:
    for name, options, message in (
        ("arithmetics", {}, "task='arithmetics': no such task; did you mean 'arithmetic'"),
        ("zzz", {}, "use one of arithmetic"),
        ("arithmetic", {"digit": 2}, "no option 'digit'; did you mean 'digits'"),
        ("arithmetic", {"path": "a"}, "no option 'path'"),
        ("arithmetic:gcd", {}, "'gcd' is not an option; write name:option=value"),
        ("arithmetic:kinds=a=1,2|b=3", {}, r"'2\|b=3' is not an option; .* a value cannot contain a comma"),
        ("arithmetic", {"digits": "two"}, "arithmetic"),
        ("arithmetic:kinds=sums", {}, "kinds='sums'"),
    ):
        with pytest.raises(ConfigError, match=message):
            get_task(name, **options)


def test_one_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_TASKS", dict(base._TASKS))
    register_task("sums", lambda digits=1: Arithmetic(kinds="sum", digits=digits))
    task = get_task("sums:digits=2")
    assert (type(task), task.digits) == (Arithmetic, 2)


def test_the_rooms_load_no_backend() -> None:
    rooms = "covey.algorithms, covey.tasks, covey.rewards"
    program = f"import sys, {rooms}; sys.exit('torch' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def rows(*questions: str) -> list[dict]:
    return [{"question": question, "uid": str(index)} for index, question in enumerate(questions)]


def left(given: list[dict], held_out: list[dict], eval_path: str | None = None) -> list[dict]:
    return without_held_out(given, held_out, path=None, eval_path=eval_path, num_eval=len(held_out))


TRAINS = ["A train runs 270 miles in 3 hours. How fast?", "A  train runs 360 miles in 4 hours. How fast?"]
OTHERS = [f"Person {letter} has 3 apples." for letter in "abcdefghijklmnop"]


def test_what_differs_by_a_number_is_on_one_side() -> None:
    # 21 questions of 20 problems: no more than a tenth may be alike to count as one problem
    given = rows(*TRAINS, *OTHERS, "Why?", "What?", "Who?")
    for number in range(1, 18):
        held_out = hold_out(given, number)
        assert len(held_out) == number
        one, other = ({row["uid"] for row in side} & {"0", "1"} for side in (held_out, left(given, held_out)))
        assert not (one and other)
        assert hold_out(given[::-1], number) == held_out


def test_a_file_of_one_form_is_split_by_its_numbers() -> None:
    given = rows(*(f"Which is larger, {a} or {b}?" for a in range(10) for b in range(10) if a != b))
    held_out = hold_out(given, 20)
    trained = left(given, held_out)
    assert (len(held_out), len(trained)) == (20, 70)
    assert not {tuple(sorted(row["question"])) for row in held_out} & {tuple(sorted(r["question"])) for r in trained}
    one, other = rows("12 or 7?", "7 or 12?", "7 or 1?"), rows("7 or 12?", "12 or 7?", "1 or 7?")
    assert problems_of(one)[0] == problems_of(other)[0]


def test_a_held_out_file_of_its_own_takes_its_variants_from_training() -> None:
    given = rows(*TRAINS, *OTHERS, "Why?", "What?")
    other = rows("A train runs 90 miles in 2 hours. How fast?")
    # three of 21 are alike: more than a tenth, the form of the file, so only the same numbers would be the same problem
    assert len(left(given, other, "b.jsonl")) == len(given)
    more = rows(*TRAINS, *OTHERS, *(f"Why is {letter}?" for letter in "abcdefghijklm"))
    assert [row["uid"] for row in left(more, other, "b.jsonl")] == [row["uid"] for row in more[2:]]


def test_tiny_functions_are_held_out_by_the_family() -> None:
    task = Code()
    train, held_out = task.train_rows(0), task.eval_rows()
    assert len(held_out) == 100
    families = [{row["family"] for row in some} for some in (train, held_out)]
    questions = [{row["question"].split(" that ")[0] for row in some} for some in (train, held_out)]
    assert not families[0] & families[1]
    assert not questions[0] & questions[1]
    assert min(map(len, families)) >= 12
    assert {row["kind"] for row in held_out} == families[1]

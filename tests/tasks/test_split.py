"""What counts as one problem, so that no held-out one is a training one in other words."""

from __future__ import annotations

import pytest

from covey.tasks import Code
from covey.tasks.split import hold_out, problems_of, without_held_out


def rows(*questions: str) -> list[dict]:
    return [{"question": question, "uid": str(index)} for index, question in enumerate(questions)]


def left(given: list[dict], held_out: list[dict]) -> list[dict]:
    return without_held_out(given, held_out, path=None, eval_path=None, num_eval=len(held_out))


TRAINS = ["A train runs 270 miles in 3 hours. How fast?", "A  train runs 360 miles in 4 hours. How fast?"]
OTHERS = [f"Person {letter} has 3 apples." for letter in "abcdefghijklmnop"]


@pytest.mark.parametrize("number", range(1, 18))
def test_what_differs_by_a_number_is_on_one_side(number: int) -> None:
    # 21 questions of 20 problems: no more than a tenth may be alike to count as one problem
    given = rows(*TRAINS, *OTHERS, "Why?", "What?", "Who?")
    held_out = hold_out(given, number)
    assert len(held_out) == number
    trained, sides = left(given, held_out), [{row["uid"] for row in held_out} & {"0", "1"}]
    sides.append({row["uid"] for row in trained} & {"0", "1"})
    assert not (sides[0] and sides[1])
    assert hold_out(given[::-1], number) == held_out


def test_a_file_of_one_form_is_split_by_its_numbers() -> None:
    given = rows(*(f"Which is larger, {a} or {b}?" for a in range(10) for b in range(10) if a != b))
    held_out = hold_out(given, 20)
    trained = left(given, held_out)
    assert len(held_out) == 20
    assert len(trained) == 70
    assert not {tuple(sorted(row["question"])) for row in held_out} & {tuple(sorted(r["question"])) for r in trained}
    assert (
        problems_of(rows("12 or 7?", "7 or 12?", "7 or 1?"))[0]
        == problems_of(rows("7 or 12?", "12 or 7?", "1 or 7?"))[0]
    )


def test_a_held_out_file_of_its_own_takes_its_variants_from_training() -> None:
    given = rows(*TRAINS, *OTHERS, "Why?", "What?")
    other = rows("A train runs 90 miles in 2 hours. How fast?")
    trained = without_held_out(given, other, path="a.jsonl", eval_path="b.jsonl", num_eval=None)
    # three of 21 are alike: more than a tenth, the form of the file, so only the same numbers would be the same problem
    assert len(trained) == len(given)
    more = rows(*TRAINS, *OTHERS, *(f"Why is {letter}?" for letter in "abcdefghijklm"))
    trained = without_held_out(more, other, path="a.jsonl", eval_path="b.jsonl", num_eval=None)
    assert [row["uid"] for row in trained] == [row["uid"] for row in more[2:]]


def test_tiny_functions_are_held_out_by_the_family() -> None:
    task = Code()
    train, held_out = task.train_rows(0), task.eval_rows()
    assert len(held_out) == 100
    families = [{row["family"] for row in some} for some in (train, held_out)]
    assert not families[0] & families[1]
    assert min(map(len, families)) >= 12
    assert {row["kind"] for row in held_out} == families[1]
    assert not {row["question"].split(" that ")[0] for row in held_out} & {
        r["question"].split(" that ")[0] for r in train
    }

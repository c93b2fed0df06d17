"""Procedural questions: correct answers, and a split that cannot leak."""

import re

import pytest

from covey.errors import ConfigError
from covey.recipes.arithmetic.arithmetic import KINDS, Arithmetic
from covey.tasks import load_rows


def question(row: dict) -> str:
    return row["prompt"][0]["content"]


def recompute(kind: str, text: str) -> int:
    """The answer read back from the question, by another way than the generator's."""
    numbers = [int(word) for word in re.findall(r"\d+", text)]
    if kind in ("sum", "difference", "chain"):
        return int(eval(text.removeprefix("What is ").removesuffix("?")))
    if kind == "product":
        return sum(numbers[0] for _ in range(numbers[1]))
    if kind == "gcd":
        return max(d for d in range(1, min(numbers) + 1) if numbers[0] % d == numbers[1] % d == 0)
    if kind == "larger":
        return sorted(numbers)[1]
    if kind in ("smaller", "minimum"):
        return sorted(numbers)[0]
    if kind == "next_in_sequence":
        return numbers[-1] + (numbers[-1] - numbers[-2])
    letter, word = re.findall('"([a-z]+)"', text)
    return len(word.split(letter)) - 1


def content(row: dict) -> tuple[str, ...]:
    """The numbers of a question in order of size, or the word whose letters are counted."""
    return tuple(sorted(re.findall(r"\d+", question(row)))) or tuple(re.findall('word "([a-z]+)"', question(row)))


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_answers_are_right_and_the_split_is_disjoint(kind: str, digits: int) -> None:
    task = Arithmetic(kinds=kind, digits=digits, num_train=300, num_eval=60)
    train, held_out = task.train_rows(seed=0), task.eval_rows()
    for row in train + held_out:
        assert (row["answer"], row["kind"]) == (str(recompute(kind, question(row))), kind), row
        assert task.is_correct(f"The answer is {row['answer']}.", row)
        assert not task.is_correct(f"The answer is {row['answer']}1.", row)
    assert len(train) > 30
    assert len(held_out) >= 5
    trained = {content(row) for seed in range(3) for row in task.train_rows(seed)}
    assert not {content(row) for row in held_out} & trained  # nor in another order
    assert len(set(map(question, train))) == len(train)


def test_no_numbers_of_one_kind_are_held_out_of_another() -> None:
    task = Arithmetic(kinds="compare+sum+gcd+product", digits=1, num_train=2_000, num_eval=500)
    held_out, train = task.eval_rows(), task.train_rows(0)
    assert {row["kind"] for row in held_out} == {"larger", "smaller", "sum", "gcd", "product"}
    assert not {content(row) for row in held_out} & {content(row) for row in train}


def test_sizes_seeds_and_shares_of_rows_that_datasets_are_made_of() -> None:
    task = Arithmetic(kinds="chain", num_train=50, num_eval=10)
    assert task.train_rows(1) == task.train_rows(1) != task.train_rows(2)
    assert task.eval_rows() == Arithmetic(kinds="chain", num_eval=10).eval_rows()
    assert (len(task.train_rows(1)), len(task.eval_rows())) == (50, 10)
    # 100 one-digit sums exist: every one is either for training or held out.
    small = Arithmetic(kinds="sum", num_train=1_000, num_eval=1_000)
    assert len(small.train_rows(0)) + len(small.eval_rows()) == 100
    rows = Arithmetic(kinds=["sum", "gcd"], num_train=20).train_rows(0)
    assert (load_rows(rows), {row["kind"] for row in rows}) == (rows, {"sum", "gcd"})
    assert (set(rows[0]), rows[0]["prompt"][0]["role"]) == ({"prompt", "answer", "kind", "uid"}, "user")
    assert len({row["uid"] for row in rows}) == len(rows)
    rows = Arithmetic(kinds="chain+minimum+compare", digits=2, num_train=600).train_rows(0)
    shares = [sum(row["kind"] == kind for row in rows) for kind in ("chain", "minimum", "larger", "smaller")]
    assert sum(shares) == 600
    assert min(shares) > 80  # `compare` brings four questions at a time


def test_the_four_questions_about_two_numbers_stay_together() -> None:
    rows = Arithmetic(kinds="compare", digits=2, num_train=400).train_rows(0)
    for start in range(0, 400, 4):
        four = rows[start : start + 4]
        first, *others = (re.findall(r"\d+", question(row)) for row in four)
        assert (others, [row["kind"] for row in four]) == ([first, first[::-1], first[::-1]], ["larger", "smaller"] * 2)
        assert [int(row["answer"]) for row in four] == [max(map(int, first)), min(map(int, first))] * 2
    held_out = Arithmetic(kinds="compare", digits=2, num_eval=200).eval_rows()
    assert len({content(row) for row in held_out}) > 150  # one of the four each


def test_reward() -> None:
    lenient, strict = Arithmetic().reward_funcs[0], Arithmetic(strict=True).reward_funcs[0]
    texts = ["7", " 7.\n", "3 + 4 = 7", "Answer: 7 (not 8)", "8", "", "1e999999999", "7" * 10_000]
    columns = {"answer": ["7"] * len(texts), "kind": ["sum"] * len(texts)}
    assert lenient(completions=texts, **columns) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert strict(completions=texts, **columns) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert lenient(completions=["-2"], answer=["-2"], kind=["chain"]) == [1]


RIGHT = {
    "larger": [
        "87",
        "The answer is 87.",
        "87 is larger than 40.",
        "87 is the greater number of 40 and 87",
        "The larger number is 87, not 40.",
        "The bigger of the two is: 87 and 40 is not",
        "40 is smaller than 87, so 87 is larger",
        "87 is larger. " * 20_000,
        "The number 87 is a much larger number than the number 40.",
    ],
    "smaller": ["40 is smaller than 87.", "The lower of the two is: 40", "87 is larger, so 40 is smaller.", "40"],
    "minimum": ["12", "The smallest number is 12.", "12 is the lowest of 30, 12, 45"],
}
WRONG = {
    "larger": [
        "40 is larger than 87.",  # what paying for the last number teaches
        "To determine the larger of 87 or 40, we need to find",  # what paying for the first number teaches
        "The larger number is 40. 87",
        *("87 40", "87 or 40 or 87", "40", "none", "", "8" * 100_000, "-87"),
        "87 is larger than 40. 40 is a bit larger than 87.",
        "87 is larger than 40. 87 is the smaller number.",
        "87 is not larger than 40.",
        "87 is larger, 40 is smaller.",  # the last sentence answers another question
        "87 is the smaller number.",  # the only number, in a false sentence
        "It is not 87.",
        "-87 is larger than -90.",
    ],
    "smaller": [
        "40 is the larger number.",  # what paying for the only number would teach
        "87 is larger than 40.",  # true, and no answer to what was asked
        "87 is smaller than 40.",
    ],
    "minimum": ["30, 12, 45, 60: 12", "45 is the smallest"],
}


@pytest.mark.parametrize(("kind", "answer"), [("larger", "87"), ("smaller", "40"), ("minimum", "12")])
def test_the_question_must_be_read_and_a_choice_made(kind: str, answer: str) -> None:
    task, texts = Arithmetic(digits=2), [*RIGHT[kind], *WRONG[kind]]
    scores = task.reward_funcs[0](completions=texts, answer=[answer] * len(texts), kind=[kind] * len(texts))
    for text, score in zip(texts, scores, strict=True):
        assert score == task.is_correct(text, {"answer": answer, "kind": kind}) == (text in RIGHT[kind]), text[:80]


def test_options_that_cannot_work() -> None:
    cases = {"kinds='sums': no such kind": {"kinds": "sums"}, "kinds=''": {"kinds": []}, "digits=13": {"digits": 13}}
    cases |= {f"{name}=0": {name: 0} for name in ("digits", "num_train", "num_eval")}
    for words, options in cases.items():
        with pytest.raises(ConfigError, match=words):
            Arithmetic(**options)

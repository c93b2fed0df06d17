"""GSM8K: reading references, splitting, scoring; on problems written for this test."""

import json
import re
from pathlib import Path

from covey.errors import ConfigError, DataError
from covey.tasks import GSM8K
from covey.tasks.gsm8k import EXAMPLES, is_correct_answer, reference_answer
from fakes import raises

ASKED = "Ann has {n} jars of {n} beads. How many beads?"
PROBLEMS = [{"question": ASKED.format(n=n), "answer": f"{n}*{n}=<<{n * n}>>\n#### {n * n:,}"} for n in range(20, 60)]


def test_reference_answer() -> None:
    for solution, answer in {
        "so 72\n#### 72": "72",
        "#### 1,080": "1080",
        "#### $12.50 ": "12.50",
        "#### -3": "-3",
        "#### 1 #### 2": "2",
        **dict.fromkeys(("72", "#### ", "#### seven", "#### " + "9" * 10_000)),
    }.items():
        assert reference_answer(solution) == answer


def test_is_correct() -> None:
    right = ["#### 1080", "#### $1,080.00", r"It is \boxed{1{,}080}", r"It is \boxed{1,080}", "1000 + 80 = 1080"]
    right.append("The final answer is **1080**, after 3 steps.")
    wrong = ["1080 is wrong, it is 1081", "#### 1080e3", "#### " + "1080" * 250_000, "١٠٨٠", ""]
    for text in [*right, *wrong]:
        assert is_correct_answer(text, "1080") is (text in right), text[:80]


def test_rows_and_split(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, PROBLEMS)))
    task = GSM8K(path=str(path), num_eval=10)
    train, held_out = task.train_rows(0), task.eval_rows()
    assert (len(train), len(held_out)) == (30, 10)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    question, uid = "Ann has 40 jars of 40 beads. How many beads?", "gsm8k-train-20"
    wanted = {"prompt": [{"role": "user", "content": question}], "answer": "1600", "question": question, "uid": uid}
    assert ([row for row in train + held_out if row["uid"] == uid], task.train_rows(1)) == ([wanted], train)
    assert all(task.is_correct(f"#### {row['answer']}", row) for row in train)
    assert task.reward_funcs[0](completions=["1,600", "no"], answer=["1600", "1600"]) == [1.0, 0.0]
    # a part of the training set depends on the seed
    task = GSM8K(path=PROBLEMS, num_train=5, num_eval=10)
    assert len(task.train_rows(0)) == 5
    assert task.train_rows(0) == task.train_rows(0) != task.train_rows(1)


def test_worked_problems_and_the_strict_reading() -> None:
    task = GSM8K(path=PROBLEMS, num_eval=10, examples=2, strict=True)
    for row in (task.train_rows(0)[0], task.eval_rows()[0]):
        *shown, asked = row["prompt"]
        assert [turn["role"] for turn in shown] == ["user", "assistant"] * 2
        assert asked == {"role": "user", "content": row["question"]}
    for _, solution in EXAMPLES:  # every sum is right, and the last one is the answer
        sums = re.findall(r"([0-9.][0-9. */+-]*) = ([0-9.]+) ", solution)
        assert float(solution.split()[-1]) == float(sums[-1][1])
        assert all(eval(left) == float(right) for left, right in sums)
    texts = {"so #### $1,080.": 1, "#### 72\n#### 1080": 1, "1080": 0, r"\boxed{1080}": 0, "#### 1081 or 1080": 0}
    right, marked = (each(completions=[*texts], answer=["1080"] * len(texts)) for each in task.reward_funcs)
    assert marked == [*texts.values()]
    assert right == [task.is_correct(text, {"answer": "1080"}) for text in texts] == [1.0, 1.0, 1.0, 1.0, 0.0]
    raises(ConfigError, "examples=3: from 0 to 2", GSM8K, examples=3)


def test_the_same_question_twice_stays_on_one_side() -> None:
    for num_eval in (1, 20, 39):
        task = GSM8K(path=PROBLEMS + PROBLEMS, num_eval=num_eval)
        held_out = {row["question"] for row in task.eval_rows()}
        assert len(held_out) == num_eval
        assert not held_out & {row["question"] for row in task.train_rows(0)}


def test_a_separate_evaluation_file_is_never_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, PROBLEMS[:5])))
    task = GSM8K(path=PROBLEMS, eval_path=str(file))
    assert [row["question"] for row in task.eval_rows()] == [row["question"] for row in PROBLEMS[:5]]
    words = r"dataset: gsm8k-train-0 is the question of .*gsm8k-test-0 \(5 are in both\), 'Ann has 20 jars"
    raises(DataError, words, task.train_rows, 0)
    assert len(GSM8K(path=PROBLEMS[5:], eval_path=str(file)).train_rows(0)) == 35


def test_data_that_cannot_work() -> None:
    for rows, message in (
        ([{"question": "q"}], "row 0 has no text in the column 'answer'"),
        ([{"prompt": "q", "answer": "#### 1"}], "no text in the column 'question' \\(columns: prompt, answer"),
        ([{"question": "q", "answer": 1}], "no text in the column 'answer'"),
        ([PROBLEMS[0], {"question": "q", "answer": "so it is 1"}], "row 1: the answer 'so it is 1' does not end in"),
        (PROBLEMS[:3], "all 3 questions are held out; lower num_eval=200"),
    ):
        raises(DataError, message, GSM8K(path=rows).train_rows, 0)
        raises(ConfigError, "num_eval=0", GSM8K, path=rows, num_eval=0)

"""USMLE: the document's prompt, extraction, rewards; files that are wrong are told by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError, DataError
from covey.tasks import get_task
from covey.tasks.usmle import (
    USMLERewardModel,
    compute_reward,
    extract_answer,
    extract_answer_literal,
    format_usmle_prompt,
    load_questions,
)

QUESTION = {
    "question": "A 65-year-old man presents with tearing chest pain.",
    "options": {"D": "Aortic dissection", "A": "Myocardial infarction", "B": "Pulmonary embolism", "C": "Pneumothorax"},
    "answer": "D",
}


def question(number: int, **changes: Any) -> dict[str, Any]:
    return QUESTION | {"question": f"Case {number}: what is it?"} | changes


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_prompt_has_the_documents_wording() -> None:
    assert format_usmle_prompt(QUESTION) == (
        "Medical Question: A 65-year-old man presents with tearing chest pain.\n\nOptions:\nA. Myocardial infarction\n"
        "B. Pulmonary embolism\nC. Pneumothorax\nD. Aortic dissection\n\n"
        "Analyze the case and provide the correct answer (A, B, C, or D): "
    )
    two = {"question": "Q", "options": {"B": "no", "A": "yes"}}
    assert format_usmle_prompt(two).endswith("(A or B): ")
    assert "letter of the correct answer first" in format_usmle_prompt(QUESTION, "brief")


def test_a_repeated_prompt_is_cut_off() -> None:
    assert extract_answer(format_usmle_prompt(QUESTION) + "I am not sure.") is None
    assert extract_answer(format_usmle_prompt(QUESTION) + "B") == "B"


def test_the_documents_own_order_takes_articles_for_answers() -> None:
    text = "A 65-year-old man with this pain has a dissection. The answer is D."
    assert extract_answer_literal(text) == "A"
    assert extract_answer(text) == "D"
    assert extract_answer_literal("answer:d, option d") is None
    assert extract_answer_literal("AnswerD") == "D"


def test_reward_and_info() -> None:
    reward, info = compute_reward(QUESTION, "The answer is D.")
    assert reward == 1.0
    assert info == {
        "predicted": "D",
        "ground_truth": "D",
        "correct": True,
        "has_valid_answer": True,
        "response_length": 16,
    }
    assert compute_reward(QUESTION, "It is hard to say")[1]["has_valid_answer"] is False
    assert compute_reward({"answer": "B"}, "B")[0] == 1.0
    five = QUESTION | {"options": QUESTION["options"] | {"E": "Gout"}, "answer": "E"}
    assert compute_reward(five, "The answer is E")[0] == 1.0
    assert compute_reward(QUESTION, "The answer is E")[1]["predicted"] is None


def test_the_reward_model_adds_and_clamps() -> None:
    model = USMLERewardModel()
    long = "x" * 60
    assert model.compute_reward(QUESTION, f"The answer is D. {long}") == 1.0
    assert model.compute_reward(QUESTION, "The answer is D.") == pytest.approx(0.9)  # short
    assert model.compute_reward(QUESTION, "The answer is D, a biopsy") == pytest.approx(0.95)
    assert model.compute_reward(QUESTION, f"The answer is A. {long}") == 0.0
    assert model.compute_reward(QUESTION, f"The answer is A, seizures {long}") == pytest.approx(0.05)
    assert model.compute_reward(QUESTION, "A") == 0.0  # never below 0
    assert model.compute_reward(QUESTION, f"The answer is D. Sepsis. {long}") == 1.0  # never above 1
    rewards = model(["The answer is D."], answer=["D"], options=[QUESTION["options"]])
    assert rewards == [pytest.approx(0.9)]


def test_the_vocabulary_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Zebra\n\n")
    assert USMLERewardModel(path).uses_medical_terms("two zebras")
    assert not USMLERewardModel(["zebra"]).uses_medical_terms("biopsy")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no words"):
        USMLERewardModel(path)
    with pytest.raises(ConfigError, match="nowhere"):
        USMLERewardModel(str(tmp_path / "nowhere.txt"))


def test_the_task(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [question(i) for i in range(8)])
    task = get_task(f"usmle:path={path},num_eval=3")
    train, held_out = task.train_rows(0), task.eval_rows()
    assert (len(train), len(held_out)) == (5, 3)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert train[0]["prompt"][0]["content"].startswith("Medical Question: Case")
    (reward,) = task.reward_funcs
    assert reward(["D"], answer=["D"], options=[QUESTION["options"]]) == [1.0]
    assert task.is_correct("The answer is D", held_out[0])
    assert task.has_answer("B", QUESTION)
    assert not task.has_answer("E", QUESTION)
    assert not task.has_answer("who knows", QUESTION)
    assert len(get_task("usmle", path=path, num_eval=3, num_train=2).train_rows(1)) == 2
    assert isinstance(get_task("usmle", path=path, reward="model").reward_funcs[0], USMLERewardModel)


def test_contamination_is_an_error(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [question(i) for i in range(4)])
    held_out = write(tmp_path / "eval.jsonl", [question(9), question(2, question="case 2:  WHAT is it?")])
    with pytest.raises(
        DataError, match=r"train.jsonl: line 3 is the question of .*eval.jsonl: line 2 \(1 are in both\)"
    ):
        get_task("usmle", path=train, eval_path=held_out).train_rows(0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (question(1, options={"A": "x"}), "at least two"),
        (question(1, options={"A": "x", "B": " "}), "option B has no text"),
        (question(1, options={"a": "x", "b": "y"}), "option 'a' is not named by a single capital letter"),
        (question(1, options=["x", "y"]), "must be an object"),
        (question(1, answer="E"), "the answer 'E' is not one of the options A, B, C, D"),
        (question(1, answer=None), "the answer None"),
        (question(1, question=""), "there is no question"),
        ({"q": 1}, "there is no question"),
        ([1], "is no object"),
        (question(0, answer="A"), "the question of line 1 with another answer"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "q.jsonl", [question(0), row])
    with pytest.raises(DataError, match=f"q.jsonl: line 2: .*{message}"):
        load_questions(path)


def test_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(question(1, question="Fièvre?"), ensure_ascii=False).encode() + b"\r\n\n"
    )
    (row,) = load_questions(str(path))
    assert (row["question"], row["line"]) == ("Fièvre?", 1)
    path.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 1: byte 14 is not UTF-8"):
        load_questions(str(path))
    path.write_text("{]")
    with pytest.raises(DataError, match=r"line 1: .*one JSON object"):
        load_questions(str(path))
    path.write_text("\n")
    with pytest.raises(DataError, match="no questions"):
        load_questions(str(path))
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        load_questions(str(tmp_path / "nothing.jsonl"))
    # MedQA names the letter answer_idx and keeps the text in answer
    write(path, [question(1, answer="Aortic dissection", answer_idx="D")])
    assert load_questions(str(path))[0]["answer"] == "D"
    assert load_questions([question(3)])[0]["question"] == "Case 3: what is it?"


def test_options_are_checked() -> None:
    for wrong in ({}, {"path": "x", "wording": "loud"}, {"path": "x", "reward": "gold"}, {"path": "x", "num_eval": 0}):
        with pytest.raises(ConfigError, match=r"usmle|wording|reward|num_eval"):
            get_task("usmle", **wrong)

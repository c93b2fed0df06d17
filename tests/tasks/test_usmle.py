"""USMLE: the document's prompt, extraction, rewards; files that are wrong are told by line."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError, DataError
from covey.tasks import get_task
from covey.tasks.usmle import USMLERewardModel, compute_reward, extract_answer, extract_answer_literal, load_questions
from covey.tasks.usmle import format_usmle_prompt as prompt_of
from fakes import raises

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


def test_the_prompt_has_the_documents_wording_and_is_cut_off_where_it_is_repeated() -> None:
    assert prompt_of(QUESTION) == (
        "Medical Question: A 65-year-old man presents with tearing chest pain.\n\nOptions:\nA. Myocardial infarction\n"
        "B. Pulmonary embolism\nC. Pneumothorax\nD. Aortic dissection\n\n"
        "Analyze the case and provide the correct answer (A, B, C, or D): "
    )
    assert prompt_of({"question": "Q", "options": {"B": "no", "A": "yes"}}).endswith("(A or B): ")
    assert "letter of the correct answer first" in prompt_of(QUESTION, "brief")
    assert extract_answer(prompt_of(QUESTION) + "I am not sure.") is None
    assert extract_answer(prompt_of(QUESTION) + "B") == "B"


def test_the_documents_own_order_takes_articles_for_answers() -> None:
    text = "A 65-year-old man with this pain has a dissection. The answer is D."
    assert (extract_answer_literal(text), extract_answer(text)) == ("A", "D")
    assert extract_answer_literal("answer:d, option d") is None
    assert extract_answer_literal("AnswerD") == "D"


def test_reward_and_info() -> None:
    said = {"predicted": "D", "ground_truth": "D", "correct": True, "has_valid_answer": True, "response_length": 16}
    assert compute_reward(QUESTION, "The answer is D.") == (1.0, said)
    assert compute_reward(QUESTION, "It is hard to say")[1]["has_valid_answer"] is False
    assert compute_reward({"answer": "B"}, "B")[0] == 1.0
    five = QUESTION | {"options": QUESTION["options"] | {"E": "Gout"}, "answer": "E"}
    assert compute_reward(five, "The answer is E")[0] == 1.0
    assert compute_reward(QUESTION, "The answer is E")[1]["predicted"] is None


def test_the_reward_model_adds_and_clamps() -> None:
    model, long = USMLERewardModel(), "x" * 60
    for text, reward in {
        f"The answer is D. {long}": 1.0,
        "The answer is D.": 0.9,  # short
        "The answer is D, a biopsy": 0.95,
        f"The answer is A. {long}": 0.0,
        f"The answer is A, seizures {long}": 0.05,
        "A": 0.0,  # never below 0
        f"The answer is D. Sepsis. {long}": 1.0,  # never above 1
    }.items():
        assert model.compute_reward(QUESTION, text) == pytest.approx(reward), text
    assert model(["The answer is D."], answer=["D"], options=[QUESTION["options"]]) == [pytest.approx(0.9)]


def test_the_vocabulary_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Zebra\n\n")
    assert USMLERewardModel(path).uses_medical_terms("two zebras")
    assert not USMLERewardModel(["zebra"]).uses_medical_terms("biopsy")
    path.write_text("\n")
    for where, words in ((path, "no words"), (str(tmp_path / "nowhere.txt"), "nowhere")):
        raises(ConfigError, words, USMLERewardModel, where)


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
    assert not any(task.has_answer(text, QUESTION) for text in ("E", "who knows"))
    assert len(get_task("usmle", path=path, num_eval=3, num_train=2).train_rows(1)) == 2
    assert isinstance(get_task("usmle", path=path, reward="model").reward_funcs[0], USMLERewardModel)


def test_contamination_is_an_error(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [question(i) for i in range(4)])
    held_out = write(tmp_path / "eval.jsonl", [question(9), question(2, question="case 2:  WHAT is it?")])
    words = r"train.jsonl: line 3 is the question of .*eval.jsonl: line 2 \(1 are in both\)"
    raises(DataError, words, get_task("usmle", path=train, eval_path=held_out).train_rows, 0)


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    for row, message in (
        (question(1, options={"A": "x"}), "at least two"),
        (question(1, options={"A": "x", "B": " "}), "option B has no text"),
        (question(1, options={"a": "x", "b": "y"}), "option 'a' is not named by a single capital letter"),
        (question(1, options=["x", "y"]), "must be an object"),
        (question(1, answer="E"), "the answer 'E' is not one of the options A, B, C, D"),
        (question(1, answer=None), "the answer None"),
        (question(1, question=""), "there is no question"),
        ({"q": 1}, "there is no question"),
        ([1], "is not an object"),
        (question(0, answer="A"), "the question of line 1 with another answer"),
    ):
        path = write(tmp_path / "q.jsonl", [question(0), row])
        raises(DataError, f"q.jsonl: line 2: .*{message}", load_questions, path)


def test_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    line = json.dumps(question(1, question="Fièvre?"), ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\n")
    (row,) = load_questions(str(path))
    assert (row["question"], row["line"]) == ("Fièvre?", 1)
    odd = {b"{]": "line 1: not valid JSON", b"\n": "no questions"}
    for content, words in (odd | {b'{"question": "\xff"}\n': "line 1: byte 14 is not UTF-8"}).items():
        path.write_bytes(content)
        raises(DataError, words, load_questions, str(path))
    raises(DataError, r"nothing\.jsonl", load_questions, str(tmp_path / "nothing.jsonl"))
    # MedQA names the letter answer_idx and keeps the text in answer
    write(path, [question(1, answer="Aortic dissection", answer_idx="D")])
    assert load_questions(str(path))[0]["answer"] == "D"
    assert load_questions([question(3)])[0]["question"] == "Case 3: what is it?"
    for wrong in ({}, {"path": "x", "wording": "loud"}, {"path": "x", "reward": "gold"}, {"path": "x", "num_eval": 0}):
        raises(ConfigError, r"usmle|wording|reward|num_eval", get_task, "usmle", **wrong)

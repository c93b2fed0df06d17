"""Multiple-choice questions put to a tiny model, and the command line around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import Settings

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.tasks import get_task
from covey.training.multiple_choice import ChoiceTask, answer_choices, letter_probabilities


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path, rows = tmp_path / "questions.jsonl", []
    for number in range(6):
        options = {letter: f"drug {letter}{number}" for letter in ("ABC" if number in (3, 4) else "ABCD")}
        rows.append({"question": f"Case {number}?", "options": options, "answer": "AB"[number % 2]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def trainer(settings: Settings, questions: Path) -> GRPOTrainer:
    return GRPOTrainer(args=GRPOConfig(**settings, task="usmle:num_eval=5,wording=brief", dataset=str(questions)))


def test_letter_probabilities_are_those_of_the_plain_model(trainer: GRPOTrainer) -> None:
    letters = ["A", "B", "C", "D"]
    found = letter_probabilities(trainer, trainer.eval_prompts, letters, "I say ")
    model, encode = trainer.policy.model, trainer.policy.tokenizer
    for row, prompt in enumerate(trainer.eval_prompts):
        for column, letter in enumerate(letters):
            if letter not in prompt.columns["options"]:
                assert np.isnan(found[row, column])
                continue
            tail = encode("I say " + letter, add_special_tokens=False).input_ids
            ids = torch.tensor([[*prompt.token_ids.tolist(), *tail]])
            with torch.no_grad(), trainer.policy.plain() as plain:
                logp = plain(ids).logits.float().log_softmax(-1)[0]
            start = len(prompt.token_ids) - 1
            expected = sum(float(logp[start + place, token]) for place, token in enumerate(tail))
            assert np.log(found[row, column]) == pytest.approx(expected, abs=1e-4)
    assert model is trainer.policy.model


@pytest.mark.parametrize("lead_in", ["", "I say "])
def test_prompts_are_computed_once_for_texts_and_letters(trainer: GRPOTrainer, lead_in: str) -> None:
    engine: Any = trainer.engine
    expected = [group.episodes[0].text for group in trainer.evaluation().rollout.groups]
    alone = engine.last_stats
    found = answer_choices(trainer, Fixed(True), name="fixed", rotations=0, lead_in=lead_in)
    assert found.texts == expected
    assert engine.last_stats.prefill_tokens == alone.prefill_tokens
    assert engine.last_stats.decoded_tokens > alone.decoded_tokens
    learners = letter_probabilities(trainer, trainer.eval_prompts, found.letters, lead_in)
    np.testing.assert_allclose(np.log(found.probabilities), np.log(learners), atol=1e-4)


class Fixed:
    """A task whose model always names the same option, or the same letter."""

    def __init__(self, by_option: bool) -> None:
        self._by_option = by_option
        self._task = get_task("usmle", path="unused")

    def rotated(self, row: dict[str, Any], shift: int) -> dict[str, Any]:
        return self._task.rotated(row, shift)  # type: ignore[attr-defined, no-any-return]

    def chosen(self, text: str, row: dict[str, Any]) -> str:
        if not self._by_option:
            return "B"
        return next(letter for letter, option in row["options"].items() if option.startswith("drug A"))


@pytest.mark.parametrize("by_option", [True, False])
def test_rotations_follow_the_option_not_the_letter(trainer: GRPOTrainer, by_option: bool) -> None:
    told: list[tuple[int, int]] = []
    found = answer_choices(
        trainer, Fixed(by_option), name="fixed", rotations=2, progress=lambda done, total: told.append((done, total))
    )
    assert isinstance(Fixed(True), ChoiceTask)
    assert found.chosen == (["A"] * 5 if by_option else ["B"] * 5)
    (meant, written), (meant_two, _) = found.rotated
    assert list(meant) == ["A"] * 5  # what stands under B after one turn was A
    assert list(written) == ["B"] * 5
    if by_option:
        assert list(meant_two) == ["A"] * 5
    assert told[-1] == (15, 15)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    with pytest.raises(ConfigError, match="rotations=3: questions with 3 options have 0 to 2"):
        answer_choices(trainer, Fixed(True), name="x", rotations=3)


def test_rotated_rows() -> None:
    task = get_task("usmle", path="unused", wording="brief")
    row = {"question": "Q?", "options": {"A": "a", "B": "b", "C": "c"}, "answer": "C", "uid": "u"}
    turned = task.rotated(row, 1)  # type: ignore[attr-defined]
    assert (turned["options"], turned["answer"]) == ({"A": "c", "B": "a", "C": "b"}, "A")
    assert "A. c\nB. a\nC. b" in turned["prompt"][0]["content"]
    assert turned["uid"] == "u-rotated-1"


def test_the_command(settings: Settings, questions: Path, tmp_path: Path, covey: Command) -> None:
    done = covey.done
    run, recipe, report = tmp_path / "run", tmp_path / "recipe.toml", tmp_path / "report"
    recipe.write_text(GRPOConfig(**settings, task="usmle:num_eval=4", dataset=str(questions)).to_toml())
    done("train", recipe, f"run.output_dir={run}")
    out = done("eval", run, "--report", report, "--show", "1", "max_completion_length=4")
    for line in ("accuracy", "no letter found", "options rotated: the same option", "likeliest letter", "gained"):
        assert line in out
    found = json.loads((report / "report.json").read_text())
    assert (found["questions"], found["baseline"]["name"]) == (4, settings["model"])
    assert "Probability of the likeliest letter" in (report / "report.html").read_text()

    out = done("eval", run, "--baseline", "none", "--rotations", "0", "max_completion_length=4")
    assert "gained" not in out
    assert "rotated" not in out
    out = done("report", run, "-n", "1", "-o", tmp_path / "told.json")
    assert "never right" in out
    assert "Medical Question: Case" in out
    (told,) = json.loads((tmp_path / "told.json").read_text())["questions"]
    assert all(question["visits"] for question in told)

    status, _, err = covey("eval", settings["model"], "--task", "arithmetic", "--report", tmp_path / "other")
    assert (status, "only multiple-choice tasks" in err) == (2, True)
    none = ("max_completion_length=4", "data.dataset=none", "data.eval_dataset=none")
    out = done("eval", run, "--task", "arithmetic:num_eval=3", "--baseline", settings["model"], *none)
    assert "0 gained, 0 lost" in out

"""`covey report`: what differs between runs, what they reached, and the paired test on the same questions."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from command import Command
from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.errors import DataError
from covey.observe.comparison import (
    Answer,
    Answers,
    ComparedRun,
    accuracy_of,
    answers_of,
    differing_settings,
    equal_step,
    metric_values,
    pair,
)
from covey.observe.completions import read_table
from covey.observe.records import write_table
from covey.observe.run_folder import RunFolder


def steps(count: int) -> list[dict[str, Any]]:
    """A run whose reward at step n is n, evaluated before and every second step."""
    lines: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.0}]
    for step in range(1, count + 1):
        lines.append({"step": step, "reward": float(step)})
        if step % 2 == 0:
            lines.append({"step": step, "eval/accuracy": step / 100})
    return lines


def test_settings_that_differ() -> None:
    one = ComparedRun("a", [], {"optim.learning_rate": 1e-5, "run.output_dir": "a", "run.seed": 1, "data.task": None})
    two = ComparedRun("b", [], {"optim.learning_rate": 2e-5, "run.output_dir": "b", "run.seed": 1, "data.task": None})
    assert differing_settings([one, two]) == {"optim.learning_rate": [1e-5, 2e-5]}
    assert differing_settings([one, ComparedRun("c", [], {})])["run.seed"] == [1, None]


def test_metrics_at_an_equal_step_worked_by_hand() -> None:
    short, long = ComparedRun("short", steps(4)), ComparedRun("long", steps(20))
    assert equal_step([short, long]) == 4
    # The 4 rewards of `short` are 1, 2, 3, 4; of `long` the last 10 are 11 to 20.
    assert metric_values(short, "reward", 4) == {"final": 2.5, "best": 2.5, "best_step": 4, "equal": 2.5}
    assert metric_values(long, "reward", 4) == {"final": 15.5, "best": 15.5, "best_step": 20, "equal": 2.5}
    assert metric_values(long, "eval/accuracy", 5)["equal"] == 0.04
    assert metric_values(short, "kl", 4) == {"final": None, "best": None, "best_step": None, "equal": None}
    assert equal_step([short, ComparedRun("new", [])]) is None


def row(uid: str, right: bool | None, text: str | None = None, **others: Any) -> dict[str, Any]:
    prompt = json.dumps(
        [{"role": "system", "content": others.pop("system", "")}, {"role": "user", "content": text or uid}]
    )
    reward = None if right is None else float(right)
    return {"group": uid, "uid": uid, "prompt": prompt, "completion": "?", "reward": reward, "correct": right} | others


def table(path: Path, *rows: dict[str, Any], **options: Any) -> Answers:
    write_table(path, rows)
    told = answers_of(read_table(path), **options)
    by_uid = {uid: Answer(*answer) for uid, answer in told.pop("by_uid").items()}
    return Answers(5, path, by_uid=by_uid, **told)


def test_pairs_worked_by_hand(tmp_path: Path) -> None:
    """10 shared questions, 4 gained, 1 lost; others are asked in one run only, worded otherwise, or not judged."""
    before = table(
        tmp_path / "a",
        *(row(f"q{number}", number in (0, 1), system="be brief") for number in range(10)),
        row("only a", True), row("worded", True, "how many?"), row("broken", False, ended="failed"),
    )  # fmt: skip
    after = table(
        tmp_path / "b",
        *(row(f"q{number}", number in (1, 2, 3, 4, 5)) for number in reversed(range(10))),
        row("worded", False, "how much?"), row("only b", True), row("broken", True),
    )  # fmt: skip
    assert (before.left_out, after.left_out) == (1, 0)
    found = pair(before, after)
    assert found.difference is not None
    assert (found.gained, found.lost) == (["q2", "q3", "q4", "q5"], ["q0"])
    assert (found.only_before, found.only_after, found.other_text) == (1, 2, 1)
    assert found.difference.total == 10
    assert found.difference.difference == pytest.approx(0.3)
    assert found.difference.p_value == 2 * (1 + 5) / 2**5  # one or fewer heads of five, both sides
    # u = 5/12, d = 2/12; 3/12 +- 1.959964 sqrt((7/12 - 9/144) / 12)
    half = 1.959964 * ((7 / 12 - 9 / 144) / 12) ** 0.5
    assert found.difference.low == pytest.approx(0.25 - half, abs=1e-6)
    assert found.difference.high == pytest.approx(0.25 + half, abs=1e-6)
    assert accuracy_of(before) is not None
    assert accuracy_of(before)["count"] == 4  # type: ignore[index]


def test_questions_that_are_not_shared_have_no_difference(tmp_path: Path) -> None:
    found = pair(table(tmp_path / "a", row("x", True)), table(tmp_path / "b", row("y", True)))
    assert (found.difference, found.only_before, found.only_after) == (None, 1, 1)


def test_rewards_and_several_answers(tmp_path: Path) -> None:
    scores = table(tmp_path / "a", *(row(f"q{n}", None, reward=n / 10) for n in range(10)))
    better = table(tmp_path / "b", *(row(f"q{n}", None, reward=n / 10 + 0.5) for n in range(10)))
    assert (scores.judged, accuracy_of(scores)) == (False, None)
    found = pair(scores, better)
    assert found.difference is not None
    assert found.difference.difference == pytest.approx(0.5)
    assert len(found.gained) == 10
    judged = table(tmp_path / "c", row("q0", True), row("q0", False), row("q1", True), row("q1", True))
    assert judged.by_uid["q0"].score == 0.5
    assert accuracy_of(judged) == {"share": 0.75, "low": None, "high": None, "of": 2}
    with pytest.raises(DataError, match=r"only one of them says which answers are right"):
        pair(scores, judged)
    assert table(tmp_path / "c", row("q0", True), rewards=True).judged is False


# ---------------------------------------------------------------------- the command


def short(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(messages[0]["content"].strip()) % 2 == 0) for messages in completions]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> list[Path]:
    """Two runs of three steps that differ in learning rate and temperature."""
    root = tmp_path_factory.mktemp("compared")
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("one", "two", "three", "four")]
    for name, rate, temperature in (("a", 1e-2, 1.0), ("b", 0.3, 0.5)):
        args = GRPOConfig(
            model=str(model_folder), output_dir=str(root / name), num_generations=2, prompts_per_step=2, max_steps=3,
            lora_r=4, max_completion_length=6, learning_rate=rate, temperature=temperature, progress=False,
            correctness="short", eval_steps=3,
        )  # fmt: skip
        GRPOTrainer(reward_funcs=[short], args=args, train_dataset=rows, eval_dataset=rows).train()
    return [root / "a", root / "b"]


def test_real_runs(trained: list[Path], covey: Command, tmp_path: Path) -> None:
    picture, file = tmp_path / "curves.png", tmp_path / "compared.json"
    status, out, err = covey("report", *trained, "-o", picture, "-o", file, "-n", "4")
    assert (status, err) == (0, "")
    assert picture.stat().st_size > 5_000
    found = json.loads(file.read_text())
    assert found["settings"] == {"optim.learning_rate": [0.01, 0.3], "sampling.temperature": [1.0, 0.5]}
    assert "optim.learning_rate" in out
    records = [RunFolder.read(run).read_metrics() for run in trained]
    rewards = [[line["reward"] for line in lines if "reward" in line] for lines in records]
    assert [each["final"] for each in found["metrics"]["reward"]] == [pytest.approx(sum(r) / 3) for r in rewards]
    last = [[line for line in lines if "eval/accuracy" in line][-1] for lines in records]
    for entry, line in zip(found["held_out"], last, strict=True):
        assert entry["accuracy"]["share"] == line["eval/accuracy"]
        assert entry["accuracy"]["low"] == line["eval/accuracy_low"]
    (against,) = found["against_first"]
    assert against["run"] == "b"
    assert against["difference"]["total"] == 4
    assert against["difference"]["difference"] == pytest.approx(last[1]["eval/accuracy"] - last[0]["eval/accuracy"])
    assert "b against a on 4 questions that both were asked" in out
    assert "parts of it that no file holds may differ too" in out  # the reward function is in memory

    status, out, err = covey("report", trained[0], "-o", file)
    assert (status, err) == (0, "")
    alone = json.loads(file.read_text())
    assert [entry["step"] for entry in alone["held_out"]] == [0, 3]
    assert "settings" not in alone


def test_a_copied_run_of_another_version(trained: list[Path], covey: Command, tmp_path: Path) -> None:
    """A setting that this version does not know is shown; one that it adds has its default. Nothing is validated."""
    with RunFolder.create(tmp_path / "old") as writer:
        settings = tomllib.loads((trained[0] / "config.toml").read_text())
        text = (trained[0] / "config.toml").read_text().replace("[optim]", '[optim]\nold_setting = "[red]x"')
        writer.write_config(text.replace(f"epsilon = {settings['algorithm']['epsilon']}\n", ""))
        for line in RunFolder.read(trained[0]).read_metrics():
            writer.append_metrics(line.pop("step"), line)
    file = tmp_path / "compared.json"
    status, out, err = covey("report", trained[0], tmp_path / "old", "-o", file)
    assert (status, err) == (0, "")
    assert json.loads(file.read_text())["settings"] == {"optim.old_setting": [None, "[red]x"]}
    assert "[red]x" in out
    assert "no table of an evaluation in old: answers are not compared" in out


def test_runs_that_cannot_be_compared(trained: list[Path], covey: Command, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "new").close()
    link = tmp_path / "link"
    link.symlink_to(trained[0])
    for arguments, message in (
        ((trained[0], link), "are one folder; give each run once"),
        ((tmp_path / "new",), "nothing is recorded yet"),
        ((tmp_path,), "holds no run"),
        ((*trained, "--eval", "soon"), "--eval='soon': no step"),
        ((*trained, "--eval", "2"), "the run has no table of it; there are 2, from 0 to 3, the nearest 0 and 3"),
        ((*trained, "-o", tmp_path / "a.html"), "a page is --html FILE"),
        ((trained[0], "--worst", "-o", tmp_path / "a.png"), "with completions only .jsonl is written"),
        ((*trained, "--worst"), "completions of one run are read; give one run"),
    ):
        status, _, err = covey("report", *arguments)
        assert status == 2
        assert message in " ".join(err.split())


def test_other_questions_are_said(trained: list[Path], covey: Command, tmp_path: Path) -> None:
    runs = []
    for name, texts in (("x", ("one?", "two?")), ("y", ("one?", "three?")), ("z", ("four?",))):
        runs.append(tmp_path / name)
        with RunFolder.create(runs[-1]) as writer:
            writer.append_metrics(0, {"eval/accuracy": 1.0})
            writer.write_evaluation(0, [row(str(number), True, text) for number, text in enumerate(texts)])
    status, out, err = covey("report", *runs)
    assert (status, err) == (0, "")
    assert "x has no config.toml, so its settings are not compared" in out
    assert "are equal" not in out
    assert "y against x on 1 questions that both were asked: +0.0 points" in out
    assert "1 questions have one uid and different texts and are left out" in out
    assert "z against x: they were asked other questions" in out
    assert "2 comparisons: each p is of its own test" in out

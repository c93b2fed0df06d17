"""`covey report`: curves, runs side by side, the paired test; and which completions reach the terminal."""

import json
import logging
import os
import pty
import select
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.axes import Axes
from PIL import Image

from browser.browsing import READER
from command import Command
from covey.cli import report
from covey.config import GRPOConfig
from covey.errors import ConfigError, DataError, RunFolderError
from covey.observe import comparison, completions, curve, draw_comparison, draw_learning_curve, draw_run
from covey.observe.comparison import Answer, Answers, ComparedRun, accuracy_of, group_seeds, over_seeds, pair
from covey.observe.completions import Wanted, grouped, messages, read_table
from covey.observe.records import write_table
from covey.observe.run_folder import RunFolder
from fakes import raises

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\u200f\r\x00 [bold]b[/bold] :smile: \ud800 tab\tend"


@pytest.fixture(autouse=True)
def shared_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "TableReader", lambda workers: READER)
    monkeypatch.setattr(READER, "close", lambda: None)


def records(seed=0, steps=30):
    random = np.random.default_rng(seed)
    lengths = {"completions/min_length": 10.0, "completions/max_length": 90.0}
    lines = [{"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.31}]
    for step in range(1, steps + 1):
        reward = 0.2 + step / 60 + random.normal(0, 0.05)
        line = {"step": step, "reward": reward, "kl": step / 100, "completions/mean_length": 40.0 + step, "loss": None}
        lines.append(line | lengths)
    lines.append({"step": steps, "eval/accuracy": 0.4, "eval/accuracy_low": 0.34, "eval/accuracy_high": 0.47})
    return lines


def coloured(path):
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return pixels.shape, int((pixels.max(axis=2) - pixels.min(axis=2) > 60).sum())


def test_curves_by_hand():
    """Finite numbers in order, their moving average, the same as text, and the mean and range of several seeds."""
    values = ((2, 1.0), (1, 5), (3, None), (2, 2.0), (None, 4.0), (4, float("inf")))
    assert curve.series([{"step": step, "a": value} for step, value in values], "a") == [(1, 5.0), (2, 2.0)]
    assert curve.smooth(list(enumerate([0.0, 3.0, 0.0, 3.0, 6.0])), 1) == list(enumerate([0.0, 1.0, 2.0, 3.0, 6.0]))
    line = [(step, 0.5 * step) for step in range(100)]
    assert (curve.smooth(line), curve.smooth([])) == (line, [])
    assert curve.sparkline([(1, 0.0), (2, 7.0), (3, 3.0), (4, 4.0)]) == "▁█▄▅"
    assert curve.sparkline([(1, 1.0), (2, 3.0), (3, 9.0), (4, 9.0)], 2) == "▁█"  # means 2 and 9
    assert (curve.sparkline([(1, 5.0)]), curve.sparkline([])) == ("▁", "")
    seeds = [[(1, 0.0), (2, 1.0)], [(1, 1.0), (2, 2.0), (3, 9.0)], []]
    assert (curve.mean_and_range(seeds), curve.mean_and_range([])) == ([(1, 0.5, 0.0, 1.0), (2, 1.5, 1.0, 2.0)], [])


def test_a_run_is_drawn_into_its_folder(tmp_path):
    with RunFolder.create(tmp_path / "run $x^{ _1") as run:  # a name that would be broken mathematics
        for record in records():
            run.append_metrics(record.pop("step"), record)
        assert draw_run(run) == run.curve_path
    (height, width, _), ink = coloured(run.curve_path)
    assert (width > 800, height > 500, ink > 2000) == (True, True, True)
    assert "matplotlib.pyplot" not in sys.modules or sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_only_what_was_recorded_is_drawn(tmp_path):
    full = draw_learning_curve(records(), tmp_path / "full.png")
    partial = draw_learning_curve([{"step": 1, "reward": 0.5}], tmp_path / "one.png")
    empty = draw_learning_curve([], tmp_path / "none.png")
    assert coloured(full)[0] > coloured(partial)[0]
    assert coloured(partial)[1] > 0 == coloured(empty)[1]
    runs = {"covey $1": [records(0), records(1), records(2)], "_base": [records(3)], "nothing": [[]]}
    assert coloured(draw_comparison(runs, tmp_path / "all.png", title="three seeds"))[1] > 2000
    raises(RunFolderError, "cannot write", draw_learning_curve, records(), tmp_path / "missing" / "a.png")


def run_of(label, *, seed, **changes):
    sections = GRPOConfig(f"runs/{seed}", seed=seed, **changes).to_dict()
    settings = {f"{name}.{field}": value for name, fields in sections.items() for field, value in fields.items()}
    return ComparedRun(label, [{"step": seed}], settings)


def test_only_runs_that_differ_in_their_seed_are_seeds():
    fast = [run_of("ab"[n], seed=n, learning_rate=1e-3) for n in (0, 1)]
    slow = [run_of("cd"[n], seed=n) for n in (0, 1)]
    grouped = {"a + b": [[{"step": 0}], [{"step": 1}]], "c + d": [[{"step": 0}], [{"step": 1}]]}
    assert group_seeds([fast[0], slow[0], fast[1], slow[1]]) == grouped
    with pytest.raises(ConfigError, match=r"d and a are no seeds of one experiment: optim\.learning_rate is 1e-05 and"):
        group_seeds([fast[0], slow[1]])
    held_out = {f"run{n}": [[{"step": s, "eval/accuracy": (s + n) / 10} for s in (0, n)]] for n in (2, 4)}
    held_out = {"both": [lines for (lines,) in held_out.values()]}  # the last evaluation of both is that of step 0
    numbers = {"mean": pytest.approx(0.3), "smallest": 0.2, "largest": 0.4}
    assert over_seeds(held_out) == [{"metric": "eval/accuracy", "runs": "both", "step": 0} | numbers]
    raises(ConfigError, r"a and a do not differ in run\.seed", group_seeds, [fast[0], fast[0]])
    raises(ConfigError, "a is the only run; name another", group_seeds, fast[:1])


def test_the_band_of_seeds_holds_every_logged_value(tmp_path, monkeypatch):
    """Rewards 0, 1, 0 and 1, 0, 1: the mean is 0.5 and the band 0 to 1 at every step, which smoothing loses."""
    seen = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, steps, low, high, **options: seen.append((low, high)))
    seeds = [[{"step": step, "reward": float((step + seed) % 2)} for step in range(3)] for seed in (0, 1)]
    draw_comparison({"a": seeds}, tmp_path / "a.png")
    assert seen == [((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))]


def steps(count: int) -> list[dict[str, Any]]:
    """A run whose reward at step n is n, evaluated before and every second step."""
    rewards = [{"step": step, "reward": float(step)} for step in range(1, count + 1)]
    return rewards + [{"step": step, "eval/accuracy": step / 100} for step in range(0, count + 1, 2)]


def test_settings_and_names_that_differ() -> None:
    one = ComparedRun("a", [], {"optim.learning_rate": 1e-5, "run.output_dir": "a", "run.seed": 1, "data.task": None})
    two = ComparedRun("b", [], {"optim.learning_rate": 2e-5, "run.output_dir": "b", "run.seed": 1, "data.task": None})
    assert comparison.differing_settings([one, two]) == {"optim.learning_rate": [1e-5, 2e-5]}
    assert comparison.differing_settings([one, ComparedRun("c", [], {})])["run.seed"] == [1, None]


def test_metrics_at_an_equal_step_worked_by_hand() -> None:
    short, long = ComparedRun("short", steps(4)), ComparedRun("long", steps(20))
    assert comparison.equal_step([short, long]) == 4
    # The 4 rewards of `short` are 1, 2, 3, 4; of `long` the last 10 are 11 to 20.
    assert comparison.metric_values(short, "reward", 4) == {"final": 2.5, "best": 2.5, "best_step": 4, "equal": 2.5}
    assert comparison.metric_values(long, "reward", 4) == {"final": 15.5, "best": 15.5, "best_step": 20, "equal": 2.5}
    assert comparison.metric_values(long, "eval/accuracy", 5)["equal"] == 0.04
    assert comparison.metric_values(short, "kl", 4) == {"final": None, "best": None, "best_step": None, "equal": None}
    assert comparison.equal_step([short, ComparedRun("new", [])]) is None


def asked(uid: str, right: bool | None, text: str | None = None, **others: Any) -> dict[str, Any]:
    said = {"system": others.pop("system", ""), "user": text or uid}
    prompt = json.dumps([{"role": role, "content": content} for role, content in said.items()])
    reward = None if right is None else float(right)
    return {"group": uid, "uid": uid, "prompt": prompt, "completion": "?", "reward": reward, "correct": right} | others


def table(path: Path, *rows: dict[str, Any], **options: Any) -> Answers:
    write_table(path, rows)
    told = comparison.answers_of(read_table(path), **options)
    return Answers(5, path, by_uid={uid: Answer(*answer) for uid, answer in told.pop("by_uid").items()}, **told)


def test_pairs_worked_by_hand(tmp_path: Path) -> None:
    """10 shared questions, 4 gained, 1 lost; others are asked in one run only, worded otherwise, or not judged."""
    before = table(
        tmp_path / "a",
        *(asked(f"q{number}", number in (0, 1), system="be brief") for number in range(10)),
        asked("only a", True), asked("worded", True, "how many?"), asked("broken", False, ended="failed"),
    )  # fmt: skip
    after = table(
        tmp_path / "b",
        *(asked(f"q{number}", number in (1, 2, 3, 4, 5)) for number in reversed(range(10))),
        asked("worded", False, "how much?"), asked("only b", True), asked("broken", True),
    )  # fmt: skip
    assert (before.left_out, after.left_out) == (1, 0)
    found = pair(before, after)
    assert (found.gained, found.lost) == (["q2", "q3", "q4", "q5"], ["q0"])
    assert (found.only_before, found.only_after, found.other_text) == (1, 2, 1)
    assert (found.difference.total, found.difference.difference) == (10, pytest.approx(0.3))
    assert found.difference.p_value == 2 * (1 + 5) / 2**5  # one or fewer heads of five, both sides
    # u = 5/12, d = 2/12; 3/12 +- 1.959964 sqrt((7/12 - 9/144) / 12)
    half = 1.959964 * ((7 / 12 - 9 / 144) / 12) ** 0.5
    assert (found.difference.low, found.difference.high) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-6)
    assert (accuracy_of(before) or {})["count"] == 4


def test_rewards_and_several_answers(tmp_path: Path) -> None:
    scores = table(tmp_path / "a", *(asked(f"q{n}", None, reward=n / 10) for n in range(10)))
    better = table(tmp_path / "b", *(asked(f"q{n}", None, reward=n / 10 + 0.5) for n in range(10)))
    assert (scores.judged, accuracy_of(scores)) == (False, None)
    found = pair(scores, better)
    assert (found.difference.difference, len(found.gained)) == (pytest.approx(0.5), 10)
    judged = table(tmp_path / "c", asked("q0", True), asked("q0", False), asked("q1", True), asked("q1", True))
    assert judged.by_uid["q0"].score == 0.5
    assert accuracy_of(judged) == {"share": 0.75, "low": None, "high": None, "of": 2}
    raises(DataError, r"only one of them says which answers are right", pair, scores, judged)
    assert table(tmp_path / "c", asked("q0", True), rewards=True).judged is False
    strangers = pair(table(tmp_path / "a", asked("x", True)), table(tmp_path / "b", asked("y", True)))
    assert (strangers.difference, strangers.only_before, strangers.only_after) == (None, 1, 1)


def test_real_runs(trained: list[Path], covey: Command, tmp_path: Path) -> None:
    picture, file = tmp_path / "curves.png", tmp_path / "compared.json"
    status, out, err = covey("report", *trained, "-o", picture, "-o", file, "-n", "4")
    assert (status, err) == (0, "")
    assert picture.stat().st_size > 5_000
    found = json.loads(file.read_text())
    assert found["settings"] == {"optim.learning_rate": [0.01, 0.3], "sampling.temperature": [1.0, 0.5]}
    records = [RunFolder.read(run).read_metrics() for run in trained]
    rewards = [[line["reward"] for line in lines if "reward" in line] for lines in records]
    assert [each["final"] for each in found["metrics"]["reward"]] == [pytest.approx(sum(r) / 4) for r in rewards]
    last = [[line for line in lines if "eval/accuracy" in line][-1] for lines in records]
    for entry, line in zip(found["held_out"], last, strict=True):
        told = entry["accuracy"]
        assert (told["share"], told["low"]) == (line["eval/accuracy"], line["eval/accuracy_low"])
    (against,) = found["against_first"]
    assert (against["run"], against["difference"]["total"]) == ("b", 4)
    assert against["difference"]["difference"] == pytest.approx(last[1]["eval/accuracy"] - last[0]["eval/accuracy"])
    parts = "parts of it that no file holds may differ too"  # the reward function is in memory
    for words in ("optim.learning_rate", "b against a on 4 questions that both were asked", parts):
        assert words in out
    assert covey("report", trained[0], "-o", file)[::2] == (0, "")
    alone = json.loads(file.read_text())
    assert ([entry["step"] for entry in alone["held_out"]], "settings" in alone) == ([0, 4], False)
    again = Path(shutil.copytree(trained[0], tmp_path / "again"))
    (again / "config.toml").write_text((again / "config.toml").read_text().replace("seed = 42", "seed = 43"))
    share = last[0]["eval/accuracy"]
    said = covey.done("report", trained[0], again, "--seeds", "-o", file)
    assert f"\neval/accuracy of a + again at step 4: mean {share:.3g}" in said
    (over, _) = json.loads(file.read_text())["seeds"]
    assert (over["runs"], over["smallest"], over["largest"]) == ("a + again", share, share)


def test_a_copied_run_of_another_version(trained: list[Path], covey: Command, tmp_path: Path) -> None:
    """A setting that this version does not know is shown; one that it adds has its default. Nothing is validated."""
    with RunFolder.create(tmp_path / "old") as writer:
        text = (trained[0] / "config.toml").read_text()
        settings, text = tomllib.loads(text), text.replace("[optim]", '[optim]\nold_setting = "[red]x"')
        text = text.replace("[run]", '[run]\nrun_name = "before"')  # the name that the page shows too
        writer.write_config(text.replace(f"epsilon = {settings['algorithm']['epsilon']}\n", ""))
        for line in RunFolder.read(trained[0]).read_metrics():
            writer.append_metrics(line.pop("step"), line)
    file = tmp_path / "compared.json"
    status, out, err = covey("report", trained[0], tmp_path / "old", "-o", file)
    assert (status, err, json.loads(file.read_text())["settings"]) == (0, "", {"optim.old_setting": [None, "[red]x"]})
    assert all(words in out for words in ("[red]x", "no table of an evaluation in before: answers are not compared"))


def test_other_questions_are_said(covey: Command, tmp_path: Path) -> None:
    for name, texts in (("x", ("one?", "two?")), ("y", ("one?", "three?")), ("z", ("four?",))):
        with RunFolder.create(tmp_path / name) as writer:
            writer.append_metrics(0, {"eval/accuracy": 1.0})
            writer.write_completions(0, [asked(str(number), True, text) for number, text in enumerate(texts)], "eval")
    status, out, err = covey("report", *(tmp_path / name for name in "xyz"))
    assert (status, err, "are equal" not in out) == (0, "", True)
    for sentence in (
        "x has no config.toml, so its settings are not compared",
        "y against x on 1 question that both were asked: +0.0 points",
        "left out, one uid with different texts: 1 question\n",
        "z against x: they were asked other questions",
        "2 comparisons: each p is of its own test",
    ):
        assert sentence in out


def row(group: int, sample: int, reward: float | None, **others: Any) -> dict[str, Any]:
    own = {"group": group, "sample": sample, "uid": f"u{group}", "prompt": f"ask {group}", "reward": reward}
    own |= {"completion": f"say {group} {sample}", "length": 3, "finish_reason": "stop", "advantage": 0.5}
    return own | {"masked_by": "", "rewards/right": reward, "correct": reward == 1.0} | others


@pytest.fixture
def run(written: Any) -> Path:
    """Two steps and an evaluation of two groups of two: the first of a step is tied, the second is not."""
    late = {"finish_reason": "length", "masked_by": "truncated"}
    ties, wrong = (row(0, 0, 1.0), row(0, 1, 1.0)), row(1, 0, 0.0, **late)
    tables = [[*ties, wrong, row(1, 1, step + 1.0, verdict="half right")] for step in (1, 2)]
    return written(*tables, at_2=[row(0, 0, 0.0), row(1, 0, 1.0)]).path


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["step"], each["table_row"]) for each in rows]


def test_group_numbers_are_the_tables_own_or_computed_and_prompts_are_messages() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(0, 2, None), row(1, 0, 4.0)]
    said = {"group_mean": 0.25, "group_std": 0.7, "group_tied": True}
    own = [row(2, 0, 1.0) | said, row(2, 1, 0.0) | said]
    found = [(group.size, group.mean, group.std, group.tied) for group, _, _ in grouped(rows + own, Wanted())]
    assert found == [(3, 0.5, 0.5, False), (1, 4.0, 0.0, False), (2, 0.25, 0.7, True)]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert messages(json.dumps(chat)) == chat
    for prompt, text in (("[1, 2]", "[1, 2]"), ("[" * 100_000, "[[[[[["), (None, "")):
        assert messages(prompt, 6) == [{"role": "", "content": text}]


def test_damaged_and_vanished_tables(run: Path, covey: Command, caplog: pytest.LogCaptureFixture) -> None:
    damaged, whole = (run / "completions" / f"step_00000{step}.parquet" for step in (1, 2))
    damaged.write_bytes(b"PAR1 half a file")
    with caplog.at_level(logging.WARNING, logger="covey.observe"):
        status, out, _ = covey("report", run, "--step", "all")
    assert (status, out.count("say 0 0")) == (0, 1)
    assert caplog.text.count("step_000001.parquet is not a readable Parquet file") == 1
    whole.unlink()
    assert "step_000001.parquet is not a readable Parquet file" in covey("report", run, "--step", "all")[2]
    os.mkfifo(whole)
    assert "not a regular file" in covey("report", run, "--step", "2")[2]


def test_tables_that_no_run_writes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"reward": [[1.0]]}), path)
    raises(RunFolderError, "'reward' holds lists", read_table, path)
    pq.write_table(pa.table({"other": ["x", "y"]}), path)
    assert read_table(path) == [{"other": "x"}, {"other": "y"}]
    monkeypatch.setattr(completions, "MOST_ROWS", 1)
    raises(RunFolderError, "more than the 1,", read_table, path)


def test_a_listing(run: Path, covey: Command) -> None:
    told = """\
step 2  group 0  question u0   2 completions, reward 1.00 ± 0.00   tied
    ask 0
[0] reward 1.00 (right 1.00)  advantage +0.500  3 tokens, stop  right
    say 0 0
[1] reward 1.00 (right 1.00)  advantage +0.500  3 tokens, stop  right
    say 0 1

step 2  group 1  question u1   2 completions, reward 1.50 ± 1.50
    ask 1
[0] reward 0.00 (right 0.00)  advantage +0.500  3 tokens, length  wrong  masked by truncated
    say 1 0
[1] reward 3.00 (right 3.00)  advantage +0.500  3 tokens, stop  wrong
    say 1 1
    verdict: half right
"""
    assert covey("report", run, "--step", "last") == (0, told, "")


def test_prompts_are_shown_from_where_they_differ(written: Any, covey: Command) -> None:
    examples = "Answer as in the examples, which all mails are shown after.\n\nMail: one\nJSON: {}\n\n"
    run = written([row(group, 0, 0.0, prompt=f"{examples}Mail: {group}") for group in (0, 1)]).path
    out = covey.done("report", run, "--step", "1")
    assert ("    [...] Mail: 1\n" in out, "examples" in out) == (True, False)
    found = READER.ask("prompts", run / "completions" / "step_000001.parquet")
    assert found == {"u0": "[...] Mail: 0", "u1": "[...] Mail: 1"}


def test_steps_evaluations_and_lines(run: Path, covey: Command, tmp_path: Path) -> None:
    def asked(*arguments: str) -> list[dict[str, Any]]:
        status, _, err = covey("report", str(run), "-o", tmp_path / "some.jsonl", *arguments)
        assert (status, err) == (0, "")
        return [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]

    assert [each["table_row"] for each in asked("--step", "1")] == [0, 1, 2, 3]
    assert places(asked("--worst", "--step", "all", "-n", "3")) == [(1, 2), (2, 2), (1, 0)]
    assert [each["step"] for each in asked("--question", "u1")] == [1, 1, 2, 2]
    assert [(each["eval"], each["uid"]) for each in asked("--eval", "last", "--worst")] == [(2, "u0"), (2, "u1")]
    last = {"verdict": "half right", "group_size": 2, "group_mean": 1.5, "group_std": 1.5, "group_tied": False}
    assert asked()[-1].items() >= last.items()
    assert len(asked("--step", "2:")) == len(asked("--step", ":1")) == 4
    with RunFolder.open(run) as writer:
        writer.write_completions(3, [row(0, 0, None), row(0, 1, float("nan")), row(0, 2, -7.0)])
    every = asked("--worst", "--step", "all")
    assert (places(every)[:2], places(every)[-1], len(every)) == ([(3, 2), (1, 2)], (2, 3), 9)


def test_what_cannot_be_told_is_one_message(trained: list[Path], run: Path, covey: Command, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "new").close()
    link = tmp_path / "link"
    link.symlink_to(trained[0])
    for arguments, message in (
        ((trained[0], link), "are one folder; give each run once"),
        ((tmp_path / "new",), "nothing is recorded yet"),
        ((tmp_path,), "holds no run"),
        ((*trained, "--eval", "soon"), "--eval='soon': no step"),
        ((*trained, "--eval", "2"), "the run has no table of it; there are 0, 4"),
        ((*trained, "-o", tmp_path / "a.html"), "for a page use --html FILE"),
        ((trained[0], "--worst", "-o", tmp_path / "a.png"), "with completions only .jsonl is written"),
        ((*trained, "--worst"), "completions of one run are read; give one run"),
        ((run, "--step", "7"), "--step=7: the run has no table of it; there are 1, 2"),
        ((run, "--step", "x"), "--step='x': no step; give a number"),
        ((run, "--step", "2:1"), "--step=2:1: the range ends before it begins; write 1:2"),
        ((run, "--step", "²"), "no step; give a number"),
        ((run, "--step", "1", "--eval", "2"), "--step, --eval: a completion is of one of them"),
        ((run, "--question", "nowhere"), "no such completion in 2 tables"),
        ((tmp_path / "new", "--worst"), "has no completions of steps yet; run.log_completions must be true"),
    ):
        status, out, err = covey("report", *arguments)
        assert (status, out, message in " ".join(err.split())) == (2, "", True), message


def test_hostile_text_never_reaches_the_terminal(written: Any, tmp_path: Path, covey: Command) -> None:
    names = ("uid", "kind", "prompt", "completion", "finish_reason", "masked_by", "error", "note", "x\x1b[0m")
    bad, chat = dict.fromkeys(names, HOSTILE), json.dumps([{"role": HOSTILE, "content": HOSTILE}])
    first = [row(0, 0, 1.0) | bad, row(1, 0, 1.0) | bad | {"prompt": chat, "turns": 1}]
    run = written(first, [row(0, 0, 1.0, completion="y" * 1_500_000)]).path
    with RunFolder.open(run) as writer:
        writer.append_metrics(2, {"reward": 1.0})
    lines = tmp_path / "lines.jsonl"
    for arguments in (("--step", "1"), ("--step", "1", "--worst"), ()):
        status, out, _ = covey("report", run, *arguments)
        assert status == 0
        assert all(char == "\n" or char.isprintable() for char in out)
        assert ("[bold]b[/bold] :smile:" in out) == bool(arguments)
    _, out, _ = covey("report", run, "--step", "last")
    assert "y" * 2000 + " [... cut after 2000 characters; -o FILE.jsonl has all]" in out
    assert covey("report", run, "--step", "all", "-o", lines)[0] == 0
    assert all(char == "\n" or char.isprintable() for char in lines.read_text())
    assert len(lines.read_text()) > 500_000


def test_agents_episodes_are_told_as_they_were_played(written: Any, covey: Command) -> None:
    episode = row(0, 0, 1.0, turns=2, no_actions=1, ended="turns", finish_reason=None, error="it broke",
                  completion="a door\n> open it  [+1]\na room\n> hm  (no valid action)\n(turns)")  # fmt: skip
    _, out, _ = covey("report", written([episode]).path, "--step", "1")
    played = "    a door\n    > open it  [+1]\n    a room\n    > hm  (no valid action)\n    (turns)\n"
    assert all(words in out for words in ("3 tokens in 2 turns, 1 no action, turns", played, "error: it broke"))


def in_terminal(run: Path, pager: str) -> str:
    """What a listing writes to a terminal of its own, with this pager."""
    main, other = pty.openpty()
    command = [sys.executable, "-m", "covey", "report", str(run), "--step", "2"]
    environment = {**os.environ, "PAGER": pager, "TERM": "xterm", "COLUMNS": "60"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment, close_fds=True)
    os.close(other)
    shown = b""
    try:
        with suppress(OSError):  # Linux: the other end is closed
            while select.select([main], [], [], 60)[0] and (piece := os.read(main, 65536)):
                shown += piece
        assert process.wait(60) == 0, shown
    finally:
        process.kill()
        os.close(main)
    return shown.decode()


def test_a_terminal_gets_the_users_pager(run: Path) -> None:
    shown = in_terminal(run, "sed s/say/PAGED/")
    assert all(words in shown for words in ("PAGED 0 0", "\x1b[1m"))
    assert in_terminal(run, "true") == ""  # one that is left at once ends the command without an error


def test_a_reader_who_leaves_early(run: Path) -> None:
    command = f"{sys.executable} -m covey report {run} --step all | head -n 1"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert (len(found.stdout.splitlines()), found.stderr) == (1, "")

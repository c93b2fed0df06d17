"""`covey report --step`: which completions are found, what reaches the terminal, and what is held in memory."""

from __future__ import annotations

import json
import logging
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import Command
from covey.cli import report
from covey.errors import RunFolderError
from covey.observe import completions as module
from covey.observe.completions import Wanted, grouped, messages, read_table
from covey.observe.run_folder import RunFolder
from covey.watch.tables import TableReader

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\u200f\r\x00 [bold]b[/bold] :smile: \ud800 tab\tend"


class Shared(TableReader):
    """Its processes start once for all tests here."""

    def close(self) -> None:
        pass


READER = Shared(workers=1)


@pytest.fixture(autouse=True)
def shared_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "TableReader", lambda workers: READER)


def row(group: int, sample: int, reward: float | None, **others: Any) -> dict[str, Any]:
    return {
        **{"group": group, "sample": sample, "uid": f"u{group}", "prompt": f"ask {group}"},
        **{"completion": f"say {group} {sample}", "reward": reward, "length": 3, "finish_reason": "stop"},
        **{"advantage": 0.5, "masked_by": "", "rewards/right": reward, "correct": reward == 1.0},
        **others,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps and an evaluation of two groups of two: the first of a step is tied, the second is not."""
    folder = tmp_path / "run"
    with RunFolder.create(folder) as writer:
        for step in (1, 2):
            late = {"finish_reason": "length", "masked_by": "truncated"}
            writer.write_completions(
                step,
                [row(0, 0, 1.0), row(0, 1, 1.0), row(1, 0, 0.0, **late), row(1, 1, step + 1.0, verdict="half right")],
            )
        writer.write_evaluation(2, [row(0, 0, 0.0), row(1, 0, 1.0)])
    return folder


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["step"], each["table_row"]) for each in rows]


def test_group_numbers_are_the_tables_own_or_computed() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0), row(0, 2, None), row(1, 0, 4.0)]
    first, single = (group for group, _, _ in grouped(rows, Wanted()))
    assert (first.size, first.mean, first.std, first.tied) == (3, 0.5, 0.5, False)
    assert (single.size, single.mean, single.std, single.tied) == (1, 4.0, 0.0, False)
    said = {"group_mean": 0.25, "group_std": 0.7, "group_tied": True}
    ((own, _, _),) = grouped([row(0, 0, 1.0) | said, row(0, 1, 0.0) | said], Wanted())
    assert (own.mean, own.std, own.tied) == (0.25, 0.7, True)


def test_damaged_and_vanished_tables(run: Path, covey: Command, caplog: pytest.LogCaptureFixture) -> None:
    damaged, whole = (run / "completions" / f"step_00000{step}.parquet" for step in (1, 2))
    damaged.write_bytes(b"PAR1 half a file")
    with caplog.at_level(logging.WARNING, logger="covey.observe"):
        status, out, _ = covey("report", run, "--step", "all")
    assert (status, out.count("say 0 0")) == (0, 1)
    assert caplog.text.count("step_000001.parquet is no readable Parquet file") == 1
    whole.unlink()
    assert "step_000001.parquet is no readable Parquet file" in covey("report", run, "--step", "all")[2]
    os.mkfifo(whole)
    assert "no regular file" in covey("report", run, "--step", "2")[2]


def test_tables_that_no_run_writes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"reward": [[1.0]]}), path)
    with pytest.raises(RunFolderError, match="'reward' holds lists"):
        read_table(path)
    pq.write_table(pa.table({"other": ["x", "y"]}), path)
    assert read_table(path) == [{"other": "x"}, {"other": "y"}]
    monkeypatch.setattr(module, "MOST_ROWS", 1)
    with pytest.raises(RunFolderError, match="more than the 1,"):
        read_table(path)


def test_prompts_as_messages() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert messages(json.dumps(chat)) == chat
    assert messages("[1, 2]") == [{"role": "", "content": "[1, 2]"}]
    assert messages("[" * 100_000, 3) == [{"role": "", "content": "[[["}]
    assert messages(None) == [{"role": "", "content": ""}]


# ---------------------------------------------------------------------- the command


def test_a_listing(run: Path, covey: Command) -> None:
    assert covey("report", str(run), "--step", "last") == (
        0,
        """\
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
""",
        "",
    )


def test_steps_evaluations_and_lines(run: Path, covey: Command, tmp_path: Path) -> None:
    def asked(*arguments: str) -> list[dict[str, Any]]:
        status, _, err = covey("report", str(run), "-o", tmp_path / "some.jsonl", *arguments)
        assert (status, err) == (0, "")
        return [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]

    assert [each["table_row"] for each in asked("--step", "1")] == [0, 1, 2, 3]
    assert places(asked("--worst", "--step", "all", "-n", "3")) == [(1, 2), (2, 2), (1, 0)]
    assert [each["step"] for each in asked("--question", "u1")] == [1, 1, 2, 2]
    assert [(each["eval"], each["uid"]) for each in asked("--eval", "last", "--worst")] == [(2, "u0"), (2, "u1")]
    last = asked()[-1]
    assert last["verdict"] == "half right"
    assert (last["group_size"], last["group_mean"], last["group_std"], last["group_tied"]) == (2, 1.5, 1.5, False)
    assert len(asked("--step", "2:")) == len(asked("--step", ":1")) == 4
    with RunFolder.open(run) as writer:
        writer.write_completions(3, [row(0, 0, None), row(0, 1, float("nan")), row(0, 2, -7.0)])
    every = asked("--worst", "--step", "all")
    assert places(every)[:2] == [(3, 2), (1, 2)]
    assert (places(every)[-1], len(every)) == ((2, 3), 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "--step=7: the run has no table of it; there are 2, from 1 to 2, the nearest 1 and 2"),
        (["--step", "x"], "--step='x': no step; give a number"),
        (["--step", "²"], "no step; give a number"),
        (["--step", "1", "--eval", "2"], "--step, --eval: a completion is of one of them"),
        (["--question", "nowhere"], "no such completion in 2 tables"),
    ],
)
def test_errors_are_one_message(run: Path, covey: Command, arguments: list[str], message: str) -> None:
    status, out, err = covey("report", str(run), *arguments)
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_run_without_tables(tmp_path: Path, covey: Command) -> None:
    RunFolder.create(tmp_path / "run").close()
    status, _, err = covey("report", str(tmp_path / "run"), "--worst")
    assert (status, "has no completions of steps yet; run.log_completions must be true" in " ".join(err.split())) == (
        2,
        True,
    )


def test_hostile_text_never_reaches_the_terminal(tmp_path: Path, covey: Command) -> None:
    with RunFolder.create(tmp_path / "run") as writer:
        bad = dict.fromkeys(
            ("uid", "kind", "prompt", "completion", "finish_reason", "masked_by", "error", "note", "x\x1b[0m"),
            HOSTILE,
        )
        chat = json.dumps([{"role": HOSTILE, "content": HOSTILE}])
        writer.write_completions(1, [row(0, 0, 1.0) | bad, row(1, 0, 1.0) | bad | {"prompt": chat, "turns": 1}])
        writer.write_completions(2, [row(0, 0, 1.0, completion="y" * 1_500_000)])
        writer.append_metrics(2, {"reward": 1.0})
    lines = tmp_path / "lines.jsonl"
    for arguments in (("--step", "1"), ("--step", "1", "--worst"), ()):
        status, out, _ = covey("report", str(tmp_path / "run"), *arguments)
        assert status == 0
        assert all(char == "\n" or char.isprintable() for char in out)
        assert ("[bold]b[/bold] :smile:" in out) == bool(arguments)
    _, out, _ = covey("report", str(tmp_path / "run"), "--step", "last")
    assert "y" * 2000 + " [... cut after 2000 characters; -o FILE.jsonl has all]" in out
    assert covey("report", str(tmp_path / "run"), "--step", "all", "-o", lines)[0] == 0
    assert all(char == "\n" or char.isprintable() for char in lines.read_text())
    assert len(lines.read_text()) > 500_000


def test_agents_episodes_are_told_as_they_were_played(tmp_path: Path, covey: Command) -> None:
    episode = row(0, 0, 1.0, turns=2, no_actions=1, ended="turns", finish_reason=None, error="it broke",
                  completion="a door\n> open it  [+1]\na room\n> hm  (no valid action)\n(turns)")  # fmt: skip
    with RunFolder.create(tmp_path / "run") as writer:
        writer.write_completions(1, [episode])
    _, out, _ = covey("report", str(tmp_path / "run"), "--step", "1")
    assert "3 tokens in 2 turns, 1 no action, turns" in out
    assert "    a door\n    > open it  [+1]\n    a room\n    > hm  (no valid action)\n    (turns)\n" in out
    assert "error: it broke" in out


def in_terminal(*command: str, pager: str) -> str:
    """What a program writes to a terminal of its own, with this pager."""
    main, other = pty.openpty()
    environment = {**os.environ, "PAGER": pager, "TERM": "xterm", "COLUMNS": "60"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment, close_fds=True)
    os.close(other)
    shown = b""
    try:
        while select.select([main], [], [], 60)[0]:
            try:
                piece = os.read(main, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(60) == 0, shown
    finally:
        process.kill()
        os.close(main)
    return shown.decode()


def test_a_terminal_gets_the_users_pager(run: Path) -> None:
    shown = in_terminal(sys.executable, "-m", "covey", "report", str(run), "--step", "2", pager="sed s/say/PAGED/")
    assert "PAGED 0 0" in shown
    assert "\x1b[1m" in shown
    # One that is left at once ends the command without an error.
    assert in_terminal(sys.executable, "-m", "covey", "report", str(run), "--step", "2", pager="true") == ""


def test_a_reader_who_leaves_early(run: Path) -> None:
    command = f"{sys.executable} -m covey report {run} --step all | head -n 1"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert len(found.stdout.splitlines()) == 1
    assert found.stderr == ""

"""Narrow and ASCII consoles, and commands that can be pasted."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from command import Command
from covey.cli import report
from covey.config import GRPOConfig
from covey.observe.console import accept_any_text, print_table
from covey.observe.run_folder import RunFolder
from covey.pytorch.models.loading import load_model
from covey.training.export import kept_weights


def printed(width: int, table: Table) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_a_table_keeps_whole_words_where_they_fit() -> None:
    """25 + 5 + 3 x 8 characters and six lines are 60: without padding all words are whole."""
    table = Table("metric", "", "a b", "s8", "s9")
    table.add_row("completions/clipped_ratio", "at 6 steps", *["0.200 (step 12)"] * 3)
    for width in (80, 60):
        lines = printed(width, table)
        assert max(map(len, lines)) <= width
        words = " ".join(lines).replace("│", " ").split()
        assert "completions/clipped_ratio" in words
        assert words.count("0.200") == 3
        assert "…" not in "".join(lines)
    narrow = Table("hardest", "visits", "question")
    narrow.add_row("a" * 64, "12", "b" * 40)
    lines = printed(40, narrow)  # no character is lost where nothing fits
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("a") == 64 + 1  # and that of "hardest"
    assert "".join(lines).count("b") == 40
    wide = Table("a", "b")
    wide.add_row("one two", "three")
    assert printed(200, wide)[3] == "│ one two │ three │"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `covey report` reads, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("a folder") / "rün 1"
    with RunFolder.create(folder) as run:
        run.write_config(GRPOConfig(output_dir=str(folder)).to_toml())
        run.append_metrics(1, {"reward": 0.5})
    (folder / "questions.jsonl").write_text(json.dumps({"step": 1, "answers": {"größe-17": [1, 4]}}) + "\n")
    return folder


def test_questions_on_a_narrow_screen(run: Path, covey: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("hardest", "visits", "right", "first", "last", "question", "größe-17", "25 %")
    for width in (80, 60):
        monkeypatch.setattr(report.out, "width", width)
        _, out, _ = covey("report", run)
        assert all(word in out for word in words)
        assert max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_an_ascii_console_shows_a_question_mark(run: Path, locale: dict[str, str]) -> None:
    command = [sys.executable, "-m", "covey", "report", str(run)]
    done = subprocess.run(command, env={**os.environ, **locale, "COLUMNS": "80"}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert b"gr??e-17" in done.stdout.replace(b"gr???", b"gr??")
    done.stdout.decode("ascii")


def test_a_stream_that_accepts_any_text() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    accept_any_text(stream)
    accept_any_text(io.StringIO())  # has no encoding: left alone
    stream.write("± 日本 \ud800")
    stream.flush()
    assert stream.buffer.getvalue() == b"? ?? ?"  # type: ignore[attr-defined]


def test_commands_in_advice_can_be_pasted(run: Path) -> None:
    folder = RunFolder.read(run)
    assert shlex.split(folder.how_to_continue().strip("`")) == ["covey", "resume", str(run)]
    (run / "adapter").mkdir()
    (run / "adapter" / "complete.json").write_text("{")
    for command, call in (("resume", lambda: kept_weights(folder, GRPOConfig())), ("export", lambda: load_model(run))):
        with pytest.raises(ValueError, match=f"covey {command}") as caught:
            call()
        assert shlex.split(str(caught.value).split("`")[1])[:3] == ["covey", command, str(run)]

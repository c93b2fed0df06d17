"""The run folder: what is written, read, locked, refused; and the model card, which says what the run folder says."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from covey import files
from covey.errors import RunFolderError
from covey.observe import RunFolder
from covey.observe.card import model_card
from covey.observe.records import JsonLines, plain, read_json_lines
from fakes import raises

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}


def test_a_new_run_has_its_layout_and_its_versions(tmp_path):
    with RunFolder.create(tmp_path / "runs" / "a") as run:
        run.write_config("seed = 1\n")
        versions = run.versions()
        assert (versions["numpy"], versions["cpu_count"]) == (np.__version__, os.cpu_count())
        assert {"python", "covey", "torch", "transformers", "peft", "platform"} <= set(versions)
        assert len(run.run_id) == 12
    jsonl = ("events.jsonl", "metrics.jsonl", "questions.jsonl")
    names = ("checkpoints", "completions", "config.toml", *jsonl, "run.lock", "versions.json")
    assert sorted(path.name for path in run.path.iterdir()) == sorted(names)


def test_create_refuses_another_run_and_says_how_to_go_on(tmp_path):
    with RunFolder.create(tmp_path / "a") as run:
        run.write_config("")
        run.append_metrics(1, {})
        run_id = run.run_id
    for begin in (RunFolder.check_new, RunFolder.create):
        raises(RunFolderError, f"steps: 1.*covey resume {tmp_path / 'a'}`, .*overwrite=true", begin, tmp_path / "a")
    with RunFolder.create(tmp_path / "a", resume=True) as run:
        assert run.run_id == run_id


def test_create_refuses_a_folder_of_other_things(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not touch")
    for path, why in ((".", r"is not empty \(it holds thesis.tex\)"), ("thesis.tex/a", "a part of the path is a file")):
        raises(RunFolderError, why, RunFolder.create, tmp_path / path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_start_that_was_killed_leaves_is_fine(tmp_path):
    (tmp_path / "versions.json.tmp-12-0123abcd").write_text("{")
    (tmp_path / "run.lock").write_text('{"pid": 99999999, "host": "x"}')
    with RunFolder.create(tmp_path) as run:
        assert not (tmp_path / "versions.json.tmp-12-0123abcd").exists()
        assert run.read_metrics() == []
        first_id = run.run_id
    RunFolder.check_new(tmp_path)
    with RunFolder.create(tmp_path) as run:  # killed before its config was written: begun anew
        assert run.run_id != first_id
        run.append_metrics(1, {})
    raises(RunFolderError, "another run", RunFolder.create, tmp_path)


def test_a_run_without_a_finished_step_is_replaced_and_any_other_where_asked_to(tmp_path):
    def begin(**how):
        RunFolder.check_new(tmp_path, **how)
        return RunFolder.create(tmp_path, **how)

    def fill(run, step):  # as a run does that a reward ends at its first step, and one that goes on
        run.write_config("seed = 1")
        run.append_metrics(step, {"eval/reward": 0.5})
        run.write_completions(step, [{"completion": "5"}], "eval")
        run.append_event("failed", "ZeroDivisionError")
        (run.checkpoints / f"step_{step:06d}").mkdir()
        for name in ("memory.json", "config_until_000002.toml"):
            (run.path / name).write_text("{}")

    with begin() as run:
        fill(run, 0)
        (tmp_path / "thesis.tex").touch()  # not Covey's, and never deleted
    ids = {run.run_id}
    for step, how in ((7, {}), (3, {"overwrite": True})):
        with begin(**how) as run:
            ids.add(run.run_id)
            assert (run.read_metrics(), run.read_events(), run.completion_steps("eval")) == ([], [], [])
            assert not run.config_path.exists()
            assert not any(run.checkpoints.iterdir())
            raises(RunFolderError, "already open for writing", RunFolder.check_new, tmp_path, overwrite=True)
            fill(run, step)
    assert len(ids) == 3
    present = {path.name for path in tmp_path.iterdir()}
    assert present - {"thesis.tex"} >= {"memory.json", "config_until_000002.toml", "versions.json"}
    raises(RunFolderError, "finished steps: 3", begin)
    run.metrics_path.write_text("")  # lost, but what was learned is there
    (tmp_path / "completions" / "eval_000003.parquet").unlink()
    (tmp_path / "checkpoints" / "step_000003").rmdir()
    run.best.mkdir()
    raises(RunFolderError, "finished steps: 0", begin)
    begin(overwrite=True).close()
    assert "thesis.tex" in {path.name for path in tmp_path.iterdir()}


def test_checking_changes_nothing(tmp_path):
    RunFolder.check_new(tmp_path / "a" / "b")
    for begin in (RunFolder.check_new, RunFolder.create):
        raises(RunFolderError, "the run needs about 1000000", begin, tmp_path / "a", needed_bytes=10**15)
    for open_folder in (RunFolder.open, RunFolder.read):
        raises(RunFolderError, "holds no run", open_folder, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_explained(tmp_path):
    run = tmp_path / "run"
    RunFolder.create(run).close()
    for folder, begin in ((tmp_path, RunFolder.create), (run, RunFolder.open)):
        folder.chmod(0o555)
        raises(RunFolderError, f"{folder}: cannot write: permission denied", begin, folder)
        folder.chmod(0o755)


def test_metrics_come_back_with_null_for_what_is_no_number(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run.append_metrics(1, {"reward": np.float32(0.5), "loss": float("nan"), "kl": float("inf"), "n": np.int64(3)})
        run.append_metrics(2, {"reward": 0.1, "phase": 0, "nested": {"a": [1.0, float("-inf")]}})
        first = run.metrics_path.read_text().splitlines()[0]
        assert first == '{"step": 1, "reward": 0.5, "loss": null, "kl": null, "n": 3}'
        # a reader needs no lock and may look while the run writes
        second = {"step": 2, "reward": 0.1, "phase": 0, "nested": {"a": [1.0, None]}}
        assert RunFolder.read(tmp_path).read_metrics()[1] == second
    assert plain(torch.tensor([1.5, float("nan")])) == [1.5, None]
    assert plain((np.bool_(True), None, "x", Path("a"))) == [True, None, "x", "a"]


def test_completions_come_back(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "2+3"}], "completion": "5", "reward": 1.0, "mixed": 1,
         "rewards": {"exact": np.float64(1.0), "format": float("nan")}, "advantage": np.float32(0.5),
         "length": np.int64(2), "finish_reason": "stop"},
        {"prompt": "2+4", "completion": "half a pair \ud800 \x1b[2J \x00 <b>", "reward": None, "mixed": "one",
         "rewards": {"exact": 0, "format": None}, "truncated": True},
    ]  # fmt: skip
    with RunFolder.create(tmp_path) as run:
        assert run.write_completions(12, rows) == run.completions / "step_000012.parquet"
        first, second = run.read_completions(12)
        assert run.completion_steps() == [12]
        assert run.write_completions(13, []) is None
    assert json.loads(first["prompt"]) == [{"role": "user", "content": "2+3"}]
    assert (first["completion"], first["length"], first["finish_reason"]) == ("5", 2, "stop")
    assert (first["rewards/exact"], first["rewards/format"], first["advantage"]) == (1.0, None, 0.5)
    assert second["completion"] == "half a pair ? \x1b[2J \x00 <b>"
    assert (second["rewards/exact"], second["reward"], second["truncated"]) == (0.0, None, True)
    assert (first["mixed"], second["mixed"]) == ("1", "one")


def test_a_torn_last_line_is_dropped_on_open_and_not_read(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run.append_metrics(1, {"reward": 0.5})
    with run.metrics_path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert [record["step"] for record in RunFolder.read(tmp_path).read_metrics()] == [1]
    with RunFolder.open(tmp_path) as run:
        run.append_metrics(2, {"reward": 0.6})
        assert [record["reward"] for record in run.read_metrics()] == [0.5, 0.6]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    for line, words in (
        ("[]", "not a JSON object"),
        ('{"step": 1' + "0" * 30 + "}", "none of this file's"),  # numbers that no float has
        ('{"step": 2, "reward": 1' + "0" * 400 + "}", "none of this file's"),
    ):
        with RunFolder.create(tmp_path / str(len(line))) as run:
            run.metrics_path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
        raises(RunFolderError, rf"metrics\.jsonl: line 2 is {words}", RunFolder.read(run.path).read_metrics)


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"step": 1})
    write, calls = os.write, []

    def short_write_then_full(handle, data):
        calls.append(len(data))
        if len(calls) == 1:
            return write(handle, bytes(data)[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short_write_then_full)
        raises(RunFolderError, "the disk is full", lines.append, {"step": 2})
    assert (len(calls), (tmp_path / "a.jsonl").read_text()) == (2, '{"step": 1}\n')
    lines.append({"step": 3})
    lines.close()
    assert [record["step"] for record in read_json_lines(tmp_path / "a.jsonl")] == [1, 3]


def test_truncate_after_forgets_later_steps(tmp_path):
    def run_steps(run, *numbers):
        for step in numbers:
            run.append_metrics(step, {"reward": 1 / (3 * step)})
            run.write_completions(step, [{"completion": str(step)}])
            run.write_completions(step, [{"correct": True}], "eval")
        run.append_metrics(step, {"eval/accuracy": step / 10})
        return run.metrics_path.read_bytes()

    with RunFolder.create(tmp_path) as run:
        short, whole = run_steps(run, 1, 2, 3), run_steps(run, 4, 5)
    with RunFolder.open(tmp_path) as run:
        run.truncate_after(3)
        assert run.metrics_path.read_bytes() == short
        assert run.completion_steps() == run.completion_steps("eval") == [1, 2, 3]
        assert (run.read_completions(3, "eval"), run_steps(run, 4, 5)) == ([{"correct": True}], whole)
        assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 3, 4, 5, 5]


def test_events_and_the_log_tell_of_a_resume_with_other_versions(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run.append_event("doctor", "all rewards are 0 \ud800")
        assert run.log_path.read_text().endswith(" doctor: all rewards are 0 ?\n")
        files.write_atomically(run.versions_path, json.dumps({**run.versions(), "torch": "0.4"}))
    with RunFolder.open(tmp_path) as run:
        first, second = run.read_events()
        assert (first["kind"], first["message"]) == ("doctor", "all rewards are 0 \ud800")
        assert ("torch 0.4 -> " in second["message"], run.versions()["torch"]) == (True, "0.4")


def test_damaged_versions_are_a_clear_error(tmp_path):
    RunFolder.create(tmp_path).close()
    for text in ("", "[]", "\x00", "{}"):
        (tmp_path / "versions.json").write_text(text)
        raises(RunFolderError, r"versions\.json is damaged", RunFolder.open, tmp_path)
    (tmp_path / "versions.json").write_text('{"run_id": "0123456789ab"}')
    RunFolder.open(tmp_path).close()  # the failed opens gave the lock back


def test_one_writer_in_and_among_processes_and_a_dead_one_does_not_count(tmp_path):
    already = "already open for writing in this process"
    with RunFolder.create(tmp_path / "own") as run, pytest.raises(RunFolderError, match=already):
        RunFolder.open(run.path)
    RunFolder.open(run.path).close()
    script = """
import os, sys, time
from covey.observe.run_folder import RunFolder
run = RunFolder.create(sys.argv[1])
run.append_metrics(1, {})
child = os.fork()
if child == 0:
    time.sleep(60)  # an orphaned worker, which must not keep the lock
print(child, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "other")]
    writer = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    orphan = int(writer.stdout.readline())
    try:
        for begin in (RunFolder.open, RunFolder.check_new):
            raises(RunFolderError, f"being written by process {writer.pid} on ", begin, tmp_path / "other")
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        os.kill(orphan, 0)
        with RunFolder.open(tmp_path / "other") as run:
            run.append_metrics(2, {})
    finally:
        os.kill(orphan, signal.SIGKILL)
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_without_file_locks_the_process_id_decides(tmp_path, monkeypatch):
    def no_locks(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    RunFolder.create(tmp_path).close()
    lock = tmp_path / "run.lock"
    lock.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    raises(RunFolderError, f"process {os.getppid()}", RunFolder.open, tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for stale in (json.dumps({"pid": ended.pid, "host": socket.gethostname()}), "garbage", ""):
        lock.write_text(stale)
        RunFolder.open(tmp_path).close()


def test_the_card_says_what_the_run_folder_says(tmp_path):
    def evaluate(step, right, low, high):
        accuracy = {"eval/accuracy": right, "eval/accuracy_low": low, "eval/accuracy_high": high}
        run.append_metrics(step, {"eval/reward": right, **accuracy, "eval/num_completions": 200.0})

    with RunFolder.create(tmp_path / "run") as run:
        model, data = 'model = {model = "me/base", use_peft = false, lora_r = 16}', 'data = {task = "arithmetic"}'
        run.write_config(f"{model}\n{data}\noptim = {{learning_rate = 1e-5}}\nrun = {{seed = 3}}\n")
        evaluate(0, 0.41, 0.344, 0.479)
        for step in (1, 2, 3):
            run.append_metrics(step, {"reward": 0.5, "rewards/right/mean": 0.5, "rewards/short/mean": 0.1})
        evaluate(2, 0.625, 0.556, 0.689)
        evaluate(3, 0.9, 0.85, 0.93)
    card = ModelCard(model_card(run, name="me/mine", base_model="me/base", tags=["numbers"]))
    assert (card.data.base_model, card.data.eval_results[0].metric_value) == ("me/base", 0.9)
    assert {"covey", "numbers"} <= set(card.data.tags)
    for sentence in (
        "| before | 0 | accuracy 41 % | 34.4 to 47.9 % | 200 |",
        "| after | 3 | accuracy 90 % | 85 to 93 % | 200 |",
        *("Data: arithmetic", "Rewards: right, short", "`optim.learning_rate`: 1e-05", "`run.seed`: 3"),
    ):
        assert sentence in card.text
    assert "lora_r" not in card.text  # all weights were trained
    assert "learning_curve.png" not in card.text  # there is none
    earlier = model_card(run, name="me/mine", base_model="me/base", step=2, kind="adapter")
    assert "| after | 2 | accuracy 62.5 % | 55.6 to 68.9 % | 200 |" in earlier
    assert ("90 %" in earlier, "AutoPeftModelForCausalLM" in earlier) == (False, True)
    local = model_card(run, name="mine", base_model=str(tmp_path), dataset_name="me/rows")
    assert str(tmp_path) not in local
    assert (ModelCard(local).data.base_model, ModelCard(local).data.datasets) == (None, ["me/rows"])

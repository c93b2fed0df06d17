import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from covey import files
from covey.errors import RunFolderError
from covey.observe import RunFolder
from covey.observe.records import JsonLines, plain, read_json_lines

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}


def test_a_new_run_has_its_layout_and_its_versions(tmp_path):
    with RunFolder.create(tmp_path / "runs" / "a") as run:
        run.write_config("seed = 1\n")
        versions = run.versions()
        assert versions["numpy"] == np.__version__
        assert versions["cpu_count"] == os.cpu_count()
        assert {"python", "covey", "torch", "transformers", "peft", "platform"} <= set(versions)
        assert len(run.run_id) == 12
        names = sorted(path.name for path in run.path.iterdir())
    assert names == [
        "checkpoints",
        "completions",
        "config.toml",
        "events.jsonl",
        "metrics.jsonl",
        "questions.jsonl",
        "run.lock",
        "versions.json",
    ]


def test_two_runs_have_two_ids(tmp_path):
    with RunFolder.create(tmp_path / "a") as a, RunFolder.create(tmp_path / "b") as b:
        assert a.run_id != b.run_id


def test_create_refuses_another_run_and_says_how_to_go_on(tmp_path):
    with RunFolder.create(tmp_path / "a") as run:
        run.write_config("")
        run_id = run.run_id
    with pytest.raises(RunFolderError, match="covey resume"):
        RunFolder.check_new(tmp_path / "a")
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(tmp_path / "a")
    assert f"covey resume {tmp_path / 'a'}" in str(caught.value)
    assert "another run.output_dir" in str(caught.value)
    with RunFolder.create(tmp_path / "a", resume=True) as run:
        assert run.run_id == run_id


def test_create_refuses_a_folder_of_other_things(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(RunFolderError, match=r"is not empty \(it holds thesis.tex\)"):
        RunFolder.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_or_the_remains_of_a_killed_start_are_fine(tmp_path):
    (tmp_path / "versions.json.tmp-12-0123abcd").write_text("{")
    (tmp_path / "run.lock").write_text('{"pid": 99999999, "host": "x"}')
    with RunFolder.create(tmp_path) as run:
        assert not (tmp_path / "versions.json.tmp-12-0123abcd").exists()
        assert run.read_metrics() == []


def test_a_run_killed_before_its_config_was_written_is_begun_anew(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run_id = run.run_id
    RunFolder.check_new(tmp_path)
    with RunFolder.create(tmp_path) as run:
        assert run.run_id != run_id
        run.append_metrics(1, {})
    with pytest.raises(RunFolderError, match="another run"):
        RunFolder.create(tmp_path)


def test_checking_changes_nothing(tmp_path):
    RunFolder.check_new(tmp_path / "a" / "b")
    with pytest.raises(RunFolderError, match="needs about 1000000"):
        RunFolder.check_new(tmp_path / "a", needed_bytes=10**15)
    assert list(tmp_path.iterdir()) == []


def test_open_needs_a_run(tmp_path):
    for open_folder in (RunFolder.open, RunFolder.read):
        with pytest.raises(RunFolderError, match="holds no run"):
            open_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_found_out_at_the_start(tmp_path):
    with pytest.raises(RunFolderError, match="the run needs about 1000000"):
        RunFolder.create(tmp_path / "a", needed_bytes=10**15)
    assert not RunFolder.is_run(tmp_path / "a")


def test_a_path_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="a part of the path is a file"):
        RunFolder.create(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_explained(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(RunFolderError, match="permission denied"):
        RunFolder.create(tmp_path)


def test_metrics_come_back_with_null_for_what_is_no_number(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run.append_metrics(1, {"reward": np.float32(0.5), "loss": float("nan"), "kl": float("inf"), "n": np.int64(3)})
        run.append_metrics(2, {"reward": 0.1, "phase": 0, "nested": {"a": [1.0, float("-inf")]}})
        assert run.metrics_path.read_text().splitlines()[0] == (
            '{"step": 1, "reward": 0.5, "loss": null, "kl": null, "n": 3}'
        )
        # a reader needs no lock and may look while the run writes
        assert RunFolder.read(tmp_path).read_metrics()[1] == {
            "step": 2,
            "reward": 0.1,
            "phase": 0,
            "nested": {"a": [1.0, None]},
        }


def test_plain_values():
    import torch

    assert plain(torch.tensor([1.5, float("nan")])) == [1.5, None]
    assert plain((np.bool_(True), None, "x", Path("a"))) == [True, None, "x", "a"]


def test_completions_come_back(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": "2+3"}],
            "completion": "5",
            "rewards": {"exact": np.float64(1.0), "format": float("nan")},
            "reward": 1.0,
            "advantage": np.float32(0.5),
            "length": np.int64(2),
            "finish_reason": "stop",
            "mixed": 1,
        },
        {
            "prompt": "2+4",
            "completion": "half a pair \ud800 \x1b[2J \x00 <b>",
            "rewards": {"exact": 0, "format": None},
            "reward": None,
            "mixed": "one",
            "truncated": True,
        },
    ]
    with RunFolder.create(tmp_path) as run:
        path = run.write_completions(12, rows)
        assert path == run.completions / "step_000012.parquet"
        first, second = run.read_completions(12)
        assert run.completion_steps() == [12]
        assert run.write_completions(13, []) is None
    assert json.loads(first["prompt"]) == [{"role": "user", "content": "2+3"}]
    assert (first["completion"], first["length"], first["finish_reason"]) == ("5", 2, "stop")
    assert (first["rewards/exact"], first["rewards/format"], first["advantage"]) == (1.0, None, 0.5)
    assert second["completion"] == "half a pair ? \x1b[2J \x00 <b>"
    assert (second["rewards/exact"], second["reward"], second["truncated"]) == (0.0, None, True)
    assert (first["mixed"], second["mixed"]) == ("1", "one")


def test_a_damaged_table_is_a_clear_error(tmp_path):
    with RunFolder.create(tmp_path) as run:
        (run.completions / "step_000001.parquet").write_bytes(b"PAR1 no more")
        with pytest.raises(RunFolderError, match="no readable Parquet"):
            run.read_completions(1)
        with pytest.raises(RunFolderError, match="does not exist"):
            run.read_completions(2)


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
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[]\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: line 2 is no JSON object"):
        read_json_lines(path)


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"step": 1})
    write = os.write
    calls = []

    def short_write_then_full(handle, data):
        calls.append(len(data))
        if len(calls) == 1:
            return write(handle, bytes(data)[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short_write_then_full)
        with pytest.raises(RunFolderError, match="the disk is full"):
            lines.append({"step": 2})
    assert len(calls) == 2
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 1}\n'
    lines.append({"step": 3})
    lines.close()
    assert [record["step"] for record in read_json_lines(tmp_path / "a.jsonl")] == [1, 3]


def test_truncate_after_forgets_later_steps(tmp_path):
    with RunFolder.create(tmp_path) as run:
        for step in range(1, 6):
            run.append_metrics(step, {"reward": step / 10})
            run.write_completions(step, [{"completion": str(step)}])
            run.write_evaluation(step, [{"correct": True}])
        run.append_metrics(3, {"eval/accuracy": 0.3})
        run.append_metrics(5, {"eval/accuracy": 0.5})
        run.truncate_after(3)
        assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 3]
        assert run.completion_steps() == run.evaluation_steps() == [1, 2, 3]
        assert run.read_evaluation(3) == [{"correct": True}]
        run.append_metrics(4, {"reward": 9.0})
        assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 3, 4]


def test_a_replayed_run_writes_the_same_metrics(tmp_path):
    def steps(run, numbers):
        for step in numbers:
            run.append_metrics(step, {"reward": 1 / (3 * step)})

    with RunFolder.create(tmp_path / "straight") as straight:
        steps(straight, range(1, 9))
    with RunFolder.create(tmp_path / "resumed") as resumed:
        steps(resumed, range(1, 7))
    with RunFolder.open(tmp_path / "resumed") as resumed:
        resumed.truncate_after(4)
        steps(resumed, range(5, 9))
    assert resumed.metrics_path.read_bytes() == straight.metrics_path.read_bytes()


def test_events_and_log(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run.append_event("doctor", "all rewards are 0 \ud800")
        (event,) = run.read_events()
        assert (event["kind"], event["message"]) == ("doctor", "all rewards are 0 \ud800")
        assert run.log_path.read_text().endswith(" doctor: all rewards are 0 ?\n")


def test_a_resume_with_other_versions_is_noted(tmp_path):
    with RunFolder.create(tmp_path) as run:
        versions = {**run.versions(), "torch": "0.4"}
        files.write_atomically(run.versions_path, json.dumps(versions))
    with RunFolder.open(tmp_path) as run:
        (event,) = run.read_events()
        assert "torch 0.4 -> " in event["message"]
        assert run.versions()["torch"] == "0.4"


@pytest.mark.parametrize("line", ['{"step": 1' + "0" * 30 + "}", '{"step": 2, "reward": 1' + "0" * 400 + "}"])
def test_a_number_that_no_float_has_is_damage(tmp_path, line):
    with RunFolder.create(tmp_path / "run") as run:
        run.metrics_path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: line 2"):
        RunFolder.read(tmp_path / "run").read_metrics()


def test_damaged_versions_are_a_clear_error(tmp_path):
    with RunFolder.create(tmp_path):
        pass
    for text in ("", "[]", "\x00", "{}"):
        (tmp_path / "versions.json").write_text(text)
        with pytest.raises(RunFolderError, match=r"versions\.json is damaged"):
            RunFolder.open(tmp_path)
    (tmp_path / "versions.json").write_text('{"run_id": "0123456789ab"}')
    RunFolder.open(tmp_path).close()  # the failed opens gave the lock back


def test_publishing_best(tmp_path):
    with RunFolder.create(tmp_path) as run:
        for text in ("first", "second"):
            with run.publishing(run.best) as aside:
                (aside / "adapter.json").write_text(text)
        assert (run.best / "adapter.json").read_text() == "second"
        assert files.folder_problem(run.best) == ""


def test_one_writer_in_a_process(tmp_path):
    with (
        RunFolder.create(tmp_path),
        pytest.raises(RunFolderError, match="already open for writing in this process"),
    ):
        RunFolder.open(tmp_path)
    RunFolder.open(tmp_path).close()


def test_one_writer_among_processes_and_a_dead_one_does_not_count(tmp_path):
    script = textwrap.dedent(
        """
        import os, sys, time
        from covey.observe.run_folder import RunFolder
        run = RunFolder.create(sys.argv[1])
        child = os.fork()
        if child == 0:
            time.sleep(60)  # an orphaned worker, which must not keep the lock
        print(child, flush=True)
        time.sleep(60)
        """
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    orphan = int(writer.stdout.readline())
    try:
        with pytest.raises(RunFolderError, match=f"being written by process {writer.pid} on "):
            RunFolder.open(tmp_path)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        os.kill(orphan, 0)
        with RunFolder.open(tmp_path) as run:
            run.append_metrics(1, {})
    finally:
        os.kill(orphan, signal.SIGKILL)
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_without_file_locks_the_process_id_decides(tmp_path, monkeypatch):
    import errno
    import fcntl
    import socket

    def no_locks(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with RunFolder.create(tmp_path):
        pass
    lock = tmp_path / "run.lock"
    lock.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    with pytest.raises(RunFolderError, match=f"process {os.getppid()}"):
        RunFolder.open(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for stale in (json.dumps({"pid": ended.pid, "host": socket.gethostname()}), "garbage", ""):
        lock.write_text(stale)
        RunFolder.open(tmp_path).close()

"""Checkpoints in transformers' layout: whole or not at all, whatever kills a run; the newest whole one is taken."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl_runs import made

from covey.errors import CheckpointError
from covey.files import publishing

SMALL = {"max_completion_length": 4, "save_steps": 1}


@pytest.fixture(scope="module")
def stopped(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with checkpoint-1, 2 and 3."""
    base = tmp_path_factory.mktemp("stopped") / "out"
    made(model_folder, base, **SMALL).train()
    return base


@pytest.fixture
def taken(make: Any, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """What `train` takes of Covey's checkpoints, in a copy of the stopped run at `tmp_path / "out"`."""
    shutil.copytree(stopped, tmp_path / "out")
    trainer = make(out=tmp_path / "out", **SMALL)

    def stop(resume_from_checkpoint: str) -> None:
        raise LookupError(Path(resume_from_checkpoint).name)

    monkeypatch.setattr(trainer.run, "train", stop)

    def take(wanted: Any) -> str:
        with pytest.raises(LookupError) as found:
            trainer.train(resume_from_checkpoint=wanted)
        return str(found.value)

    take.trainer = trainer  # type: ignore[attr-defined]
    return take


def test_damage_to_any_file_of_the_newest_costs_that_one_only(taken: Any, tmp_path: Path) -> None:
    """True takes the one before; the damaged one by its name is one error, which names the file."""
    newest = tmp_path / "out" / "checkpoint-3"
    assert taken(True) == taken(str(newest)) == "step_000003"
    inner = tmp_path / "out" / "covey" / "checkpoints" / "step_000003"
    files = [path for path in (*newest.iterdir(), *inner.iterdir()) if path.is_file()]
    assert {"trainer_state.json", "covey.json", "model.safetensors", "optimizer.safetensors"} <= {p.name for p in files}
    for path in files:
        content = path.read_bytes()
        for left in (content[: len(content) // 2], b"", bytes(len(content)), None):
            path.unlink() if left is None else path.write_bytes(left)
            assert taken(True) == "step_000002", f"{path.name} {left!r:.9}"
            with pytest.raises(CheckpointError, match="checkpoint-3") as error:
                taken.trainer.train(resume_from_checkpoint=str(newest))
            assert "\n" not in str(error.value)
            path.write_bytes(content)
    assert taken(True) == "step_000003"


def test_all_damaged_or_none_is_one_error(taken: Any, tmp_path: Path) -> None:
    folders = [tmp_path / "out" / f"checkpoint-{number}" for number in (1, 2, 3)]
    for folder in folders:
        (folder / "trainer_state.json").write_text('{"global_step": ')
    with pytest.raises(CheckpointError, match=r"none of the checkpoints .* checkpoint-3: trainer_state.json has 16"):
        taken.trainer.train(resume_from_checkpoint=True)
    for folder in folders:
        shutil.rmtree(folder)
    for wanted, message in ((True, "no checkpoint-N"), (str(folders[0]), "no such folder")):
        with pytest.raises(CheckpointError, match=message):
            taken.trainer.train(resume_from_checkpoint=wanted)


def test_what_does_not_belong_to_a_checkpoint(taken: Any, tmp_path: Path) -> None:
    """Remains of killed writes and of others' trainers are passed over; what a callback adds does no harm."""
    out = tmp_path / "out"
    (out / "checkpoint-3" / "notes.txt").write_text("of a callback")
    (out / "checkpoint-10").mkdir()
    (out / "checkpoint-10" / "trainer_state.json").write_text("{}")
    shutil.copytree(out / "checkpoint-3", out / "checkpoint-4.tmp-7-0123abcd")
    (out / "checkpoint-9").write_text("a file")
    assert taken(True) == "step_000003"


def test_json_that_is_none_is_found_though_its_hash_is_right(taken: Any, tmp_path: Path) -> None:
    before, newest = (tmp_path / "out" / f"checkpoint-{number}" for number in (2, 3))
    for name, text in (("trainer_state.json", "[]"), ("trainer_state.json", "null"), ("covey.json", "{}")):
        with publishing(newest) as aside:
            shutil.copytree(before, aside, ignore=shutil.ignore_patterns("COMPLETE"), dirs_exist_ok=True)
            (aside / name).write_text(text)
        assert taken(True) == "step_000002"


class Killed(BaseException):
    """Nothing runs after it, no cleaning up either."""


@pytest.mark.slow
def test_a_kill_at_any_moment(taken: Any, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 is saved again with a limit of one: whenever it is killed, a whole checkpoint can be taken."""
    trainer, out = taken.trainer, tmp_path / "out"
    never = 10**9
    calls, last = [0], [never]

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] >= last[0]:
                raise Killed
            return function(*values, **options)

        return call

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    monkeypatch.setattr(Path, "write_text", guarded(Path.write_text))

    def save(kill_at: int) -> None:
        last[0] = never
        shutil.rmtree(out)
        shutil.copytree(stopped, out)
        trainer.state.global_step, trainer.args.save_total_limit = 3, 1
        calls[0], last[0] = 0, kill_at
        trainer._save_checkpoint()

    save(never)
    writes = calls[0]
    assert writes > 20
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]
    for kill_at in range(1, writes + 1):
        with pytest.raises(Killed):
            save(kill_at)
        last[0] = never
        assert taken(True) in ("step_000002", "step_000003"), kill_at
        trainer._save_checkpoint()  # the next save clears what was left
        assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"], kill_at


def test_a_checkpoint_never_outlives_the_one_it_goes_with(make: Any, tmp_path: Path) -> None:
    """With a limit of one, each `checkpoint-N` that is there can be resumed from at every moment."""

    class Watching(TrainerCallback):
        seen = 0

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            inner = tmp_path / "covey" / "checkpoints"
            for path in tmp_path.glob("checkpoint-*/covey.json"):
                assert (inner / json.loads(path.read_text())["checkpoint"]).is_dir()
                self.seen += 1
            assert len(list(inner.iterdir())) == min(state.global_step, 2)

    watching = Watching()
    make(**SMALL, save_total_limit=1, callbacks=[watching]).train()
    assert watching.seen == 3


def test_resuming_past_a_damaged_one_gives_the_same_numbers(make: Any, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "out")
    (tmp_path / "out" / "checkpoint-3" / "model.safetensors").write_bytes(b"cut")
    (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").write_text("")
    make(out=tmp_path / "out", **SMALL).train(resume_from_checkpoint=True)
    whole, again = (load_file(out / "checkpoint-3" / "model.safetensors") for out in (stopped, tmp_path / "out"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)

"""A damaged or forged run folder stops a resume with one sentence, and nothing in it is touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import build, events, trained

from covey import GRPOTrainer
from covey.errors import CoveyError
from covey.functions import load_function, user_file_hashes
from covey.observe.run_folder import RunFolder
from covey.training.checkpoint import changed_settings, checked_state, find_checkpoint, load_checkpoint, lost_lines
from fakes import SMALL

LAST, POLICY = "checkpoints/step_000002", "policy.safetensors"


def length(completions: list[str], **columns: Any) -> list[float]:
    return [len(set(text)) / 8 for text in completions]


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    settings = SMALL | {"model": model_folder, "output_dir": tmp_path_factory.mktemp("whole") / "run"}
    short = {"num_generations": 2, "prompts_per_step": 1, "max_completion_length": 4, "save_steps": 1}
    return settings["output_dir"], trained(settings | short, length, learning_rate=1e-5)


@pytest.fixture
def run(whole: Any, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def sign(folder: Path) -> None:
    """As somebody would who computes the hashes anew."""
    files = [path for path in folder.iterdir() if path.name != "COMPLETE"]
    entries = {p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in files}
    (folder / "COMPLETE").write_text(json.dumps({"files": entries}))


Damage = Callable[[Path], Any]


def state(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(run: Path) -> None:
        document = json.loads((run / LAST / "state.json").read_text())
        change(document)
        (run / LAST / "state.json").write_text(json.dumps(document))
        sign(run / LAST)

    return damage


def tensors(group: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(run: Path) -> None:
        values = load_file(run / LAST / f"{group}.safetensors")
        change(values)
        save_file(values, run / LAST / f"{group}.safetensors", metadata={"aliases": "{}"})
        sign(run / LAST)

    return damage


def a_pipe(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


def emptied(*kept: str) -> Damage:
    """Nothing is left but what every run has at its start, and `kept`."""

    def damage(run: Path) -> None:
        for path in run.iterdir():
            if path.name not in ("versions.json", "config.toml", "run.lock", *kept):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in {"metrics.jsonl", "questions.jsonl", "events.jsonl"} - {*kept}:
            (run / name).touch()
        for name in {"completions", "checkpoints"} - {*kept}:
            (run / name).mkdir()

    return damage


def lines(change: Callable[[list[str]], list[str]], name: str = "metrics.jsonl") -> Damage:
    def damage(run: Path) -> None:
        (run / name).write_text("".join(change((run / name).read_text().splitlines(keepends=True))))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "all broken": (
        lambda run: [path.write_bytes(b"x") for path in run.glob(f"checkpoints/*/{POLICY}")],
        "none of its 2 checkpoints is whole .*restore the folder checkpoints/",
    ),
    "all gone": (lambda run: shutil.rmtree(run / "checkpoints"), "reach step 2, and there is no checkpoint left"),
    "events left": (emptied("events.jsonl"), "no checkpoint left, though events.jsonl says 'step 1 is saved'"),
    "tables left": (emptied("completions"), "reach step 2, and there is no checkpoint left, though run.save_steps"),
    "adapter left": (emptied("adapter"), "no checkpoint left, though adapter/ is there"),
    "best left": (lambda run: (emptied()(run), (run / "best").mkdir()), "though best/ holds weights"),
    "names nothing": (lambda run: (run / LAST / "COMPLETE").write_text('{"files": {}}'), "names no files.*delete it"),
    "empty state": (state(lambda d: d.update(state={})), "lacks trainer, plan, random"),
    "no groups": (state(lambda d: d.update(groups=[])), "lacks the tensors of policy"),
    "no state": (state(lambda d: d.clear()), "cannot be read"),
    "of another step": (state(lambda d: d.update(step=1)), "is of step 1, not of that in its name"),
    "of no run": (state(lambda d: d.update(run_id="")), "belongs to run"),
    "negative": (state(lambda d: d["state"]["trainer"].update(global_step=-3)), "global_step=-3"),
    "text": (state(lambda d: d["state"]["trainer"].update(seconds="x")), "seconds='x'"),
    "huge": (state(lambda d: d["state"]["trainer"].update(data_position=10**30)), "data_position=1000"),
    "random": (state(lambda d: d["state"].update(random={"cpu": [1]})), "its state is damaged"),
    "phase": (state(lambda d: d["state"]["plan"].update(start={"step": "x"})), "its state is damaged"),
    "budget": (state(lambda d: d["state"].update(tokens_per_micro_batch=True)), "tokens_per_micro_batch=True"),
    "NaN weights": (tensors("policy", lambda t: next(iter(t.values())).fill_(float("nan"))), "holds NaN"),
    "NaN moments": (tensors("optimizer", lambda t: next(iter(t.values())).fill_(float("inf"))), "holds NaN or inf"),
    "no moments": (tensors("optimizer", lambda t: t.clear()), "moments are empty"),
    "a moment lost": (tensors("optimizer", lambda t: t.pop(min(t))), "lacks exp_avg of some"),
    "text for a number": (lines(lambda ls: [ls[0].replace('"reward": ', '"reward": "x", "_": ')]), "line 1 is none of"),
    "NaN for a number": (lines(lambda ls: [ls[0].replace('"reward": ', '"reward": NaN, "_": ')]), "line 1 is none of"),
    "whole numbers": (tensors("policy", lambda t: t.update({k: v.int() for k, v in t.items()})), "is torch.int32"),
    "a pipe": (a_pipe, "metrics.jsonl: is no file"),
    "no object": (lambda run: (run / "versions.json").write_text("[]"), "versions.json is damaged"),
    "no step": (lambda run: (run / "metrics.jsonl").write_text('{"step": "x"}\n'), "line 1 is none of this file's"),
    "a line twice": (lines(lambda ls: [*ls, ls[-1]]), "metrics.jsonl has a line of step 2 after one of step 2"),
    "out of order": (lines(lambda ls: ls[::-1]), "metrics.jsonl has a line of step 1 after one of step 2"),
    "folder": (lambda run: ((run / "log.txt").unlink(), (run / "log.txt").mkdir()), "log.txt: is no file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_clear_error(whole: Any, run: Path, name: str) -> None:
    (damage, message), made = DAMAGE[name], whole[1]
    damage(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.lock"}
    made.args = made.args.replace(output_dir=run)
    with pytest.raises(CoveyError, match=message):
        made.train(resume_from_checkpoint=True)
    assert {path: path.read_bytes() for path in before} == before


def test_an_evaluation_that_left_a_checkpoint_is_a_sign_of_it(whole: Any, run: Path) -> None:
    """With load_best_model_at_end, the evaluation at step 0 had left a checkpoint before step 1 began."""
    config, notes = whole[1].args.replace(save_steps=50), []
    emptied()(run)
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n{"step": 1, "phase": 0}\n')
    assert find_checkpoint(RunFolder.read(run), config, notes) is None
    assert notes == ["the run was stopped in step 2, before its first checkpoint: it begins again"]
    best = config.replace(load_best_model_at_end=True)
    with pytest.raises(CoveyError, match="reach step 1, and there is no checkpoint left, though it was evaluated at"):
        find_checkpoint(RunFolder.read(run), best, notes)
    nothing = '{"step": 0, "eval/reward": 0.5, "eval/num_completions": 0}\n{"step": 1, "phase": 0}\n'
    (run / "metrics.jsonl").write_text(nothing)
    assert find_checkpoint(RunFolder.read(run), best, notes) is None


def test_settings_and_files_that_differ_from_the_checkpoints_are_named(whole: Any, tmp_path: Path) -> None:
    checkpoint, config = load_checkpoint(whole[0] / LAST), whole[1].args.replace(output_dir=whole[0])
    assert changed_settings(checkpoint, config.replace(logging_steps=7)) == []
    assert changed_settings(checkpoint, config.replace(learning_rate=0.5, num_generations=4)) == [
        "settings differ from those that step_000002 was made with: sampling.num_generations 2 -> 4, "
        "optim.learning_rate 1e-05 -> 0.5"
    ]
    for changes, words in (
        ({"lora_alpha": 8.0}, r"model\.lora_alpha=8\.0: .* was made with 32"),
        ({"quantization": "nf4"}, r"model\.quantization='nf4': .* was made with 'none'"),
        ({"optimizer": "adamw_8bit"}, r"optim\.optimizer='adamw_8bit': .* was made with 'adamw'"),
    ):
        with pytest.raises(CoveyError, match=words):
            changed_settings(checkpoint, config.replace(**changes))
    file = tmp_path / "own.py"
    file.write_text("def own(x):\n    return 1\n")
    load_function(f"{file}:own")
    checkpoint.state["files"] = user_file_hashes()
    assert changed_settings(checkpoint, config) == []
    file.write_text("def own(x):\n    return 2\n")
    changed = f"{file}: not the code that step_000002 was made with; the numbers may be others"
    assert changed_settings(checkpoint, config) == [changed]


def test_what_is_lost_without_being_needed_is_said(whole: Any, run: Path) -> None:
    with RunFolder.open(run) as folder:
        folder.write_evaluation(0, [{"prompt": "a"}])
    lost = "metrics.jsonl lacks the evaluation at step 0: reports and learning curve go without it"
    assert lost_lines(RunFolder.read(run), load_checkpoint(run / LAST), whole[1].args) == [lost]
    (run / "config.toml").unlink()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().split("\n")[1] + "\n")
    (run / LAST / "state.json").write_text("{}")
    whole[1].args = whole[1].args.replace(output_dir=run)
    whole[1].train(resume_from_checkpoint=True)
    said, passed = " ".join(events(run, "warning")), "step_000002 is passed over: state.json has 2 bytes"
    assert all(words in said for words in ("config.toml was gone", passed, "lacks 1 of the 1 steps"))
    assert RunFolder.read(run).whole_config().is_file()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_moments_of_another_length(whole: Any, run: Path, dtype: torch.dtype) -> None:
    """Seen by a new process too, whose optimiser has no moments yet to compare with."""
    tensors("optimizer", lambda t: t.update({name: value.to(dtype) for name, value in t.items()}))(run)
    with pytest.raises(CoveyError, match=r"is torch\.float\d+, no moment of a gradient; delete it"):
        checked_state(load_checkpoint(run / LAST), whole[1].learner.tensors() | {"optimizer": {}}, whole[1].best_metric)


def test_how_to_continue_is_told_by_who_started_it(model_folder: Path, tmp_path: Path) -> None:
    def wrong(completions: list[str], **columns: Any) -> list[float]:
        return [1 / 0 for _ in completions]

    run = tmp_path / "run"
    with pytest.raises(CoveyError, match=r"ZeroDivisionError: division by zero at \S*test_restoring\.py:\d+, in"):
        build(SMALL | {"model": model_folder, "output_dir": run}, wrong).train()
    (said,) = events(run, "failed")
    assert "Nothing is lost: continue with `trainer.train(resume_from_checkpoint=True)`" in said
    with pytest.raises(CoveyError, match="the Python program that started it"):
        RunFolder.create(run)
    with RunFolder.create(tmp_path / "by_command") as other:
        assert other.how_to_continue() == f"`covey resume {other.path}`"


def test_a_config_that_was_cut_does_not_become_defaults(run: Path) -> None:
    folder = RunFolder.read(run)
    text = folder.config_path.read_text()
    folder.config_path.write_text(text[: text.index("[evaluation]")])
    with pytest.raises(CoveyError, match=r"was cut, it has no section \[run\]"):
        folder.whole_config()
    folder.config_path.unlink()
    with pytest.raises(CoveyError, match=r"its config\.toml is gone"):
        folder.whole_config()

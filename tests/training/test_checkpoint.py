"""Checkpoints: what comes back, and damage, which stops a resume with one sentence and leaves the folder as it is."""

import errno
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import build, distinct, events, same_weights, trained

from covey import GRPOTrainer
from covey.errors import CheckpointError, ConfigError, CoveyError, RunFolderError
from covey.files import publishing
from covey.functions import load_function, user_file_hashes
from covey.observe.run_folder import RunFolder
from covey.pytorch.optimizers import optimizer_tensors, restore_optimizer
from covey.training import checkpoint as checkpoints
from fakes import SMALL, raises

SOURCE = Path(__file__).resolve().parents[2] / "src"
LAST, POLICY = "checkpoints/step_000002", "policy.safetensors"
Damage = Callable[[Path], Any]


def same_bits(a, b):
    bits = [each.flatten().contiguous().view(torch.uint8) for each in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def save(folder, step, **kwargs):
    tensors = {"policy": {"w": torch.full((4,), float(step))}}
    return checkpoints.save_checkpoint(folder, step, tensors, {"at": step}, **kwargs)


def test_tensors_come_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (300,), generator=generator, dtype=torch.int32)
    tensors = {
        "policy": {
            "float32": bits.view(torch.float32),  # any bit pattern: NaN payloads, infinities, denormals
            "bfloat16": bits.view(torch.bfloat16),
            "transposed": torch.randn(3, 5, generator=generator).T,
        },
        "optimizer": {"layer.weight/exp_avg": torch.randn(7, generator=generator).double()},
        "rng": {"cpu": generator.get_state(), "count": torch.tensor(2**62 + 1), "flags": torch.tensor([True, False])},
        "empty": {},
        "no_elements": {"none": torch.empty(0, 3)},
    }
    saved = checkpoints.save_checkpoint(tmp_path, 3, tensors, {})
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1  # who may read one may read all
    loaded = checkpoints.load_checkpoint(saved).tensors
    assert {group: set(values) for group, values in loaded.items()} == {g: set(v) for g, v in tensors.items()}
    for group, values in tensors.items():
        for name, tensor in values.items():
            assert same_bits(tensor, loaded[group][name]), name


def test_state_comes_back_exactly_tied_weights_stay_tied_and_overlapping_views_do_not_collide(tmp_path):
    state = {
        "floats": [0.1, 1e-320, -0.0, math.pi, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        **{"ints": [0, -1, 2**200], "text": 'ü "quoted" \ud7ff', "none": None, "bool": True},
        "nested": {"deep": [{"er": [1, [2.5, None]]}]},
    }
    random = torch.get_rng_state().numpy()
    path = checkpoints.save_checkpoint(tmp_path, 3, {}, state | {"random": {"cpu": random}})
    loaded = checkpoints.load_checkpoint(path).state
    np.testing.assert_array_equal(loaded.pop("random")["cpu"], random, strict=True)
    assert repr(loaded) == repr(state)
    with pytest.raises(TypeError, match="cannot hold a Tensor"):  # our own bug
        checkpoints.save_checkpoint(tmp_path / "other", 1, {}, {"x": torch.zeros(1)})
    assert checkpoints.list_checkpoints(tmp_path / "other") == []
    shared = torch.arange(6.0)
    tied = {"policy": {"embed": shared, "head": shared, "part": shared[2:4]}}
    path = checkpoints.save_checkpoint(tmp_path, 1, tied, {})
    loaded = checkpoints.load_checkpoint(path).tensors["policy"]
    assert loaded["embed"] is loaded["head"]
    assert loaded["part"].tolist() == [2.0, 3.0]
    loaded["part"].add_(1)  # which does not change the file
    assert checkpoints.load_checkpoint(path).tensors["policy"]["part"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_takes_the_same_steps(tmp_path, dtype):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(dtype)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 4), 0.1 * (step + 1), dtype=dtype)).pow(2).sum().backward()
            optimizer.step()

    (straight, its_optimizer), (model, optimizer), (resumed, resumed_optimizer) = make(), make(), make()
    train(straight, its_optimizer, range(6))
    train(model, optimizer, range(3))
    moments = optimizer_tensors(optimizer, model.named_parameters())
    assert set(moments) == {f"{p}/{m}" for p in ("weight", "bias") for m in ("step", "exp_avg", "exp_avg_sq")}
    path = checkpoints.save_checkpoint(tmp_path, 3, {"policy": model.state_dict(), "optimizer": moments}, {})
    tensors = checkpoints.load_checkpoint(path).tensors
    resumed.load_state_dict(tensors["policy"])
    restore_optimizer(resumed_optimizer, resumed.named_parameters(), tensors["optimizer"])
    train(resumed, resumed_optimizer, range(3, 6))
    assert same_weights(resumed.state_dict(), straight.state_dict())


def test_moments_keep_their_own_dtype_and_those_of_another_model_are_refused():
    model = torch.nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    restore_optimizer(optimizer, model.named_parameters(), {"weight/exp_avg": torch.full((2, 2), 1e-3)})
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    for name, words in (
        ("other/exp_avg", "parameter other, which is not trained here"),
        ("weight/exp_avg", r"weight, which has shape \(2, 2\) here"),
    ):
        raises(CheckpointError, words, restore_optimizer, optimizer, model.named_parameters(), {name: torch.zeros(2)})


def flip(path):
    weights = bytearray((path / "policy.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "policy.safetensors").write_bytes(weights)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "has changed"),
        (lambda path: os.truncate(path / "policy.safetensors", 20), "has 20 bytes"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "COMPLETE").unlink(), "no COMPLETE file"),
        (lambda path: [file.write_bytes(b"") for file in path.iterdir()], "COMPLETE file is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_way_out(tmp_path, caplog, damage, reason):
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    damage(bad)
    with pytest.raises(CheckpointError, match=reason) as caught:
        checkpoints.load_checkpoint(bad)
    assert "step_000010 beside it is complete: resume from that" in str(caught.value)
    with caplog.at_level("WARNING", logger="covey.checkpoint"):
        assert checkpoints.latest_checkpoint(tmp_path) == good
    assert reason in caplog.text
    assert "step_000020" in caplog.text
    damage(good)
    raises(CheckpointError, "no other complete checkpoint", checkpoints.load_checkpoint, bad)
    assert checkpoints.latest_checkpoint(tmp_path) is None


def test_missing_and_foreign_checkpoints(tmp_path):
    raises(CheckpointError, "there is no such folder", checkpoints.load_checkpoint, tmp_path / "step_000001")
    assert checkpoints.latest_checkpoint(tmp_path / "nowhere") is None
    path = save(tmp_path, 1, run_id="aaa")
    assert checkpoints.load_checkpoint(path).run_id == "aaa"
    assert checkpoints.load_checkpoint(path, run_id="aaa").step == 1
    raises(CheckpointError, "belongs to run aaa, not to bbb", checkpoints.load_checkpoint, path, run_id="bbb")
    checkpoints.save_checkpoint(tmp_path, 1, {}, {"again": True})  # saving a step again replaces it
    assert checkpoints.load_checkpoint(path).state == {"again": True}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_manifest_cannot_vouch_for_nonsense(tmp_path):
    """Whole by its hashes, yet no checkpoint: still a clear error, and pickled weights are never opened."""

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    damaged, pickled = "cannot be read", {"format": 1, "step": 1, "run_id": "", "groups": ["policy"], "state": {}}
    for text, said in (
        *[(text, damaged) for text in ("{}", "[1]", "null", "{", json.dumps(pickled))],
        ('{"format": 1, "run_id": "", "step": 1, "groups": 3}', damaged),
        ('{"format": 3}', "format 3, this version of Covey reads 1 and 2"),
    ):
        with publishing(tmp_path / "step_000001") as aside:
            (aside / "state.json").write_text(text)
            torch.save({"w": Evil()}, aside / "policy.safetensors")
        raises(CheckpointError, said, checkpoints.load_checkpoint, tmp_path / "step_000001")
    assert not (tmp_path / "executed").exists()


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    good = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 90, 10))
        raises(RunFolderError, "checkpoint step_000002 needs about", save, tmp_path, 2)
    # The real thing: the system refuses to write on, here for a limit that a test can set. safetensors (Rust)
    # has no OSError for that, only a text with the error number.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(RunFolderError, match="larger than the system allows") as caught:
            checkpoints.save_checkpoint(tmp_path, 2, {"policy": {"w": torch.zeros(100_000)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, [path.name for path in tmp_path.iterdir()]) == (errno.EFBIG, ["step_000001"])
    assert checkpoints.load_checkpoint(good).state == {"at": 1}


def steps(paths):
    return [int(path.name.removeprefix("step_")) for path in paths]


def test_prune_keeps_the_last_and_the_best_in_the_order_of_numbers_and_the_only_good_one(tmp_path, caplog):
    for step in (999_999, 1_000_000, 7, 8, 9):
        save(tmp_path, step)
    assert checkpoints.prune_checkpoints(tmp_path, None) == []
    assert steps(checkpoints.prune_checkpoints(tmp_path, 2, best_step=7)) == [8, 9]
    assert steps(checkpoints.list_checkpoints(tmp_path)) == [7, 999_999, 1_000_000]
    assert checkpoints.prune_checkpoints(tmp_path, 2, best_step=7) == []
    raises(ConfigError, "save_total_limit=0", checkpoints.prune_checkpoints, tmp_path, 0)
    good, newest = save(tmp_path / "other", 1), save(tmp_path / "other", 2)
    flip(newest)
    for known in (False, True):  # known to be broken without hashing: does not count as one to keep
        with caplog.at_level("WARNING", logger="covey.checkpoint"):
            assert checkpoints.prune_checkpoints(tmp_path / "other", 1) == []
        assert known or "keeping all checkpoints" in caplog.text
        assert checkpoints.latest_checkpoint(tmp_path / "other") == good
        (newest / "COMPLETE").unlink(missing_ok=True)


WRITER = """
import os, sys, torch
from covey.files import remove_leftovers
from covey.training.checkpoint import latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint

torch.set_num_threads(1)
folder = sys.argv[1]

def write_on():
    remove_leftovers(folder)
    path = latest_checkpoint(folder)
    step = load_checkpoint(path).step if path else 0
    while True:
        step += 1
        moments = {"m": torch.full((9,), -1.0 * step)}
        tensors = {"policy": {"w": torch.full((20_000,), float(step))}, "optimizer": moments}
        for _ in range(2):  # the second replaces the first
            save_checkpoint(folder, step, tensors, {"at": step, "twice": 2.0 * step})
        prune_checkpoints(folder, 2)

for _ in sys.stdin:  # one writer for each line: torch is imported once, not for every kill
    writer = os.fork()
    if writer == 0:
        write_on()
    print(writer, flush=True)
    os.waitpid(writer, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
def test_a_sigkill_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    command, env = [sys.executable, "-c", WRITER, str(tmp_path)], os.environ | {"PYTHONPATH": str(SOURCE)}
    moments, steps, leftovers = random.Random(0), [], 0
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as driver:
        for _ in range(16):
            driver.stdin.write("go\n")
            driver.stdin.flush()
            writer = int(driver.stdout.readline())
            time.sleep(moments.uniform(0.0, 0.2))
            os.kill(writer, signal.SIGKILL)
            assert driver.stdout.readline() == "gone\n"
            leftovers += sum(".tmp-" in path.name for path in tmp_path.iterdir())
            path = checkpoints.latest_checkpoint(tmp_path)
            if path is None:
                assert not steps, "every checkpoint was lost"
                continue
            checkpoint = checkpoints.load_checkpoint(path)
            assert checkpoint.state == {"at": checkpoint.step, "twice": 2.0 * checkpoint.step}
            assert set(checkpoint.tensors["policy"]["w"].tolist()) == {float(checkpoint.step)}
            assert set(checkpoint.tensors["optimizer"]["m"].tolist()) == {-float(checkpoint.step)}
            for other in checkpoints.list_checkpoints(tmp_path):
                checkpoints.load_checkpoint(other)  # no folder under its final name is ever half-written
            assert not steps or checkpoint.step >= steps[-1] - 1, "more was lost than the step being replaced"
            steps.append(checkpoint.step)
    assert steps[-1] > steps[0]
    assert leftovers > 0, "no kill hit a write: the test did not test"


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    settings = SMALL | {"model": model_folder, "output_dir": tmp_path_factory.mktemp("whole") / "run"}
    short = {"num_generations": 2, "prompts_per_step": 1, "max_completion_length": 4, "save_steps": 1}
    return settings["output_dir"], trained(settings | short, distinct, learning_rate=1e-5)


@pytest.fixture
def run(whole: Any, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def sign(folder: Path) -> None:
    """As somebody would who computes the hashes anew."""
    files = [path for path in folder.iterdir() if path.name != "COMPLETE"]
    entries = {p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in files}
    (folder / "COMPLETE").write_text(json.dumps({"files": entries}))


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
        "none of its checkpoints is whole .*restore the folder checkpoints/",
    ),
    "all gone": (lambda run: shutil.rmtree(run / "checkpoints"), "reach step 2, and there is no checkpoint left"),
    "events left": (emptied("events.jsonl"), "no checkpoint left, though events.jsonl says 'step 1 is saved'"),
    "tables left": (emptied("completions"), "reach step 2, and there is no checkpoint left, though run.save_steps"),
    "adapter left": (emptied("adapter"), "no checkpoint left, though adapter/ is there"),
    "best left": (lambda run: (emptied()(run), (run / "best").mkdir()), "though best/ holds weights"),
    "no state": (state(lambda d: d.clear()), "cannot be read"),
    "of another step": (state(lambda d: d.update(step=1)), "is of step 1, not of that in its name"),
    "of no run": (state(lambda d: d.update(run_id="")), "belongs to run"),
    "text": (state(lambda d: d["state"]["trainer"].update(seconds="x")), "seconds='x'"),
    "random": (state(lambda d: d["state"].update(random={"cpu": [1]})), "its state is damaged"),
    "phase": (state(lambda d: d["state"]["plan"].update(start={"step": "x"})), "its state is damaged"),
    "NaN weights": (tensors("policy", lambda t: next(iter(t.values())).fill_(float("nan"))), "holds NaN"),
    "NaN moments": (tensors("optimizer", lambda t: next(iter(t.values())).fill_(float("inf"))), "holds NaN or inf"),
    "a moment lost": (tensors("optimizer", lambda t: t.pop(min(t))), "lacks exp_avg of some"),
    "text for a number": (lines(lambda ls: [ls[0].replace('"reward": ', '"reward": "x", "_": ')]), "line 1 is none of"),
    "NaN for a number": (lines(lambda ls: [ls[0].replace('"reward": ', '"reward": NaN, "_": ')]), "line 1 is none of"),
    "whole numbers": (tensors("policy", lambda t: t.update({k: v.int() for k, v in t.items()})), "is torch.int32"),
    "a pipe": (
        lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")),
        "metrics.jsonl: is no file",
    ),
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
    raises(CoveyError, message, made.train, resume_from_checkpoint=True)
    assert {path: path.read_bytes() for path in before} == before


def test_an_evaluation_that_left_a_checkpoint_is_a_sign_of_it(whole: Any, run: Path) -> None:
    """With load_best_model_at_end, the evaluation at step 0 had left a checkpoint before step 1 began."""
    config, notes = whole[1].args.replace(save_steps=50), []
    emptied()(run)
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n{"step": 1, "phase": 0}\n')
    assert checkpoints.find_checkpoint(RunFolder.read(run), config, notes) is None
    assert notes == ["the run was stopped in step 2, before its first checkpoint: it begins again"]
    best = config.replace(load_best_model_at_end=True)
    with pytest.raises(CoveyError, match="reach step 1, and there is no checkpoint left, though it was evaluated at"):
        checkpoints.find_checkpoint(RunFolder.read(run), best, notes)
    nothing = '{"step": 0, "eval/reward": 0.5, "eval/num_completions": 0}\n{"step": 1, "phase": 0}\n'
    (run / "metrics.jsonl").write_text(nothing)
    assert checkpoints.find_checkpoint(RunFolder.read(run), best, notes) is None


def test_settings_and_files_that_differ_from_the_checkpoints_are_named(whole: Any, tmp_path: Path) -> None:
    checkpoint, config = checkpoints.load_checkpoint(whole[0] / LAST), whole[1].args.replace(output_dir=whole[0])
    assert checkpoints.changed_settings(checkpoint, config.replace(logging_steps=7)) == []
    assert checkpoints.changed_settings(checkpoint, config.replace(learning_rate=0.5, num_generations=4)) == [
        "settings differ from those that step_000002 was made with: sampling.num_generations 2 -> 4, "
        "optim.learning_rate 1e-05 -> 0.5"
    ]
    held, taught = config.replace(teacher={"weights": "base"}), {"weights": "base", "coef": 0.5}
    checkpoint.state["settings"] = held.to_dict()
    found = checkpoints.changed_settings(checkpoint, held.replace(teacher=taught))
    assert found == ["settings differ from those that step_000002 was made with: algorithm.teacher.coef 1.0 -> 0.5"]
    checkpoint.state["settings"] = config.to_dict()
    for changes, words in (
        ({"lora_alpha": 8.0}, r"model\.lora_alpha=8\.0: .* was made with 32"),
        ({"quantization": "nf4"}, r"model\.quantization='nf4': .* was made with 'none'"),
        ({"optimizer": "adamw_8bit"}, r"optim\.optimizer='adamw_8bit': .* was made with 'adamw'"),
    ):
        raises(CoveyError, words, checkpoints.changed_settings, checkpoint, config.replace(**changes))
    file = tmp_path / "own.py"
    file.write_text("def own(x):\n    return 1\n")
    load_function(f"{file}:own")
    checkpoint.state["files"] = user_file_hashes()
    assert checkpoints.changed_settings(checkpoint, config) == []
    file.write_text("def own(x):\n    return 2\n")
    changed = f"{file}: not the code that step_000002 was made with; the numbers may be others"
    assert checkpoints.changed_settings(checkpoint, config) == [changed]


def test_what_is_lost_without_being_needed_is_said(whole: Any, run: Path) -> None:
    with RunFolder.open(run) as folder:
        folder.write_completions(0, [{"prompt": "a"}], "eval")
    lost = "metrics.jsonl lacks the evaluation at step 0: reports and learning curve go without it"
    assert checkpoints.lost_lines(RunFolder.read(run), checkpoints.load_checkpoint(run / LAST), whole[1].args) == [lost]
    (run / "config.toml").unlink()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().split("\n")[1] + "\n")
    (run / LAST / "state.json").write_text("{}")
    whole[1].args = whole[1].args.replace(output_dir=run)
    whole[1].train(resume_from_checkpoint=True)
    said, passed = " ".join(events(run, "warning")), "step_000002 is passed over: state.json has 2 bytes"
    assert all(words in said for words in ("config.toml was gone", passed, "lacks 1 of the 1 step "))
    assert RunFolder.read(run).whole_config().is_file()


def test_how_to_continue_is_told_by_who_started_it(model_folder: Path, tmp_path: Path) -> None:
    def wrong(completions: list[str], **columns: Any) -> list[float]:
        return [1 / 0 for _ in completions]

    run = tmp_path / "run"
    with pytest.raises(CoveyError, match=r"ZeroDivisionError: division by zero at \S*test_checkpoint\.py:\d+, in"):
        build(SMALL | {"model": model_folder, "output_dir": run}, wrong).train()
    (said,) = events(run, "failed")
    assert ("No step was finished: start the run again" in said, "continue" in said) == (True, False)
    assert "the Python program that started it" in RunFolder.read(run).how_to_continue()
    with RunFolder.create(tmp_path / "by_command") as other:
        assert other.how_to_continue() == f"`covey resume {other.path}`"


def test_a_config_that_was_cut_does_not_become_defaults(whole: Any, run: Path) -> None:
    folder = RunFolder.read(run)
    text = folder.config_path.read_text()
    folder.config_path.write_text(text[: text.index("[evaluation]")])
    raises(CoveyError, r"was cut, it has no section \[run\]", folder.whole_config)
    folder.config_path.unlink()
    raises(CoveyError, r"its config\.toml is gone", folder.whole_config)

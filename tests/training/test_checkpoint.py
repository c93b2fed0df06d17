import errno
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
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.errors import CheckpointError, ConfigError, RunFolderError
from covey.files import publishing
from covey.pytorch.optimizers import optimizer_tensors, restore_optimizer
from covey.training.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

SOURCE = Path(__file__).resolve().parents[2] / "src"


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def save(folder, step, **kwargs):
    return save_checkpoint(folder, step, {"policy": {"w": torch.full((4,), float(step))}}, {"at": step}, **kwargs)


def test_tensors_come_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (300,), generator=generator, dtype=torch.int32)
    count, flags = torch.tensor(2**62 + 1), torch.tensor([True, False])
    tensors = {
        "policy": {
            "float32": bits.view(torch.float32),  # any bit pattern: NaN payloads, infinities, denormals
            "bfloat16": bits.view(torch.bfloat16),
            "transposed": torch.randn(3, 5, generator=generator).T,
        },
        "optimizer": {"layer.weight/exp_avg": torch.randn(7, generator=generator).double()},
        "rng": {"cpu": generator.get_state(), "count": count, "flags": flags},
        "empty": {},
        "no_elements": {"none": torch.empty(0, 3)},
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, tensors, {})).tensors
    assert {group: set(values) for group, values in loaded.items()} == {g: set(v) for g, v in tensors.items()}
    for group, values in tensors.items():
        for name, tensor in values.items():
            restored = loaded[group][name]
            if tensor.dtype == torch.bfloat16:
                tensor, restored = tensor.view(torch.int16), restored.view(torch.int16)
            assert same_bits(tensor, restored), name


def test_state_comes_back_exactly(tmp_path):
    state = {
        "floats": [0.1, 1e-320, -0.0, math.pi, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        **{"ints": [0, -1, 2**200], "text": 'ü "quoted" \ud7ff', "none": None, "bool": True},
        "nested": {"deep": [{"er": [1, [2.5, None]]}]},
    }
    random = torch.get_rng_state().numpy()
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, {}, state | {"random": {"cpu": random}})).state
    np.testing.assert_array_equal(loaded.pop("random")["cpu"], random, strict=True)
    assert repr(loaded) == repr(state)
    with pytest.raises(TypeError, match="cannot hold a Tensor"):  # our own bug
        save_checkpoint(tmp_path / "other", 1, {}, {"x": torch.zeros(1)})
    assert list_checkpoints(tmp_path / "other") == []


def test_tied_weights_stay_tied_and_overlapping_views_do_not_collide(tmp_path):
    shared = torch.arange(6.0)
    path = save_checkpoint(tmp_path, 1, {"policy": {"embed": shared, "head": shared, "part": shared[2:4]}}, {})
    loaded = load_checkpoint(path).tensors["policy"]
    assert loaded["embed"] is loaded["head"]
    assert loaded["part"].tolist() == [2.0, 3.0]
    loaded["part"].add_(1)  # which does not change the file
    assert load_checkpoint(path).tensors["policy"]["part"].tolist() == [2.0, 3.0]


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
    path = save_checkpoint(tmp_path, 3, {"policy": model.state_dict(), "optimizer": moments}, {})
    tensors = load_checkpoint(path).tensors
    resumed.load_state_dict(tensors["policy"])
    restore_optimizer(resumed_optimizer, resumed.named_parameters(), tensors["optimizer"])
    train(resumed, resumed_optimizer, range(3, 6))
    assert torch.equal(resumed.weight, straight.weight)
    assert torch.equal(resumed.bias, straight.bias)


def test_moments_keep_their_own_dtype_and_those_of_another_model_are_refused():
    model = torch.nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    restore_optimizer(optimizer, model.named_parameters(), {"weight/exp_avg": torch.full((2, 2), 1e-3)})
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    for name, words in (
        ("other/exp_avg", "parameter other, which is not trained here"),
        ("weight/exp_avg", r"weight, which has shape \(2, 2\) here"),
    ):
        with pytest.raises(CheckpointError, match=words):
            restore_optimizer(optimizer, model.named_parameters(), {name: torch.zeros(2)})


def flip(path):
    weights = bytearray((path / "policy.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "policy.safetensors").write_bytes(weights)


def empty(path):
    for name in ("state.json", "policy.safetensors", "COMPLETE"):
        (path / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "has changed"),
        (lambda path: os.truncate(path / "policy.safetensors", 20), "has 20 bytes"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "COMPLETE").unlink(), "no COMPLETE file"),
        (empty, "COMPLETE file is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_way_out(tmp_path, caplog, damage, reason):
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    damage(bad)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_checkpoint(bad)
    assert "step_000010 beside it is complete: resume from that" in str(caught.value)
    with caplog.at_level("WARNING", logger="covey.checkpoint"):
        assert latest_checkpoint(tmp_path) == good
    assert reason in caplog.text
    assert "step_000020" in caplog.text
    damage(good)
    with pytest.raises(CheckpointError, match="no other complete checkpoint"):
        load_checkpoint(bad)
    assert latest_checkpoint(tmp_path) is None


def test_missing_and_foreign_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        load_checkpoint(tmp_path / "step_000001")
    assert latest_checkpoint(tmp_path / "nowhere") is None
    path = save(tmp_path, 1, run_id="aaa")
    assert load_checkpoint(path).run_id == "aaa"
    assert load_checkpoint(path, run_id="aaa").step == 1
    with pytest.raises(CheckpointError, match="belongs to run aaa, not to bbb"):
        load_checkpoint(path, run_id="bbb")
    save_checkpoint(tmp_path, 1, {}, {"again": True})  # saving a step again replaces it
    assert load_checkpoint(path).state == {"again": True}
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
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(tmp_path / "step_000001")
    assert not (tmp_path / "executed").exists()


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    good = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(RunFolderError, match="checkpoint step_000002 needs about"):
            save(tmp_path, 2)
    # The real thing: the system refuses to write on, here for a limit that a test can set. safetensors (Rust)
    # has no OSError for that, only a text with the error number.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(RunFolderError, match="larger than the system allows") as caught:
            save_checkpoint(tmp_path, 2, {"policy": {"w": torch.zeros(100_000)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert load_checkpoint(good).state == {"at": 1}


def test_prune_keeps_the_last_and_the_best_in_the_order_of_numbers(tmp_path):
    for step in (999_999, 1_000_000, 7, 8, 9):
        save(tmp_path, step)
    assert prune_checkpoints(tmp_path, None) == []
    assert [path.name for path in prune_checkpoints(tmp_path, 2, best_step=7)] == ["step_000008", "step_000009"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000007", "step_999999", "step_1000000"]
    assert prune_checkpoints(tmp_path, 2, best_step=7) == []
    with pytest.raises(ConfigError, match="save_total_limit=0"):
        prune_checkpoints(tmp_path, 0)


def test_prune_never_deletes_the_only_good_one(tmp_path, caplog):
    good, newest = save(tmp_path, 1), save(tmp_path, 2)
    flip(newest)
    for known in (False, True):  # known to be broken without hashing: does not count as one to keep
        with caplog.at_level("WARNING", logger="covey.checkpoint"):
            assert prune_checkpoints(tmp_path, 1) == []
        assert known or "keeping all checkpoints" in caplog.text
        assert latest_checkpoint(tmp_path) == good
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
    """A writer of checkpoints is killed at random moments; the newest one left always loads and agrees."""
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
            path = latest_checkpoint(tmp_path)
            if path is None:
                assert not steps, "every checkpoint was lost"
                continue
            checkpoint = load_checkpoint(path)
            assert checkpoint.state == {"at": checkpoint.step, "twice": 2.0 * checkpoint.step}
            assert set(checkpoint.tensors["policy"]["w"].tolist()) == {float(checkpoint.step)}
            assert set(checkpoint.tensors["optimizer"]["m"].tolist()) == {-float(checkpoint.step)}
            for other in list_checkpoints(tmp_path):
                load_checkpoint(other)  # no folder under its final name is ever half-written
            assert not steps or checkpoint.step >= steps[-1] - 1, "more was lost than the step being replaced"
            steps.append(checkpoint.step)
    assert steps[-1] > steps[0]
    assert leftovers > 0, "no kill hit a write: the test did not test"

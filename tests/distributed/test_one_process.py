"""Units in one process: the same run wherever it is cut, killed or resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_cases import events, learned

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.fleet import Fleet
from covey.errors import ConfigError
from covey.pytorch.engine import Engine
from covey.types import Request, SamplingSettings

DRIVER = """
import sys, time
from covey import cli
from covey.pytorch.engine import engine

at, calls, call = int(sys.argv[1]), {"n": 0}, engine.Engine.__call__

def pause(*args, **kwargs):
    calls["n"] += 1
    if calls["n"] == at:
        print("PAUSED", flush=True)
        time.sleep(60)
    return call(*args, **kwargs)

engine.Engine.__call__ = pause
sys.argv = ["covey", *sys.argv[2:]]
cli.main()
"""
UNITS = ("distributed.samplers=0", "distributed.groups_per_unit=1")


def run(*arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "covey", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_killed_run_uses_its_units(recipe_folder: Path, tmp_path: Path) -> None:
    """Evaluation (1 unit), steps 1, 2, checkpoint, step 3: killed in the second unit of step 3, the seventh in all."""
    run("train", str(recipe_folder), f"run.output_dir={tmp_path / 'whole'}", *UNITS)
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "7", "train", str(recipe_folder), f"run.output_dir={folder}", *UNITS],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "PAUSED"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()
    kept = sorted(path.name[:7] for path in (folder / "units").iterdir())
    assert kept == ["v000003"]  # what a checkpoint has made useless is gone
    run("resume", str(folder))
    assert learned(folder) == learned(tmp_path / "whole")
    assert events(folder, "sampler") == ["1 of 2 units were sampled before the run was stopped: they are used"]
    assert not (folder / "units").exists()
    assert not (tmp_path / "whole" / "units").exists()


def test_without_the_section_nothing_changes(by_units: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(by_units | {"groups_per_unit": 2})), **data())
    assert type(trainer.engine) is Engine
    trainer.train()
    assert not any("samplers" in name for name in trainer.state.log_history[0])


@pytest.mark.parametrize("changes", [{}, {"use_peft": False}, {"max_staleness": 1}, {"keep_units": False}], ids=str)
def test_units_train(by_units: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """With units that are as large as a step, the numbers are those of one call."""
    args = GRPOConfig(**(by_units | changes | {"samplers": 0, "groups_per_unit": 4}))
    GRPOTrainer(args=args, **data()).train()
    plain = by_units | {name: value for name, value in changes.items() if name != "keep_units"}
    del plain["groups_per_unit"]
    GRPOTrainer(args=GRPOConfig(**(plain | {"output_dir": str(tmp_path / "plain")})), **data()).train()
    folder, model = Path(args.run.output_dir), "model.safetensors" if "use_peft" in changes else ""
    ours, theirs = (learned(path, without=("samplers/",), weights=model) for path in (folder, tmp_path / "plain"))
    assert ours == theirs
    assert events(folder, "sampler") == []


def test_a_unit_is_a_function_of_itself(by_units: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(by_units | {"samplers": 0})), **data())
    assert isinstance(trainer.engine, Fleet)
    settings, version = SamplingSettings(max_tokens=8), trainer.state.policy_version
    asked = [
        Request(prompt.token_ids, (3, 0, place, n)) for place, prompt in enumerate(trainer.prompts) for n in range(4)
    ]
    whole = trainer.engine(asked, settings, policy_version=version)
    for place in range(0, len(asked), 4):
        part = trainer.engine(asked[place : place + 4], settings, policy_version=version)
        for one, other in zip(part, whole[place : place + 4], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.logprobs, other.logprobs)


def data() -> dict[str, Any]:
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five", "six")]
    return {"reward_funcs": few_vowels, "train_dataset": rows, "eval_dataset": rows[:3]}


def few_vowels(completions: list[Any], **columns: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch not in "aeiou" for ch in text) / max(len(text), 1) for text in texts]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learners": 0}, "distributed.learners=0"),
        ({"samplers": -1}, "distributed.samplers=-1"),
        ({"gpus_per_sampler": 2.0}, "distributed.gpus_per_sampler=2: Covey"),
        ({"sampler_kind": "sglang"}, "distributed.sampler_kind='sglang'"),
        ({"samplers": 2, "upload_adapters_to_server": True}, "either actors sample or servers do"),
        ({"inference_server_url": "http://a:1,http://a:1/"}, "http://a:1 is there twice"),
        ({"inference_server_url": ("http://a:1", "")}, "one of them is empty"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


def test_addresses_as_text_or_list() -> None:
    for given in ("http://a:1, http://b:2", ["http://a:1", "http://b:2"]):
        assert GRPOConfig(inference_server_url=given).server.urls == ("http://a:1", "http://b:2")
    written = GRPOConfig.from_overrides(["server.inference_server_url=http://a:1,http://b:2"])
    assert written.server.urls == ("http://a:1", "http://b:2")

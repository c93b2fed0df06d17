"""What a trainer for single answers loads of Covey: no world, no cluster, no server, no other door."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
from pathlib import Path

def loaded():
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    found = {name: file for name, file in files.items() if file and name.split(".")[0] == "covey"}
    lines = sum(len(Path(file).read_text().splitlines()) for file in found.values())
    return {"names": sorted(found), "lines": lines, "ray": "ray" in sys.modules}

from covey import GRPOConfig, GRPOTrainer
imported = loaded()

def reward(completions, **columns):
    return [float(len(text)) for text in completions]

args = GRPOConfig(model=sys.argv[1], output_dir=sys.argv[2], num_generations=2, prompts_per_step=1, max_steps=1)
GRPOTrainer(reward_funcs=reward, args=args, train_dataset=[{"prompt": "one"}])
print(json.dumps([imported, loaded()]))
"""
NEVER = ("alfworld", "textworld", "house", "adapters", "pool", "ray_", "preflight", "serving", "trl", "jax", "watch")
"""Parts of modules' names, below `covey.environments` and elsewhere, that a run of single answers has no use for."""


@pytest.fixture(scope="module")
def sizes(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model_folder), str(tmp_path_factory.mktemp("run"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize(("made", "modules", "lines"), [(False, 90, 16_000), (True, 140, 25_500)])
def test_a_trainer_of_single_answers_is_light(
    sizes: list[dict[str, Any]], made: bool, modules: int, lines: int
) -> None:
    """Imported, and made with the engine, the fused layers and the learner of PyTorch."""
    found = sizes[made]
    assert len(found["names"]) <= modules
    assert found["lines"] <= lines
    assert not found["ray"]
    odd = [name for name in found["names"] if any(part in name for part in NEVER) and name != "covey.adapters"]
    assert odd == []

"""What users may import, that `import covey` stays light, and what a trainer for single answers loads of Covey: no
world, no cluster, no server, no other door.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import covey

HEAVY = ("torch", "jax", "jaxlib", "transformers", "peft")

# (module, names that the documentation promises there, the module that has to exist for that)
DOCUMENT = {
    "covey": ("GRPOConfig", "GRPOTrainer", "GRPOTrainingArgs"),
    "covey.algorithms": (
        *("compute_grpo_outcome_advantage", "compute_naive_grpo_outcome_advantage", "compute_off_policy_mask"),
        *("compute_unbiased_kl", "create_sampling_mask"),
    ),
    "covey.rewards": ("TestHarness", "Verifier"),
    "covey.tasks.usmle": ("USMLERewardModel", "compute_reward", "extract_answer", "format_usmle_prompt"),
    "covey.environments": ("Environment",),
    "covey.serving": ("upload_adapter_weights",),
    "covey.jax": ("GRPOConfig", "GRPOTrainer", "TrainState", "Trainer"),
}
"""Module -> names that the documentation promises there."""
ROOMS = ("algorithms", "rewards", "tasks", "rollout", "pytorch", "observe", "training", "serving", "environments")


def run(code: str, *arguments: object) -> str:
    """What a fresh interpreter prints after running `code`."""
    paths = [str(Path(covey.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_after(code: str) -> set[str]:
    """Which heavy libraries are loaded after running `code`."""
    said = run(f"import sys\n{code}\nprint(','.join(m for m in {HEAVY!r} if m in sys.modules))")
    return set(filter(None, said.split(",")))


def test_the_package_exports_its_public_names_and_nothing_else() -> None:
    assert covey.__all__ == ["GRPOConfig", "GRPOTrainer", "GRPOTrainingArgs", "__version__"]
    assert set(covey.__all__) <= set(dir(covey))
    assert covey.GRPOTrainingArgs is covey.GRPOConfig
    with pytest.raises(AttributeError, match="GRPOConfg"):
        _ = covey.GRPOConfg  # type: ignore[attr-defined]


def test_a_config_needs_no_backend() -> None:
    assert loaded_after("import types; sys.modules['torch'] = types.ModuleType('torch')") == {"torch"}  # it sees one
    for code in (
        "import covey",
        "from covey import GRPOConfig, GRPOTrainingArgs\nGRPOConfig(num_generations=4).to_toml()",
        "import covey.config.text\ncovey.config.text.explain()",
    ):
        assert loaded_after(code) == set(), code


@pytest.mark.parametrize("module", DOCUMENT)
def test_promised_names(module: str) -> None:
    if module == "covey.jax":
        pytest.importorskip("jax")
    assert [name for name in DOCUMENT[module] if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_export_what_they_list(name: str) -> None:
    loaded = importlib.import_module(f"covey.{name}")
    exported = getattr(loaded, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [public for public in exported if not hasattr(loaded, public)] == []


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


def test_a_trainer_of_single_answers_is_light(model_folder: Path, tmp_path: Path) -> None:
    """Imported, and made with the policy of PyTorch; engine, learner and parts of a step wait until they are used."""
    sizes = json.loads(run(PROGRAM, model_folder, tmp_path / "run").splitlines()[-1])
    for found, modules, lines in zip(sizes, (73, 90), (14_600, 16_000), strict=True):
        assert len(found["names"]) <= modules
        assert found["lines"] <= lines
        assert not found["ray"]
        names = [name for name in found["names"] if name != "covey.adapters"]
        assert [name for name in names if any(part in name for part in NEVER)] == []

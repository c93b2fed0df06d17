"""What users may import, and that `import covey` stays light."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import covey

HEAVY = ("torch", "jax", "jaxlib", "transformers", "peft")

# (module, names that the documentation promises there, the module that has to exist for that)
PROMISED = [
    ("covey", ["GRPOConfig", "GRPOTrainingArgs"], "covey.config"),
    ("covey", ["GRPOTrainer"], "covey.training.trainer"),
    (
        "covey.algorithms",
        [
            "compute_grpo_outcome_advantage",
            "compute_naive_grpo_outcome_advantage",
            "compute_off_policy_mask",
            "compute_unbiased_kl",
            "create_sampling_mask",
        ],
        "covey.algorithms",
    ),
    ("covey.rewards", ["Verifier"], "covey.rewards"),
    ("covey.rewards", ["TestHarness"], "covey.rewards.code"),
    (
        "covey.tasks.usmle",
        ["USMLERewardModel", "compute_reward", "extract_answer", "format_usmle_prompt"],
        "covey.tasks.usmle",
    ),
    ("covey.environments", ["Environment"], "covey.environments"),
    ("covey.serving", ["upload_adapter_weights"], "covey.serving"),
    ("covey.jax", ["GRPOConfig", "GRPOTrainer", "TrainState", "Trainer"], "covey.jax"),
]
ROOMS = ["algorithms", "rewards", "tasks", "rollout", "pytorch", "observe", "training", "serving", "environments"]


def exists(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def loaded_after(code: str) -> set[str]:
    """Which heavy libraries a fresh interpreter has loaded after running `code`."""
    probe = f"import sys\n{code}\nprint(','.join(m for m in {HEAVY!r} if m in sys.modules))"
    paths = [str(Path(covey.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(filter(None, done.stdout.strip().split(",")))


def test_the_package_exports_its_public_names_and_nothing_else() -> None:
    assert covey.__all__ == ["GRPOConfig", "GRPOTrainer", "GRPOTrainingArgs", "__version__"]
    assert set(covey.__all__) <= set(dir(covey))


def test_the_probe_sees_a_heavy_import() -> None:
    assert loaded_after("import types; sys.modules['torch'] = types.ModuleType('torch')") == {"torch"}


@pytest.mark.parametrize(
    "code",
    [
        "import covey",
        "from covey import GRPOConfig, GRPOTrainingArgs\nGRPOConfig(num_generations=4).to_toml()",
        "import covey.config.text\ncovey.config.text.explain()",
    ],
)
def test_a_config_needs_no_backend(code: str) -> None:
    assert loaded_after(code) == set()


def test_training_args_are_the_config() -> None:
    assert covey.GRPOTrainingArgs is covey.GRPOConfig


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="GRPOConfg"):
        _ = covey.GRPOConfg  # type: ignore[attr-defined]


@pytest.mark.parametrize(("module", "names", "needs"), PROMISED)
def test_promised_names(module: str, names: list[str], needs: str) -> None:
    if not exists(needs) or (module == "covey.jax" and not exists("jax")):
        pytest.skip(f"{needs} is not there")
    loaded = importlib.import_module(module)
    missing = [name for name in names if not hasattr(loaded, name)]
    assert not missing, f"{module} lacks {missing}"


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_export_what_they_list(name: str) -> None:
    if not exists(f"covey.{name}"):
        pytest.skip(f"covey.{name} is not part of this version")
    loaded = importlib.import_module(f"covey.{name}")
    exported = getattr(loaded, "__all__", [])
    assert len(set(exported)) == len(exported)
    for public in exported:
        assert hasattr(loaded, public), f"covey.{name}.__all__ lists {public}, which is not there"

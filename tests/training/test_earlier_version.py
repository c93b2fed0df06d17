"""Run folders, adapters and recipes that version 0.1.0 wrote: they resume, load and train.

`fixtures/run-of-0.1.0.tar.gz` holds two runs of four steps that were stopped after the checkpoint of step 2 (single
answers, and agents in the house), what their last two steps gave, and that version's recipes.
"""

from __future__ import annotations

import json
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command import Command
from covey import GRPOConfig
from covey.observe.run_folder import RunFolder

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run-of-0.1.0.tar.gz"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in (*folder.rglob("*.toml"), *folder.rglob("adapter_config.json")):
        path.write_text(path.read_text().replace("/tmp/FIXTURE", str(folder)))  # where it was when they were written
    return folder


@pytest.mark.parametrize(
    ("run", "weights", "metrics"), [("run", "adapter", "metrics"), ("agents", "agents", "agents_metrics")]
)
def test_a_run_resumes_to_the_numbers_it_would_have_had(
    earlier: Path, covey: Command, run: str, weights: str, metrics: str
) -> None:
    status, _, err = covey("resume", str(earlier / run))
    assert status == 0, err
    ours, theirs = (
        load_file(path)
        for path in (earlier / run / "adapter/adapter_model.safetensors", earlier / f"expected/{weights}.safetensors")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():  # another processor rounds otherwise
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)
    lines = (earlier / f"expected/{metrics}.jsonl").read_text().splitlines()
    before = [record for record in map(json.loads, lines) if "loss" in record]
    after = [record for record in RunFolder.read(earlier / run).read_metrics() if "loss" in record]
    assert [record["step"] for record in after] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "reward"):
        assert [r[name] for r in after] == pytest.approx([r[name] for r in before], rel=1e-3, abs=1e-6)


def test_an_adapter_is_loaded(earlier: Path, covey: Command) -> None:
    status, _, err = covey("sample", str(earlier / "model"), "say one: ", "--adapter", str(earlier / "run" / "adapter"))
    assert status == 0, err


@pytest.mark.parametrize(
    "name",
    [
        *("alfworld/laptop", "alfworld/recipe", "appointments/recipe", "arithmetic/recipe", "code/recipe"),
        *("gmpo/recipe", "house/recipe", "reinforce_pp/recipe", "textworld/recipe"),
        *("usmle/document", "usmle/laptop", "usmle/recipe"),
    ],
)
def test_recipes_load(earlier: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig.from_toml(earlier / "recipes" / f"{name}.toml")
    assert GRPOConfig(**config.to_dict()) == config

"""Each rank reads its slices of a model's files: the same bits as read whole; what cannot be read so is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slice_cases import CASES, write_models
from test_ranks import finished, torchrun
from tiny_models import tiny_model

from covey.errors import ModelError
from covey.pytorch.models.slices import ModelFiles, NotSlicedError, replace_parameters

SCRIPT = Path(__file__).parent / "slice_cases.py"
FEW = ("tied, all weights", "untied, LoRA", "bfloat16, LoRA")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.mark.parametrize(("world", "machine", "cases"), [(2, "2", ()), (3, "3", FEW), (4, "2", FEW)])
def test_slices_have_the_bits_of_whole_models(
    models: Path, tmp_path: Path, world: int, machine: str, cases: tuple[str, ...]
) -> None:
    process = torchrun(world, SCRIPT, tmp_path / "found.json", models, *cases, MACHINE=machine)
    printed = finished(process)
    assert process.returncode == 0, printed[-3000:]
    found: dict[str, dict[str, Any]] = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == list(cases or CASES)
    for name, case in found.items():
        for what in ("names", "trained", "weights", "buffers", "reference", "merged", "ends"):
            assert case[what] is True, (name, what)
        assert case["part"] < 0.37 + 0.14 * (world != 3), name
        assert case["scores"] < 1e-5, name
        assert case["runner"][0] == case["runner"][1], name
        assert case["drawn"][0] == case["drawn"][1], name
        assert case["resident"] <= 4, name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def test_a_hollow_model_has_shapes_and_no_memory(folder: Path) -> None:
    files = ModelFiles.find(str(folder), dtype=torch.bfloat16)
    model = files.hollow()
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16
        assert not parameter.is_meta
        assert parameter.untyped_storage().nbytes() == 2
    assert files.read("lm_head.weight", (slice(90, 95), slice(0, 3))).shape == (5, 3)
    assert torch.equal(files.read("lm_head.weight", (slice(90, 95),)), files.read("lm_head.weight")[90:95])


def test_the_first_layers_have_one_of_each_type(tmp_path: Path) -> None:
    tiny_model("gemma3", num_layers=5).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(ModelFiles.find(str(tmp_path), dtype=torch.float32).few_layers().model.layers) == 4


def test_tied_parameters_stay_tied() -> None:
    model = replace_parameters(tiny_model("llama"), lambda parameter: parameter.detach() + 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def change(folder: Path, edit: Any) -> None:
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def rename(tensors: dict[str, torch.Tensor]) -> None:
    name = min(tensors)
    tensors[f"other.{name}"] = tensors.pop(name)


def cut(tensors: dict[str, torch.Tensor]) -> None:
    name = max(tensors)
    tensors[name] = tensors[name][:-1].contiguous()


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors[max(tensors)] = tensors[max(tensors)].to(torch.int8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [(rename, "its files hold no "), (cut, " in its files, not "), (quantise, "of I8 in its files")],
)
def test_files_of_another_form_are_read_whole(folder: Path, edit: Any, message: str) -> None:
    change(folder, edit)
    with pytest.raises(NotSlicedError, match=message):
        ModelFiles.find(str(folder), dtype=torch.float32)


def test_files_that_are_missing_or_damaged_are_left_to_whole_loading(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for damage in ("{", '{"weight_map": {"a": "nowhere.safetensors"}}', '{"weight_map": 1}'):
        index.write_text(damage)
        with pytest.raises(NotSlicedError):
            ModelFiles.find(str(folder), dtype=torch.float32)
    index.unlink()
    with pytest.raises(NotSlicedError, match="no safetensors files"):
        ModelFiles.find(str(folder), dtype=torch.float32)
    with pytest.raises(ModelError, match="there is no such file or folder"):
        ModelFiles.find(str(tmp_path / "no where"), dtype=torch.float32)


def test_a_damaged_weight_is_an_error_on_all_ranks_and_odd_files_are_read_whole(models: Path, tmp_path: Path) -> None:
    case = "tied, all weights"
    shutil.copytree(models / case, tmp_path / "nan" / case)
    change(tmp_path / "nan" / case, lambda tensors: tensors[min(tensors)].view(-1)[-1:].fill_(float("nan")))
    process = torchrun(2, SCRIPT, tmp_path / "found.json", tmp_path / "nan", case)
    printed = finished(process)
    assert process.returncode != 0
    assert "holds NaN or infinity; the file is damaged" in printed, printed[-3000:]
    shutil.copytree(models / case, tmp_path / "odd" / case)
    for file in (tmp_path / "odd" / case).glob("*.safetensors"):
        file.with_suffix(".bin").write_bytes(file.read_bytes())
    torch.save(tiny_model("llama", num_layers=3).state_dict(), tmp_path / "odd" / case / "pytorch_model.bin")
    for file in [*(tmp_path / "odd" / case).glob("*.safetensors"), *(tmp_path / "odd" / case).glob("*.index.json")]:
        file.unlink()
    process = torchrun(2, SCRIPT, tmp_path / "found.json", tmp_path / "odd", case)
    printed = finished(process)
    said = "every rank reads the whole model before it is sharded: it has no safetensors files"
    assert printed.count(said) == 1, printed[-3000:]

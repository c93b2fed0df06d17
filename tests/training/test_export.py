"""`covey export`: what is written is what was trained, and other libraries read it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tiny_models import byte_tokenizer, tiny_model
from training_runs import ROWS, build, few_vowels
from transformers import AutoModelForCausalLM, AutoTokenizer

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.adapters import Adapter, read_adapter_folder, read_tensors
from covey.errors import ModelError
from covey.observe.run_folder import RunFolder
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import attach_adapter
from covey.pytorch.models.saving import load_merged, write_gguf
from fake_hub import TOKEN, fake_hub
from fakes import SMALL, raises

IDS = torch.tensor([[5, 9, 20, 33, 1, 2, 70, 41]])
QUICK = SMALL | {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
UPLOAD = ("--push-to-hub", "me/tiny")


def train(path: Path, model: str, **changes: Any) -> Path:
    build(QUICK | {"model": model, "output_dir": str(path)}, few_vowels, held_out=3, **changes).train()
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("base"), byte_tokenizer()
    for part in (tiny_model("llama", len(tokenizer)), tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return train(tmp_path_factory.mktemp("work") / "run", str(base))


@pytest.fixture(scope="module")
def gguf_run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Of a model that transformers does not load by its name alone."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(load_model(base, dtype="float32"), folder / "base.gguf", "float32")
    return train(folder / "run", str(folder / "base.gguf"), max_steps=1, eval_steps=0)


def logits(model: Any) -> torch.Tensor:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def trained(base: Path, run: Path) -> torch.Tensor:
    return logits(attach_adapter(load_model(base, dtype="float32", device="cpu").model, run / "adapter"))


@pytest.fixture
def export(covey: Command, tmp_path: Path) -> Callable[..., Path]:
    """`covey export` to a folder of that name, which works."""

    def exported(run: Path, name: str, *options: object) -> Path:
        covey.done("export", run, tmp_path / name, *options)
        return tmp_path / name

    return exported


@pytest.fixture
def refused(covey: Command, tmp_path: Path) -> Callable[..., None]:
    """`covey export` to a folder of that name, which is refused with these words."""

    def refused(words: str, run: Path, name: str, *options: object) -> None:
        status, _, said = covey("export", run, tmp_path / name, *options)
        assert (status, words in said, "Traceback" in said) == (2, True, False), said

    return refused


def test_the_merged_model_is_the_policy(covey: Command, export: Any, run: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = covey.done("export", run, out)
    assert all(words in printed for words in (f"wrote {out}", "weights:"))
    wanted = trained(base, run)
    assert torch.allclose(logits(out), wanted, atol=1e-4)
    assert (wanted - logits(base)).abs().max() > 0.01
    assert AutoTokenizer.from_pretrained(out)("the")["input_ids"] == byte_tokenizer()("the")["input_ids"]
    assert not list(tmp_path.glob("*.tmp-*"))
    half = export(run, "half", "--dtype", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(half, dtype="auto").dtype == torch.bfloat16
    gguf = export(run, "gguf", "--gguf", "--dtype", "float32") / "model.gguf"
    assert torch.equal(logits(load_model(gguf, dtype="float32", device="cpu").model), logits(out))


def test_the_card(export: Any, run: Path) -> None:
    out = export(run, "out")
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "transformers"
    assert {"covey", "grpo"} <= set(card.data.tags)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [record["eval/reward"] for record in records if "eval/reward" in record]
    rows = (f"| before | 0 | reward {before:.4g} |", f"| after | 4 | reward {after:.4g} |")
    told = ("Rewards: few_vowels", "`optim.learning_rate`: 0.01", "Steps: 4", "torch 2", "![")
    for words in (*told, *rows, f'from_pretrained("{out}")'):
        assert words in card.text
    assert (out / "learning_curve.png").stat().st_size > 1000
    assert card.data.eval_results[0].metric_value == after
    low, high = card.text.split(f"reward {after:.4g} | ")[1].split(" |")[0].split(" to ")
    assert float(low) <= after <= float(high)


def test_which_weights(export: Any, run: Path, base: Path, tmp_path: Path) -> None:
    two, four = (export(run, name, "--checkpoint", name, "--adapter") for name in ("2", "4"))
    hashes = [read_adapter_folder(path).sha256 for path in (two, four, run / "adapter")]
    assert hashes[0] != hashes[2] == hashes[1]
    assert "Steps: 2" in (two / "README.md").read_text()
    assert "| after | 2 |" in (two / "README.md").read_text()
    best = train(tmp_path / "run", str(base), max_steps=2, eval_steps=1, eval_on_start=False)
    exported = export(best, "best", "--best", "--adapter")
    assert read_adapter_folder(exported).sha256 == read_adapter_folder(best / "best").sha256


def test_the_adapter_alone_and_for_mlx(export: Any, run: Path, gguf_run: Path, base: Path) -> None:
    """Where its base has no name, the base is written beside it."""
    for each in (run, gguf_run):
        out = export(each, each.parent.name, "--adapter")
        assert torch.allclose(logits(AutoPeftModelForCausalLM.from_pretrained(out)), trained(base, each), atol=1e-4)
        assert "AutoPeftModelForCausalLM" in (out / "README.md").read_text()
    named = export(gguf_run, "named", "--adapter", "--base", "me/base")
    assert json.loads((named / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert not (named / "base_model").exists()
    # mlx-lm adds `scale * (x @ lora_a) @ lora_b` to the layers that `keys` names; the hash says that all are equal
    out, peft = export(run, "out", "--mlx"), read_adapter_folder(run / "adapter")
    config = json.loads((out / "adapter_config.json").read_text())
    tensors = read_tensors((out / "adapters.safetensors").read_bytes())
    assert Adapter(tensors, config).sha256 == peft.sha256
    assert config["lora_parameters"]["keys"] == sorted(
        [f"mlp.{name}_proj" for name in ("down", "gate", "up")] + [f"self_attn.{name}_proj" for name in "koqv"]
    )
    assert (config["fine_tune_type"], config["num_layers"], config["model"]) == ("lora", -1, str(base))
    name, x = "model.layers.0.self_attn.q_proj", np.ones(32, np.float32)
    factors = peft.factors[name]
    added = config["lora_parameters"]["scale"] * (x @ tensors[f"{name}.lora_a"]) @ tensors[f"{name}.lora_b"]
    assert np.allclose(added, factors.scaling * factors.b @ (factors.a @ x), atol=1e-6)


def test_a_whole_model_and_one_of_python(export: Any, refused: Any, base: Path, tmp_path: Path, covey: Command) -> None:
    run = train(tmp_path / "full", str(base), use_peft=False, learning_rate=1e-3, max_steps=2)
    assert torch.equal(logits(export(run, "out")), logits(run / "adapter"))
    refused("all weights were trained, there is no adapter", run, "adapter", "--adapter")
    assert not (tmp_path / "adapter").exists()
    model, run = AutoModelForCausalLM.from_pretrained(base), tmp_path / "run"
    config = GRPOConfig(output_dir=str(run), **(QUICK | {"max_steps": 1, "eval_steps": 0}))
    GRPOTrainer(model, few_vowels, config, ROWS, processing_class=byte_tokenizer()).train()
    covey.done("export", run)
    assert torch.allclose(logits(run / "export"), trained(base, run), atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_an_adapter_that_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    """On a head that is tied to the embedding a merge would change both."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["lm_head"]))
    for parameter in (value for name, value in model.named_parameters() if "lora_B" in name):
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    raises(ModelError, "Export the adapter alone", load_merged, str(base), tmp_path)


def test_what_does_not_fit_is_not_there_or_is_in_the_way(refused: Any, run: Path, tmp_path: Path, covey: Any) -> None:
    refused("give one of them", run, "out", "--adapter", "--mlx")
    refused("give one of them", run, "out", "--best", "--checkpoint", "2")
    refused("step_000003", run, "out", "--checkpoint", "3")
    refused("holds no run", tmp_path / "nothing", "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    refused("is there already; give another folder", run, "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "precious"
    with RunFolder.create(tmp_path / "begun") as begun:
        begun.write_config(GRPOConfig().to_toml())
    refused("no adapter yet; name a checkpoint with --checkpoint, or wait", tmp_path / "begun", "out")
    assert "--push-to-hub" in covey("export", "--help")[1]


def test_an_export_is_uploaded(covey: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        printed = covey.done("export", run, tmp_path / "out", *UPLOAD, "--private")
    assert f"uploaded to {hub.url}/me/tiny/commit/0" in printed
    assert hub.private == {"me/tiny": True}
    files = hub.files["me/tiny", "main"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "learning_curve.png"} <= files.keys()
    assert "COMPLETE" not in files
    assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert b'from_pretrained("me/tiny")' in files["README.md"]


def test_without_rights_or_a_hub(refused: Any, run: Path, gguf_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with fake_hub(monkeypatch) as hub:
        refused("log in with `hf auth login`", run, "out", *UPLOAD)
        monkeypatch.setenv("HF_TOKEN", "hf_may_read")
        refused("this token may only read", run, "out", *UPLOAD)
        assert not (tmp_path / "out").exists()
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        refused("others cannot load the adapter's base", gguf_run, "out", "--adapter", *UPLOAD)
    assert hub.files == {}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused("the hub cannot be reached", run, "out", *UPLOAD)

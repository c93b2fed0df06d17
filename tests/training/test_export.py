"""`covey export`: what is written is what was trained, and other libraries read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.adapters import Adapter, read_adapter_folder, read_tensors
from covey.observe.run_folder import RunFolder
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import attach_adapter
from covey.pytorch.models.saving import write_gguf
from fake_hub import TOKEN, fake_hub

IDS = torch.tensor([[5, 9, 20, 33, 1, 2, 70, 41]])


def few_vowels(completions: list[Any], **columns: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(letter not in "aeiou" for letter in text) / max(len(text), 1) for text in texts]


ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "prompts_per_step": 2,
    "max_completion_length": 8,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "lora_r": 4,
    "save_steps": 2,
    "eval_steps": 2,
    "progress": False,
}


def train(path: Path, model: str, **changes: Any) -> Path:
    config = GRPOConfig(model=model, output_dir=str(path), **(SETTINGS | changes))
    GRPOTrainer(reward_funcs=few_vowels, args=config, train_dataset=ROWS, eval_dataset=ROWS[:3]).train()
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("base"), byte_tokenizer()
    tiny_model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return train(tmp_path_factory.mktemp("work") / "run", str(base))


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return train(tmp_path_factory.mktemp("work") / "full", str(base), use_peft=False, learning_rate=1e-3, max_steps=2)


@pytest.fixture(scope="module")
def gguf_run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Of a model that transformers does not load by its name alone."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(load_model(base, dtype="float32"), folder / "base.gguf", "float32")
    return train(folder / "run", str(folder / "base.gguf"), max_steps=1, eval_steps=0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def trained(base: Path, adapter: Path) -> torch.Tensor:
    return logits(attach_adapter(load_model(base, dtype="float32", device="cpu").model, adapter))


def test_the_merged_model_is_the_policy(covey: Command, run: Path, base: Path, tmp_path: Path) -> None:
    status, printed, _ = covey("export", run, tmp_path / "out")
    assert (status, f"wrote {tmp_path / 'out'}" in printed) == (0, True)
    assert "weights:" in printed
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = trained(base, run / "adapter")
    assert torch.allclose(logits(found), wanted, atol=1e-4)
    assert (wanted - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.01
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the")["input_ids"] == byte_tokenizer()("the")["input_ids"]
    assert not list(tmp_path.glob("*.tmp-*"))
    assert covey("export", run, tmp_path / "half", "--dtype", "bfloat16")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_the_card(covey: Command, run: Path, tmp_path: Path) -> None:
    covey("export", run, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers"
    assert {"covey", "grpo"} <= set(card.data.tags)
    text = card.text
    assert "Rewards: few_vowels" in text
    assert "`optim.learning_rate`: 0.01" in text
    assert "Steps: 4" in text
    assert "torch 2" in text
    assert f'from_pretrained("{tmp_path / "out"}")' in text
    assert "![" in text
    assert (tmp_path / "out" / "learning_curve.png").stat().st_size > 1000
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [record["eval/reward"] for record in records if "eval/reward" in record]
    assert f"| before | 0 | reward {before:.4g} |" in text
    assert f"| after | 4 | reward {after:.4g} |" in text
    assert card.data.eval_results[0].metric_value == after
    low, high = text.split(f"reward {after:.4g} | ")[1].split(" |")[0].split(" to ")
    assert float(low) <= after <= float(high)


def test_which_weights(covey: Command, run: Path, base: Path, tmp_path: Path) -> None:
    assert covey("export", run, tmp_path / "two", "--checkpoint", 2, "--adapter")[0] == 0
    assert covey("export", run, tmp_path / "four", "--checkpoint", 4, "--adapter")[0] == 0
    two, four, last = (
        read_adapter_folder(path).sha256 for path in (tmp_path / "two", tmp_path / "four", run / "adapter")
    )
    assert two != last == four
    assert "Steps: 2" in (tmp_path / "two" / "README.md").read_text()
    assert "| after | 2 |" in (tmp_path / "two" / "README.md").read_text()
    best = train(tmp_path / "run", str(base), max_steps=2, eval_steps=1, eval_on_start=False)
    assert covey("export", best, tmp_path / "best", "--best", "--adapter")[0] == 0
    assert read_adapter_folder(tmp_path / "best").sha256 == read_adapter_folder(best / "best").sha256


def test_the_adapter_alone(covey: Command, run: Path, base: Path, tmp_path: Path) -> None:
    assert covey("export", run, tmp_path / "out", "--adapter")[0] == 0
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(found), trained(base, run / "adapter"), atol=1e-4)
    assert "AutoPeftModelForCausalLM" in (tmp_path / "out" / "README.md").read_text()


def test_an_adapter_whose_base_has_no_name(covey: Command, gguf_run: Path, base: Path, tmp_path: Path) -> None:
    """The base is written beside it."""
    assert covey("export", gguf_run, tmp_path / "out", "--adapter")[0] == 0
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(found), trained(base, gguf_run / "adapter"), atol=1e-4)
    assert covey("export", gguf_run, tmp_path / "named", "--adapter", "--base", "me/base")[0] == 0
    settings = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "me/base"
    assert not (tmp_path / "named" / "base_model").exists()


def test_mlx(covey: Command, run: Path, base: Path, tmp_path: Path) -> None:
    """mlx-lm adds `scale * (x @ lora_a) @ lora_b` to the layers that `keys` names; the hash says that all are equal."""
    assert covey("export", run, tmp_path / "out", "--mlx")[0] == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    tensors = read_tensors((tmp_path / "out" / "adapters.safetensors").read_bytes())
    assert Adapter(tensors, config).sha256 == read_adapter_folder(run / "adapter").sha256
    assert config["lora_parameters"]["keys"] == sorted(
        [f"mlp.{name}_proj" for name in ("down", "gate", "up")] + [f"self_attn.{name}_proj" for name in "koqv"]
    )
    assert (config["fine_tune_type"], config["num_layers"], config["model"]) == ("lora", -1, str(base))
    name = "model.layers.0.self_attn.q_proj"
    peft = read_adapter_folder(run / "adapter").factors[name]
    x = np.ones(32, np.float32)
    added = config["lora_parameters"]["scale"] * (x @ tensors[f"{name}.lora_a"]) @ tensors[f"{name}.lora_b"]
    assert np.allclose(added, peft.scaling * peft.b @ (peft.a @ x), atol=1e-6)


def test_gguf(covey: Command, run: Path, tmp_path: Path) -> None:
    assert covey("export", run, tmp_path / "out", "--gguf", "--dtype", "float32")[0] == 0
    assert covey("export", run, tmp_path / "merged")[0] == 0
    found = load_model(tmp_path / "out" / "model.gguf", dtype="float32", device="cpu")
    assert torch.equal(logits(found.model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")))


def test_a_whole_model(covey: Command, full_run: Path, tmp_path: Path) -> None:
    assert covey("export", full_run, tmp_path / "out")[0] == 0
    one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out", full_run / "adapter"))
    assert torch.equal(logits(one), logits(other))
    status, _, said = covey("export", full_run, tmp_path / "adapter", "--adapter")
    assert (status, "all weights were trained, there is no adapter" in said) == (2, True)
    assert not (tmp_path / "adapter").exists()


def test_a_model_that_was_loaded_in_python(covey: Command, base: Path, tmp_path: Path) -> None:
    """The run knows where it came from."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = GRPOConfig(output_dir=str(tmp_path / "run"), **(SETTINGS | {"max_steps": 1, "eval_steps": 0}))
    GRPOTrainer(model, few_vowels, config, ROWS, processing_class=byte_tokenizer()).train()
    assert covey("export", tmp_path / "run")[0] == 0
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export"))
    assert torch.allclose(found, trained(base, tmp_path / "run" / "adapter"), atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_an_adapter_that_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    """On a head that is tied to the embedding a merge would change both."""
    from peft import LoraConfig, get_peft_model

    from covey.errors import ModelError
    from covey.pytorch.models.saving import load_merged

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["lm_head"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(ModelError, match="Export the adapter alone"):
        load_merged(str(base), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--adapter", "--mlx"), "give one of them"),
        (("--best", "--checkpoint", "2"), "give one of them"),
        (("--checkpoint", "3"), "step_000003"),
    ],
    ids=str,
)
def test_clear_errors(covey: Command, run: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    status, _, said = covey("export", run, tmp_path / "out", *options)
    assert status == 2
    assert message in said
    assert "Traceback" not in said


def test_what_is_not_there_and_what_is_in_the_way(covey: Command, run: Path, tmp_path: Path) -> None:
    status, _, said = covey("export", tmp_path / "nothing", tmp_path / "out")
    assert (status, "holds no run" in said) == (2, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    status, _, said = covey("export", run, tmp_path / "full")
    assert (status, "is there already; give another folder" in said) == (2, True)
    assert (tmp_path / "full" / "mine.txt").read_text() == "precious"
    with RunFolder.create(tmp_path / "begun") as begun:
        begun.write_config(GRPOConfig().to_toml())
    status, _, said = covey("export", tmp_path / "begun", tmp_path / "out")
    assert (status, "no adapter yet; name a checkpoint with --checkpoint, or wait" in said) == (2, True)
    assert "--push-to-hub" in covey("export", "--help")[1]


class TestHub:
    def test_an_export_is_uploaded(
        self, covey: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_hub(monkeypatch) as hub:
            monkeypatch.setenv("HF_TOKEN", TOKEN)
            status, printed, said = covey("export", run, tmp_path / "out", "--push-to-hub", "me/tiny", "--private")
        assert status == 0, said
        assert f"uploaded to {hub.url}/me/tiny/commit/0" in printed
        assert hub.private == {"me/tiny": True}
        files = hub.files["me/tiny", "main"]
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "learning_curve.png"} <= files.keys()
        assert "COMPLETE" not in files
        assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
        assert b'from_pretrained("me/tiny")' in files["README.md"]

    def test_without_rights_nothing_is_begun(
        self, covey: Command, run: Path, gguf_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_hub(monkeypatch) as hub:
            status, _, said = covey("export", run, tmp_path / "out", "--push-to-hub", "me/tiny")
            assert status == 2
            assert "log in with `hf auth login`" in said
            monkeypatch.setenv("HF_TOKEN", "hf_may_read")
            status, _, said = covey("export", run, tmp_path / "out", "--push-to-hub", "me/tiny")
            assert (status, "this token may only read" in said) == (2, True)
            assert not (tmp_path / "out").exists()
            monkeypatch.setenv("HF_TOKEN", TOKEN)
            status, _, said = covey("export", gguf_run, tmp_path / "out", "--adapter", "--push-to-hub", "me/tiny")
            assert (status, "others cannot load the adapter's base" in said) == (2, True)
        assert hub.files == {}

    def test_a_hub_that_is_away(
        self, covey: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_hub(monkeypatch):
            pass
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        status, _, said = covey("export", run, tmp_path / "out", "--push-to-hub", "me/tiny")
        assert (status, "the hub cannot be reached" in said) == (2, True)

"""QLoRA as TRL's users write it: a config of bitsandbytes for the trainer, or a model that is quantised already."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTQConfig, TorchAoConfig
from trl_runs import made, moved_by_training

from covey.errors import ConfigError, ModelError
from covey.pytorch.models.quantised import quantised_layers
from covey.trl import ModelConfig, get_quantization_config

bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


MAPPING = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT, FP4 = BitsAndBytesConfig(load_in_8bit=True), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")


@pytest.mark.parametrize(("config", "name"), [(NF4, "nf4"), (MAPPING, "nf4"), (EIGHT, "int8"), (FP4, "none")])
def test_a_config_for_the_model(folder: Path, tmp_path: Path, config: Any, name: str) -> None:
    options = {"optim": "adamw_8bit", "model_init_kwargs": {"quantization_config": config}, "max_steps": 2}
    trainer = made(folder, tmp_path, **options, peft_config=LORA)
    assert trainer.run.args.model.quantization == name  # none: transformers has loaded it so
    assert trainer.run.args.optim.optimizer == "adamw_8bit"
    assert isinstance(trainer.optimizer, bitsandbytes.optim.AdamW8bit)
    assert len(list(quantised_layers(trainer.model))) == 14
    changed = moved_by_training(trainer)
    assert changed
    assert all("lora_" in name for name in changed)


def test_a_config_for_the_trainer(folder: Path, tmp_path: Path) -> None:
    torchao = TorchAoConfig(__import__("torchao").quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    trainer = made(folder, tmp_path, max_steps=2, peft_config=LORA, quantization_config=torchao)
    assert len(list(quantised_layers(trainer.model))) == 14
    assert moved_by_training(trainer)


def test_a_model_that_is_quantised(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4, dtype=torch.bfloat16)
    trainer = made(model, tmp_path, beta=0.1, max_steps=2, processing_class=tiny_tokenizer(), peft_config=LORA)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert all("lora_" in name for name in moved_by_training(trainer))


def test_what_is_not_possible(folder: Path, tmp_path: Path) -> None:
    skips = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"])
    gptq = {"peft_config": LORA, "quantization_config": GPTQConfig(bits=4, dataset=["a"])}
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4)
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ConfigError, "quantised weights cannot be trained themselves", folder, {"quantization_config": NF4}),
        (ConfigError, "a GPTQConfig; adapters are trained on models quantised by bitsandbytes", folder, gptq),
        (ConfigError, "^quantization_config: pkg:any is a GGUF file", "pkg:any", gptq | {"quantization_config": skips}),
        (ConfigError, "the model is loaded already", loaded, gptq | {"quantization_config": NF4}),
        (ModelError, "in covey.trl pass peft_config", loaded, {"processing_class": tiny_tokenizer()}),
    ]
    for kind, message, model, given in cases:
        with pytest.raises(kind, match=message):
            made(model, tmp_path, **given)


def test_a_script_s_arguments() -> None:
    assert get_quantization_config(ModelConfig()) is None
    eight, four = (get_quantization_config(ModelConfig(**{name: True})) for name in ("load_in_8bit", "load_in_4bit"))
    assert eight.load_in_8bit
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (True, "nf4", False)

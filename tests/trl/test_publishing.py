"""`push_to_hub` and model cards of `covey.trl.GRPOTrainer`, against a small hub on loopback."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl_runs import ROWS, trained

from command import Command
from covey.errors import HubError
from fake_hub import TOKEN, fake_hub
from fakes import raises

LORA: dict[str, Any] = {"peft_config": LoraConfig(target_modules=["q_proj"]), "learning_rate": 0.01, "max_steps": 1}


def test_a_trained_model_is_uploaded(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(make(out=tmp_path / "tiny-GRPO", max_steps=1, save_steps=1, hub_token=TOKEN))
    with fake_hub(monkeypatch) as hub:
        place = trainer.push_to_hub("First try", dataset_name="me/rows", tags="poetry")
    assert (place, hub.messages) == (f"{hub.url}/me/tiny-GRPO/commit/0", ["First try"])
    found = set(hub.files["me/tiny-GRPO", "main"])
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= found
    assert not [name for name in found if name.startswith(("checkpoint-", "covey/"))]  # what is for resuming stays
    card = ModelCard.load(tmp_path / "tiny-GRPO" / "README.md")
    assert (card.data.datasets, "poetry" in card.data.tags) == (["me/rows"], True)
    assert "Rewards: unique_letters" in card.text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-GRPO").config.model_type == "llama"


def test_the_end_of_training_uploads(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_options = {"hub_model_id": "us/named", "hub_token": TOKEN, "hub_private_repo": True, "hub_revision": "draft"}
    with fake_hub(monkeypatch) as hub:
        trainer = make(**LORA, push_to_hub=True, **hub_options)
        assert hub.private == {"us/named": True}  # found out before anything is trained
        trainer.train()
        assert hub.messages == ["End of training"]
        trainer.save_model()
        assert hub.messages[1:] == ["Model save"]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(hub.files["us/named", "draft"])
    assert ("us/named", "main") not in hub.files
    assert AutoPeftModelForCausalLM.from_pretrained(tmp_path).peft_config["default"].r == 8
    assert "AutoPeftModelForCausalLM" in (tmp_path / "README.md").read_text()


def test_covey_export_reads_the_run(covey: Command, make: Any, model_folder: Path, tmp_path: Path) -> None:
    """Final weights and those of a checkpoint, though the adapter's form is in no setting of the run."""
    trainer = trained(make(**LORA, save_steps=1))
    for options in ((), ("--checkpoint", 1)):
        out = tmp_path / f"export{len(options)}"
        status, _, said = covey("export", tmp_path / "covey", out, *options)
        assert status == 0, said
        ids, merged = torch.tensor([[5, 6, 7]]), AutoModelForCausalLM.from_pretrained(out)
        assert torch.allclose(merged(ids).logits, trainer.model(ids).logits, atol=1e-4)
    card = (out / "README.md").read_text()
    assert f"Base model: {model_folder.name}\n" in card
    assert str(model_folder) not in card  # a path means nothing elsewhere


def test_a_card_before_and_without_a_run(make: Any, tmp_path: Path) -> None:
    make().create_model_card(model_name="mine", tags=["a", "b"])
    card = ModelCard.load(tmp_path / "README.md")
    assert {"a", "b", "covey"} <= set(card.data.tags)
    assert "# mine" in card.text
    assert "Held out" not in card.text


def test_a_card_tells_of_the_adapter_of_problems_and_of_optimiser_steps(make: Any, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "num_iterations": 2}
    options |= dict.fromkeys(("num_generations_eval", "eval_steps", "max_steps"), 4)
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj", "q_proj"])
    trainer = trained(make(held_out=ROWS[:3], peft_config=lora, per_device_eval_batch_size=4, **options))
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    for told in ("Steps: 4\n", "`model.lora_r`: 4\n", "`model.lora_alpha`: 6.0\n", "|  | 4 | reward "):
        assert told in card
    assert re.search(r" to .* \| 3 \|", card)  # an interval over 3 problems, of 12 completions
    kept = (tmp_path / "covey" / "config.toml").read_text()
    assert re.search(r'lora_r = 4\nlora_alpha = 6.0\n.*\nlora_target_modules = \[\s*"q_proj",\s*"v_proj",\s*\]', kept)
    assert make(model=trainer.model, out=tmp_path / "again").run.args.lora_r == 4


def test_missing_rights_are_one_clear_error(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(monkeypatch) as hub:
        for token, message in ((None, "log in with"), ("hf_read", "this token may only read")):
            raises(HubError, message, make, out=tmp_path / "a", push_to_hub=True, hub_token=token)
        trainer = make(out=tmp_path / "b", max_steps=1, push_to_hub=True, hub_token=TOKEN)

        class Revoke(TrainerCallback):
            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                args.hub_token = "hf_read"

        trainer.add_callback(Revoke)
        raises(HubError, "nothing is lost", trainer.train)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").config.model_type == "llama"
        trainer.push_to_hub(token=TOKEN)
    assert "model.safetensors" in hub.files["me/b", "main"]

"""Models of which each rank reads its slices, beside the same models read whole; see rank_cases.py."""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from covey import GRPOConfig
from covey.distributed.ranks import Ranks
from covey.distributed.sharded import LeadingPolicy
from covey.distributed.sliced import SlicedPolicy
from covey.errors import ModelError
from covey.pytorch.attention.probe import probe_pack
from covey.pytorch.backend import PyTorchBackend
from covey.pytorch.engine.merge import EffectiveWeights
from covey.training.launch import RanksBackend
from covey.types import Request, SamplingSettings

TWO, MOVING = ["q_proj", "up_proj"], {"reference_update_steps": 100, "reference_ema_decay": 0.99}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # options of the model, settings of the run, size of its files
    "tied, all weights": ({}, {"use_peft": False}, "20KB"),
    "tied, LoRA": ({}, {}, "1GB"),
    "untied, all weights": ({"tie_word_embeddings": False}, {"use_peft": False, "beta": 0.04}, "1GB"),
    "untied, LoRA": ({"tie_word_embeddings": False}, {"beta": 0.04, **MOVING}, "20KB"),
    "Qwen3, all weights": ({"name": "qwen3"}, {"use_peft": False}, "20KB"),
    "Qwen3, LoRA": ({"name": "qwen3", "num_layers": 4}, {"gradient_checkpointing": True}, "20KB"),
    "bfloat16, LoRA": ({"num_layers": 3}, {"dtype": "bfloat16"}, "20KB"),
    "Mistral, LoRA": ({"name": "mistral", "num_layers": 4}, {}, "20KB"),
    "Gemma 3, LoRA on two": ({"name": "gemma3", "num_layers": 4}, {"lora_target_modules": TWO}, "20KB"),
    "GPT-2, all weights": ({"name": "gpt2", "num_layers": 3}, {"use_peft": False}, "20KB"),
}


def write_models(folder: Path) -> None:
    """One model for each case, as its user would have it; one is damaged, the files of another have another form."""
    for case, (options, _, size) in CASES.items():
        options = {"name": "llama", "num_layers": 3} | options
        tiny_model(options.pop("name"), **options).save_pretrained(folder / case, max_shard_size=size)
        tiny_tokenizer().save_pretrained(folder / case)
    shutil.copytree(folder / "tied, all weights", folder / "damaged")
    change(folder / "damaged", lambda tensors: tensors[min(tensors)].view(-1)[-1:].fill_(float("nan")))
    shutil.copytree(folder / "tied, all weights", folder / "odd", ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(tiny_model("llama", num_layers=3).state_dict(), folder / "odd" / "pytorch_model.bin")


def change(folder: Path, edit: Any) -> None:
    """The last file of a model."""
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def made(case: str, ranks: Ranks, folder: Path) -> list[str]:
    """All ranks: what is said when this model is made, the error last."""
    said: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(heard)
    try:
        config = GRPOConfig(model=str(folder / "models" / case), learner_kind="sharded", use_peft=False)
        RanksBackend(ranks).make_policy(config)
    except ModelError as error:
        said.append(str(error))
    finally:
        logging.getLogger().removeHandler(heard)
    return [each for their in ranks.gather(said) for each in their]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    settings = {"lora_r": 4, "beta": 0.0, "num_generations": 2, "seed": 5, "fused_layers": False} | CASES[case][1]
    config = GRPOConfig(model=str(folder / "models" / case), learner_kind="sharded", **settings)
    backend = RanksBackend(ranks)
    leading = backend.make_policy(config)
    assert isinstance(leading, LeadingPolicy)
    policy = leading.own
    assert isinstance(policy, SlicedPolicy), "read whole"
    whole = PyTorchBackend().make_policy(config)
    own, theirs = dict(policy.model.named_parameters()), dict(whole.model.named_parameters())
    buffers, their_buffers = dict(policy.model.named_buffers()), dict(whole.model.named_buffers())
    sampler = backend.make_own(config, leading)
    sampler.publish(1, "")
    with torch.no_grad():
        for name, parameter in whole.named_trainable_parameters():  # and as if something had been learned
            if "lora_B" in name:
                parameter.fill_(0.01)
                own[name].fill_(0.01)
    sampler.publish(2, "")
    with policy.layer_by_layer() as held:
        merged = {name: held[name].clone() for name in held}
    expected = EffectiveWeights(whole.model)
    parts = [p.to_local().numel() for p in own.values() if isinstance(p, DTensor)]
    same = [torch.equal(t, their_buffers[n]) and t.dtype == their_buffers[n].dtype for n, t in buffers.items()]
    pack = probe_pack(whole.held.lm)
    with torch.no_grad():
        mine, other = policy.score(pack).logp, whole.score(pack).logp
    engine = PyTorchBackend().make_sampler(config, whole)
    request = [Request([5, 6, 7, 8], (1, 2, 3))]
    how = SamplingSettings(max_tokens=8, temperature=1.0)
    drawn = [draw(request, how, policy_version=v)[0] for draw, v in ((sampler.engine, 2), (engine, 0))]
    trained, expected_trained = ([n for n, _ in each.named_trainable_parameters()] for each in (policy, whole))
    return {
        "names": list(own) == list(theirs) and list(buffers) == list(their_buffers),
        "trained": trained == expected_trained,
        "weights": all(torch.equal(full(p), theirs[n]) and p.dtype == theirs[n].dtype for n, p in own.items()),
        "buffers": all(same),
        "reference": sorted(policy.reference._snapshot) == sorted(whole.reference._snapshot),
        "merged": list(merged) == list(expected) and all(torch.equal(t, expected[n]) for n, t in merged.items()),
        "part": sum(parts) / sum(p.numel() for p in own.values()),
        "scores": float((mine - other).abs().max()),
        "runner": [sampler.engine.runner, engine.runner],
        "drawn": [each.token_ids.tolist() for each in drawn],
        "ends": list(policy.eos_token_ids) == list(whole.eos_token_ids),
        "resident": policy.shape.get_input_embeddings().weight.untyped_storage().nbytes(),
    }

"""A trained policy as one model: base and adapter merged, and checked to compute what the two computed together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.errors import ModelError
from covey.files import save_tokenizer
from covey.pytorch.models.loading import LoadedModel, load_model
from covey.pytorch.models.lora import attach_adapter
from covey.pytorch.rounding import unexplained


def load_merged(
    base: str,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """A base model with an adapter merged into its weights, in float32 on the CPU.

    Raises:
        ModelError: it cannot be loaded, or the merged model computes something else, as it does where an adapter was
            trained on an output head that is tied to the embedding.
    """
    loaded = load_model(base, tokenizer, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
    model: Any = loaded.model
    if adapter is not None:
        together = attach_adapter(model, adapter)
        wanted = _probe(together, loaded.eos_token_ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied layers: what comes of it is measured
            model = together.merge_and_unload()
        problem = unexplained(_probe(model, loaded.eos_token_ids), wanted, wanted)
        if problem:
            raise ModelError(
                f"{adapter}: merged into {base} it is not the policy that the two together are ({problem}); was it "
                "trained on tied embeddings? Export the adapter alone"
            )
    ends = list(loaded.eos_token_ids)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    return LoadedModel(model, loaded.tokenizer, loaded.source, loaded.eos_token_ids)


def save_model(loaded: LoadedModel, folder: str | Path, dtype: str = "float32") -> None:
    """Write a model and its tokenizer as a Hugging Face folder.

    Args:
        loaded: the model.
        folder: where to.
        dtype: float32, bfloat16 or float16; the model is cast in place.
    """
    model: Any = loaded.model.to(getattr(torch, dtype))
    model.save_pretrained(str(folder))
    save_tokenizer(loaded.tokenizer, folder)
    for file in Path(folder).glob("*.safetensors"):
        file.chmod((Path(folder) / "config.json").stat().st_mode)  # safetensors lets nobody but the owner read


@torch.no_grad()
def _probe(model: nn.Module, tokens: tuple[int, ...]) -> torch.Tensor:
    """`[T, V]` log-probabilities after a few tokens of any kind."""
    ids = torch.tensor([[*range(5, 17), *tokens]])
    found: torch.Tensor = model(input_ids=ids).logits[0].float().log_softmax(-1)
    return found

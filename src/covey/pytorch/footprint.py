"""How much memory a model takes on a GPU, by formula: no weight is loaded and no device is asked.

    held        weights, adapter, moments, a reference that is a copy, what the sampler does not give back
    starting    what compares ways of running the model with its own float32: embedding, head and a layer in float32
    sampling    the sampler's copy of the layers; keys and values; logits and what is drawn from them
    learning    gradients; activations of a pass; the larger of the head's chunk and a layer's backward
    step        gradients; what of the moments waits in the host's memory, a slice at a time

What is held is there always, of the others one at a time. Sizes are of one process and of models of Llama's shape; for
others they are a guess. `tests/pytorch/test_footprint.py` compares each formula with what the code allocates.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from covey.errors import ModelError
from covey.pytorch.logprobs import CHUNK_BYTES
from covey.pytorch.models.loading import auto_class, gguf_read_once, is_vision, locate, quiet, refuse_senses
from covey.pytorch.models.lora import album_of, attach_lora
from covey.pytorch.models.pictures import language_half
from covey.pytorch.optimizers import SLICE_BYTES

# Bytes of a frozen number in the layers by its format, scales included; of both moments of a trained number by the
# optimiser; of a number that is computed with.
BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "nf4": 0.52, "int8": 1.0, "torchao_int8": 1.0}
BYTES_PER_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.03, "paged_adamw_8bit": 2.03}
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PREFILL_TOKENS = 2048
"""Tokens of prompts that the sampler computes at once (`covey.pytorch.engine.device`)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the formulas know of a model."""

    layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    embedding: int
    head: int
    inside: int
    trained: int
    adapter: int = 0
    ranks: int = 0
    largest: int = 0
    head_norms: bool = False
    output_norms: bool = False
    context: int = 1 << 62
    tower: int = 0

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Of a transformers model, or of the `PeftModel` around one; parameters need no memory."""
        told = model.config.get_text_config()
        heads = int(getattr(told, "num_attention_heads", 0)) or 1
        kept = int(getattr(told, "num_key_value_heads", None) or heads)
        dim = int(getattr(told, "head_dim", None) or told.hidden_size // heads)
        experts = int(getattr(told, "num_experts_per_tok", None) or 1)
        inner = getattr(told, "moe_intermediate_size", None) or getattr(told, "intermediate_size", None)
        embedding, head = (getter().weight for getter in (model.get_input_embeddings, model.get_output_embeddings))
        own = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
        lora = {name: p for name, p in model.named_parameters() if ".lora_" in name}
        trained = [p for p in model.parameters() if p.requires_grad]
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        apart = 0 if head is embedding else head.numel()
        return cls(
            layers=int(told.num_hidden_layers),
            width=int(told.hidden_size),
            inner=int(inner or 4 * told.hidden_size) * experts,
            queries=heads * dim,
            keys=kept * dim,
            vocabulary=len(embedding),
            embedding=embedding.numel(),
            head=apart,
            inside=sum(p.numel() for p in own.values()) - embedding.numel() - apart,
            trained=sum(p.numel() for p in trained),
            adapter=sum(p.numel() for p in lora.values()),
            ranks=sum(len(p) for name, p in lora.items() if ".lora_A" in name) // int(told.num_hidden_layers),
            largest=max((p.numel() for p in trained), default=0),
            head_norms="q_norm" in names,
            output_norms=bool({"post_feedforward_layernorm", "post_mlp_layernorm"} & names),
            context=int(getattr(told, "max_position_embeddings", None) or 1 << 62),
            tower=0
            if (album := album_of(model)) is None
            else sum(p.numel() for m in album.tower for p in m.parameters()),
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """What the formulas know of a run."""

    dtype: str = "bfloat16"
    weights: str = "bfloat16"
    layers: Literal["fused", "own"] = "fused"
    checkpointed: bool = False
    autocast: str = ""
    moments: str = "adamw"
    offload: bool = False
    reference_copy: bool = False
    tokens: int = 1024
    longest: int = 0
    vectors: int = 1
    exact_sum: bool = False
    samples: bool = True
    sampler_dtype: str = "bfloat16"
    cache_bytes: float = 0.0
    rows: int = 64


def layer_bytes(shape: Shape, chosen: Choices) -> float:
    """What one layer keeps of a token for its backward.

    Fused: the stream before attention and MLP, 2 H; queries, keys, values and attention's output, 2 Q + 2 K; gate and
    up, 2 F; an adapter's rank a projection; what norms of heads and of outputs read; a float32 for each of two norms.
    Under autograd a norm keeps its input in float32 and its output, and what its weight multiplies where that is
    trained; the MLP 4 F. Under autocast each product reads a narrow copy of its own of what a norm returns.
    """
    h, f, q, k = shape.width, shape.inner, shape.queries, shape.keys
    b = DTYPE_BYTES[chosen.dtype]
    if chosen.layers == "fused":
        numbers = 2 * h + 2 * q + 2 * k + 2 * f + shape.ranks
        numbers += (q + k) * shape.head_norms + 2 * h * shape.output_norms
        return b * numbers + 8.0
    trained = shape.adapter == 0
    norms = 2 + 2 * shape.output_norms
    narrow = DTYPE_BYTES[chosen.autocast or chosen.dtype]
    streams = norms * h * (4 + b * trained) + (5 * h * narrow if chosen.autocast else 2 * h * b)
    heads = (q + k) * (4 + b * trained) * shape.head_norms
    return streams + heads + narrow * (2 * q + 2 * k + 4 * f + shape.ranks) + 4.0 * shape.queries / 64


def activation_bytes(shape: Shape, chosen: Choices, tokens: int) -> float:
    """What a pass over so many tokens keeps: of all layers, or, checkpointed, their inputs and one layer's whole; under
    autocast the layers' matrices in the narrow format too.
    """
    each = layer_bytes(shape, chosen)
    stream = shape.width * DTYPE_BYTES[chosen.dtype]
    matrices = DTYPE_BYTES[chosen.autocast] * shape.inside if chosen.autocast else 0
    if chosen.checkpointed:
        return tokens * ((shape.layers + 2) * stream + each) + matrices / shape.layers
    return tokens * (2 * stream + shape.layers * each) + matrices


def backward_bytes(shape: Shape, chosen: Choices, tokens: int) -> float:
    """What a layer's backward needs beside what was kept: fused, four arrays of the MLP's width and three of the
    stream's; under autograd, which frees what was kept, 2 F + H, and a trained layer's largest matrix' gradient.
    """
    b = DTYPE_BYTES[chosen.dtype]
    if chosen.layers == "fused":
        return tokens * b * (4.0 * shape.inner + 3 * shape.width)
    narrow = DTYPE_BYTES[chosen.autocast or chosen.dtype]
    own = 4 * shape.inner * shape.width if shape.adapter == 0 else 0
    return tokens * (2.0 * narrow * shape.inner + b * shape.width) + own


def head_bytes(shape: Shape, chosen: Choices, tokens: int) -> float:
    """The head's chunk (`covey.pytorch.logprobs`), two buffers of float32 logits and in a narrow dtype a third, narrow
    one; and a gradient `[tokens, H]` for each score that has one, or of a trained head its own and its input's.
    """
    b = DTYPE_BYTES[chosen.dtype]
    rows = max(min(CHUNK_BYTES // (4 * shape.vocabulary), tokens), 1)
    chunk = rows * shape.vocabulary * (8 + (b if b < 4 else 0))
    if shape.adapter == 0:
        return chunk + 4.0 * (tokens * shape.width + shape.embedding)
    return chunk + float(tokens * shape.width * b * chosen.vectors)


def phases(shape: Shape, chosen: Choices) -> dict[str, dict[str, float]]:
    """Bytes of each part, by when it is there."""
    b, s = DTYPE_BYTES[chosen.dtype], DTYPE_BYTES[chosen.sampler_dtype]
    tokens, lora = max(chosen.tokens, chosen.longest), shape.adapter > 0
    trained = 4.0 * shape.trained  # float32, whatever the rest is
    moments = BYTES_PER_MOMENTS[chosen.moments] * shape.trained
    reference = {"reference": trained} if chosen.reference_copy else {}
    ends = shape.embedding + shape.head
    held = {"weights": ends * b + shape.inside * (BYTES_PER_WEIGHT[chosen.weights] if lora else b)}
    if shape.tower:
        held["picture tower"] = float(shape.tower * b)
    if lora:
        held["adapter"] = trained
    if not chosen.offload:
        held |= {"AdamW's moments": moments} | reference
    starting = {"float32 of embeddings and of a layer": 4 * (ends + shape.inside / shape.layers)} if b < 4 else {}
    learning = {"gradients": trained, "activations": activation_bytes(shape, chosen, tokens)}
    head_or_layer = max(head_bytes(shape, chosen, tokens), backward_bytes(shape, chosen, tokens))
    learning["head's chunk or a layer's backward"] = head_or_layer
    if lora and chosen.weights not in DTYPE_BYTES:
        learning["a matrix dequantised"] = float(b * shape.width * shape.inner)
    if chosen.exact_sum:
        learning["exact sum of gradients"] = 8.0 * shape.trained
    step = {"gradients": trained}
    if chosen.offload:
        largest = max(min(shape.trained, SLICE_BYTES // 4), shape.largest)
        step["moments of a slice"] = BYTES_PER_MOMENTS[chosen.moments] * largest
    found = {"held": held, "starting": starting, "learning": learning, "step": step}
    if chosen.offload:
        found["reference's log-probabilities"] = reference
    if chosen.samples:
        copies = 2 * shape.embedding if not lora else shape.embedding if chosen.sampler_dtype != chosen.dtype else 0
        if copies:
            held["sampler's embedding and head"] = float(copies * s)
        prompts = PREFILL_TOKENS * s * (4 * shape.inner + 6 * shape.width)
        found["sampling"] = {
            "sampler's copy of the layers": float(shape.inside * s),
            "keys and values": chosen.cache_bytes,
            "logits and prompts under way": 12.0 * chosen.rows * shape.vocabulary + prompts,
        }
    return found


def kv_bytes(shape: Shape, dtype: str) -> int:
    return 2 * shape.layers * shape.keys * DTYPE_BYTES[dtype]


def peak_bytes(found: dict[str, dict[str, float]]) -> float:
    """What is held, and the largest of the phases."""
    return sum(found["held"].values()) + max(sum(parts.values()) for name, parts in found.items() if name != "held")


def empty_model(
    source: str, *, dtype: str, trust_remote_code: bool = False, use_peft: bool = True, adapter: Any = None, **lora: Any
) -> nn.Module:
    """The model that `Policy.load` would train, on torch's device "meta"; of its files only the configuration is read.
    `ModelError` where there is none, or no such model can be built.
    """
    folder, gguf_file = locate(source)
    how: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {"trust_remote_code": trust_remote_code}
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ModelError(f"{adapter}: holds no adapter_config.json; give the folder of a saved PEFT adapter")
    try:
        with quiet(), gguf_read_once() if gguf_file else nullcontext():
            config = AutoConfig.from_pretrained(folder, **how)
            refuse_senses(config.to_dict(), source)
            if adapter is not None:
                lora = {"config": PeftConfig.from_pretrained(adapter)}
            return build_empty(config, dtype, **lora) if use_peft else build_empty(config, dtype)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"{source}: its configuration cannot be read ({type(error).__name__}: {said}); check the name and the "
            "network, or give a local folder"
        ) from error


def build_empty(config: Any, dtype: str, **lora: Any) -> nn.Module:
    """The model of a transformers configuration, with an adapter where `lora` says which."""
    with torch.device("meta"), no_init_weights():
        model: Any = auto_class(config).from_config(config, dtype=getattr(torch, dtype))
        model.tie_weights()
        if is_vision(config):
            model = language_half(model)
    with torch.device("meta"):
        return attach_lora(model, **lora) if lora else cast(nn.Module, model)

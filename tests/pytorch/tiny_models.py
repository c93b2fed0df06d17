"""Tiny models with random weights, one of each family, and tokenizers; weights so large that all see the prefix."""

import string
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
UNKNOWN = "<unk>"
PAD_ID, START_ID, END_ID, UNKNOWN_ID = 0, 1, 2, 3
VOCAB_SIZE = 97

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2")
"""What tests of mechanisms run over."""
DENSE = (*FAMILIES[:-1], "phi3", "granite", "smollm3", "olmo2", "glm", "glm4")
"""Families that are Llama's shape up to norms, biases, rotary embedding, windows, soft caps and factors."""
UNSHARED = ("phi3_long", "gpt_oss")
"""Families whose sequences share nothing: rotation by the sequence's length, attention sinks."""
EVERY_FAMILY = (*DENSE, *UNSHARED, "qwen3_moe", "gpt2")


def tiny_model(
    name: str, vocab_size: int = VOCAB_SIZE, *, seed: int = 0, num_layers: int = 2, hidden_size: int = 32,
    tie_word_embeddings: bool = True, sliding_window: int = 6, max_position_embeddings: int = 512,
) -> PreTrainedModel:  # fmt: skip
    """A model of family `name` (see `EVERY_FAMILY`): float32, eval mode, 4 query heads over 2 key-value heads.

    Equal arguments give equal weights. Tiny prompts exceed `sliding_window`, which Mistral, Phi-3, Gemma 2 and 3 and
    GPT-OSS have; the last three alternate sliding and full layers, SmolLM3 layers without and with rotation.
    """
    shared = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    shared |= {"num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    shared |= {"max_position_embeddings": max_position_embeddings, "tie_word_embeddings": tie_word_embeddings}
    shared |= {"pad_token_id": PAD_ID, "bos_token_id": None, "eos_token_id": END_ID}
    head_dim = {"head_dim": hidden_size // 4}
    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    windows = {"sliding_window": sliding_window, "layer_types": kinds}
    gemma = {**head_dim, **windows, "query_pre_attn_scalar": hidden_size // 8}
    half_turned = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    long = half_turned | {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    two_kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    two_kinds["full_attention"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    factors = {"embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.5}
    factors |= {"logits_scaling": 0.8}
    experts = {"num_experts_per_tok": 2, "output_router_logits": False}
    gpt2 = {"n_positions": max_position_embeddings, "n_embd": hidden_size, "n_layer": num_layers, "n_head": 4}
    kept = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    quarter = max_position_embeddings // 4
    configs: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: hf.LlamaConfig(**shared),
        "qwen2": lambda: hf.Qwen2Config(**shared),
        "qwen3": lambda: hf.Qwen3Config(**shared, **head_dim),
        "mistral": lambda: hf.MistralConfig(**shared, **head_dim, sliding_window=sliding_window),
        "phi3": lambda: hf.Phi3Config(**shared, rope_parameters=half_turned, sliding_window=sliding_window),
        "phi3_long": lambda: hf.Phi3Config(**shared, rope_parameters=long, original_max_position_embeddings=quarter),
        "granite": lambda: hf.GraniteConfig(**shared, **factors, attention_bias=True),
        "smollm3": lambda: hf.SmolLM3Config(**shared, no_rope_layers=[(i + 1) % 2 for i in range(num_layers)]),
        "olmo2": lambda: hf.Olmo2Config(**shared),
        "gemma2": lambda: hf.Gemma2Config(**shared, **gemma, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        "gemma3": lambda: hf.Gemma3TextConfig(**shared, **gemma, rope_parameters=two_kinds),
        "glm": lambda: hf.GlmConfig(**shared, **head_dim, rope_parameters=half_turned, attention_bias=True),
        "glm4": lambda: hf.Glm4Config(**shared, **head_dim, rope_parameters=half_turned),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **shared, **head_dim, **experts, num_experts=4, moe_intermediate_size=hidden_size, norm_topk_prob=True
        ),
        "gpt_oss": lambda: hf.GptOssConfig(**shared, **head_dim, **windows, **experts, num_local_experts=4),
        "gpt2": lambda: hf.GPT2Config(**{name: shared[name] for name in kept}, **gpt2),
    }
    if name not in configs:
        raise ValueError(f"{name!r} is no tiny model; choose one of {', '.join(EVERY_FAMILY)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(configs[name]())
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                base = 0.0 if parameter_name.endswith("bias") or name.startswith("gemma") else 1.0
                torch.nn.init.normal_(parameter, mean=base, std=0.1)
    return model.eval()


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapted(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """`get_peft_model` without a deprecation warning: PEFT asks transformers for an attribute's old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(model, config)


def with_lora(name: Any) -> PeftModel:
    """A tiny model, by its name or made, with a LoRA adapter whose B is not zero."""
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "fan_in_fan_out": name == "gpt2"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = tiny_model(name) if isinstance(name, str) else name
        model = adapted(model, LoraConfig(r=3, lora_alpha=7, **options))
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def without_interface(model: Any) -> Any:
    class OtherAttention(type(model)):  # type: ignore[misc]
        _supports_attention_backend = False

    model.__class__ = OtherAttention
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, ChatML markers, 97 ids in all; `<|im_end|>` ends a sequence."""
    characters = "\n" + "".join(c for c in string.printable if " " <= c <= "}" and c not in "`^")
    vocabulary = {PAD: PAD_ID, START: START_ID, END: END_ID, UNKNOWN: UNKNOWN_ID}
    vocabulary |= {c: len(vocabulary) + i for i, c in enumerate(sorted(characters))}
    assert len(vocabulary) == VOCAB_SIZE
    backend = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN, "additional_special_tokens": [START]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHATML
    return tokenizer


def byte_tokenizer(split: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes, three merges, ChatML markers and `<tool>`, which is no special token; `split` cuts a text into words."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate([*tokens, "Ġt", "he", "Ġthe"])}
    backend = Tokenizer(tokenizer_models.BPE(vocabulary, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    words = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, whole]) if words else whole
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer

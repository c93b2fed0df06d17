"""Tiny models with random weights, one for each family that the PyTorch room must serve, and a tiny
tokenizer.

Nothing is downloaded or saved. Weights are larger than the usual initialisation, so that attention patterns
and log-probabilities depend visibly on the prefix: a test that compares two paths would notice one that
ignores it.
"""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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


def tiny_model(
    name: str,
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 32,
    tie_word_embeddings: bool = True,
    sliding_window: int = 6,
    max_position_embeddings: int = 512,
) -> PreTrainedModel:
    """A model of family `name` (see `FAMILIES`): float32, eval mode, 4 query heads over 2 key-value heads.

    Args:
        name: model family.
        vocab_size: number of token ids.
        seed: of the weights; equal arguments give equal weights.
        num_layers: decoder layers. Gemma 2 and 3 alternate sliding and full layers.
        hidden_size: width; the head dimension is `hidden_size // 4`.
        tie_word_embeddings: share input and output embeddings.
        sliding_window: window of Mistral, Gemma 2 and Gemma 3, short enough for tiny prompts to exceed it.
        max_position_embeddings: longest context.
    """
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": END_ID,
    }
    head_dim = hidden_size // 4
    alternating = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel
        if name == "llama":
            model = LlamaForCausalLM(LlamaConfig(**shared))
        elif name == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shared))
        elif name == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shared, head_dim=head_dim))
        elif name == "mistral":
            model = MistralForCausalLM(MistralConfig(**shared, head_dim=head_dim, sliding_window=sliding_window))
        elif name == "gemma2":
            model = Gemma2ForCausalLM(
                Gemma2Config(
                    **shared,
                    head_dim=head_dim,
                    query_pre_attn_scalar=head_dim,
                    sliding_window=sliding_window,
                    layer_types=alternating,
                    attn_logit_softcapping=2.0,
                    final_logit_softcapping=3.0,
                )
            )
        elif name == "gemma3":
            model = Gemma3ForCausalLM(
                Gemma3TextConfig(
                    **shared,
                    head_dim=head_dim,
                    query_pre_attn_scalar=head_dim,
                    sliding_window=sliding_window,
                    layer_types=alternating,
                )
            )
        elif name == "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=vocab_size,
                    n_positions=max_position_embeddings,
                    n_embd=hidden_size,
                    n_layer=num_layers,
                    n_head=4,
                    pad_token_id=PAD_ID,
                    bos_token_id=None,
                    eos_token_id=END_ID,
                    tie_word_embeddings=tie_word_embeddings,
                )
            )
        else:
            raise ValueError(f"{name!r} is no tiny model; choose one of {', '.join(FAMILIES)}")
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                base = 0.0 if parameter_name.endswith("bias") or name.startswith("gemma") else 1.0
                torch.nn.init.normal_(parameter, mean=base, std=0.1)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, ChatML markers, 97 ids in all; `<|im_end|>` ends a sequence."""
    characters = "\n" + "".join(c for c in string.printable if " " <= c <= "}" and c not in "`^")
    vocabulary = {PAD: PAD_ID, START: START_ID, END: END_ID, UNKNOWN: UNKNOWN_ID}
    vocabulary |= {c: len(vocabulary) + i for i, c in enumerate(sorted(characters))}
    assert len(vocabulary) == VOCAB_SIZE
    backend = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer

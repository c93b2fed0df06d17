"""Models of random weights for `gpu.py`, as folders that every library loads the same way. Nothing is downloaded.

    python benchmarks/gpu_model.py 0.5 --out FOLDER --device cuda

The tokenizer is a byte-level BPE of 2,048 pieces, trained in a second on the questions of `workloads.py`. The models
know more ids than it does: sampled ones that it does not know have no text, as with any random weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from export_model import SHAPES as QWEN2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from workloads import question

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECES = 2048

SHAPES: dict[str, dict[str, Any]] = {
    **{name: {"vocab_size": 151936, **shape} for name, shape in QWEN2.items()},
    "parity": {"vocab_size": 8192, **QWEN2["0.5"], "num_hidden_layers": 4, "initializer_range": 0.05},
    "tiny": {
        "vocab_size": PIECES,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.19,
    },
}
"""Qwen2's shapes: 0.5 and 1.5 billion parameters, 4 layers of the smaller one, and a tiny one.

The latter two have larger weights than usual: what a token attends to must be seen in its log-probabilities, or a
mistake is not.
"""


def make(shape: str, folder: Path, device: str = "cpu") -> Path:
    """The folder of a model, written unless it is there."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPES[shape],
    )
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="100GB")
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """See the module docstring."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [question(style, n) for style, count in (("short", 200), ("tail", 12), ("long", 8)) for n in range(count)]
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(make(args.shape, args.out, args.device))


if __name__ == "__main__":
    main()

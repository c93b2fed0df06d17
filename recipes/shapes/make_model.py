"""Make a LLaVA of a million parameters and teach it by supervision to answer, not yet well.

python -m covey.recipes.shapes.make_model [FOLDER]
"""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from covey.recipes.shapes.shapes import KINDS, SIZE, draw

PATCH, IGNORED = 6, -100
WORDS = sorted({*"0123456789ABCD", *(word for ask, _ in KINDS.values() for word in re.findall(r"\w+|[?,]", ask))})
SPECIAL = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
VOCABULARY = [*SPECIAL, *WORDS, "<image>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_processor() -> hf.ProcessorMixin:
    """One token a word, and 64 places a picture."""
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"}
    more = {"additional_special_tokens": ["<user>", "<assistant>", "<image>"]}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **named, **more)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pixels = hf.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}, **half)
    how: dict[str, Any] = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return hf.LlavaProcessor(pixels, tokenizer, patch_size=PATCH, chat_template=TEMPLATE, **how)


def make_model() -> hf.PreTrainedModel:
    """Random weights: a vision transformer of 4 layers of 96 numbers, and a Llama of 4 layers of 128."""
    text = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": len(VOCABULARY)}
    text |= {"max_position_embeddings": 128, "bos_token_id": None}
    text |= {"pad_token_id": VOCABULARY.index("<pad>"), "eos_token_id": VOCABULARY.index("<end>")}
    tower = {"model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4}
    tower |= {"num_attention_heads": 4, "image_size": SIZE, "patch_size": PATCH, "projection_dim": 32}
    told = {"image_token_index": VOCABULARY.index("<image>"), "vision_feature_layer": -1}
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=tower, **told))


def batch(processor: Any, kind: str, rng: random.Random, size: int) -> dict[str, torch.Tensor]:
    """Pictures of a kind with their questions and answers, as inputs of the model."""
    drawn = [draw(kind, rng) for _ in range(size)]
    shown = [{"type": "image"}, {"type": "text", "text": KINDS[kind][0]}]
    asked = [{"role": "user", "content": shown}]
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True)
    head = processor(text=[prompt], images=[drawn[0][0]], add_special_tokens=False)["input_ids"][0]
    answers = processor.tokenizer([f"{answer}<end>" for _, answer in drawn], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*head, *answer] for answer in answers])  # answers of a kind are equally long
    labels = ids.clone()
    labels[:, : len(head)] = IGNORED
    # What the processor makes of pictures that have its size: numbers from -1 to 1.
    pixels = np.stack([np.asarray(image, np.float32) / 127.5 - 1 for image, _ in drawn]).transpose(0, 3, 1, 2)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.from_numpy(pixels.copy())}


@torch.no_grad()
def accuracy(model: Any, processor: Any, kind: str) -> float:
    """The share of 200 pictures whose whole answer is the most likely one."""
    inputs = batch(processor, kind, random.Random(1), 200)
    labels = inputs.pop("labels")[:, 1:]
    said = model(**inputs).logits[:, :-1].argmax(-1)
    return float(((said == labels) | (labels == IGNORED)).all(1).float().mean())


def main(folder: str = "runs/shapes_model", steps: int = 150, kinds: str = "bars+count") -> None:
    """Train for so many steps of 32 pictures of one kind, the kinds in turn, and save model and processor."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turns = kinds.split("+")
    processor, model, rng, started = make_processor(), make_model(), random.Random(0), time.process_time()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.01)
    for step in range(1, steps + 1):
        loss = model(**batch(processor, turns[step % len(turns)], rng, 32)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            right = ", ".join(f"{kind} {accuracy(model.eval(), processor, kind):.1%}" for kind in KINDS)
            print(f"step {step}: {right} right, {time.process_time() - started:.0f} CPU-seconds", flush=True)
            model.train()
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    print(f"saved in {Path(folder)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""Tiny vision models with random weights, one of each family, and real processors for them, built here."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image
from tiny_models import tiny_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from covey.pytorch.models.pictures import QwenProcessor

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SEEING = ("smolvlm", "idefics3", "llava", *QWEN)
"""Families that read pictures here; the others train on text."""
FAMILIES = (*SEEING, "gemma3")
CELLS = [f"<row_{row}_col_{column}>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)]
OF_QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
ADDED = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *CELLS]
IMAGE_ID, SIZE = 97, 128
PARTS_ALONE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ':' }}{% for part in message.content %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
"""SmolVLM's way of writing a conversation: a content that is text is not rendered at all."""


def vision_tokenizer(name: str = "smolvlm") -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with the tokens that stand around and for pictures."""
    tokenizer, added = tiny_tokenizer(), OF_QWEN if name in QWEN else ADDED
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = PARTS_ALONE
    if name in QWEN:
        tokenizer.chat_template = PARTS_ALONE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    assert tokenizer.convert_tokens_to_ids(added[0]) == IMAGE_ID
    assert len(tokenizer) <= SIZE
    return tokenizer


def tiny_processor(name: str) -> ProcessorMixin:
    """The processor of a family that reads pictures: SmolVLM and Idefics3 cut pictures above 32 pixels into tiles of 4
    places each, LLaVA makes 16 places of each, Qwen's one of 8 by 8 pixels.
    """
    tokenizer: Any = vision_tokenizer(name)
    if name in QWEN:
        patches: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
        squares = hf.Qwen2VLImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 4096}, **patches)
        return QwenProcessor(squares, tokenizer, chat_template=tokenizer.chat_template)
    if name == "llava":
        pixels = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return hf.LlavaProcessor(pixels, tokenizer, chat_template=PARTS_ALONE, **how)
    tiles = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    make = hf.SmolVLMImageProcessorPil if name == "smolvlm" else hf.Idefics3ImageProcessorPil
    return hf.Idefics3Processor(make(**tiles), tokenizer, image_seq_len=4, chat_template=PARTS_ALONE)


def tiny_vision(name: str, *, tied: bool = False, head: int = 8) -> PreTrainedModel:
    """A whole vision model of a family: float32, eval mode, the text part 2 layers of 4 heads."""
    text: dict[str, Any] = {"hidden_size": 4 * head, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": SIZE, "max_position_embeddings": 512}
    text |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    tower: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    blocks = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    ids = {"image_token_id": IMAGE_ID, "video_token_id": 98, "vision_start_token_id": 99, "vision_end_token_id": 100}
    turned = {"rope_type": "default", "rope_theta": 1e4}
    inner: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 4 * head, **blocks}
    make: Any
    if name in ("smolvlm", "idefics3"):
        make, config = {
            "smolvlm": (hf.SmolVLMForConditionalGeneration, hf.SmolVLMConfig),
            "idefics3": (hf.Idefics3ForConditionalGeneration, hf.Idefics3Config),
        }[name]
        text |= {"model_type": "llama", "rope_parameters": turned}
        told = {"image_token_id": IMAGE_ID, "scale_factor": 2, "pad_token_id": 0}
        config = config(text_config=text, vision_config=tower, **told, tie_word_embeddings=tied)
    elif name == "llava":
        make = hf.LlavaForConditionalGeneration
        tower |= {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 16}
        text |= {"model_type": "llama", "tie_word_embeddings": tied}
        told = {"image_token_index": IMAGE_ID, "tie_word_embeddings": tied}
        config = hf.LlavaConfig(text_config=text, vision_config=tower, **told)
    elif name == "gemma3":
        make = hf.Gemma3ForConditionalGeneration
        kinds = ["sliding_attention", "full_attention"]
        text |= {"head_dim": 8, "sliding_window": 6, "layer_types": kinds, "query_pre_attn_scalar": 8}
        tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        told = {"mm_tokens_per_image": 4, "image_token_index": IMAGE_ID, "tie_word_embeddings": tied}
        config = hf.Gemma3Config(text_config=text, vision_config=tower, **told)
    else:
        make, config = {
            "qwen2_vl": (hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLConfig),
            "qwen2_5_vl": (hf.Qwen2_5_VLForConditionalGeneration, hf.Qwen2_5_VLConfig),
            "qwen3_vl": (hf.Qwen3VLForConditionalGeneration, hf.Qwen3VLConfig),
        }[name]
        sections = {"mrope_section": [head // 8, head // 8, head // 4]} | (
            {"mrope_interleaved": True} if name == "qwen3_vl" else {}
        )
        text |= {"rope_parameters": turned | sections} | ({"head_dim": head} if name == "qwen3_vl" else {})
        inner |= {"qwen2_vl": {"embed_dim": 16, "hidden_size": 4 * head}}.get(name, {})
        inner |= {"qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}}.get(name, {})
        inner |= {"qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]}}.get(name, {})
        config = config(text_config=text, vision_config=inner, **ids, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config)
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=1.0 / parameter.shape[-1] ** 0.5)
            elif "norm" in key:
                torch.nn.init.normal_(parameter, mean=float(name != "gemma3"), std=0.1)
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]


def vision_folder(name: str, folder: Path, **how: Any) -> Path:
    """A saved model with its processor, or its tokenizer where the family's pictures are not read."""
    tiny_vision(name, **how).save_pretrained(folder)
    (tiny_processor(name) if name in SEEING else vision_tokenizer()).save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 20, height: int = 14) -> Image.Image:
    """A picture of noise; above 32 pixels wide it has several tiles."""
    pixels: NDArray[Any] = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)

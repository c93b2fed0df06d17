"""What is measured: the same work for every library, as plain data. Needs nothing but Python."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

SYSTEM = "You are a careful assistant. Answer the question in a few short sentences."
MODEL_SETTINGS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the comparison: a GRPO step of `num_prompts * num_generations` completions.

    Attributes:
        name: on the command line and in the results.
        title: in tables.
        style: which questions: "short", "long" (a patient's history of `prompt_tokens`) or "tail".
        prompt_tokens: length of a prompt, 0 = as it comes.
        beta: weight of the KL term; above 0 every step scores the completions under the reference too.
        tied: of four neighbouring prompts, this many get equal rewards for all their completions.
        target_time: time against TRL's best that the project wants to reach.
        target_memory: likewise peak memory.
        covey: settings of Covey alone, for rows that measure an option.
    """

    name: str
    title: str
    style: str = "short"
    num_prompts: int = 8
    num_generations: int = 8
    prompt_tokens: int = 0
    max_completion_length: int = 48
    beta: float = 0.0
    tied: int = 0
    target_time: float = 0.33
    target_memory: float = 0.67
    covey: dict[str, Any] = field(default_factory=dict)


BFLOAT16_SAMPLING = {"sampler_dtype": "bfloat16", "importance_sampling_correction": "token_truncate"}

WORKLOADS = {
    w.name: w
    for w in (
        Workload("step", "8 x 8 completions of up to 48 tokens"),
        Workload("beta", "the same, beta 0.04 (a reference pass)", beta=0.04),
        Workload("sparse", "the same, 3 of 4 groups tied", tied=3, target_time=0.25),
        Workload(
            "long_prompt",
            "prompt 512, 8 x 8 completions of up to 32 tokens",
            style="long",
            prompt_tokens=512,
            max_completion_length=32,
            target_time=0.2,
            target_memory=0.5,
        ),
        Workload(
            "long_tail",
            "long tail: up to 512 tokens, most end before 64",
            style="tail",
            max_completion_length=512,
            target_time=0.17,
            target_memory=0.5,
        ),
        Workload("step_bf16", "8 x 8 x 48, Covey sampling in bfloat16", covey=BFLOAT16_SAMPLING),
        Workload("beta_bf16", "beta 0.04, Covey sampling in bfloat16", beta=0.04, covey=BFLOAT16_SAMPLING),
    )
}

HALF_BILLION_WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "half_billion",
            "Qwen2.5-Coder-0.5B, 4 x 8 completions of up to 64 tokens",
            num_prompts=4,
            max_completion_length=64,
            target_time=0.25,
            target_memory=0.45,
        ),
        Workload(
            "half_billion_long",
            "Qwen2.5-Coder-0.5B, 8 x 8 completions of up to 256 tokens",
            max_completion_length=256,
            target_time=0.2,
            target_memory=0.45,
        ),
    )
}
"""For `--model` with Qwen2.5-Coder-0.5B; `compare.py` runs them if it is asked for them."""

_GPU = {"tokens_per_micro_batch": 16384, "kv_cache_gb": 16.0, "max_batch_size": 128}
GPU_WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "gpu_step",
            "16 x 8 completions of up to 128 tokens",
            num_prompts=16,
            max_completion_length=128,
            target_time=0.2,
            target_memory=0.6,
            covey=_GPU,
        ),
        *(
            Workload(
                f"gpu_{tokens}",
                f"prompt {tokens:,}, 8 x 8 completions of up to 32 tokens",
                style="long",
                prompt_tokens=tokens,
                max_completion_length=32,
                target_time=0.35,
                target_memory=0.6,
                covey=_GPU,
            )
            for tokens in (512, 4096)
        ),
        Workload(
            "gpu_tiny",
            "2 x 2 completions of up to 4 tokens",
            num_prompts=2,
            num_generations=2,
            max_completion_length=4,
            target_time=0.2,
            target_memory=0.6,
        ),
    )
}
"""Of `gpu.py`; `compare.py` runs none of them unless it is asked for them."""

ALL_WORKLOADS = WORKLOADS | HALF_BILLION_WORKLOADS | GPU_WORKLOADS

_NAMES = ("Ana", "Ben", "Chloe", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Karim", "Lena")
_THINGS = ("apples", "books", "coins", "stamps", "pencils", "marbles", "cards", "shells", "buttons", "stickers")
_COMPLAINTS = ("chest pain", "a dry cough", "swollen ankles", "a headache", "fatigue", "joint pain", "a rash", "fever")
_FINDINGS = (
    "blood pressure",
    "heart rate",
    "temperature",
    "creatinine",
    "sodium",
    "haemoglobin",
    "glucose",
    "potassium",
)
_PLACES = ("France", "Italy", "Japan", "Egypt", "Peru", "Kenya", "Norway", "Greece", "Spain", "Chile", "Cuba", "India")


def question(style: str, number: int) -> str:
    """The `number`-th question of a style; equal numbers give equal questions."""
    draw = random.Random(f"{style} {number}")
    if style == "short":
        one, other = draw.sample(_NAMES, 2)
        thing, a, b = draw.choice(_THINGS), draw.randint(11, 99), draw.randint(2, 9)
        return f"{one} has {a} {thing} and gives {b} of them to {other}. How many {thing} does {one} have left?"
    if style == "tail":
        return f"What is the capital of {_PLACES[number % len(_PLACES)]}?"
    parts = [f"A {draw.randint(20, 85)}-year-old patient comes to the clinic with {draw.choice(_COMPLAINTS)}."]
    for _ in range(400):  # more than any prompt length asks for; `cut` shortens it
        parts.append(f"On day {draw.randint(1, 30)} the {draw.choice(_FINDINGS)} is {draw.randint(3, 190)}.")
    return " ".join(parts)


def prompts(workload: Workload, tokenizer: Any, count: int) -> list[str]:
    """`count` prompts as text with the chat template applied, so that every library tokenises the same text."""
    return [_templated(workload, tokenizer, question(workload.style, number)) for number in range(count)]


def _templated(workload: Workload, tokenizer: Any, text: str) -> str:
    def templated(user: str) -> str:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    if not workload.prompt_tokens:
        return templated(text)
    spare = workload.prompt_tokens - len(tokenizer(templated(""), add_special_tokens=False).input_ids)
    ids = tokenizer(text, add_special_tokens=False).input_ids[:spare]
    return templated(str(tokenizer.decode(ids)))


class Reward:
    """A number in [0, 1) that depends on the text alone; for tied prompts it is 0.

    Args:
        tied: see `Workload`.
        prompts: all prompts, in order.

    Attributes:
        completion_tokens: how many tokens the last call's completions had.
    """

    __name__ = "reward"

    def __init__(self, tied: int, prompts: list[str]) -> None:
        self._is_tied = {prompt: number % 4 < tied for number, prompt in enumerate(prompts)}
        self.completion_tokens = 0

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        self.completion_tokens += sum(map(len, completion_ids))
        return [
            0.0 if self._is_tied[prompt] else int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
            for prompt, text in zip(prompts, completions, strict=True)
        ]

"""Covey's JAX engine and learner at the work of `jax_tunix.py`, in the same form: one JSON line.

    python benchmarks/jax_parts.py --model benchmarks/.cache/model --rounds 5

8 prompts of 48 tokens, 8 completions of exactly 24 tokens each at temperature 1; LoRA of rank 16 on all linear layers,
GRPO's loss with beta 0, gradient and AdamW. `seconds` is the median of the calls after the first, `core_seconds` what
they used of all cores together, `compile_seconds` what the first call took longer.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from covey.algorithms import make_objective
from covey.jax import Transformer, load_hf
from covey.jax.engine import Engine
from covey.jax.learner import Learner
from covey.jax.policy import Policy
from covey.types import Batch, Episode, Request, SamplingSettings

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 48, 24
ROWS = PROMPTS * GROUP


def measure(work: Callable[[int], Any], rounds: int) -> dict[str, Any]:
    """Call once to compile and `rounds` times more."""
    wall, core = [], []
    for number in range(rounds + 1):
        began, used = time.perf_counter(), time.process_time()
        work(number)
        wall.append(time.perf_counter() - began)
        core.append(time.process_time() - used)
        print(f"  {wall[-1]:.2f} s, {core[-1]:.2f} core seconds", file=sys.stderr, flush=True)
    seconds = statistics.median(wall[1:])
    return {
        "compile_seconds": wall[0] - seconds,
        "seconds": seconds,
        "seconds_range": [min(wall[1:]), max(wall[1:])],
        "core_seconds": statistics.median(core[1:]),
        "tokens_per_second": ROWS * COMPLETION_TOKENS / seconds,
        "rounds": rounds,
    }


def batch_of(rng: np.random.Generator, vocabulary: int = 40_000) -> Batch:
    """Random tokens in the shape of a step."""
    episodes = []
    for _ in range(PROMPTS):
        prompt = rng.integers(100, vocabulary, PROMPT_TOKENS)
        for _ in range(GROUP):
            ids = np.concatenate([prompt, rng.integers(100, vocabulary, COMPLETION_TOKENS)])
            sampled = np.arange(len(ids)) >= PROMPT_TOKENS
            logprobs = np.where(sampled, -10.0, 0.0).astype(np.float32)
            episodes.append(Episode(ids, sampled, logprobs, "", "stop", 1))
    mask = np.ones((ROWS, COMPLETION_TOKENS), np.bool_)
    advantages = np.where(mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    return Batch(
        tuple(episodes), np.repeat(np.arange(PROMPTS), GROUP), advantages, mask, np.full(mask.shape, -10, "f4")
    )


def sampling(policy: Policy, vocabulary: int = 40_000) -> Callable[[int], Any]:
    """Samples a step."""
    engine, rng = Engine(policy.model), np.random.default_rng(0)
    prompts = rng.integers(100, vocabulary, (PROMPTS, PROMPT_TOKENS))
    settings = SamplingSettings(max_tokens=COMPLETION_TOKENS)

    def work(number: int) -> Any:
        requests = [Request(prompts[i // GROUP], (number, i)) for i in range(ROWS)]
        return engine(requests, settings, policy_version=0)

    return work


def update(policy: Policy, vocabulary: int = 40_000, **options: Any) -> Callable[[int], Any]:
    """Trains a step."""
    learner, batch = Learner(policy, learning_rate=1e-5, **options), batch_of(np.random.default_rng(0), vocabulary)
    objective = make_objective("grpo")

    def work(number: int) -> Any:
        learner.forward_backward(
            batch, np.arange(ROWS), objective, temperature=1.0, max_completion_length=COMPLETION_TOKENS
        )
        return learner.optim_step(1e-5)

    return work


def main() -> None:
    """Measure one part and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=("sampling", "update"), required=True)
    args = parser.parse_args()
    config, params = load_hf(args.model)
    config = replace(config, lora_rank=16, lora_alpha=32.0)
    policy = Policy(Transformer(config), params["params"], tokenizer=None, eos_token_ids=(2,), source=args.model)
    del params
    found = measure(sampling(policy) if args.part == "sampling" else update(policy), args.rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"part": args.part, "jax": jax.__version__, "peak_rss": peak, **found}))


if __name__ == "__main__":
    main()

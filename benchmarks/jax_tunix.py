"""Tunix, Google's JAX library for post-training, doing GRPO's work on a CPU: sampling, an update, whole steps.

    python -m venv .venv-tunix && .venv-tunix/bin/pip install google-tunix==0.1.7       # 1.6 GB, no CUDA, no torch
    .venv-tunix/bin/python benchmarks/jax_tunix.py --model benchmarks/.cache/model --rounds 5 --threads 2

Runs in an environment of Tunix's own and imports nothing of Covey. The model is a folder in transformers' format with
Llama's architecture, in float32 (`export_model.py` writes one). The work: 8 prompts of 48 tokens, 8 completions of
exactly 24 tokens each at temperature 1. One JSON line goes to stdout, progress to stderr:

    sampling       Tunix's vanilla `Sampler` on the model's weights
    sampling_lora  the same with LoRA's matrices beside them, which is how Tunix's GRPO learner samples
    update         the call that `GRPOLearner` makes for a batch, on random tokens: GRPO's loss with beta 0, gradient,
                   AdamW, metrics; LoRA of rank 16 on all linear layers
    step           `GRPOLearner.train` itself, sampling, rewards and update, from one batch of prompts to the next

`seconds` is the median of the calls after the first and `core_seconds` what they used of all cores together, which
other work on the machine moves less; `compile_seconds` is what the first call took longer. Micro-batches are whole
groups, the smallest that Tunix's learner cuts; the fastest size, and the faster of two settings of the allocator, are
looked for with one update each after one to compile. Every part runs in a process of its own, so that its peak memory
is its own.

Limits: tokens of a completion that happen to be the padding token are masked, as Tunix masks them. Sampling forces the
length by an end-of-sequence token that does not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 48, 24
ROWS = PROMPTS * GROUP
ALLOCATORS = {
    "default": {},
    "keeps freed memory": {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"},
}
LORA_RANK, LORA_ALPHA = 16, 32.0
LINEAR_LAYERS = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"
NO_END = [-1]
WORDS = ("time", "people", "water", "house", "school", "night", "country", "family", "music", "world", "story", "paper")


def load_model(folder: str, *, lora: bool) -> Any:
    """Tunix's Llama with the folder's weights, in float32."""
    import jax.numpy as jnp
    import qwix
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.models.llama3 import params

    config = json.loads((Path(folder) / "config.json").read_text())
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    # Tunix 0.1.7 calls this function without the configuration's value: every Llama would get the default of 1,000,000.
    llama.apply_rope.__defaults__ = (int(theta),)
    shape = llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(theta),
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    model = params.create_model_from_safe_tensors(folder, shape, dtype=jnp.float32)
    if not lora:
        return model
    provider = qwix.LoraProvider(module_path=LINEAR_LAYERS, rank=LORA_RANK, alpha=LORA_ALPHA)
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())


def load_tokenizer(folder: str) -> Any:
    """The folder's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prompts(tokenizer: Any, batch: int = 0) -> list[str]:
    """`PROMPTS` texts of `PROMPT_TOKENS` tokens each, the one included that Tunix puts in front."""
    import numpy as np

    rng = np.random.default_rng(batch)
    count = PROMPT_TOKENS - bool(tokenizer.bos_token_id)
    texts = [" ".join(rng.choice(WORDS, count)) for _ in range(PROMPTS)]
    lengths = {len(tokenizer.encode(text)) for text in texts}
    if lengths != {count}:
        raise SystemExit(f"prompts of {lengths} tokens, not {count}: WORDS must be single tokens of the tokenizer")
    return texts


def measure_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Calls of the vanilla sampler."""
    from tunix.generate.sampler import CacheConfig, Sampler

    tokenizer, model = load_tokenizer(args.model), load_model(args.model, lora=args.part == "sampling_lora")
    shape = model.config
    cache = CacheConfig(PROMPT_TOKENS + COMPLETION_TOKENS, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    sampler = Sampler(model, tokenizer, cache)
    texts = [text for text in prompts(tokenizer) for _ in range(GROUP)]
    sampled = []

    def call(number: int) -> None:
        output = sampler(
            texts,
            max_generation_steps=COMPLETION_TOKENS,
            max_prompt_length=PROMPT_TOKENS,
            eos_tokens=NO_END,
            temperature=1.0,
            top_p=1.0,
            seed=number,
        )
        sampled.append(sum(map(len, output.tokens)))

    report = timed(call, args.rounds, ROWS * COMPLETION_TOKENS)
    if set(sampled) != {ROWS * COMPLETION_TOKENS}:
        raise SystemExit(f"{set(sampled)} tokens sampled instead of {ROWS * COMPLETION_TOKENS}")
    return report


def make_learner(args: argparse.Namespace, steps: int) -> Any:
    """Tunix's GRPO learner with its cluster of one device: actor and sampler share their weights."""
    import jax
    import numpy as np
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT), mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-5),
            mini_batch_size=PROMPTS,
            train_micro_batch_size=args.micro_batch // GROUP,
            rollout_micro_batch_size=PROMPTS,
            compute_logps_micro_batch_size=PROMPTS,
            eval_every_n_steps=steps + 1,
            max_steps=steps,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=COMPLETION_TOKENS,
            max_prompt_length=PROMPT_TOKENS,
            kv_cache_size=PROMPT_TOKENS + COMPLETION_TOKENS,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=NO_END,
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=load_model(args.model, lora=True), tokenizer=load_tokenizer(args.model), cluster_config=config
    )
    return GRPOLearner(cluster, GRPOConfig(num_generations=GROUP, beta=0.0), reward_fns=reward)


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A number in [0, 1) that depends on the text alone."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def measure_update(args: argparse.Namespace) -> dict[str, Any]:
    """Updates of the learner's actor, each with the same random rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from tunix.rl.grpo.grpo_learner import TrainExample

    cluster = make_learner(args, args.rounds + 1).rl_cluster
    rng = np.random.default_rng(0)
    pad, vocabulary = cluster.rollout.pad_id(), cluster.actor_trainer.model.config.vocab_size
    ids = rng.integers(0, vocabulary - 1, (ROWS, PROMPT_TOKENS + COMPLETION_TOKENS))
    ids = jnp.asarray(ids + (ids >= pad), jnp.int32)  # any but the padding token
    whole = TrainExample(
        prompt_ids=ids[:, :PROMPT_TOKENS],
        prompt_mask=jnp.ones((ROWS, PROMPT_TOKENS), bool),
        completion_ids=ids[:, PROMPT_TOKENS:],
        completion_mask=jnp.ones((ROWS, COMPLETION_TOKENS), bool),
        advantages=jnp.asarray(rng.standard_normal(ROWS), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    size = args.micro_batch
    parts = [jax.tree.map(lambda x, i=i: x[i : i + size], whole) for i in range(0, ROWS, size)]

    def lora() -> Any:
        return jax.block_until_ready(nnx.state(cluster.actor_trainer.model, nnx.LoRAParam))

    def call(number: int) -> None:
        for part in parts:
            cluster.update_actor([part], None)
        lora()

    before = [np.array(leaf) for leaf in jax.tree.leaves(lora())]
    report = timed(call, args.rounds, ids.size)
    moved = [float(np.abs(np.array(a) - b).max()) for a, b in zip(jax.tree.leaves(lora()), before, strict=True)]
    if cluster.actor_trainer.train_steps != args.rounds + 1 or not all(0 < most < 1e-3 for most in moved):
        raise SystemExit(f"{cluster.actor_trainer.train_steps} updates moved LoRA by {min(moved)} to {max(moved)}")
    return report | {"micro_batch": size, "lora_parameters": sum(leaf.size for leaf in before)}


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    """The learner's own loop, timed by when it asks for the next prompts."""
    learner = make_learner(args, args.rounds + 1)
    tokenizer = load_tokenizer(args.model)
    clocks = []

    def batches() -> Iterator[dict[str, list[str]]]:
        for batch in range(args.rounds + 1):
            clocks.append(clock())
            yield {"prompts": prompts(tokenizer, batch)}

    learner.train(batches())
    clocks.append(clock())  # the last step ends the loop
    if learner.rl_cluster.actor_trainer.train_steps != args.rounds + 1:
        raise SystemExit(f"{learner.rl_cluster.actor_trainer.train_steps} updates instead of {args.rounds + 1}")
    return summary(clocks, ROWS * COMPLETION_TOKENS) | {"micro_batch": args.micro_batch}


def clock() -> tuple[float, float]:
    """Seconds that went by, and seconds of all cores that this process used."""
    return time.perf_counter(), time.process_time()


def timed(call: Callable[[int], None], rounds: int, tokens: int) -> dict[str, Any]:
    """Time `call(0)`, which compiles, and `rounds` calls after it."""
    clocks = [clock()]
    for number in range(rounds + 1):
        call(number)
        clocks.append(clock())
    return summary(clocks, tokens)


def summary(clocks: list[tuple[float, float]], tokens: int) -> dict[str, Any]:
    """Medians of calls of `tokens` tokens each, between these readings; the first call compiled."""
    wall, used = ([after[i] - before[i] for before, after in pairwise(clocks)] for i in range(2))
    median = statistics.median(wall[1:])
    return {
        "compile_seconds": wall[0] - median,
        "seconds": median,
        "seconds_range": [min(wall[1:]), max(wall[1:])],
        "core_seconds": statistics.median(used[1:]),
        "tokens_per_second": tokens / median,
        "rounds": len(wall) - 1,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


MEASURES = {
    "sampling": measure_sampling,
    "sampling_lora": measure_sampling,
    "update": measure_update,
    "step": measure_step,
}


def run_part(
    args: argparse.Namespace, part: str, *, rounds: int, allocator: str, micro_batch: int = ROWS
) -> dict[str, Any]:
    """Measure a part in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--model", str(args.model), "--threads", str(args.threads)]
    command += ["--rounds", str(rounds), "--micro-batch", str(micro_batch)]
    environment = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | environment | ALLOCATORS[allocator]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(f"{part}, micro-batch {micro_batch}, allocator {allocator}: {found}", file=sys.stderr, flush=True)
    return found


def tune(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Set the allocator and the micro-batch size that are not given to Tunix's fastest; what each took.

    From one group on the micro-batch doubles for as long as it surely fits the memory: 64 rows take 17 GB.
    """
    tried: dict[tuple[str, int], dict[str, Any]] = {}

    def once(allocator: str, size: int) -> dict[str, Any]:
        if (allocator, size) not in tried:
            found = run_part(args, "update", rounds=1, allocator=allocator, micro_batch=size)
            tried[allocator, size] = found | {"allocator": allocator}
        return tried[allocator, size]

    if args.allocator is None:
        args.allocator = min(ALLOCATORS, key=lambda name: once(name, args.micro_batch or GROUP)["seconds"])
    if args.micro_batch is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes = [GROUP]
        while sizes[-1] < ROWS and 2 * once(args.allocator, sizes[-1])["peak_rss"] < 0.9 * memory:
            sizes.append(2 * sizes[-1])
        args.micro_batch = min(sizes, key=lambda size: once(args.allocator, size)["seconds"])
    return list(tried.values())


def main() -> None:
    """Measure all parts, or the one part that a parent asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / ".cache/model"), help="made by export_model.py")
    parser.add_argument("--rounds", type=int, default=5, help="calls after the first")
    parser.add_argument("--threads", type=int, default=2, help="cores that the process may use")
    parser.add_argument("--micro-batch", type=int, help="rows of an update at once; default: the fastest is looked for")
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), help="default: the faster is looked for")
    parser.add_argument("--only", nargs="+", choices=sorted(MEASURES), default=list(MEASURES), help="parts to measure")
    parser.add_argument("--part", choices=sorted(MEASURES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        if hasattr(os, "sched_setaffinity"):  # XLA has no option for this: it starts a thread for each core it may use
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
        print(json.dumps(MEASURES[args.part](args)))
        return
    names = ("google-tunix", "jax", "jaxlib", "flax", "qwix", "optax")
    results: dict[str, Any] = {"versions": {name: version(name) for name in names}, "threads": args.threads}
    if {"update", "step"} & set(args.only):
        results["tuned"] = tune(args)
    settings = {"allocator": args.allocator or "default", "micro_batch": args.micro_batch or ROWS}
    for part in args.only:
        results[part] = run_part(args, part, rounds=args.rounds, **settings)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

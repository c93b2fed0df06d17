"""A part of `gpu.py`: the JAX backend beside the plain model in PyTorch, its step, its memory, and a mesh.

    JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/gpu_jax.py --models FOLDER

Parity is judged as in `gpu_parts.py`. The step is that of `jax_parts.py`: 8 x 8 completions of 24 tokens after prompts
of 48, in bfloat16 with LoRA factors in float32; compiling is told apart.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_work
import jax
import numpy as np
import torch
from flax.traverse_util import unflatten_dict
from gpu_model import make
from gpu_parts import Numbers, judge, plain
from gpu_steps import arguments
from gpu_table import Rows
from jax_parts import COMPLETION_TOKENS, GROUP, PROMPT_TOKENS, PROMPTS, ROWS, measure, sampling, update
from tree_rows import mixed
from tree_worker import Update, batch_of

from covey import GRPOConfig
from covey.algorithms import make_objective
from covey.jax.backend import BACKEND
from covey.jax.learner import Learner
from covey.jax.saving import adapter_tensors
from covey.jax.stacked import unstack
from covey.pytorch.policy import Policy

_ROUNDS = 5


def load(model: str, dtype: str, adapter: str | None = None, mesh: str | None = None) -> Any:
    """The policy of a recipe."""
    config = GRPOConfig(model=model, dtype=dtype, backend="jax", adapter=adapter, mesh=mesh, beta=0.0)
    return BACKEND.make_policy(config)


def numbers(policy: Any, work: Any) -> dict[str, Any]:
    """Log-probabilities, and the gradient under PyTorch's names, as `gpu_parts.plain` has them."""
    batch, every = batch_of(work), np.arange(len(work))
    learner = Learner(policy, learning_rate=1e-5)
    logp, _ = learner.scores(batch, every, temperature=1.0)
    first = replace(batch, old_logprobs=logp)  # ratios of 1
    found = learner.forward_backward(
        first, every, make_objective("dapo"), temperature=1.0, max_completion_length=batch.mask.shape[1]
    )
    flat = {tuple(name.split("/")): value for name, value in learner.gradient().items()}
    shape = policy.transformer.config
    tensors = adapter_tensors(shape, unstack(unflatten_dict(flat)["lora"], shape.num_layers))
    return {"logprobs": found.logp} | {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}


def parity(args: Namespace, rows: Rows) -> None:
    """Against transformers' own code, with the same adapter."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shape = "tiny" if args.tiny else "parity"
    folder = str(make(shape, args.models / shape, args.device))
    work = mixed(json.loads(Path(folder, "config.json").read_text())["vocab_size"])
    mask = batch_of(work).mask

    def theirs(dtype: str) -> Policy:
        one = Policy.load(folder, dtype=dtype, device=args.device, needs_reference=False, prefix_sharing=False)
        return Update(one, work, alone=True, compared=len(work), budget=2048).policy

    exact = theirs("float32")
    truth = Numbers.of(plain(exact, work), mask)
    own = Numbers.of(plain(theirs("bfloat16"), work), mask).off(truth)
    with tempfile.TemporaryDirectory() as adapter:
        exact.save_pretrained(adapter)
        for dtype in ("float32", "bfloat16"):
            found = Numbers.of(numbers(load(folder, dtype, adapter), work), mask)
            judge(rows, f"JAX, {dtype}", found.off(truth), None if dtype == "float32" else own)
        meshes(rows, folder, adapter, work, mask)


def meshes(rows: Rows, folder: str, adapter: str, work: Any, mask: Any) -> None:
    """The same numbers on 1, 2, 4, ... devices."""
    one = Numbers.of(numbers(load(folder, "float32", adapter), work), mask)
    size = 1
    while size <= len(jax.devices()):
        off = Numbers.of(numbers(load(folder, "float32", adapter, f"data={size}"), work), mask).off(one)
        state: Any = "ok" if off[1] < 1e-3 and off[2] < 1e-3 else "wrong"
        rows.say(
            f"JAX, mesh data={size}", state, f"off by {off[1]:.1e} nats at most, gradient {off[2]:.1e} of its norm"
        )
        size *= 2


def step(args: Namespace, rows: Rows) -> None:
    """Seconds of sampling and update, what compiling took, the largest memory, and what became of the old weights."""
    shape = "tiny" if args.tiny else "0.5"
    folder = make(shape, args.models / shape, args.device)
    config = json.loads((folder / "config.json").read_text())
    vocabulary = min(40_000, config["vocab_size"])
    policy = load(str(folder), "bfloat16")
    rounds = 1 if args.tiny else _ROUNDS
    sampled = measure(sampling(policy, vocabulary), rounds)
    train = update(policy, vocabulary, tokens_per_micro_batch=8192)
    trained = measure(train, rounds)
    before = jax.tree.leaves(policy.trained)
    train(rounds + 1)
    gone = sum(leaf.is_deleted() for leaf in before)
    state: Any = "ok" if gone == len(before) else "wrong"
    rows.say("JAX, donated weights", state, f"{gone} of {len(before)} arrays became those of the next step")
    seconds = sampled["seconds"] + trained["seconds"]
    tokens = ROWS * COMPLETION_TOKENS
    done = gpu_work.Rollout(PROMPTS, PROMPT_TOKENS, PROMPTS * GROUP, tokens, COMPLETION_TOKENS)
    found = {"seconds": seconds, "sampling": sampled["seconds"], "update": trained["seconds"]}
    found |= {"tokens_per_second": tokens / seconds}
    found |= gpu_work.step(config, done).shares(seconds, args.rate, args.bandwidth)
    known = jax.devices()[0].memory_stats() or {}
    found |= {"peak_device": known["peak_bytes_in_use"]} if "peak_bytes_in_use" in known else {}
    compiled = sampled["compile_seconds"] + trained["compile_seconds"]
    rows.say("JAX, a step in bfloat16", "ok", f"8 x 8 x 24 tokens, compiling {compiled:.0f} s once", **found)


def main() -> None:
    """Run all of it."""
    args, rows = arguments(__doc__).parse_args(), Rows()
    rows.say("JAX devices", "ok", f"JAX {jax.__version__}: {', '.join(str(device) for device in jax.devices())}")
    parity(args, rows)
    step(args, rows)


if __name__ == "__main__":
    main()

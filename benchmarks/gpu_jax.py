"""A part of `gpu.py`: `covey.jax` beside the plain model in PyTorch, a step of its trainer, its memory, and a mesh.

    JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/gpu_jax.py --models FOLDER

Parity is judged as in `gpu_parts.py`. The step is 8 x 8 responses of 24 tokens after prompts of 48, in bfloat16 with
LoRA factors in float32; compiling is told apart.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_work
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gpu_model import make
from gpu_parts import Numbers, judge, plain
from gpu_steps import arguments
from gpu_table import Rows
from tree_rows import Row
from tree_rows import make as make_rows
from tree_worker import Update, batch_of

from covey.jax import GRPOTrainer, Transformer, load_adapter, load_hf, lora_from_tensors, make_optimizer
from covey.jax.saving import adapter_tensors
from covey.pytorch.policy import Policy

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 48, 24
_ROUNDS = 5


def trainer_of(folder: str, dtype: str, adapter: str | None = None, mesh: Any = None, **options: Any) -> Any:
    """A trainer of LoRA factors, and its state."""
    rank: dict[str, Any] = {"lora_rank": 16, "lora_alpha": 32.0}
    config, variables = load_hf(folder, dtype=dtype, **rank)
    if adapter is not None:
        found = load_adapter(adapter)
        config = replace(config, lora_rank=found.rank, lora_alpha=found.alpha, lora_modules=tuple(found.target_modules))
        variables |= {"lora": lora_from_tensors(config, found.tensors, adapter)}
    model = Transformer(config)
    chosen = {"kl_coeff": 0.0, "loss_type": "dapo", "adv_estimator": "grpo"} | options
    trainer = GRPOTrainer(model, None, make_optimizer(1e-5), _reward, chosen, mesh=mesh)
    return trainer, trainer.create_train_state(jax.random.key(1), jnp.zeros((1, 8), jnp.int32), params=variables)


def _reward(responses: list[list[int]]) -> list[float]:
    return [float(row[0] % 7) for row in responses]


def numbers(work: Sequence[Row], trainer: GRPOTrainer, state: Any) -> dict[str, Any]:
    """Log-probabilities, and the gradient under PyTorch's names, as `gpu_parts.plain` has them."""
    batch = batch_of(work)
    count, width = batch.mask.shape
    lengths = np.array([row.sampled.index(True) for row in work], np.int32)
    tokens = np.zeros((count, lengths.max() + width), np.int32)
    for into, row in zip(tokens, work, strict=True):
        into[: len(row.token_ids)] = row.token_ids
    responses = np.take_along_axis(tokens, lengths[:, None] + np.arange(width), axis=1)
    record = {"tokens": tokens, "lengths": lengths, "responses": responses, "mask": batch.mask}
    record |= {"advantages": batch.advantages[:, 0], "rewards": np.zeros(count, np.float32)}
    record |= {"old_logprobs": np.zeros(batch.mask.shape, np.float32), "finished": np.ones(count, bool)}
    ready = trainer.prepare_batch(state, record)

    def loss(params: Any, ready: Any) -> Any:
        logp = trainer._scores(trainer.policy_model, {**ready["constants"]["frozen"], **params}, ready).logp
        first = {**ready, "old_logprobs": jax.lax.stop_gradient(logp)}  # ratios of 1
        return trainer.compute_loss(params, first), logp

    gradient, logp = jax.jit(jax.grad(loss, has_aux=True))(state.params, ready)
    tensors = adapter_tensors(trainer.policy_model.config, gradient)
    return {"logprobs": logp} | {name.replace(".weight", ".default.weight"): x for name, x in tensors.items()}


def parity(args: Namespace, rows: Rows) -> None:
    """Against transformers' own code, with the same adapter; and the same numbers on 1, 2, 4, ... devices."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shape = "tiny" if args.tiny else "parity"
    folder = str(make(shape, args.models / shape, args.device))
    vocabulary = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    work = [*make_rows("groups", small=True, vocabulary=vocabulary).rows]
    mask = batch_of(work).mask

    def theirs(dtype: str) -> Policy:
        one = Policy.load(folder, dtype=dtype, device=args.device, reference={"needed": False}, prefix_sharing=False)
        return Update(one, work, alone=True, compared=len(work), budget=2048).policy

    exact = theirs("float32")
    truth = Numbers.of(plain(exact, work), mask)
    own = Numbers.of(plain(theirs("bfloat16"), work), mask).off(truth)
    with tempfile.TemporaryDirectory() as adapter, jax.default_matmul_precision("highest"):
        exact.save_pretrained(adapter)
        wide, narrow = (
            Numbers.of(numbers(work, *trainer_of(folder, dtype, adapter)), mask) for dtype in ("float32", "bfloat16")
        )
        judge(rows, "JAX, float32", wide.off(truth), None)
        judge(rows, "JAX, bfloat16", narrow.off(truth), own)
        size = 1
        while size <= len(jax.devices()) and len(work) % size == 0:
            mesh = jax.make_mesh((size,), ("data",), devices=jax.devices()[:size])
            spread = numbers(work, *trainer_of(folder, "float32", adapter, mesh))
            off = Numbers.of(spread, mask).off(wide)
            text = f"off by {off[1]:.1e} nats at most, gradient {off[2]:.1e} of its norm"
            rows.say(f"JAX, mesh data={size}", "ok" if max(off[1:]) < 1e-3 else "wrong", text)
            size *= 2


def measure(work: Callable[[int], Any], rounds: int) -> tuple[float, float]:
    """Seconds of a call, the median after the first, and how much longer the first took, which compiled."""
    taken = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(work(number))
        taken.append(time.perf_counter() - began)
    seconds = statistics.median(taken[1:])
    return seconds, taken[0] - seconds


def step(args: Namespace, rows: Rows) -> None:
    """Seconds of sampling and update, what compiling took, the largest memory, and what became of the old weights."""
    shape = "tiny" if args.tiny else "0.5"
    folder = make(shape, args.models / shape, args.device)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_samples_per_prompt": GROUP, "max_completion_length": COMPLETION_TOKENS}
    trainer, state = trainer_of(str(folder), "bfloat16", rows_per_pass=16, prompt_bucket=PROMPT_TOKENS, **sizes)
    rng = np.random.default_rng(0)
    asked = {"prompts": rng.integers(100, min(40_000, config["vocab_size"]), (PROMPTS, PROMPT_TOKENS))}
    rounds = 1 if args.tiny else _ROUNDS
    record = trainer.prepare_batch(state, trainer.rollout(state.params, asked))
    sampling, sampling_compiled = measure(
        lambda number: trainer.rollout(state.params, {**asked, "key": jax.random.key(number)}), rounds
    )
    current = [jax.tree.map(jnp.copy, state)]

    def train(number: int) -> Any:
        current[0], metrics = trainer._advance(current[0], record)
        return metrics["loss"]

    update, update_compiled = measure(train, rounds)
    before = jax.tree.leaves(current[0].params)
    train(rounds + 1)
    gone = sum(leaf.is_deleted() for leaf in before)
    state_of: Any = "ok" if gone == len(before) else "wrong"
    rows.say("JAX, donated weights", state_of, f"{gone} of {len(before)} arrays became those of the next step")
    seconds, tokens = sampling + update, PROMPTS * GROUP * COMPLETION_TOKENS
    done = gpu_work.Rollout(PROMPTS, PROMPT_TOKENS, PROMPTS * GROUP, tokens, COMPLETION_TOKENS)
    found = {"seconds": seconds, "sampling": sampling, "update": update, "tokens_per_second": tokens / seconds}
    found |= gpu_work.step(config, done).shares(seconds, args.rate, args.bandwidth)
    known = jax.devices()[0].memory_stats() or {}
    found |= {"peak_device": known["peak_bytes_in_use"]} if "peak_bytes_in_use" in known else {}
    compiled = sampling_compiled + update_compiled
    rows.say("JAX, a step in bfloat16", "ok", f"8 x 8 x 24 tokens, compiling {compiled:.0f} s once", **found)


def main() -> None:
    """Run all of it."""
    args, rows = arguments(__doc__).parse_args(), Rows()
    rows.say("JAX devices", "ok", f"JAX {jax.__version__}: {', '.join(str(device) for device in jax.devices())}")
    parity(args, rows)
    step(args, rows)


if __name__ == "__main__":
    main()

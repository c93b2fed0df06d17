"""Constants of `covey.distributed.cost`, measured on this machine with a run's own model: a minute or two.

What is fitted to one model holds for it, and for others of its kind: a decode step is read as weights over bandwidth,
and what each further row adds as operations, whatever their causes are.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from covey.config import GRPOConfig
from covey.distributed.cost import Constants, Model
from covey.distributed.ranks import Ranks
from covey.errors import ConfigError
from covey.processes import total_memory
from covey.training.forecast import kv_bytes
from covey.training.trainer import GRPOTrainer
from covey.types import Batch, Episode, Prompt, Request, SamplingSettings

PROMPT, SHORT, LONG, ROWS = 32, 4, 36, 8
"""Tokens of the prompts, lengths whose difference is measured, and rows."""
_SUM_NUMBERS = 1 << 20
_WIRE_BYTES = 32 << 20


def check(config: GRPOConfig) -> None:
    """Refuse settings with which something else than this machine would be measured.

    Raises:
        ConfigError: naming the setting.
    """
    if config.server.upload_adapters_to_server:
        raise ConfigError(
            "server.upload_adapters_to_server=true: --calibrate measures this machine, not a server; set it to false"
        )
    if config.model.backend != "pytorch":
        raise ConfigError(f"model.backend={config.model.backend!r}: --calibrate measures with pytorch; set that")


def calibrate(trainer: GRPOTrainer, all_reduce: float | None = None) -> Constants:
    """Measure a decode step with one row and with several, an update, and a sync.

    Args:
        trainer: of one process, which has not trained; throw it away.
        all_reduce: bytes a second of `all_reduce_rate`, None with one process.
    """
    policy: Any = trainer.policy
    model = model_of(policy)
    rng = np.random.default_rng(0)

    def sample(rows: int, length: int) -> list[Any]:
        requests = [Request(prompts[row].token_ids, (row,)) for row in range(rows)]
        settings = SamplingSettings(max_tokens=length, eos_token_ids=())
        return list(trainer.engine(requests, settings, policy_version=trainer.state.policy_version))

    length = min(LONG, trainer.engine.context_length - PROMPT)
    if length <= SHORT:
        raise ConfigError(f"model.model={trainer.args.model.model!r:.200}: its context is too short to measure with")
    prompts = [Prompt(rng.integers(0, policy.vocabulary, PROMPT), "") for _ in range(ROWS)]
    one, several = (
        max(best(partial(sample, rows, length)) - best(partial(sample, rows, SHORT)), 1e-9) / (length - SHORT)
        for rows in (1, ROWS)
    )
    bandwidth = model.bytes_each * model.parameters / one
    row = (several - one) / (ROWS - 1) - (PROMPT + (length + SHORT) / 2) * model.kv_bytes / bandwidth

    completions = sample(ROWS, length)
    episodes = tuple(Episode.from_completion(p, c, "") for p, c in zip(prompts, completions, strict=True))
    mask = np.ones((ROWS, length), np.bool_)
    logprobs = np.stack([completion.logprobs for completion in completions])
    advantages = np.where(np.arange(ROWS)[:, None] % 2, 1.0, -1.0) * mask
    batch = Batch(episodes, np.arange(ROWS), advantages.astype(np.float32), mask, logprobs)
    objective = trainer.args.algorithm.objective()
    trainer.engine.release()
    if objective.beta > 0:
        reference = trainer.learner.scores(batch, np.arange(ROWS), temperature=1.0, reference=True)[0]
    else:
        reference = None

    def learn() -> None:
        trainer.learner.forward_backward(
            batch,
            np.arange(ROWS),
            objective,
            temperature=1.0,
            max_completion_length=length,
            reference=reference,
            trainer_old=logprobs,
        )
        trainer.learner.optim_step(0.0)

    trained = (6 if policy.uses_peft else 8) * model.active * ROWS * (PROMPT + length) / best(learn)
    on_device = policy.device.type == "cuda"
    room = torch.cuda.get_device_properties(policy.device).total_memory if on_device else total_memory()
    where = torch.cuda.get_device_name(policy.device) if on_device else f"{torch.get_num_threads()} threads"
    return Constants(
        name=f"{platform.node() or 'this machine'} ({where}), with {trainer.args.model.model}"[:200],
        measured=True,
        memory_bytes=float(room),
        memory_bytes_per_second=bandwidth,
        decode_flops_per_second=2 * model.active / row if row > 0 else None,
        step_overhead_seconds=0.0,
        flops_per_second=trained,
        sync_bytes_per_second=wire_rate(),
        sync_seconds=best(trainer.publish),
        all_reduce_bytes_per_second=all_reduce,
    )


def model_of(policy: Any) -> Model:
    """What a policy's size costs; all parameters count as active."""
    trained = sum(p.numel() for p in policy.trainable_parameters()) if policy.uses_peft else 0
    numbers = sum(p.numel() for p in policy.model.parameters()) - trained
    each = next(policy.model.parameters()).element_size()
    return Model("this model", numbers, numbers, kv_bytes(policy.model), trained, bytes_each=each)


def best(work: Callable[[], Any], times: int = 3) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    work()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def wire_rate(size: int = _WIRE_BYTES) -> float:
    """Bytes a second through a socket of this machine, hashed at the other end as samplers do."""
    data, hashed = b"\1" * size, hashlib.sha256()

    def send(channel: socket.socket) -> None:
        with channel:
            channel.sendall(data)

    began = time.perf_counter()
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    sender = threading.Thread(target=send, args=(theirs,), daemon=True)
    sender.start()
    with ours:
        while piece := ours.recv(1 << 20):
            hashed.update(piece)
    sender.join(timeout=60)
    return size / (time.perf_counter() - began)


def all_reduce_rate(ranks: Ranks) -> float:
    """Bytes a second of adding up gradients over all ranks; every rank calls this."""
    total = torch.ones(_SUM_NUMBERS, dtype=torch.int64)
    return total.nbytes / best(lambda: ranks.add(total))

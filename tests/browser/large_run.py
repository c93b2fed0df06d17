"""A run folder as large as a long run's, made without training: 10,000 steps with 64 completions each."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

from covey.observe.run_folder import RunFolder

_NAMES = (
    "loss", "policy_loss", "grad_norm", "kl", "entropy", "learning_rate", "accuracy", "reward_std", "mask_ratio",
    "frac_reward_zero_std", "frac_reward_none", "completions/mean_length", "completions/min_length",
    "completions/max_length", "completions/clipped_ratio", "completions/mean_terminated_length",
    "completions/no_answer_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    "ratio/mean", "ratio/min", "ratio/max", "rewards/few_letters/mean", "rewards/few_letters/std",
    "rewards/has_a/mean", "rewards/has_a/std", "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max", "time/sampling", "time/scoring", "time/update", "time/publish",
    "time/reference", "memory/peak_gb", "staleness/mean", "epoch",
)  # fmt: skip


def make_large_run(folder: Path, steps: int = 10_000, tables: int = 10_000) -> RunFolder:
    """Write it.

    Args:
        folder: to be made.
        steps: lines of metrics and answers.
        tables: steps that have a table of completions; all but the last 20 are the same file again.
    """
    draw = random.Random(0)
    with RunFolder.create(folder) as run:
        run.append_metrics(0, {"eval/reward": 0.1, "eval/accuracy": 0.1})
        run.write_config('[model]\nmodel = "made-up"\n\n[schedule]\nmax_steps = 10000\n')
        run.append_event("run", "started")
        for step in range(max(1, tables - 20), tables + 1):
            run.write_completions(step, [_completion(draw, step, row) for row in range(64)])
    first = run.completions / f"step_{max(1, tables - 20):06d}.parquet"
    for step in range(1, tables - 20):
        (run.completions / f"step_{step:06d}.parquet").hardlink_to(first)
    with run.metrics_path.open("a") as lines, run.questions_path.open("a") as answers:
        for step in range(1, steps + 1):
            share = 1 - math.exp(-step / 3000)
            record = {"step": step, "reward": share + draw.gauss(0, 0.05), "step_time": 1 + draw.random()}
            record |= {name: draw.random() for name in _NAMES} | {"num_tokens": step * 5000, "phase": int(step > 4000)}
            lines.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                low, high = share - 0.04, share + 0.04
                evaluation = {"eval/accuracy": share, "eval/accuracy_low": low, "eval/accuracy_high": high}
                lines.write(json.dumps({"step": step, "eval/reward": share, **evaluation}) + "\n")
            asked = {f"question-{draw.randrange(1000)}": [draw.randint(0, 8), 8] for _ in range(8)}
            answers.write(json.dumps({"step": step, "answers": asked}) + "\n")
    return run


def _completion(draw: random.Random, step: int, row: int) -> dict[str, object]:
    words = " ".join(draw.choice(("so", "the", "answer", "is", "two", "four", "then")) for _ in range(120))
    reward = float(draw.random() < 0.5)
    return {
        "group": row // 8, "sample": row % 8, "uid": f"question-{row // 8}", "prompt": f"Question {row // 8}?",
        "completion": f"{words} (completion {row} of step {step})", "reward": reward, "correct": reward == 1.0,
        "advantage": reward - 0.5, "length": 240, "finish_reason": "stop", "policy_version": step,
    }  # fmt: skip


def copy_of(run: Path, folder: Path) -> Path:
    """A run folder that a test may change."""
    return Path(shutil.copytree(run, folder, ignore=shutil.ignore_patterns("run.lock", "checkpoints")))

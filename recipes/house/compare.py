"""Draw success by step for the three ways of giving credit, from `measured/`, and print the table.

python recipes/house/compare.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ESTIMATORS = {"gigpo": "tab:green", "naive_grpo": "tab:blue", "grpo": "tab:orange"}
SEEDS = (42, 43, 44)
_WINDOW = 5


def main() -> None:
    """Picture and table."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rows = [
        "| `adv_estimator` | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean |",
        "|---|---|---|---|---|",
    ]
    for estimator, colour in ESTIMATORS.items():
        runs = [_read(HERE / f"measured/{estimator}-{seed}.jsonl") for seed in SEEDS]
        curves = np.array([_smoothed([r["agent/success"] for r in run if "agent/success" in r]) for run in runs])
        steps = np.arange(1, curves.shape[1] + 1)
        for curve in curves:
            axes.plot(steps, curve, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, curves.mean(axis=0), color=colour, linewidth=2, label=estimator)
        last = [[r for r in run if "eval/accuracy" in r][-1] for run in runs]
        cells = [
            f"{r['eval/accuracy']:.0%} ({r['eval/accuracy_low']:.0%} to {r['eval/accuracy_high']:.0%})" for r in last
        ]
        mean = np.mean([r["eval/accuracy"] for r in last])
        rows.append(f"| `{estimator}` | " + " | ".join(cells) + f" | {mean:.0%} |")
    axes.axhline(1 / 3, color="grey", linestyle=":", linewidth=1)
    axes.text(0.5, 1 / 3 + 0.01, "searching one room", color="grey", fontsize=8)
    axes.set(xlabel="step", ylabel="success (sampled, mean of 5 steps)", ylim=(0, 1.02), title="An agent and a note")
    axes.legend(loc="upper left")
    figure.savefig(HERE.parents[1] / "docs/images/house.png", dpi=120)
    sys.stdout.write("\n".join(rows) + "\n")


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _smoothed(values: list[float]) -> np.ndarray:
    return np.array([np.mean(values[max(0, i - _WINDOW + 1) : i + 1]) for i in range(len(values))])


if __name__ == "__main__":
    main()

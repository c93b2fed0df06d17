"""Draw success by step, from `measured/`, and print the table.

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
SEEDS = (42, 43, 44, 45, 46)
RUNS = {
    "8 houses x 4, `gigpo`": ("many_houses/gigpo", "tab:green"),
    "8 houses x 4, `naive_grpo`": ("many_houses/naive_grpo", "tab:purple"),
    "8 houses x 4, `grpo`": ("many_houses/grpo", "tab:red"),
    "4 houses x 8, `gigpo`": ("gigpo", "tab:olive"),
    "4 houses x 8, `naive_grpo`": ("naive_grpo", "tab:blue"),
    "4 houses x 8, `grpo`": ("grpo", "tab:orange"),
}
_WINDOW = 5


def main() -> None:
    """Picture and table."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rows = ["| | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |", "|---|" + "---|" * len(SEEDS)]
    for label, (name, colour) in RUNS.items():
        paths = {seed: HERE / f"measured/{name}-{seed}.jsonl" for seed in SEEDS}
        runs = {seed: _read(path) for seed, path in paths.items() if path.exists()}
        curves = [_smoothed([r["agent/success"] for r in run if "agent/success" in r]) for run in runs.values()]
        for curve in curves:
            axes.plot(np.arange(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=1)
        steps = min(map(len, curves))
        mean = np.mean([curve[:steps] for curve in curves], axis=0)
        axes.plot(np.arange(1, steps + 1), mean, color=colour, linewidth=2, label=label.replace("`", ""))
        rows.append(f"| {label} | " + " | ".join(_last(runs[seed]) if seed in runs else "" for seed in SEEDS) + " |")
    axes.axhline(1 / 3, color="grey", linestyle=":", linewidth=1)
    axes.text(0.5, 1 / 3 + 0.01, "searching one room", color="grey", fontsize=8)
    axes.set(xlabel="step", ylabel="success (sampled, mean of 5 steps)", ylim=(0, 1.02), title="An agent and a note")
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(HERE.parents[1] / "docs/images/house.png", dpi=120)
    sys.stdout.write("\n".join(rows) + "\n")


def _last(run: list[dict]) -> str:
    """The newest evaluation, with its interval."""
    found = [record for record in run if "eval/accuracy" in record][-1]
    share, low, high = (found[f"eval/accuracy{end}"] for end in ("", "_low", "_high"))
    return f"{share:.0%} ({low:.0%} to {high:.0%})"


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _smoothed(values: list[float]) -> np.ndarray:
    return np.array([np.mean(values[max(0, i - _WINDOW + 1) : i + 1]) for i in range(len(values))])


if __name__ == "__main__":
    main()

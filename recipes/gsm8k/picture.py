"""Draws docs/images/gsm8k.png from measured/ and from the README's table: `python recipes/gsm8k/picture.py`."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
HELD_OUT = {"untrained": (17.0, 21.8), "seed 42": (24.8, 25.6), "seed 43": (22.6, 24.8)}  # strict, lenient: % of 500
SMOOTH = 8  # steps


def main() -> None:
    figure, (curve, bars) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for seed, color in ((42, "#1f6feb"), (43, "#d97706")):
        steps = [json.loads(line) for line in (HERE / f"measured/seed{seed}.jsonl").read_text().splitlines()]
        minutes = np.cumsum([step["step_time"] for step in steps]) / 60
        right = [100 * step["rewards/marked_number/mean"] for step in steps]
        mean = np.convolve(right, np.ones(SMOOTH) / SMOOTH, "valid")
        curve.plot(minutes[SMOOTH - 1 :], mean, color=color, label=f"Covey, seed {seed}")
    steps = [json.loads(line) for line in (HERE / "measured/trl_seed42.jsonl").read_text().splitlines()]
    sampled = [step for step in steps if "rewards/marked_number/mean" in step]
    right = [100 * step["rewards/marked_number/mean"] for step in sampled]
    curve.plot([step["minutes"] for step in sampled], right, "o:", color="#6b7280", label="TRL 1.16, seed 42")
    curve.set(title=f"sampled in training (Covey: mean of {SMOOTH} steps)", xlabel="minutes of training on one core")
    curve.set(ylabel="right, strict (%)", ylim=(0, None))
    curve.legend(frameon=False)
    for offset, (reading, color) in enumerate((("strict", "#1f6feb"), ("lenient", "#9ca3af"))):
        share = np.array([both[offset] for both in HELD_OUT.values()]) / 100
        z, n = 1.96, 500  # Wilson's interval
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        errors = 100 * np.array([share - middle + half, middle + half - share])
        bars.bar(np.arange(3) + 0.38 * offset, 100 * share, 0.36, color=color, yerr=errors, capsize=3, label=reading)
    bars.set_xticks(np.arange(3) + 0.19, list(HELD_OUT))
    bars.set(title="500 held-out problems, greedy, 95 % intervals", ylabel="right (%)", ylim=(0, 36))
    bars.legend(frameon=False, loc="upper left", ncols=2)
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE.parent.parent / "docs/images/gsm8k.png", dpi=110)


if __name__ == "__main__":
    main()

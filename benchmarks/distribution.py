"""What a run in several processes learns, and what they cost: equal bits, seconds of a step, seconds of a sync.

    python benchmarks/distribution.py equal [--steps 4] [SETTING ...]     # one process, actors, ranks: the same run?
    python benchmarks/distribution.py cost  [--rounds 2] [SETTING ...]    # one process against units against one actor
    python benchmarks/distribution.py sync  [--samplers 1 2 4 8] [SETTING ...]

Needs covey[ray]. Every process has one thread. `equal` compares metrics byte for byte, but for times and memory, and
the final adapter bit for bit. `cost` runs the same steps in turns and gives medians without the first step. `sync`
gives the seconds from a finished update until the last sampler has answered with the hash of what it applied.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

UNMEASURED = ("time/", "memory/", "step_time", "eval/seconds", "samplers/")
LAYOUTS = {
    "1 process, units": ["distributed.samplers=0"],
    "1 actor": ["distributed.samplers=1"],
    "2 actors": ["distributed.samplers=2"],
    "3 actors": ["distributed.samplers=3"],
    "2 ranks": ["distributed.learners=2"],
    "2 ranks, 2 actors": ["distributed.learners=2", "distributed.samplers=2"],
}
COSTS = {
    "one call": [],
    "1 process, units": ["distributed.samplers=0"],
    "1 actor": ["distributed.samplers=1"],
}


def main() -> None:
    """Run what is asked for and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "cost", "sync"])
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="as for covey train, for every run")
    parser.add_argument("--recipe", default="recipes/arithmetic")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/distribution_WHAT.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        found = {"equal": _equal, "cost": _cost, "sync": _sync}[arguments.what](arguments, Path(folder))
    out = arguments.out or Path(f"benchmarks/results/distribution_{arguments.what}.json")
    told = {"recipe": arguments.recipe, "steps": arguments.steps, "settings": arguments.settings, "rows": found}
    out.write_text(json.dumps(told, indent=1) + "\n")


def _equal(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows, first = [], None
    for number, (layout, settings) in enumerate(LAYOUTS.items()):
        run = _run(arguments, folder / str(number), settings)
        learned = (run["metrics"], run["adapter"])
        first = first or learned
        same_metrics, same_adapter = (a == b for a, b in zip(learned, first, strict=True))
        rows.append(
            {
                "layout": layout,
                "same_metrics": same_metrics,
                "same_adapter": same_adapter,
                "adapter_sha256": run["adapter"][:16],
                "step_seconds": run["step_seconds"],
                "command_seconds": run["command_seconds"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def _cost(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {layout: [] for layout in COSTS}
    for number in range(arguments.rounds):
        for layout, settings in COSTS.items():
            run = _run(arguments, folder / f"{number}-{len(settings)}-{layout[:1]}{layout[-1:]}", settings)
            seconds[layout].append(run["step_seconds"])
            print(layout, run["step_seconds"], flush=True)
    alone = statistics.median(seconds["one call"])
    return [
        {"layout": layout, "step_seconds": each, "over_one_call": round(statistics.median(each) / alone, 3)}
        for layout, each in seconds.items()
    ]


def _sync(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for samplers in arguments.samplers:
        run = _run(arguments, folder / str(samplers), [f"distributed.samplers={samplers}"])
        rows.append(
            {
                "samplers": samplers,
                "bytes_each": run["adapter_bytes"],
                "publish_seconds": run["publish_seconds"],
                "step_seconds": run["step_seconds"],
                "command_seconds": run["command_seconds"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def _run(arguments: argparse.Namespace, output: Path, settings: list[str]) -> dict[str, Any]:
    """A run of the command, which evaluates on eight prompts, before and after."""
    command = [sys.executable, "-m", "covey", "train", arguments.recipe, f"run.output_dir={output}"]
    command += [
        f"schedule.max_steps={arguments.steps}",
        "evaluation.num_eval_prompts=8",
        "distributed.ray_address=local",
    ]
    command += [*settings, *arguments.settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/update" in line]
    adapter = (output / "adapter" / "adapter_model.safetensors").read_bytes()
    return {
        "metrics": [{name: line[name] for name in line if not name.startswith(UNMEASURED)} for line in lines],
        "adapter": hashlib.sha256(adapter).hexdigest(),
        "adapter_bytes": len(adapter),
        "step_seconds": _median(step["step_time"] for step in steps[1:]),
        "publish_seconds": _median(step["time/publish"] for step in steps[1:]),
        "command_seconds": round(time.monotonic() - begun, 1),
    }


def _median(values: Any) -> float:
    return round(statistics.median(values), 4)


if __name__ == "__main__":
    main()

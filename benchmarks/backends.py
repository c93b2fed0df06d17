"""The JAX backend against the PyTorch backend: the same steps, the same machine, taking turns.

    python benchmarks/backends.py --steps 5             # 8 x 8 completions of up to 48 tokens

Each trains in a process of its own with the same seed and data, a step of one after a step of the other. JAX compiles
each shape of batch when it meets it: its compile time is told apart. Writes `results/backends.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compare import HERE, Bench, machine, say
from workloads import WORKLOADS, prompts

PARTS = ("seconds", "sampling", "update", "compile_seconds")


def rates(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the steps in which nothing was compiled, and the compile time of all of them together."""
    steady = [step for step in steps if step.get("compile_seconds", 0.0) < 0.05]
    found = {name: statistics.median(step[name] for step in steady) for name in ("seconds", "sampling", "update")}
    found["sampling_tokens_per_second"] = statistics.median(s["completion_tokens"] / s["sampling"] for s in steady)
    found["update_tokens_per_second"] = statistics.median(s["completion_tokens"] / s["update"] for s in steady)
    found["steady_steps"] = len(steady)
    found["compile_seconds"] = sum(step.get("compile_seconds", 0.0) for step in steps)
    found["peak_rss"] = max(step["peak_rss"] for step in steps)
    return found


def main() -> None:
    """Let both train in turns and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / ".cache/model", help="made by export_model.py")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    workload = WORKLOADS[args.workload]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    found: dict[str, list[dict[str, float]]] = {"covey": [], "covey-jax": []}
    with tempfile.TemporaryDirectory() as folder:
        texts = prompts(workload, tokenizer, workload.num_prompts * (args.steps + 4))
        (Path(folder) / f"{workload.name}.json").write_text(json.dumps(texts))
        chosen: Any = SimpleNamespace(model=args.model, steps=args.steps, gpu=False, trl_python="", dtype="float32")
        bench = Bench(chosen, workload, Path(folder))
        with bench.worker("covey") as torch_worker, bench.worker("covey-jax") as jax_worker:
            for step in range(args.steps + 2):
                for name, worker in (("covey", torch_worker), ("covey-jax", jax_worker)):
                    report = worker.step()
                    say(f"  {name} {step}: { ({part: round(report.get(part, 0.0), 2) for part in PARTS}) }")
                    found[name].append(report)
    # the first step of each warms up; what JAX compiled in it still counts as compile time
    rows = {name: rates(steps[1:]) for name, steps in found.items()}
    rows["covey-jax"]["compile_seconds"] += found["covey-jax"][0].get("compile_seconds", 0.0)
    rows["ratios"] = {
        part: rows["covey-jax"][part] / rows["covey"][part] for part in ("seconds", "sampling", "update", "peak_rss")
    }
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"machine": machine(), "workload": workload.title, "rows": rows, "steps": found}
    (args.out / "backends.json").write_text(json.dumps(results, indent=1) + "\n")
    say(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

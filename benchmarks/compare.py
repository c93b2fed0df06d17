"""Covey against TRL: the same step, the same machine, taking turns.

    python benchmarks/compare.py --trl-python .venv-trl/bin/python            # every row, 5 steps each
    python benchmarks/compare.py --trl-python ... step long_prompt --steps 7

For each workload TRL's micro-batch size is tuned first (one step each, the fastest wins), and so is its allocator
setting once. Then both libraries run in processes of their own, a step of one after a step of the other, and the first
step of each is dropped: it warms up. Writes `results/compare.json` and `results/compare.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workloads import ALL_WORKLOADS, WORKLOADS, Workload, prompts

HERE = Path(__file__).parent
ALLOCATORS = {
    "default": {},
    "keeps freed memory": {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"},
}


class Worker:
    """One library training one workload in a process of its own, a step at a time. `ready` is what it said first."""

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        script: str = "worker.py",
    ) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | environment,
        )
        self.ready = self._read()

    def step(self, command: str = "") -> dict[str, Any]:
        """Let it train one step, or do what else it knows."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise SystemExit(f"{' '.join(map(str, self._process.args))}\nended early; its log is {self._log.name}")
        found: dict[str, Any] = json.loads(line)
        return found


class Bench:
    """Starts workers for one workload."""

    def __init__(self, args: argparse.Namespace, workload: Workload, folder: Path) -> None:
        self._args, self._workload, self._folder = args, workload, folder

    @contextmanager
    def worker(self, library: str, *, micro_batch: int = 8, allocator: str = "default") -> Iterator[Worker]:
        """A running worker, stopped at the end."""
        args, name = self._args, f"{library}-{self._workload.name}-{micro_batch}"
        python = args.trl_python if library.startswith("trl") else sys.executable
        arguments = [library, self._workload.name, "--model", str(args.model), "--micro-batch", str(micro_batch)]
        arguments += ["--prompts", str(self._folder / f"{self._workload.name}.json")]
        arguments += ["--settings", json.dumps({} if library.startswith("trl") else self._workload.covey)]
        arguments += ["--dtype", args.dtype]
        arguments += ["--folder", tempfile.mkdtemp(dir=self._folder), "--steps", str(args.steps + 4)]
        arguments += [] if args.gpu else ["--cpu"]
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **ALLOCATORS[allocator]}
        # Covey's command line sets this; here it is set for both
        environment["GOMP_SPINCOUNT"] = "10000"
        worker = Worker(python, arguments, environment, self._folder / f"{name}.log")
        try:
            yield worker
        finally:
            worker.stop()


def tune(bench: Bench, allocator: str) -> tuple[int, dict[str, Any]]:
    """TRL's fastest micro-batch size, and what each size took: one step after a fresh start each.

    From 4 and 8 on it goes down or up by powers of two for as long as that is faster and fits the memory.
    """
    tried: dict[int, Any] = {}

    def seconds(size: int) -> float:
        with bench.worker("trl", micro_batch=size, allocator=allocator) as worker:
            tried[size] = worker.step()
        say(f"  TRL, micro-batch {size}: {tried[size]['seconds']:.1f} s, {tried[size]['peak_rss'] / 1e9:.2f} GB")
        return float(tried[size]["seconds"])

    size, better = (8, 2.0) if seconds(8) < seconds(4) else (4, 0.5)
    while True:
        following = int(size * better)
        too_much = better > 1 and 2 * tried[size]["peak_rss"] > 0.8 * memory_bytes()
        if not 1 <= following <= 64 or too_much or seconds(following) >= tried[size]["seconds"]:
            return size, {str(key): tried[key] for key in sorted(tried)}
        size = following


def tune_allocator(bench: Bench) -> tuple[str, dict[str, Any]]:
    """TRL's faster allocator setting: the second of two steps."""
    tried: dict[str, Any] = {}
    for name in ALLOCATORS:
        with bench.worker("trl", allocator=name) as worker:
            worker.step()
            tried[name] = worker.step()
        say(f"  TRL, allocator {name}: {tried[name]['seconds']:.1f} s, {tried[name]['peak_rss'] / 1e9:.2f} GB")
    return min(tried, key=lambda name: tried[name]["seconds"]), tried


def compare(bench: Bench, steps: int, micro_batch: int, allocator: str) -> dict[str, list[dict[str, float]]]:
    """Alternating steps of both libraries; the first of each is dropped."""
    found: dict[str, list[dict[str, float]]] = {"covey": [], "trl": []}
    with (
        bench.worker("covey") as covey,
        bench.worker("trl", micro_batch=micro_batch, allocator=allocator) as trl,
    ):
        for step in range(steps + 1):
            for name, worker in (("covey", covey), ("trl", trl)):
                report = worker.step()
                if step > 0:
                    found[name].append(report)
                say(f"  {name} {step}: {report['seconds']:.1f} s, {report['peak_rss'] / 1e9:.2f} GB, {report}")
    return found


def summary(workload: Workload, found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and ratios of one workload."""
    row: dict[str, Any] = {"title": workload.title, "steps": dict(found)}
    for name, steps in found.items():
        row[name] = {
            "seconds": statistics.median(step["seconds"] for step in steps),
            "peak_rss": max(step["peak_rss"] for step in steps),
            "completion_tokens": statistics.median(step["completion_tokens"] for step in steps),
        }
    ratios = [mine["seconds"] / other["seconds"] for mine, other in zip(found["covey"], found["trl"], strict=True)]
    row["time_ratio"] = row["covey"]["seconds"] / row["trl"]["seconds"]
    row["time_ratio_range"] = [min(ratios), max(ratios)]
    row["memory_ratio"] = row["covey"]["peak_rss"] / row["trl"]["peak_rss"]
    row["targets"] = {"time": workload.target_time, "memory": workload.target_memory}
    return row


def table(rows: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| one step | Covey s | TRL s | time ratio (range) | wanted | Covey GB | TRL GB | memory ratio | wanted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        low, high = row["time_ratio_range"]
        lines.append(
            f"| {row['title']} | {row['covey']['seconds']:.1f} | {row['trl']['seconds']:.1f} "
            f"| **{row['time_ratio']:.3f}** ({low:.3f} to {high:.3f}) | {row['targets']['time']} "
            f"| {row['covey']['peak_rss'] / 1e9:.2f} | {row['trl']['peak_rss'] / 1e9:.2f} "
            f"| **{row['memory_ratio']:.2f}** | {row['targets']['memory']} |"
        )
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> None:
    """Run the rows that were asked for and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"default: all of {', '.join(WORKLOADS)}")
    parser.add_argument("--trl-python", required=True, help="python of an environment with TRL")
    parser.add_argument("--model", type=Path, default=HERE / ".cache/model", help="made by export_model.py")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, help="of TRL; default: tuned for each workload")
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), help="of TRL; default: tuned on the first workload")
    parser.add_argument("--gpu", action="store_true", help="let both use a GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights of both")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "compare.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = machine()
    rows = results.setdefault("rows", {})
    allocator = args.allocator
    with tempfile.TemporaryDirectory() as folder:
        for name in args.workloads or WORKLOADS:
            workload = ALL_WORKLOADS[name]
            say(f"{name}: {workload.title}")
            texts = prompts(workload, tokenizer, workload.num_prompts * (args.steps + 4))
            (Path(folder) / f"{name}.json").write_text(json.dumps(texts))
            bench = Bench(args, workload, Path(folder))
            tuned: dict[str, Any] = {}
            if allocator is None:
                allocator, tuned["allocator"] = tune_allocator(bench)
            micro_batch = args.micro_batch
            if micro_batch is None:
                micro_batch, tuned["micro_batch"] = tune(bench, allocator)
            row = summary(workload, compare(bench, args.steps, micro_batch, allocator))
            row["trl"] |= {"micro_batch": micro_batch, "allocator": allocator, "tuned": tuned}
            rows[name] = row
            path.write_text(json.dumps(results, indent=1) + "\n")
            (args.out / "compare.md").write_text(table(rows))
            say(table(rows))


if __name__ == "__main__":
    main()

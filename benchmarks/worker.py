"""Trains one workload with one library in a process of its own, a step each time that a line arrives on stdin.

The parent starts one worker for each library and lets them take turns, so that both meet the same machine. Covey reads
TRL's settings by TRL's names, so both get the same ones. For each step a JSON line goes to stdout:

    {"seconds": 12.3, "peak_rss": 2900000000, "completion_tokens": 2304, "sampling": 7.1, "update": 4.9}

On a GPU also `peak_device`, the most that torch allocated on it in the step, and `update_peak_device`, in the update
alone. What vLLM takes from an allocator of its own is in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from workloads import ALL_WORKLOADS, MODEL_SETTINGS, Reward, Workload

_PARTS = ("sampling", "update")


class Device:
    """The clock and the memory of the GPU that torch uses, or of none."""

    def __init__(self) -> None:
        self._earlier: dict[str, int] = {}
        self._sampled = 0.0

    def now(self) -> float:
        """Seconds, when all that was asked of the GPU is done."""
        if self._cuda is not None:
            self._cuda.synchronize()
        return time.perf_counter()

    def begin_step(self) -> float:
        """The time, and all that was noted is forgotten."""
        self._earlier, self._sampled = {}, 0.0
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
        return self.now()

    def begin_update(self) -> None:
        """What is allocated from now on is the update's."""
        if self._cuda is not None and not self._earlier:
            self._earlier = {"peak_device": self._cuda.max_memory_allocated()}
            self._cuda.reset_peak_memory_stats()

    def timed(self, function: Any) -> Any:
        """The same function; its seconds are those of sampling, and the update begins behind it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            found = function(*args, **kwargs)
            self._sampled += self.now() - began
            self.begin_update()
            return found

        return call

    def before(self, function: Any) -> Any:
        """The same function; the update begins with it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin_update()
            return function(*args, **kwargs)

        return call

    def end_step(self, seconds: float) -> dict[str, float]:
        """The step's peaks, and its parts where sampling was timed."""
        found: dict[str, float] = (
            {"sampling": self._sampled, "update": seconds - self._sampled} if self._sampled else {}
        )
        if self._cuda is not None:
            peak = self._cuda.max_memory_allocated()
            found |= {"peak_device": max(peak, self._earlier.get("peak_device", 0))}
            found |= {"update_peak_device": peak} if self._earlier else {}
        return found

    @property
    def _cuda(self) -> Any:
        torch = sys.modules.get("torch")
        return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


class TakeTurns:
    """A callback for either trainer: waits for a line, lets one step run, reports it."""

    def __init__(self, reward: Reward, out: Any, device: Device) -> None:
        self._reward, self._out, self._device = reward, out, device
        self._began = 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wait({"ready": True})

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = self._device.now() - self._began
        tokens, self._reward.completion_tokens = self._reward.completion_tokens, 0
        report = {"seconds": seconds, "peak_rss": peak_rss(), "completion_tokens": tokens}
        report |= self._device.end_step(seconds)
        history = getattr(args[1] if len(args) > 1 else kwargs.get("state"), "log_history", None) or [{}]
        report |= {name: history[-1][f"time/{name}"] for name in _PARTS if f"time/{name}" in history[-1]}
        self._wait(report)

    def _wait(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self._began = self._device.begin_step()


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
    settings |= {
        "model": args.model,
        "prompts_per_step": workload.num_prompts,
        "prompt_order": "given",
        "dtype": args.dtype,
    }
    settings |= {"device": "cpu"} if args.cpu else {}
    if args.library == "covey-vllm":
        settings |= {"engine": "vllm", "llm_arguments": {"max_model_len": args.max_model_len}}
    settings |= {"eval_steps": 0, "save_steps": 0, **MODEL_SETTINGS, **json.loads(args.settings)}
    config, device = GRPOConfig(**settings), Device()
    turns = TakeTurns(reward, out, device)
    trainer = GRPOTrainer(reward_funcs=reward, args=config, train_dataset=rows, callbacks=[turns])
    learner: Any = trainer.learner
    learner.forward_backward = device.before(learner.forward_backward)
    trainer.train()


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
        "bf16": args.dtype == "bfloat16",
        "use_cpu": args.cpu,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": args.dtype},
        **json.loads(args.settings),
    }
    if (
        args.library == "trl-vllm"
    ):  # the same share of the memory as Covey's default, and asleep while the policy learns
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
        settings |= {"vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": args.max_model_len}
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
    device: Any = Device()
    trainer._generate_and_score_completions = device.timed(trainer._generate_and_score_completions)
    trainer.add_callback(TakeTurns(reward, out, device))
    trainer.train()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("covey", "covey-vllm", "trl", "trl-vllm"))
    parser.add_argument("workload", choices=sorted(ALL_WORKLOADS))
    parser.add_argument("--model", required=True, help="folder of the model, in transformers' format")
    parser.add_argument("--prompts", required=True, help="JSON list of prompts")
    parser.add_argument("--folder", required=True, help="for what the trainer writes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL: completions in one forward and backward pass")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--max-model-len", type=int, default=4608, help="vLLM: tokens of a prompt and its completion")
    parser.add_argument("--settings", default="{}", help="more settings, as JSON")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not get between the reports
    workload = ALL_WORKLOADS[args.workload]
    texts = json.loads(Path(args.prompts).read_text())
    rows = [{"prompt": text} for text in texts]
    (run_trl if args.library.startswith("trl") else run_covey)(args, workload, rows, Reward(workload.tied, texts), out)


if __name__ == "__main__":
    main()

"""One library learning a task until its held-out accuracy is reached, in a process of its own.

Covey and TRL get the same rows in the same order, the same reward function, prompts and settings. Every so many steps
the held-out questions are answered greedily; what that takes is not counted. A JSON line for each such look goes to
stdout:

    {"step": 20, "seconds": 81.4, "cpu_seconds": 80.2, "tokens": 98304, "correct": 133, "asked": 200, ...}

`seconds` are those of training, the compilation of programs and everything else in it included, `tokens` those of
prompts and completions so far.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from worker import peak_rss
from workloads import MODEL_SETTINGS

from covey.tasks import get_task


class Looks:
    """A callback for either trainer: lets it answer the held-out questions when that is due, and stops it at the end.

    Args:
        every: steps between two looks.
        goal: accuracy at which training ends, after two looks in a row.
        limit: seconds of training.
        out: where reports go.

    Attributes:
        look: returns (correct, asked).
        tokens: returns the tokens so far.
    """

    def __init__(self, every: int, goal: float, limit: float, out: Any) -> None:
        self._every, self._goal, self._limit, self._out = every, goal, limit, out
        self._reached = 0
        self._seconds = self._resumed = self._cpu = self._cpu_resumed = 0.0
        self.look: Any = None
        self.tokens: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self._look(0, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._seconds += time.perf_counter() - self._resumed
        self._cpu += time.process_time() - self._cpu_resumed
        step, last = state.global_step, self._seconds >= self._limit
        if step % self._every == 0 or last:
            control = self._look(step, control)
        if last:
            control.should_training_stop = True
        self._go_on()
        return control

    def _go_on(self) -> None:
        self._resumed, self._cpu_resumed = time.perf_counter(), time.process_time()

    def _look(self, step: int, control: Any) -> Any:
        correct, asked = self.look()
        report = {"step": step, "seconds": self._seconds, "cpu_seconds": self._cpu, "tokens": self.tokens()}
        report |= {"correct": correct, "asked": asked, "peak_rss": peak_rss()}
        print(json.dumps(report), file=self._out, flush=True)
        self._reached = self._reached + 1 if correct >= self._goal * asked else 0
        if self._reached == 2:
            control.should_training_stop = True
        self._go_on()
        return control


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """Settings by TRL's names, which are Covey's too but for those of the entropy."""
    settings = {
        "output_dir": args.folder,
        "num_generations": args.generations,
        "max_completion_length": 24,
        "beta": 0.0,
        "loss_type": "grpo",  # it learns this task faster than dapo, the default of TRL
        "temperature": 1.0,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "max_steps": args.steps,
        "logging_steps": 1,
        "report_to": "none",
        "seed": args.seed,
        "gradient_checkpointing": False,
        # the demo's: without it either library soon names one place, which is right half the time, and stays there
        "use_adaptive_entropy": True,
        "entropy_target": 0.2,
        "entropy_coef": 0.01,
        "entropy_coef_min": 0.01,
        "entropy_coef_max": 0.01,
    }
    return settings | json.loads(args.settings)


def run_covey(args: argparse.Namespace, task: Any, looks: Looks) -> None:
    """Train with Covey."""
    from covey import GRPOConfig, GRPOTrainer

    settings = MODEL_SETTINGS | {
        "model": args.model,
        "prompts_per_step": args.prompts,
        "num_minibatches": args.minibatches,
        "prompt_order": "given",
        "dtype": "float32",
        "eval_steps": 0,
        "eval_on_start": False,
        "eval_at_end": False,
        "save_steps": 0,
    }
    settings |= shared(args)
    names = {"target": "entropy_target", "min": "entropy_coef_min", "max": "entropy_coef_max"}
    entropy = {ours: settings.pop(theirs) for ours, theirs in names.items()}
    settings["adaptive_entropy"] = entropy if settings.pop("use_adaptive_entropy") else None
    trainer = GRPOTrainer(args=GRPOConfig(**settings), task=task, callbacks=[looks])

    def look() -> tuple[int, int]:
        asked = len(trainer.eval_prompts)
        return round(trainer.evaluate()["eval/accuracy"] * asked), asked

    looks.look, looks.tokens = look, lambda: trainer.state.num_tokens
    trainer.train()


def run_trl(args: argparse.Namespace, task: Any, looks: Looks) -> None:
    """Train with TRL."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    # Covey puts the task's system prompt before each question by itself
    before = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    rows, held_out = (
        [{**row, "prompt": [*before, *row["prompt"]]} for row in each]
        for each in (task.train_rows(args.seed), task.eval_rows())
    )
    completions = args.prompts * args.generations
    settings = {
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": completions // args.micro_batch // args.minibatches,
        "steps_per_generation": completions // args.micro_batch,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }
    lora = LoraConfig(
        r=MODEL_SETTINGS["lora_r"],
        lora_alpha=MODEL_SETTINGS["lora_alpha"],
        target_modules=MODEL_SETTINGS["lora_target_modules"],
        task_type="CAUSAL_LM",
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=task.reward_funcs,
        args=GRPOConfig(**settings | shared(args)),
        train_dataset=Dataset.from_list(rows),
        peft_config=lora,
    )
    tokenizer = trainer.processing_class

    def look() -> tuple[int, int]:
        correct = 0
        trainer.model.eval()
        for first in range(0, len(held_out), 50):
            some = held_out[first : first + 50]
            texts = [
                tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in some
            ]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            with torch.inference_mode():
                out = trainer.model.generate(
                    **inputs, max_new_tokens=trainer.args.max_completion_length, do_sample=False
                )
            said = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            correct += sum(task.is_correct(text, row) for text, row in zip(said, some, strict=True))
        trainer.model.train()
        return correct, len(held_out)

    looks.look, looks.tokens = look, lambda: int(trainer.state.num_input_tokens_seen)
    trainer.add_callback(looks)
    trainer.train()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("covey", "trl"))
    parser.add_argument("--task", default="arithmetic:kinds=compare,digits=2,num_eval=200")
    parser.add_argument("--model", required=True, help="folder of the model, in transformers' format")
    parser.add_argument("--folder", required=True, help="for what the trainer writes")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=400, help="most of them")
    parser.add_argument("--minutes", type=float, default=60, help="most of training")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out questions")
    parser.add_argument("--goal", type=float, default=0.95, help="stop when two looks in a row saw this accuracy")
    parser.add_argument("--prompts", type=int, default=8, help="in a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--minibatches", type=int, default=1, help="optimiser steps with what a step sampled")
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL: completions in one forward and backward pass")
    parser.add_argument("--settings", default="{}", help="more settings, as JSON")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not get between the reports
    # TRL counts optimiser steps
    every = args.every * (args.minibatches if args.library == "trl" else 1)
    looks = Looks(every, args.goal, args.minutes * 60, out)
    (run_trl if args.library == "trl" else run_covey)(args, get_task(args.task), looks)


if __name__ == "__main__":
    main()

"""Computes the numbers of `trl_numbers.json` anew: losses and gradients of TRL 1.16.0's own `GRPOTrainer`.

    make .venv-trl/.done && .venv-trl/bin/python tests/trl/make_trl_numbers.py

A case is a line of the file, `{"options": ...}` of `GRPOConfig` to begin with; `num_iterations` is 2 unless it is said,
and what is told is the second pass. Only the network and the sampler are replaced, by `inputs`: `[N, T]` each, the
policy's first and second pass, the reference, vLLM, and entropies. Advantages, importance sampling, masks and the loss
are those of `_generate_and_score_completions` and `_compute_loss`, in float32.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

FILE = Path(__file__).with_name("trl_numbers.json")
GIVEN = json.loads(FILE.read_text())
LENGTHS, TOOL = GIVEN["lengths"], GIVEN["tool_token"]  # tokens of each completion; one of the third's is a tool's
N, T, END = len(LENGTHS), max(LENGTHS), 1


class Named(GRPOTrainer):
    """TRL's trainer with given numbers in the place of network and sampler."""

    def setup(self, options: dict[str, Any]) -> None:
        self.given = {name: torch.tensor(values) for name, values in GIVEN["inputs"].items()}
        self.use_vllm = self.args.use_vllm = options.get("use_vllm", False)
        self.beta, self.ref_model, self.rows = options.get("beta", 0.0), object(), slice(None)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.moving = tuple(self.given[name].clone().requires_grad_() for name in ("logp", "entropy"))
        if self.num_iterations == 1:
            self.moving = (self.given["old"].clone().requires_grad_(), self.moving[1])

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids = [[2] * length for length in LENGTHS]
        for each in ids[:4]:
            each[-1] = END  # the last two are cut off
        tools = [[int([row, place] != TOOL) for place in range(length)] for row, length in enumerate(LENGTHS)]
        logps = [row[:n] for row, n in zip(self.given["sampler"].tolist(), LENGTHS, strict=True)]
        return [[3]] * N, ids, tools, ["text"] * N, (logps if self.use_vllm else None), {}, None, [None] * N

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return torch.tensor([[torch.nan if x is None else x for x in each] for each in GIVEN["rewards"]]).T

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **more: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return self.moving[0][self.rows], self.moving[1][self.rows], None
        return self.given["ref" if model is self.ref_model else "old"], None, None


def of_case(model: Any, tokenizer: Any, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Loss and gradients of a case, and its advantages."""
    parts = options.get("gradient_accumulation_steps", 1)
    args = {"num_iterations": 2} | {n: v for n, v in options.items() if n not in ("use_vllm", "beta")}
    args |= {"per_device_train_batch_size": N // parts, "num_generations": 3, "max_completion_length": T}
    config = GRPOConfig(folder, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **args)
    rewards, rows = [lambda **_: [0.0] * N] * 2, Dataset.from_list([{"prompt": "x"}] * N)
    trainer = Named(model, rewards, config, rows, processing_class=tokenizer)
    trainer.setup(options)
    model.train()
    made = trainer._generate_and_score_completions([{"prompt": "x"}] * N)
    if options.get("use_adaptive_entropy"):
        trainer._compute_loss(model, made)  # the step before, which the bonus of this one follows
    total = 0.0
    for part in range(parts):
        trainer.rows = slice(part * N // parts, (part + 1) * N // parts)
        own = {n: v[trainer.rows] if torch.is_tensor(v) and v.ndim else v for n, v in made.items()}
        (loss := trainer._compute_loss(model, own)).backward()
        total += float(loss.detach())
    gradients = [torch.zeros(N, T) if each.grad is None else each.grad for each in trainer.moving]
    found = {"options": options, "loss": total, "advantages": made["advantages"].tolist()}
    found["gradient"] = gradients[0].tolist()
    if gradients[1].any():
        found["entropy_gradient"] = gradients[1].tolist()
    if options.get("use_adaptive_entropy"):
        found["entropy_coef"] = trainer.entropy_coef
    return found


def main() -> None:
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "[END]": END, "x": 2, "y": 3}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[END]", unk_token="x")
    size = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    size.bos_token_id, size.eos_token_id, size.pad_token_id = None, END, 0
    model = LlamaForCausalLM(size)
    with tempfile.TemporaryDirectory() as folder:
        cases = [of_case(model, tokenizer, case["options"], folder) for case in GIVEN["cases"]]
    values = GRPOConfig("out", use_cpu=True).to_dict()
    defaults = {name: values[name] for name in sorted(values) if name not in ("use_cpu", "bf16", "logging_dir")}
    whole = {name: value for name, value in GIVEN.items() if name != "cases"} | {"defaults": defaults}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in whole.items()]
    rounded = json.loads(json.dumps(cases), parse_float=lambda text: float(f"{float(text):.6g}"))
    lines.append('"cases": [\n' + ",\n".join(map(json.dumps, rounded)) + "\n]")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

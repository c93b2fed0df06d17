"""Writes `trl_numbers.json`: losses and gradients as TRL 1.16.0's own `GRPOTrainer` computes them.

    make .venv-trl/.done && .venv-trl/bin/python tests/trl/make_trl_numbers.py

Only the network and the sampler are replaced, by log-probabilities and entropies, `inputs` in the file. Advantages,
importance sampling, masks and the loss are those of `_generate_and_score_completions` and `_compute_loss`, in float32.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LENGTHS, TOOL = [4, 2, 5, 3, 1, 5], (2, 1)  # tokens of each completion; of the third, the second is a tool's
FIRST, SECOND = [0.0, 1.0, 0.5, 2.0, 2.0, 2.5], [1.0, None, 0.0, 0.2002, 0.2, 0.2001]
N, T, END = len(LENGTHS), max(LENGTHS), 1

CASES: list[dict[str, Any]] = [
    *({"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
    *(
        {"loss_type": loss, "importance_sampling_level": "sequence", "beta": 0.3}
        for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    ),
    *({"loss_type": loss, "entropy_coef": 0.5} for loss in ("grpo", "dr_grpo", "dapo", "luspo", "sapo", "bnpo")),
    {},
    {"epsilon": 0.1},
    {"epsilon_high": 0.28},
    {"epsilon": 0.1, "epsilon_high": 0.4, "loss_type": "grpo"},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"delta": 1.5},
    {"delta": 1.3, "loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5},
    {"beta": 0.3},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"beta": 0.3, "loss_type": "cispo"},
    {"beta": 0.3, "loss_type": "luspo"},
    {"num_iterations": 1, "beta": 0.3},
    {"off_policy_mask_threshold": 0.1, "beta": 0.3},
    {"off_policy_mask_threshold": 0.1, "use_vllm": True},
    {"top_entropy_quantile": 0.5},
    {"top_entropy_quantile": 0.5, "entropy_coef": 0.5, "loss_type": "grpo"},
    {"top_entropy_quantile": 0.3, "entropy_coef": 0.5, "beta": 0.3},
    {"mask_truncated_completions": True, "loss_type": "grpo"},
    {"mask_truncated_completions": True, "entropy_coef": 0.5},
    *(
        {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.3, **more}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        for more in ({"beta": 0.3}, {"vllm_importance_sampling_clip_min": 0.8, "loss_type": "grpo"})
    ),
    {"use_vllm": True},
    {"use_vllm": True, "vllm_importance_sampling_clip_max": None},
    {"use_vllm": True, "vllm_importance_sampling_cap": 1.3},
    {"use_vllm": True, "vllm_importance_sampling_correction": False, "beta": 0.3},
    {"use_vllm": True, "vllm_importance_sampling_correction": False, "num_iterations": 1},
    {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
    {"use_vllm": True, "importance_sampling_level": "sequence", "beta": 0.3},
    {"use_vllm": True, "loss_type": "cispo", "importance_sampling_level": "sequence", "beta": 0.3},
    {"scale_rewards": "batch"},
    {"scale_rewards": "none"},
    {"reward_weights": [0.0, 1.0]},
    {"reward_weights": [2.0, -0.5], "scale_rewards": "batch"},
    {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [2.0, 1.0]},
    {"multi_objective_aggregation": "normalize_then_sum"},
    *(
        {"loss_type": loss, "gradient_accumulation_steps": 2, "beta": 0.3}
        for loss in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    ),
    {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 0.9, "top_entropy_quantile": 0.5},
    {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 2.0, "loss_type": "grpo"},
]
"""Options of `GRPOConfig`; `num_iterations` is 2 unless it is said, and what is told is the second pass."""


def inputs() -> dict[str, Any]:
    """`[N, T]` each: the policy's first and second pass, the reference, vLLM, and entropies."""
    torch.manual_seed(0)
    old = -0.2 - 2 * torch.rand(N, T)
    noise = {name: size * torch.randn(N, T) for name, size in (("logp", 0.35), ("ref", 0.5), ("sampler", 0.25))}
    values = {"old": old, **{name: old + each for name, each in noise.items()}, "entropy": 2 * torch.rand(N, T)}
    return {name: [[round(x, 3) for x in row] for row in each.tolist()] for name, each in values.items()}


class Named(GRPOTrainer):
    """TRL's trainer with given numbers in the place of network and sampler."""

    def setup(self, given: dict[str, Any], options: dict[str, Any]) -> None:
        self.given = {name: torch.tensor(values) for name, values in given.items()}
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
        tools = [[int((row, place) != TOOL) for place in range(length)] for row, length in enumerate(LENGTHS)]
        logps = [row[:n] for row, n in zip(self.given["sampler"].tolist(), LENGTHS, strict=True)]
        told = logps if self.use_vllm else None
        return [[3]] * N, ids, tools, ["text"] * N, told, {}, None, [None] * N

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return torch.tensor(
            [[float("nan") if x is None else x for x in both] for both in zip(FIRST, SECOND, strict=True)]
        )

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **more: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return self.moving[0][self.rows], self.moving[1][self.rows], None
        return self.given["ref" if model is self.ref_model else "old"], None, None


def of_case(model: Any, tokenizer: Any, given: dict[str, Any], options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Loss and gradients of a case, and its advantages."""
    parts = options.get("gradient_accumulation_steps", 1)
    args = {"num_iterations": 2} | {n: v for n, v in options.items() if n not in ("use_vllm", "beta")}
    args |= {"per_device_train_batch_size": N // parts, "num_generations": 3, "max_completion_length": T}
    config = GRPOConfig(folder, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **args)
    rewards = [lambda **_: [0.0] * N, lambda **_: [0.0] * N]
    rows = Dataset.from_list([{"prompt": "x"}] * N)
    trainer = Named(model, rewards, config, rows, processing_class=tokenizer)
    trainer.setup(given, options)
    model.train()
    made = trainer._generate_and_score_completions([{"prompt": "x"}] * N)
    if options.get("use_adaptive_entropy"):
        trainer._compute_loss(model, made)  # the step before, which the bonus of this one follows
    total = 0.0
    for part in range(parts):
        trainer.rows = slice(part * N // parts, (part + 1) * N // parts)
        own = {n: v[trainer.rows] if torch.is_tensor(v) and v.ndim else v for n, v in made.items()}
        loss = trainer._compute_loss(model, own)
        loss.backward()
        total += float(loss.detach())
    gradients = [torch.zeros(N, T) if each.grad is None else each.grad for each in trainer.moving]
    found = {"options": options, "loss": total, "advantages": made["advantages"].tolist()}
    found |= {"gradient": gradients[0].tolist()}
    if gradients[1].any():
        found["entropy_gradient"] = gradients[1].tolist()
    if options.get("use_adaptive_entropy"):
        found["entropy_coef"] = trainer.entropy_coef
    return found


def rounded(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return {name: rounded(each) for name, each in value.items()} if isinstance(value, dict) else value


def defaults() -> dict[str, Any]:
    """What `GRPOConfig("out")` holds, but for what is this machine's."""
    values = GRPOConfig("out", use_cpu=True).to_dict()
    return {name: values[name] for name in sorted(values) if name not in ("use_cpu", "bf16", "logging_dir")}


def main() -> None:
    words = {"[PAD]": 0, "[END]": END, "x": 2, "y": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[END]", unk_token="x")
    size = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    size.bos_token_id, size.eos_token_id, size.pad_token_id = None, END, 0
    model, given = LlamaForCausalLM(size), inputs()
    with tempfile.TemporaryDirectory() as folder:
        cases = [of_case(model, tokenizer, given, options, folder) for options in CASES]
    whole = {
        "made_by": "tests/trl/make_trl_numbers.py with TRL 1.16.0: its own trainer, told network and sampler",
        "lengths": LENGTHS,
        "tool_token": TOOL,
        "rewards": [FIRST, SECOND],
        "inputs": given,
        "defaults": defaults(),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in whole.items()]
    lines.append('"cases": [\n' + ",\n".join(json.dumps(rounded(case)) for case in cases) + "\n]")
    Path(__file__).with_name("trl_numbers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

"""Methods that TRL's trainer has: formulas, which call Covey's own, and those that nothing would ever call here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from covey.algorithms import LossInputs, losses, masks
from covey.errors import ConfigError

_SENTENCES = {
    "compute_loss _compute_loss training_step get_sapo_token_loss get_gamma_weights": (
        "write the loss as a function and give loss_type='FILE.py:NAME'"
    ),
    "_generate _generate_single_turn": "give rollout_func, or replace model.generate",
    "_calculate_rewards _generate_and_score_completions": "write a reward function",
    "_tool_call_loop _get_tool_suffix_ids": "give tools, environment_factory or rollout_func",
    "_save_checkpoint": "write a callback with on_save",
    "evaluation_loop prediction_loop": "write a callback with on_evaluate",
    "create_optimizer create_scheduler": "give optimizers",
    "get_train_dataloader _get_train_sampler get_eval_dataloader _get_eval_sampler": (
        "order the rows of train_dataset and set shuffle_dataset=False"
    ),
    "_prepare_inputs prediction_step _get_per_token_logps_and_entropies": (
        "use covey.GRPOTrainer, whose parts can be replaced (docs/internals.md)"
    ),
    "get_high_entropy_mask get_off_policy_mask": "set top_entropy_quantile or off_policy_mask_threshold",
}
_INSTEAD = {name: sentence for names, sentence in _SENTENCES.items() for name in names.split()}


def _refused(sentence: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        """Refused: there is none."""
        raise ConfigError(sentence)

    return refuse


class NeverCalled:
    """Refuses a subclass that overrides something without effect."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("covey."):
            return
        if overridden := [name for name in vars(cls) if name in _INSTEAD]:
            raise ConfigError("\n".join(f"{cls.__name__}.{n}: is never called; {_INSTEAD[n]}" for n in overridden))

    get_train_dataloader = _refused("there is no data loader: prompts are drawn by the run; read trainer.train_dataset")
    get_eval_dataloader = _refused("there is no data loader: evaluate() samples the prompts; read trainer.eval_dataset")
    predict = _refused("predict: a policy has no labels; use generate(prompts) for texts, evaluate(rows) for rewards")


class Formulas:
    """Masks and weights of tokens `[N, T]` by TRL's names. None of them has a gradient but `get_sapo_token_loss`."""

    @torch.no_grad()
    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """True where a token's entropy is at least the quantile `threshold` of all that `mask` keeps."""
        share = max(1 - threshold, sys.float_info.min)  # of none, the largest is left
        kept: Tensor = masks.top_entropy_mask(entropies.float(), mask, share)
        return kept & mask.bool()

    @staticmethod
    @torch.no_grad()
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """`[N, 1]`, 1.0 where a row is kept: its advantage `[N, 1]` is not negative, or its mean KL not too large."""
        given = (per_token_logps, sampling_per_token_logps, advantages, mask, off_policy_threshold)
        kept: Tensor = masks.off_policy_mask(*given)
        return kept[:, :1].to(mask.dtype)

    @staticmethod
    def get_sapo_token_loss(unclipped_token_loss: Tensor, temperature: float) -> Tensor:
        """SAPO's gate of a ratio, `sigmoid(temperature (w - 1)) 4 / temperature`."""
        gate: Tensor = losses.sapo_gate(unclipped_token_loss, torch.full_like(unclipped_token_loss, temperature))
        return gate

    @staticmethod
    @torch.no_grad()
    def get_gamma_weights(
        advantages: Tensor,
        log_ratio_per_token: Tensor,
        mask: Tensor,
        importance_sampling_ratio: Tensor | None,
        k_pos: float = 2.0,
        lambda_pos: float = 3.0,
        k_neg: float = 3.0,
        lambda_neg: float = 2.0,
    ) -> Tensor:
        """VESPO's weights `[N, 1]` of sequences, from log-ratios `[N, T]` and advantages `[N, 1]`."""
        zeros, kept = torch.zeros_like(log_ratio_per_token), mask.bool()
        x = LossInputs(log_ratio_per_token, zeros, advantages, kept, correction=importance_sampling_ratio)
        phi: Tensor = losses.vespo_weights(x, k_pos, lambda_pos, k_neg, lambda_neg)[0]
        return phi[:, :1]

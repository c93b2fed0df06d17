"""Formulas that TRL's trainer has as methods; here they call Covey's own."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from covey.algorithms import LossInputs, losses, masks


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
        kept: Tensor = masks.off_policy_mask(
            per_token_logps, sampling_per_token_logps, advantages, mask, off_policy_threshold
        )
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

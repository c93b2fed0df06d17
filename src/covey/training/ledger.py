"""The token ledger: of each token what it got, and what it added to the loss of its optimiser step.

The loss is computed once more from the numbers that the update had, in float64. It is linear in the tokens' weights, so
a token's contribution is its weight times the derivative by it, whatever the loss: contributions add up to the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import KL_ESTIMATORS, LossInputs, mismatch_correction, policy_loss
from covey.algorithms.arrays import masked
from covey.errors import ConfigError
from covey.rollout.learning import Learner, loss_weights
from covey.training.update import Pass
from covey.types import Batch

log = logging.getLogger(__name__)

MOST_TOKENS = 50_000
"""Of an update; the completions beyond them are left out."""
Row = dict[str, Any]


class Ledger:
    """Looks at the passes of one update; `rows` are what `RunFolder.write_ledger` writes, one for each token.

    Columns: `row` (of the batch, as in the table of completions), `group`, `pass` (optimiser step of the update),
    `position` (among the sampled tokens), `token_id`, `token`, `advantage`, `masked_by`, `sampler_logp`, `logp` (of the
    trainer, before the step), `ratio`, `clipped` (0 or 1), `entropy` and `kl` in nats where known, `weight`, `loss`
    (the contribution) and `gradient` (d loss / d logp: the surrogate's and the KL's, without the entropy bonus).
    """

    def __init__(self, learner: Learner, to_text: Callable[[Sequence[int]], str], temperature: float) -> None:
        """Take what is asked for entropies and texts.

        Args:
            learner: of the run.
            to_text: of token ids, special ones included.
            temperature: of the distribution that was sampled from.
        """
        self.rows: list[Row] = []
        self._learner, self._to_text, self._temperature = learner, to_text, temperature

    def __call__(self, done: Pass) -> None:
        """Note what a pass is about to change. Costs a forward pass, for the entropies."""
        try:
            self._note(done)
        except Exception as error:  # it only looks: the step is taken as it would be without
            log.warning("run.ledger_steps: this step has no ledger (%s: %s)", type(error).__name__, error)
            self.rows.clear()

    def _note(self, done: Pass) -> None:
        if not len(done.rows):
            return
        _, entropy = self._learner.scores(done.batch, done.rows, temperature=self._temperature, entropy=True)
        columns = token_columns(done, entropy)
        batch, texts = done.batch, dict[int, str]()
        for row in done.rows:
            tokens = batch.episodes[row].token_ids[batch.episodes[row].sampled].tolist()
            if len(self.rows) + len(tokens) > MOST_TOKENS:
                return
            for position, token in enumerate(tokens):
                if token not in texts:
                    texts[token] = self._to_text([token])
                entry: Row = {
                    "row": int(row if done.part is None else done.part[row]),
                    "group": int(batch.group[row]),
                    "pass": done.number,
                    "position": position,
                    "token_id": token,
                    "token": texts[token],
                    "masked_by": ", ".join(name for name, out in batch.excluded.items() if out[row, position]),
                }
                self.rows.append(entry | {name: float(values[row, position]) for name, values in columns.items()})


def require_ledger(every: int, estimator: str) -> None:
    """Refuse ledgers of a loss whose contributions they would not know.

    Raises:
        ConfigError: its KL is over the whole vocabulary.
    """
    if every > 0 and estimator not in KL_ESTIMATORS:
        raise ConfigError(
            f"run.ledger_steps={every} with algorithm.kl_estimator={estimator!r}: the ledger knows the sampled "
            f"tokens only, no KL over the vocabulary; use one of {', '.join(KL_ESTIMATORS)}, "
            "or set run.ledger_steps to 0"
        )


def token_columns(done: Pass, entropy: NDArray[np.floating[Any]] | None = None) -> dict[str, NDArray[np.float64]]:
    """The numbers of every token of a pass, `[N, T]` each; those of rows that were not run mean nothing.

    Args:
        done: the pass.
        entropy: `[N, T]` in nats, of the tokens that were run.

    Raises:
        ConfigError: as `policy_loss`.
    """
    import torch

    options, objective, batch = done.options, done.objective, done.batch
    rows = torch.as_tensor(done.rows)

    def of(values: Any) -> Any:
        """The rows that were run, in float64."""
        return None if values is None else torch.as_tensor(np.asarray(values))[rows].to(torch.float64)

    mask = torch.as_tensor(batch.mask)[rows]
    logp = of(done.gradients.logp).requires_grad_()
    weights, kl_weights = (of(each) for each in loss_weights(batch, objective, options["max_completion_length"]))
    own = [each.requires_grad_() for each in (weights, kl_weights) if each is not None]
    old = sampler = of(batch.old_logprobs)
    factor = None
    if options.get("correction") is not None:
        old = logp.detach() if options.get("trainer_old") is None else of(options["trainer_old"])
        counted = mask if kl_weights is None else mask | (kl_weights.detach() > 0)
        factor = mismatch_correction(old, sampler, counted, *astuple(options["correction"]))
    ref, advantages, uncertainty = of(options.get("reference")), of(batch.advantages), of(entropy)
    selected = None if options.get("selected") is None else torch.as_tensor(options["selected"])[rows]
    terms = policy_loss(
        logp,
        old,
        advantages,
        mask,
        weights,
        objective,
        ref=ref,
        entropy=uncertainty,
        correction=factor,
        kl_weights=kl_weights,
        sampler=sampler,
        selected=selected,
        entropy_coef=options.get("entropy_coef"),
    )
    slope, *by_weight = torch.autograd.grad(terms.loss, [logp, *own], allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        loss = sum(weight * each for weight, each in zip(own, by_weight, strict=True))
        inputs = LossInputs(
            masked(logp, mask),
            masked(old, mask),
            masked(advantages, mask),
            mask,
            None if uncertainty is None else masked(uncertainty, mask),
            masked(sampler, mask),
            factor,
            selected,
        )
        surrogate = objective.loss.surrogate(inputs, dict(objective.parameters))
        found = {
            "advantage": advantages,
            "sampler_logp": sampler,
            "logp": logp,
            "ratio": surrogate.ratio,
            "clipped": surrogate.low | surrogate.high,
            "weight": weights,
            "loss": loss,
            "gradient": slope,
        }
        if entropy is not None:
            found["entropy"] = uncertainty
        if ref is not None:
            found["kl"] = KL_ESTIMATORS[objective.kl_estimator](logp, ref, old)
    return {
        name: _in_place(values.detach().to(torch.float64).numpy(), done.rows, batch) for name, values in found.items()
    }


def _in_place(values: NDArray[np.float64], rows: NDArray[np.int64], batch: Batch) -> NDArray[np.float64]:
    """The rows that were run, at their places in the batch."""
    whole = np.zeros(batch.mask.shape)
    whole[rows] = values
    return whole

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

from covey.algorithms import LossInputs, Objective, mismatch_correction, policy_loss
from covey.algorithms.arrays import masked
from covey.config.run import RunConfig
from covey.rollout.learning import entropy_weights, loss_weights, rows_with_gradient
from covey.training.update import Pass
from covey.types import Batch

log = logging.getLogger(__name__)

MOST_TOKENS = 50_000
"""Of an update; the completions beyond them are left out."""
LEDGER_STREAM = 4
"""Second entry of the random stream by which a step's groups are chosen."""
Row = dict[str, Any]


class Ledger:
    """Looks at the passes of one update; `rows` are what `RunFolder.write_ledger` writes, one for each token.

    Columns: `row` (of the batch, as in the table of completions), `group`, `pass` (optimiser step of the update),
    `position` (among the sampled tokens), `token_id`, `token`, `advantage`, `masked_by`, `sampler_logp`, `logp` (of the
    trainer, before the step), `ratio`, `clipped` (0 or 1), `entropy` and `kl` in nats where known, `weight`, `loss`
    (the contribution) and `gradient` (d loss / d logp, in which the entropy bonus and a KL over the vocabulary have no
    part: they act on all logits).
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str], groups: Sequence[int] | None = None) -> None:
        """Take what is noted."""
        self.rows: list[Row] = []
        self._to_text, self._groups = to_text, groups

    def __call__(self, done: Pass) -> None:
        """Note what a pass is about to change."""
        try:
            self._note(done)
        except Exception as error:  # it only looks: the step is taken as it would be without
            log.warning("run.ledger: this step has no ledger (%s: %s)", type(error).__name__, error)
            self.rows.clear()

    def _note(self, done: Pass) -> None:
        rows = done.rows if self._groups is None else done.rows[np.isin(done.batch.group[done.rows], self._groups)]
        if not len(rows):
            return
        columns = token_columns(done, rows)
        batch, texts = done.batch, dict[int, str]()
        for row in rows:
            tokens = batch.episodes[row].token_ids[batch.episodes[row].sampled].tolist()
            if len(self.rows) + len(tokens) > MOST_TOKENS:
                return
            own = {name: values[row, : len(tokens)].tolist() for name, values in columns.items()}
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
                self.rows.append(entry | {name: values[position] for name, values in own.items()})


def make_ledger(
    run: RunConfig, step: int, batch: Batch, objective: Objective, to_text: Callable[[Sequence[int]], str]
) -> Ledger | None:
    """What notes the tokens of a step's update, of those groups that `run` asks for; None = nothing is noted.

    Groups are chosen at random among those that have a gradient, in the same way whenever the step is repeated.
    """
    usual, _, every = run.ledger.partition(",all:")
    if usual == "all" or (every and step % int(every) == 0):
        return Ledger(to_text)
    if usual == "off":
        return None
    there = np.unique(batch.group[rows_with_gradient(batch, objective)])
    wanted = min(int(usual.partition(":")[2]), len(there))
    chosen = np.random.default_rng((run.seed, LEDGER_STREAM, step)).choice(there, wanted, replace=False)
    return Ledger(to_text, chosen.tolist())


def token_columns(done: Pass, chosen: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float64]]:
    """The numbers of every token of a pass, `[N, T]` each; 0 in rows that were not run, or not chosen.

    Raises:
        ConfigError: as `policy_loss`.
    """
    import torch

    options, objective, batch = done.options, done.objective, done.batch
    numbers = done.rows if chosen is None else chosen
    rows = torch.as_tensor(numbers)

    def of(values: Any) -> Any:
        """The rows that are looked at, in float64."""
        return None if values is None else torch.as_tensor(np.asarray(values))[rows].to(torch.float64)

    mask = torch.as_tensor(batch.mask)[rows]
    logp = of(done.gradients.logp).requires_grad_()
    weights, kl_weights = (of(each) for each in loss_weights(batch, objective, options["max_completion_length"]))
    bonus = of(entropy_weights(batch, objective))
    own = [each.requires_grad_() for each in (weights, kl_weights, bonus) if each is not None]
    old = sampler = of(batch.old_logprobs)
    factor = None
    if options.get("correction") is not None:
        old = logp.detach() if options.get("trainer_old") is None else of(options["trainer_old"])
        counted = mask if kl_weights is None else mask | (kl_weights.detach() > 0)
        factor = mismatch_correction(old, sampler, counted, *astuple(options["correction"]))
    ref, advantages, uncertainty = of(options.get("reference")), of(batch.advantages), of(done.gradients.entropy)
    over_vocabulary = of(done.gradients.kl)
    selected = None if options.get("selected") is None else torch.as_tensor(options["selected"])[rows]
    terms = policy_loss(
        logp,
        old,
        advantages,
        mask,
        weights,
        objective,
        ref=ref,
        kl=over_vocabulary,
        entropy=uncertainty,
        correction=factor,
        kl_weights=kl_weights,
        sampler=sampler,
        selected=selected,
        entropy_coef=options.get("entropy_coef"),
        entropy_weights=bonus,
    )
    slope, *by_weight = torch.autograd.grad(terms.loss, [logp, *own], allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        loss = sum(weight * each for weight, each in zip(own, by_weight, strict=True))
        inputs = LossInputs(
            masked(logp, mask),
            masked(old, mask),
            masked(advantages, mask),
            mask,
            masked(uncertainty, mask),
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
            "entropy": uncertainty,
        }
        if over_vocabulary is not None:
            found["kl"] = over_vocabulary
        elif ref is not None:
            found["kl"] = objective.estimate_kl(logp, ref, old, mask)
    return {
        name: _in_place(values.detach().to(torch.float64).numpy(), numbers, batch) for name, values in found.items()
    }


def _in_place(values: NDArray[np.float64], rows: NDArray[np.int64], batch: Batch) -> NDArray[np.float64]:
    """Some rows at their places in the batch."""
    whole = np.zeros(batch.mask.shape)
    whole[rows] = values
    return whole

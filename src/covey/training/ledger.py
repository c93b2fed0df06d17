"""The ledger of tokens: what each token of an update got, a table of the run folder.

The loss is computed once more from the numbers that the update had, in float64. It is linear in the tokens' weights, so
a token's contribution is its weight times the derivative by it, whatever the loss: contributions add up to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import LossInputs, Objective, policy_loss
from covey.algorithms.arrays import masked
from covey.config.run import RunConfig
from covey.rollout.learning import loss_weights, rows_with_gradient
from covey.training.update import Pass
from covey.types import Batch

log = logging.getLogger(__name__)

MOST_TOKENS = 50_000
"""Of an update; the completions beyond them are left out."""
LEDGER_STREAM = 4
"""Second entry of the random stream by which a step's groups are chosen."""
Row = dict[str, Any]


class Ledger:
    """Looks at the passes of one update; `rows` are those of a ledger's table, one for each token.

    Columns: `row` (of the batch, as in the table of completions), `group`, `pass` (optimiser step of the update),
    `position` (among the sampled tokens), `token_id`, `token`, `advantage`, `masked_by`, `sampler_logp`, `logp` (of the
    trainer, before the step), `ratio`, `clipped` (0 or 1), `entropy`, `kl` and `teacher_logp` in nats where known,
    `weight`, `loss` (the contribution) and `gradient` (d loss / d logp, in which the entropy bonus and a KL over the
    vocabulary have no part: they act on all logits).
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str], groups: Sequence[int] | None = None) -> None:
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
    """What notes an update's tokens, of groups that `run` asks for, chosen alike when repeated; None = nothing."""
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
    """The numbers of every token of a pass, `[N, T]` each; 0 in rows that were not run, or not chosen."""
    import torch

    from covey.pytorch.pack_loss import StepLoss

    objective, batch, gradients = done.objective, done.batch, done.gradients
    numbers = done.rows if chosen is None else chosen
    rows, options = torch.as_tensor(numbers), done.options
    weights = loss_weights(batch, objective, options["max_completion_length"])

    def of(values: Any) -> Any:
        if values is None:
            return None
        found = torch.as_tensor(np.asarray(values))[rows]
        return found if found.dtype == torch.bool else found.to(torch.float64)

    logp, uncertainty = of(gradients.logp).requires_grad_(), of(gradients.entropy)
    given = StepLoss(batch, objective, *weights, options, rows.device).arguments(of, logp)
    over_vocabulary = of(gradients.divergence if gradients.kl is None else gradients.kl)
    averages = ("weights", "kl_weights", "entropy_weights")
    own = [given[name].requires_grad_() for name in averages if given[name] is not None]
    terms = policy_loss(logp, **given, kl=over_vocabulary, entropy=uncertainty)
    slope, *by_weight = torch.autograd.grad(terms.loss, [logp, *own], allow_unused=True, materialize_grads=True)
    old, sampler, mask = given["old"], given["sampler"], given["mask"]
    with torch.no_grad():
        loss = sum(weight * slopes for weight, slopes in zip(own, by_weight, strict=True))
        own_logp, before, advantages, entropy, theirs = (
            masked(x, mask) for x in (logp, old, given["advantages"], uncertainty, sampler)
        )
        chosen_by = given["correction"], given["selected"]
        inputs = LossInputs(own_logp, before, advantages, mask, entropy, theirs, *chosen_by)
        surrogate = objective.loss.surrogate(inputs, dict(objective.parameters))
        found = {
            "advantage": given["advantages"],
            "sampler_logp": sampler,
            "logp": logp,
            "ratio": surrogate.ratio,
            "clipped": surrogate.low | surrogate.high,
            "weight": given["weights"],
            "loss": loss,
            "gradient": slope,
            "entropy": uncertainty,
        }
        if batch.teacher is not None:
            found["teacher_logp"] = of(batch.teacher.logprobs)
        if gradients.kl is not None:
            found["kl"] = over_vocabulary
        elif given["ref"] is not None:
            found["kl"] = objective.estimate_kl(logp, given["ref"], old, mask)
    whole = {name: np.zeros(batch.mask.shape) for name in found}
    for name, values in found.items():
        whole[name][numbers] = values.detach().to(torch.float64).numpy()
    return whole

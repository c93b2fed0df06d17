"""Scores rows under a network: log-probabilities, entropies, and the hidden states before their tokens.

Rows are split into packs of at most `tokens_per_micro_batch` tokens, or on a CPU into smaller ones that run side by
side (`map_in_threads`). A tree of sequences that is larger, and would repeat much where it is cut, is walked piece by
piece (`pack_loss`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from covey.errors import ModelError
from covey.pytorch.attention.tree_layout import TreePath
from covey.pytorch.gradient_sum import Alone, Share
from covey.pytorch.logprobs import ReferenceDistribution, TokenScores
from covey.pytorch.pack_loss import walk_scores
from covey.pytorch.passes import map_in_threads, within_memory
from covey.pytorch.policy import Policy
from covey.rollout.learning import FloatNT
from covey.rollout.packing import Pack, count_tokens, pack_episodes
from covey.rollout.walking import Piece, pieces_of
from covey.types import Batch, Episode, States

log = logging.getLogger(__name__)

Kept = TypeVar("Kept")

_LANES = 2
"""Micro-batches side by side on a CPU."""
_REPEATED = 1.02
"""Tokens that packs repeat may add this much work, or a tree is not cut but walked."""


class Scorer:
    """A network that scores.

    Attributes:
        tokens_per_micro_batch: packed tokens under way in a pass; shrinks when memory runs out.
        network: scores as the policy's teacher, where that is another network.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        tokens_per_micro_batch: int = 1024,
        side_by_side: bool = True,
        share: Share | None = None,
    ) -> None:
        """`side_by_side=False` never runs two packs at once; `share` says which packs are this process's."""
        self.policy, self.tokens_per_micro_batch = policy, tokens_per_micro_batch
        self._side_by_side, self._share = side_by_side, share or Alone()
        self._heads: dict[str, Any] = {}
        how: dict[str, Any] = {"side_by_side": side_by_side, "share": share}
        self.network: Scorer | None = None
        if policy.network is not None:
            self.network = Scorer(policy.network, tokens_per_micro_batch=tokens_per_micro_batch, **how)

    def scores(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        *,
        temperature: float,
        reference: bool = False,
        teacher: bool = False,
        entropy: bool = False,
    ) -> tuple[FloatNT, FloatNT | None]:
        """Log-probabilities, and entropies if asked for, of the rows' sampled tokens. `[N, T]`, 0 elsewhere.

        They are the policy's, or with `reference` or `teacher` those of the policy's reference or teacher. Raises
        `ModelError`: a row has an id that the teacher's vocabulary lacks.
        """
        whose = "reference" if reference else "teacher" if teacher else "policy"
        return self._scored(batch, rows, whose, temperature=temperature, entropy=entropy)[:2]

    def states(
        self, batch: Batch, rows: NDArray[np.int64], *, temperature: float, whose: str
    ) -> tuple[FloatNT, States]:
        """The same log-probabilities, of "policy", "reference" or "teacher", and the hidden states before the tokens.

        The head is kept with the weights that it has now, until the next call for the same network.
        """
        logp, _, states = self._scored(batch, rows, whose, temperature=temperature, states=True)
        assert states is not None
        return logp, states

    @torch.no_grad()
    def _scored(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        whose: str,
        *,
        temperature: float,
        entropy: bool = False,
        states: bool = False,
    ) -> tuple[FloatNT, FloatNT | None, States | None]:
        if whose == "teacher" and self.network is not None:
            _require_ids(self.network.policy, [batch.episodes[row] for row in rows])
            how: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "states": states}
            logp, uncertainty, held = self.network._scored(batch, rows, "policy", **how)
            self._heads[whose] = self.network._heads.get("policy")
            return logp, uncertainty, None if held is None else replace(held, whose=whose)
        policy = self.policy
        asked: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "states": states}
        other = {"policy": None, "reference": policy.reference, "teacher": policy.teacher}[whose]

        @torch.no_grad()
        def score(pack: Pack) -> list[Any]:
            if self._is_walked(pack):
                found = self._walk(pack, batch.episodes, partial(walk_scores, pack=pack), **asked)
            else:
                found = policy.score(pack, supports=pack.support(batch.episodes), **asked).known()
            known = 1 + entropy
            return [*map(numbers, found[:known]), *(hidden.cpu() for hidden in found[known:])]

        def run() -> tuple[FloatNT, FloatNT | None, States | None]:
            wholes = np.zeros((1 + entropy, *batch.mask.shape), np.float32)
            place, hidden, count = np.full(batch.mask.shape, -1), list[torch.Tensor](), 0
            packs, lanes = self._packs(batch.episodes, rows)
            with nullcontext() if other is None else other.active():  # for all lanes at once
                found = self._share.map(lambda packs: map_in_threads(score, packs, lanes), packs)
                for pack, own in zip(packs, found, strict=True):
                    for values, whole in zip(own, wholes, strict=False):
                        pack.put(values[pack.pair], whole)
                    if states:
                        pack.put(count + pack.pair, place)
                        hidden.append(own[-1])
                        count += len(own[-1])
            held = None
            if states:
                self._heads[whose] = policy.head_under(other)
                hidden.append(hidden[0].new_zeros(1, hidden[0].shape[1]) if hidden else torch.zeros(1, 1))
                held = States(torch.cat(hidden), place, whose)
            return wholes[0], wholes[1] if entropy else None, held

        return self._within_memory(run)

    def _compared(self, pack: Pack, states: States, kind: Any) -> ReferenceDistribution:
        """What the targets of a pack are compared with; those of rows with other states must be apart."""
        place = states.place[pack.rows[pack.row[pack.first]], pack.column[pack.first]]
        return ReferenceDistribution(states.hidden[torch.from_numpy(place)], self._heads[states.whose], kind)

    def _packs(
        self, episodes: Sequence[Episode], rows: NDArray[np.int64], *, alone: bool = False
    ) -> tuple[list[Pack], int]:
        """Micro-batches, and how many of them run side by side; together these stay within the token budget."""
        pack = partial(pack_episodes, episodes, rows.tolist(), shared=self.policy.prefix_sharing_obstacle is None)
        budget = 1 if self.policy.rows_apart else self.tokens_per_micro_batch
        packs = pack(budget)
        most = _REPEATED * count_tokens(episodes, rows, 0).unique
        beside = self._side_by_side and self._share.alone and self.policy.runs_side_by_side and not alone
        if beside and torch.get_num_threads() >= _LANES:
            share = max(budget // _LANES, 1)
            rounds = -(-most // (share * _LANES))
            for size in (int(1.05 * most / (rounds * _LANES)), share):  # evenly, or else as full as may be
                smaller = pack(max(min(size, share), 1))
                sizes = [self._size(each) for each in smaller]
                if len(smaller) >= _LANES and max(sizes) * _LANES <= budget and sum(sizes) <= most:
                    return smaller, _LANES
        if self._share.alone and self.policy.can_walk and sum(map(self._size, packs)) > most:
            packs = pack(budget, whole_trees=True)
        return packs, 1

    def _size(self, pack: Pack) -> int:
        """Tokens that a pack takes."""
        return pack.num_tokens if self.policy.prefix_sharing_obstacle is None else pack.num_padded

    def _is_walked(self, pack: Pack) -> bool:
        """Whether a pack is a tree that was not cut."""
        too_large = pack.num_tokens > self.tokens_per_micro_batch and len(pack.branches) > 1
        return too_large and self._share.alone and self.policy.can_walk

    def _walk(
        self,
        pack: Pack,
        episodes: Sequence[Episode],
        walk: Callable[..., Kept],
        compared: ReferenceDistribution | None = None,
        **options: Any,
    ) -> Kept:
        """Walk a pack's pieces, each scored on the path that it hangs on."""
        pieces, support = pieces_of(pack, self.tokens_per_micro_batch), pack.support(episodes)
        path = TreePath(int(pack.position_ids.max()) + 1)

        def score(piece: Piece) -> TokenScores:
            own = None if support is None else support.take(piece.scored)
            against = None if compared is None else compared.take(piece.scored)
            return self.policy.score(piece, supports=own, path=path, compared=against, **options)

        return walk(pieces, score=score)

    def _within_memory(self, run: Callable[[], Kept]) -> Kept:
        return within_memory(run, self._halve)

    def _halve(self, error: BaseException) -> None:
        if self.tokens_per_micro_batch <= 64:
            raise ModelError(
                f"tokens_per_micro_batch={self.tokens_per_micro_batch}: memory runs out even so; use a smaller "
                "model or shorter completions, or set model.gradient_checkpointing to true"
            ) from error
        self.tokens_per_micro_batch //= 2
        said = "out of memory (%s): the step is computed again with tokens_per_micro_batch=%d; its loss is the same"
        log.warning(said, str(error).splitlines()[0], self.tokens_per_micro_batch)


def _require_ids(network: Policy, episodes: Sequence[Episode]) -> None:
    largest = max((int(episode.token_ids.max()) for episode in episodes), default=0)
    if largest >= network.vocabulary:
        raise ModelError(
            f"algorithm.teacher.weights={network.source}: a completion has the token id {largest}, and the ids that it "
            f"shares with the policy end at {network.vocabulary - 1}; use a teacher with all of the policy's ids"
        )


def numbers(values: torch.Tensor) -> NDArray[np.float32]:
    """In the host's memory, in float32."""
    return values.float().cpu().numpy()

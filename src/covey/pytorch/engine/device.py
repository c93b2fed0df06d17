"""The device of sessions in PyTorch: continuous batching of completions and of conversations over held tokens.

What is asked for is looked up in the tree, and only the rest is prefilled. A finished row leaves the batch at once;
what a kept one has sampled goes into the tree. The running rows own the first slots of the cache, in their order;
parked ones own none: a conversation that goes on is looked up like a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.errors import GenerationError
from covey.pytorch.engine.attention import BlockCopy, DecodeAttention, Piece, PrefillAttention, Span
from covey.pytorch.engine.cache import KVCache, lay_out_for_clients, lay_out_for_conversations, lay_out_for_queue
from covey.pytorch.engine.runner import Runner, Step
from covey.pytorch.engine.sampling import draw_tokens
from covey.pytorch.engine.tree import Branch, Tree
from covey.rollout.places import sequence_turns
from covey.rollout.turns import REUSED_BLOCK, Device, Drawn, Row

_PREFILL_TOKENS = 2048
"""Prompts are prefilled together up to this many tokens: bounds the memory of activations."""
_PATIENCE = 4
"""Decode steps that answered conversations wait at most until as many are ready as run."""


class TorchDevice(Device):
    """Slots and held tokens of one session. A row's `place` is its `Branch`. Without `reserve` or `reserve_to_serve`
    the cache is laid out for the rows that are in the queue at first.
    """

    def __init__(self, runner: Runner, cache: KVCache, max_rows: int, context_length: int, device: torch.device):
        super().__init__(context_length)
        self._runner, self._cache, self._max_rows, self._device = runner, cache, max_rows, device
        self._tree = Tree(cache)
        self._rows: list[Row] = []
        self._laid_out = self._serves = False
        self._opened = 0
        self._attention: DecodeAttention | None = None
        self._patience = _PATIENCE

    @property
    def slots(self) -> int:
        return self._cache.slots

    def reserve(self, rows: int, own_tokens: int, turn_tokens: int, longest_prompt: int) -> None:
        """Memory for conversations; see `Engine.session`."""
        self.own_tokens, self.turn_tokens = own_tokens, min(turn_tokens, own_tokens)
        longest = min(longest_prompt + own_tokens, self.whole_tokens)
        lay_out_for_conversations(self._cache, rows, self.turn_tokens, longest)
        self._laid_out, self._opened = True, self._cache.opened

    def reserve_to_serve(self, rows: int, own_tokens: int) -> None:
        """Memory for single completions that nobody knows yet, and are held for whoever continues them."""
        self.own_tokens = self.turn_tokens = own_tokens
        lay_out_for_clients(self._cache, rows, own_tokens)
        self._laid_out = self._serves = True
        self._opened = self._cache.opened

    def fits(self, prompt: int) -> bool:
        """Whether the memory beside the slots holds a prompt of so many tokens."""
        return prompt <= self._cache.limit

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Fill free slots: prefill what is new of the prompts, draw each admitted row's first token."""
        if queue and not self._laid_out:
            in_turn = lay_out_for_queue(self._cache, queue, self._max_rows)
            queue.clear()
            queue.extend(in_turn)
            self._laid_out, self._opened = True, self._cache.opened
        return self._admit(queue)

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """Prefill what was said to parked rows, draw the first token of each answer. A pass over a few costs nearly as
        much as one over many: they wait for each other a little.
        """
        if len(resuming) < len(self._rows) and self._patience > 0:
            self._patience -= bool(resuming)
            return
        self._patience = _PATIENCE
        yield from self._admit(resuming)

    @torch.inference_mode()
    def decode(self, waiting: int) -> Iterator[Drawn]:
        if not self._rows:
            return
        self._check_ours()
        started = time.perf_counter()
        rows = self._rows
        if self._attention is None:
            self._attention = DecodeAttention(self._cache, [_spans(row.place) for row in rows], self._device)
        held = np.array([row.held for row in rows])
        self._attention.advance(held - np.array([row.turn for row in rows]))
        step = Step(
            token_ids=self._tensor([row.own[-1] for row in rows]),
            positions=self._tensor(held + np.array([len(row.prompt_ids) + row.shift for row in rows])),
            last=None,
            attention=self._attention,
            histories=lambda: [row.history() for row in rows],
        )
        logits = self._runner.forward(step)
        self.stats.decode_steps += 1
        self.stats.decode_seconds += time.perf_counter() - started
        self.stats.peak_batch = max(self.stats.peak_batch, len(rows))
        yield self._draw(rows, logits)

    @torch.inference_mode()
    def leave(self, rows: Sequence[Row]) -> None:
        """What kept rows, or clients', have sampled is held; all slots are filled from the end."""
        for row in rows:
            if row.error is not None:
                self._cache.clear_block(self._cache.slot(self._rows.index(row)))
                self._tree.discard(row.place)
            elif row.keep or self._serves:
                self._hold(row)
        self._compact()

    @torch.inference_mode()
    def drop(self, row: Row) -> None:
        """Free the slot of a running row; a parked one is waited for no longer."""
        if row in self._rows:
            row.finish_reason = row.finish_reason or "length"
            self._compact()
        elif row.place is not None:
            row.place.parked -= 1
            row.place = None

    def renew(self, queue: Sequence[Row]) -> None:
        """Rows that run keep what they have, nobody else gets it."""
        self._tree.renew()

    def clear(self) -> None:
        """Overwrite the cache, and forget what it held."""
        self._tree.renew()
        self._cache.clear()

    @torch.inference_mode()
    def _admit(self, waiting: deque[Row] | list[Row]) -> Iterator[Drawn]:
        """Rows from the front, begun or resumed, while there are slots and memory."""
        self._check_ours()
        while waiting and len(self._rows) < self._cache.slots:
            rows: list[Row] = []
            tokens = 0
            while waiting and len(self._rows) + len(rows) < self._cache.slots:
                row, history = waiting[0], waiting[0].history()
                found = self._tree.find(history)
                if tokens and tokens + len(history) - found[1] > _PREFILL_TOKENS:
                    break
                taken = self._tree.take(history, found, hard=not (self._rows or rows))
                if taken is None:
                    break
                if row.place is not None:
                    row.place.parked -= 1
                row.place, new = taken
                tokens += new
                self.stats.reused_tokens += len(history) - new
                self.stats.reused_blocks += (len(history) - new) // REUSED_BLOCK
                self.stats.reused_prompts += not row.own and found[1] == len(history) and row.place.users == 1
                rows.append(row)
                del waiting[0]
            if not rows:
                if not self._rows:
                    raise GenerationError(
                        f"a prompt of {len(waiting[0].history())} tokens does not fit the memory beside the slots, "
                        f"{self._cache.limit} tokens; raise sampling.kv_cache_gb"
                    )
                return  # no room until a row has finished
            drawn = self._draw(rows, self._prefill(rows))
            self._rows += rows
            self._attention = None
            for row in rows:
                row.held = len(row.own)
            yield drawn

    def _check_ours(self) -> None:
        """An engine has one cache, which its newest session or call lays out."""
        if self._opened != self._cache.opened:
            raise GenerationError(
                "this session is over: its engine was called, or opened another session, since; keep one at a time"
            )

    def _prefill(self, rows: Sequence[Row]) -> Tensor:
        """Compute what is missing of the rows' branches; the logits after each, `[n, V]`."""
        started, tree = time.perf_counter(), self._tree
        histories = [row.history() for row in rows]
        new = list(dict.fromkeys(part for row in rows for part in row.place.path if part.filled < part.length))
        copies = [BlockCopy(*parts) for copy in tree.copies for parts in tree.moves(copy)]
        computed: dict[int, Tensor] = {}
        if not new:
            for copy in copies:
                self._cache.copy(copy.source, copy.first, copy.target, copy.to, copy.tokens)
        else:
            missing = np.array([branch.length - branch.filled for branch in new])
            ends = {id(row.place) for row in rows}
            asked = [place for place, branch in enumerate(new) if id(branch) in ends]
            self.stats.prefill_tokens += int(missing.sum())
            turns, last = sequence_turns(*(b.tokens() for b in new)), np.cumsum([branch.end for branch in new])
            run = np.concatenate([np.arange(end - n, end) for end, n in zip(last, missing, strict=True)])
            pieces = [Piece(_spans(branch), int(count)) for branch, count in zip(new, missing, strict=True)]
            step = Step(
                token_ids=self._tensor(np.concatenate([branch.token_ids[branch.filled :] for branch in new])),
                positions=self._tensor(turns[..., run]),
                last=self._tensor((np.cumsum(missing) - 1)[asked]),
                attention=PrefillAttention(self._cache, pieces, copies),
                histories=lambda: [new[place].tokens() for place in asked],
            )
            logits = self._runner.forward(step)
            computed = {id(new[place]): one for place, one in zip(asked, logits, strict=True)}
        tree.computed(new)
        after = [computed.get(id(row.place), tree.logits(ids)) for row, ids in zip(rows, histories, strict=True)]
        found = torch.stack([one for one in after if one is not None])
        for row, ids in zip(rows, histories, strict=True):
            row.shift = int(sequence_turns(ids)[..., -1].max()) + 1 - len(ids)
            if (one := computed.pop(id(row.place), None)) is not None:
                tree.keep_logits(ids, one)
        self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.cache_bytes = self._cache.allocated_bytes
        return found

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> Drawn:
        started = time.perf_counter()
        self.logits_dtype = str(logits.dtype)
        draw = draw_tokens(rows, logits)
        self.stats.sampling_seconds += time.perf_counter() - started
        support = None if draw.support is None else [[ids] for ids in draw.support]
        return Drawn(rows, draw.token_ids[:, None], draw.logprobs[:, None], support)

    def _hold(self, row: Row) -> None:
        """Copy what is in a row's slot to the tree: all that it sampled but the last token, which was not run."""
        said = np.array(row.own[row.turn : row.held], dtype=np.int64)
        row.place, first = self._tree.append(row.place, said)
        slot = self._cache.slot(self._rows.index(row))
        self._cache.copy(slot, 0, row.place.block, first, row.place.length - first)

    def _compact(self) -> None:
        """Rows whose turn is over leave; their slots are filled from the end."""
        self._attention = None
        for place in reversed(range(len(self._rows))):
            row = self._rows[place]
            if row.finish_reason is None:
                continue
            moved = self._rows.pop()
            if moved is not row:
                here, there = (self._cache.slot(number) for number in (len(self._rows), place))
                self._cache.copy(here, 0, there, 0, moved.held - moved.turn)
                self._rows[place] = moved
            row.place.parked += row.keep
            self._tree.release(row.place)
            if not row.keep:
                row.place = None

    def _tensor(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)


def _spans(branch: Branch) -> tuple[Span, ...]:
    """The path of a branch, for attention."""
    return tuple(Span(part.block, part.length, part.at) for part in branch.path)

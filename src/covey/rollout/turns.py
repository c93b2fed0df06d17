"""Turns of conversations in one batch: what waits, what may still be said, when a turn is over.

    start --queue--> device.begin: prefill, first token --> device.decode: one token or a few each, repeated
                                                             |                              ^
    told of <--turn over: end of sequence, stop string, limit +                              |
                                      |                                                     |
                                      +--> parked, if kept --extend--> device.extend: prefill what was said

The scheduler knows tokens and rules. Where keys and values are, how rows share a batch and which of the waiting ones
come first is the `Device`'s: one in PyTorch, and one that asks a server.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from covey.errors import GenerationError
from covey.rollout.drawing import Choices, StopMatcher, cut_choices, following, only_way_on, stream_key
from covey.types import Allows, Completion, FinishReason, IntArray, Progress, Request, SamplingSettings, Support

NO_LIMIT = 1 << 62
REUSED_BLOCK = 128
"""Tokens. What is reused is told to others in whole blocks: by single tokens they would find out prompts by trying."""


@dataclass(slots=True)
class GenerationStats:
    """What one session did so far."""

    prefill_tokens: int = 0  # tokens computed that were not sampled: prompts, and what was said in between
    # those that were not computed because they were held already: both together are the tokens that came before every
    # row's every turn
    reused_tokens: int = 0
    reused_blocks: int = 0  # whole blocks of `REUSED_BLOCK` tokens among these
    reused_prompts: int = 0  # first prompts that were held whole, in use by no other row
    decoded_tokens: int = 0  # tokens sampled, the first of each turn included
    prefill_seconds: float = 0.0  # time in forward passes of such tokens
    sampling_seconds: float = 0.0  # time in drawing tokens and stop rules
    cache_bytes: int = 0  # memory held for keys and values
    decode_steps: int = 0  # forward passes of the decode batch
    decode_seconds: float = 0.0  # time in them; on a GPU, work is counted where it is waited for: in sampling
    peak_batch: int = 0  # most rows in the decode batch


@dataclass(slots=True, eq=False)
class Row:
    """One conversation: a prompt, and what was sampled and said after it. A plain completion has one turn."""

    prompt_ids: IntArray  # `[P]`
    stream: tuple[int, ...]  # random stream of the present turn
    keep: bool  # it may be continued
    settings: SamplingSettings  # how its tokens are drawn
    own: list[int] = field(default_factory=list)  # every token after the prompt
    held: int = 0  # how many of them have their keys and values in the device's memory
    turn: int = 0  # where in `own` the present turn begins
    limit: int = 0  # most tokens of the present turn
    key: int = 0  # of that stream
    matcher: StopMatcher | None = None
    choices: Choices | None = None  # the only sequences that the present turn may be; None = any
    allows: Allows | None = None  # says which ids may come next; None = any
    forced: IntArray | None = None  # what the first turn says however likely it is
    logprobs: list[float] = field(default_factory=list)
    support: list[IntArray] = field(default_factory=list)
    # (token of the turn, version of the weights that it and those after it were drawn with), in order
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # why the turn is over; None while it goes on
    error: GenerationError | None = None  # what went wrong with this row alone; its turn is over
    shift: int = 0  # the position that turns what is sampled next, less the number of tokens before
    place: Any = None  # the device's own note of where the row is

    @property
    def cuts(self) -> bool:
        """Some tokens may not be drawn, and which ones may is to be kept."""
        drawn = self.settings
        return self.choices is not None or (drawn.keep_support and drawn.cuts)

    @property
    def sampled(self) -> int:
        """How many tokens the present turn has so far."""
        return len(self.own) - self.turn

    @property
    def new(self) -> int:
        """Tokens after the prompt whose keys and values are not in memory yet."""
        return len(self.own) - self.held

    def allowed(self) -> IntArray | None:
        """Ids that may come next, ascending; None = any."""
        if self.allows is not None:
            return self.allows(self.own[self.turn :])
        return None if self.choices is None else following(self.choices, self.own[self.turn :])

    def history(self) -> IntArray:
        """All tokens of the conversation, the prompt first."""
        return np.concatenate([self.prompt_ids, np.array(self.own, dtype=np.int64)])

    def turn_request(self) -> Request:
        """The present turn, with all that was said before."""
        return Request(self.history(), self.stream, cut_choices(self.choices, self.limit))

    def turn_settings(self) -> SamplingSettings:
        """Those of `turn_request`: an engine refuses choices that cannot be said whole, here the turn is cut short."""
        settings = replace(self.settings, max_tokens=self.limit)
        return settings if self.choices is None else replace(settings, stop_strings=())


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The next tokens of n rows, C for each."""

    rows: Sequence[Row]  # the n rows
    tokens: NDArray[np.integer[Any]]  # `[n, C]` ids; the first negative one ends a row's tokens
    logprobs: NDArray[np.floating[Any]]  # `[n, C]` under the sampling distribution
    # for each row and token the ids that could have been drawn, None = any; None = any for all of them
    support: Sequence[Sequence[IntArray | None]] | None = None
    # for each row why its turn is over, from a device that applies the stop rules itself
    finished: Sequence[FinishReason] | None = None

    @classmethod
    def whole(cls, row: Row, found: Completion) -> Drawn:
        """A turn that was sampled to its end."""
        support = None if found.support is None else [np.split(found.support.ids, found.support.offsets[1:-1])]
        return cls([row], found.token_ids[None], found.logprobs[None], support, [found.finish_reason])


class Device:
    """Prefills and decodes. It draws from a row's `key` at the place `sampled`, so company does not matter.

    A row is in the queue, runs, or is parked. Subclasses write `begin`, `extend` and `decode`, and what else they need.

    Attributes:
        whole_tokens: most tokens of a row, prompt and all.
        own_tokens: most tokens of a row after its prompt.
        turn_tokens: most tokens of a turn.
        logits_dtype: what overflows where logits are not finite, for the message.
        in_rounds: it samples every turn that waits to its end, and is asked when all worlds have answered.
        stats: what it has cost; the scheduler counts the tokens.
    """

    in_rounds = False

    def __init__(self, whole_tokens: int, own_tokens: int = NO_LIMIT) -> None:
        self.whole_tokens, self.own_tokens, self.turn_tokens = whole_tokens, own_tokens, NO_LIMIT
        self.logits_dtype = "their type"
        self.stats = GenerationStats()

    def fits(self, prompt: int) -> bool:
        """Whether there is memory for a first prompt of so many tokens."""
        return True

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Take rows from the front of the queue while there is room, prefill them, draw the first token of each."""
        raise NotImplementedError

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """Take rows out of the list, prefill what is `new` in them, draw the first token of each answer."""
        raise NotImplementedError

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """Go on with all rows that run; so many others wait for their places."""
        raise NotImplementedError

    def leave(self, rows: Sequence[Row]) -> None:
        """The turn of these rows is over: kept ones stay in memory, the others go; a row's `error` leaves nothing."""

    def drop(self, row: Row) -> None:
        """Forget a row wherever it is."""

    def renew(self, queue: Sequence[Row]) -> None:
        """The weights have been replaced: nothing that was computed may be given to rows that have not begun."""

    def clear(self) -> None:
        """Values that are not finite may be anywhere in a memory that is used again: overwrite it."""


D = TypeVar("D", bound=Device)


class Session(Generic[D]):
    """Rows under way with one version of the weights. Made by an engine; dropping it leaves the engine ready.

    Args:
        device: samples.
        settings: how tokens are drawn; `max_tokens` is the limit of a turn.
        policy_version: of the weights that everything here is sampled from.
        tokenizer: for stop strings.
    """

    def __init__(self, device: D, settings: SamplingSettings, *, policy_version: int, tokenizer: Any = None) -> None:
        self.device, self.policy_version = device, policy_version
        self._settings, self._tokenizer = settings, tokenizer
        self._started = 0
        self._queue: deque[Row] = deque()
        self._resuming: list[Row] = []
        self._open: dict[int, Row] = {}  # rows whose turn is not over
        self._finished: list[Row] = []
        self._alone = False  # a row that goes wrong ends alone

    @property
    def busy(self) -> bool:
        """True while some turn is not over, or is over and not yet told of."""
        return bool(self._open or self._finished)

    @property
    def in_rounds(self) -> bool:
        """All turns that wait are sampled to their ends at once: `advance` when all worlds have answered."""
        return self.device.in_rounds

    def start(self, request: Request, *, keep: bool = False, settings: SamplingSettings | None = None) -> Row:
        """Begin a completion; `advance` samples it.

        Args:
            request: prompt and random stream.
            keep: it may be continued: it stays parked when its turn is over, until `drop`.
            settings: how its tokens are drawn; None = as the session's.

        Raises `GenerationError`: the prompt is empty, or leaves no room in the context, or none for what is forced.
        """
        number, length = self._started, len(request.token_ids)
        if length == 0:
            raise GenerationError(f"request {number}: the prompt has no tokens; give it at least one")
        if length >= self.device.whole_tokens:
            raise GenerationError(
                f"request {number}: the prompt has {length} tokens, the context {self.device.whole_tokens}, which "
                "leaves no room for a completion; shorten the prompt or set data.max_prompt_length"
            )
        ids = np.ascontiguousarray(request.token_ids, dtype=np.int64)
        drawn, forced = settings or self._settings, request.forced
        if forced is not None:
            drawn = replace(drawn, max_tokens=len(forced))
        row = Row(ids, request.stream, keep, drawn, allows=request.allows, forced=forced)
        limit = self.room_for_turn(row, 0)
        if forced is not None and limit < len(forced):
            raise GenerationError(
                f"a prompt of {length} tokens leaves a continuation of {len(forced)} no room in the context of "
                f"{self.device.whole_tokens}; shorten the prompt or set data.max_prompt_length"
            )
        self._begin_turn(row, limit, request.stream, request.choices)
        self._started += 1
        self._queue.append(row)
        return row

    def has_room_for(self, prompt: int) -> bool:
        """Whether a first prompt of so many tokens fits the context, and the memory that is reserved for prompts."""
        return prompt < self.device.whole_tokens and bool(self.device.fits(prompt))

    def room_for_turn(self, row: Row, said: int) -> int:
        """Most tokens that the next turn may have after `said` tokens are said to the conversation; 0 = none."""
        own = len(row.own) + said
        left = min(self.device.whole_tokens - len(row.prompt_ids) - own, self.device.own_tokens - own)
        return max(0, min(row.settings.max_tokens, self.device.turn_tokens, left))

    def extend(self, row: Row, token_ids: IntArray, stream: tuple[int, ...], choices: Choices | None = None) -> None:
        """Say something to a parked conversation and let it answer.

        Args:
            row: kept, and its turn over.
            token_ids: what is said, at least one token.
            stream: random stream of the answer.
            choices: the only sequences that the answer may be; None = any.

        Raises `GenerationError`: it is not parked, nothing is said, or the answer has no room (`room_for_turn`).
        """
        limit = self.room_for_turn(row, len(token_ids))
        if not row.keep or id(row) in self._open or len(token_ids) == 0 or limit == 0:
            raise GenerationError(
                f"a conversation of {len(row.prompt_ids) + len(row.own)} tokens cannot go on with "
                f"{len(token_ids)} more: it must be parked, something must be said, and the context of "
                f"{self.device.whole_tokens} and the {self.device.own_tokens} tokens of a conversation must leave room"
            )
        row.own += [int(token) for token in token_ids]
        self._begin_turn(row, limit, stream, choices)
        self._resuming.append(row)

    def drop(self, row: Row) -> None:
        """Forget a row, whatever it is doing; nothing happens to one that is gone already."""
        if self._open.pop(id(row), None) is None and not row.keep:
            return
        row.keep = False
        for rows in (self._queue, self._resuming):
            if row in rows:
                rows.remove(row)
        self.device.drop(row)

    def change_version(self, version: int) -> None:
        """The engine's weights have been replaced while rows run: they go on with the new ones.

        Keys and values of tokens so far stay those of the old weights. Prompts are prefilled anew for new rows.
        """
        self.policy_version = version
        for row in self._open.values():
            row.versions = [*row.versions, (row.sampled, version)] if row.sampled else [(0, version)]
        self.device.renew(self._queue)

    def end_bad_rows_alone(self) -> None:
        """No row has to do with the others: one that goes wrong is over, its `error` set; else `advance` raises."""
        self._alone = True

    def advance(self) -> list[Row]:
        """Admit what waits and sample on; returns the rows whose turn is over by now, none or some.

        Raises `GenerationError`: the logits are not finite, or the device has no memory for what waits.
        """
        if self._queue:
            for drawn in self.device.begin(self._queue):
                self._take(drawn)
        if self._resuming:
            for drawn in self.device.extend(self._resuming):
                self._take(drawn)
        if self._open and not self._finished:
            for drawn in self.device.decode(len(self._queue)):
                self._take(drawn, decoded=True)
        finished, self._finished = self._finished, []
        return finished

    def run(self, rows: Sequence[Row], progress: Progress | None = None) -> list[Completion]:
        """Sample until every turn is over; the completions of these rows, in order."""
        finished = 0
        while self.busy:
            done = len(self.advance())
            finished += done
            if progress is not None and done:
                progress(finished, len(rows))
        return [self.completion(row) for row in rows]

    def completion(self, row: Row) -> Completion:
        """The turn of a row that is over, as a completion."""
        assert row.finish_reason is not None
        support = None
        if row.support:
            support = Support(ids=np.concatenate(row.support), offsets=np.cumsum([0, *map(len, row.support)]))
        return Completion(
            token_ids=np.array(row.own[row.turn :], dtype=np.int64),
            logprobs=np.array(row.logprobs, dtype=np.float32),
            finish_reason=row.finish_reason,
            policy_version=row.versions[0][1],
            support=support,
        )

    def stats(self) -> GenerationStats:
        """What this session has done so far, in numbers."""
        return self.device.stats

    def _begin_turn(self, row: Row, limit: int, stream: tuple[int, ...], choices: Choices | None) -> None:
        stop = row.settings.stop_strings
        row.turn, row.limit, row.stream, row.key = len(row.own), limit, stream, stream_key(stream)
        row.matcher = StopMatcher(self._tokenizer, stop) if stop and self._tokenizer is not None else None
        row.finish_reason, row.choices = None, choices
        row.logprobs, row.support, row.versions = [], [], [(0, self.policy_version)]
        self._open[id(row)] = row

    def _take(self, drawn: Drawn, *, decoded: bool = False) -> None:
        """Add the drawn tokens, apply the stop rules, and let the rows whose turn is over leave."""
        started, stats = time.perf_counter(), self.device.stats
        support, by_rules = drawn.support, drawn.finished is None
        columns = zip(drawn.rows, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
        for place, (row, tokens, logprobs) in enumerate(columns):
            keeps = support is not None and row.cuts
            for t, token in enumerate(tokens):
                if token < 0 or row.finish_reason is not None:
                    break
                if row.error is not None or not math.isfinite(logprobs[t]):
                    self._end_bad(row)
                    break
                row.held += decoded
                row.own.append(token)
                row.logprobs.append(logprobs[t])
                stats.decoded_tokens += 1
                if keeps and (kept := support[place][t]) is not None:  # type: ignore[index]
                    row.support.append(kept)
                if by_rules and not self._ended(row, token) and row.choices is not None:
                    self._complete(row)
            if drawn.finished is not None:
                row.finish_reason = drawn.finished[place]
        over = [row for row in drawn.rows if row.finish_reason is not None]
        if over:
            self._finished += over
            for row in over:
                del self._open[id(row)]
            self.device.leave(over)
        stats.sampling_seconds += time.perf_counter() - started

    @staticmethod
    def _ended(row: Row, token: int) -> bool:
        if row.forced is not None:
            row.finish_reason = "length" if row.sampled == len(row.forced) else None
        elif token in row.settings.eos_token_ids or (row.matcher is not None and row.matcher.push(token)):
            row.finish_reason = "stop"
        elif len(row.own) - row.turn >= row.limit:
            row.finish_reason = "length"
        return row.finish_reason is not None

    def _complete(self, row: Row) -> None:
        """Tokens without an alternative have probability 1: they need no forward pass."""
        rest = only_way_on(row.choices, row.own[row.turn :])
        for token in rest or ():
            row.own.append(token)
            row.logprobs.append(0.0)
            row.support.append(np.array([token], dtype=np.int64))
            self.device.stats.decoded_tokens += 1
            if self._ended(row, token):
                return
        if rest is not None:
            row.finish_reason = "stop"

    def _end_bad(self, row: Row) -> None:
        """A row went wrong: so does the session, or the row alone is over."""
        row.error = row.error or GenerationError(
            f"completion token {row.sampled}: the model's logits are not finite. Before any update its weights hold "
            f"such numbers, or {self.device.logits_dtype} overflows: use another copy, or model.dtype=float32. After "
            "updates the weights have diverged: go back to a checkpoint, and lower optim.learning_rate"
        )
        if not self._alone:
            self.device.clear()
            raise row.error
        row.keep, row.finish_reason = False, "length"


class TurnGenerator(Protocol):
    """Opens sessions. An engine that is not one of Covey's gives a `Session` its own `Device`."""

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> Session[Any]: ...

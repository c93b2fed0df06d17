"""Conversations under way: who has which slot of the cache, what was sampled, when a turn is over.

The device samples a chunk of tokens for all slots at once; between chunks finished slots are given to who waits. A
sampled token is run with the next one, so the cache holds every token of a row but its last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import GenerationError
from covey.jax.drawing import Draw, Manner
from covey.jax.model import ModelConfig, Transformer
from covey.jax.packing import members, size_up
from covey.jax.programs import Programs
from covey.jax.room import Room
from covey.jax.sharding import place_rows
from covey.rollout.choices import Choices, following, only_way_on
from covey.rollout.stop import StopMatcher
from covey.rollout.streams import stream_key, uniforms
from covey.types import Completion, FinishReason, IntArray, Request, SamplingSettings, Support

_CHUNK = 32
"""Tokens for each slot between two looks from the host."""
_WATCHED = 8
"""The same where stop strings must be looked for: what is sampled behind one is thrown away."""
_PROMPTS = 8
"""Prompts that are run at once."""
_FEWEST = 8
"""Slots below which shrinking does not pay."""


@dataclass(slots=True, eq=False)
class Row:
    """One conversation.

    Attributes:
        ids: prompt, then everything sampled and said.
        first: tokens of the prompt.
        turn: where in `ids` the present turn begins.
        limit: most tokens of the turn.
        held: tokens whose keys and values are in the slot.
        slot: None before and after its time in the cache.
    """

    ids: list[int]
    first: int
    turn: int
    limit: int
    key: int
    keep: bool
    choices: Choices | None
    matcher: StopMatcher | None
    held: int = 0
    slot: int | None = None
    logprobs: list[float] = field(default_factory=list)
    support: list[IntArray] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def sampled(self) -> int:
        """Tokens of the turn."""
        return len(self.ids) - self.turn


class Session:
    """Rows under way with one version of the weights and one way to draw; a `covey.rollout.playing.TurnSession`.

    Made by `covey.jax.engine.Engine`.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        config: ModelConfig,
        settings: SamplingSettings,
        room: Room,
        *,
        policy_version: int,
        context_length: int,
        own_tokens: int | None,
        tokenizer: Any,
        mesh: Any,
    ) -> None:
        self._programs, self._params, self._config, self._settings = programs, params, config, settings
        self._version, self._context, self._own = policy_version, context_length, own_tokens
        self._tokenizer, self._mesh, self._room = tokenizer, mesh, room
        self._manner = Manner(
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.keep_support,
            tuple(settings.eos_token_ids),
        )
        self._slots: list[Row | None] = [None] * room.slots
        self._cache: Any = None
        self._waiting: deque[Row] = deque()
        self._resuming: list[Row] = []
        self._over: list[Row] = []

    # ------------------------------------------------------------------ what the caller does

    @property
    def busy(self) -> bool:
        """True while some turn is not over, or is over and not yet told of."""
        return bool(self._waiting or self._resuming or self._over or self._running())

    def start(self, request: Request, *, keep: bool = False) -> Row:
        """Begin a completion; `keep`: it may be continued, and holds its slot until `drop`.

        Raises:
            GenerationError: the prompt is empty, or leaves no room.
        """
        length = len(request.token_ids)
        if length == 0:
            raise GenerationError("a prompt has no tokens; give it at least one")
        if length >= min(self._context, self._room.positions + 1):
            raise GenerationError(
                f"a prompt has {length} tokens, the context {min(self._context, self._room.positions)}, which leaves "
                "no room for a completion; shorten the prompt or set data.max_prompt_length"
            )
        ids = [int(token) for token in request.token_ids]
        row = Row(ids, length, length, 0, stream_key(request.stream), keep, request.choices, self._matcher())
        row.limit = self.room_for_turn(row, 0)
        self._waiting.append(row)
        return row

    def has_room_for(self, prompt: int) -> bool:
        """Whether a first prompt of so many tokens fits."""
        return prompt < min(self._context, self._room.positions)

    def room_for_turn(self, row: Row, said: int) -> int:
        """Most tokens of the next turn after `said` tokens are said; 0 = none."""
        whole = len(row.ids) + said
        left = min(self._context, self._room.positions + 1) - whole
        if self._own is not None:
            left = min(left, self._own + 1 - (whole - row.first))
        return max(0, min(self._settings.max_tokens, left))

    def extend(self, row: Row, token_ids: IntArray, stream: tuple[int, ...], choices: Choices | None = None) -> None:
        """Say something to a conversation whose turn is over, and let it answer.

        Raises:
            GenerationError: its turn is not over, nothing is said, or the answer has no room.
        """
        limit = self.room_for_turn(row, len(token_ids))
        if row.slot is None or row.finish_reason is None or len(token_ids) == 0 or limit == 0:
            raise GenerationError(
                f"a conversation of {len(row.ids)} tokens cannot go on with {len(token_ids)} more: its turn must be "
                f"over, something must be said, and {self._room.positions} tokens must leave room"
            )
        row.ids += [int(token) for token in token_ids]
        row.turn, row.limit, row.key, row.choices = len(row.ids), limit, stream_key(stream), choices
        row.matcher, row.finish_reason, row.logprobs, row.support = self._matcher(), None, [], []
        self._resuming.append(row)

    def drop(self, row: Row) -> None:
        """Forget a conversation, whatever it is doing."""
        if row.slot is not None:
            self._slots[row.slot], row.slot = None, None
        for rows in (self._resuming, self._over, self._waiting):
            if row in rows:
                rows.remove(row)

    def advance(self) -> list[Row]:
        """Sample on; the rows whose turn is over by now, none or some."""
        self._admit()
        self._resume()
        if not self._over and self._running():
            self._shrink()
            self._decode()
        over, self._over = self._over, []
        return over

    def completion(self, row: Row) -> Completion:
        """The turn that is over."""
        support = None
        if row.support:
            ends = np.cumsum([0, *(len(ids) for ids in row.support)])
            support = Support(np.concatenate(row.support).astype(np.int64), ends.astype(np.int64))
        assert row.finish_reason is not None
        return Completion(
            np.array(row.ids[row.turn :], dtype=np.int64),
            np.array(row.logprobs, dtype=np.float32),
            row.finish_reason,
            self._version,
            support,
        )

    # ------------------------------------------------------------------ inside

    def _running(self) -> list[Row]:
        """Rows in slots that go on."""
        begun = (row for row in self._slots if row is not None and row.finish_reason is None)
        return [row for row in begun if row not in self._resuming]

    def _matcher(self) -> StopMatcher | None:
        stop = self._settings.stop_strings
        return StopMatcher(self._tokenizer, stop) if stop else None

    def _admit(self) -> None:
        """Prompts of waiting rows into free slots, each different one run once."""
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        if not self._waiting or not free:
            return
        if self._cache is None:
            empty = Transformer(self._config).init_cache(
                self._room.slots, self._room.positions, self._params["embedding"].dtype
            )
            self._cache = place_rows(empty, self._mesh, "slots")
        rows: list[Row] = []
        while self._waiting and len(rows) < len(free):
            rows.append(self._waiting.popleft())
            rows[-1].slot = free[len(rows) - 1]
        for row in rows:
            assert row.slot is not None
            self._slots[row.slot] = row
        places: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            places.setdefault(tuple(row.ids), []).append(row)
        prompts = sorted(places, key=len)
        while prompts:
            together = prompts[: 1 << (min(len(prompts), _PROMPTS).bit_length() - 1)]
            prompts = prompts[len(together) :]
            self._begin(together, places)

    def _begin(self, prompts: Sequence[tuple[int, ...]], places: dict[tuple[int, ...], list[Row]]) -> None:
        width = min(size_up(max(map(len, prompts))), self._room.positions)
        tokens = np.zeros((len(prompts), width), np.int32)
        for number, prompt in enumerate(prompts):
            tokens[number, : len(prompt)] = prompt
        held, logits = self._programs.prefill(self._params, tokens, np.array([*map(len, prompts)], np.int32))
        rows = [(number, row) for number, prompt in enumerate(prompts) for row in places[prompt]]
        padded = members(len(rows))
        source, slots = np.zeros(padded, np.int32), np.full(padded, self._room.slots, np.int32)
        for at, (number, row) in enumerate(rows):
            assert row.slot is not None
            source[at], slots[at], row.held = number, row.slot, len(row.ids)
        begun = [row for _, row in rows]
        u, allowed = self._numbers(begun, padded, 1)[:, 0], self._allowed(begun, padded)
        self._cache, drawn = self._programs.begin(
            self._cache, held, logits, source, slots, u, allowed, manner=self._manner
        )
        self._say_all(begun, drawn, allowed is not None)

    def _resume(self) -> None:
        """What was said, into the slots, and the first token of each answer."""
        rows, self._resuming = self._resuming, []
        rows = [row for row in rows if row.slot is not None]
        while rows:
            together = rows[: 1 << (min(len(rows), _PROMPTS).bit_length() - 1)]
            rows = rows[len(together) :]
            new = [row.ids[row.held :] for row in together]
            width = size_up(max(map(len, new)))
            tokens = np.zeros((len(together), width), np.int32)
            for at, ids in enumerate(new):
                tokens[at, : len(ids)] = ids
            start = np.array([row.held for row in together], np.int32)
            lengths = np.array([len(ids) for ids in new], np.int32)
            slots = np.array([row.slot for row in together], np.int32)
            for row in together:
                row.held = len(row.ids)
            u, allowed = self._numbers(together, len(together), 1)[:, 0], self._allowed(together, len(together))
            self._cache, drawn = self._programs.extend(
                self._params, self._cache, tokens, slots, start, lengths, u, allowed, manner=self._manner
            )
            self._say_all(together, drawn, allowed is not None)

    def _decode(self) -> None:
        """A chunk of tokens for all that run."""
        size, running = self._room.positions, self._running()
        chosen = any(row.choices is not None for row in running)
        chunk = 1 if chosen else _WATCHED if self._settings.stop_strings else _CHUNK
        token, position = np.zeros(self._room.slots, np.int32), np.full(self._room.slots, size, np.int32)
        budget = np.zeros(self._room.slots, np.int32)
        for row in running:
            token[row.slot], position[row.slot] = row.ids[-1], row.held
            budget[row.slot] = row.limit - row.sampled
        found = self._programs.decode(
            self._params,
            self._cache,
            token,
            position,
            budget,
            np.int32(self._until(len(running))),
            self._numbers(self._slots, self._room.slots, chunk),
            self._allowed(self._slots, self._room.slots) if chosen else None,
            manner=self._manner,
        )
        self._cache, steps = found.cache, int(found.steps)
        tokens, logprobs = np.asarray(found.tokens), np.asarray(found.logprobs)
        support = None if found.support is None else np.asarray(found.support[:, :steps])
        for row in running:
            slot = row.slot
            assert slot is not None
            for t in range(steps):
                if row.finish_reason is not None or tokens[slot, t] < 0:
                    break
                bits = None if support is None else support[slot, t]
                row.held += 1
                self._say(row, int(tokens[slot, t]), float(logprobs[slot, t]), self._kept(row, bits))
            self._finish(row)

    def _until(self, running: int) -> int:
        """Decode until no more than so many rows go on."""
        if self._waiting or any(row is not None and row.keep for row in self._slots):
            return running - max(1, running // 4)  # somebody waits for what they leave, or answers
        return self._room.slots // 2 if self._room.slots > _FEWEST and running > self._room.slots // 2 else 0

    def _shrink(self) -> None:
        """Half the slots, or fewer, where the others have nothing to do."""
        taken = [slot for slot, row in enumerate(self._slots) if row is not None]
        slots = self._room.slots
        spread = 1 if self._mesh is None else self._mesh.size
        while slots // 2 >= max(len(taken), _FEWEST) and slots % 2 == 0 and slots // 2 % spread == 0:
            slots //= 2
        if self._waiting or slots == self._room.slots:
            return
        index = np.array([*taken, *[0] * (slots - len(taken))], np.int32)
        self._cache = self._programs.shrink(self._cache, index)
        rows = [self._slots[slot] for slot in taken]
        self._slots = [*rows, *[None] * (slots - len(taken))]
        for slot, row in enumerate(rows):
            assert row is not None
            row.slot = slot
        self._room = Room(slots, self._room.positions)

    def _numbers(self, rows: Sequence[Row | None], count: int, chunk: int) -> NDArray[np.float32]:
        """`[count, chunk]` the next random numbers of each row's stream."""
        keys = np.array([0 if row is None else row.key for row in rows], dtype=np.uint64)
        drawn = np.array([0 if row is None else row.sampled for row in rows], dtype=np.uint64)
        numbers = np.zeros((count, chunk), np.float32)
        for t in range(chunk):
            numbers[: len(rows), t] = np.minimum(uniforms(keys, drawn + np.uint64(t)), 1 - 2.0**-24)
        return numbers

    def _allowed(self, rows: Sequence[Row | None], count: int) -> NDArray[np.uint8] | None:
        """`[count, ceil(V / 8)]` bits of the only tokens that each row may draw; None = any, for all of them."""
        if all(row is None or row.choices is None for row in rows):
            return None
        bits = np.full((count, -(-self._config.vocab_size // 8)), 255, np.uint8)
        for at, row in enumerate(rows):
            if row is not None and row.finish_reason is None:
                ids = following(row.choices, row.ids[row.turn :])
                if ids is not None:
                    bits[at] = 0
                    np.bitwise_or.at(bits[at], ids // 8, (128 >> (ids % 8)).astype(np.uint8))
        return bits

    def _kept(self, row: Row, bits: NDArray[np.uint8] | None) -> IntArray | None:
        """What the next token of a row could have been, where that is recorded."""
        allowed = following(row.choices, row.ids[row.turn :])
        if bits is None:
            return allowed
        return np.flatnonzero(np.unpackbits(bits, count=self._config.vocab_size)).astype(np.int64)

    def _say_all(self, rows: Sequence[Row], drawn: Draw, chosen: bool) -> None:
        tokens, logprobs = np.asarray(drawn.tokens), np.asarray(drawn.logprobs)
        support = None if drawn.support is None else np.asarray(drawn.support)
        for at, row in enumerate(rows):
            bits = None if support is None else support[at]
            self._say(row, int(tokens[at]), float(logprobs[at]), self._kept(row, bits))
            self._finish(row)

    def _say(self, row: Row, token: int, logprob: float, support: IntArray | None) -> None:
        if not np.isfinite(logprob):
            raise GenerationError(
                f"completion token {row.sampled}: the model's logits are not finite; the weights have diverged or "
                "their type overflows: lower optim.learning_rate or use float32"
            )
        row.ids.append(token)
        row.logprobs.append(logprob)
        if support is not None:
            row.support.append(support)
        if token in self._manner.eos_token_ids or (row.matcher is not None and row.matcher.push(token)):
            row.finish_reason = "stop"
        elif row.sampled >= row.limit:
            row.finish_reason = "length"
        rest = only_way_on(row.choices, row.ids[row.turn :]) if row.finish_reason is None else None
        for forced in rest or ():  # tokens without an alternative have probability 1: they need no forward pass
            if row.finish_reason is None:
                row.ids.append(forced)
                row.logprobs.append(0.0)
                row.support.append(np.array([forced], dtype=np.int64))
                ended = forced in self._manner.eos_token_ids
                row.finish_reason = "stop" if ended else "length" if row.sampled >= row.limit else None
        if rest is not None and row.finish_reason is None:
            row.finish_reason = "stop"

    def _finish(self, row: Row) -> None:
        """A row whose turn is over is told of, and leaves its slot unless it is kept."""
        if row.finish_reason is None:
            return
        self._over.append(row)
        if not row.keep and row.slot is not None:
            self._slots[row.slot], row.slot = None, None

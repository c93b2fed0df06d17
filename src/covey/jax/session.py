"""Conversations under way: who has which slot of the cache, what was sampled, when a turn is over.

The device samples a chunk of tokens for all slots at once; between chunks finished slots are given to who waits. A
sampled token is run with the next one, so the cache holds every token of a row but its last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from covey.errors import GenerationError
from covey.jax.drawing import Draw, Manner
from covey.jax.model import ModelConfig, Transformer
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
_PROMPTS = 4
"""Prompts, or conversations that go on, that are run at once."""
_BEGUN = 16
"""Completions that get their prompt at once."""
_SAID = 32
"""Tokens of what is said to a conversation that are run at once."""


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
        self._prompts: Any = None
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
            self._prepare()
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
            self._cache = place_rows(self._empty(self._room.slots, self._room.positions), self._mesh, "slots")
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
        for start in range(0, len(prompts), _PROMPTS):
            self._begin(prompts[start : start + _PROMPTS], places)
        if not self._waiting:
            self._prompts = None

    def _empty(self, rows: int, positions: int) -> Any:
        return Transformer(self._config).init_cache(rows, positions, self._params["embedding"].dtype)

    def _begin(self, prompts: Sequence[tuple[int, ...]], places: dict[tuple[int, ...], list[Row]]) -> None:
        """Run prompts in a cache of their own; then they are copied to whoever has them."""
        width = self._room.chunk
        lengths = np.zeros(_PROMPTS, np.int32)
        lengths[: len(prompts)] = [*map(len, prompts)]
        tokens = np.zeros((_PROMPTS, -(-lengths.max() // width) * width), np.int32)
        for number, prompt in enumerate(prompts):
            tokens[number, : len(prompt)] = prompt
        if self._prompts is None:
            self._prompts = self._empty(_PROMPTS, self._room.prompt)
        logits = self._no_logits()
        for start in range(0, tokens.shape[1], width):
            self._prompts, logits = self._programs.prefill(
                self._params, self._prompts, logits, tokens[:, start : start + width], np.int32(start), lengths
            )
        rows = [(number, row) for number, prompt in enumerate(prompts) for row in places[prompt]]
        for start in range(0, len(rows), _BEGUN):
            begun = [row for _, row in rows[start : start + _BEGUN]]
            source, slots = np.zeros(_BEGUN, np.int32), np.full(_BEGUN, self._room.slots, np.int32)
            source[: len(begun)] = [number for number, _ in rows[start : start + _BEGUN]]
            slots[: len(begun)] = np.array([row.slot for row in begun])
            for row in begun:
                row.held = len(row.ids)
            u, allowed = self._numbers(begun, _BEGUN, 1)[:, 0], self._allowed(begun, _BEGUN)
            self._cache, drawn = self._programs.begin(
                self._cache, self._prompts, logits, source, slots, u, allowed, manner=self._manner
            )
            self._say_all(begun, drawn)

    def _resume(self) -> None:
        """What was said, into the slots, and the first token of each answer."""
        rows, self._resuming = self._resuming, []
        rows = [row for row in rows if row.slot is not None]
        rows.sort(key=lambda row: len(row.ids) - row.held)
        for start in range(0, len(rows), _PROMPTS):
            self._extend(rows[start : start + _PROMPTS])

    def _extend(self, rows: Sequence[Row]) -> None:
        u, allowed = self._numbers(rows, _PROMPTS, 1)[:, 0], self._allowed(rows, _PROMPTS)
        slots = np.full(_PROMPTS, self._room.slots, np.int32)
        slots[: len(rows)] = np.array([row.slot for row in rows])
        pending = list(rows)
        while pending:
            tokens = np.zeros((_PROMPTS, _SAID), np.int32)
            begin, lengths = np.zeros(_PROMPTS, np.int32), np.zeros(_PROMPTS, np.int32)
            for at, row in enumerate(rows):
                new = row.ids[row.held : row.held + _SAID] if row in pending else []
                tokens[at, : len(new)], begin[at], lengths[at] = new, row.held, len(new)
                row.held += len(new)
            self._cache, drawn = self._programs.extend(
                self._params, self._cache, tokens, slots, begin, lengths, u, allowed, manner=self._manner
            )
            heard = [row if row in pending and row.held == len(row.ids) else None for row in rows]
            pending = [row for row in pending if row not in heard]
            self._say_all(heard, drawn)

    def _decode(self) -> None:
        """A chunk of tokens for all that run."""
        size, running = self._room.positions, self._running()
        chunk, chosen = self._pace()
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

    def _pace(self) -> tuple[int, bool]:
        """Tokens between two looks from the host, and whether rows have choices: these look after each token."""
        chosen = any(row.choices is not None for row in self._running())
        return 1 if chosen else _WATCHED if self._settings.stop_strings else _CHUNK, chosen

    def _until(self, running: int) -> int:
        """Decode until no more than so many rows go on."""
        if self._waiting or any(row is not None and row.keep for row in self._slots):
            return running - max(1, running // 4)  # somebody waits for what they leave, or answers
        fewer = self._fewer()
        return fewer[0] if fewer and running > fewer[0] else 0

    def _fewer(self) -> list[int]:
        return self._room.rungs(1 if self._mesh is None else self._mesh.size)

    def _shrink(self) -> None:
        """Half the slots, as often as the others have nothing to do."""
        taken = [slot for slot, row in enumerate(self._slots) if row is not None]
        for slots in [] if self._waiting else [slots for slots in self._fewer() if slots >= len(taken)]:
            self._cache = self._programs.shrink(self._cache, np.array([*taken, *[0] * (slots - len(taken))], np.int32))
            self._slots = [*(self._slots[slot] for slot in taken), *[None] * (slots - len(taken))]
            taken = list(range(len(taken)))
            self._room = replace(self._room, slots=slots)
        for slot, row in enumerate(self._slots):
            if row is not None:
                row.slot = slot

    def _prepare(self) -> None:
        """Compile what runs now and when fewer slots are left, so that nothing has to be compiled later in a run.

        Slots that take no part stand in for those to come: nothing is computed.
        """
        chunk, chosen = self._pace()
        key = (self._room, self._manner, chunk, chosen, self._own is None)
        if key in self._programs.prepared:
            return
        self._programs.prepared.add(key)
        zeros, bits = partial(np.zeros, dtype=np.int32), -(-self._config.vocab_size // 8)

        def allowed(rows: int) -> Any:
            return np.full((rows, bits), 255, np.uint8) if chosen else None

        def rest(cache: Any, slots: int) -> Any:
            at = np.full(slots, self._room.positions, np.int32)
            u: Any = np.zeros((slots, chunk), np.float32)
            run = self._programs.decode
            found = run(
                self._params, cache, zeros(slots), at, zeros(slots), np.int32(0), u, allowed(slots), manner=self._manner
            )
            if self._own is None:
                return found.cache
            # conversations come and go
            outside, none, u = np.full(_PROMPTS, slots, np.int32), zeros(_PROMPTS), np.zeros(_PROMPTS, np.float32)
            said = np.zeros((_PROMPTS, _SAID), np.int32)
            cache, _ = self._programs.extend(
                self._params, found.cache, said, outside, none, none, u, allowed(_PROMPTS), manner=self._manner
            )
            outside, u = np.full(_BEGUN, slots, np.int32), np.zeros(_BEGUN, np.float32)
            prompts, logits = self._empty(_PROMPTS, self._room.prompt), self._no_logits()
            cache, _ = self._programs.begin(
                cache, prompts, logits, zeros(_BEGUN), outside, u, allowed(_BEGUN), manner=self._manner
            )
            return cache

        cache = self._cache = rest(self._cache, self._room.slots)
        for slots in self._fewer():
            self._programs.prepared.add((replace(self._room, slots=slots), *key[1:]))
            cache = rest(self._programs.shrink(cache, zeros(slots)), slots)

    def _no_logits(self) -> Any:
        return jnp.zeros((_PROMPTS, self._config.vocab_size), self._params["embedding"].dtype)

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

    def _say_all(self, rows: Sequence[Row | None], drawn: Draw) -> None:
        """The first tokens of turns; None = a row whose turn has not begun yet."""
        tokens, logprobs = np.asarray(drawn.tokens), np.asarray(drawn.logprobs)
        support = None if drawn.support is None else np.asarray(drawn.support)
        for at, row in enumerate(rows):
            if row is None:
                continue
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

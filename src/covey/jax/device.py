"""The device of sessions in JAX: who has which slot of the cache, and which compiled program runs when.

The programs sample a chunk of tokens for all slots at once; between chunks finished slots are given to who waits. A
sampled token is run with the next one, so the cache holds every token of a row but its last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from covey.jax.drawing import Draw, SamplingParams
from covey.jax.layout import CacheLayout
from covey.jax.model import ModelConfig, Transformer
from covey.jax.programs import Programs
from covey.jax.sharding import place_rows
from covey.rollout.drawing import uniforms
from covey.rollout.turns import NO_LIMIT, Device, Drawn, Row
from covey.types import IntArray, SamplingSettings

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


class JaxDevice(Device):
    """The slots of one session; a `covey.rollout.turns.Device`. A row's `place` is its slot, None before and after."""

    def __init__(
        self,
        programs: Programs,
        params: Any,
        config: ModelConfig,
        settings: SamplingSettings,
        layout: CacheLayout,
        *,
        context_length: int,
        own_tokens: int | None,
        mesh: Any,
    ) -> None:
        self._programs, self._params, self._config, self._settings = programs, params, config, settings
        self._mesh, self._layout, self._continued = mesh, layout, own_tokens is not None
        super().__init__(min(context_length, layout.positions + 1), NO_LIMIT if own_tokens is None else own_tokens + 1)
        self._sampling = SamplingParams(
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.keep_support,
            tuple(settings.eos_token_ids),
        )
        self._slots: list[Row | None] = [None] * layout.slots
        self._cache: Any = None
        self._prompts: Any = None

    # ------------------------------------------------------------------ what the scheduler asks

    def fits(self, prompt: int) -> bool:
        """Whether a slot holds a prompt of so many tokens."""
        return prompt < self._layout.positions

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Prompts of waiting rows into free slots, each different one run once."""
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        if not queue or not free:
            return
        if self._cache is None:
            self._cache = place_rows(self._empty(self._layout.slots, self._layout.positions), self._mesh, "slots")
        places: dict[tuple[int, ...], list[Row]] = {}
        for slot in free[: len(queue)]:
            row = self._slots[slot] = queue.popleft()
            row.place = slot
            places.setdefault(tuple(row.prompt_ids.tolist()), []).append(row)
        prompts = sorted(places, key=len)
        for start in range(0, len(prompts), _PROMPTS):
            yield from self._begin(prompts[start : start + _PROMPTS], places)
        if not queue:
            self._prompts = None

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """What was said, into the slots, and the first token of each answer."""
        rows = sorted(resuming, key=lambda row: row.new)
        resuming.clear()
        for start in range(0, len(rows), _PROMPTS):
            yield from self._extend(rows[start : start + _PROMPTS])

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """A chunk of tokens for all that run."""
        if not self._running():
            return
        self._prepare()
        self._shrink(waiting)
        running = self._running()
        chunk, chosen = self._pace()
        token = np.zeros(self._layout.slots, np.int32)
        position = np.full(self._layout.slots, self._layout.positions, np.int32)
        budget = np.zeros(self._layout.slots, np.int32)
        for row in running:
            token[row.place], position[row.place] = row.own[-1], len(row.prompt_ids) + row.held
            budget[row.place] = row.limit - row.sampled
        until = np.int32(self._until(len(running), waiting))
        numbers = self._numbers(self._slots, self._layout.slots, chunk)
        allowed = self._allowed(self._slots, self._layout.slots) if chosen else None
        decode = partial(self._programs.decode, sampling=self._sampling)
        found = decode(self._params, self._cache, token, position, budget, until, numbers, allowed)
        self._cache, steps = found.state, int(found.steps)
        slots = [row.place for row in running]
        tokens, logprobs = np.asarray(found.tokens)[slots, :steps], np.asarray(found.logprobs)[slots, :steps]
        bits = None if found.support is None else np.asarray(found.support[:, :steps])[slots]
        yield Drawn(running, tokens, logprobs, self._kept(running, bits, tokens))

    def leave(self, rows: Sequence[Row]) -> None:
        """Rows that are not kept leave their slots."""
        for row in rows:
            if not row.keep:
                self.drop(row)

    def drop(self, row: Row) -> None:
        """Free the row's slot, if it has one."""
        if row.place is not None:
            self._slots[row.place], row.place = None, None

    # ------------------------------------------------------------------ inside

    def _running(self) -> list[Row]:
        """Rows in slots whose turn goes on."""
        return [row for row in self._slots if row is not None and row.finish_reason is None]

    def _empty(self, rows: int, positions: int) -> Any:
        return Transformer(self._config).init_cache(rows, positions, self._params["embedding"].dtype)

    def _begin(self, prompts: Sequence[tuple[int, ...]], places: dict[tuple[int, ...], list[Row]]) -> Iterator[Drawn]:
        """Run prompts in a cache of their own; then they are copied to whoever has them."""
        width = self._layout.chunk
        lengths = np.zeros(_PROMPTS, np.int32)
        lengths[: len(prompts)] = [*map(len, prompts)]
        tokens = np.zeros((_PROMPTS, -(-lengths.max() // width) * width), np.int32)
        for number, prompt in enumerate(prompts):
            tokens[number, : len(prompt)] = prompt
        if self._prompts is None:
            self._prompts = self._empty(_PROMPTS, self._layout.prompt)
        logits = self._no_logits()
        for start in range(0, tokens.shape[1], width):
            self._prompts, logits = self._programs.prefill(
                self._params, self._prompts, logits, tokens[:, start : start + width], np.int32(start), lengths
            )
        rows = [(number, row) for number, prompt in enumerate(prompts) for row in places[prompt]]
        for start in range(0, len(rows), _BEGUN):
            begun = [row for _, row in rows[start : start + _BEGUN]]
            source, slots = np.zeros(_BEGUN, np.int32), np.full(_BEGUN, self._layout.slots, np.int32)
            source[: len(begun)] = [number for number, _ in rows[start : start + _BEGUN]]
            slots[: len(begun)] = np.array([row.place for row in begun])
            u, allowed = self._numbers(begun, _BEGUN, 1)[:, 0], self._allowed(begun, _BEGUN)
            self._cache, drawn = self._programs.begin(
                self._cache, self._prompts, logits, source, slots, u, allowed, sampling=self._sampling
            )
            yield self._first(begun, drawn, range(len(begun)))

    def _extend(self, rows: Sequence[Row]) -> Iterator[Drawn]:
        u, allowed = self._numbers(rows, _PROMPTS, 1)[:, 0], self._allowed(rows, _PROMPTS)
        slots = np.full(_PROMPTS, self._layout.slots, np.int32)
        slots[: len(rows)] = np.array([row.place for row in rows])
        pending = list(rows)
        while pending:
            tokens = np.zeros((_PROMPTS, _SAID), np.int32)
            begin, lengths = np.zeros(_PROMPTS, np.int32), np.zeros(_PROMPTS, np.int32)
            for at, row in enumerate(rows):
                new = row.own[row.held : row.held + _SAID] if row in pending else []
                tokens[at, : len(new)], begin[at], lengths[at] = new, len(row.prompt_ids) + row.held, len(new)
                row.held += len(new)
            self._cache, drawn = self._programs.extend(
                self._params, self._cache, tokens, slots, begin, lengths, u, allowed, sampling=self._sampling
            )
            whole = [at for at, row in enumerate(rows) if row in pending and row.new == 0]
            pending = [row for row in pending if row.new]
            if whole:
                yield self._first([rows[at] for at in whole], drawn, whole)

    def _first(self, rows: Sequence[Row], drawn: Draw, places: Sequence[int]) -> Drawn:
        """The first tokens of turns, from these places of what was drawn."""
        tokens, logprobs = np.asarray(drawn.tokens)[places, None], np.asarray(drawn.logprobs)[places, None]
        bits = None if drawn.support is None else np.asarray(drawn.support)[places, None]
        return Drawn(rows, tokens, logprobs, self._kept(rows, bits, tokens))

    def _pace(self) -> tuple[int, bool]:
        """Tokens between two looks from the host, and whether rows have choices: these look after each token."""
        chosen = any(row.choices is not None for row in self._running())
        return 1 if chosen else _WATCHED if self._settings.stop_strings else _CHUNK, chosen

    def _until(self, running: int, waiting: int) -> int:
        """Decode until no more than so many rows go on."""
        if waiting or any(row is not None and row.keep for row in self._slots):
            return running - max(1, running // 4)  # somebody waits for what they leave, or answers
        fewer = self._fewer()
        return fewer[0] if fewer and running > fewer[0] else 0

    def _fewer(self) -> list[int]:
        return self._layout.rungs(1 if self._mesh is None else self._mesh.size)

    def _shrink(self, waiting: int) -> None:
        """Half the slots, as often as the others have nothing to do."""
        taken = [slot for slot, row in enumerate(self._slots) if row is not None]
        for slots in [] if waiting else [slots for slots in self._fewer() if slots >= len(taken)]:
            self._cache = self._programs.shrink(self._cache, np.array([*taken, *[0] * (slots - len(taken))], np.int32))
            self._slots = [*(self._slots[slot] for slot in taken), *[None] * (slots - len(taken))]
            taken = list(range(len(taken)))
            self._layout = replace(self._layout, slots=slots)
        for slot, row in enumerate(self._slots):
            if row is not None:
                row.place = slot

    def _prepare(self) -> None:
        """Compile what runs now and when fewer slots are left, so that nothing has to be compiled later in a run.

        Slots that take no part stand in for those to come: nothing is computed.
        """
        chunk, chosen = self._pace()
        key = (self._layout, self._sampling, chunk, chosen, self._continued)
        if key in self._programs.prepared:
            return
        self._programs.prepared.add(key)
        zeros, bits = partial(np.zeros, dtype=np.int32), -(-self._config.vocab_size // 8)

        def allowed(rows: int) -> Any:
            return np.full((rows, bits), 255, np.uint8) if chosen else None

        def rest(cache: Any, slots: int) -> Any:
            at = np.full(slots, self._layout.positions, np.int32)
            u: Any = np.zeros((slots, chunk), np.float32)
            decode, none = partial(self._programs.decode, sampling=self._sampling), zeros(slots)
            found = decode(self._params, cache, none, at, none, np.int32(0), u, allowed(slots))
            if not self._continued:
                return found.state
            # conversations come and go
            outside, none, u = np.full(_PROMPTS, slots, np.int32), zeros(_PROMPTS), np.zeros(_PROMPTS, np.float32)
            said = np.zeros((_PROMPTS, _SAID), np.int32)
            cache, _ = self._programs.extend(
                self._params, found.state, said, outside, none, none, u, allowed(_PROMPTS), sampling=self._sampling
            )
            outside, u = np.full(_BEGUN, slots, np.int32), np.zeros(_BEGUN, np.float32)
            prompts, logits = self._empty(_PROMPTS, self._layout.prompt), self._no_logits()
            cache, _ = self._programs.begin(
                cache, prompts, logits, zeros(_BEGUN), outside, u, allowed(_BEGUN), sampling=self._sampling
            )
            return cache

        cache = self._cache = rest(self._cache, self._layout.slots)
        for slots in self._fewer():
            self._programs.prepared.add((replace(self._layout, slots=slots), *key[1:]))
            cache = rest(self._programs.shrink(cache, zeros(slots)), slots)

    def _no_logits(self) -> Any:
        wide = jnp.promote_types(self._params["embedding"].dtype, jnp.float32)
        return jnp.zeros((_PROMPTS, self._config.vocab_size), wide)

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
                ids = row.allowed()
                if ids is not None:
                    bits[at] = 0
                    np.bitwise_or.at(bits[at], ids // 8, (128 >> (ids % 8)).astype(np.uint8))
        return bits

    def _kept(
        self, rows: Sequence[Row], bits: NDArray[np.uint8] | None, tokens: NDArray[np.integer[Any]]
    ) -> list[list[IntArray | None]] | None:
        """What each token could have been, where that is recorded; a row with choices draws one token at a time."""
        if bits is None:
            return [[row.allowed()] for row in rows] if any(row.choices is not None for row in rows) else None
        size = self._config.vocab_size
        return [
            [
                np.flatnonzero(np.unpackbits(one, count=size)).astype(np.int64) if token >= 0 else None
                for one, token in zip(of_row, of_tokens, strict=True)
            ]
            for of_row, of_tokens in zip(bits, tokens.tolist(), strict=True)
        ]

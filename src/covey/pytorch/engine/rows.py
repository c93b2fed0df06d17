"""What a session keeps of each conversation, and counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from covey.errors import GenerationError
from covey.pytorch.engine.cache import PromptBlock
from covey.rollout.choices import Choices, following, only_way_on
from covey.rollout.stop import StopMatcher
from covey.types import FinishReason, IntArray, SamplingSettings


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one session did.

    Attributes:
        prefill_tokens: tokens computed that were not sampled: prompts, once each, and what was said in between.
        decoded_tokens: tokens sampled, the first of each turn included.
        decode_steps: forward passes of the decode batch.
        peak_batch: most rows in the decode batch.
        prefill_seconds: time in forward passes of such tokens.
        decode_seconds: time in decode forward passes. On a GPU, work is counted where it is waited for: in
            sampling.
        sampling_seconds: time in drawing tokens and stop rules.
        cache_bytes: memory held for keys and values.
        step_rows: rows of each decode step.
        step_seconds: seconds of its forward pass.
    """

    prefill_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    peak_batch: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sampling_seconds: float = 0.0
    cache_bytes: int = 0
    step_rows: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()


@dataclass(slots=True)
class Counters:
    """The same while the session goes on."""

    prefill_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    sampling_seconds: float = 0.0
    # rows and seconds of each decode step, the latest ones where a server's session goes on for days
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=1 << 16))

    def stats(self, cache_bytes: int) -> GenerationStats:
        rows, seconds = tuple(r for r, _ in self.steps), tuple(s for _, s in self.steps)
        return GenerationStats(
            prefill_tokens=self.prefill_tokens,
            decoded_tokens=self.decoded_tokens,
            decode_steps=len(rows),
            peak_batch=max(rows, default=0),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=sum(seconds),
            sampling_seconds=self.sampling_seconds,
            cache_bytes=cache_bytes,
            step_rows=rows,
            step_seconds=seconds,
        )


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A distinct first prompt."""

    token_ids: IntArray
    users: int = 0  # rows that still need it
    block: PromptBlock | None = None
    logits: Tensor | None = None  # [V] after its last token, while rows wait for it
    broken: bool = False  # its logits are not finite


@dataclass(slots=True, eq=False)
class Row:
    """One conversation: a prompt, and what was sampled and said after it. A plain completion has one turn.

    Attributes:
        own: every token after the prompt.
        held: how many of them have their keys and values in the slot.
        turn: where in `own` the present turn begins.
        choices: the only sequences that the present turn may be; None = any.
        settings: how its tokens are drawn.
        versions: (token of the turn, version of the weights that it and those after it were drawn with), in order.
        finish_reason: why the turn is over; None while it goes on.
        error: what went wrong with this row alone; its turn is over.
    """

    prompt: SharedPrompt
    limit: int
    key: int
    keep: bool
    settings: SamplingSettings
    matcher: StopMatcher | None
    own: list[int] = field(default_factory=list)
    held: int = 0
    turn: int = 0
    logprobs: list[float] = field(default_factory=list)
    support: list[IntArray] = field(default_factory=list)
    choices: Choices | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: GenerationError | None = None

    @property
    def cuts(self) -> bool:
        """Some tokens may not be drawn, and which ones may is to be kept."""
        drawn = self.settings
        cut = drawn.top_k > 0 or drawn.top_p < 1 or drawn.min_p > 0
        return self.choices is not None or (drawn.keep_support and cut)

    @property
    def sampled(self) -> int:
        """Tokens of the present turn."""
        return len(self.own) - self.turn

    @property
    def new(self) -> int:
        """Tokens whose keys and values are not in the slot yet."""
        return len(self.own) - self.held

    def allowed(self) -> IntArray | None:
        """Ids that may come next, ascending; None = any."""
        return following(self.choices, self.own[self.turn :])

    def only_way_on(self) -> tuple[int, ...] | None:
        """What is left of the one sequence that the turn can still become; None = there are several, or any."""
        return only_way_on(self.choices, self.own[self.turn :])

    def history(self) -> IntArray:
        """All tokens, prompt first."""
        return np.concatenate([self.prompt.token_ids, np.array(self.own, dtype=np.int64)])

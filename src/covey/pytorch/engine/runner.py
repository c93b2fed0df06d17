"""What the scheduler asks of a model: logits after whole prompts, and after one more token of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from covey.pytorch.engine.attention import Attention
from covey.pytorch.engine.cache import LayerShape
from covey.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass over M packed tokens of n sequences; nothing is padded.

    Attributes:
        token_ids: `[M]`.
        positions: `[M]` place of each token in its own sequence.
        last: `[n]` which of the M tokens are the last of their sequence; None when each of them is (decode).
        attention: stores and attends.
        histories: returns the n sequences whole, for runners that keep no cache.
    """

    token_ids: Tensor
    positions: Tensor
    last: Tensor | None
    attention: Attention
    histories: Callable[[], Sequence[IntArray]]


class Runner(Protocol):
    """A copy of a model's weights and a way to run them."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        """What each layer stores in the cache."""
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights, by their names in the bare model, as they are now."""
        ...

    def release(self) -> None:
        """Give back what memory can be given back until the next `load`."""
        ...

    def forward(self, step: Step) -> Tensor:
        """Logits `[n, V]` after the last token of each sequence."""
        ...

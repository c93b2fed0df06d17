"""Questions about small generated pictures: how many shapes there are, and which bar is the tallest."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from PIL import Image, ImageDraw

from covey.errors import ConfigError
from covey.rewards import completion_text
from covey.tasks.base import Task

SIZE = 48
"""Width and height of a picture in pixels."""
_EVAL_SEED = 20_261_127
_CELL = SIZE // 4


def _dark(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(0, 130) for _ in range(3))


def _count(draw: ImageDraw.ImageDraw, rng: random.Random) -> str:
    """1 to 8 discs and squares of 6 to 9 pixels, in cells of a grid of 4 x 4; they may touch."""
    number = rng.randint(1, 8)
    for cell in rng.sample(range(16), number):
        x, y = cell % 4 * _CELL + rng.randint(0, 3), cell // 4 * _CELL + rng.randint(0, 3)
        side = rng.randint(6, 9)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + side, y + side), fill=_dark(rng))
    return str(number)


def _bars(draw: ImageDraw.ImageDraw, rng: random.Random) -> str:
    """Four bars A to D of different heights from 1 to 9."""
    heights, color = rng.sample(range(1, 10), 4), _dark(rng)
    for at, height in enumerate(heights):
        draw.rectangle((3 + at * 11, 46 - height * 4.6, 10 + at * 11, 46), fill=color)
    return f"{'ABCD'[heights.index(max(heights))]} {max(heights)}"


KINDS: dict[str, tuple[str, Callable[[ImageDraw.ImageDraw, random.Random], str]]] = {
    "count": ("How many shapes?", _count),
    "bars": ("Which bar is tallest, and how tall?", _bars),
}


def draw(kind: str, rng: random.Random) -> tuple[Image.Image, str]:
    """A picture and the answer to its kind's question."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.randint(180, 255) for _ in range(3)))
    return image, KINDS[kind][1](ImageDraw.Draw(image), rng)


def rows(kinds: tuple[str, ...], number: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a dataset, the kinds in turn."""
    rng, made = random.Random(seed), []
    for at in range(number):
        kind = kinds[at % len(kinds)]
        image, answer = draw(kind, rng)
        asked = [{"role": "user", "content": KINDS[kind][0]}]
        made.append({"prompt": asked, "image": image, "answer": answer, "kind": kind})
    return made


class Shapes(Task):
    """Pictures made with a seed. An answer is right if it is exactly the number, or the letter and the number.

    Args:
        kinds: `count`, `bars`, or both joined by `+`.
        num_train, num_eval: numbers of pictures.

    Raises `ConfigError`: there is no such kind.
    """

    name: ClassVar[str] = "shapes"
    max_completion_length = 4

    def __init__(self, kinds: str = "count+bars", num_train: int = 2_000, num_eval: int = 400) -> None:
        self.kinds, self.num_train, self.num_eval = tuple(kinds.split("+")), num_train, num_eval
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ConfigError(f"kinds={kinds!r}: there is no kind {unknown[0]!r}; use {' or '.join(KINDS)}")

    @property
    def reward_funcs(self) -> list[Any]:
        def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
            texts = map(completion_text, completions)
            return [float(self.is_correct(text, {"answer": a})) for text, a in zip(texts, answer, strict=True)]

        return [right]

    def train_rows(self, seed: int) -> list[dict[str, Any]]:
        return rows(self.kinds, self.num_train, seed)

    def eval_rows(self) -> list[dict[str, Any]]:
        return rows(self.kinds, self.num_eval, _EVAL_SEED)

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        return text.split() == row["answer"].split()

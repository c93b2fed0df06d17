"""The recipe on pictures: what it draws, and which answers are right."""

import numpy as np

from covey.errors import ConfigError
from covey.recipes.shapes.shapes import Shapes
from fakes import raises


def test_pictures_of_bars_and_shapes() -> None:
    task = Shapes(num_train=40, num_eval=40)
    rows, again, other = task.train_rows(1), task.train_rows(1), task.train_rows(2)
    pixels = [np.asarray(row["image"]).astype(int) for row in rows]
    assert all((np.asarray(row["image"]) == shown).all() for row, shown in zip(again, pixels, strict=True))
    everything = [row["image"].tobytes() for row in (*rows, *other, *task.eval_rows())]
    assert len(set(everything)) == 120
    for row, shown in zip(rows, pixels, strict=True):
        inked = (shown != shown[0, 47]).any(2)  # the upper right corner is background
        if row["kind"] == "bars":
            heights = [inked[:, 6 + 11 * bar].sum() for bar in range(4)]
            letter, height = row["answer"].split()
            assert "ABCD"[int(np.argmax(heights))] == letter
            assert abs(max(heights) / 4.6 - int(height)) < 0.5
        else:  # shapes have 28 to 100 pixels each
            assert 28 * int(row["answer"]) <= inked.sum() <= 100 * int(row["answer"])


def test_right_answers() -> None:
    task = Shapes()
    for text, right in (("C 9", True), (" C  9", True), ("C9", False), ("C 8", False), ("C 9 9", False), ("", False)):
        assert task.is_correct(text, {"answer": "C 9"}) == right
    raises(ConfigError, "kinds='clocks': there is no kind 'clocks'; use count or bars", Shapes, "clocks")

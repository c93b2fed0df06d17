"""Trainers of this folder's scripts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl_runs import ROWS, made, unique_letters


@pytest.fixture
def make(model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Makes a trainer of a tiny model; for its settings see `made`."""

    def make(reward: Any = unique_letters, rows: Any = ROWS, held_out: Any = None, **what: Any) -> Any:
        return made(what.pop("model", model_folder), what.pop("out", tmp_path), reward, rows, held_out, **what)

    return make

"""Reward functions named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.errors import ConfigError
from covey.functions import load_function


def test_from_a_file_and_from_a_module(tmp_path: Path) -> None:
    file = tmp_path / "random.py"  # a name that would hide a library's
    file.write_text("def reward(completions, **columns):\n    return [2.0]\n")
    function = load_function(f"{file}:reward")
    assert function([]) == [2.0]
    assert load_function(f"{file}:reward") is function
    import random

    assert random.__file__ != str(file)
    assert load_function("math:sqrt")(4) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reward", "FILE.py:FUNCTION"),
        (":reward", "FILE.py:FUNCTION"),
        ("nowhere.py:reward", "no such file"),
        ("no_such_module:reward", "No module named"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("math:pi", "is a float"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_function(name)


def test_a_file_that_raises(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_function(f"{file}:reward")

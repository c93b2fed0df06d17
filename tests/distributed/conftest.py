"""Runs with several units in each step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "serving"), str(TESTS / "pytorch")]


@pytest.fixture
def by_units(settings: dict[str, Any]) -> dict[str, Any]:
    """Four units in each step."""
    return settings | {
        "prompts_per_step": 4,
        "groups_per_unit": 1,
        "max_steps": 4,
        "eval_steps": 2,
        "save_steps": 2,
        "temperature": 1.0,
    }

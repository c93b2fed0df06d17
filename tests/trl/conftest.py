"""The model of this folder's scripts."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(model_folder: Path) -> Path:
    return model_folder

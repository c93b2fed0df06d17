"""Puts the folder above on the import path, so that these tests can import `tiny_models`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

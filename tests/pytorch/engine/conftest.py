"""Puts the folder above on the import path, so that these tests can import `tiny_models`; one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other

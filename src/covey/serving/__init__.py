"""Sampling on an inference server, with versions of the weights that cannot be mistaken.

Names are loaded when they are asked for: the client needs no server, and reading a config needs neither.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Adapter": "covey.adapters",
    "BatchingEngine": "covey.serving.batching",
    "InferenceClient": "covey.serving.client",
    "RemoteEngine": "covey.serving.remote",
    "ServeSettings": "covey.serving.gate",
    "check_server": "covey.serving.check",
    "create_app": "covey.serving.app",
    "read_adapter": "covey.adapters",
    "upload_adapter_weights": "covey.serving.client",
    "write_adapter": "covey.pytorch.models.lora",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)

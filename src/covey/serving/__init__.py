"""Sampling on an inference server, with versions of the weights that cannot be mistaken.

Names are loaded when they are asked for: the client needs no server, and reading a config needs neither.
"""

from covey.functions import when_used

_WHERE = {
    "covey.adapters": "Adapter read_adapter",
    "covey.pytorch.models.lora": "write_adapter",
    "covey.serving.app": "create_app",
    "covey.serving.batching": "BatchingEngine",
    "covey.serving.check": "check_server",
    "covey.serving.client": "InferenceClient upload_adapter_weights",
    "covey.serving.gate": "ServeSettings",
    "covey.serving.remote": "RemoteEngine",
}
__all__ = sorted(" ".join(_WHERE.values()).split())
__getattr__ = when_used(__name__, _WHERE)

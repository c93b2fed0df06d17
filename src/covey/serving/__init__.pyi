"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.adapters import Adapter, read_adapter
from covey.pytorch.models.lora import write_adapter
from covey.serving.app import create_app
from covey.serving.batching import BatchingEngine
from covey.serving.check import check_server
from covey.serving.client import InferenceClient, upload_adapter_weights
from covey.serving.gate import ServeSettings
from covey.serving.remote import RemoteEngine

__all__ = [
    "Adapter", "BatchingEngine", "InferenceClient", "RemoteEngine", "ServeSettings", "check_server", "create_app",
    "read_adapter", "upload_adapter_weights", "write_adapter",
]  # fmt: skip

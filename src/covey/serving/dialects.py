"""The dialects by name, and those in a file."""

from __future__ import annotations

from covey.functions import load_function
from covey.serving.dialect import Dialect
from covey.serving.remote import CoveyDialect
from covey.serving.vllm import VLLMDialect

DIALECTS: dict[str, type[Dialect]] = {"covey": CoveyDialect, "vllm": VLLMDialect}


def find_dialect(kind: str) -> type[Dialect]:
    """Returns the class that `server.inference_server_kind` names.

    Raises:
        ConfigError: no such file or class.
    """
    return DIALECTS.get(kind) or load_function(kind)  # type: ignore[return-value]

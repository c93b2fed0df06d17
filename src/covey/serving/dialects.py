"""The dialects by name, and those in a file."""

from __future__ import annotations

from covey.errors import ConfigError
from covey.functions import load_function
from covey.serving.dialect import Dialect
from covey.serving.remote import CoveyDialect
from covey.serving.sglang import SGLangDialect
from covey.serving.vllm import VLLMDialect

DIALECTS: dict[str, type[Dialect]] = {"covey": CoveyDialect, "vllm": VLLMDialect, "sglang": SGLangDialect}


def find_dialect(kind: str) -> type[Dialect]:
    """Returns the class that `server.inference_server_kind` names.

    Raises:
        ConfigError: no such file or class.
    """
    if kind in DIALECTS:
        return DIALECTS[kind]
    found = load_function(kind)
    if not isinstance(found, type) or not issubclass(found, Dialect):
        raise ConfigError(
            f"server.inference_server_kind={kind!r}: it is no class derived from covey.serving.dialect.Dialect"
        )
    missing = [name for name in ("publish", "request", "read") if getattr(found, name) is getattr(Dialect, name)]
    if missing:
        raise ConfigError(f"server.inference_server_kind={kind!r}: it lacks {', '.join(missing)}; add it")
    return found

"""From an address to a server that listens on it."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

from covey.errors import ConfigError
from covey.serving.connections import ConnectionLimits, Connections


def uvicorn_server(app: Any, limits: ConnectionLimits, **options: Any) -> uvicorn.Server:
    """What runs the application, with connections that may not wait for ever."""
    settings: dict[str, Any] = {
        "http": Connections(limits).protocol,
        "ws": "none",
        "log_level": "warning",
        "timeout_keep_alive": int(limits.idle_seconds),
        "timeout_graceful_shutdown": 15,
        "h11_max_incomplete_event_size": 64 << 10,
    }
    return uvicorn.Server(uvicorn.Config(app, **(settings | options)))


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address; port 0 = any free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise ConfigError(f"{host}:{port}: cannot be listened on ({error}); use another --port") from error
    return listening

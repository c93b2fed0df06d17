"""Web pages that reach a server without a token through a browser on its machine: their requests are refused."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def origin_problem(headers: Mapping[str, str], listening: str) -> str:
    """Why a request seems to come from a web page of somebody else; "" if it does not.

    A browser sends any page's forms without asking, and says in `Origin` whose they are. A page may also let its own
    name lead to loopback (DNS rebinding): then `Host` is that name. Names without a dot are nobody's on the internet.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    name, port = _parts(f"//{host}")
    if is_loopback(listening) and ("." in name.rstrip(".") or ":" in name) and not is_loopback(name):
        return (
            f"Host: {host:.100}: a server on loopback without a token answers to localhost and 127.0.0.1 only; use one "
            "of them, or start it with --token"
        )
    if origin is None:
        return ""
    page = _parts(origin)
    if page[0] and page[1] == port and (page[0] == name or (is_loopback(page[0]) and is_loopback(name))):
        return ""
    return (
        f"Origin: {origin:.100}: web pages of another origin may not use a server without a token; start it with "
        "--token, or send no Origin"
    )


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine alone."""
    if host.rstrip(".") == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parts(url: str) -> tuple[str, int]:
    """Host and port; "" for what has none."""
    try:
        split = urlsplit(url)
        return (split.hostname or "").lower(), split.port or (443 if split.scheme == "https" else 80)
    except ValueError:
        return "", 0

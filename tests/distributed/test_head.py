"""A head that answers, falls silent for a while, and is lost."""

from __future__ import annotations

import socket

import pytest

from covey.distributed import head as head_module
from covey.distributed.head import Head
from covey.errors import ClusterLostError


def test_a_head_is_lost_when_it_has_been_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"t": 100.0}
    monkeypatch.setattr(head_module.time, "monotonic", lambda: now["t"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head = Head(address)
        for _ in range(20):
            now["t"] += 3.0
            head.check()
            server.accept()[0].close()
    now["t"] += 1000.0
    head.check()  # nobody has asked meanwhile: it may come back
    now["t"] += 19.0
    head.check()
    assert not head.lost
    now["t"] += 2.0
    with pytest.raises(ClusterLostError, match=f"{address}, has not answered for 20 s.*start again") as caught:
        head.check()
    assert caught.value.exit_status == 75
    assert head.lost
    with pytest.raises(ClusterLostError):
        head.check()

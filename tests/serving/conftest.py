"""A server with a tiny model for the tests of a file; what they do to it they take back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server

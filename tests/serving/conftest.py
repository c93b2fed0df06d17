"""Servers with a tiny model: one for the tests of a file, which take back what they do to it, and one for each test."""

from collections.abc import Iterator

import pytest
from servers import RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


@pytest.fixture
def fresh() -> Iterator[RunningServer]:
    with serving() as server:
        yield server

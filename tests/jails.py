"""Whether this host lets a jail be built; tests that need one are skipped with the reason where it does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from covey.errors import RewardError
from covey.rewards import Sandbox, TestHarness
from covey.rewards.jail import sandbox

REFUSE = "from jail import confine\nconfine.enter_namespaces = lambda: 'not allowed here'\nfrom jail import zygote\n"
"""Begins a jail as on a host that has no namespaces to give."""
MODES = ["namespace", pytest.param("landlock", marks=pytest.mark.slow)]


@cache
def missing() -> str:
    """Why there can be no jail here, "" if there can."""
    try:
        Sandbox().close()
    except RewardError as error:
        return str(error)
    return ""


needs_jail = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a jail")


@contextmanager
def jailed(mode: str, limits: Any) -> Iterator[TestHarness]:
    """A harness whose jail keeps files away by `mode`."""
    with pytest.MonkeyPatch.context() as patch:
        if mode == "landlock":
            refuse_namespaces(patch)
        harness = TestHarness(limits, workers=2)
    with harness:
        assert harness._sandbox.protections.files == mode
        yield harness


def refuse_namespaces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sandbox, "_START", sandbox._START.replace("from jail import zygote\n", REFUSE))

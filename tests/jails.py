"""Whether this host lets a jail be built; tests that need one are skipped with the reason where it does not."""

from __future__ import annotations

from functools import cache

import pytest

from covey.errors import RewardError
from covey.rewards import Sandbox


@cache
def missing() -> str:
    """Why there can be no jail here, "" if there can."""
    try:
        Sandbox().close()
    except RewardError as error:
        return str(error)
    return ""


needs_jail = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a jail")

"""The jail (`covey.rewards.jail`, which knows nothing of Covey) as Covey uses it: its errors are a `RewardError`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from covey.errors import RewardError
from covey.rewards.jail import harness, sandbox
from covey.rewards.jail.errors import JailError

P = ParamSpec("P")
T = TypeVar("T")


def _translated(call: Callable[P, T]) -> Callable[P, T]:
    @wraps(call)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except JailError as error:
            raise RewardError(str(error), function="TestHarness") from None

    return translated


class Sandbox(sandbox.Sandbox):
    """`covey.rewards.jail.sandbox.Sandbox`, whose errors are a `RewardError`."""

    __init__ = _translated(sandbox.Sandbox.__init__)
    spawn = _translated(sandbox.Sandbox.spawn)


class TestHarness(harness.TestHarness):
    """`covey.rewards.jail.harness.TestHarness`, whose errors are a `RewardError`."""

    __init__ = _translated(harness.TestHarness.__init__)
    run = _translated(harness.TestHarness.run)


split_check = _translated(harness.split_check)

"""Runs hostile Python. Needs nothing but the standard library, and nothing of Covey: see the README in this folder.

On this side: `harness` (does a program pass its tests?) over `sandbox` (confined processes), with `programs`. On the
other: `zygote` forks the confined ones, `inside` is what they do, `confine` is what they cannot do. On both: `messages`
and `seccomp`.

Here is what the jail raises; nothing else leaves it but `ValueError` for messages that are too long. This file imports
nothing, since the process that forks the confined ones loads it too.
"""


class JailError(RuntimeError):
    """No jail can be built on this host, or what it was asked for cannot be done: broken tests, a missing package."""


class JailEndedError(JailError):
    """The process that forks confined ones is gone, and with it all that it has started; start another `Sandbox`."""


class ProcessEndedError(Exception):
    """A confined process is gone or was stopped."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

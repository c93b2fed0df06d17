"""What the jail raises; nothing else leaves it but `ValueError` for messages that are too long."""


class JailError(RuntimeError):
    """No jail can be built on this host, or what it was asked for cannot be done: broken tests, a missing package."""


class JailEndedError(JailError):
    """The process that forks confined ones is gone, and with it all that it has started; start another `Sandbox`."""


class ProcessEndedError(Exception):
    """A confined process is gone or was stopped."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

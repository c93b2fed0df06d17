"""Verifiers for the tests of process pools: they must be importable there."""

import os
import time

from covey.rewards.verifier import Verifier


class Slow(Verifier):
    def verify(self, prompt: str, completion: str) -> float | None:
        if completion == "forever":
            while True:  # a signal's handler would run here, a library busy in C would not let it
                time.sleep(0.01)
        if completion == "exit":
            os._exit(3)
        if completion == "raise":
            raise ValueError("no")
        if completion == "memory":
            return float(len(bytearray(1 << 36)))
        return None if completion == "none" else float(os.getpid() if completion == "pid" else len(completion))

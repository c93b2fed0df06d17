"""When memory runs out: the same work once more, in smaller pieces."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    """True when an error says that memory ran out, in one of the ways in which libraries say it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text


def within_memory(run: Callable[[], Result], shrink: Callable[[BaseException], None]) -> Result:
    """Run; as often as memory runs out, give back what can be given back, shrink, and run again from the start."""
    while True:
        try:
            return run()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            shrink(error)
        # Outside the except block, so that the traceback no longer holds the failed run's tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

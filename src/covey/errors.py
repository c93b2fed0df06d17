"""The exception tree.

Every message names the value, the reason and the fix, in that order. The command line prints the message alone, without
a traceback; anything that is not a `CoveyError` is our own bug and is shown with one.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_stack, walk_tb
from typing import ClassVar

_INSTALLED = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = os.path.join(os.path.dirname(os.path.realpath(__file__)), "")


def raised_at(error: BaseException) -> str:
    """Where in somebody's own code an exception came from: ` at rewards.py:17, in correct`.

    Of its traceback the innermost line that is neither Covey's, Python's nor an installed package's, or else the
    innermost that is not Covey's; "" if there is none.
    """
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_tb(error.__traceback__)]
    return place_of(frames[::-1])


def running_at(thread: int | None) -> str:
    """The same of where a thread is now."""
    frame = sys._current_frames().get(thread or 0)
    return place_of([(each.f_code.co_filename, line, each.f_code.co_name) for each, line in walk_stack(frame)])


def place_of(frames: Sequence[tuple[str, object, str]]) -> str:
    """The same of files, lines and functions, the innermost first."""
    for others in ((*_INSTALLED, _OWN), (_OWN,)):
        for file, line, name in frames:
            if not os.path.realpath(file).startswith(others) and not file.startswith("<frozen"):
                return f" at {file}:{line}, in {name}"
    return ""


class CoveyError(Exception):
    """Base of everything that Covey raises on purpose."""

    exit_status: ClassVar[int] = 2
    """Of a command that it ends."""


class ConfigError(CoveyError, ValueError):
    """A setting is unknown, out of range, or cannot be combined with another one."""


class DataError(CoveyError, ValueError):
    """A dataset cannot be read, is empty, lacks a column, or holds a prompt that does not fit."""


class ModelError(CoveyError, ValueError):
    """A model or adapter cannot be loaded, or does not fit the rest of the run."""


class RewardError(CoveyError, RuntimeError):
    """A reward function raised, hung, or returned something that is no reward.

    The run stops at a resumable point; `function` names the reward function and `sample` is the index of the first
    offending completion in the call, where one can be named.
    """

    def __init__(self, message: str, *, function: str = "", sample: int | None = None) -> None:
        super().__init__(message)
        self.function, self.sample = function, sample


class RewardCountError(RewardError, ValueError):
    """A reward function returned more or fewer rewards than there are completions."""


class EpisodeError(CoveyError, RuntimeError):
    """An environment raised, hung, ended, or returned something that is no observation. It costs one episode."""


class GenerationError(CoveyError, RuntimeError):
    """Sampling cannot go on: a prompt exceeds the context, or weights of another version were asked for."""


class ServingError(CoveyError, RuntimeError):
    """An inference server cannot be reached, refuses, answers nonsense, or holds other weights than it should."""


class AdapterError(CoveyError, ValueError):
    """An uploaded adapter is no adapter for this model; nothing was changed."""


class ClusterLostError(CoveyError, RuntimeError):
    """The cluster that a run needs is gone, or a part of it: the same command goes on as soon as it is there again.

    `exit_status` is EX_TEMPFAIL, for whoever starts commands again.
    """

    exit_status = 75


class CheckpointError(CoveyError, RuntimeError):
    """A checkpoint is missing, incomplete, corrupt, or belongs to another run."""


class HubError(CoveyError, RuntimeError):
    """The Hugging Face hub cannot be reached, or refuses; nothing that was written here is lost."""


class RunFolderError(CoveyError, OSError):
    """The run folder cannot be created, written or read (permission, full disk, wrong folder)."""


@contextmanager
def naming(what: str, fix: str = "correct it") -> Iterator[None]:
    """Runs somebody's own code: whatever it raises becomes one `ConfigError` that names `what`, file and line.

    Errors of ours and memory that runs out stay what they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, CoveyError | MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
            raise
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}{raised_at(error)}; {fix}") from error

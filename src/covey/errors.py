"""Covey's exceptions.

Every message names the value, the reason and the fix, in that order. The command line prints the message without a
traceback. Any other exception is a bug and is shown with its traceback.
"""

from __future__ import annotations

import importlib
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
_IMPORTLIB = os.path.realpath(importlib.__file__)
_OWN = os.path.join(os.path.dirname(os.path.realpath(__file__)), "")


def raised_at(error: BaseException) -> str:
    """The place in the user's code that raised an exception: ` at rewards.py:17, in correct`.

    It is the innermost line of the traceback outside Covey, Python and installed packages, or else outside Covey and
    `importlib`; "" if there is none.
    """
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_tb(error.__traceback__)]
    return place_of(frames[::-1])


def running_at(thread: int | None) -> str:
    """The same for the current line of a thread."""
    frame = sys._current_frames().get(thread or 0)
    return place_of([(each.f_code.co_filename, line, each.f_code.co_name) for each, line in walk_stack(frame)])


def place_of(frames: Sequence[tuple[str, object, str]]) -> str:
    """The same for (file, line, function) entries, innermost first."""
    for others in ((*_INSTALLED, _OWN), (_IMPORTLIB, _OWN)):
        for file, line, name in frames:
            if not os.path.realpath(file).startswith(others) and not file.startswith("<frozen"):
                return f" at {file}:{line}, in {name}"
    return ""


class CoveyError(Exception):
    """Base class of Covey's exceptions."""

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends with this exception."""


class ConfigError(CoveyError, ValueError):
    """A setting is unknown, out of range, or cannot be combined with another one."""


class DataError(CoveyError, ValueError):
    """A dataset cannot be read, is empty, lacks a column, or holds a prompt that does not fit."""


class ModelError(CoveyError, ValueError):
    """A model or adapter cannot be loaded, or does not fit the rest of the run."""


class RewardError(CoveyError, RuntimeError):
    """A reward function raised, hung, or returned something other than rewards.

    The run stops and can be resumed. `function` is the name of the reward function, and `sample` the index of the first
    completion at fault, or None.
    """

    def __init__(self, message: str, *, function: str = "", sample: int | None = None) -> None:
        super().__init__(message)
        self.function, self.sample = function, sample


class RewardCountError(RewardError, ValueError):
    """A reward function returned more or fewer rewards than there are completions."""


class EpisodeError(CoveyError, RuntimeError):
    """An environment raised, hung, ended, or returned something other than an observation. One episode is lost."""


class GenerationError(CoveyError, RuntimeError):
    """Sampling cannot go on: a prompt exceeds the context, or weights of another version were asked for."""


class ServingError(CoveyError, RuntimeError):
    """An inference server cannot be reached, refuses, gives a wrong answer, or holds wrong weights."""


class AdapterError(CoveyError, ValueError):
    """An uploaded adapter does not fit this model; nothing was changed."""


class ClusterLostError(CoveyError, RuntimeError):
    """The cluster of a run, or a part of it, is lost. The same command continues the run when it is back.

    `exit_status` is EX_TEMPFAIL, for programs that restart commands.
    """

    exit_status = 75


class CheckpointError(CoveyError, RuntimeError):
    """A checkpoint is missing, incomplete, corrupt, or belongs to another run."""


class HubError(CoveyError, RuntimeError):
    """The Hugging Face hub cannot be reached, or refuses. Local files are complete."""


class RunFolderError(CoveyError, OSError):
    """The run folder cannot be created, written or read (permission, full disk, wrong folder)."""


@contextmanager
def naming(what: str, fix: str = "correct it") -> Iterator[None]:
    """Run the user's code: any exception becomes a `ConfigError` that names `what`, file and line.

    Covey's own exceptions and a lack of memory are not changed.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, CoveyError | MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
            raise
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}{raised_at(error)}; {fix}") from error


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text):,} characters)"


def several(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"

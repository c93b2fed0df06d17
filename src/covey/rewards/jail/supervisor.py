"""Decides for a confined process what it may have too often: threads and, where there is no quota, new files.

The kernel holds a thread that asks until the answer comes (seccomp's user notification, Linux 5.5). No limit of the
kernel's own would do: `RLIMIT_NPROC` does not hold for root, and nothing bounds the files of a plain directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
from pathlib import Path

from . import seccomp

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_QUESTION = struct.Struct("QIIiI")  # id, thread, flags, number of the call, architecture; more follows
_QUESTION_SIZE = 80
_ANSWER = struct.Struct("QqiI")
_GO_ON = 1
_MOST_FILES = 65
"""Files and directories made over a program's life, its standard input among them."""


_MOST_QUESTIONS = 20_000
"""Answered over a program's life; one that is refused counts as 21. Each costs work on this side."""


class Supervisor:
    """Answers the questions of one confined process."""

    def __init__(self, listener: int, *, threads: int) -> None:
        self.listener = listener
        self._threads, self._files, self._questions = threads, _MOST_FILES, _MOST_QUESTIONS

    def answer(self) -> bool:
        """Answer one question if there is one; False when none will be answered any more."""
        self._questions -= 1
        if self._questions < 0:  # whoever asks waits until the program's time is over
            return False
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        events = dict(poll.poll(0)).get(self.listener, 0)
        if not events & select.POLLIN:  # asking for a question would wait
            return not events
        question = bytearray(_QUESTION_SIZE)
        with contextlib.suppress(OSError):  # whoever asked is gone
            fcntl.ioctl(self.listener, _RECEIVE, question)
            number, thread, _, call, _ = _QUESTION.unpack_from(question)
            error = self._refusal(thread, call)
            self._questions -= 20 if error else 0
            try:
                fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(number, 0, -error, 0 if error else _GO_ON))
            except OSError as refused:
                if refused.errno != errno.EINVAL:
                    raise
                fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(number, 0, -errno.EPERM, 0))  # Linux before 5.5
        return True

    def close(self) -> None:
        """Closes the listener, so that whoever still asks is refused."""
        os.close(self.listener)

    def _refusal(self, thread: int, call: int) -> int:
        """The error that the call ends with, 0 = it may go on."""
        if call == seccomp.clone_number():
            return errno.EAGAIN if _threads_of(thread) >= self._threads else 0
        self._files -= 1
        return 0 if self._files >= 0 else errno.EDQUOT


def _threads_of(thread: int) -> int:
    return int(Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()[17])

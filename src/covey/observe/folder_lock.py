"""One process at a time writes a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from covey.errors import RunFolderError
from covey.files import explained
from covey.observe.records import Record, read_json

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
# Record locks do not exclude the process that holds them, so this process keeps its own list.
_held: set[str] = set()


class FolderLock:
    """One writer at a time: holds `folder/run.lock` from construction to `release`.

    The kernel's record lock is what counts: it vanishes with the process that took it, a kill included, and forked
    children do not inherit it (an orphaned reward worker must not block a resume). The process id in the file is for
    the message, and for file systems without locks, where `filelock` would give up.
    """

    NAME = "run.lock"

    def __init__(self, folder: Path) -> None:
        """Take the lock; RunFolderError where another live process, or this one, is writing this run."""
        self._path = folder / self.NAME
        self._key = os.path.realpath(self._path)
        if self._key in _held:
            raise RunFolderError(
                f"{folder} is already open for writing in this process (pid {os.getpid()}); "
                "close the first run, or choose another run.output_dir"
            )
        with explained(self._path, "lock"):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = False
            except OSError as error:
                if error.errno not in {*_NO_LOCKS, errno.EACCES, errno.EAGAIN}:
                    os.close(self._file)
                    raise
                taken = error.errno not in _NO_LOCKS or self._holder_lives()
            if taken:
                holder = self._holder()
                os.close(self._file)
                raise RunFolderError(
                    f"{folder} is being written by process {holder.get('pid', '?')} on {holder.get('host', '?')}; wait "
                    "for it to end or stop it, or choose another run.output_dir"
                )
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held.add(self._key)

    def release(self) -> None:
        """Give the lock back; the file stays, empty (deleting it could delete a lock that another process took)."""
        if self._key in _held:
            _held.discard(self._key)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)

    def _holder(self) -> Record:
        with contextlib.suppress(OSError):
            return read_json(os.pread(self._file, 4096, 0), dict) or {}
        return {}

    def _holder_lives(self) -> bool:
        holder = self._holder()
        pid = holder.get("pid")
        if not isinstance(pid, int) or holder.get("host") != socket.gethostname() or pid == os.getpid():
            return False
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, PermissionError) as error:
            return isinstance(error, PermissionError)
        return True

"""What a process can be kept from, as far as the host lets an ordinary user do it.

Once for the zygote (`build_root`): a user namespace of its own with no network, no shared memory segments, and a file
system that holds nothing but read-only system libraries and Python. Where namespaces are not to be had, Landlock
limits each process to the same paths. For each confined process (`confine`): a scratch directory of bounded size,
limits on memory, processor time, open files and file size, no privileges, and the filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable

from . import seccomp

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET, _NEWCGROUP = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x40000000,
    0x2000000,
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK = {"create": 444, "add": 445, "restrict": 446}
_READ_ACCESS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a directory
_ALL_ACCESS = (1 << 13) - 1
_libc = ctypes.CDLL(None, use_errno=True)


def system_paths() -> list[str]:
    """What Python needs to import its standard library."""
    paths = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sys.base_prefix + "/lib",
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
    ]
    real = {os.path.realpath(path) for path in paths if path and os.path.isdir(path)}
    return sorted(path for path in real if not any(path != other and path.startswith(other + "/") for other in real))


def build_root(place: str) -> str | None:
    """Move this process into a file system and namespaces of its own.

    Args:
        place: an empty directory to build in.

    Returns:
        None, or why it was not possible; then nothing has changed that matters.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWUSER | _NEWNS | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    try:
        _call("unshare", flags)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"1000 {uid} 1")
        _write("/proc/self/gid_map", f"1000 {gid} 1")
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
        for path in system_paths():
            _bind(path, place + path)
        for name in ("null", "zero", "urandom"):
            _bind(f"/dev/{name}", f"{place}/dev/{name}")
        os.mkdir(place + "/work")
        for link in ("/lib", "/lib64", "/usr/lib64"):  # they may be links into /usr
            if os.path.islink(link) and not os.path.lexists(place + link):
                os.makedirs(os.path.dirname(place + link), exist_ok=True)
                os.symlink(os.readlink(link), place + link)
        os.chdir(place)
        _call("pivot_root" if hasattr(_libc, "pivot_root") else "", b".", b".")
        _call("umount2", b".", _MNT_DETACH)
        os.chdir("/")
        _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    except OSError as error:
        return f"{error.strerror} ({error.filename or 'namespaces'})"
    return None


def confine(*, rooted: bool, scratch: str, memory: int, seconds: float, file_bytes: int, syscalls: bool) -> None:
    """Confine this process for good. What it needs later must be imported and open already.

    Args:
        rooted: `build_root` worked in its parent.
        scratch: a directory of its own, used where `rooted` is false.
        memory: bytes of address space.
        seconds: of processor time.
        file_bytes: of all files in the scratch directory where `rooted`, else of each.
        syscalls: install the filter of system calls.

    Raises:
        OSError: the host refuses something.
    """
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if rooted:
        _call("unshare", _NEWNS)
        _mount(
            "tmpfs", "/work", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, f"size={file_bytes},nr_inodes=1000,mode=700"
        )
        os.chdir("/work")
    else:
        os.chdir(scratch)
    processor = max(int(seconds) + 1, 1)
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: processor,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not rooted:
        _landlock(system_paths(), [scratch])
    _drop_capabilities()
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    if syscalls:
        seccomp.install()


def landlock_supported() -> bool:
    """Whether the kernel can limit a process to paths."""
    return bool(_libc.syscall(_LANDLOCK["create"], None, 0, 1) >= 1)


def _landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    attribute = struct.pack("Q", _ALL_ACCESS)
    ruleset = _syscall(_LANDLOCK["create"], attribute, len(attribute), 0)
    for paths, access in (
        (readable, _READ_ACCESS),
        (("/dev/null", "/dev/zero", "/dev/urandom"), 1 << 1 | 1 << 2),
        (writable, _ALL_ACCESS),
    ):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    _syscall(_LANDLOCK["add"], ruleset, 1, struct.pack("=Qi", access, fd), 0)
                finally:
                    os.close(fd)
    _syscall(_LANDLOCK["restrict"], ruleset, 0)
    os.close(ruleset)


def _drop_capabilities() -> None:
    header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    _call("capset", header, data)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS_BIND | (_MS_REC if os.path.isdir(source) else 0))
    if not source.startswith("/dev/"):
        # flags that the mount has already cannot be taken away in a user namespace: keep the strict ones
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    _call("mount", _bytes(source), _bytes(target), _bytes(kind), flags, _bytes(options), about=target)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _call(name: str, *arguments: object, about: str = "") -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), about or name)
    return result


def _syscall(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"system call {number}")
    return result


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)

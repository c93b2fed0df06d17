"""What a process can be kept from, as far as the host lets an ordinary user do it.

Once for the zygote (`build_root`): a user namespace of its own with no network, no shared memory segments, no process
to be seen but its own, and a file system that holds nothing but read-only system libraries and Python. Where namespaces
are not to be had, Landlock limits each process to the same paths. For each confined process (`confine`): a scratch
directory of bounded size, limits on memory, processor time, open files and file size, no privileges, no signals to
processes outside, and the filters of system calls.
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
from collections.abc import Callable, Iterable
from pathlib import Path

from . import seccomp

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, *(1 << bit for bit in range(25, 31))
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH, _MOUNT_SETATTR = 2, 442
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK = {"create": 444, "add": 445, "restrict": 446}
_READ_ACCESS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a directory
_ACCESS_BITS = (0, 13, 14, 15, 15, 16)
"""How many kinds of access each version of Landlock knows; later ones know what the last here does."""
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals stay within
_NO_RANDOM_ADDRESSES, _MOST_FILES = 0x40000, 64
_libc = ctypes.CDLL(None, use_errno=True)


def fix_addresses() -> None:
    """Start this program anew with addresses that are the same each time, where the host allows it.

    Sets of objects that are hashed by their address, None among them, would have another order in each jail.
    """
    now = _libc.personality(0xFFFFFFFF)
    if now >= 0 and not now & _NO_RANDOM_ADDRESSES and _libc.personality(now | _NO_RANDOM_ADDRESSES) >= 0:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def end_with_parent() -> None:
    """Be killed when the process that started this one ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def system_paths() -> tuple[list[str], list[str]]:
    """What Python needs to import its standard library, and the folders in it that it does not need.

    These are installed packages, and what lies beside shared libraries but for those of this machine's kind.
    """
    libraries = (sys.base_prefix + "/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64")
    whole = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")} | {"/usr/share/zoneinfo"}
    tops = {os.path.realpath(path) for path in (*whole, *libraries) if os.path.isdir(path)}
    hidden = []
    for folder in (entry for top in tops for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)):
        kept = os.path.dirname(folder.path) in whole or "-linux-" in folder.name or folder.name == "locale"
        kept = kept or any(f"{top}/".startswith(folder.path + "/") for top in tops)
        if not kept or folder.name in ("site-packages", "dist-packages"):
            hidden.append(folder.path)
    return sorted(path for path in tops if not any(path.startswith(other + "/") for other in tops)), sorted(hidden)


def without(path: str, hidden: list[str]) -> list[str]:
    """A path, or what it holds where something in it is hidden, in few paths and without links, which may lead out."""
    if not any(f"{other}/".startswith(path + "/") for other in hidden):
        return [path]
    return [
        inner
        for entry in os.scandir(path)
        if path not in hidden and not entry.is_symlink()
        for inner in without(entry.path, hidden)
    ]


def enter_namespaces() -> str | None:
    """Move this process into namespaces of its own; the next process that it forks is the first one there."""
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWUSER | _NEWNS | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP | _NEWPID
    try:
        _call("unshare", flags)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
    except OSError as error:
        return f"{error.strerror} ({error.filename or 'namespaces'})"
    return None


def build_root(readable: list[str], hidden: list[str]) -> str | None:
    """Give this process, which is in namespaces of its own, a file system of its own."""
    place = "/proc"  # any directory: what is mounted on it is seen in these namespaces alone
    try:
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
        for path in sorted({*readable, *hidden}):  # a directory before what is in it
            if path in hidden:
                _mount("tmpfs", place + path, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
            else:
                _bind(path, place + path)
        for path in hidden:
            _mount(None, place + path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        for name in ("null", "zero", "random", "urandom"):
            _bind(f"/dev/{name}", f"{place}/dev/{name}")
        for name, target in (("/dev/stdin", "/solution/.stdin"), ("/dev/shm", "/solution"), ("/tmp", "/solution")):
            os.symlink(target, place + name)
        os.mkdir(place + "/solution")
        for link in ("/lib", "/lib64", "/usr/lib64"):  # they may be links into /usr
            if os.path.islink(link) and not os.path.lexists(place + link):
                os.makedirs(os.path.dirname(place + link), exist_ok=True)
                os.symlink(os.readlink(link), place + link)
        os.chdir(place)
        _call("pivot_root", b".", b".")
        _call("umount2", b".", _MNT_DETACH)
        os.chdir("/")
        _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    except OSError as error:
        return f"{error.strerror} ({error.filename or 'namespaces'})"
    return None


def confine(
    *,
    rooted: bool,
    scratch: str,
    readable: list[str],
    memory: int,
    seconds: float,
    file_bytes: int,
    syscalls: bool,
    listening: Callable[[int], object],
) -> None:
    """Confine this process for good. What it needs later must be imported and open already.

    Raises `OSError`: the host refuses something.
    """
    end_with_parent()
    if rooted:
        _call("unshare", _NEWNS)
        options = f"size={file_bytes},nr_inodes=1000,mode=700"
        _mount("tmpfs", "/solution", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
        os.mkdir("/solution/work")
        os.chdir("/solution/work")
    else:
        os.chdir(scratch)
    limits = {"AS": memory, "CPU": max(int(seconds) + 1, 1), "FSIZE": file_bytes, "NOFILE": 64}
    for kind, value in (limits | dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0)).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _landlock(() if rooted else readable, () if rooted else [scratch])
    _call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6))  # no capabilities
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    if syscalls:
        listener = seccomp.supervise(files=not rooted)
        if listener is not None:
            listening(listener)
            os.close(listener)
        seccomp.install(rooted=rooted, supervised=listener is not None)


def share_file_bytes() -> None:
    """Without a file system of its own nothing bounds all files together: each may have its share of what they may."""
    bound, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bound // _MOST_FILES, bound // _MOST_FILES))


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 = it has none."""
    return max(int(_libc.syscall(_LANDLOCK["create"], None, 0, 1)), 0)


def _landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Limit this process to paths, if any are given, and its signals to itself where the kernel can."""
    version = landlock_version()
    every = (1 << _ACCESS_BITS[min(version, len(_ACCESS_BITS) - 1)]) - 1 if writable else 0
    attribute = struct.pack("QQQ", every, 0, _SCOPES) if version >= 6 else struct.pack("Q", every)
    if not every and version < 6:
        return
    ruleset = _syscall(_LANDLOCK["create"], attribute, len(attribute), 0)
    devices = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom") if writable else ()
    listed = [path for path in sys.path if writable and os.path.isdir(path)]  # or nothing is found to import
    for paths, access in ((readable, _READ_ACCESS), (listed, 1 << 3), (devices, 1 << 1 | 1 << 2), (writable, every)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                file_access = access if os.path.isdir(path) else access & (1 << 0 | 1 << 1 | 1 << 2)
                try:
                    _syscall(_LANDLOCK["add"], ruleset, 1, struct.pack("=Qi", file_access, fd), 0)
                finally:
                    os.close(fd)
    _syscall(_LANDLOCK["restrict"], ruleset, 0)
    os.close(ruleset)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS_BIND | (_MS_REC if os.path.isdir(source) else 0))
    # A device can be written to all the same, but its mode and its times are kept.
    kept = _MS_NOEXEC if source.startswith("/dev/") else _MS_NODEV
    attributes = struct.pack("QQQQ", _MS_RDONLY | _MS_NOSUID | kept, 0, 0, 0)  # these have the flags' numbers
    below = 0x8000  # with what is below
    if _libc.syscall(_MOUNT_SETATTR, -100, target.encode(), below, attributes, len(attributes)) < 0:
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)


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
    return _call("syscall", number, *arguments, about=f"system call {number}")

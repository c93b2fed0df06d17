"""Filters of system calls for a process that has all that it needs.

It may compute, allocate memory, and read and write files that it can see. It may not start processes, use a network,
trace, mount, signal another process, or reach for the kernel's rarer parts.

`install` lists what is allowed, some calls with some arguments only; every other call fails with EPERM, and some end
the process, since no honest program makes them. A call made through another architecture's table ends it too.
`supervise` puts what can be had too often (threads, and files where there is no quota) before whoever holds its
listener.

A `Supervisor` decides for a confined process what may be had too often. The kernel holds a thread that asks until the
answer comes (seccomp's user notification, Linux 5.5). No limit of the kernel's own would do: `RLIMIT_NPROC` does not
hold for root, and nothing bounds the files of a plain directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ALLOWED = (
    "read write close fstat stat lstat newfstatat statx poll ppoll lseek mmap mprotect munmap mremap brk madvise "
    "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack pread64 pwrite64 readv writev preadv pwritev access "
    "faccessat faccessat2 select pselect6 sched_yield nanosleep clock_nanosleep clock_gettime clock_getres "
    "gettimeofday time times getpid gettid getppid getuid geteuid getgid getegid getresuid getresgid getgroups "
    "getpgrp dup dup2 dup3 fsync fdatasync ftruncate fallocate fadvise64 getdents getdents64 "
    "getcwd rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat link linkat symlink symlinkat "
    "readlink readlinkat open openat creat umask getrlimit getrusage getpriority sysinfo uname futex set_robust_list "
    "rseq set_tid_address exit exit_group getrandom pipe pipe2 eventfd eventfd2 "
    "epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 restart_syscall arch_prctl membarrier "
    "getcpu copy_file_range sendfile msync alarm getitimer setitimer pause rt_sigpending "
    "rt_sigtimedwait rt_sigsuspend recvfrom shutdown getsockname getpeername"
)
_ATTRIBUTES = "truncate chmod fchmod fchmodat utime utimes futimesat utimensat chdir fchdir statfs fstatfs"
"""Landlock does not keep these away from files of the same user; in a file system of its own they do no harm."""
_FATAL = "ptrace process_vm_readv process_vm_writev kexec_load init_module finit_module bpf reboot"
_MAKES = "creat mkdir mkdirat link linkat symlink symlinkat"
"""Calls that always make something new; `open` and `openat` do with some flags."""


def _numbers(table: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split("=") for entry in table.split())}


_X86_64 = _numbers(
    "read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 "
    "rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 access=21 "
    "pipe=22 select=23 sched_yield=24 mremap=25 msync=26 mincore=27 madvise=28 dup=32 dup2=33 pause=34 nanosleep=35 "
    "getitimer=36 alarm=37 setitimer=38 getpid=39 sendfile=40 sendto=44 recvfrom=45 shutdown=48 getsockname=51 "
    "getpeername=52 socketpair=53 getsockopt=55 clone=56 exit=60 uname=63 fcntl=72 flock=73 fsync=74 fdatasync=75 "
    "truncate=76 ftruncate=77 getdents=78 getcwd=79 chdir=80 fchdir=81 rename=82 mkdir=83 rmdir=84 creat=85 link=86 "
    "unlink=87 symlink=88 readlink=89 chmod=90 fchmod=91 umask=95 gettimeofday=96 getrlimit=97 getrusage=98 "
    "sysinfo=99 times=100 ptrace=101 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110 getpgrp=111 "
    "getgroups=115 getresuid=118 getresgid=120 getpgid=121 getsid=124 rt_sigpending=127 rt_sigtimedwait=128 "
    "rt_sigsuspend=130 sigaltstack=131 utime=132 statfs=137 fstatfs=138 getpriority=140 mlock=149 munlock=150 "
    "arch_prctl=158 reboot=169 init_module=175 gettid=186 time=201 futex=202 sched_getaffinity=204 epoll_create=213 "
    "getdents64=217 set_tid_address=218 restart_syscall=219 fadvise64=221 clock_gettime=228 clock_getres=229 "
    "clock_nanosleep=230 exit_group=231 epoll_wait=232 epoll_ctl=233 tgkill=234 utimes=235 kexec_load=246 openat=257 "
    "mkdirat=258 futimesat=261 newfstatat=262 unlinkat=263 renameat=264 linkat=265 symlinkat=266 readlinkat=267 "
    "fchmodat=268 faccessat=269 pselect6=270 ppoll=271 set_robust_list=273 get_robust_list=274 splice=275 tee=276 "
    "utimensat=280 epoll_pwait=281 eventfd=284 fallocate=285 eventfd2=290 epoll_create1=291 dup3=292 pipe2=293 "
    "preadv=295 pwritev=296 prlimit64=302 getcpu=309 process_vm_readv=310 process_vm_writev=311 finit_module=313 "
    "renameat2=316 getrandom=318 memfd_create=319 bpf=321 membarrier=324 copy_file_range=326 statx=332 rseq=334 "
    "close_range=436 faccessat2=439 epoll_pwait2=441"
)
_AARCH64 = _numbers(
    "getcwd=17 eventfd2=19 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 dup=23 dup3=24 fcntl=25 ioctl=29 flock=32 "
    "mkdirat=34 unlinkat=35 symlinkat=36 linkat=37 renameat=38 statfs=43 fstatfs=44 truncate=45 ftruncate=46 "
    "fallocate=47 faccessat=48 chdir=49 fchdir=50 fchmod=52 fchmodat=53 openat=56 close=57 pipe2=59 getdents64=61 "
    "lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68 preadv=69 pwritev=70 sendfile=71 pselect6=72 "
    "ppoll=73 splice=76 tee=77 readlinkat=78 newfstatat=79 fstat=80 fsync=82 fdatasync=83 utimensat=88 exit=93 "
    "exit_group=94 set_tid_address=96 futex=98 set_robust_list=99 get_robust_list=100 nanosleep=101 getitimer=102 "
    "setitimer=103 kexec_load=104 init_module=105 clock_gettime=113 clock_getres=114 clock_nanosleep=115 ptrace=117 "
    "sched_getaffinity=123 sched_yield=124 restart_syscall=128 tgkill=131 sigaltstack=132 rt_sigsuspend=133 "
    "rt_sigaction=134 rt_sigprocmask=135 rt_sigpending=136 rt_sigtimedwait=137 rt_sigreturn=139 getpriority=141 "
    "reboot=142 getresuid=148 getresgid=150 times=153 getpgid=155 getsid=156 getgroups=158 uname=160 getrlimit=163 "
    "getrusage=165 umask=166 getcpu=168 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176 "
    "getegid=177 gettid=178 sysinfo=179 socketpair=199 getsockname=204 getpeername=205 sendto=206 recvfrom=207 "
    "getsockopt=209 shutdown=210 brk=214 munmap=215 mremap=216 clone=220 mmap=222 fadvise64=223 mprotect=226 "
    "msync=227 mlock=228 munlock=229 mincore=232 madvise=233 prlimit64=261 process_vm_readv=270 process_vm_writev=271 "
    "finit_module=273 renameat2=276 getrandom=278 memfd_create=279 bpf=280 membarrier=283 copy_file_range=285 "
    "statx=291 rseq=293 close_range=436 faccessat2=439 epoll_pwait2=441"
)
_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _FAIL, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_EPERM, _EAGAIN, _ENOTTY, _ENOSYS = 1, 11, 25, 38
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_WHOLE = 0xFFFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_THREAD = 0x10F00  # with memory, files and signals shared: a table of files of its own has a limit of its own
_OWNER = 0o700  # of a directory's mode
_CREATE, _TRUNCATE, _ASYNC = 0o100 | 0o20000000, 0o1000, 0o20000  # O_CREAT or O_TMPFILE, O_TRUNC, O_ASYNC

Instruction = tuple[int, int, int, int]
"""(operation, instructions to skip if true, if false, operand): the kernel's byte code."""


class Test(NamedTuple):
    """Whether an argument's half, masked, is one of some values."""

    argument: int
    values: tuple[int, ...]
    mask: int = _WHOLE
    high: bool = False


# Each call is allowed where all tests of one of its lines hold. What is not here: whoever may name the owner of a
# descriptor's signals (F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE, FIOSETOWN, O_ASYNC) may have the kernel kill others,
# and whoever may ask for a lock's owner (F_GETLK), another process's clock or place, or whether pages of a file are in
# memory, has word from its neighbours, as with `flock` of a library, which does nothing and succeeds.
_RULES: dict[str, tuple[tuple[Test, ...], ...]] = {
    "clone": ((Test(0, (_CLONE_THREAD,), _CLONE_THREAD),),),  # threads, no processes
    "fcntl": (
        (Test(1, (0, 1, 2, 3, 6, 7, 37, 38, 1030, 1032, 1034)),),  # duplicates, flags to read, locks
        (Test(1, (4,)), Test(2, (0,), _ASYNC)),  # F_SETFL
    ),
    "ioctl": ((Test(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),),  # is it a terminal, FIONREAD, FIONBIO
    "prlimit64": ((Test(0, (0,)),),),  # its own limits
    "close_range": ((Test(2, (0, 4)),),),  # not UNSHARE, likewise
    "socketpair": ((Test(0, (1,)), Test(1, (1,), 0xF)),),  # of streams, within the process
    "sendto": ((Test(4, (0,)), Test(4, (0,), high=True)),),  # to no address
    "getsockopt": ((Test(1, (1,)), Test(2, (3, 4, 7, 8, 30, 38, 39))),),  # type, buffers; not who made the channel
    "flock": (),
    **{name: ((Test(0, tuple(range(12))),),) for name in ("clock_gettime", "clock_getres", "clock_nanosleep")},
    **{name: ((Test(0, (0,)),),) for name in ("getpgid", "getsid", "sched_getaffinity")},
    "getpriority": ((Test(1, (0,)),),),
}
# Where it makes files in a plain directory: none that those who remove it after the program could not enter.
_ENTERED: dict[str, tuple[tuple[Test, ...], ...]] = {
    "mkdir": ((Test(1, (_OWNER,), _OWNER),),),
    "mkdirat": ((Test(2, (_OWNER,), _OWNER),),),
    "umask": ((Test(0, (0,), _OWNER),),),
}
_ERRORS = {"clone": _EAGAIN, "ioctl": _ENOTTY, "sched_getaffinity": _ENOSYS, "flock": 0}


def supported() -> bool:
    """Whether the filters know this machine's system calls."""
    return platform.machine() in _TABLES and platform.system() == "Linux"


def install(*, rooted: bool, supervised: bool) -> None:
    """Put this process under the filter of what is allowed, for good. Raises `OSError`: the kernel refuses."""
    _set(_allowing(rooted, supervised), 0)


def prepare(*, rooted: bool) -> None:
    """Write the filters, which then need not be written in each process that is forked."""
    _asking(not rooted)
    for supervised in (True, False):
        _allowing(rooted, supervised)


@cache
def _allowing(rooted: bool, supervised: bool) -> bytes:
    rules, allowed = dict(_RULES), _ALLOWED.split()
    if rooted:
        allowed += _ATTRIBUTES.split()
    else:
        # an old Landlock lets a file be emptied that was opened for reading
        flags = (0, 1, 2, _TRUNCATE | 1, _TRUNCATE | 2)
        mask = _TRUNCATE | 3 | (0 if supervised else _CREATE)
        rules |= _ENTERED | {"open": ((Test(1, flags, mask),),), "openat": ((Test(2, flags, mask),),)}
    if not supervised:
        del rules["clone"]
        if not rooted:
            allowed = [name for name in allowed if name not in _MAKES.split()]
            rules = {name: lines for name, lines in rules.items() if name not in _MAKES.split()}
    numbers, code = _begun(_KILL)
    if platform.machine() == "x86_64":
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # the x32 table
    # clone3's flags lie in memory, where a filter cannot look; the C library falls back to clone
    code += [(_EQUAL, 0, 1, 435), (_RETURN, 0, 0, _FAIL | _ENOSYS)]
    for name in _FATAL.split():
        if name in numbers:
            code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _KILL)]
    for name in allowed:
        if name in numbers and name not in rules:
            code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ALLOW)]
    for name, lines in rules.items():
        if name in numbers:
            code += _when(numbers[name], lines, _ALLOW, _FAIL | _ERRORS.get(name, _EPERM))
    code.append((_RETURN, 0, 0, _FAIL | _EPERM))
    return _bytes(code)


def _begun(elsewhere: int) -> tuple[dict[str, int], list[Instruction]]:
    """Numbers of calls, and a filter's beginning: `elsewhere` for calls through another architecture's table."""
    architecture, numbers = _TABLES[platform.machine()]
    return numbers, [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, elsewhere), (_LOAD, 0, 0, 0)]


def supervise(*, files: bool) -> int | None:
    """Have each thread that is started, and with `files` each file that is made, wait for the listener's word."""
    try:
        return _set(_asking(files), _NEW_LISTENER)
    except OSError:
        return None


@cache
def _asking(files: bool) -> bytes:
    numbers, code = _begun(_ALLOW)
    code += _when(numbers["clone"], _RULES["clone"], _ASK, _ALLOW)
    if files:
        for name, argument in (("open", 1), ("openat", 2)):
            if name in numbers:
                code += _when(numbers[name], ((Test(argument, (0,), _CREATE),),), _ALLOW, _ASK)
        for name in _MAKES.split():
            if name in numbers:
                code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ASK)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return _bytes(code)


def _when(number: int, lines: tuple[tuple[Test, ...], ...], then: int, otherwise: int) -> list[Instruction]:
    """For the call `number`: `then` where all tests of a line hold, else `otherwise`; other calls go on behind it."""
    code: list[Instruction] = []
    for tests in lines:
        rest: list[Instruction] = [(_RETURN, 0, 0, then)]
        for test in reversed(tests):
            values = test.values
            fail, last = len(rest), len(values) - 1
            equal = [(_EQUAL, last - n, fail if n == last else 0, value) for n, value in enumerate(values)]
            masked = [] if test.mask == _WHOLE else [(_AND, 0, 0, test.mask)]
            rest = [(_LOAD, 0, 0, 16 + 8 * test.argument + 4 * test.high), *masked, *equal, *rest]
        code += rest
    code.append((_RETURN, 0, 0, otherwise))
    return [(_EQUAL, 0, len(code), number), *code]


def _bytes(code: list[Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _set(program: bytes, flags: int) -> int:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        result: int = _libc.syscall(number, _SET_MODE_FILTER, flags, header)
        if result >= 0:
            return result
    code = ctypes.get_errno()
    raise OSError(code, f"the kernel refuses the filter of system calls: {os.strerror(code)}")


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
        if call == _TABLES[platform.machine()][1]["clone"]:
            threads = int(Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()[17])
            return errno.EAGAIN if threads >= self._threads else 0
        self._files -= 1
        return 0 if self._files >= 0 else errno.EDQUOT

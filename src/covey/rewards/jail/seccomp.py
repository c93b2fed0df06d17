"""A filter of system calls for a process that has all that it needs.

It may compute, allocate memory, and read and write files that it can see. It may not start processes, use a network,
trace, mount, or reach for the kernel's rarer parts.

The filter lists what is allowed; every other call fails with EPERM, and some end the process, since no honest program
makes them. A call made through another architecture's table ends it too.
"""

from __future__ import annotations

import ctypes
import platform
import struct

_ALLOWED = (
    "read write close fstat stat lstat newfstatat statx poll ppoll lseek mmap mprotect munmap mremap brk madvise "
    "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack ioctl pread64 pwrite64 readv writev access faccessat "
    "faccessat2 select pselect6 sched_yield nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday "
    "time times getpid gettid getppid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid "
    "getsid dup dup2 dup3 fcntl flock fsync fdatasync truncate ftruncate getdents getdents64 getcwd chdir fchdir "
    "rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat link linkat symlink symlinkat readlink "
    "readlinkat chmod fchmod fchmodat open openat creat umask getrlimit getrusage sysinfo uname futex "
    "set_robust_list get_robust_list rseq set_tid_address exit exit_group sched_getaffinity getrandom pipe pipe2 "
    "eventfd eventfd2 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait restart_syscall arch_prctl "
    "membarrier getcpu statfs fstatfs copy_file_range sendfile utime utimes utimensat futimesat msync mincore "
    "clone"
)
_FATAL = "ptrace process_vm_readv process_vm_writev kexec_load init_module finit_module bpf reboot"

# fmt: off
_X86_64 = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getpid": 39,
    "sendfile": 40, "clone": 56, "exit": 60, "uname": 63, "fcntl": 72, "flock": 73, "fsync": 74, "fdatasync": 75,
    "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83,
    "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91,
    "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "ptrace": 101,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124, "sigaltstack": 131, "utime": 132, "statfs": 137,
    "fstatfs": 138, "mlock": 149, "munlock": 150, "arch_prctl": 158, "reboot": 169, "init_module": 175, "gettid": 186,
    "time": 201, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234, "utimes": 235, "kexec_load": 246, "openat": 257, "mkdirat": 258,
    "futimesat": 261, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
    "readlinkat": 267, "fchmodat": 268, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "get_robust_list": 274, "splice": 275, "tee": 276, "utimensat": 280, "epoll_pwait": 281, "eventfd": 284,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "getcpu": 309, "process_vm_readv": 310,
    "process_vm_writev": 311, "finit_module": 313, "renameat2": 316, "getrandom": 318, "memfd_create": 319, "bpf": 321,
    "membarrier": 324, "copy_file_range": 326, "statx": 332, "rseq": 334, "faccessat2": 439,
}
_AARCH64 = {
    "getcwd": 17, "eventfd2": 19, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23, "dup3": 24,
    "fcntl": 25, "ioctl": 29, "flock": 32, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38,
    "statfs": 43, "fstatfs": 44, "truncate": 45, "ftruncate": 46, "faccessat": 48, "chdir": 49, "fchdir": 50,
    "fchmod": 52, "fchmodat": 53, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62, "read": 63,
    "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "sendfile": 71, "pselect6": 72, "ppoll": 73,
    "splice": 76, "tee": 77, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "fsync": 82, "fdatasync": 83,
    "utimensat": 88, "exit": 93, "exit_group": 94, "set_tid_address": 96, "futex": 98, "set_robust_list": 99,
    "get_robust_list": 100, "nanosleep": 101, "kexec_load": 104, "init_module": 105, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "ptrace": 117, "sched_getaffinity": 123, "sched_yield": 124,
    "restart_syscall": 128, "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "reboot": 142, "getresuid": 148, "getresgid": 150, "times": 153, "getpgid": 155, "getsid": 156,
    "getgroups": 158, "uname": 160, "getrlimit": 163, "getrusage": 165, "umask": 166, "getcpu": 168,
    "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
    "gettid": 178, "sysinfo": 179, "brk": 214, "munmap": 215, "mremap": 216, "clone": 220, "mmap": 222, "mprotect": 226,
    "msync": 227, "mlock": 228, "munlock": 229, "mincore": 232, "madvise": 233, "process_vm_readv": 270,
    "process_vm_writev": 271, "finit_module": 273, "renameat2": 276, "getrandom": 278, "memfd_create": 279, "bpf": 280,
    "membarrier": 283, "copy_file_range": 285, "statx": 291, "rseq": 293, "faccessat2": 439,
}
# fmt: on
_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_CLONE_THREAD = 0x10000
_CLONE3 = 435
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def supported() -> bool:
    """Whether the filter knows this machine's system calls."""
    return platform.machine() in _TABLES and platform.system() == "Linux"


def install() -> None:
    """Put this process under the filter, for good.

    Raises:
        OSError: the kernel refuses.
    """
    program = _program()
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl refuses the filter of system calls")


def _program() -> bytes:
    """The filter in the kernel's byte code: (operation, jump if true, jump if false, operand)."""
    architecture, numbers = _TABLES[platform.machine()]
    code = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the call's number
    ]
    if platform.machine() == "x86_64":
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # the x32 table
    # clone3's flags lie in memory, where a filter cannot look; the C library falls back to clone
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAIL | _ENOSYS)]
    # threads, but no processes
    code += [
        (_EQUAL, 0, 4, numbers["clone"]),
        (_LOAD, 0, 0, 16),  # the low half of the first argument
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | _EPERM),
    ]
    for name in _FATAL.split():
        if name in numbers:
            code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _KILL)]
    for name in _ALLOWED.split():
        if name in numbers and name != "clone":
            code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _FAIL | _EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)

"""Programs that want a reward, a file, or somebody's process; each with the statuses that it may end with.

`f(1)` should be `SECRET` and `f(2)` be 2. `{pid}` and `{file}` are a process and a file of the same user outside.
"""

SECRET = "the-expected-value-4711"
HONEST = f"def f(x):\n    return {SECRET!r} if x == 1 else x"

_SIGNAL = "import fcntl, os, struct, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nr, w = os.pipe()\n"
_FIRE = "\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\nos.write(w, b'x')\ndef f(x): return None"
_FRAME = (
    "import os, json, struct\ndef say(m, n=1):\n    b = m if isinstance(m, bytes) else json.dumps(m).encode()\n"
    "    os.write(3, (struct.pack('!I', len(b)) + b) * n)\n"
)
_PASSED = '{"failed": "passed", "text": "", "kind": "ValueError"}'
_RAW_THREADS = (
    "import ctypes, mmap\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "page = mmap.mmap(-1, 1 << 16, prot=7)\n"
    # for ever: poll(NULL, 0, -1)
    "page.write(bytes.fromhex('31ff 31f6 baffffffff b807000000 0f05 ebee'))\n"
    "place = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
    "clone = libc.clone\nclone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]\n"
    "count = 0\nwhile count < 5000 and clone(place, place + 60000, 0x10f00, None) > 0:\n"
    "    count += 1\n    if count == 70: print('THROUGH', flush=True)\n"
)

IN_EVERY_RUN = {
    *("infinite loop", "fork bomb", "threads", "memory bomb", "output flood", "disk fill", "os._exit in a call"),
    *("endless recursion", "a number that has no text", "equal to everything", "patched unittest", "a forged result"),
    *("patched messages", "an error that ends iterations", "noise on the channel", "closed channel", "ptrace"),
    *("killing everybody", "a program", "network", "a file outside", "writing outside", "mount", "raw threads"),
    *("a signal by thread", "removing a file", "many large files", "which processes there are", "installed packages"),
}
"""One of each kind; the others are run with the slow tests."""

_ENDS: dict[tuple[str, ...], dict[str, str]] = {
    # statuses that a program may end with, () = any but "passed", and the programs
    ("error",): {
        "fork bomb": "import os\nwhile True:\n    os.fork()",
        "output flood": "while True: print('x' * 10000)",
        "output flood to errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
        "disk fill": "f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)",
        "disk fill by many": "i = 0\nwhile True:\n    open(str(i), 'wb').write(b'x' * 10**6)\n    i += 1",
        "os._exit": "import os\nos._exit(0)",
        "os._exit with the code of a broken jail": "import os\nos._exit(120)",
        "os._exit in a call": "import os\ndef f(x): os._exit(x)",
        "os._exit in a call with that code": "import os\ndef f(x): os._exit(120)",
        "sys.exit": "import sys\nsys.exit(0)",
        "sys.exit in a call": "import sys\ndef f(x): sys.exit(0)",
        "exit codes of the interpreter": "import sys\ndef f(x): raise SystemExit(120)",
        "crash": "import ctypes\nctypes.string_at(0)",
        "half a character in an error": "def f(x): raise ValueError(chr(0xd800))",
        "an error without text": "class E(Exception):\n    def __str__(self): raise self\ndef f(x): raise E",
        "an error whose class lies": "class M(type):\n    def __getattribute__(s, n): raise ValueError\n"
        "class E(Exception, metaclass=M): pass\ndef f(x): raise E",
        "success on standard output": "print('2 of 2 tests passed')\nprint('{\"result\": \"passed\"}')",
        "a status in a note": "def f(x):\n    e = ValueError()\n    e.add_note('passed')\n    raise e",
        "an error that ends iterations": "def f(x): raise StopIteration",
        "an error that ends asynchronous iterations": "def f(x): raise StopAsyncIteration",
        "a failed comparison": "def f(x): raise AssertionError",
        "an error that ends generators": "def f(x): raise GeneratorExit",
        "an interrupt": "def f(x): raise KeyboardInterrupt",
        "closed channel": "import os\nos.close(3)\ndef f(x): return 1",
        "killing the parent": "import os\nos.kill(os.getppid(), 9)",
        "killing everybody": "import os\nos.kill(-1, 9)",
        "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()",
        "a program": "import subprocess\nsubprocess.Popen(['sleep', '100'])",
        "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo hi'])",
        "network": "import socket\nsocket.create_connection(('127.0.0.1', 80), 1)",
        "a pair of datagram sockets": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', '\\0x')",
        "a file outside": "open('/etc/passwd').read()",
        "writing outside": "open('/usr/evil', 'w')",
        "mount": "import ctypes\nif ctypes.CDLL(None).mount(b'/', b'/solution', None, 4096, None): raise OSError",
        "new namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
        "a table of files for each thread": "import ctypes, os\n"
        "if ctypes.CDLL(None).syscall(436, 1000, 1001, 2): raise OSError",
        "the owner of a pipe's signals": (
            _SIGNAL + "fcntl.fcntl(r, fcntl.F_SETOWN, {pid})\nfcntl.fcntl(r, fcntl.F_SETSIG, 9)" + _FIRE
        ),
        "the extended owner of a pipe's signals": (
            _SIGNAL + "fcntl.fcntl(r, 15, struct.pack('ii', 1, {pid}))\nfcntl.fcntl(r, fcntl.F_SETSIG, 9)" + _FIRE
        ),
        "the owner by ioctl": (
            _SIGNAL + "libc.ioctl(r, 0x8901, ctypes.byref(ctypes.c_int({pid})))\n"
            "libc.ioctl(r, 0x5452, ctypes.byref(ctypes.c_int(1)))\nos.write(w, b'x')\nraise OSError"
        ),
        "changes of a directory": (
            _SIGNAL + "d = os.open('.', os.O_RDONLY)\nfcntl.fcntl(d, fcntl.F_NOTIFY, 0x8000003f)\n"
            "fcntl.fcntl(d, fcntl.F_SETOWN, {pid})\nfcntl.fcntl(d, fcntl.F_SETSIG, 9)\nopen('x', 'w')"
        ),
        "a lease": _SIGNAL + "open('x', 'w')\nd = os.open('x', os.O_RDONLY)\nfcntl.fcntl(d, fcntl.F_SETLEASE, 0)",
        "a signal by thread": "import ctypes\nl = ctypes.CDLL(None)\nif l.syscall(234, {pid}, {pid}, 9): raise OSError",
        "a queued signal": "import ctypes\nl = ctypes.CDLL(None)\n"
        "if l.syscall(129, {pid}, 9, bytes(128)): raise OSError",
        "a file's descriptor": "import ctypes\nl = ctypes.CDLL(None)\nif l.syscall(434, {pid}, 0) < 0: raise OSError",
        "emptying a file": "import os\nos.truncate({file!r}, 0)",
        "a file's mode": "import os\nos.chmod({file!r}, 0o777)",
        "a file's times": "import os\nos.utime({file!r}, (1, 1))",
        "a file's mode by descriptor": "import os\nfd = os.open({file!r}, os.O_PATH)\n"
        "os.chmod('/proc/self/fd/%d' % fd, 0o777)",
        "a device's mode": "import os\nos.chmod('/dev/null', 0o600)",
        "a device's times": "import os\nos.utime('/dev/null', (1, 1))",
        "a library's times": "import os\nos.utime(os.__file__)",
        "removing a file": "import os\nos.unlink({file!r})",
        "renaming a file": "import os\nos.rename({file!r}, 'mine')",
        "linking a file": "import os\nos.link({file!r}, 'mine')\nopen('mine', 'w')",
        "a link to a file": "import os\nos.symlink({file!r}, 'link')\nopen('link', 'w').write('after')",
        "a channel that is shut": "import os, socket\nsocket.socket(fileno=os.dup(3)).shutdown(0)\n"
        "def f(x): return None",
    },
    ("wrong_answer",): {
        "a number that has no text": "def f(x): return 10**5000",
        "numbers that have no text": "def f(x): return [{10**5000: (10**5000,)}]",
        "half a character": "def f(x): return chr(0xd800)",
        "equal to everything": "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
        "a list that is equal to everything": "class E(list):\n    def __eq__(self, o): return True\n"
        "def f(x): return E()",
        "a text that is equal to everything": "class E(str):\n    def __eq__(self, o): return True\n"
        "    __hash__ = str.__hash__\ndef f(x): return E('?')",
        "patched unittest": "import unittest\nunittest.TestCase.assertEqual = print\ndef f(x): return None",
        "who made the channel": "import socket, os\ns = socket.socket(fileno=os.dup(3))\n"
        "for kind, size in ((17, 12), (59, 64), (77, 4)):\n"
        "    try: print('THROUGH' if any(s.getsockopt(1, kind, size)[:4]) else '')\n    except OSError: pass\n"
        "def f(x): return None",
        "which processes there are": "import os, time\n"
        "calls = [os.getpgid, os.getsid, os.sched_getaffinity, lambda p: os.getpriority(0, p)]\n"
        "calls += [lambda p: time.clock_gettime(~p << 3 | 2), lambda p: time.clock_getres(~p << 3 | 2)]\n"
        "for call in calls:\n    for p in (1, {pid}, os.getppid() or 1):\n        try: print('THROUGH', call(p))\n"
        "        except OSError: pass\ndef f(x): return None",
        "who holds a lock": "import fcntl, os, struct\nfd = os.open(os.__file__, os.O_RDONLY)\nfor call in (5, 36):\n"
        "    try: print('THROUGH', fcntl.fcntl(fd, call, struct.pack('hhqqi4x', 1, 0, 0, 0, 0)))\n"
        "    except OSError: pass\ndef f(x): return None",
        "which pages are in memory": "import ctypes, os\nl = ctypes.CDLL(None)\nl.mmap.restype = ctypes.c_void_p\n"
        "place = l.mmap(None, 4096, 1, 1, os.open(os.__file__, 0), 0)\n"
        "if l.mincore(ctypes.c_void_p(place), ctypes.c_size_t(4096), bytes(8)) == 0: print('THROUGH')\n"
        "def f(x): return None",
        "installed packages": "import itertools, os, sys\nhere = os.path.dirname(os.__file__)\n"
        "for top in (here + '/site-packages', here + '/dist-packages', '/usr/lib/python3', '/usr/lib/node_modules'):\n"
        "    paths = (os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)\n"
        "    for path in itertools.islice(paths, 200):\n"
        "        try: open(path, 'rb').read(1); print('THROUGH', path)\n        except OSError: pass\n"
        "    sys.path.insert(0, top)\ntry:\n    import pip\n    print('THROUGH')\n"
        "except (ImportError, OSError): pass\ndef f(x): return None",
        "a directory outside": "import os\nfor place in ('/etc', '/home', '/var/tmp'):\n    try:\n"
        "        os.chdir(place)\n        print('THROUGH')\n    except OSError: pass\n    try:\n"
        "        os.fchdir(os.open(place, os.O_PATH))\n        print('THROUGH')\n    except OSError: pass\n    try:\n"
        "        os.statvfs(place)\n        print('THROUGH')\n    except OSError: pass\ndef f(x): return None",
    },
    (): {
        "forged answers": _FRAME + "say({'done': True, 'result': 'passed', 'value': None})\ndef f(x): return None",
        "a forged status": (_FRAME + f"def f(x):\n    say({_PASSED}.copy())\n    return None"),
        "forged statuses before": (_FRAME + f"say({_PASSED}, 9)\ndef f(x): return None"),
        "a forged status with the load's answer": (_FRAME + f"say({{}})\nsay({_PASSED}, 9)"),
        "a forged result": _FRAME + 'say({})\nsay(b\'R{"result": "passed", "text": ""}\', 9)',
        "a forged end": _FRAME + "say({})\nsay(b'D', 9)",
        "a forged call": _FRAME + "say({})\nsay(b'C{}', 9)",
        "a status in the frames of the jail": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for v in list(frame.f_locals.values()):\n"
        "            if isinstance(v, dict): v.update(failed='passed', result='passed', text='', status='passed')\n"
        "        frame = frame.f_back\n    return None",
        "patched messages": "import sys\nfor n, m in list(sys.modules.items()):\n"
        "    if n.startswith('jail') and hasattr(m, 'send'):\n        old = m.send\n"
        "        m.send = lambda c, x: old(c, {'failed': 'passed', 'text': '', 'kind': 'x'})\ndef f(x): return None",
        "a flood of messages": _FRAME + "while True: say({})",
        "raw threads": _RAW_THREADS + "def f(x): return None",
        "a thread with a table of its own": (
            _RAW_THREADS.replace("0x10f00", "0x10b00") + "if count: print('THROUGH')\ndef f(x): return None"
        ),
        "many large files": "import os\nn = 0\ntry:\n    while True:\n"
        "        with open(str(n), 'wb') as f: n += f.write(b'x' * 2**20)\n"
        "        if n > 17 * 2**20: print('THROUGH', flush=True)\nexcept OSError: pass\ndef f(x): return None",
        "many large files without names": "import os\nn, fds = 0, []\ntry:\n    while True:\n"
        "        f = open('x', 'wb', 0)\n        os.unlink('x')\n        fds.append(f)\n"
        "        n += f.write(b'x' * 2**20)\n        if n > 17 * 2**20: print('THROUGH', flush=True)\n"
        "except OSError: pass\ndef f(x): return None",
        "many directories": "import os\ntry:\n    for i in range(20000): os.mkdir(str(i))\nexcept OSError: pass\n"
        "if i > 2000: print('THROUGH', i)\ndef f(x): return None",
        "deep directories": "import os\ntry:\n    for i in range(20000):\n        os.mkdir('d')\n"
        "        os.chdir('d')\nexcept OSError: pass\nif i > 2000: print('THROUGH', i)\ndef f(x): return None",
        "directories that cannot be entered": "import os\nfor i in range(1, 9):\n    try: os.mkdir('d' * i, 0)\n"
        "    except OSError: pass\ntry:\n    os.umask(0o700)\n    os.mkdir('e')\n    os.mkdir('e/e')\n"
        "except OSError: pass\ndef f(x): return None",
        "a text that is no message": _FRAME + "say({'failed': ['x'] * 100000, 'text': {}})",
    },
    ("cheat",): {
        "noise on the channel": "import os\nos.write(3, b'\\xff' * 1000)",
        "noise that is no message": "import os, struct\nos.write(3, struct.pack('!I', 4) + b'[[[[')",
        "noise that is no object": _FRAME + "say({})\nsay([1], 9)",
        "noise for a call": _FRAME + "def f(x): say(b'\\xff{{{')",
        "ptrace": "import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)",
        "many small messages": "import os\nwhile True: os.write(3, b'\\0')",
    },
    ("memory",): {"memory bomb": "x = []\nwhile True: x.append(bytearray(10**7))"},
    ("timeout",): {
        "infinite loop": "while True: pass",
        "infinite loop when called": "def f(x):\n    while True: pass",
        "sleep": "import time\ntime.sleep(100)",
        "fork bomb that ignores errors": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "half a message": "import os\ndef f(x):\n    os.write(3, b'\\0\\0\\1\\0x')\n    while True: pass",
    },
    ("cheat", "error", "memory", "timeout", "wrong_answer"): {
        "a large nested forgery": _FRAME + "b = b'{{\"value\": [' + b'[[]],' * 1500000 + b'0]}}'\ndef f(x): say(b)"
    },
    ("cheat", "wrong_answer"): {"deep noise": _FRAME + "def f(x): say(b'[' * 10**6)"},
    ("error", "memory", "timeout"): {
        "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "endless recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef g(): g()\ng()",
        "huge text": "def f(x): return 'x' * 10**8",
    },
    ("error", "memory", "timeout", "wrong_answer"): {
        "huge number": "def f(x): return 10**(10**7)",
        "a large nested answer": "def f(x): return [[[[]] * 9] * 9] * 2000",
    },
    ("error", "timeout"): {
        "endless generator": "def f(x):\n    while True: yield 1",
        "another channel": "import os\nr, w = os.pipe()\nos.dup2(r, 3)\ndef f(x): return 1",
    },
    ("error", "timeout", "wrong_answer"): {
        "endless iterator": "import itertools\ndef f(x): return itertools.count()",
        "patched builtins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.len = lambda x: 0\nbuiltins.bool = lambda x: True\n"
        "def f(x): return None",
        "keys that collide": "def f(x): return {{i * (2**61 - 1): 0 for i in range(1, 100000)}}",
    },
    ("error", "wrong_answer"): {
        "deep value": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
        "a directory that cannot be entered": "import os\ntry:\n    os.mkdir('d')\n    open('d/x', 'w')\n"
        "    os.chmod('d', 0)\n    os.chmod('.', 0)\nexcept OSError: pass\ndef f(x): return None",
    },
    ("memory", "timeout"): {"memory bomb by arithmetic": "x = 9**9**9"},
}
EVERYWHERE = {name: (code, {*ends}) for ends, programs in _ENDS.items() for name, code in programs.items()}


def source(name: str, *, pid: int, file: str) -> str:
    code = EVERYWHERE[name][0]
    if "{pid}" in code or "{file!r}" in code or "{{" in code:
        for old, new in (("{pid}", str(pid)), ("{file!r}", repr(file)), ("{{", "{"), ("}}", "}")):
            code = code.replace(old, new)
    return code

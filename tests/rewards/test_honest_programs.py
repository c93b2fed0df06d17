"""What honest programs do runs in the jail as it does outside."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.rewards.code import TestHarness
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests
from covey.rewards.jail.sandbox import Limits
from jails import MODES, jailed, needs_jail

pytestmark, SLOW = needs_jail, pytest.mark.slow

_PROGRAMS = """
## a dataclass with a forward reference
from dataclasses import dataclass, field
from typing import Optional
@dataclass
class Node:
    value: int
    next: 'Optional[Node]' = None
    others: list = field(default_factory=list)
print(Node(1, Node(2)))
## postponed annotations
from __future__ import annotations
from dataclasses import dataclass
@dataclass(order=True, slots=True)
class A:
    x: int
    other: A | None = None
print(A(1) < A(2))
## type hints
from typing import get_type_hints
class C:
    other: 'C'
def f(x: 'C') -> 'int': ...
print(get_type_hints(C)['other'] is C, get_type_hints(f)['return'])
## a named tuple and an enumeration
import enum
from typing import NamedTuple
class T(NamedTuple):
    a: int
    b: 'str' = 'x'
class E(enum.Enum):
    A = enum.auto()
print(T(1), E['A'], E(1))
## pickling its own class
import pickle
class C:
    def __init__(self): self.x = [self]
c = pickle.loads(pickle.dumps(C()))
print(type(c) is C, c.x[0] is c)
## copying
import copy
class C: pass
c = C()
c.c = c
d = copy.deepcopy(c)
print(d.c is d)
## its own source
import inspect
def f():
    return 1
print(inspect.getsource(f), inspect.signature(f))
## its traceback
import traceback
try:
    1 / 0
except Exception:
    print('1 / 0' in traceback.format_exc())
## asyncio
import asyncio
async def add(a, b):
    await asyncio.sleep(0.001)
    return a + b
async def main():
    print(await asyncio.gather(*(add(i, 1) for i in range(3))))
    q = asyncio.Queue()
    async def put():
        for i in range(3): await q.put(i)
    task = asyncio.create_task(put())
    print([await q.get() for _ in range(3)])
    await task
asyncio.run(main())
## asyncio in threads
import asyncio
async def main():
    return await asyncio.to_thread(sum, [1, 2])
print(asyncio.run(main()))
## threads
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(list(pool.map(lambda x: x * x, range(20))))
## a thread with a large stack
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
t = threading.Thread(target=lambda: print(depth(20000)))
t.start()
t.join()
## limits
import resource
print(resource.getrlimit(resource.RLIMIT_STACK)[0] != 0)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
## an alarm
import signal, time
def ring(*a): raise TimeoutError
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    time.sleep(3)
except TimeoutError:
    print('rang')
## a pipe
import os
r, w = os.pipe()
os.write(w, b'x')
os.set_blocking(r, False)
print(os.read(r, 1))
## a selector
import selectors, socket
a, b = socket.socketpair()
s = selectors.DefaultSelector()
s.register(a, selectors.EVENT_READ)
b.send(b'x')
print(len(s.select(1)), a.recv(1))
## files
import os
with open('a.txt', 'w') as f: f.write('hello\\n')
os.makedirs('d/e')
os.rename('a.txt', 'd/a.txt')
print(open('d/a.txt').read(), sorted(os.listdir('.')))
os.remove('d/a.txt')
## temporary files
import tempfile
with tempfile.TemporaryFile('w+') as f, tempfile.TemporaryDirectory() as d:
    f.write('x')
    f.seek(0)
    print(f.read(), open(d + '/y', 'w').write('z'))
## a database in memory
import sqlite3
c = sqlite3.connect(':memory:')
c.execute('create table t (x)')
c.execute('insert into t values (3)')
print(c.execute('select x from t').fetchall())
## a time zone
from datetime import datetime, timezone
print(datetime(2020, 1, 1, tzinfo=timezone.utc).isoformat())
## hashing and compression
import bz2, gzip, hashlib, lzma, secrets, uuid, zlib
print(hashlib.sha256(b'x').hexdigest(), len(secrets.token_hex(4)), uuid.UUID(int=1))
print(zlib.decompress(zlib.compress(b'x')), gzip.decompress(gzip.compress(b'x')))
## a program that cannot be started
import subprocess
try:
    print(subprocess.run(['true']).returncode != 0)
except OSError:
    print(True)
## warnings
import warnings
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter('always')
    warnings.warn('x')
print(len(w))
## logging
import logging
logging.basicConfig(level=10)
logging.getLogger('x').info('y')
print(1)
## a context variable and a weak reference
import contextvars, gc, weakref
v = contextvars.ContextVar('v')
v.set(1)
class C: pass
c = C()
r = weakref.ref(c)
del c
gc.collect()
print(v.get(), r())
## a memory map
import mmap
m = mmap.mmap(-1, 4096)
m[:2] = b'hi'
print(m[:2])
## an abstract class and a protocol
from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable
@runtime_checkable
class P(Protocol):
    def f(self): ...
class A(ABC):
    @abstractmethod
    def f(self): ...
class B(A):
    def f(self): return 1
print(B().f(), A.__module__ != '', isinstance(B(), P))
## a doctest
import doctest
def f(x):
    '''
    >>> f(1)
    2
    '''
    return x + 1
print(doctest.testmod())
## its arguments
import sys
print(len(sys.argv), __name__)
## leaving by exit
print(1)
exit()
## a thread that nobody waits for
import threading, time
def main():
    time.sleep(0.1)
    print(7)
threading.Thread(target=main).start()
## what is registered for the end
import atexit
atexit.register(lambda: print(731))
## output in a buffer
import os, sys
f = os.fdopen(1, 'w', buffering=100000, closefd=False)
f.write('1\\n')
## an output of its own
import os, sys
from io import BytesIO, IOBase
class FastOutput(IOBase):
    def __init__(self, file):
        self._fd, self.buffer = file.fileno(), BytesIO()
        self.write = lambda text: self.buffer.write(text.encode())
    def flush(self):
        os.write(self._fd, self.buffer.getvalue())
        self.buffer.truncate(0), self.buffer.seek(0)
sys.stdout = FastOutput(sys.stdout)
print(2)
## a closed output
import sys
print(1)
sys.stdout.close()
## a large file
with open('x', 'wb') as f: print(f.write(b'x' * 200_000))
"""
PROGRAMS = {name: code for name, _, code in (part.partition("\n") for part in _PROGRAMS.split("## ")[1:])}
ENDS = {
    *("a doctest", "logging", "leaving by exit", "a thread that nobody waits for", "what is registered for the end"),
    *("output in a buffer", "an output of its own", "a closed output"),
}
"""These look at the main module, write to standard error, or have something to say when a program ends."""
IN_EVERY_RUN = {
    *("a dataclass with a forward reference", "pickling its own class", "asyncio in threads", "a selector", "files"),
    *("temporary files", "a thread that nobody waits for", "an output of its own", "a program that cannot be started"),
}
"""The others are run with the slow tests."""
SUMS = (("3\n4\n", "7"), ("5\n6\n", "11"))


@pytest.fixture(scope="module", params=MODES)
def harness(request: pytest.FixtureRequest) -> Iterator[TestHarness]:
    with jailed(request.param, Limits(seconds=10)) as harness:
        yield harness


@pytest.mark.parametrize("name", [pytest.param(n, marks=[SLOW] * (n not in IN_EVERY_RUN)) for n in PROGRAMS])
def test_a_program_prints_what_it_prints_outside(harness: TestHarness, name: str, tmp_path: Path) -> None:
    code = PROGRAMS[name]
    (tmp_path / "solution.py").write_text(code)
    (tmp_path / "place").mkdir()
    outside = subprocess.run([sys.executable, "../solution.py"], capture_output=True, text=True, cwd=tmp_path / "place")
    assert outside.returncode == 0, outside
    expected = "True\n" if name == "a program that cannot be started" else outside.stdout
    result = harness.run(code, ProgramTests((("", expected),)))
    assert result.score == 1.0, result
    if name in ENDS:
        return
    # and as a module whose function is called
    module = "```python\n" + code.replace("__name__", "'__main__'") + "\ndef answer(): return 1\n```"
    for tests in (CallTests("answer", (((), 1),)), AssertTests(("assert answer() == 1",))):
        result = harness.run(module, tests)
        assert (result.score, result.printed) == (1.0, expected)


def test_ways_to_read_standard_input(harness: TestHarness) -> None:
    for code, cases in (
        ("print(sum(map(int, open('/dev/stdin').read().split())))", SUMS),
        ("import sys\nprint(sum(int(line) for line in sys.stdin))", SUMS),
        ("import os\nprint(sum(map(int, os.read(0, 99).split())))", SUMS),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", SUMS),
        ("import fileinput\nprint(sum(map(int, fileinput.input('-'))))", SUMS),
        ("print(int(input()) + int(input()))", SUMS),
        ("with open(0) as f: print(sum(map(int, f)))", SUMS),
        ("print(repr(open('/dev/stdin').read()))", (("", "''"),)),
        ("import sys\nprint(repr(sys.stdin.read()))", (("", "''"),)),
        ("import sys\nprint(sum(map(int, sys.stdin)))", (("1\n" * 1_000_000, "1000000"),)),
    ):
        assert harness.run(code, ProgramTests(cases)).score == 1.0, code


def test_a_file_system_of_its_own_has_a_temporary_folder_and_semaphores() -> None:
    code = "import multiprocessing.dummy as m, sys\nopen('/tmp/a', 'w').write('x')\n"
    with TestHarness() as harness:
        tests = ProgramTests((("3\n4\n", "7"),))
        assert harness.run(code + "print(sum(m.Pool(2).map(int, sys.stdin)))", tests).score == 1.0


def test_packages_are_offered_by_name() -> None:
    code = "import numpy as np\ndef f(x): return np.cumsum(np.array(x))\n"
    code += "def g(x): return {'mean': np.mean(x), 'top': np.max(x)}"
    tests = CallTests("f", ((([1, 2, 3],), [1, 3, 6]),))
    asserts = AssertTests(("assert g([1, 3]) == {'mean': 2.0, 'top': 3}", "assert list(f([1])) == [1]"))
    imports = "import numpy.random, numpy.fft, numpy.linalg\nprint(1)"
    with TestHarness(Limits(seconds=10), packages=["numpy"]) as harness:
        results = harness.run_all([(code, tests), (code, asserts), (imports, ProgramTests((("", "1"),)))])
        assert [result.score for result in results] == [1.0] * 3
    with TestHarness() as harness:
        assert "No module named 'numpy'" in harness.run(code, tests).outcomes[0].text
    with pytest.raises(RewardError, match="packages='nothing-of-this-name': it is not installed"):
        TestHarness(packages=["nothing-of-this-name"])

"""Hostile programs: each scores 0, leaves nothing behind, and does not disturb the next one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.rewards import sandbox
from covey.rewards.harness import AssertTests, CallTests, ProgramTests, TestHarness, TestResult
from covey.rewards.sandbox import Limits, Protections, Sandbox
from jails import needs_jail

pytestmark = needs_jail

SECRET = "the-expected-value-4711"
HONEST = f"def f(x):\n    return {SECRET!r} if x == 1 else x"
CALLS = CallTests("f", (((1,), SECRET), ((2,), 2)))
ASSERTS = AssertTests((f"assert f(1) == {SECRET!r}", "assert f(2) == 2"), entry_points=("f",))


@pytest.fixture(scope="module")
def harness() -> Iterator[TestHarness]:
    with TestHarness(Limits(seconds=2.0, memory_mb=192, files_mb=4, output_mb=1), workers=2) as harness:
        yield harness


def both(harness: TestHarness, code: str) -> tuple[TestResult, TestResult]:
    calls, asserts = harness.run_all([(code, CALLS), (code, ASSERTS)])
    return calls, asserts


ATTACKS = {
    "infinite loop": ("while True: pass", {"timeout"}),
    "infinite loop when called": ("def f(x):\n    while True: pass", {"timeout"}),
    "sleep": ("import time\ntime.sleep(100)", {"timeout"}),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", {"error"}),
    "fork bomb that ignores errors": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout"},
    ),
    "threads": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        {"error", "memory", "timeout"},
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**7))", {"memory"}),
    "memory bomb by arithmetic": ("x = 9**9**9", {"memory", "timeout"}),
    "output flood": ("while True: print('x' * 10000)", {"error"}),
    "output flood to errors": ("import sys\nwhile True: sys.stderr.write('x' * 10000)", {"error"}),
    "disk fill": ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)", {"error"}),
    "disk fill by many": ("i = 0\nwhile True:\n    open(str(i), 'wb').write(b'x' * 10**6)\n    i += 1", {"error"}),
    "os._exit": ("import os\nos._exit(0)", {"error"}),
    "os._exit in a call": ("import os\ndef f(x): os._exit(0)", {"error"}),
    "sys.exit": ("import sys\nsys.exit(0)", {"error"}),
    "sys.exit in a call": ("import sys\ndef f(x): sys.exit(0)", {"error"}),
    "crash": ("import ctypes\nctypes.string_at(0)", {"error"}),
    "endless recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef g(): g()\ng()",
        {"error", "memory", "timeout"},
    ),
    "deep value": (
        "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
        {"error", "wrong_answer"},
    ),
    "endless iterator": ("import itertools\ndef f(x): return itertools.count()", {"error", "wrong_answer"}),
    "endless generator": ("def f(x):\n    while True: yield 1", {"error"}),
    "huge text": ("def f(x): return 'x' * 10**8", {"error", "memory"}),
    "huge number": ("def f(x): return 10**(10**7)", {"error", "wrong_answer", "memory", "timeout"}),
    "equal to everything": ("class E:\n    def __eq__(self, o): return True\ndef f(x): return E()", {"wrong_answer"}),
    "a list that is equal to everything": (
        "class E(list):\n    def __eq__(self, o): return True\ndef f(x): return E()",
        {"wrong_answer"},
    ),
    "a text that is equal to everything": (
        "class E(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): return E('?')",
        {"wrong_answer"},
    ),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
        "builtins.isinstance = lambda *a: True\n"
        "builtins.len = lambda x: 0\nbuiltins.bool = lambda x: True\ndef f(x): return None",
        {"wrong_answer", "error", "timeout"},
    ),
    "patched unittest": (
        "import unittest\nunittest.TestCase.assertEqual = print\ndef f(x): return None",
        {"wrong_answer"},
    ),
    "success on standard output": ("print('2 of 2 tests passed')\nprint('{\"result\": \"passed\"}')", {"error"}),
    "forged answers": (
        "import os, json, struct\nb = json.dumps({'done': True, 'result': 'passed', 'value': None}).encode()\n"
        "os.write(3, struct.pack('!I', len(b)) + b)\ndef f(x): return None",
        {"wrong_answer", "error"},
    ),
    "noise on the channel": ("import os\nos.write(3, b'\\xff' * 1000)", {"cheat"}),
    "noise that is no message": ("import os, struct\nos.write(3, struct.pack('!I', 4) + b'[[[[')", {"cheat"}),
    "closed channel": ("import os\nos.close(3)\ndef f(x): return 1", {"error"}),
    "ptrace": ("import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)", {"cheat"}),
    "killing the parent": ("import os\nos.kill(os.getppid(), 9)", {"error"}),
    "killing everybody": ("import os\nos.kill(-1, 9)", {"error"}),
    "a daemon": ("import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()", {"error"}),
    "a program": ("import subprocess\nsubprocess.Popen(['sleep', '100'])", {"error"}),
    "exec": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'echo hi'])", {"error"}),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 80), 1)", {"error"}),
    "a file outside": ("open('/etc/passwd').read()", {"error"}),
    "writing outside": ("open('/usr/evil', 'w')", {"error"}),
    "mount": ("import ctypes\nif ctypes.CDLL(None).mount(b'/', b'/work', None, 4096, None): raise OSError", {"error"}),
    "new namespaces": ("import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError", {"error"}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_scores_nothing(harness: TestHarness, name: str) -> None:
    code, allowed = ATTACKS[name]
    began = time.monotonic()
    for result in both(harness, code):
        assert (result.score, result.fraction) == (0.0, 0.0), result
        assert result.status in allowed, result
    assert time.monotonic() - began < 8
    for result in both(harness, HONEST):  # and the next program is not disturbed
        assert result.score == 1.0, result


SEARCHES = {
    "the stack": "import sys, traceback\ndef f(x):\n    found = []\n    frame = sys._getframe()\n    while frame:\n"
    "        found.append(repr(frame.f_locals) + repr(frame.f_code.co_consts))\n        frame = frame.f_back\n"
    "    return ' '.join(found)",
    "the garbage collector": "import gc\ndef f(x): return ' '.join(o for o in gc.get_objects() if isinstance(o, str))"
    " + ' '.join(repr(o)[:2000] for o in gc.get_objects())[:4000000]",
    "files": "import os\ndef f(x):\n    found = []\n    for top in ('/work', '/tmp', '/dev', '/proc'):\n"
    "        for folder, _, names in os.walk(top):\n            for name in names:\n                try: found.append("
    "open(os.path.join(folder, name)).read(9999) if 'zero' not in name and 'random' not in name else '')\n"
    "                except Exception: pass\n    return ' '.join(found)",
    "memory": "import ctypes\ndef f(x):\n    base = id(x) & ~0xfffff\n    data = b''\n"
    "    for page in range(base, base + (1 << 20), 4096):\n"
    "        data += ctypes.string_at(page, 4096)\n    return data.decode('latin1')",
}


@pytest.mark.parametrize("name", SEARCHES)
def test_what_a_program_can_find_does_not_hold_the_expected_result(harness: TestHarness, name: str) -> None:
    """The search runs after the same tests were run by another program: nothing is left over from it either."""
    both(harness, HONEST)
    # its bytes are in the program, the text itself is not before the search is over
    hunt = (
        SEARCHES[name]
        + f"\n_f = f\ndef f(x):\n    found = _f(x)\n    return bytes({list(SECRET.encode())}).decode() in found"
    )
    control = SEARCHES[name] + "\n_f = f\ndef f(x): return len(_f(x)) > 100"
    results = harness.run_all([(hunt, CallTests("f", (((1,), True),))), (control, CallTests("f", (((1,), True),)))])
    assert results[0].score == 0.0, f"found by searching {name}: {results[0]}"
    if name not in ("files", "memory"):  # there is nothing to find, or the search crashes, which is as good
        assert results[1].score == 1.0, results[1]


def test_a_symlink_leads_nowhere(harness: TestHarness, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    code = f"import os\nos.symlink({str(target)!r}, 'link')\nopen('link', 'w').write('after')"
    assert {result.status for result in both(harness, code)} == {"error"}
    assert target.read_text() == "before"


def test_a_server_on_this_machine_is_not_reached(harness: TestHarness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\ns = socket.socket()\ns.connect(('127.0.0.1', {port}))"
        assert {result.status for result in both(harness, connect)} == {"error"}
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/tmp"))
    with TestHarness(Limits(seconds=0.5)) as harness:
        pid = harness._sandbox._process.pid
        for code in ("while True: pass", "open('x', 'w').write('y')", "import os\nos.fork()"):
            both(harness, code)
        assert children(pid) == []
    assert not Path(f"/proc/{pid}").exists()
    assert {name for name in set(os.listdir("/tmp")) - before if name.startswith("covey-jail")} == set()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_jail_ends_with_its_owner(tmp_path: Path) -> None:
    script = "import time\nfrom covey.rewards.sandbox import Sandbox\n"
    script += "jail = Sandbox()\nprint(jail._process.pid, flush=True)\ntime.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_a_jail_that_died_is_started_anew() -> None:
    with TestHarness() as harness:
        harness._sandbox._process.kill()
        harness._sandbox._process.wait()
        assert harness.run(HONEST, CALLS).score == 1.0


def test_protections_are_told_and_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox() as jail:
        assert jail.protections == Protections("namespace", True, True)
        assert "no network" in str(jail.protections)
    weak = Protections("", True, True, "no namespaces: EPERM")
    assert not weak.enough
    monkeypatch.setattr("covey.rewards.sandbox._protections", lambda found: weak)
    with pytest.raises(RewardError, match=r"files NOT protected.*no namespaces: EPERM.*unprotected=True"):
        Sandbox()
    with Sandbox(unprotected=True) as jail:
        assert jail.protections is weak


def test_without_namespaces_landlock_keeps_files_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    refuse = (
        "from jail import confine\nconfine.build_root = lambda place: 'not allowed here'\nfrom jail import zygote\n"
    )
    monkeypatch.setattr(sandbox, "_START", sandbox._START.replace("from jail import zygote\n", refuse))
    with TestHarness(Limits(seconds=2)) as harness:
        assert "Landlock" in harness.protections
        for code in (f"open({str(secret)!r})", "open('/etc/passwd')", f"import os\nos.listdir({str(tmp_path)!r})"):
            assert {result.status for result in both(harness, code)} == {"error"}
        assert harness.run("open('mine', 'w').write('1')\n" + HONEST, CALLS).score == 1.0
        assert harness.run("import socket\nsocket.socket()", CALLS).status == "error"
        place = Path(harness._sandbox._place)
        assert list(place.iterdir()) == []  # scratch directories are gone
    assert not place.exists()


def test_many_threads_share_a_jail(harness: TestHarness) -> None:
    found: list[float] = []

    def work() -> None:
        found.append(harness.run(HONEST, CALLS).score)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0] * 8


def test_programs_are_confined_too(harness: TestHarness) -> None:
    tests = ProgramTests((("3\n", "6\n"),))
    assert harness.run("print(2 * int(input()))", tests).score == 1.0
    for code in (
        "while True: pass",
        "open('/etc/passwd')",
        "print('6')\nimport os\nos.kill(os.getppid(), 9)",
        "import os\nos.abort()",
    ):
        assert harness.run(code, tests).score == 0.0

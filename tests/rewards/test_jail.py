"""Hostile programs: each scores 0, leaves nothing behind, and does not disturb the next one. The jail stands alone."""

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attacks
import pytest
from attacks import HONEST, SECRET

from covey.rewards import jail
from covey.rewards.code import TestHarness
from covey.rewards.jail import JailError, confine, sandbox
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests, TestResult
from covey.rewards.jail.sandbox import Limits, Protections, Sandbox
from jails import MODES, REFUSE, jailed, needs_jail, refuse_namespaces

pytestmark, SLOW = needs_jail, pytest.mark.slow
Victim = subprocess.Popen[bytes]

CALLS = CallTests("f", (((1,), SECRET), ((2,), 2)))
TRUE = (f"assert f(1) == {SECRET!r}", "assert f(2) == 2", "assert all(map(f, [2]))", "assert not any(map(f, [0]))")
ASSERTS = AssertTests(TRUE, entry_points=("f",))
NAMES = [pytest.param(n, marks=[SLOW] * (n not in attacks.IN_EVERY_RUN)) for n in attacks.EVERYWHERE]
PIPE_KILLS = """
import signal, socket
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from covey.rewards.code import TestHarness
from covey.rewards.jail import messages
from covey.rewards.jail.harness import AssertTests, CallTests
code = 'import os, socket\\ns = socket.socket(fileno=os.dup(3))\\ns.shutdown(0)\\ndef f(x): return x'
with TestHarness() as harness:
    for tests in (CallTests('f', (((1,), 1), ((2,), 2))), AssertTests(('assert f(1) == 1',) * 2)):
        print(harness.run(code, tests).score)
    harness._sandbox._process.kill()
    harness._sandbox._process.wait()
    print(harness.run('def f(x): return 1', CallTests('f', (((1,), 1),))).score)
ours, theirs = socket.socketpair()
theirs.close()
try:
    messages.send(ours.fileno(), {})
except BrokenPipeError:
    print(signal.sigpending())
"""
SEARCHES = {
    "the stack": "import sys, traceback\ndef f(x):\n    found = []\n    frame = sys._getframe()\n    while frame:\n"
    "        found.append(repr(frame.f_locals) + repr(frame.f_code.co_consts))\n        frame = frame.f_back\n"
    "    return ' '.join(found)",
    "the garbage collector": "import gc\ndef f(x): return ' '.join(o for o in gc.get_objects() if isinstance(o, str))"
    " + ' '.join(repr(o)[:2000] for o in gc.get_objects())[:4000000]",
    "files": "import os\ndef f(x):\n    found = []\n    for top in ('/solution', '/tmp', '/dev', '/proc'):\n"
    "        for folder, _, names in os.walk(top):\n            for name in names:\n                try: found.append("
    "open(os.path.join(folder, name)).read(9999) if 'zero' not in name and 'random' not in name else '')\n"
    "                except Exception: pass\n    return ' '.join(found)",
    "memory": "import ctypes\ndef f(x):\n    base = id(x) & ~0xfffff\n    data = b''\n"
    "    for page in range(base, base + (1 << 20), 4096):\n"
    "        data += ctypes.string_at(page, 4096)\n    return data.decode('latin1')",
}
FOLDER = Path(jail.__file__).parent
SCRIPT = """
import importlib.util, json
assert importlib.util.find_spec("covey") is None
from prison.harness import CallTests, TestHarness
from prison.sandbox import Limits

good = "def add(a, b):\\n    return a + b"
hostile = "import os, sys\\nopen('/etc/passwd').read()\\n" + good
with TestHarness(Limits(seconds=3), workers=2) as harness:
    tests = CallTests("add", (((1, 2), 3), ((0, 0), 0)))
    print(json.dumps([[result.score, result.status] for result in harness.run_all([(good, tests), (hostile, tests)])]))
"""


@pytest.fixture(scope="module", params=MODES)
def harness(request: pytest.FixtureRequest) -> Iterator[TestHarness]:
    with jailed(request.param, Limits(seconds=1.5, memory_mb=192, files_mb=16, output_mb=1)) as harness:
        yield harness


@pytest.fixture
def victim() -> Iterator[Victim]:
    """A process of the same user."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def both(harness: TestHarness, code: str) -> tuple[TestResult, TestResult]:
    calls, asserts = harness.run_all([(code, CALLS), (code, ASSERTS)])
    return calls, asserts


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_scores_nothing(harness: TestHarness, name: str, victim: Victim, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    file.chmod(0o640)
    before, null = (path.stat() for path in (file, Path("/dev/null")))
    allowed = attacks.EVERYWHERE[name][1]
    began, used = time.monotonic(), time.process_time()
    for result in both(harness, attacks.source(name, pid=victim.pid, file=str(file))):
        assert result.score == 0.0, result
        assert not any(outcome.status == "passed" for outcome in result.outcomes[:2]), result
        assert result.status in (allowed or {"wrong_answer", "error", "cheat", "timeout"}), result
        assert "THROUGH" not in result.printed
        "".join(outcome.text for outcome in result.outcomes).encode()  # any file can hold it
    assert time.monotonic() - began < 12
    assert time.process_time() - used < 1  # nothing that a program says is worth much work on this side
    assert victim.poll() is None
    assert file.read_text() == "before"
    after, still = (path.stat() for path in (file, Path("/dev/null")))
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (before.st_mode, before.st_mtime, before.st_nlink)
    assert (still.st_mode, still.st_mtime) == (null.st_mode, null.st_mtime)
    assert [result.score for result in both(harness, HONEST)] == [1.0, 1.0]  # and the next one is not disturbed


def test_a_host_that_pipes_kill_outlives_a_closed_channel() -> None:
    """`SIGPIPE` as a shell's filters have it: the channel's end is an error here, for the jail and for frames."""
    done = subprocess.run([sys.executable, "-c", PIPE_KILLS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["0.0", "0.0", "1.0", "set()"]), done


@pytest.mark.parametrize("lock", ["fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.lockf(fd, fcntl.LOCK_SH)"])
def test_a_program_does_not_see_its_neighbours_locks(harness: TestHarness, lock: str) -> None:
    """A library is the same file for all of them. Locks of a program's own files work."""
    code = (
        "import fcntl, os, struct, time\ndef f(first):\n    fd = os.open(os.__file__, os.O_RDONLY)\n"
        f"    if first:\n        {lock}\n        time.sleep(0.6)\n        return 'held'\n    time.sleep(0.3)\n"
        f"    try:\n        {lock}\n        found = fcntl.fcntl(fd, 5, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))\n"
        "        if not found[0]: return 'seen'\n"
        "    except BlockingIOError: return 'seen'\n    except OSError: pass\n    return 'not seen'"
    )
    jobs = [(code, CallTests("f", (((True,), "held"),))), (code, CallTests("f", (((False,), "not seen"),)))]
    assert [result.score for result in harness.run_all(jobs)] == [1.0, 1.0]
    own = "import fcntl\ndef f(x):\n    with open('mine', 'w') as file: fcntl.flock(file, fcntl.LOCK_EX)\n    return 1"
    assert harness.run(own, CallTests("f", (((1,), 1),))).score == 1.0


def test_what_is_readable_by_name_leads_nowhere_else(tmp_path: Path) -> None:
    """Landlock allows what a link leads to: a link beside what is hidden is none of what is allowed."""
    for folder in ("lib/python3/dist-packages", "lib/kept", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    top, hidden = str(tmp_path / "lib"), str(tmp_path / "lib/python3")
    (tmp_path / "lib/a.so").touch()
    for name, target in (("link", hidden), ("out", str(tmp_path / "outside"))):
        (tmp_path / "lib" / name).symlink_to(target)
    assert sorted(confine.without(top, [hidden])) == [f"{top}/a.so", f"{top}/kept"]
    assert (confine.without(top, ["/elsewhere"]), confine.without(hidden, [hidden])) == ([top], [])
    readable, hidden_now = confine.system_paths()
    assert not any(name.endswith(("site-packages", "dist-packages")) for name in readable)
    inner = [path for top in readable for path in confine.without(top, hidden_now)]
    assert not any("/site-packages" in path or "/dist-packages" in path or "node_modules" in path for path in inner)
    assert any(Path(os.path.realpath(json.__file__)).is_relative_to(path) for path in inner)


@pytest.mark.parametrize("noise", ["[1]", "3", "{{{"])
def test_a_test_that_catches_all_does_not_hide_a_cheat(harness: TestHarness, noise: str) -> None:
    forger = f"import os, struct\ndef f(x):\n    os.write(3, struct.pack('!I', {len(noise)}) + {noise.encode()!r})"
    caught = "try:\n    y = f(1)\nexcept:\n    y = 1\nassert y == 1"
    for test in (caught, "def t():\n    try: return f(1)\n    finally: return 1\nassert t() == 1"):
        result = harness.run(forger, AssertTests((test, "assert f(2) == 2")))
        assert (result.status, result.fraction) == ("cheat", 0.0)


def test_a_program_that_speaks_and_does_not_listen_costs_nothing(harness: TestHarness) -> None:
    code = (
        "import os, time\nos.write(3, bytes((0, 0, 0, 2)) + b'{}')\ntime.sleep(0.2)\nos.write(3, b'x')\ntime.sleep(9)"
    )
    used = time.process_time()
    assert harness.run(code, CallTests("f", ((("x" * 4_000_000,), 1),))).status == "timeout"
    assert time.process_time() - used < 0.3


@pytest.mark.parametrize("name", SEARCHES)
def test_what_a_program_can_find_does_not_hold_the_expected_result(harness: TestHarness, name: str) -> None:
    """The search runs after the same tests were run by another program: nothing is left over from it either."""
    both(harness, HONEST)
    # its bytes are in the program, the text itself is not before the search is over
    looking = f"found = _f(x)\n    return bytes({list(SECRET.encode())}).decode() in found"
    hunt, control = (f"{SEARCHES[name]}\n_f = f\ndef f(x):\n    {do}" for do in (looking, "return len(_f(x)) > 100"))
    results = harness.run_all([(code, CallTests("f", (((1,), True),))) for code in (hunt, control)])
    assert results[0].score == 0.0, f"found by searching {name}: {results[0]}"
    if name not in ("files", "memory"):  # there is nothing to find, or the search crashes, which is as good
        assert results[1].score == 1.0, results[1]


def test_a_server_on_this_machine_is_not_reached(harness: TestHarness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\ns = socket.socket()\ns.connect(('127.0.0.1', {port}))"
        assert {result.status for result in both(harness, connect)} == {"error"}
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("covey-jail")}


def test_nothing_is_left_behind(harness: TestHarness) -> None:
    before = folders()
    with TestHarness(Limits(seconds=0.5)) as own:
        top = own._sandbox._process.pid
        first = children(top)
        for code in ("while True: pass", "open('x', 'w').write('y')", "import os\nos.fork()"):
            both(own, code)
        assert children(top) == first
        assert not any(children(int(pid)) for pid in first)
    assert not any(map(runs, (top, *first)))
    assert folders() == before


def runs(pid: int | str) -> bool:
    return Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("mode", ["namespace", "landlock"])
def test_the_jail_ends_with_its_owner(mode: str) -> None:
    script = "import time\nfrom covey.rewards.jail import sandbox\n"
    if mode == "landlock":
        script += f"sandbox._START = sandbox._START.replace('from jail import zygote\\n', {REFUSE!r})\n"
    script += "jail = sandbox.Sandbox()\nprint(jail._process.pid, flush=True)\ntime.sleep(60)"
    before = folders()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        processes = [pid, *map(int, children(pid))]
        owner.kill()
    for _ in range(50):
        if not any(map(runs, processes)) and folders() <= before:
            break
        time.sleep(0.1)
    assert not any(map(runs, processes))
    assert folders() <= before


def test_a_folder_whose_jail_was_killed_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_namespaces(monkeypatch)
    before, jail = folders(), Sandbox()
    (left,) = folders() - before
    jail._process.kill()
    jail.close()
    assert left in folders()
    with Sandbox():
        assert left not in folders()
    assert folders() <= before


def test_a_jail_that_died_is_started_anew() -> None:
    with TestHarness(workers=4) as harness:
        harness._sandbox._process.kill()
        harness._sandbox._process.wait()
        assert harness.run(HONEST, CALLS).score == 1.0
        # in the middle of a step: all is scored, and by one new jail
        killed = harness._sandbox
        slow = "import time\n" + HONEST.replace("return", "time.sleep(0.05)\n    return")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (time.sleep(0.3), killed._process.kill()))
            results = harness.run_all([(slow, CALLS), (slow, ASSERTS)] * 6)
        assert [result.score for result in results] == [1.0] * 12
        assert harness._sandbox is not killed
        with ThreadPoolExecutor(8) as pool:  # and many threads share one
            assert [one.score for one in pool.map(lambda _: harness.run(HONEST, CALLS), range(8))] == [1.0] * 8


def test_a_program_in_whose_time_the_jail_ends_twice_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Sandbox, number: int) -> tuple[int, int]:
        self._process.kill()
        raise sandbox.JailEndedError("the jail has ended")

    with TestHarness() as harness:
        monkeypatch.setattr(Sandbox, "end", end)
        result = harness.run("import os\nos._exit(1)", ASSERTS)
        monkeypatch.undo()
        assert [outcome.status for outcome in result.outcomes] == ["error"] * 4
        assert harness.run(HONEST, CALLS).score == 1.0


def test_threads_are_counted(harness: TestHarness) -> None:
    code = (
        "import threading\nthreading.stack_size(1 << 16)\ndone = threading.Event()\nthreads = []\n"
        "def f(x):\n    try:\n        while True:\n            threads.append(threading.Thread(target=done.wait))\n"
        "            threads[-1].start()\n    except RuntimeError:\n        return len(threads)"
    )
    assert harness.run(code, CallTests("f", (((1,), 64),))).score == 1.0


def test_a_large_answer_costs_its_program_the_test_and_this_side_nothing(harness: TestHarness) -> None:
    """The value that is expected bounds what is read: 8 MB of empty lists took 6 s and 390 MiB here."""
    forged, began = attacks.source("a large nested forgery", pid=0, file=""), time.thread_time()
    tracemalloc.start()
    try:
        result, peak = harness.run(forged, CALLS), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.outcomes[0].status == "wrong_answer"
    assert "bytes, the expected value has" in result.outcomes[0].text
    assert time.thread_time() - began < 1
    assert peak < 40 << 20
    large = CallTests("f", (((50_000,), list(range(50_000))),))  # one that is expected is read
    assert harness.run("def f(n): return [float(i) for i in range(n)]", large).score == 1


def test_sets_come_in_the_same_order_in_each_jail() -> None:
    code = "import random\ndef f():\n    names = {str(i) for i in range(50)}\n"
    code += "    return repr([{None, 'a', len, object}, names, random.random()])"
    found = set()
    for _ in range(3):
        with TestHarness() as harness:
            found.add(harness.run(code, CallTests("f", (((), ""),))).outcomes[0].text)
    assert len(found) == 1


def test_protections_are_told_and_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox() as jail:
        assert jail.protections == Protections("namespace", True, True)
        assert "no network" in str(jail.protections)
    weak = Protections("", True, True, "no namespaces: EPERM")
    assert not weak.enough
    monkeypatch.setattr("covey.rewards.jail.sandbox._protections", lambda found: weak)
    with pytest.raises(JailError, match=r"files NOT protected.*no namespaces: EPERM.*unprotected=True"):
        Sandbox()
    with Sandbox(unprotected=True) as jail:
        assert jail.protections is weak


def test_without_namespaces_landlock_keeps_files_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse_namespaces(monkeypatch)
    before = folders()
    with TestHarness(Limits(seconds=2)) as harness:
        assert "Landlock" in harness.protections
        for code in ("open('/etc/passwd')", f"import os\nos.listdir({str(tmp_path)!r})"):
            assert {result.status for result in both(harness, code)} == {"error"}
        for call in ("mkdir('d', 0)", "umask(0o277)"):  # who could remove what is in such a directory?
            assert {result.status for result in both(harness, f"import os\nos.{call}\n{HONEST}")} == {"error"}
        assert harness.run("open('mine', 'w').write('1')\n" + HONEST, CALLS).score == 1.0
        assert harness.run("import socket\nsocket.socket()", CALLS).status == "error"
        (place,) = folders() - before
        assert os.listdir(Path(tempfile.gettempdir()) / place) == []  # scratch directories are gone
    assert folders() == before


def test_without_a_supervisor_there_are_no_threads_and_no_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that have no user notification."""
    none = "from jail import seccomp\nseccomp.supervise = lambda *, files: None\n"
    for start, made in ((none, "passed"), (REFUSE + none, "error")):
        monkeypatch.undo()
        begins = sandbox._START.replace("from jail import zygote\n", start + "from jail import zygote\n")
        monkeypatch.setattr(sandbox, "_START", begins)
        with TestHarness(Limits(seconds=2)) as harness:
            assert harness.run(HONEST, ASSERTS).score == 1.0
            thread = "import threading\ndef f(x): threading.Thread(target=print).start()"
            assert "can't start new thread" in harness.run(thread, CALLS).outcomes[0].text
            assert harness.run("import os\nos.mkdir('x')\nopen('y', 'w')\n" + HONEST, CALLS).status == made


def test_programs_are_confined_too(harness: TestHarness) -> None:
    tests = ProgramTests((("3\n", "6\n"),))
    assert harness.run("print(2 * int(input()))", tests).score == 1.0
    kills = ("print('6')\nimport os\nos.kill(os.getppid(), 9)", "import os\nos.abort()")
    for code in ("while True: pass", "open('/etc/passwd')", *kills):
        assert harness.run(code, tests).score == 0.0


def test_a_copy_under_another_name_runs_without_covey(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "prison", ignore=shutil.ignore_patterns("__pycache__"))
    script = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"
    command = [sys.executable, "-I", "-S", "-B", "-c", script]  # without site-packages, where Covey is
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[1.0, "passed"], [0.0, "error"]]


def test_it_imports_the_standard_library_and_itself_and_every_file_is_in_the_readme() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert path.name == "__init__.py" or f"`{path.name}`" in told
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= sys.stdlib_module_names, path.name
            elif isinstance(node, ast.ImportFrom):
                inside = node.level == 1 or (node.module or "").split(".")[0] in sys.stdlib_module_names
                assert inside, f"{path.name}: {ast.unparse(node)}"

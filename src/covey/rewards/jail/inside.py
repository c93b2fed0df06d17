"""What a confined process does, told by the first message on its channel.

    candidate   load code nobody vouches for, then answer calls to what it defines, until the channel closes
    program     run such code as a program
    tester      run tests, whose calls to the candidate go out as messages and come back as plain values

A candidate never sees a test or an expected result: only arguments come in and only values go out. So it can patch,
print, exit, write to its channel or search its memory as it likes; what it says is a value, compared elsewhere. Nothing
of a verdict is ever taken from it: whether a test passed is known by whether its statement came to its end.

A tester's messages begin with a letter: `S` set up, `C` a call for the candidate, `R` a result, `D` done.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import json
import linecache
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

from . import confine, messages

_MAX_TEXT = 500
_FILE = "solution.py"


def open_streams() -> None:
    """Make the standard streams of the descriptors 0, 1 and 2 as they are now."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, buffering=1, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    )


def main(channel: int, *, rooted: bool) -> None:
    """Play the role that the first message names; `rooted`: in a file system of its own."""
    if (message := messages.receive(channel)) is None:
        return
    _provide_input(message.get("stdin", "").encode("utf-8", "surrogatepass"), rooted=rooted)
    if not rooted:
        confine.share_file_bytes()
    {"candidate": _candidate, "program": _program, "tester": _tester}[message["role"]](channel, message)


def _provide_input(data: bytes, *, rooted: bool) -> None:
    """Standard input is a file. `/dev/stdin` leads to it: by its name, else through the descriptor."""
    if not data and not rooted:
        return
    place = "../.stdin" if rooted else ".stdin"
    fd = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
    if not rooted:
        os.unlink(place)
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    open_streams()


def _module(name: str, code: str) -> ModuleType:
    """An empty module that can be found by its name, as dataclasses, type hints and pickling need it."""
    module = ModuleType(name)
    module.__file__ = _FILE
    sys.modules[name] = module
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    return module


def _candidate(channel: int, message: dict[str, Any]) -> None:
    module = _module("solution", message["code"])
    try:
        exec(compile(message["code"], _FILE, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        messages.send(channel, _describe(error))
        return
    messages.send(channel, {})
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    encode, decode = messages.Encoder(keep), messages.Decoder(lambda number: objects[number])
    while (request := messages.receive(channel)) is not None:
        try:
            answer = _answer(request, module.__dict__, objects, encode, decode)
        except BaseException as error:
            answer = _describe(error)
        try:
            messages.send(channel, answer)
        except ValueError as error:
            messages.send(channel, {"failed": "error", "text": str(error)})


def _answer(
    request: dict[str, Any], names: dict[str, Any], objects: list[Any], encode: Any, decode: Any
) -> dict[str, Any]:
    target: Any = objects[request["on"]] if "on" in request else None
    if "name" in request:
        name = request["name"]
        if target is None and name not in names:
            raise NameError(f"name {name!r} is not defined")
        target = names[name] if target is None else getattr(target, name)
    if "arguments" not in request:
        return {"value": encode(target)}
    positional, named = decode(request["arguments"])
    value = encode(target(*positional, **named))
    if not request.get("changed", True):
        return {"value": value}
    # arguments that the call has changed, so that the caller can look at them
    kinds = (list, dict, set, bytearray)
    changed = [[place, encode(one)] for place, one in enumerate(positional) if type(one) in kinds]
    return {"value": value, "changed": changed}


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SyntaxError) and error.filename == _FILE:
        return {"failed": "syntax", "text": f"line {error.lineno}: {error.msg}"[:_MAX_TEXT]}
    if isinstance(error, MemoryError):
        return {"failed": "memory", "text": "out of memory"}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = f"{type(error).__name__}: {error}{where}"
    except BaseException:
        text = type(error).__name__ + where
    kind = next((c.__name__ for c in type(error).__mro__ if getattr(builtins, c.__name__, None) is c), "Exception")
    said = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else None
    return {"failed": "error", "text": text[:_MAX_TEXT], "kind": kind, "said": said}


def _program(channel: int, message: dict[str, Any]) -> None:
    """Run code as `__main__`; its output goes where the parent listens, and what it says to standard error nowhere."""
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    module = _module("__main__", message["code"])
    code, outcome = 0, None
    try:
        exec(compile(message["code"], _FILE, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        outcome = _describe(error)
    # as Python ends: threads, what was registered, what is in a buffer, what globals hold back, and what that printed
    ends = (threading._shutdown, atexit._run_exitfuncs)  # type: ignore[attr-defined]
    for end in (*ends, _flush, _restore, module.__dict__.clear, gc.collect, _flush):
        try:
            end()
        except BaseException as error:
            code = code or int(not isinstance(error, SystemExit))
    messages.send(channel, outcome or {"exit": code})


def _flush() -> None:
    if sys.stdout and not getattr(sys.stdout, "closed", False):
        sys.stdout.flush()


def _restore() -> None:
    sys.stdout = sys.__stdout__


class RemoteError(Exception):
    """A call failed on the other side in a way that no builtin exception names."""


class _Ended(BaseException):
    """The candidate has ended or closed its channel."""


class _Forged(BaseException):
    """The candidate wrote what is no message."""


class _Remote:
    """Something that lives in the candidate. It can be called, asked for attributes and passed back, not compared."""

    def __init__(self, tester: _Caller, request: dict[str, Any], number: int | None = None) -> None:
        self.__dict__.update(_tester=tester, _request=request, _number=number)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._tester.ask(self._request, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._number is not None:
            return self._tester.attribute(self._number, name)
        return getattr(self._tester.look_up(self._request), name)  # of what a name stands for: a class, a constant


class _Caller:
    """Sends a tester's calls out."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._encode = messages.Encoder(self._known)
        self._decode = messages.Decoder(lambda number: _Remote(self, {"on": number}, number))
        self.failure: tuple[BaseException | None, str, str] = (None, "", "")
        self.forged = False

    def ask(self, request: dict[str, Any], positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        answer = self._exchange(request | {"arguments": self._encode((list(positional), named))})
        for place, tree in answer.get("changed", ()):
            _overwrite(positional[place], self._decode(tree))
        return self._decode(answer["value"])

    def look_up(self, request: dict[str, Any]) -> Any:
        return self._decode(self._exchange(request)["value"])

    def attribute(self, number: int, name: str) -> Any:
        found = self.look_up({"on": number, "name": name})
        return _Remote(self, {"on": number, "name": name}) if isinstance(found, _Remote) else found

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        messages.send_bytes(self._channel, b"C" + json.dumps(request).encode("utf-8", "surrogatepass"))
        try:
            answer: Any = messages.receive(self._channel)
        except (ValueError, RecursionError):
            answer = []
        if answer is None:
            raise _Ended
        if not isinstance(answer, dict):
            self.forged = True
            raise _Forged
        if "failed" in answer:
            text, said = str(answer.get("text"))[:_MAX_TEXT], answer.get("said")
            error = _kind(answer.get("kind"))(said[:_MAX_TEXT] if isinstance(said, str) else text)
            # what a candidate may say of how a call failed; never that a test passed
            self.failure = (error, answer["failed"] if answer["failed"] in ("syntax", "memory") else "error", text)
            raise error
        return answer

    def _known(self, value: Any) -> int:
        if isinstance(value, _Remote) and value._number is not None:
            return int(value._number)
        raise messages.CodecError(f"an argument of type {type(value).__name__} cannot be handed to the solution")


def _kind(name: Any) -> type[Exception]:
    """The builtin exception that a failed call raises in the test.

    Not those that mean something to the test's own machinery: a failed comparison, or the end of an iteration, which
    would let `all(map(f, values))` pass.
    """
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    kept = AssertionError | StopIteration | StopAsyncIteration | MemoryError
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, kept):
        return RemoteError
    try:
        kind("")
    except Exception:  # one that wants more than a text, such as UnicodeDecodeError
        return next((base for base in kind.__mro__ if base in (ValueError, LookupError)), RemoteError)
    return kind


def _overwrite(old: Any, new: Any) -> None:
    if type(old) is not type(new) or old == new:
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def _tester(channel: int, message: dict[str, Any]) -> None:
    names: dict[str, Any] = {"__name__": "tests", "_compare_": _compare}
    caller = _Caller(channel)
    names |= {name: __import__(name) for name in message["modules"]}
    exec(compile(message["setup"], "setup.py", "exec", dont_inherit=True), names)
    for alias, name in message["remote"].items():
        if alias not in names or alias in message["named"]:  # never what the setup has defined
            names[alias] = _Remote(caller, {"name": name})
    if unknown := [name for name in message["used"] if name not in names]:
        raise NameError(f"the tests use {', '.join(unknown)}, which neither they nor their setup define")
    messages.send_bytes(channel, b"S")
    for test in message["tests"]:
        try:
            _run_test(test, names)
            status, text = "passed", ""
        except AssertionError as error:
            status, text = "wrong_answer", str(error) or test
        except _Ended:
            return
        except MemoryError:
            status, text = "memory", "out of memory"
        except BaseException as error:
            failed, told, told_text = caller.failure
            status, text = (told, told_text) if error is failed else ("error", f"{type(error).__name__}: {error}")
        if caller.forged:
            status, text = "cheat", "a message that is none"
        result = {"result": status, "text": text[:_MAX_TEXT]}
        messages.send_bytes(channel, b"R" + json.dumps(result).encode())
    messages.send_bytes(channel, b"D")


def _run_test(test: str, names: dict[str, Any]) -> None:
    tree = ast.parse(test)
    for number, statement in enumerate(tree.body):
        match statement:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]), msg=None):
                arguments = [left, right, ast.Constant(ast.unparse(left))]
                explained = ast.Expr(ast.Call(ast.Name("_compare_", ast.Load()), arguments, []))
                tree.body[number] = ast.copy_location(explained, statement)
    exec(compile(ast.fix_missing_locations(tree), "test.py", "exec", dont_inherit=True), names)


def _compare(left: Any, right: Any, text: str) -> None:
    if not left == right:
        raise AssertionError(f"{text} gave {messages.shown(left)}, not {messages.shown(right)}")

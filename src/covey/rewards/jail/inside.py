"""What a confined process does, told by the first message on its channel.

    candidate   load code nobody vouches for, then answer calls to what it defines, until the channel closes
    program     run such code as a program
    tester      run tests, whose calls to the candidate go out as messages and come back as plain values

A candidate never sees a test or an expected result: only arguments come in and only values go out. So it can patch,
print, exit or search its memory as it likes; what it says is compared elsewhere.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from . import codec, frames

_MAX_TEXT = 500


def open_streams() -> None:
    """Make the standard streams of the descriptors 0, 1 and 2 as they are now."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, buffering=1, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    )


def main(channel: int) -> None:
    """Play the role that the first message names."""
    message = frames.receive(channel)
    if message is None:
        return
    roles = {"candidate": _candidate, "program": _program, "tester": _tester}
    roles[message["role"]](channel, message)


# ---------------------------------------------------------------- candidate


def _candidate(channel: int, message: dict[str, Any]) -> None:
    module = ModuleType("solution")
    failed = _load(message["code"], module.__dict__)
    if failed is not None:
        frames.send(channel, failed)
        return
    frames.send(channel, {"names": [name for name in module.__dict__ if isinstance(name, str)]})
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    encode, decode = codec.Encoder(keep), codec.Decoder(lambda number: objects[number])
    while (request := frames.receive(channel)) is not None:
        try:
            answer = _answer(request, module.__dict__, objects, encode, decode)
        except BaseException as error:
            answer = _describe(error)
        try:
            frames.send(channel, answer)
        except ValueError as error:
            frames.send(channel, {"failed": "error", "text": str(error)})


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
    # arguments that the call has changed, so that the caller can look at them
    changed = [
        [place, encode(argument)]
        for place, argument in enumerate(positional)
        if type(argument) in (list, dict, set, bytearray)
    ]
    return {"value": value, "changed": changed}


def _load(code: str, names: dict[str, Any]) -> dict[str, Any] | None:
    """Run a module's code; what went wrong, or None."""
    try:
        exec(compile(code, "solution.py", "exec", dont_inherit=True), names)
    except BaseException as error:
        return _describe(error)
    return None


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SyntaxError) and error.filename == "solution.py":
        return {"failed": "syntax", "text": f"line {error.lineno}: {error.msg}"[:_MAX_TEXT]}
    if isinstance(error, MemoryError):
        return {"failed": "memory", "text": "out of memory"}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "solution.py"]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = f"{type(error).__name__}: {error}{where}"
    except BaseException:
        text = type(error).__name__ + where
    kind = next((c.__name__ for c in type(error).__mro__ if getattr(builtins, c.__name__, None) is c), "Exception")
    return {"failed": "error", "text": text[:_MAX_TEXT], "kind": kind}


# ---------------------------------------------------------------- program


def _program(channel: int, message: dict[str, Any]) -> None:
    """Run code as `__main__`. Its input lies in a file that has no name; its output goes where the parent listens."""
    fd = os.open("input", os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink("input")
    data = message["stdin"].encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    open_streams()
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    code, outcome = 0, None
    try:
        exec(compile(message["code"], "solution.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        outcome = _describe(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 1
    frames.send(channel, outcome or {"exit": code})


# ---------------------------------------------------------------- tester


class RemoteError(Exception):
    """A call failed on the other side in a way that no builtin exception names."""


class _Ended(BaseException):
    """The candidate is gone."""


class _Remote:
    """Something that lives in the candidate. It can be called, asked for attributes and passed back, not compared."""

    def __init__(self, tester: _Caller, request: dict[str, Any], number: int | None = None) -> None:
        self.__dict__.update(_tester=tester, _request=request, _number=number)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._tester.ask(self._request, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._number is None:
            raise AttributeError(name)
        return self._tester.attribute(self._number, name)


class _Caller:
    """Sends a tester's calls out."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._encode = codec.Encoder(self._known)
        self._decode = codec.Decoder(lambda number: _Remote(self, {"on": number}, number))

    def ask(self, request: dict[str, Any], positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        answer = self._exchange(request | {"arguments": self._encode((list(positional), named))})
        for place, tree in answer.get("changed", ()):
            _overwrite(positional[place], self._decode(tree))
        return self._decode(answer["value"])

    def attribute(self, number: int, name: str) -> Any:
        found = self._decode(self._exchange({"on": number, "name": name})["value"])
        return _Remote(self, {"on": number, "name": name}) if isinstance(found, _Remote) else found

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        frames.send(self._channel, {"call": request})
        answer = frames.receive(self._channel)
        if answer is None:
            raise _Ended
        if "failed" in answer:
            kind = getattr(builtins, str(answer.get("kind")), None)
            fits = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, AssertionError)
            error: Exception = (kind if fits else RemoteError)(str(answer.get("text")))  # type: ignore[misc]
            error.add_note(str(answer["failed"]))
            raise error
        return answer

    def _known(self, value: Any) -> int:
        if isinstance(value, _Remote) and value._number is not None:
            return int(value._number)
        raise codec.CodecError(f"an argument of type {type(value).__name__} cannot be handed to the solution")


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
    exec(compile(message["setup"], "setup.py", "exec", dont_inherit=True), names)
    for alias, name in message["remote"].items():
        names[alias] = _Remote(caller, {"name": name})
    for test in message["tests"]:
        try:
            _run_test(test, names)
            result = {"status": "passed", "text": ""}
        except AssertionError as error:
            result = {"status": "wrong_answer", "text": str(error) or test}
        except _Ended:
            return
        except MemoryError:
            result = {"status": "memory", "text": "out of memory"}
        except BaseException as error:
            remote = getattr(error, "__notes__", None)  # how the call that raised it failed
            text = str(error) if remote else f"{type(error).__name__}: {error}"
            result = {"status": remote[0] if remote else "error", "text": text}
        frames.send(channel, {"result": result["status"], "text": result["text"][:_MAX_TEXT]})
    frames.send(channel, {"done": True})


def _run_test(test: str, names: dict[str, Any]) -> None:
    tree = ast.parse(test)
    for number, statement in enumerate(tree.body):
        match statement:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]), msg=None):
                tree.body[number] = ast.copy_location(_explained(left, right), statement)
    exec(compile(ast.fix_missing_locations(tree), "test.py", "exec", dont_inherit=True), names)


def _explained(left: ast.expr, right: ast.expr) -> ast.stmt:
    """`_compare_(left, right, "left")`."""
    call = ast.Call(ast.Name("_compare_", ast.Load()), [left, right, ast.Constant(ast.unparse(left))], [])
    return ast.Expr(call)


def _compare(left: Any, right: Any, text: str) -> None:
    if not left == right:
        raise AssertionError(f"{text} gave {left!r:.200}, not {right!r:.200}")

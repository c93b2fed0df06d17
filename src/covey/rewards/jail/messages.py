"""Messages between two processes, and plain values in them: a value crosses a border, and nothing is executed.

A message is four bytes of length, then JSON. None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset
and dict cross as they are, and the results of iterators as lists that remember it. Subclasses cross as what they derive
from, without their methods: a `__eq__` of a hostile class stays where it is. Anything else is a `Handle`, a number that
means something on the other side only.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import signal
import struct
from collections.abc import Callable, Iterator
from typing import Any

MAX_BYTES = 8 << 20


def send(channel: int, message: dict[str, Any]) -> None:
    """Send one message on a file descriptor. Raises `ValueError`: it is too long."""
    send_bytes(channel, json.dumps(message).encode("utf-8", "surrogatepass"))


def send_bytes(channel: int, body: bytes) -> None:
    """Send one message as it is. Raises `ValueError`: it is too long."""
    data = memoryview(framed(body))
    # the other side may close, and a host not ignore the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        while data:
            data = data[os.write(channel, data) :]
    finally:
        if signal.SIGPIPE in signal.sigpending() and signal.SIGPIPE not in before:
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def framed(body: bytes) -> bytes:
    """A message with its length before it. Raises `ValueError`: it is too long."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_BYTES}")
    return struct.pack("!I", len(body)) + body


def receive(channel: int) -> dict[str, Any] | None:
    """Wait for one message; None when the other side has closed."""
    if (header := _exactly(channel, 4)) is None:
        return None
    (length,) = struct.unpack("!I", header)
    body = _exactly(channel, length) if length <= MAX_BYTES else None
    return None if body is None else json.loads(body.decode("utf-8", "surrogatepass"))


def _exactly(channel: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(channel, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


MAX_DEPTH = 60
MAX_ITEMS = 200_000
MAX_COLLISIONS = 1000
"""Of keys in one set or dictionary that is read: a hostile sender can choose keys that all have one hash."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdict = 50


class CodecError(Exception):
    """A value that is too large or too deep, or text that is no value."""


class Encoder:
    """Turns values into trees that JSON can hold."""

    def __init__(self, handle: Callable[[Any], int], *, materialise: bool = True) -> None:
        self._handle, self._materialise = handle, materialise
        self._left = MAX_ITEMS

    def __call__(self, value: Any) -> Any:
        """Encodes one value, counting its items anew."""
        self._left = MAX_ITEMS
        return self._encode(value, 0)

    def _encode(self, value: Any, depth: int) -> Any:
        self._left -= 1 + (len(value) // 64 if isinstance(value, str | bytes | bytearray) else 0)
        if self._left < 0 or depth > MAX_DEPTH:
            raise CodecError(f"a value of more than {MAX_ITEMS} items, 64 characters each, or {MAX_DEPTH} levels")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__index__(value)
            return number if abs(number) < 1 << 62 else {"i": hex(number)}
        if isinstance(value, float):
            real = float.__float__(value)
            return real if math.isfinite(real) else {"f": str(real)}
        if isinstance(value, complex):
            return {"c": [str(value.real), str(value.imag)]}
        if isinstance(value, bytes | bytearray):
            return {"b": bytes(value).hex()}
        if isinstance(value, list):
            return [self._encode(item, depth + 1) for item in list.__iter__(value)]
        if isinstance(value, tuple):
            return {"t": [self._encode(item, depth + 1) for item in tuple.__iter__(value)]}
        if isinstance(value, set | frozenset):
            kind = "s" if isinstance(value, set) else "z"
            return {kind: [self._encode(item, depth + 1) for item in list(value)]}
        if isinstance(value, dict):
            pairs = list(dict.items(value))
            return {"d": [[self._encode(k, depth + 1), self._encode(v, depth + 1)] for k, v in pairs]}
        if self._materialise and _is_lazy(value):
            return {"l": [self._encode(item, depth + 1) for item in _bounded(value)]}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self._encode(value.tolist(), depth)
        return {"h": self._handle(value)}


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "i": lambda body: int(body, 16),
    "f": float,
    "c": lambda body: complex(float(body[0]), float(body[1])),
    "b": bytes.fromhex,
}


class Decoder:
    """Turns trees that JSON can hold into values."""

    def __init__(self, handle: Callable[[int], Any]) -> None:
        self._handle = handle

    def __call__(self, tree: Any) -> Any:
        """Decodes one value. Raises `CodecError`: the tree is not what an encoder makes."""
        try:
            return self._decode(tree, 0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise CodecError(f"{type(error).__name__}: {error}") from None

    def _decode(self, tree: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CodecError(f"more than {MAX_DEPTH} levels")
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if isinstance(tree, list):
            return [self._decode(item, depth + 1) for item in tree]
        ((kind, body),) = tree.items()
        if kind in _SCALARS:
            return _SCALARS[kind](body)
        if kind == "h":
            return self._handle(int(body))
        if kind == "d":
            pairs = [(self._decode(k, depth + 1), self._decode(v, depth + 1)) for k, v in body]
            _check_hashes([key for key, _ in pairs])
            return dict(pairs)
        items = [self._decode(item, depth + 1) for item in body]
        if kind in "sz":
            _check_hashes(items)
        makers: dict[str, Callable[[list[Any]], Any]] = {"t": tuple, "s": set, "z": frozenset, "l": iter}
        return makers[kind](items)


def shown(value: Any) -> str:
    """A value in at most about 200 characters, whatever it is: a text of all of a number may be refused by Python."""
    try:
        return _SHORT.repr(value)[:200]
    except Exception:
        return f"a value of type {type(value).__name__}"


def _check_hashes(keys: list[Any]) -> None:
    if len(keys) - len({hash(key) for key in keys}) > MAX_COLLISIONS:
        raise CodecError(f"more than {MAX_COLLISIONS} keys of equal hash")


def _is_lazy(value: Any) -> bool:
    """Is this an iterator of Python's own, a range or a view?"""
    kind = type(value)
    own = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return own or kind.__name__ in ("range", "dict_keys", "dict_values", "dict_items")


def _bounded(values: Any) -> Iterator[Any]:
    for number, item in enumerate(values):
        if number > MAX_ITEMS:
            raise CodecError(f"an iterator of more than {MAX_ITEMS} items")
        yield item

"""Forms, as clients upload them: written to the disk while they arrive, then read in one go, both beside the loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import IO
from urllib.parse import parse_qsl

from python_multipart.multipart import parse_options_header

from covey.errors import AdapterError

_AT_ONCE = 1 << 20
_LONGEST_HEAD = 4096
_LONGEST_FIELD = 1 << 20
"""Of all parts but the first that is known, in bytes."""


async def spool(body: AsyncIterator[bytes]) -> IO[bytes]:
    """A request's body in a file without a name, for the caller to close."""
    file, arrived = tempfile.TemporaryFile(), bytearray()  # noqa: SIM115
    try:
        async for part in body:
            arrived += part
            if len(arrived) >= _AT_ONCE:
                await asyncio.to_thread(file.write, arrived)
                arrived = bytearray()
        file.write(arrived)
    except BaseException:
        file.close()
        raise
    return file


def read_form(content_type: str, file: IO[bytes], known: Sequence[str]) -> dict[str, bytes]:
    """The parts of a form by their names, each of which may come once.

    Raises:
        AdapterError: it is no form, or has another part or one twice.
    """
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data" and options.get(b"boundary"):
        parts = _parts(file, b"--" + options[b"boundary"])
    elif kind == b"application/x-www-form-urlencoded" and file.seek(0, 2) <= _LONGEST_HEAD:
        file.seek(0)
        fields = parse_qsl(file.read().decode("latin-1"), keep_blank_values=True)
        parts = ((name, value.encode("utf-8", "replace")) for name, value in fields)
    else:
        raise AdapterError(f"content-type: {content_type!r:.80}: send the parts as multipart/form-data")
    found: dict[str, bytes] = {}
    for name, value in parts:
        if name not in known or name in found:
            raise AdapterError(
                f"the part {name!r:.80} is unknown, or comes twice; send each of {', '.join(known)} once"
            )
        if name != known[0] and len(value) > _LONGEST_FIELD:
            raise AdapterError(f"{name} has more than {_LONGEST_FIELD} bytes; send PEFT's adapter_config.json as it is")
        found[name] = value
    return found


def _parts(form: IO[bytes], mark: bytes) -> Iterator[tuple[str, bytes]]:
    place = _find(form, mark, 0)
    while place >= 0:
        form.seek(start := place + len(mark))
        head, blank, _ = form.read(_LONGEST_HEAD).partition(b"\r\n\r\n")
        if head.startswith(b"--"):
            return
        start += len(head) + 4
        place = _find(form, b"\r\n" + mark, start) if blank else -1
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        said = {title.lower(): value.strip() for title, _, value in lines}.get(b"content-disposition")
        name = parse_options_header(said)[1].get(b"name")
        if name is None or place < 0:
            break
        form.seek(start)
        yield name.decode("utf-8", "replace"), form.read(place - start)
        place += 2
    raise AdapterError("the form is cut off, or a part has no name; send it as multipart/form-data")


def _find(form: IO[bytes], mark: bytes, start: int) -> int:
    """Where `mark` comes first from `start` on; -1 = nowhere. Others run between two blocks."""
    for block in range(start, form.seek(0, 2), _AT_ONCE):
        form.seek(block)
        place = form.read(_AT_ONCE + len(mark) - 1).find(mark)
        if place >= 0:
            return block + place
    return -1

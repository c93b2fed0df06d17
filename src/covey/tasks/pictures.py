"""Pictures of dataset rows: read as users give them, and placed in messages as TRL places them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from covey.errors import DataError
from covey.types import PICTURE_COLUMNS, Message

MOST_PIXELS, _MOST_BYTES = 64_000_000, 256 << 20
_KEPT: dict[str, Literal["png", "jpg", "webp"]] = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
_READ = (*_KEPT, "GIF", "BMP")
_DEEP = "IF"
"""How PIL's modes of 16 and 32 bits begin: as RGB they would be cut off at 255."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Picture:
    """A picture as a PNG, JPEG or WebP file; pictures are equal where their files are."""

    sha256: str
    """Of the file, 64 hexadecimal digits."""
    size: tuple[int, int]
    """Width and height in pixels."""
    ending: Literal["png", "jpg", "webp"]
    data: bytes = field(repr=False, compare=False)
    """The file's content."""

    def open(self) -> Any:
        """The `PIL.Image.Image`, which is decoded when it is first used."""
        from PIL import Image, ImageOps

        image = Image.open(io.BytesIO(self.data))
        turned = image.getexif().get(0x0112, 1) != 1  # as a camera was held
        return ImageOps.exif_transpose(image) if turned else image


_HELD: WeakValueDictionary[str, Picture] = WeakValueDictionary()
"""Equal files are one object: an album knows a picture as long as anything holds it."""


def pictures_in(content: Any) -> list[Picture]:
    """The pictures of messages, of a column or of one of their parts, in order."""
    if isinstance(content, Picture):
        return [content]
    if isinstance(content, Mapping):
        content = [content.get("content"), content.get("image")]
    return [found for part in content for found in pictures_in(part)] if isinstance(content, list | tuple) else []


def with_pictures(content: Any, shown: Callable[[Picture], Any]) -> Any:
    """A copy of messages or of a column, with what is shown of each picture in its place."""
    if isinstance(content, Picture):
        return shown(content)
    if isinstance(content, Mapping):
        return {name: with_pictures(value, shown) for name, value in content.items()}
    return [with_pictures(part, shown) for part in content] if isinstance(content, list | tuple) else content


def read_picture(value: Any, where: str, folder: Path | None = None) -> Picture:
    """A picture from a PIL image, an array `[height, width, 3]` of bytes, a file's bytes, `{"bytes": ..., "path": ...}`
    as of `datasets`, a `data:` URL or a path relative to `folder`. GIF and BMP become PNG.

    Raises `DataError`: it is none of them, cannot be read or decoded, or is too large; `where` says which one.
    """
    if isinstance(value, Picture):
        return value
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PIL only warns of files that decode to gigabytes
        try:
            if isinstance(value, np.ndarray) and value.ndim > 1:
                value = Image.fromarray(value)
            data = _png(value) if isinstance(value, Image.Image) else _bytes(value, where, folder)
            with Image.open(io.BytesIO(data), formats=_READ) as image:
                if image.width * image.height > MOST_PIXELS:
                    said = f"{image.width} x {image.height} pixels, more than {MOST_PIXELS:,}"
                    raise DataError(f"{where} has {said}; make it smaller")
                image.load()
                size = image.size[::-1] if 5 <= image.getexif().get(0x0112, 1) <= 8 else image.size
                kind = image.format or ""
                data = data if kind in _KEPT and image.mode[0] not in _DEEP else _png(image)
        except DataError:
            raise
        except Exception as error:  # decoders raise what they like
            told = str(error).partition(" <_io.")[0][:200]  # PIL names an object of this process
            name = f", {value:.200}," if isinstance(value, str) and value[:5] != "data:" else ""
            fix = "give a PNG, JPEG, WebP, GIF or BMP, or an array [height, width, 3] of bytes"
            raise DataError(f"{where}{name} cannot be read ({type(error).__name__}: {told}); {fix}") from error
    picture = Picture(hashlib.sha256(data).hexdigest(), size, _KEPT.get(kind, "png"), data)
    return _HELD.setdefault(picture.sha256, picture)


def rgb(image: Any) -> Any:
    """A PIL image as RGB, what is transparent on white as processors have it; `ValueError` for more than 8 bits."""
    from PIL import Image

    if image.mode[0] in _DEEP:
        raise ValueError(f"mode {image.mode} has more than 8 bits; scale it to 8")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _png(image: Any) -> bytes:
    from PIL import ImageOps

    file = io.BytesIO()
    rgb(ImageOps.exif_transpose(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _bytes(value: Any, where: str, folder: Path | None) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        what = "a PIL image, bytes, {'bytes': ..., 'path': ...}, a path or a data: URL"
        raise DataError(f"{where} is a {type(value).__name__}; give {what}")
    if value.startswith("data:image/"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"{where}: its data: URL is not base64 ({error}); correct it") from error
    if "://" in value[:20]:
        raise DataError(f"{where} is the address {value:.100}, and nothing is fetched; download it, and give its path")
    path = (folder or Path()) / value
    if not path.is_file():
        raise DataError(f"{where}: {path!s:.200} is no file; paths are relative to the data file")
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"{where}: {path} has more than {_MOST_BYTES >> 20} MiB; make it smaller")
    return path.read_bytes()


def read_shown(values: Any, who: str) -> tuple[Picture, ...]:
    """Pictures of an observation or a tool's answer. Raises `DataError`: they are too many or large, or unreadable."""
    if not isinstance(values, list | tuple) or len(values) > 16:
        told = len(values) if isinstance(values, list | tuple) else f"a {type(values).__name__} in place of"
        raise DataError(f"{who} returned {told} pictures; they must be a list of up to 16")
    for each in values:
        if isinstance(each, str) and not each.startswith("data:image/"):
            told = "return a PIL image, an array or a file's bytes"
            raise DataError(f"{who} returned the text {each!r:.80} as a picture; {told}")
    shown = tuple(read_picture(each, f"{who} returned a picture that") for each in values)
    if sum(len(p.data) for p in shown) > 8 << 20 or sum(p.size[0] * p.size[1] for p in shown) > MOST_PIXELS:
        raise DataError(f"{who} returned pictures of more than 8 MiB or {MOST_PIXELS:,} pixels; make them smaller")
    return shown


def read_pictures(row: Mapping[str, Any], where: str, folder: Path | None = None) -> dict[str, Any]:
    """A row with a `Picture` in place of each picture in its columns and in parts of its messages."""
    found, count = dict(row), 0

    def read(value: Any) -> Picture:
        nonlocal count
        count += 1
        return read_picture(value, f"{where}: picture {count - 1}", folder)

    for name, value in row.items():
        if name in PICTURE_COLUMNS:
            listed = isinstance(value, list | tuple)
            found[name] = [read(each) for each in value if each is not None] if listed else read(value)
        elif has_places(value):
            found[name] = [{**m, "content": _read_parts(m["content"], read)} for m in value]
    return found


def _read_parts(parts: Any, read: Callable[[Any], Picture]) -> Any:
    if isinstance(parts, str) or parts is None:
        return parts
    return [
        part if _lacks_one(part) or not _is_place(part) else {**part, "image": read(part["image"])} for part in parts
    ]


def has_places(messages: Any) -> bool:
    """Whether some parts of messages are pictures, or places for them."""
    return isinstance(messages, list | tuple) and any(map(_is_place, _parts(messages)))


def _parts(messages: Any) -> list[Any]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list | tuple) for part in content]


def _is_place(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _lacks_one(part: Any) -> bool:
    return _is_place(part) and part.get("image") is None


def of_row(row: Mapping[str, Any]) -> list[Picture]:
    """The pictures of a row's column."""
    return pictures_in(row[column]) if (column := column_of(row)) else []


def unread(row: Mapping[str, Any]) -> str | None:
    """The column of pictures that holds something else in a row without pictures."""

    def empty(value: Any) -> bool:
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        return all(part is None or part == "" for part in parts)

    return next((name for name in PICTURE_COLUMNS if not empty(row.get(name))), None)


def column_of(row: Mapping[str, Any]) -> str | None:
    """The column that holds a row's pictures."""
    return next((name for name in PICTURE_COLUMNS if pictures_in(row.get(name))), None)


def placed(content: str | list[Message], row: Mapping[str, Any], where: str) -> str | list[Message]:
    """Messages with the pictures of the row's column in their places; as they are where there is no picture.

    Pictures go into parts `{"type": "image"}`, in order; without such parts before the text of the first message of the
    user. Parts with a picture of their own keep it. Raises `DataError`: places and pictures differ in number.
    """
    pictures = of_row(row)
    parts = [] if isinstance(content, str) else _parts(content)
    begun = any(map(_is_place, parts))
    if not pictures and not begun:
        return content
    if isinstance(content, str):
        raise DataError(f'{where}: a prompt with pictures must be a conversation: [{{"role": "user", "content": ...}}]')
    places = sum(map(_lacks_one, parts))
    asked = "user" in [message["role"] for message in content]
    if (begun and places != len(pictures)) or not asked:
        held = f"column {column_of(row) or 'images'!r} holds {len(pictures)}"
        fix = "give one for each part of type image" if asked else "give a message of the user, which pictures go into"
        raise DataError(f"{where}: the messages have places for {places} pictures, {held}; {fix}")
    waiting, told = iter(pictures), []
    for message in content:
        own = message["content"]
        own = [{"type": "text", "text": own}] if isinstance(own, str) else own
        if message["role"] == "user" and not begun:
            own, begun = [{"type": "image"}] * len(pictures) + own, True
        told.append({**message, "content": [{**p, "image": next(waiting)} if _lacks_one(p) else p for p in own]})
    return told

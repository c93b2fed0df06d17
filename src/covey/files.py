"""Files that are never half-written: write aside, fsync, rename, then announce.

A killed process leaves at most a name containing `.tmp-` beside the real file; `remove_leftovers` clears
those and `is_leftover` keeps readers from mistaking one for data. A published folder carries a file
`COMPLETE`: the SHA-256 and size of every other file in it, written before the folder gets its final name.

Limits: POSIX file systems (Linux, macOS), where a rename within one folder is atomic.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import ConfigError, RunFolderError

COMPLETE = "COMPLETE"
_LEFTOVER = re.compile(r"^.+\.tmp-\d+-[0-9a-f]{8}(-replaced)?$")

_FIXES = {
    errno.ENOSPC: ("the disk is full", "free some space and try again"),
    errno.EDQUOT: ("the disk quota is used up", "free some space and try again"),
    errno.EFBIG: ("the file is larger than the system allows", "raise the file size limit (`ulimit -f`)"),
    errno.EACCES: ("permission denied", "change its permissions or choose another run.output_dir"),
    errno.EPERM: ("operation not permitted", "change its permissions or choose another run.output_dir"),
    errno.EROFS: ("the file system is read-only", "choose another run.output_dir"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another run.output_dir"),
    errno.EEXIST: ("something of that name is in the way", "remove it or choose another run.output_dir"),
    errno.ENOENT: ("it does not exist", "check the path; it may have been moved or deleted"),
    errno.EMFILE: ("too many open files", "raise the limit (`ulimit -n`)"),
    errno.EIO: ("the device reports an input/output error", "check the disk or the network mount"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter run.output_dir"),
    errno.ELOOP: ("it is a link, to itself or where a file has to be", "remove it or choose another run.output_dir"),
    errno.EISDIR: ("it is a folder, not a file", "remove it or choose another run.output_dir"),
}


def folder_error(path: str | os.PathLike[str], error: OSError, doing: str = "write") -> RunFolderError:
    """Turn an `OSError` into a `RunFolderError` that names the path, the reason and the fix (`errno` is kept)."""
    other = (error.strerror or str(error), "check the folder or choose another run.output_dir")
    reason, fix = _FIXES.get(error.errno or 0, other)
    result = RunFolderError(f"{path}: cannot {doing}: {reason}; {fix}")
    result.errno = error.errno
    return result


@contextmanager
def explained(path: str | os.PathLike[str], doing: str = "write") -> Iterator[None]:
    """Raise every `OSError` of the block as a `RunFolderError` about `path`."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise folder_error(path, error, doing) from error


def no_path(value: Any) -> str:
    """Why a text, a path or a list of them that may name files can name none; "" for all others."""
    paths = value if isinstance(value, list | tuple) else [value]
    for path in (path for path in paths if isinstance(path, str | os.PathLike)):
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which is not Unicode text; write it again"
        if not encoded:
            return "is empty; write a path or a name, or leave it out"
        if b"\0" in encoded:
            return "holds a NUL character, which no path has; remove it"
        if len(encoded) > 4000 or any(len(part) > 255 for part in encoded.split(b"/")):
            return "is too long for a path; a name in it has at most 255 bytes, all of it 4,000"
        if encoded.startswith(b"~") and os.path.expanduser(encoded) == encoded:
            return "begins with the home of a user who does not exist here; write the path in full"
    return ""


def checked_path(name: str, value: Any) -> Path:
    """The path that an argument of this name was given. Raises `ConfigError`: it is none."""
    is_path = isinstance(value, str | os.PathLike)
    if problem := no_path(value) if is_path else f"a {type(value).__name__} is not a path; give one as text":
        raise ConfigError(f"{name}={value!r:.200}: {problem}")
    return Path(value)


def require_kind(path: Path, *, folder: bool = False) -> None:
    """Raise unless the path is free, or a file (or with `folder` a folder): a pipe would be waited for without an end.

    Raises `RunFolderError`: something else has that name, such as a link to nothing.
    """
    what = "folder" if folder else "file"
    with explained(path, "look at"):
        if os.path.lexists(path) and not (path.is_dir() if folder else path.is_file()):
            why = f"is no {what}, though a run has a {what} of that name; move it away and try again"
            raise RunFolderError(f"{path}: {why}")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; pipes and devices, which would wait or never end, are refused.

    Raises `OSError`: it is none, or cannot be read.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part, whatever kills the process.

    Raises `RunFolderError`: the file cannot be written; the old content is untouched.
    """
    content = data.encode("utf-8", errors="replace") if isinstance(data, str) else data
    with writing(path) as aside, aside.open("xb") as file:
        file.write(content)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a name to write a file under; it takes the place of `path` when the block ends; see `write_atomically`."""
    target = Path(path)
    aside = _aside(target)
    with explained(target):
        try:
            yield aside
            _fsync(aside)
            os.replace(aside, target)
            _fsync(target.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def is_leftover(path: str | os.PathLike[str]) -> bool:
    """True for the remains of a killed write (`NAME.tmp-PID-HEX`), which are not data."""
    return _LEFTOVER.match(Path(path).name) is not None


def remove_leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Clear the remains of killed writes from one folder (not its sub-folders), and return what was there.

    A folder that was moved out of the way by a replacement that never finished gets its name back. Call this
    only where no other process is writing, i.e. while holding the run folder's lock.
    """
    removed = []
    with explained(folder, "clean up"):
        for path in filter(is_leftover, sorted(Path(folder).iterdir())):
            final, _, end = path.name.rpartition(".tmp-")
            if end.endswith("-replaced") and not path.with_name(final).exists():
                os.rename(path, path.with_name(final))
            else:
                remove(path)
            removed.append(path)
        if removed:
            _fsync(Path(folder))
    return removed


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    with explained(path, "delete"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / COMPLETE)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(aside: str | os.PathLike[str], final: str | os.PathLike[str]) -> Path:
    """Give a finished folder its final name: manifest, fsync, rename; an older folder of that name is replaced.

    Raises `RunFolderError`: a file cannot be written; what was published under `final` before is still there.
    """
    source, target = Path(aside), Path(final)
    with explained(target, "publish"):
        files = _files_below(source)
        manifest = {
            path.relative_to(source).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        }
        for path in files:
            _fsync(path)
        write_atomically(source / COMPLETE, json.dumps({"files": manifest}, indent=1) + "\n")
        for path in (*filter(Path.is_dir, sorted(source.rglob("*"))), source):
            _fsync(path)
        replaced = _aside(target).with_name(_aside(target).name + "-replaced") if os.path.lexists(target) else None
        if replaced is not None:
            # Two renames, since POSIX cannot swap folders; `remove_leftovers` undoes the first if we die between.
            os.rename(target, replaced)
        try:
            os.rename(source, target)
        except OSError:
            if replaced is not None:
                os.rename(replaced, target)
            raise
        _fsync(target.parent)
        if replaced is not None:
            remove(replaced)
    return target


@contextmanager
def publishing(final: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder to fill; publish it under `final` when the block ends, remove it when the block raises.

    Raises `RunFolderError`: it cannot be written.
    """
    target = Path(final)
    aside = _aside(target)
    with explained(target):
        aside.mkdir(parents=True)
    try:
        with explained(target):
            yield aside
        publish_folder(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def folder_problem(path: str | os.PathLike[str], *, hashes: bool = True, others: bool = False) -> str:
    """Say what is wrong with a published folder, or "" when it is whole."""
    folder = Path(path)
    if is_leftover(folder):
        return "it is the remains of a killed write"
    if not folder.is_dir():
        return "it is not a folder" if os.path.lexists(folder) else "there is no such folder"
    try:
        if (folder / COMPLETE).exists() and not (folder / COMPLETE).is_file():
            return f"its {COMPLETE} is not a file"
        manifest = json.loads((folder / COMPLETE).read_text())["files"]
        if not manifest:
            return f"its {COMPLETE} file names no files"
        present = [path.relative_to(folder).as_posix() for path in _files_below(folder)]
        foreign = [name for name in present if name not in manifest and not name.startswith(".")]
        if foreign and not others:
            return f"its {COMPLETE} file does not name {foreign[0]}, so nobody knows whether that is as it was written"
        for name, entry in manifest.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not the {entry['bytes']} that were written"
            if hashes and _sha256(file) != entry["sha256"]:
                return f"{name} has changed since it was written (its SHA-256 differs)"
    except FileNotFoundError:
        return f"it has no {COMPLETE} file, so it was not written to the end"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {COMPLETE} file is damaged"
    return ""


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Delete a published folder; a kill half-way leaves a leftover, never a folder that looks whole."""
    target, aside = Path(path), _aside(Path(path))
    with explained(target, "delete"):
        os.rename(target, aside)
        remove(aside)


_HEAD_BYTES, _PLACES, _PLACE_BYTES = 1 << 20, 16, 1 << 16


def sampled_hash(files: Iterable[Path]) -> str:
    """SHA-256 of the names, lengths and contents of files; of large ones the first MiB (of weights: names and shapes)
    and sixteen places at even distances, to the end, stand for the whole.

    Raises `OSError`: one cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {length}\n".encode())
            file.seek(0)
            digest.update(file.read(_HEAD_BYTES))
            rest = max(length - _HEAD_BYTES - _PLACE_BYTES, 0)
            for place in range(_PLACES) if length > _HEAD_BYTES else ():
                file.seek(_HEAD_BYTES + rest * place // (_PLACES - 1))
                digest.update(file.read(_PLACE_BYTES))
    return digest.hexdigest()


def require_free_space(path: str | os.PathLike[str], needed_bytes: int, purpose: str) -> None:
    """Raise while nothing is lost yet, if the disk of `path` has less than `needed_bytes` free.

    Raises `RunFolderError`: too little space; the message names both amounts.
    """
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    with explained(path, "look at"):
        free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        fix = "free some space, lower run.save_total_limit, or choose another run.output_dir"
        needs = f"{purpose} needs about {_readable(needed_bytes)}"
        error = RunFolderError(f"{path}: {_readable(free)} free, but {needs}; {fix}")
        error.errno = errno.ENOSPC
        raise error


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write a tokenizer beside a model's config, both for readers of any version.

    Transformers 5 writes what version 4, and vLLM with it, refuse (its new name of the generic class, further special
    tokens as a list) or pass over without a word (the base of rotary positions).
    """
    tokenizer.save_pretrained(str(folder))
    for path in (Path(folder) / "tokenizer_config.json", Path(folder) / "config.json"):
        settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        rope = settings.get("rope_parameters") or {}
        if "rope_theta" in rope:  # and not one for each type of layer
            settings["rope_theta"] = rope["rope_theta"]
            scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
            settings["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else scaling
        if settings:
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")

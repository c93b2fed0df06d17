"""Sampled units on disk, so that a run that was killed samples none of them again.

    units/v000012-<the first half of a unit's key>     SHA-256 of what follows, a line; completions as safetensors

A unit is found by its key alone: version, settings, requests and the hash of the weights all fit, or it is not found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from covey.files import explained, remove_leftovers, write_atomically
from covey.types import Completion, FinishReason, Support

_NAME = re.compile(r"^v(\d+)-[0-9a-f]{32}$")
_REASONS: tuple[FinishReason, ...] = ("stop", "length")


class Journal:
    """A folder of units; it is made with the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._earlier: frozenset[str] = frozenset()
        if folder.is_dir():
            remove_leftovers(folder)
            self._earlier = frozenset(path.name for path in folder.iterdir())

    def get(self, key: str, version: int, count: int) -> list[Completion] | None:
        """The `count` completions of a unit, bit for bit as they were sampled; None if not there or damaged."""
        try:
            digest, _, content = self._path(key, version).read_bytes().partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != digest:
                return None
            found = _unpack(load(content), version)
        except (OSError, SafetensorError, LookupError, ValueError):
            return None
        return found if len(found) == count else None

    def is_earlier(self, key: str, version: int) -> bool:
        """Whether the unit was there when the run was begun or resumed."""
        return self._path(key, version).name in self._earlier

    def put(self, key: str, version: int, completions: Sequence[Completion]) -> None:
        """Write a unit, so that it is there whole or not at all, whatever kills the process.

        Raises:
            RunFolderError: full disk, no permission, ...
        """
        with explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        content = save(_pack(completions))
        write_atomically(self._path(key, version), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

    def forget(self, before: int | None = None) -> None:
        """Delete the units of versions below `before`, which a checkpoint has made useless; None = all."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            match = _NAME.match(path.name)
            if match and (before is None or int(match[1]) < before):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self._folder.rmdir()

    def _path(self, key: str, version: int) -> Path:
        return self._folder / f"v{version:06d}-{key[:32]}"


def _pack(completions: Sequence[Completion]) -> dict[str, np.ndarray[Any, Any]]:
    kept = [completion.support for completion in completions]
    return {
        "lengths": np.array([len(completion.token_ids) for completion in completions], np.int64),
        "token_ids": np.concatenate([completion.token_ids for completion in completions]).astype(np.int64),
        "logprobs": np.concatenate([completion.logprobs for completion in completions]).astype(np.float32),
        "reasons": np.array([_REASONS.index(completion.finish_reason) for completion in completions], np.int64),
        "kept": np.array([-1 if support is None else len(support.ids) for support in kept], np.int64),
        "ids": np.concatenate([np.zeros(0, np.int64), *(s.ids for s in kept if s is not None)]).astype(np.int64),
        "offsets": np.concatenate([np.zeros(0, np.int64), *(s.offsets for s in kept if s is not None)]).astype(
            np.int64
        ),
    }


def _unpack(held: dict[str, np.ndarray[Any, Any]], version: int) -> list[Completion]:
    found = []
    token = at = offset = 0
    for length, reason, kept in zip(held["lengths"], held["reasons"], held["kept"], strict=True):
        own, support = slice(token, token := token + int(length)), None
        if kept >= 0:
            ids = held["ids"][at : (at := at + int(kept))]
            support = Support(ids, held["offsets"][offset : (offset := offset + int(length) + 1)])
        reason_name = _REASONS[int(reason)]
        found.append(Completion(held["token_ids"][own], held["logprobs"][own], reason_name, version, support))
    return found

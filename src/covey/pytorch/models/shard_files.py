"""Tensors that several processes write together, each its part, and that any number of processes reads.

PyTorch's distributed checkpoint (`torch.distributed.checkpoint`) in its form without pickle: a safetensors file for
each process, whose header says which part of each tensor it holds. Names are `group/name`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from covey.errors import CheckpointError, CoveyError, RunFolderError
from covey.files import folder_error

Groups = Mapping[str, Mapping[str, Tensor]]


def write_shards(folder: str | Path, groups: Groups) -> None:
    """Called by all processes to write tensors; `RunFolderError` if one cannot, `RuntimeError` if one is gone."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(_flat(groups), storage_writer=writer)
    except CheckpointException as error:
        raise _explained(folder, error, "write") from error


def read_shards(folder: str | Path, groups: Groups) -> None:
    """Called by all to fill tensors in place; `CheckpointError` if one cannot read, `RuntimeError` if one is gone."""
    try:
        load(_flat(groups), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise _explained(folder, error, "read") from error


def _flat(groups: Groups) -> dict[str, Any]:
    return {f"{group}/{name}": tensor.detach() for group, tensors in groups.items() for name, tensor in tensors.items()}


def _explained(folder: str | Path, error: CheckpointException, doing: str) -> CoveyError:
    rank, (reason, _) = min(error.failures.items())
    if isinstance(reason, OSError):
        return folder_error(folder, reason, f"{doing}, on rank {rank},")
    said = f"{folder}: rank {rank} cannot {doing} its part ({type(reason).__name__}: {str(reason)[:300]})"
    return RunFolderError(said) if doing == "write" else CheckpointError(said)


@dataclass(frozen=True, slots=True)
class _Part:
    file: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]


class ShardGroup(Mapping[str, Tensor]):
    """Name -> tensor, put together when it is read."""

    def __init__(self, group: str, shapes: dict[str, Tensor], parts: dict[str, list[_Part]]) -> None:
        self._group, self._parts = group, parts
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        like, full = self.shapes[name], f"{self._group}/{name}"
        parts = self._parts[full]
        whole = torch.empty(like.shape, dtype=like.dtype)
        missing = whole.numel()
        for part in parts:
            inside = tuple(slice(at, at + size) for at, size in zip(part.start, part.shape, strict=True))
            try:
                with safe_open(os.fspath(part.file), framework="pt") as file:
                    whole[inside] = file.get_tensor(full)
            except (OSError, SafetensorError, RuntimeError) as error:
                raise CheckpointError(f"{part.file}: {full} cannot be read ({error})") from error
            missing -= whole[inside].numel()
        if missing:
            raise CheckpointError(f"{full}: parts of it are missing, or are there twice")
        return whole


class ShardFiles(dict[str, ShardGroup]):
    """What a folder holds: group -> name -> tensor. A tensor is put together when it is read, and not kept."""

    def __init__(self, folder: Path, groups: list[str]) -> None:
        """Read the files' headers; `OSError`, `SafetensorError`, `ValueError` or `KeyError` where that fails."""
        self.folder = folder
        found: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
        parts: dict[str, list[_Part]] = {}
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        for full, known in metadata.state_dict_metadata.items():
            assert isinstance(known, TensorStorageMetadata)
            group, _, name = full.partition("/")
            found[group][name] = torch.empty(known.size, dtype=known.properties.dtype, device="meta")
        for index, stored in metadata.storage_data.items():
            place = _Part(Path(stored.relative_path), tuple(index.offset or ()), tuple(stored.shape))
            parts.setdefault(index.fqn, []).append(place)
        super().__init__({group: ShardGroup(group, tensors, parts) for group, tensors in found.items()})

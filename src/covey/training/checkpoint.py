"""Checkpoints: everything a run needs to go on to the same numbers, without pickle.

    checkpoints/step_000010/
        policy.safetensors  optimizer.safetensors  ...     one file for each group of tensors, bit-exact
        shards/                                            in their place where several processes hold a part of each
        state.json                                         counters, schedule, data position, RNG
        COMPLETE                                           SHA-256 of the files above; written last

A checkpoint appears under its name only when it is whole (see `covey.files`), so a kill at any moment leaves
the earlier ones as they were. Reading checks the hashes first.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from covey.errors import CheckpointError, ConfigError
from covey.files import folder_error, folder_problem, publishing, remove_folder, require_free_space

if TYPE_CHECKING:
    import torch

TensorGroups = Mapping[str, Mapping[str, "torch.Tensor | NDArray[Any]"]]
SHARDS = "shards"
_FORMAT, _FORMAT_OF_SHARDS = 1, 2
_NAME = re.compile(r"^step_(\d{6,})$")
_log = logging.getLogger("covey.checkpoint")


class WrittenTogether(Protocol):
    """Groups of tensors of which this process holds a part; see `covey.pytorch.models.shard_files`."""

    def write(self, folder: Path) -> TensorGroups:
        """Write the tensors into a folder that is there, with the other processes; returns those left to be written."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint that was read."""

    path: Path
    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: dict[str, Any]
    run_id: str = ""


def checkpoint_name(step: int) -> str:
    """Folder name of a step: 10 -> `step_000010`."""
    return f"step_{step:06d}"


def save_checkpoint(
    folder: str | Path, step: int, tensors: TensorGroups, state: Mapping[str, Any], *, run_id: str = ""
) -> Path:
    """Write `folder/step_000010/` so that it appears whole or not at all; one of the same step is replaced.

    Raises:
        RunFolderError: full disk, no permission, ...; earlier checkpoints are untouched.
    """
    root = Path(folder)
    final = root / checkpoint_name(step)
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    require_free_space(root, size, f"checkpoint {final.name}")
    document = {
        "format": _FORMAT_OF_SHARDS if hasattr(tensors, "write") else _FORMAT,
        "step": step,
        "run_id": run_id,
        "groups": sorted(tensors),
        "state": dict(state),
    }
    text = json.dumps(document, default=_as_json, indent=1)
    with publishing(final) as aside:
        for name, group in _written_together(tensors, aside / SHARDS).items():
            _save_group(aside / f"{name}.safetensors", group)
        (aside / "state.json").write_text(text + "\n", encoding="utf-8")
    return final


def load_checkpoint(path: str | Path, *, run_id: str | None = None, verify: bool = True) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: missing, incomplete, corrupt, or of another run. The message names another checkpoint
            that is good, if there is one beside it.
    """
    folder = Path(path)
    problem = folder_problem(folder, hashes=verify)
    if problem:
        raise CheckpointError(f"checkpoint {folder}: {problem}; {_advice(folder)}")
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"), object_hook=_from_json)
        if document["format"] not in (_FORMAT, _FORMAT_OF_SHARDS):
            raise CheckpointError(
                f"checkpoint {folder} has format {document['format']}, this version of Covey reads {_FORMAT} and "
                f"{_FORMAT_OF_SHARDS}; resume "
                "with the version named in the run's versions.json"
            )
        if not isinstance(document.get("state"), dict):
            raise ValueError("its state.json holds no state")
        found = str(document["run_id"])
        step = int(document["step"])
        if _NAME.match(folder.name) and folder.name != checkpoint_name(step):
            raise CheckpointError(
                f"checkpoint {folder} is of step {step}, not of that in its name; give it its own name back, or move "
                "it away"
            )
        if run_id is not None and found != run_id:
            raise CheckpointError(
                f"checkpoint {folder} belongs to run {found or '(none)'}, not to {run_id}; resume from that run's "
                "own folder"
            )
        tensors = _load_groups(folder, document["groups"])
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({error}); {_advice(folder)}") from error
    return Checkpoint(path=folder, step=step, tensors=tensors, state=document["state"], run_id=found)


def list_checkpoints(folder: str | Path) -> list[Path]:
    """All that is named as a checkpoint, oldest first, whole or not; remains of killed writes are not among them."""
    root = Path(folder)
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(folder: str | Path, broken: dict[Path, str] | None = None) -> Path | None:
    """The newest checkpoint that is whole, hashes compared, or None. What is wrong with those that are skipped goes
    into `broken`, or is logged.
    """
    for path in reversed(list_checkpoints(folder)):
        problem = folder_problem(path)
        if not problem:
            return path
        if broken is not None:
            broken[path] = problem
        else:
            _log.warning("skipping checkpoint %s: %s", path, problem)
    return None


def prune_checkpoints(folder: str | Path, keep_last: int | None, best_step: int | None = None) -> list[Path]:
    """Delete old checkpoints, keeping the newest `keep_last` whole ones and the best one.

    Nothing is deleted unless the newest one to be kept passes its hashes, so the only good checkpoint is
    never lost. Broken ones do not count and are left for the user to look at.

    Raises:
        ConfigError: `keep_last` is below 1.
        RunFolderError: a folder cannot be deleted.
    """
    if keep_last is None:
        return []
    if keep_last < 1:
        raise ConfigError(
            f"save_total_limit={keep_last}: at least one checkpoint must stay; set run.save_total_limit to 1 or more"
        )
    whole = [path for path in list_checkpoints(folder) if not folder_problem(path, hashes=False)]
    best = "" if best_step is None else checkpoint_name(best_step)
    doomed = [path for path in whole[:-keep_last] if path.name != best]
    if not doomed:
        return []
    problem = folder_problem(whole[-1])
    if problem:
        _log.warning("keeping all checkpoints, since the newest, %s, is broken: %s", whole[-1], problem)
        return []
    for path in doomed:
        remove_folder(path)
    return doomed


def random_state() -> dict[str, Any]:
    """States of torch's generators, from which dropout draws; nothing where nobody has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    state: dict[str, Any] = {"cpu": torch.get_rng_state().numpy()}
    if torch.cuda.is_available():
        state["cuda"] = [device_state.numpy() for device_state in torch.cuda.get_rng_state_all()]
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Take up what `random_state` returned."""
    if not state:
        return
    import torch

    torch.set_rng_state(torch.from_numpy(np.asarray(state["cpu"], np.uint8)))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state_all([torch.from_numpy(np.asarray(entry, np.uint8)) for entry in state["cuda"]])


def _advice(broken: Path) -> str:
    for path in reversed(list_checkpoints(broken.parent)):
        if path != broken and not folder_problem(path):
            return f"{path.name} beside it is complete: resume from that"
    return "there is no other complete checkpoint beside it: start a new run in another run.output_dir"


def _save_group(path: Path, group: Mapping[str, torch.Tensor | NDArray[Any]]) -> None:
    """One safetensors file. It forbids shared memory: equal tensors become aliases, other overlaps become
    copies.
    """
    import torch
    from safetensors.torch import save_file

    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_with: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, original in group.items():
        tensor = torch.as_tensor(original).detach()
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and identity in first_with:
            aliases[name] = first_with[identity]
            continue
        first_with[identity] = name
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    try:
        save_file(stored, path, metadata={"aliases": json.dumps(aliases)})
    except SafetensorError as error:
        # It reports a full disk as text only: "I/O error: No space left on device (os error 28)".
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise folder_error(path.parent, OSError(int(number[1]), str(error))) from error


def _written_together(tensors: TensorGroups, folder: Path) -> TensorGroups:
    """The groups that are left to this process."""
    if not hasattr(tensors, "write"):
        return tensors
    folder.mkdir()
    left: TensorGroups = tensors.write(folder)
    if left:
        folder.rmdir()
    return left


def _load_groups(folder: Path, names: list[str]) -> Mapping[str, Mapping[str, torch.Tensor]]:
    if not (folder / SHARDS).is_dir():
        return {name: _load_group(folder / f"{name}.safetensors") for name in names}
    from covey.pytorch.models.shard_files import ShardFiles

    return ShardFiles(folder / SHARDS, names)


def _load_group(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt", device="cpu") as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    for name, target in aliases.items():
        tensors[name] = tensors[target]
    return tensors


def _as_json(value: Any) -> Any:
    """What JSON lacks; Python itself writes floats so that they read back exactly."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    raise TypeError(f"a checkpoint's state cannot hold a {type(value).__name__}; put tensors in a tensor group")


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() != {"$array"}:
        return value
    dtype, shape, data = value["$array"]
    return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()

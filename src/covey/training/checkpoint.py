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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from covey.adapters import CONFIG_FILE, WEIGHTS_FILE
from covey.config.whole import GRPOConfig
from covey.errors import CheckpointError, ConfigError, CoveyError, ModelError, several
from covey.files import (
    explained,
    folder_error,
    folder_problem,
    publishing,
    remove_folder,
    require_free_space,
    sampled_hash,
)
from covey.functions import user_file_hashes
from covey.model_files import model_files
from covey.observe.run_folder import RunFolder
from covey.training.schedule import TrainerState

if TYPE_CHECKING:
    import torch

TensorGroups = Mapping[str, Mapping[str, "torch.Tensor | NDArray[Any]"]]
SHARDS = "shards"
_FORMAT, _FORMAT_OF_SHARDS = 1, 2
_NAME = re.compile(r"^step_(\d{6,})$")
_log = logging.getLogger("covey.checkpoint")


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

    Raises `RunFolderError`: full disk, no permission, ...; earlier checkpoints are untouched.
    """
    final = Path(folder) / checkpoint_name(step)
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    require_free_space(final.parent, size, f"checkpoint {final.name}")
    document = {
        "format": _FORMAT_OF_SHARDS if hasattr(tensors, "write") else _FORMAT,
        "step": step,
        "run_id": run_id,
        "groups": sorted(tensors),
        "state": dict(state),
    }
    text = json.dumps(document, default=_as_json, indent=1)
    with publishing(final) as aside:
        left, shards = tensors, aside / SHARDS
        if hasattr(tensors, "write"):  # each process writes its part (`covey.pytorch.models.shard_files`)
            shards.mkdir()
            if left := tensors.write(shards):
                shards.rmdir()
        for name, group in left.items():
            _save_group(aside / f"{name}.safetensors", group)
        (aside / "state.json").write_text(text + "\n", encoding="utf-8")
    return final


def load_checkpoint(path: str | Path, *, run_id: str | None = None) -> Checkpoint:
    """Read a checkpoint.

    Raises `CheckpointError`: missing, incomplete, corrupt, or of another run. The message names another checkpoint that
    is good, if there is one beside it.
    """
    folder = Path(path)
    if problem := folder_problem(folder):
        raise CheckpointError(f"checkpoint {folder}: {problem}; {_advice(folder)}")
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"), object_hook=_from_json)
        if (form := document["format"]) not in (_FORMAT, _FORMAT_OF_SHARDS):
            raise CheckpointError(
                f"checkpoint {folder} has format {form}, this version of Covey reads {_FORMAT} and "
                f"{_FORMAT_OF_SHARDS}; resume with the version named in the run's versions.json"
            )
        if not isinstance(document.get("state"), dict):
            raise ValueError("its state.json holds no state")
        found, step = str(document["run_id"]), int(document["step"])
        if _NAME.match(folder.name) and folder.name != checkpoint_name(step):
            raise CheckpointError(
                f"checkpoint {folder} is of step {step}, not of that in its name; give it its own name back, or move "
                "it away"
            )
        if run_id not in (None, found):
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
    found = [(int(match[1]), path) for path in Path(folder).glob("*") if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(folder: str | Path, broken: dict[Path, str] | None = None) -> Path | None:
    """The newest whole one, hashes compared, or None; what is wrong with others goes into `broken`, or is logged."""
    for path in reversed(list_checkpoints(folder)):
        if not (problem := folder_problem(path)):
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
    if doomed and (problem := folder_problem(whole[-1])):
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
    """One safetensors file. It forbids shared memory: equal tensors become aliases, other overlaps copies."""
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
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read


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


def find_checkpoint(folder: RunFolder, config: GRPOConfig, notes: list[str]) -> Path | None:
    """The newest whole checkpoint, None before the first one; what is worth a sentence is added to `notes`."""
    broken: dict[Path, str] = {}
    newest = latest_checkpoint(folder.checkpoints, broken)
    if newest is not None:
        notes += [
            f"{path.name} is passed over: {problem}; resuming from {newest.name}" for path, problem in broken.items()
        ]
        return newest
    again = "restore the folder checkpoints/ from a backup, or start a new run in another run.output_dir"
    fix = f"{again}; what is there was not touched"
    if broken:
        path, problem = next(iter(broken.items()))
        raise CheckpointError(
            f"{folder.path}: none of its checkpoints is whole (the newest, {path.name}: {problem}); {fix}"
        )
    last, known = folder.last_step(), folder.last_logged_step()
    if sign := _sign_of_a_checkpoint(folder, config, last):
        raise CheckpointError(
            f"{folder.path}: its files reach step {last}, and there is no checkpoint left, though {sign}; {fix}"
        )
    if last > 0 or folder.best.exists():
        gone = f" (its metrics.jsonl reaches step {known} only)" if known < last - 1 else ""
        notes.append(f"the run was stopped in step {last + 1}, before its first checkpoint: it begins again{gone}")
    return None


def _sign_of_a_checkpoint(folder: RunFolder, config: GRPOConfig, last: int) -> str:
    """What in a folder without checkpoints says that there was one; "" = nothing."""
    for event in folder.read_events():
        kind, message = event.get("kind"), str(event.get("message"))
        if kind == "checkpoint" or (kind == "run" and message.startswith(("finished", "resumed at step"))):
            return f"events.jsonl says {message!r}"
    if folder.adapter.exists():
        return "adapter/ is there"
    if 0 < config.run.save_steps < last:
        return f"run.save_steps is {config.run.save_steps}"
    if config.evaluation.load_best_model_at_end:
        # An evaluation that is the best so far leaves a checkpoint before the next step begins.
        done = {record["step"] for record in folder.read_metrics() if record.get("eval/reward") is not None}
        done |= set(folder.completion_steps("eval"))
        # One in which every episode failed was compared with no other.
        done -= {record["step"] for record in folder.read_metrics() if record.get("eval/num_completions") == 0}
        if any(step < last for step in done):
            return f"it was evaluated at step {min(done)} with evaluation.load_best_model_at_end"
    if folder.best.exists() and last == 0:
        return "best/ holds weights of a later one"
    return ""


def checked_state(checkpoint: Checkpoint, own: Mapping[str, Mapping[str, Any]], best_metric: str) -> TrainerState:
    """The counters of a checkpoint, whose numbers are finite and of the types that they have here."""
    where, fix = f"checkpoint {checkpoint.path}", "delete it to resume from the one before"
    with damage_explained(checkpoint):
        state = TrainerState.from_dict(checkpoint.state["trainer"])
    import torch  # tensors of a checkpoint are torch's, whatever the backend

    for group, tensors in checkpoint.tensors.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{where}: {group} {name} holds NaN or infinity; {fix}")
            mine = own.get(group, {}).get(name)
            if mine is not None and str(mine.dtype).removeprefix("torch.") != str(tensor.dtype).removeprefix("torch."):
                raise CheckpointError(f"{where}: {group} {name} is {tensor.dtype}, here {mine.dtype}; {fix}")
    if state.best_metric_name not in ("", best_metric):
        raise ConfigError(
            f"evaluation.metric_for_best_model: the run has chosen its best evaluation by {state.best_metric_name} so "
            f"far and would go on by {best_metric}; resume with the settings that it was started with"
        )
    return state


_FREE = ("output_dir", "overwrite", "run_name", "report_to", "progress", "logging_steps", "num_completions_to_print")
"""Settings of [run] that change nothing in what is learned."""
_FREE_HERE = ("learners", "ray_address", "gpus_per_sampler", "timeout_seconds", "max_restarts", "reward_workers")
"""The same of [distributed]."""
_SHAPE = {
    "model": ("model", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "quantization"),
    "optim": ("optimizer",),
}
"""Settings that say what the weights and moments of a checkpoint are those of."""


def source_hashes(config: GRPOConfig) -> dict[str, str]:
    """Setting -> `sampled_hash` of the files of weights or rows on this machine's disk that it names."""
    found: dict[str, list[Path]] = {}
    if Path(config.model.model).expanduser().exists():
        with suppress(ModelError):  # a model that was passed loaded may have the name of something else
            found["model.model"] = model_files(config.model.model)
    if config.model.adapter is not None:
        adapter = Path(config.model.adapter).expanduser()
        found["model.adapter"] = [path for name in (CONFIG_FILE, WEIGHTS_FILE) if (path := adapter / name).is_file()]
    for name, rows in (("data.dataset", config.data.dataset), ("data.eval_dataset", config.data.eval_dataset)):
        found[name] = [Path(rows)] if rows is not None and Path(rows).is_file() else []
    with explained("the files of model and data", "read"):
        return {setting: sampled_hash(files) for setting, files in found.items() if files}


def changed_settings(checkpoint: Checkpoint, config: GRPOConfig) -> list[str]:
    """Sentences on the settings, and the files, that are not those that the checkpoint was made with."""
    before, changed = checkpoint.state.get("settings", {}), []
    with damage_explained(checkpoint):
        sources, present = dict(checkpoint.state.get("sources", {})), source_hashes(config)
        known, now = dict(checkpoint.state.get("files", {})), user_file_hashes()
        moved = {name for name in sources.keys() & present.keys() if sources[name] == present[name]}
        other = sorted((sources.keys() & present.keys()) - moved)
        files = sorted(path for path in known.keys() & now.keys() if known[path] != now[path])
        for section, fields in config.to_dict().items() if before else ():
            for name, value in fields.items():
                was = before.get(section, {}).get(name, value)  # settings of a later version are not compared
                free = _FREE if section == "run" else _FREE_HERE if section == "distributed" else ()
                if was == value or name in free:
                    continue
                changed += _differences(f"{section}.{name}", was, value)
                if name in _SHAPE.get(section, ()) and f"{section}.{name}" not in moved:
                    raise ConfigError(
                        f"{section}.{name}={value!r:.80}: the checkpoint {checkpoint.path} was made with {was!r:.80}; "
                        f"resume with that, or start a new run in another run.output_dir"
                    )
    if "model.model" in other:
        raise ConfigError(
            f"model.model={config.model.model!r:.200}: its files are not those that the checkpoint "
            f"{checkpoint.path} was made with; put that model back, or start a new run in another run.output_dir"
        )
    made = f"that {checkpoint.path.name} was made with"
    said = [f"settings differ from those {made}: {', '.join(changed)}"] if changed else []
    said += [f"{', '.join(other)}: not the files {made}; the numbers may be others"] if other else []
    return said + ([f"{', '.join(files)}: not the code {made}; the numbers may be others"] if files else [])


def _differences(name: str, was: Any, now: Any) -> list[str]:
    """What changed in a setting, or in the entries of a table."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return [] if was == now else [f"{name} {was!r:.60} -> {now!r:.60}"]
    return [each for key in {**was, **now} for each in _differences(f"{name}.{key}", was.get(key), now.get(key))]


def lost_lines(folder: RunFolder, checkpoint: Checkpoint, config: GRPOConfig) -> list[str]:
    """Says which lines of earlier steps are gone."""
    records, answered = folder.read_metrics(), [record["step"] for record in folder.read_answers()]
    steps = [record["step"] for record in records if "phase" in record]
    evaluated = [record["step"] for record in records if "eval/reward" in record]
    ordered = [record["step"] + 0.5 * ("phase" not in record) for record in records]
    for name, found in (("metrics.jsonl", ordered), ("questions.jsonl", answered)):
        for before, after in pairwise(found):
            if after <= before:
                raise CheckpointError(
                    f"{folder.path}: {name} has a line of step {int(after)} after one of step {int(before)}; remove "
                    "it, or restore the file from a backup"
                )
    lost = [step for step in range(1, checkpoint.step + 1) if step not in steps]
    judged = [record["step"] for record in records if record.get("accuracy") is not None]
    if config.data.prompt_order == "difficulty":
        unanswered = [step for step in (*judged, *lost) if step <= checkpoint.step and step not in answered]
        if unanswered:
            raise CheckpointError(
                f"{folder.path}: questions.jsonl, by which data.prompt_order='difficulty' draws, lacks step "
                f"{min(unanswered)}; restore it and metrics.jsonl from a backup"
            )
    which = f"metrics.jsonl lacks {len(lost)} of the {several(checkpoint.step, 'step')} before the checkpoint"
    notes = [f"{which}: the weights go on as they were, learning curve and history begin later"] if lost else []
    return notes + [
        f"metrics.jsonl lacks the evaluation at step {step}: reports and learning curve go without it"
        for step in folder.completion_steps("eval")
        if step < checkpoint.step and step not in evaluated
    ]


@contextmanager
def damage_explained(checkpoint: Checkpoint) -> Iterator[None]:
    """What cannot be read as a run's state is an error that names the checkpoint."""
    try:
        yield
    except CoveyError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: its state is damaged ({type(error).__name__}: {str(error)[:200]}); delete "
            "it to resume from the one before"
        ) from error

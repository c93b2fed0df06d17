"""Taking a run up from its folder: from which checkpoint, and whether that and the files beside it can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from covey.adapters import CONFIG_FILE, WEIGHTS_FILE
from covey.config.whole import GRPOConfig
from covey.distributed.guards import model_files
from covey.errors import CheckpointError, ConfigError, CoveyError
from covey.files import NAMES_NOTHING, explained, sampled_hash
from covey.functions import user_file_hashes
from covey.observe.run_folder import RunFolder
from covey.training.checkpoint import Checkpoint, latest_checkpoint
from covey.training.state import TrainerState


def find_checkpoint(folder: RunFolder, config: GRPOConfig, notes: list[str]) -> Path | None:
    """The newest whole checkpoint; None for a run that was stopped before its first one, which begins again.

    What is worth a sentence is added to `notes`.

    Raises:
        CheckpointError: there were checkpoints, and none of them can be used.
    """
    broken: dict[Path, str] = {}
    newest = latest_checkpoint(folder.checkpoints, broken)
    forged = next((path for path, problem in broken.items() if problem == NAMES_NOTHING), None)
    if forged is not None:
        raise CheckpointError(
            f"checkpoint {forged}: {NAMES_NOTHING}, though it was written whole; delete it to resume from the one "
            "before"
        )
    if newest is not None:
        notes += [
            f"{path.name} is passed over: {problem}; resuming from {newest.name}" for path, problem in broken.items()
        ]
        return newest
    fix = (
        "restore the folder checkpoints/ from a backup, or start a new run in another run.output_dir; what is there "
        "was not touched"
    )
    if broken:
        path, problem = next(iter(broken.items()))
        raise CheckpointError(
            f"{folder.path}: none of its {len(broken)} checkpoints is whole (the newest, {path.name}: {problem}); {fix}"
        )
    last, known = folder.last_step(), folder.last_logged_step()
    sign = _sign_of_a_checkpoint(folder, config, last)
    if sign:
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
        if kind == "checkpoint":
            return f"events.jsonl says {message!r}"
        if kind == "run" and (message == "finished" or message.startswith("resumed at step")):
            return f"events.jsonl says {message!r}"
    if folder.adapter.exists():
        return "adapter/ is there"
    if 0 < config.run.save_steps < last:
        return f"run.save_steps is {config.run.save_steps}"
    if config.evaluation.load_best_model_at_end:
        # An evaluation that is the best so far leaves a checkpoint before the next step begins.
        done = {record["step"] for record in folder.read_metrics() if record.get("eval/reward") is not None}
        done |= set(folder.evaluation_steps())
        # One in which every episode failed was compared with no other.
        done -= {record["step"] for record in folder.read_metrics() if record.get("eval/num_completions") == 0}
        if any(step < last for step in done):
            return f"it was evaluated at step {min(done)} with evaluation.load_best_model_at_end"
    if folder.best.exists() and last == 0:
        return "best/ holds weights of a later one"
    return ""


def checked_state(checkpoint: Checkpoint, own: Mapping[str, Mapping[str, Any]], best_metric: str) -> TrainerState:
    """The counters of a checkpoint whose contents make sense: hashes tell damage, not what somebody has hashed anew.

    Raises:
        CheckpointError: counters, tensors or their groups are missing or are no numbers.
        ConfigError: its best evaluation was chosen by another metric.
    """
    where, fix = f"checkpoint {checkpoint.path}", "delete it to resume from the one before"
    missing = [name for name in ("trainer", "plan", "random", "tokens_per_micro_batch") if name not in checkpoint.state]
    missing += [f"the tensors of {name}" for name in own if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"{where}: it lacks {', '.join(missing)}; {fix}")
    with damage_explained(checkpoint):
        if not isinstance(checkpoint.state["trainer"], dict):
            raise TypeError("its counters are no table")
        state = TrainerState.from_dict(checkpoint.state["trainer"])
        budget, counts = checkpoint.state["tokens_per_micro_batch"], checkpoint.state["trainer"]
        if type(budget) is not int or budget < 1:
            raise ValueError(f"tokens_per_micro_batch={budget!r}")
        odd = [f"{name}={value}" for name, value in counts.items() if type(value) is int and not 0 <= value < 2**53]
        if odd and odd != ["max_steps=-1"]:
            raise ValueError(", ".join(odd))
        if state.global_step != checkpoint.step or state.policy_version != state.updates + 1:
            raise ValueError(
                f"global_step={state.global_step}, updates={state.updates}, policy_version={state.policy_version}"
            )
        if state.best_step is not None and state.best_step > state.global_step:
            raise ValueError(f"best_step={state.best_step} after global_step={state.global_step}")
    if state.updates > 0 and own["policy"] and not checkpoint.tensors["optimizer"]:
        raise CheckpointError(f"{where}: {state.updates} optimiser steps, and the optimiser's moments are empty; {fix}")
    import torch  # tensors of a checkpoint are torch's, whatever the backend

    moments = {torch.float32, torch.uint8, *(tensor.dtype for tensor in checkpoint.tensors["policy"].values())}
    for group, tensors in checkpoint.tensors.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{where}: {group} {name} holds NaN or infinity; {fix}")
            mine = own.get(group, {}).get(name)
            if mine is not None and str(mine.dtype).removeprefix("torch.") != str(tensor.dtype).removeprefix("torch."):
                raise CheckpointError(f"{where}: {group} {name} is {tensor.dtype}, here {mine.dtype}; {fix}")
            if group == "optimizer" and tensor.ndim > 0 and tensor.dtype not in moments:
                raise CheckpointError(f"{where}: {group} {name} is {tensor.dtype}, no moment of a gradient; {fix}")
    if state.best_metric_name not in ("", best_metric):
        raise ConfigError(
            f"evaluation.metric_for_best_model: the run has chosen its best evaluation by {state.best_metric_name} so "
            f"far and would go on by {best_metric}; resume with the settings that it was started with"
        )
    return state


_FREE = ("output_dir", "run_name", "report_to", "progress", "logging_steps", "num_completions_to_print")
"""Settings of [run] that change nothing in what is learned."""
_FREE_HERE = (*("learners", "ray_address", "gpus_per_sampler", "timeout_seconds", "max_restarts", "reward_workers"),)
"""The same of [distributed]."""
_SHAPE = {
    "model": ("model", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "quantization"),
    "optim": ("optimizer",),
}
"""Settings that say what the weights and moments of a checkpoint are those of."""


def source_hashes(config: GRPOConfig) -> dict[str, str]:
    """Setting -> `sampled_hash` of the files of weights or rows on this machine's disk that it names."""
    found: dict[str, list[Path]] = {}
    if (model := Path(config.model.model).expanduser()).exists():
        with suppress(OSError):  # a model that was passed loaded may have the name of something else
            found["model.model"] = model_files(str(model))
    if config.model.adapter is not None:
        adapter = Path(config.model.adapter).expanduser()
        found["model.adapter"] = [path for name in (CONFIG_FILE, WEIGHTS_FILE) if (path := adapter / name).is_file()]
    for name, rows in (("data.dataset", config.data.dataset), ("data.eval_dataset", config.data.eval_dataset)):
        found[name] = [Path(rows)] if rows is not None and Path(rows).is_file() else []
    with explained("the files of model and data", "read"):
        return {setting: sampled_hash(files) for setting, files in found.items() if files}


def changed_settings(checkpoint: Checkpoint, config: GRPOConfig) -> list[str]:
    """Says in a sentence which settings differ from those that the checkpoint was made with, if any, and in others
    which files of the user's.

    Raises:
        ConfigError: its weights would mean something else under those of today.
    """
    before, changed = checkpoint.state.get("settings", {}), []
    with damage_explained(checkpoint):
        sources, present = dict(checkpoint.state.get("sources", {})), source_hashes(config)
        moved = {name for name in sources.keys() & present.keys() if sources[name] == present[name]}
        other = sorted((sources.keys() & present.keys()) - moved)
    with damage_explained(checkpoint):
        for section, fields in config.to_dict().items() if before else ():
            for name, value in fields.items():
                was = before.get(section, {}).get(name, value)  # settings of a later version are not compared
                free = _FREE if section == "run" else _FREE_HERE if section == "distributed" else ()
                if was == value or name in free:
                    continue
                changed.append(f"{section}.{name} {was!r:.60} -> {value!r:.60}")
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
    with damage_explained(checkpoint):
        known, now = dict(checkpoint.state.get("files", {})), user_file_hashes()
        files = sorted(path for path in known.keys() & now.keys() if known[path] != now[path])
    made = f"that {checkpoint.path.name} was made with"
    said = [f"settings differ from those {made}: {', '.join(changed)}"] if changed else []
    said += [f"{', '.join(other)}: not the files {made}; the numbers may be others"] if other else []
    return said + ([f"{', '.join(files)}: not the code {made}; the numbers may be others"] if files else [])


def lost_lines(folder: RunFolder, checkpoint: Checkpoint, config: GRPOConfig) -> list[str]:
    """Says which lines of earlier steps are gone.

    Raises:
        CheckpointError: they are needed to go on to the same numbers, or one is there twice.
    """
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
    if config.data.prompt_weighting == "difficulty":
        unanswered = [step for step in (*judged, *lost) if step <= checkpoint.step and step not in answered]
        if unanswered:
            raise CheckpointError(
                f"{folder.path}: questions.jsonl, by which data.prompt_weighting='difficulty' draws, lacks step "
                f"{min(unanswered)}; restore it and metrics.jsonl from a backup"
            )
    notes = []
    if lost:
        which = f"metrics.jsonl lacks {len(lost)} of the {checkpoint.step} steps before the checkpoint"
        notes.append(f"{which}: the weights go on as they were, learning curve and history begin later")
    for step in folder.evaluation_steps():
        if step < checkpoint.step and step not in evaluated:
            notes.append(f"metrics.jsonl lacks the evaluation at step {step}: reports and learning curve go without it")
    return notes


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

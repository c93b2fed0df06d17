"""Names of earlier versions: they are read as what they meant, or answered with one line that says what to use now."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from covey.algorithms.down_sampling import read_down_sampling
from covey.algorithms.losses import LOSSES, function_name
from covey.config.section import Section
from covey.errors import ConfigError

COMMANDS: dict[str, str] = {
    "compare": "covey report RUN RUN",
    "completions": "covey report RUN --step last",
    "curve": "covey report RUN -o FILE.png",
    "questions": "covey report RUN",
    "plan": "covey doctor RECIPE",
    "replay": "covey doctor RUN --step N",
    "imitate": "covey play RECIPE --imitate",
    "report --at": "covey watch RUN",
    "report --metric": "covey watch RUN",
    "report --by-uid": "covey report RUN --question UID",
    "train --backend": "covey.jax.GRPOTrainer",
}
"""Command or option -> what to type instead, such as `covey doctor RECIPE`."""

_SERVERS = "to sample with vLLM set sampling.engine=vllm (in this process) or server.inference_server_url (servers)"
SETTINGS: dict[str, tuple[Any, str]] = {
    "backend": ("pytorch", "recipes train with PyTorch; in JAX train with covey.jax.GRPOTrainer (docs/internals.md)"),
    "mesh": (None, "recipes train with PyTorch; covey.jax.GRPOTrainer takes a mesh (docs/internals.md)"),
    "sampler_kind": ("covey", _SERVERS),
    "vllm_python": (None, _SERVERS),
    "vllm_arguments": ([], _SERVERS),
    "world_workers": (
        0,
        "remove it: all environment.parallel_episodes run on this machine, or the world calls a server",
    ),
    "keep_units": (True, "remove it: a killed run samples its last step again, with the same results"),
}
"""Field -> the default that it had, and what to write instead.

A recipe or a run folder of an earlier version may hold the default, which is dropped without a word. Any other value is
an error that says what to write.
"""


def gone_command(name: str, *arguments: str) -> str | None:
    """The line for a command or an option that went, or None."""
    for gone in (name, *(f"{name} {argument.partition('=')[0]}" for argument in arguments)):
        if gone in COMMANDS:
            return f"covey {gone}: this {'option' if ' ' in gone else 'command'} was removed; use `{COMMANDS[gone]}`"
    return None


def gone_setting(path: str, field: str, value: Any) -> str | None:
    """The line for a setting that went and is given another value than its default, or None."""
    default, instead = SETTINGS[field]
    return None if value == default else f"{path}={value!r:.200}: this setting was removed; {instead}"


# --- settings that moved

Values = Mapping[str, Any]


class Moved(NamedTuple):
    """Settings that are now written as others: their defaults of then, where they are now, and the translation.

    `write(old, known)` is given all of the old ones, with defaults for those that are not given, and the fields that
    are given beside them or before; it returns fields.
    """

    old: dict[str, Any]
    now: str
    write: Callable[[Values, Values], dict[str, Any]]


def _changed(old: Values, defaults: Values) -> dict[str, Any]:
    return {name: value for name, value in old.items() if value != defaults[name]}


def _added(table: str, given: Values, known: Values) -> dict[str, Any]:
    return {table: {**(known.get(table) or {}), **given}} if given else {}


def _of_the_loss(old: Values, known: Values) -> dict[str, Any]:
    loss = LOSSES.get(known.get("loss_type", "grpo"))
    given = {n: v for n, v in _changed(old, _OF_THE_LOSS).items() if loss is None or n in loss.parameters}
    return _added("loss_parameters", given, known)


def _of_the_estimator(old: Values, known: Values) -> dict[str, Any]:
    estimator = function_name(known.get("adv_estimator", "grpo"))
    taken = {
        "std_correction": ("grpo", "naive_grpo", "gigpo", "gdpo", "grpo_passk"),
        "step_score": ("grpo",),
        "discount": ("grpo", "gigpo"),
        "step_advantage_weight": ("gigpo",),
    }
    given = {n: v for n, v in _changed(old, _OF_THE_ESTIMATOR).items() if ":" in estimator or estimator in taken[n]}
    return _added("adv_parameters", given, known)


def _gdpo(old: Values, known: Values) -> dict[str, Any]:
    alone = old["multi_objective_aggregation"] == "normalize_then_sum" and known.get("world") is None
    return {"adv_estimator": "gdpo"} if alone else {}


def _adaptive_entropy(old: Values, known: Values) -> dict[str, Any]:
    table = known.get("adaptive_entropy")
    changed = {_KEYS[name]: value for name, value in _changed(old, _ENTROPY).items() if name in _KEYS}
    if old["use_adaptive_entropy"] or (changed and table is not None):
        return {"adaptive_entropy": {**(dict(table) if table else {}), **changed}}
    return {} if table is None else {"adaptive_entropy": None}


def _correction(old: Values, known: Values) -> dict[str, Any]:
    mode, floor, cap = known.get("importance_sampling_correction", "auto"), *old.values()
    bounds = [cap] if floor is None else [floor, cap]
    if ":" in mode or mode == "off" or bounds == [3.0]:
        return {}
    return {"importance_sampling_correction": ":".join([mode, *(f"{bound!r}" for bound in bounds)])}


def _reference(old: Values, known: Values) -> dict[str, Any]:
    how = old["reference_update"]
    if how == "none":
        return {"reference_update_steps": None, "reference_ema_decay": 0.0}
    decay = known.get("reference_ema_decay") or 0.99
    steps = known.get("reference_update_steps") or 100
    return {"reference_update_steps": steps, "reference_ema_decay": decay if how == "ema" else 0.0}


def _drift(old: Values, known: Values) -> dict[str, Any]:
    threshold = known.get("reference_drift_threshold")
    is_sum = isinstance(threshold, int | float) and old["reference_drift_reduction"] != "per_token_mean"
    return {"reference_drift_threshold": f"sum:{threshold}"} if is_sum else {}


def _validity(old: Values, known: Values) -> dict[str, Any]:
    return {"validity_min_length": known.get("validity_min_length", 10) if old["validity_mask"] else None}


def _dynamic_sampling(old: Values, known: Values) -> dict[str, Any]:
    return {"dynamic_sampling": old["dynamic_sampling_max_tries"]} if known.get("dynamic_sampling") else {}


def _down_sampling(old: Values, known: Values) -> dict[str, Any]:
    rule, size, statistics = read_down_sampling(function_name(known.get("down_sampling", "none")))
    if rule == "none":
        return {}
    size = size if old["down_sampling_size"] == 4 else old["down_sampling_size"]
    return {"down_sampling": ":".join(filter(None, [rule, str(size), old["down_sampling_statistics"] or statistics]))}


def _context(old: Values, known: Values) -> dict[str, Any]:
    if old["context_mode"] == "conversation":
        return {"history_length": None}
    history, most = known.get("history_length"), old["max_turn_prompt_tokens"]
    return {"history_length": 2 if history is None else history, "max_conversation_tokens": most}


def _time_limit(old: Values, known: Values) -> dict[str, Any]:
    reset, step = old["reset_seconds"], known.get("step_seconds", 20.0)
    return {"step_seconds": reset / 3} if reset > 3 * step else {}


def _servers(old: Values, known: Values) -> dict[str, Any]:
    if not old["upload_adapters_to_server"]:
        return {"inference_server_url": None}
    return {"inference_server_url": known.get("inference_server_url") or "http://127.0.0.1:8000"}


def _vllm(old: Values, known: Values) -> dict[str, Any]:
    given = _changed(old, _VLLM)
    if "sleep_level" in given:
        given["enable_sleep_mode"] = given.pop("sleep_level") > 0
    if "merge_adapter" in given:
        given["enable_lora"] = not given.pop("merge_adapter")
    return _added("llm_arguments", given, known)


def _optimizer(old: Values, known: Values) -> dict[str, Any]:
    given = {name.removeprefix("adam_"): value for name, value in _changed(old, _OPTIMIZER).items()}
    return _added("optimizer_parameters", given, known)


def _warmup(old: Values, known: Values) -> dict[str, Any]:
    return {"warmup_steps": old["warmup_ratio"]} if old["warmup_ratio"] else {}


def _order(old: Values, known: Values) -> dict[str, Any]:
    if old["prompt_weighting"] == "difficulty":
        return {"prompt_order": "difficulty"}
    return {"prompt_order": "random" if old["shuffle"] else "given"}


def _ledger(old: Values, known: Values) -> dict[str, Any]:
    every, ledger = old["ledger_steps"], known.get("ledger", "sampled:2").partition(",")[0]
    return {"ledger": f"{ledger},all:{every}"} if every else {}


_OF_THE_LOSS = {"epsilon_high": None, "delta": None, "epsilon_max": 5.0, "importance_sampling_level": None}
_OF_THE_LOSS |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
_OF_THE_ESTIMATOR = {"std_correction": 1, "step_score": "episode", "discount": 1.0, "step_advantage_weight": 1.0}
_ENTROPY = {"use_adaptive_entropy": False, "entropy_target": 0.2, "entropy_coef_delta": 0.005}
_ENTROPY |= {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0}
_KEYS = dict(zip(list(_ENTROPY)[1:], ("target", "delta", "min", "max"), strict=True))
_CORRECTION = {"importance_sampling_floor": None, "importance_sampling_cap": 3.0}
_VLLM = {"sleep_level": 1, "tensor_parallel_size": 1, "max_model_len": None, "merge_adapter": None}
_VLLM |= {"enforce_eager": False}
_OPTIMIZER = {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}

MOVED: tuple[Moved, ...] = (
    Moved({"multi_objective_aggregation": "sum_then_normalize"}, "adv_estimator", _gdpo),
    Moved(_OF_THE_LOSS, "loss_parameters", _of_the_loss),
    Moved(_OF_THE_ESTIMATOR, "adv_parameters", _of_the_estimator),
    Moved(_ENTROPY, "adaptive_entropy", _adaptive_entropy),
    Moved(_CORRECTION, "importance_sampling_correction", _correction),
    Moved({"reference_update": "none"}, "reference_update_steps", _reference),
    Moved({"reference_drift_reduction": "per_token_mean"}, "reference_drift_threshold", _drift),
    Moved({"validity_mask": False}, "validity_min_length", _validity),
    Moved({"dynamic_sampling_max_tries": 3}, "dynamic_sampling", _dynamic_sampling),
    Moved({"down_sampling_size": 4, "down_sampling_statistics": None}, "down_sampling", _down_sampling),
    Moved({"context_mode": "conversation", "max_turn_prompt_tokens": 1024}, "history_length", _context),
    Moved({"reset_seconds": 60.0}, "step_seconds", _time_limit),
    Moved({"upload_adapters_to_server": False}, "inference_server_url", _servers),
    Moved(_VLLM, "llm_arguments", _vllm),
    Moved(_OPTIMIZER, "optimizer_parameters", _optimizer),
    Moved({"warmup_ratio": 0.0}, "warmup_steps", _warmup),
    Moved({"shuffle": True, "prompt_weighting": "uniform"}, "prompt_order", _order),
    Moved({"ledger_steps": 0}, "ledger", _ledger),
)
"""In this order: an estimator that another row chooses comes before its parameters."""

OLD_NAMES: dict[str, str] = {name: moved.now for moved in MOVED for name in moved.old}
OLD_NAMES["max_turn_prompt_tokens"] = "max_conversation_tokens"
"""Old name -> the field that says it now."""

PUBLISHED = frozenset({"upload_adapters_to_server"})
"""Old names that a published recipe has: they stay good, and are read without a word."""


_JOINED = {"adv_estimator", "step_seconds"}
"""Fields that were settings beside the old name, which may change what they say."""

CHOICES: dict[str, tuple[Any, ...]] = {"std_correction": (0, 1), "sleep_level": (0, 1, 2)}
CHOICES |= {"step_score": ("episode", "return", "step"), "context_mode": ("conversation", "steps")}
CHOICES |= {"reference_update": ("none", "copy", "ema"), "prompt_weighting": ("uniform", "difficulty")}
CHOICES |= {"importance_sampling_level": ("token", "sequence", "gspo_token"), "merge_adapter": (True, False)}
CHOICES |= {"multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum")}
CHOICES |= {"reference_drift_reduction": ("per_token_mean", "sum"), "down_sampling_statistics": ("selected", "group")}
"""What old names take whose default is neither true, false nor a number."""


def _place(name: str, path: Callable[[str], str]) -> str:
    """`algorithm.adaptive_entropy.target` for entropy_target."""
    in_table = name in _KEYS or name in _OF_THE_LOSS or name in _OF_THE_ESTIMATOR
    return path(OLD_NAMES[name]) + (f".{_KEYS.get(name, name)}" if in_table else "")


def _refused(name: str, value: Any, default: Any) -> str:
    """What an old name must be, where a value is not that; "" where it is."""
    if choices := CHOICES.get(name, (True, False) if isinstance(default, bool) else ()):
        fits = any(type(value) is type(choice) and value == choice for choice in choices)
        return "" if fits else " | ".join(str(choice).lower() for choice in choices)
    most, below = (1, ", below 1") if name == "warmup_ratio" else (math.inf, "")
    kind, least = (int, 1) if isinstance(default, int) and default else (int | float, 0)
    fits = isinstance(value, kind) and not isinstance(value, bool) and least <= value < most
    return "" if fits else f"a {'whole ' * least}number, {least} or more{below}"


def _is_lost(value: Any, now: Any) -> bool:
    """True when what is given of a new name does not show in what it becomes by the old ones beside it."""
    if isinstance(value, Mapping | Section):
        return not isinstance(now, Mapping) or any(now.get(name) != each for name, each in dict(value).items())
    is_part = isinstance(now, str) and str(value) in now
    return now != value and not (is_part or not value or value is True or callable(value))


def in_toml(path: str, value: Any) -> str:
    """As it is written on a command line: `path=value`, and of a table `path.name=value` for each name."""
    if isinstance(value, Mapping) and value:
        return " ".join(in_toml(f"{path}.{name}", each) for name, each in value.items())
    shown = json.dumps(value) if isinstance(value, str | bool | dict) else "none" if value is None else repr(value)
    return f"{path}={shown}"


def translate(
    given: Values, values: Values, known: Values, written: Values, path: Callable[[str], str] = str, level: int = 4
) -> dict[str, Any]:
    """Fields that old names stand for; they hold in place of what `values` says of the same fields.

    Args:
        given: old names with their values.
        values: fields that are given beside them.
        known: fields that hold where nothing is given, before these.
        written: name -> how it was written, for messages.
        path: field -> what messages call it.
        level: frames from here to the line that a warning names.

    Raises `ConfigError`: a value that an old name never took, or one beside a new name that says something else.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    by_hand = len(given) < len(OLD_NAMES) / 2  # most of them at once are a run folder's, which nobody writes again
    for old, target, write in MOVED:
        own = {name: given[name] for name in old if given.get(name) is not None}  # None is a setting that is not given
        if wrong := {name: why for name, value in own.items() if (why := _refused(name, value, old[name]))}:
            for name, why in wrong.items():
                problems.append(f"{written[name]:.300}: must be {why}; correct it, or write {_place(name, path)}")
        elif own:
            try:
                now = write({**old, **own}, {**known, **values, **found})
            except (TypeError, ValueError, AttributeError):
                continue  # a field beside it has no value of its kind, which its section says
            checked = [name for name in now if name in values and by_hand and target not in _JOINED]
            lost = [name for name in checked if _is_lost(values[name], now[name])]
            both = ", ".join(written[name] for name in own)
            for name in lost:
                both = f"{both:.300} and {written.get(name, name):.300}"
                problems.append(f"{both}: both set {path(name)}, to different values; keep one")
            changed = [name for name, value in own.items() if value != old[name]]
            if by_hand and not lost and not PUBLISHED.issuperset(changed):
                new = " ".join(in_toml(path(name), value) for name, value in now.items() if value is not None)
                places = ", ".join(dict.fromkeys(_place(name, path) for name in changed))
                advice = f"; write {new}" if new else ", which has no effect here; remove it"
                what = ", ".join(written[name] for name in changed)
                warnings.warn(f"{what:.300}: the setting is {places}{advice}", stacklevel=level)
            found |= now
    if problems:
        raise ConfigError("\n".join(problems))
    if type(tries := values.get("dynamic_sampling")) is bool and "dynamic_sampling" not in found:
        found["dynamic_sampling"] = 3 if tries else 0
    return found

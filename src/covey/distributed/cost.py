"""What a step costs on other machines than this one: formulas of work, bytes and seconds. Nothing here is measured.

Sampling is taken to be bound by the memory that a decode step reads, training by floating-point operations, weights by
the wire. What a machine does of each is read from a file of constants, which `covey plan --calibrate` writes for the
machine that it runs on. `benchmarks/cluster_model.py` plays whole runs with the same formulas.

Symbols: N completions of a step, P prompt tokens, R tokens of a mean answer, b rows of a sampler, t its devices, n all
devices, W bytes of the weights, A parameters that a token uses (all of them, but for mixtures of experts).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import BaseModel, Field, ValidationError

from covey.errors import ConfigError
from covey.files import write_atomically

Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e12)]
Share = Annotated[float, Field(gt=0, le=1)]


class Constants(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """What one device and its connections do; a file of constants is this table."""

    name: str = Field(min_length=1, max_length=200, description="Of the machine.")
    measured: bool = Field(description="Were the numbers measured on it, or taken from data sheets and reports?")
    memory_bytes: Positive = Field(description="Memory of a device.")
    memory_bytes_per_second: Positive = Field(description="That a device can read.")
    memory_share: Share = Field(default=1.0, description="Part of it that decoding gets.")
    decode_flops_per_second: Positive | None = Field(
        default=None, description="Of a decode step's products; none = they cost nothing beside the reading."
    )
    step_overhead_seconds: NotNegative = Field(description="Of a decode step, besides reading.")
    flops_per_second: Positive = Field(description="That a device can do.")
    dense_share: Share = Field(default=1.0, description="Part of it that training gets.")
    moe_share: Share = Field(default=1.0, description="The same for mixtures of experts.")
    sync_bytes_per_second: Positive = Field(description="Of weights on their way to the samplers.")
    sync_seconds: NotNegative = Field(description="Of a sync, however small.")
    all_reduce_bytes_per_second: Positive | None = Field(
        default=None, description="Of gradients that ranks add up; none = they cost nothing."
    )
    switch_seconds: NotNegative = Field(
        default=0.0, description="Of a step in turns: memory is given back and taken, rewards are computed."
    )
    tail_hidden: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.7, description="Part of the tail that sampling ahead hides."
    )
    restart_sampler_seconds: NotNegative = Field(default=60.0, description="Until a sampler that died samples again.")
    restart_learners_seconds: NotNegative = Field(
        default=120.0, description="Until learners of which one died train again."
    )

    @classmethod
    def read(cls, path: str | Path) -> Constants:
        """Read a file of constants.

        Raises:
            ConfigError: it cannot be read, is no TOML, lacks a number or has one that is out of range.
        """
        try:
            return cls(**tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {where}: {first['msg']}; see benchmarks/constants") from error
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: is no file of constants ({error!s:.200}); see benchmarks/constants") from error

    def write(self, path: str | Path) -> None:
        """Write the file."""
        write_atomically(Path(path), tomli_w.dumps(self.model_dump(exclude_none=True)))


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's size costs.

    Attributes:
        name: of the model.
        parameters: all of them.
        active: those that a token uses.
        kv_bytes: of keys and values, for each token of context.
        adapter: trained parameters beside it.
        devices: of a sampler.
        bytes_each: of a parameter, where it is sampled from and sent.
    """

    name: str
    parameters: float
    active: float
    kv_bytes: float
    adapter: float
    devices: int = 1
    bytes_each: float = 2.0

    def read_bytes(self, rows: float) -> float:
        """Weights that a decode step of so many rows reads; of experts those that some row chose, at random."""
        return float(self.bytes_each * self.parameters * (1 - (1 - self.active / self.parameters) ** rows))


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks for.

    Attributes:
        prompts: of a step.
        group: completions of each.
        prompt: tokens of one.
        answer: tokens of a mean completion.
        longest: tokens of the longest.
    """

    prompts: int
    group: int
    prompt: float
    answer: float
    longest: float

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.prompts * self.group

    def tokens(self, *, prompts_once: bool = True) -> float:
        """That are trained on: each prompt once for its group, or with each completion."""
        return (self.prompts if prompts_once else self.completions) * self.prompt + self.completions * self.answer


def decode_seconds(costs: Constants, model: Model, rows: float, context: float, read: float) -> float:
    """One token for each of the rows of a sampler.

    Args:
        costs: of a device.
        model: what is sampled from.
        rows: of the sampler.
        context: tokens that each of them attends to, on the average.
        read: bytes of weights that the step reads, such as `model.read_bytes(rows)`.
    """
    speed = model.devices * costs.memory_bytes_per_second * costs.memory_share
    seconds = (read + rows * context * model.kv_bytes) / speed + costs.step_overhead_seconds
    if costs.decode_flops_per_second is not None:
        seconds += 2 * model.active * rows / (model.devices * costs.decode_flops_per_second)
    return seconds


def sampling_seconds(costs: Constants, model: Model, work: Work, devices: float) -> float:
    """All completions at their mean length: `N R / (b n / t)` decode steps with whole contexts and all weights."""
    rows = max(work.completions * model.devices / devices, 1.0)  # of a sampler
    steps = work.completions * work.answer * model.devices / (rows * devices)
    return steps * decode_seconds(costs, model, rows, work.prompt + work.answer, model.bytes_each * model.parameters)


def tail_seconds(costs: Constants, model: Model, work: Work) -> float:
    """What the longest completion adds: `R_max - R` steps of one row, of which half on the average; of experts only
    the active ones are read.
    """
    return max(work.longest - work.answer, 0) * decode_seconds(costs, model, 1, 0, model.bytes_each * model.active) / 2


def training_seconds(
    costs: Constants, model: Model, work: Work, devices: float, *, prompts_once: bool = True, all_weights: bool = False
) -> float:
    """Forward, backward and the forward that is done again: `6 A` operations a token, `8 A` if all weights learn."""
    share = costs.dense_share if model.active == model.parameters else costs.moe_share
    operations = (8 if all_weights else 6) * model.active * work.tokens(prompts_once=prompts_once)
    return operations / (devices * costs.flops_per_second * share)


def sync_bytes(model: Model, *, all_weights: bool = False) -> float:
    """Of what samplers are given after a step."""
    return model.bytes_each * (model.parameters if all_weights else model.adapter)


def sync_seconds(costs: Constants, model: Model, *, all_weights: bool = False) -> float:
    """Of new weights to the samplers, which take them side by side."""
    wire = sync_bytes(model, all_weights=all_weights) / costs.sync_bytes_per_second
    return wire if all_weights else wire + costs.sync_seconds


def in_turns_seconds(costs: Constants, model: Model, work: Work, devices: int) -> float:
    """A step of devices that sample, then train."""
    sampled = sampling_seconds(costs, model, work, devices) + tail_seconds(costs, model, work)
    trained = training_seconds(costs, model, work, devices) + sync_seconds(costs, model)
    return sampled + trained + costs.switch_seconds


def apart_seconds(costs: Constants, model: Model, work: Work, devices: int, samplers: int) -> float:
    """A step of which `samplers` of the devices only sample, and the others wait for them, then train."""
    sampled = sampling_seconds(costs, model, work, samplers) + tail_seconds(costs, model, work)
    return sampled + training_seconds(costs, model, work, devices - samplers) + sync_seconds(costs, model)


def ahead_seconds(costs: Constants, model: Model, work: Work, devices: int, samplers: int) -> float:
    """The same while the next step is sampled: the slower of the two sides."""
    tail = (1 - costs.tail_hidden) * tail_seconds(costs, model, work)
    sampled = sampling_seconds(costs, model, work, samplers) + tail
    return max(sampled, training_seconds(costs, model, work, devices - samplers))


def best_split(costs: Constants, model: Model, work: Work, devices: int) -> int:
    """Devices that sample, for the shortest step ahead: whole samplers, and at least one device that trains."""
    choices = range(model.devices, devices, model.devices)
    return min(choices, key=lambda samplers: ahead_seconds(costs, model, work, devices, samplers))


def share_of_units(units: int, samplers: int) -> float:
    """Part of a step's units that the busiest of the samplers has: what their number does to seconds of sampling."""
    return math.ceil(units / samplers) / units

"""A sharded policy whose ranks read their own parts of the model's files; nobody holds all of it.

What is measured on a whole policy, its scores and whether sharding changes a gradient, is measured here on its first
layers, embedding and head: it is about code, and the layers share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

import torch
from peft import PeftConfig, PeftModel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from covey.backend import Backend, adapter_options
from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.distributed.ranks import Ranks
from covey.distributed.sharded import ShardedPolicy, ShardedReference, require_tied, tied_names
from covey.distributed.sharded_learner import check_sharded, parts, training_bytes
from covey.errors import ModelError
from covey.pytorch.engine.choose import choose_runner
from covey.pytorch.models.loading import chosen_device, chosen_dtype, trained_dtype
from covey.pytorch.models.lora import attach
from covey.pytorch.models.slices import ModelFiles, NotSlicedError, replace_parameters
from covey.pytorch.policy import Policy

log = logging.getLogger(__name__)

Made = TypeVar("Made")


class SlicedPolicy(ShardedPolicy):
    """A sharded policy that was never whole."""

    def __init__(self, few: Policy, hollow: HollowPolicy, config: GRPOConfig, ranks: Ranks, over: int) -> None:
        files, device = hollow.files, few.device
        named = config.sampling.sampler_dtype
        runner, why = choose_runner(
            few.model, files.dtype if named in ("model", "int8") else getattr(torch, named), device
        )
        self.runner = runner.name
        if why and ranks.rank == 0:
            log.warning("sampling with the %s runner, which is slower than the fast one: %s", self.runner, why)
        del runner
        self.shape = files.hollow()
        checked = ShardedPolicy(few, ranks, over)
        held, tied = few.held.around(hollow.model), tied_names(hollow.model)
        hollow.to_meta()
        self._shard(held, checked.reference, ranks, checked._mesh)
        self._root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)  # type: ignore[no-untyped-call]
        require_tied(self.source, self.model, tied)
        _on_all(ranks, partial(self._fill, hollow), ModelError)
        how = checked.reference.how
        self.reference = ShardedReference(self.model, **how, from_current=config.model.adapter is not None)

    @torch.no_grad()
    def _fill(self, hollow: HollowPolicy) -> None:
        for name, parameter in self.model.named_parameters():
            if name not in hollow.names:
                continue
            assert isinstance(parameter, DTensor)
            shape, start = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            if 0 in shape:
                continue
            part = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
            found = hollow.files.read(hollow.names[name], part)
            if not bool(torch.isfinite(found).all()):
                raise ModelError(
                    f"{self.source}: its weight {hollow.names[name]} holds NaN or infinity; the file is damaged or its "
                    "training has diverged, use another copy or an earlier one"
                )
            parameter.to_local().copy_(found)


class HollowPolicy:
    """A policy's model before its base has memory; an adapter has."""

    def __init__(self, files: ModelFiles, config: GRPOConfig) -> None:
        """As the run's settings want it. A fresh adapter has the numbers that it has on a whole model."""
        self.files, base = files, files.hollow()
        held = {id(p): name for name, p in base.named_parameters()}
        self.model = attach(base, **adapter_options(config))
        self.names = {n: held[id(p)] for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) in held}

    def to_meta(self) -> None:
        """Put the base on the meta device, where FSDP2 wants what has no memory."""
        empty = {id(p) for name, p in self.model.named_parameters(remove_duplicate=False) if name in self.names}
        replace_parameters(self.model, lambda p: p.detach().to("meta") if id(p) in empty else p.detach())


def read_in_slices(config: GRPOConfig, ranks: Ranks, backend: Backend) -> SlicedPolicy | None:
    """The policy of a run, each rank's part read by itself; None where a model is not to be sharded.

    All ranks call this. Raises NotSlicedError: each rank must load the model whole; ModelError: see `SlicedPolicy`.
    """
    if ranks.world == 1 or config.distributed.learner_kind == "replicated":
        return None
    chosen = config.model
    if chosen.trust_remote_code:
        raise NotSlicedError("model.trust_remote_code is on, and a model's own code may load anything")
    device = chosen_device(chosen.device)
    all_weights = not chosen.use_peft and chosen.adapter is None
    dtype = chosen_dtype(trained_dtype(chosen.dtype, all_weights=all_weights), device)
    hollow = _on_all(ranks, lambda: HollowPolicy(ModelFiles.find(chosen.model, dtype=dtype), config), NotSlicedError)
    peft = isinstance(hollow.model, PeftModel)
    base = peft and chosen.adapter is None and config.algorithm.reference_update != "ema"
    needed = training_bytes(hollow.model, keeps_copy=uses_reference(config) and not base)
    over = parts(config, needed, device, ranks)
    if over == 1:
        return None
    check_sharded(config)

    def few_layers() -> Policy:
        first = hollow.files.few_layers()
        saved = None if chosen.adapter is None else PeftConfig.from_pretrained(str(chosen.adapter))
        settings = config if saved is None else config.replace(adapter=None, use_peft=True)
        return cast(Policy, backend.make_policy(settings, first, hollow.files.folder, saved))

    return SlicedPolicy(_on_all(ranks, few_layers, NotSlicedError), hollow, config, ranks, over)


def _on_all(ranks: Ranks, work: Callable[[], Made], kind: type[ModelError]) -> Made:
    """What `work` makes on this rank. Where it raises a `kind` on one rank, all raise it."""
    made = None
    problem = ""
    try:
        made = work()
    except kind as error:
        problem = str(error)
    if problem := next(filter(None, ranks.gather(problem)), ""):
        raise kind(problem)
    return cast(Made, made)

"""A policy whose weights are shared out over ranks, with FSDP2 (`torch.distributed.fsdp.fully_shard`).

What is wrapped decides whether gradients are right. Hooks run around the call of a wrapped module, and Covey scores
through the transformer and the head apart; so the root is a module of our own, `Scoring`, which holds embedding, last
norm and head, and whose forward is the whole scoring of a pack. Wrapped otherwise, tied embeddings lose the head's part
of their gradient while the loss stays right. So a sharded policy is measured before its first use: the gradients of a
small pack, before and after sharding (`Probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.adapters import Adapter, check_fits
from covey.distributed.ranks import Ranks
from covey.errors import ModelError
from covey.pytorch.attention.probe import probe_pack
from covey.pytorch.engine.merge import EffectiveWeights
from covey.pytorch.logprobs import TokenScores
from covey.pytorch.models.lora import adapter_of
from covey.pytorch.packed_model import PackedModel
from covey.pytorch.policy import Policy
from covey.pytorch.reference import Reference
from covey.rollout.learning import Weights
from covey.rollout.packing import Pack
from covey.rollout.walking import Piece

_SAMPLED = 4096
"""Numbers of each gradient that the probe compares, besides its norm."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_OF_HALVES = 2e-2


class Scoring(nn.Module):
    """A policy's model as one module whose call scores a pack."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy

    def forward(self, pack: Pack | Piece, settings: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
        """`Policy.score`, in a tuple: FSDP2 finds no tensors in a dataclass, and would not finish the backward."""
        found = Policy.score(self._policy, pack, **settings)
        return found.logp, found.entropy, found.exact_kl, found.mass, found.hidden


def wrap(policy: Policy, mesh: DeviceMesh) -> Scoring:
    """Shard a policy's model over the last dimension of a mesh: layer by layer, and the rest as one."""
    layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"distributed.learner_kind='sharded': {policy.source} has no layers that transformers knows as such; "
            "use replicated"
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    root = Scoring(policy)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)  # else its weights are whole after scoring alone
    for module in _wrapped(root):
        module.set_gradient_divide_factor(1.0)  # the losses' weights hold the step's denominators
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return root


def _wrapped(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


class ShardedPolicy(Policy):
    """A policy of which each rank holds a part of each weight. All ranks call the same methods in the same order."""

    in_shards = True

    def __init__(self, policy: Policy, ranks: Ranks, parts: int | None = None) -> None:
        """Shard a policy in place. Raises ModelError: its loss, gradients or tied weights are others then."""
        held = policy.held
        held.fused, held.fused_obstacle = None, "the weights are sharded"  # they hold joined copies
        expected, tied = Probe.of(policy, 1.0), tied_names(policy.model)
        self._shard(held, policy.reference, ranks, ranks.mesh(policy.device.type, parts or ranks.world))
        require_tied(self.source, self.model, tied)
        whole = policy.reference
        self.reference = ShardedReference(self.model, **whole.how, from_current=not whole.is_base_model)
        # 1 in all ranks together, in powers of two, which change no rounding: 1/2, 1/4, 1/4 for three
        last = min(ranks.world, 8) - 1
        share = 0.0 if ranks.rank > last else 2.0 ** -min(ranks.rank + 1, last)
        problem = expected.differs(Probe.of(self, share))
        if problem:
            raise ModelError(
                f"{self.source}: sharded over {ranks.world} ranks, {problem}; use distributed.learner_kind='replicated'"
            )

    def _shard(self, held: PackedModel, whole: Reference, ranks: Ranks, mesh: DeviceMesh) -> None:
        """Take a model and shard it; the reference is the one that it had when it was whole."""
        Policy.__init__(self, held, whole)
        self.ranks, self._mesh = ranks, mesh
        self._root = wrap(self, mesh)

    def score(self, pack: Pack | Piece, **settings: Any) -> TokenScores:
        return TokenScores(*self._root(pack, settings))

    def head_under(self, other: Reference | None) -> None:
        """The policy's own, within its pass: a reference has no other, and outside no rank has a whole one."""

    @contextmanager
    def layer_by_layer(self) -> Iterator[LayerByLayer]:
        """All weights by the names of the bare model, adapters added; all ranks read the same in the same order."""
        held = LayerByLayer(self.model, self._root)
        try:
            yield held
        finally:
            held.close()

    def gathered(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of whole tensors in the host's memory of rank 0, one after the other; nothing on the others."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.ranks.rank == 0:
                found[name] = full.detach().to("cpu", copy=True)
        return found

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """A rank's part of what rank 0 has whole, as of the parameter `name`; others give a tensor without data."""
        parameter = dict(self.named_trainable_parameters()).get(name)
        if not isinstance(parameter, DTensor) or full.shape != parameter.shape:
            return full
        held = torch.empty_like(full, device=self.device) if full.is_meta else full.to(self.device)
        return distribute_tensor(held, self._mesh, parameter.placements)

    def merged(self, name: str) -> dict[str, Tensor]:
        """The weight of this name, and those that are gathered together with it, in the host's memory of rank 0."""
        with self.layer_by_layer() as held:
            held[name]
            wanted = held.beside(name) if self.ranks.rank == 0 else []
            return {other: held[other].to("cpu", copy=True) for other in wanted}

    def adapter(self) -> Adapter | None:
        """On rank 0."""
        state = self.state_dict()
        return adapter_of(self.model, state) if self.ranks.rank == 0 else None

    def state_dict(self) -> dict[str, Tensor]:
        """Empty on other ranks than 0."""
        return self.gathered(self.named_trainable_parameters())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Other ranks than 0 give tensors on the meta device."""
        own = dict(self.named_trainable_parameters())
        check_fits({name: p.shape for name, p in own.items()}, state, f"{self.source}: the saved policy")
        super().load_state_dict({name: self.own_part(name, state[name].to(p.dtype)) for name, p in own.items()})

    def save_pretrained(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Rank 0 writes what all hold."""
        if self.uses_peft:
            state = self.state_dict()
        else:
            own = dict(self.held.lm.named_parameters(remove_duplicate=False))
            found = self.gathered((str(id(p)), p) for p in {id(p): p for p in own.values()}.values())
            state = {name: found[str(id(p))] for name, p in own.items()} if found else {}
        if self.ranks.rank == 0:
            super().save_pretrained(path, state)


class LayerByLayer(Mapping[str, Tensor]):
    """All weights of a sharded model, adapters added, of which one layer is whole at a time.

    A tensor may be the memory of that layer, which goes away with the next one: copy it. All ranks take part in making
    a layer whole, so all read the same names in the same order.
    """

    def __init__(self, model: nn.Module, root: nn.Module) -> None:
        """Of a model that `wrap` has wrapped as `root`."""
        self._held = EffectiveWeights(model)
        self._open: FSDPModule | None = None
        owners = {id(part): module for module in _wrapped(root) for part in cast(Any, module).modules()}
        self._owner = {name: owners[id(self._held.owner(name))] for name in self._held}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __getitem__(self, name: str) -> Tensor:
        owner = self._owner[name]
        if owner is not self._open:
            self.close()
            owner.unshard()
            self._open = owner
        return self._held[name]

    def beside(self, name: str) -> list[str]:
        """The names that are made whole together with this one, itself among them."""
        return [other for other, owner in self._owner.items() if owner is self._owner[name]]

    def close(self) -> None:
        if self._open is not None:
            self._open.reshard()
            self._open = None


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [together for together in names.values() if len(together) > 1]


def require_tied(source: str, model: nn.Module, tied: list[list[str]]) -> None:
    """Refuse a model of which `tied_names` are not one parameter any more."""
    names = dict(model.named_parameters(remove_duplicate=False))
    for first, *others in tied:
        if any(names[other] is not names[first] for other in others):
            raise ModelError(
                f"{source}: {', '.join(others)} was {first} and is another tensor after sharding; use "
                "distributed.learner_kind='replicated'"
            )


class ShardedReference(Reference):
    """A reference that is sharded as its policy is."""

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        """FSDP2 reads the memory that it has made, so numbers are exchanged and not pointers."""
        own = {name: _local(parameter) for name, parameter in self._trainable().items()}
        current = {name: part.clone() for name, part in own.items()}
        try:
            for name, part in own.items():
                part.copy_(_local(self._snapshot[name]))
            yield
        finally:
            for name, part in own.items():
                part.copy_(current[name])


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Loss and gradients of a small pack."""

    loss: float
    gradients: dict[str, Tensor]
    tolerance: float

    @classmethod
    def of(cls, policy: Policy, share: float) -> Probe:
        pack = probe_pack(policy.held.lm)
        logp = policy.score(pack).logp
        loss = (logp * torch.linspace(-1.0, 1.0, len(logp), dtype=logp.dtype, device=logp.device)).sum()
        found: dict[str, Tensor] = {}
        names = dict(policy.named_trainable_parameters())

        def take(parameter: Tensor, name: str) -> None:
            gradient, parameter.grad = cast(Tensor, parameter.grad), None
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            flat = full.detach().reshape(-1).double()
            some = flat[:: max(1, len(flat) // _SAMPLED)]
            found[name] = torch.cat([flat.norm()[None], flat.abs().max()[None], some]).cpu()

        # A whole model's gradients are dropped one by one: all at once may be more than the device holds.
        whole = [(name, p) for name, p in names.items() if not isinstance(p, DTensor)]
        hooks = [p.register_post_accumulate_grad_hook(partial(take, name=name)) for name, p in whole]  # type: ignore[no-untyped-call]
        (loss * share).backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.remove()
        for name, parameter in names.items():
            if parameter.grad is not None:
                take(parameter, name)
        return cls(float(loss.detach()), found, _TOLERANCE.get(policy.held.lm.dtype, _TOLERANCE_OF_HALVES))

    def difference(self, other: Probe) -> tuple[float, str]:
        """The largest relative difference of a gradient to that of the other, and whose it is."""
        if self.gradients.keys() != other.gradients.keys():
            return float("inf"), min(self.gradients.keys() ^ other.gradients.keys())
        least = 1e-6 * max(float(sketch[1]) for sketch in self.gradients.values())
        worst = (0.0, "")
        for name, mine in self.gradients.items():
            theirs = other.gradients[name]
            norm = float((mine[0] - theirs[0]).abs() / mine[0].clamp_min(least))
            number = float((mine[1:] - theirs[1:]).abs().max() / mine[1].clamp_min(least))
            worst = max(worst, (max(norm, number), name))
        return worst

    def differs(self, other: Probe) -> str:
        """Why the other cannot be of the same model, or ""."""
        if not abs(self.loss - other.loss) <= self.tolerance * max(abs(self.loss), 1.0):
            return f"the loss of a small pack is {other.loss:.7g} and was {self.loss:.7g}"
        relative, name = self.difference(other)
        return "" if relative <= self.tolerance else f"the gradient of {name} differs by {relative:.1%}"


class LeadingPolicy:
    """Rank 0's policy: what it is called, all ranks call. See `covey.pytorch.policy.Policy` for the methods."""

    in_shards = True

    def __init__(self, own: Policy, ranks: Ranks, parts: int | None = None) -> None:
        """Lead with this rank's own, which may be whole until `shard`. (Another rank calls it `own` alone.)"""
        self.own, self._ranks, self._parts = own, ranks, parts
        self.tokenizer, self.eos_token_ids, self.source = own.tokenizer, own.eos_token_ids, own.source
        self.vocabulary, self.album = own.vocabulary, getattr(own, "album", None)

    @property
    def model(self) -> nn.Module:
        """What a sampler in this process is built from: the model while it is whole, or its shape."""
        return getattr(self.own, "shape", self.own.model)

    def shard(self) -> ShardedPolicy:
        """Shard it, on all ranks, unless it is: samplers have been built from it. Returns this rank's own."""
        if not isinstance(self.own, ShardedPolicy):
            self.own = ShardedPolicy(self.own, self._ranks, self._parts)
        return self.own

    def _together(self, name: str, *args: Any, told: tuple[Any, ...] | None = None) -> Any:
        with self._ranks.telling(("policy", name, args if told is None else told, {})):
            return getattr(self.own, name)(*args)

    def weights(self, version: int) -> Weights:
        """See `Policy.weights`; they are gathered when they are asked for, a layer at a time."""
        make_adapter = partial(self._together, "adapter") if isinstance(self.own.model, PeftModel) else None
        names = list(EffectiveWeights(self.own.model))
        return Weights(version, lambda: Gathered(names, partial(self._together, "merged")), make_adapter)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._together("load_state_dict", state, told=(without_data(state),))

    def save_pretrained(self, path: str | Path) -> None:
        self._together("save_pretrained", path)


class Gathered(Mapping[str, Tensor]):
    """Whole weights, fetched when they are read; those that came with the last one are kept."""

    def __init__(self, names: Sequence[str], fetch: Callable[[str], dict[str, Tensor]]) -> None:
        """`fetch` returns the one that it is asked for, and others."""
        self._names, self._fetch = dict.fromkeys(names), fetch
        self._last: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._last:
            self._last = {}
            self._last = self._fetch(name)
        return self._last[name]


def without_data(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names, shapes and types of tensors; single numbers as they are."""
    return {name: tensor.to("meta") if tensor.ndim else tensor for name, tensor in tensors.items()}

"""Learning in shards: every rank runs equally many packs, each through all ranks' parts of the weights.

In a pass ranks wait for each other in every layer. So a rank that fails there, for want of memory or otherwise, cannot
be waited for: the run ends with its name, and goes on from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from covey.config import GRPOConfig
from covey.distributed.in_turns import RankSampler
from covey.distributed.ranks import Ranks
from covey.distributed.replicated import LeadingLearner, share_out
from covey.distributed.sharded import LeadingPolicy, ShardedPolicy, without_data
from covey.errors import ConfigError
from covey.processes import total_memory
from covey.pytorch.engine.merge import EffectiveWeights
from covey.pytorch.gradient_sum import Work
from covey.pytorch.learner import Learner, is_out_of_memory
from covey.pytorch.moments import optimizer_tensors, restore_optimizer
from covey.pytorch.policy import Policy
from covey.rollout.learning import Weights
from covey.rollout.packing import Pack

Result = TypeVar("Result")

_FILLED = 0.8
"""Part of a device's memory that weights and training state may take before a model is sharded."""


def learns_in_shards(config: GRPOConfig, policy: Policy, ranks: Ranks) -> bool:
    """Whether a policy is to be sharded; all ranks call this, and find the same.

    With "auto" it is where weights, their gradients, AdamW's moments, the exact sum and the reference's copy would fill
    the device, or this rank's part of the machine's memory.
    """
    chosen = config.distributed.learner_kind
    if chosen != "auto" or ranks.world == 1:
        return chosen == "sharded" and ranks.world > 1
    trained = policy.trainable_parameters()
    copies = 3 + (0 if policy.reference.is_base_model else 1)
    needed = sum(p.nbytes for p in policy.model.parameters()) + sum(copies * p.nbytes + 8 * p.numel() for p in trained)
    if policy.device.type == "cuda":
        there = torch.cuda.get_device_properties(policy.device).total_memory
    else:
        there = total_memory() // ranks.local_world
    return any(ranks.gather(needed > _FILLED * there))


def check_sharded(config: GRPOConfig) -> None:
    """Refuse what is not served in shards.

    Raises:
        ConfigError: naming the setting.
    """
    algorithm, chosen = config.algorithm, config.model
    exact = algorithm.kl_estimator.startswith("exact") and algorithm.beta > 0
    adapts = chosen.use_peft and chosen.adapter is None and algorithm.reference_update == "none"
    refused = {
        f"optim.autocast={config.optim.autocast!r}": (config.optim.autocast != "none", "set it to none"),
        f"model.lora_dropout={chosen.lora_dropout}": (chosen.lora_dropout > 0, "set it to 0"),
        f"distributed.samplers={config.distributed.samplers}": (
            bool(config.distributed.samplers),
            "set it to 0: the ranks sample, or servers",
        ),
        f"algorithm.kl_estimator={algorithm.kl_estimator!r}": (
            exact and not adapts,
            "use k3, or a fresh adapter, whose reference is the model without it",
        ),
    }
    for name, (applies, fix) in refused.items():
        if applies:
            raise ConfigError(f"{name}: is not served with distributed.learner_kind='sharded'; {fix}")


class ShardedPacks:
    """See `covey.pytorch.gradient_sum.Share`: equally many packs on each rank, through all ranks' shards.

    Attributes:
        own: how many of the packs under way are this rank's; those after them only fill up.
    """

    side_by_side = False

    def __init__(self, ranks: Ranks) -> None:
        """With these ranks."""
        self._ranks = ranks
        self.own = 0

    def map(self, work: Work[Result], packs: Sequence[Pack]) -> list[Result]:
        """See `Share.map`. Ranks with fewer packs run the smallest of all again; nobody looks at what comes out.

        Raises:
            ModelError: a rank failed; the ranks cannot go on together.
        """
        sizes = [pack.num_tokens for pack in packs]
        shares = share_out(sizes, self._ranks.world)
        own = shares[self._ranks.rank]
        fill = [sizes.index(min(sizes))] * (max(map(len, shares)) - len(own)) if sizes else []
        self.own = len(own)
        try:
            found = list(work([packs[number] for number in own + fill]))
        except KeyboardInterrupt:
            self._ranks.torn("interrupted from the keyboard")
            raise
        except Exception as error:
            fix = "; set a smaller optim.tokens_per_micro_batch" if is_out_of_memory(error) else ""
            raise self._ranks.torn(f"{type(error).__name__}: {str(error)[:500]}{fix}") from error
        heard = self._ranks.gather((own, found[: len(own)]))
        results = {number: result for numbers, its in heard for number, result in zip(numbers, its, strict=True)}
        return [results[number] for number in range(len(packs))]

    def sum(self, parameters: Sequence[Tensor], packs: int, *, side_by_side: bool) -> ShardedSum:
        """See `Share.sum`."""
        return ShardedSum(self)


class ShardedSum:
    """See `covey.pytorch.gradient_sum.GradientSum`: FSDP2 adds each pack's gradients over the ranks, in floats."""

    def __init__(self, share: ShardedPacks) -> None:
        """For the packs that `share` hands out next."""
        self._share = share
        self._done = 0

    def differentiate(self, loss: Tensor) -> Sequence[Tensor | None]:
        """See `GradientSum.differentiate`; packs that fill up count nothing."""
        self._done += 1
        torch.autograd.backward(loss if self._done <= self._share.own else loss * 0.0)
        return ()

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """They are in the parameters' `grad` already."""

    def finish(self) -> None:
        """Nothing is left to do."""


class ShardedLearner(Learner):
    """A learner whose weights, gradients and moments are in shards. All ranks call the same methods."""

    policy: ShardedPolicy

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """See `Learner.tensors`; on rank 0, in the host's memory. A learner of any kind takes them back."""
        policy = self.policy
        moments = optimizer_tensors(self.optimizer, policy.named_trainable_parameters())
        return {
            "policy": policy.state_dict(),
            "reference": policy.gathered(policy.reference.state_dict().items()),
            "optimizer": policy.gathered(moments.items()),
        }

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """See `Learner.restore`; other ranks than 0 give tensors without data."""
        policy = self.policy
        policy.load_state_dict(tensors["policy"])
        policy.reference.load_state_dict({n: policy.own_part(n, t) for n, t in tensors["reference"].items()})
        moments = {n: policy.own_part(n.rpartition("/")[0], t) for n, t in tensors["optimizer"].items()}
        restore_optimizer(self.optimizer, policy.named_trainable_parameters(), moments)
        self.steps = steps


class LeadingShardedLearner(LeadingLearner):
    """Rank 0's learner, of which it has a part."""

    def tensors(self) -> dict[str, dict[str, Any]]:
        """See `Learner.tensors`."""
        return cast(dict[str, dict[str, Any]], self._together("tensors"))

    def restore(self, tensors: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        """See `Learner.restore`."""
        told = {name: without_data(group) for name, group in tensors.items()}
        with self._ranks.telling(("learner", "restore", (told, steps), {})):
            self._own.restore(tensors, steps)


class ShardedRankSampler(RankSampler):
    """A rank's engine, which holds all weights; between two publications the policy holds its part only."""

    def identity(self, weights: Weights) -> tuple[int, str]:
        """The version alone: nothing could differ between ranks that hold parts of the same weights."""
        return weights.version, ""

    def publish(self, version: int, sha256: str) -> None:
        """Take the policy's weights, which every rank holds whole for that long."""
        policy = cast(ShardedPolicy, self._policy.own if isinstance(self._policy, LeadingPolicy) else self._policy)
        with policy.whole():
            held = EffectiveWeights(policy.model)
            # not as they are: an engine shares memory with weights that are frozen, and this memory goes away
            self.engine.publish(Weights(version, lambda: MappingProxyType(held)))

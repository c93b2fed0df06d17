"""Learning in shards: every rank runs equally many packs, each through all ranks' parts of the weights.

In a pass ranks wait for each other in every layer. So a rank that fails there, for want of memory or otherwise, cannot
be waited for: all end with its name, and are started again from the last checkpoint, with packs of half the size where
memory ran out (`MemoryNote`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from covey.adapters import check_fits
from covey.config.whole import GRPOConfig
from covey.distributed.in_turns import RankSampler
from covey.distributed.ranks import NoMemoryError, Ranks, TornError
from covey.distributed.replicated import LeadingLearner, SharedPacks, share_out
from covey.distributed.sharded import LeadingPolicy, ShardedPolicy, without_data
from covey.errors import ConfigError
from covey.files import write_atomically
from covey.observe.run_folder import RunFolder
from covey.processes import total_memory
from covey.pytorch.gradient_sum import GradientSum, Work
from covey.pytorch.learner import Learner
from covey.pytorch.models.shard_files import ShardFiles, read_shards, write_shards
from covey.pytorch.optimizers import optimizer_tensors, restore_optimizer
from covey.pytorch.passes import is_out_of_memory
from covey.rollout.learning import Weights
from covey.rollout.packing import Pack

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_FILLED = 0.8
"""Part of a device's memory that weights and training state may take before a model is sharded."""
_LEAST = 64
"""Tokens of a pack below which smaller ones are no help."""


class MemoryNote:
    """How many tokens fit into a pass, as a run has found out; remembered in its folder, over restarts.

    memory.json: {"tokens_per_micro_batch": 512, "said": "memory ran out ...", "told": false}
    """

    def __init__(self, run: str | Path) -> None:
        self._run = Path(run).expanduser()
        self._file = self._run / "memory.json"

    def at_most(self, tokens: int) -> int:
        """The size of packs to go on with, where `tokens` is what the settings or a checkpoint say."""
        found = self._read().get("tokens_per_micro_batch")
        return min(tokens, max(found, 1)) if isinstance(found, int) else tokens

    def halve(self, tokens: int, who: str, why: str) -> str:
        """Remember that packs of so many tokens are too large."""
        half = min(tokens, self.at_most(tokens)) // 2
        if half < _LEAST or not self._run.is_dir():
            return ""
        said = (
            f"memory ran out on {who} with tokens_per_micro_batch={tokens} ({why}): the run goes on from its last "
            f"checkpoint with {half}"
        )
        write_atomically(self._file, json.dumps({"tokens_per_micro_batch": half, "said": said, "told": False}))
        return said

    def tell(self) -> str:
        """Write what was remembered last to the run's events, once; returns it, or ""."""
        found = self._read()
        said = str(found.get("said", ""))
        if not said or found.get("told"):
            return ""
        with RunFolder.open(self._run) as folder:
            folder.append_event("memory", said)
        write_atomically(self._file, json.dumps(found | {"told": True}))
        return said

    def starts(self, max_restarts: int) -> Iterator[str]:
        """Yields for each start of all ranks why it is needed, "" for the first one, as often as that makes sense.

        Deaths count, up to `max_restarts`; starts with smaller packs do not, for there are few sizes.
        """
        deaths, size = 0, self._read().get("tokens_per_micro_batch")
        yield ""
        while True:
            if (smaller := self._read().get("tokens_per_micro_batch")) != size:
                size = smaller
                yield f"memory ran out on a rank: all are started again with packs of at most {size} tokens"
            elif deaths < max_restarts:
                deaths += 1
                yield f"a rank has died: all are started again ({deaths} of {max_restarts})"
            else:
                return

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):  # a note that is gone or damaged is written again when it matters
            return {}
        return found if isinstance(found, dict) else {}


def training_bytes(model: nn.Module, *, keeps_copy: bool) -> int:
    """Memory of weights, gradients, AdamW's moments, the exact sum and the reference's copy; the passes need more."""
    trained = [(3 + keeps_copy) * p.nbytes + 8 * p.numel() for p in model.parameters() if p.requires_grad]
    return sum(p.nbytes for p in model.parameters()) + sum(trained)


def parts(config: GRPOConfig, needed: int, device: torch.device, ranks: Ranks) -> int:
    """Over how many ranks a model is sharded, 1 = not at all; all ranks call this, and find the same.

    With "auto" it is sharded where `needed` bytes would fill the device, or this rank's part of the machine's memory.
    Then over the ranks of a machine, if these hold it together, and each machine has a copy; else over all ranks.
    """
    chosen = config.distributed.learner_kind
    if ranks.world == 1 or chosen == "replicated":
        return 1
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = total_memory() // ranks.local_world
    heard = ranks.gather((needed > _FILLED * there, needed > _FILLED * there * ranks.local_world, ranks.local_world))
    if chosen == "auto" and not any(full for full, _, _ in heard):
        return 1
    sizes = {size for _, _, size in heard}
    fits = len(sizes) == 1 and ranks.world % ranks.local_world == 0 and not any(over for _, over, _ in heard)
    return ranks.local_world if fits and ranks.local_world > 1 else ranks.world


def check_sharded(config: GRPOConfig) -> None:
    """Refuse what is not served in shards."""
    algorithm, chosen, optim = config.algorithm, config.model, config.optim
    exact = algorithm.kl_estimator.startswith("exact") and algorithm.beta > 0
    adapts = chosen.use_peft and chosen.adapter is None and algorithm.reference_update == "none"
    instead = "use k3, or a fresh adapter, whose reference is the model without it"
    for name, value, refused, fix in (
        ("optim.autocast", optim.autocast, optim.autocast != "none", "set it to none"),
        ("optim.offload", optim.offload, optim.offload, "set it to false"),
        ("optim.optimizer", optim.optimizer, optim.optimizer != "adamw", "set it to adamw"),
        ("model.quantization", chosen.quantization, chosen.quantization != "none", "set it to none"),
        ("model.lora_dropout", chosen.lora_dropout, chosen.lora_dropout > 0, "set it to 0"),
        ("algorithm.teacher", algorithm.teacher, algorithm.teacher is not None, "set it to none"),
        ("algorithm.kl_estimator", algorithm.kl_estimator, exact and not adapts, instead),
    ):
        if refused:
            raise ConfigError(f"{name}={value!r}: is not served with distributed.learner_kind='sharded'; {fix}")


class ShardedPacks(SharedPacks):
    """See `covey.pytorch.gradient_sum.Share`: equally many packs on each rank, through all ranks' shards."""

    own = 0

    def map(self, work: Work[Result], packs: Sequence[Pack]) -> list[Result]:
        """Ranks with fewer packs run the smallest of all again; nobody looks at what comes out."""
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
            raise self._ranks.torn(f"{type(error).__name__}: {str(error)[:500]}") from error
        heard = self._ranks.gather((own, found[: len(own)]))
        results = {number: result for numbers, its in heard for number, result in zip(numbers, its, strict=True)}
        return [results[number] for number in range(len(packs))]

    def sum(self, parameters: Sequence[Tensor], packs: int, *, side_by_side: bool) -> ShardedSum:
        return ShardedSum(self)


class ShardedSum(GradientSum):
    """See `covey.pytorch.gradient_sum.GradientSum`: FSDP2 adds each pack's gradients over the ranks, in floats."""

    def __init__(self, share: ShardedPacks) -> None:
        super().__init__(())
        self._share = share
        self._done = 0

    def differentiate(self, loss: Tensor) -> Sequence[Tensor | None]:
        """Packs that fill up count nothing."""
        self._done += 1
        torch.autograd.backward(loss if self._done <= self._share.own else loss * 0.0)
        return ()

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """They are in the parameters' `grad` already."""


class ShardedTensors(dict[str, dict[str, Tensor]]):
    """Tensors in shards, with what writes them: see `covey.training.checkpoint.WrittenTogether`."""

    def __init__(self, tensors: dict[str, dict[str, Tensor]], write: Callable[[Path], dict[str, dict[str, Tensor]]]):
        super().__init__(tensors)
        self.write = write


class ShardedLearner(Learner):
    """A learner whose weights, gradients and moments are in shards. All ranks call the same methods."""

    policy: ShardedPolicy

    def __init__(self, policy: ShardedPolicy, *, note: MemoryNote | None = None, **options: Any) -> None:
        """With the options of `Learner`; `note` remembers over restarts that memory has run out."""
        super().__init__(policy, **options)
        self._note = note

    def _within_memory(self, run: Callable[[], Result]) -> Result:
        try:
            return run()
        except TornError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            tokens, ranks, why = self.tokens_per_micro_batch, self.policy.ranks, str(error.__cause__).splitlines()[0]
            if self._note and (said := self._note.halve(tokens, f"rank {ranks.rank} of {ranks.world}", why)):
                log.warning("%s", said)
                raise
            raise NoMemoryError(
                f"{error}. tokens_per_micro_batch={tokens}: set a smaller optim.tokens_per_micro_batch, take more "
                "ranks, or set model.gradient_checkpointing to true"
            ) from error

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        policy = self.policy
        return {
            "policy": {name: p.detach() for name, p in policy.named_trainable_parameters()},
            "reference": policy.reference.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer, policy.named_trainable_parameters()),
        }

    def write(self, folder: str) -> dict[str, dict[str, Tensor]]:
        """Each rank writes its part into a folder; where not all see it, rank 0 returns all tensors."""
        ranks, tensors = self.policy.ranks, self.tensors()
        if not all(ranks.gather(Path(folder).is_dir())):
            return {name: self.policy.gathered(group.items()) for name, group in tensors.items()}
        with ranks.waiting("writing a checkpoint"):
            write_shards(folder, tensors)
        return {}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Other ranks than 0 give tensors without data."""
        policy = self.policy
        policy.load_state_dict(tensors["policy"])
        policy.reference.load_state_dict({n: policy.own_part(n, t) for n, t in tensors["reference"].items()})
        moments = {n: policy.own_part(n.rpartition("/")[0], t) for n, t in tensors["optimizer"].items()}
        restore_optimizer(self.optimizer, policy.named_trainable_parameters(), moments)
        self.steps = steps

    def restore_from(self, folder: str, groups: list[str], steps: int) -> bool:
        """Restore what `write` has written, on any number of ranks: each reads its own parts. Raises ModelError."""
        policy, ranks = self.policy, self.policy.ranks
        if not all(ranks.gather(Path(folder).is_dir())):
            return False
        own = dict(policy.named_trainable_parameters())
        saved = {group: held.shapes for group, held in ShardFiles(Path(folder), groups).items()}
        for group in ("policy", "reference")[: 1 + bool(saved["reference"])]:
            check_fits({n: p.shape for n, p in own.items()}, saved[group], f"{policy.source}: the saved {group}")

        def room(name: str, like: Tensor) -> Tensor:
            parameter = own.get(name)
            if parameter is None or like.shape != parameter.shape:
                return torch.empty(like.shape, dtype=like.dtype)
            return torch.empty_like(parameter.detach(), dtype=like.dtype)

        reference = {name: room(name, like) for name, like in saved["reference"].items()}
        moments = {name: room(name.rpartition("/")[0], like) for name, like in saved["optimizer"].items()}
        weights = {name: p.detach() for name, p in own.items()}
        with ranks.waiting("reading a checkpoint"):
            read_shards(folder, {"policy": weights, "reference": reference, "optimizer": moments})
        policy.reference.load_state_dict(reference)
        restore_optimizer(self.optimizer, policy.named_trainable_parameters(), moments)
        self.steps = steps
        return True


class LeadingShardedLearner(LeadingLearner):
    """Rank 0's learner, of which it has a part."""

    def __init__(self, learner: ShardedLearner, ranks: Ranks, note: MemoryNote | None = None) -> None:
        """Lead with this rank's own learner; `note` may know that packs must be smaller than the settings say."""
        super().__init__(learner, ranks)
        self._note = note
        if self._most_tokens(learner.tokens_per_micro_batch) < learner.tokens_per_micro_batch:
            self.tokens_per_micro_batch = learner.tokens_per_micro_batch

    def _most_tokens(self, tokens: int) -> int:
        return tokens if self._note is None else self._note.at_most(tokens)

    def tensors(self) -> dict[str, dict[str, Any]]:
        return ShardedTensors(self._own.tensors(), lambda folder: self._together("write", str(folder)))

    def restore(self, tensors: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        if isinstance(tensors, ShardFiles) and self._together(
            "restore_from", str(tensors.folder), list(tensors), steps
        ):
            return
        told = {name: without_data(group) for name, group in tensors.items()}
        with self._ranks.telling(("learner", "restore", (told, steps), {})):
            self._own.restore(tensors, steps)


class ShardedRankSampler(RankSampler):
    """A rank's engine, which holds all weights; between two publications the policy holds its part only."""

    def identity(self, weights: Weights) -> tuple[int, str]:
        """The version alone: nothing could differ between ranks that hold parts of the same weights."""
        return weights.version, ""

    def publish(self, version: int, sha256: str) -> None:
        """Take the policy's weights; every rank holds one layer after the other whole."""
        policy = cast(ShardedPolicy, self.policy.own if isinstance(self.policy, LeadingPolicy) else self.policy)
        with policy.layer_by_layer() as held:
            self.engine.publish(Weights(version, lambda: held))

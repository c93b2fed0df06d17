"""The ranks of a run before its first step: machines that do not go together are refused, and a sum is tried."""

from __future__ import annotations

from typing import Any

import torch

from covey.config.whole import GRPOConfig
from covey.distributed.machines import MIXTURE, Facts, check_mixture, check_models, facts_here, mixtures
from covey.distributed.preflight import installed
from covey.distributed.ranks import Ranks
from covey.distributed.whereabouts import whereabouts
from covey.errors import ConfigError, ModelError

_SUM_NUMBERS = 1 << 17
"""Whole numbers that are added up on trial: 1 MB."""


def check_ranks(ranks: Ranks, config: GRPOConfig) -> list[str]:
    """Refuse ranks whose numbers would differ, and try one sum; every rank calls this and raises the same.

    Raises:
        ConfigError: they have other versions, another model, or differ in what numbers depend on.
        ModelError: the sum is wrong.
        RankLostError: a rank did not answer.
    """
    own = (installed(), {**facts_here(config.model.model), "threads": torch.get_num_threads()}, whereabouts())
    told: list[Any] = ranks.gather(own)
    (versions, first, where), others = told[0], told[1:]
    facts = {f"rank {rank} on {place}": Facts(**found) for rank, (_, found, place) in enumerate(others, 1)}
    differences = []
    for rank, (theirs, _, place) in enumerate(others, 1):
        for name in sorted({*versions, *theirs}):
            if versions.get(name) == theirs.get(name):
                continue
            has, expected = theirs.get(name) or "none", versions.get(name) or "none"
            what = f"rank {rank} on {place} has {name} {has}, rank 0 has {expected}"
            if name not in MIXTURE:
                raise ConfigError(f"{what}: install the same versions everywhere, such as with one container image")
            differences.append(what)
    leader = Facts(**first)
    check_models(config.model.model, leader, {f"rank 0 on {where}": leader, **facts})
    on_gpus = config.model.device != "cpu" and bool(leader.gpus)
    said = mixtures(leader, facts, gpus=on_gpus, name_of_own="rank 0")
    total = torch.full((_SUM_NUMBERS,), ranks.rank + 1, dtype=torch.int64)
    ranks.add(total)
    if not bool((total == ranks.world * (ranks.world + 1) // 2).all()):
        raise ModelError(f"the ranks' sum of 1 MB is wrong on {whereabouts()}: look at its network and memory")
    return check_mixture([*differences, *said], allowed=config.run.allow_mixture)

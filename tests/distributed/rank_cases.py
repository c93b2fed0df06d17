"""Run by torchrun, as `rank_cases.py FOLDER KIND:CASE ...`: updates on all ranks and on one; rank 0 writes results."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import sharded_cases
import slice_cases
import torch
from learner_cases import make_batch, make_learner

from covey.adapters import fingerprint
from covey.algorithms.losses import LOSSES
from covey.config.algorithm import AlgorithmConfig
from covey.distributed.ranks import STOP, Ranks
from covey.distributed.replicated import LeadingLearner, SharedPacks, follow
from covey.errors import ModelError
from covey.pytorch.learner import Learner
from covey.training.update import update

CASES: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in LOSSES},
    "kl": {"beta": 0.04},
    "exact kl": {"beta": 0.04, "kl_estimator": "exact"},
    "masks by policy": {"off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.5},
    "correction": {"importance_sampling_correction": "token_truncate"},
    "two iterations": {"num_iterations": 2},
    "mini-batches": {"num_minibatches": 2},
    "entropy": {"entropy_coef": 0.01},
    "agents": {},
    "one pack": {},
    "memory": {},
    "a fault": {},
}


def fail_once(learner: Learner, fault: Exception) -> None:
    """In its next pack."""
    score = learner.policy.score

    def fail(*args: Any, **settings: Any) -> Any:
        learner.policy.score = score  # type: ignore[method-assign]
        raise fault

    learner.policy.score = fail  # type: ignore[method-assign]


def build(case: str, ranks: Ranks) -> Learner:
    budget = {"one pack": 4096, "memory": 100, "a fault": 100}.get(case, 48)
    plain = make_learner(tokens_per_micro_batch=budget, side_by_side=False)
    learner = Learner(plain.policy, learning_rate=1e-2, tokens_per_micro_batch=budget, share=SharedPacks(ranks))
    faults = {"memory": torch.OutOfMemoryError("injected"), "a fault": ArithmeticError("injected")}
    if ranks.rank == min(1, ranks.world - 1) and case in faults:
        fail_once(learner, faults[case])
    return learner


def updates(case: str, ranks: Ranks) -> dict[str, Any]:
    """All ranks: three updates; rank 0 returns what came out."""
    learner = build(case, ranks)
    if ranks.rank > 0:
        follow(ranks, learner)
        return {}
    leading = LeadingLearner(learner, ranks)
    algorithm, metrics = AlgorithmConfig(**{"beta": 0.0, **CASES[case]}), []
    for step in range(3):
        batch = make_batch(step, agents=case == "agents", groups=12 if case in ("memory", "a fault") else 3)
        try:
            done = update(leading, batch, algorithm, 1e-2, temperature=1.0, max_completion_length=9)
        except (ModelError, ArithmeticError) as error:
            metrics.append({"error": str(error)})
            continue  # the others are still there
        metrics.append({name: value for name, value in done.metrics.items() if not name.startswith("time/")})
    with ranks.telling("stop"):
        pass
    weights = {name: p.detach().numpy() for name, p in learner.policy.named_trainable_parameters()}
    found = {"weights": fingerprint((name, [weights[name]]) for name in sorted(weights)), "metrics": metrics}
    return found | {"steps": learner.steps, "budget": learner.tokens_per_micro_batch}


def compare(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """All ranks: the updates together. Rank 0 returns that, and the same alone."""
    found = updates(case, ranks)
    return {"together": found, "alone": updates(case, Ranks())} if ranks.rank == 0 else {}


KINDS: dict[str, Any] = {
    "replicated": compare,
    "sharded": sharded_cases.compare,
    "wrongly": sharded_cases.wrapped_wrongly,
    "move": sharded_cases.move,
    "fail": sharded_cases.fail_on,
    "slices": slice_cases.compare,
    "made": slice_cases.made,
}


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if "MACHINE" in os.environ:  # as if so many ranks were on one machine
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["MACHINE"]
    ranks = Ranks.of_torchrun(300)
    assert ranks is not None
    found: dict[str, dict[str, Any]] = {}
    for kind, _, case in (each.partition(":") for each in cases):
        found.setdefault(kind, {})[case] = KINDS[kind](case, ranks, folder)
    if ranks.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    else:
        assert ranks.hear() == STOP
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

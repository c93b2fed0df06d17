"""Three updates in shards beside the same in one process; see rank_cases.py."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_cases import make_batch
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from covey.config.algorithm import AlgorithmConfig
from covey.distributed.ranks import Ranks, TornError
from covey.distributed.replicated import follow
from covey.distributed.sharded import LeadingPolicy, Probe, ShardedPolicy
from covey.distributed.sharded_learner import LeadingShardedLearner, ShardedLearner, ShardedPacks
from covey.errors import ModelError
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.training.checkpoint import load_checkpoint, save_checkpoint
from covey.training.update import update

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # options of the model, settings of the algorithm
    "tied, all weights": ({}, {}),
    "tied, LoRA": ({"use_peft": True}, {}),
    "untied, all weights": ({"tied": False}, {"loss_type": "dapo"}),
    "untied, LoRA": ({"tied": False, "use_peft": True}, {"beta": 0.04}),
    "Qwen3, all weights": ({"family": "qwen3"}, {}),
    "Qwen3, LoRA": ({"family": "qwen3", "use_peft": True}, {"beta": 0.04, "kl_estimator": "exact"}),
    "GPT-2, all weights": ({"family": "gpt2"}, {"entropy_coef": 0.01}),
    "Gemma 2, all weights": ({"family": "gemma2"}, {}),
    "checkpointed": ({"gradient_checkpointing": True}, {}),
    "a reference in shards": ({}, {"beta": 0.04, "reference_update_steps": 1}),
    "a moving reference": ({}, {"beta": 0.04, "reference_update_steps": 1, "reference_ema_decay": 0.5}),
    "one pack": ({"budget": 4096}, {}),
    "two iterations": ({}, {"num_iterations": 2}),
    "bfloat16, LoRA": ({"use_peft": True, "dtype": "bfloat16"}, {}),
    "LoRA on the head": ({"use_peft": True, "lora_target_modules": ["q_proj", "lm_head"], "tied": False}, {}),
}


def build(settings: dict[str, Any], algorithm: dict[str, Any]) -> Policy:
    options = {"family": "llama", "tied": True, "use_peft": False} | settings
    options.pop("budget", None)
    model = tiny_model(options.pop("family"), tie_word_embeddings=options.pop("tied"))
    update_of = AlgorithmConfig(**algorithm).reference_update
    rule = {"update": update_of, "ema_decay": algorithm.get("reference_ema_decay", 0.99), "needed": "beta" in algorithm}
    policy = Policy.load(model, tiny_tokenizer(), lora_r=4, seed=3, reference=rule, **options)
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    return policy


class Watched:
    """A learner that keeps the gradients before each step."""

    def __init__(self, learner: Any, gradients: Any) -> None:
        self.learner, self._gradients, self.found = learner, gradients, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)

    def optim_step(self, rate: float) -> float:
        self.found.append(self._gradients())
        return float(self.learner.optim_step(rate))


def run(learner: Watched, algorithm: dict[str, Any], steps: range) -> list[dict[str, float]]:
    found = []
    for step in steps:
        settings = AlgorithmConfig(**{"beta": 0.0, **algorithm})
        done = update(learner, make_batch(step, groups=11), settings, 1e-3, temperature=1.0, max_completion_length=9)
        found.append({name: value for name, value in done.metrics.items() if not name.startswith("time/")})
    return found


def options(case: str) -> dict[str, Any]:
    return {"learning_rate": 1e-3, "tokens_per_micro_batch": CASES[case][0].get("budget", 48)}


def relative(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    least = 1e-4 * max(float(value.abs().max()) for value in mine.values())
    return max(float((x - theirs[n]).abs().max() / x.abs().max().clamp_min(least)) for n, x in mine.items())


def off(mine: dict[str, float], theirs: dict[str, float]) -> float:
    return max(abs(value - theirs[name]) / max(abs(value), 1.0) for name, value in mine.items())


def apart(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    return max((float((value.float() - theirs[n].float()).abs().max()) for n, value in mine.items()), default=0.0)


def saved_by(learner: Any, folder: Path) -> dict[str, dict[str, Tensor]]:
    """What all ranks write into a checkpoint and one process reads."""
    checkpoint = load_checkpoint(save_checkpoint(folder, 3, learner.tensors(), {}))
    assert len(list((checkpoint.path / "shards").iterdir())) >= 2
    return {name: dict(group) for name, group in checkpoint.tensors.items()}


def compare(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """All ranks: a case in shards, beside the same in one process. Rank 0 returns how far they are apart."""
    settings, algorithm = CASES[case]
    leading = LeadingPolicy(build(settings, algorithm), ranks, ranks.local_world)
    policy = leading.shard()
    inner = ShardedLearner(policy, share=ShardedPacks(ranks), **options(case))
    if ranks.rank > 0:
        follow(ranks, inner, None, policy)
        return {}
    learner = LeadingShardedLearner(inner, ranks)
    watched = Watched(learner, lambda: leading._together("gradients"))
    metrics = run(watched, algorithm, range(3))
    saved = saved_by(learner, folder / case / "checkpoints")
    alone = build(settings | {"fused_layers": False}, algorithm)
    plain = Learner(alone, side_by_side=False, **options(case))
    watched_alone = Watched(plain, lambda: {n: p.grad.clone() for n, p in alone.named_trainable_parameters()})
    expected = run(watched_alone, algorithm, range(3))
    theirs, parameters = plain.tensors(), list(policy.model.parameters())
    found: dict[str, Any] = {
        "sharded": all(isinstance(p, DTensor) for p in parameters),
        "part": sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters),
        "steps": learner.steps,
        "gradients": relative(watched_alone.found[0], watched.found[0]),
        "metrics": max(off(a, b) for a, b in zip(expected, metrics, strict=True)),
        "names": [sorted(a) == sorted(b) for a, b in zip(expected, metrics, strict=True)] == [True] * 3,
        "packs": len(plain._packs(make_batch(0, groups=11).episodes, np.arange(44))[0]),
        "norm": abs(metrics[0]["grad_norm"] - expected[0]["grad_norm"]) / expected[0]["grad_norm"],
        **{name: apart(theirs[name], saved[name]) for name in theirs},
    }
    # What is written is what a single process reads, and what it has trained goes on in shards.
    leading.save_pretrained(folder / case)
    alone.load_state_dict(saved["policy"])
    whole, gathered = alone.weights(3), leading.weights(3)
    if alone.uses_peft:
        found["saved"] = gathered.sha256 == whole.sha256
    else:
        again = Policy.load(folder / case, use_peft=False, fused_layers=False)
        found["saved"] = apart(saved["policy"], again.state_dict())
    found["merged"] = apart(dict(whole.tensors()), dict(gathered.tensors()))
    learner.restore(theirs, 3)
    found["restored"] = same(theirs, saved_by(learner, folder / case / "again"))
    learner.restore(load_checkpoint(folder / case / "checkpoints" / "step_000003").tensors, 3)
    found["read"] = same(saved, saved_by(learner, folder / case / "back"))
    learner.restore(theirs, 3)
    found["after"] = off(run(watched, algorithm, range(3, 4))[0], run(watched_alone, algorithm, range(3, 4))[0])
    try:
        leading.load_state_dict({"nobody": torch.zeros(2)})
    except ModelError as error:
        found["refusal"] = str(error)
    with ranks.telling("stop"):
        pass
    return found


def same(mine: dict[str, dict[str, Tensor]], theirs: dict[str, dict[str, Tensor]]) -> bool:
    pairs = [(group, theirs[name]) for name, group in mine.items()]
    return all(one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one) for one, other in pairs)


def gradients(policy: ShardedPolicy) -> dict[str, Tensor]:
    return policy.gathered((n, p.grad) for n, p in policy.named_trainable_parameters() if p.grad is not None)


ShardedPolicy.gradients = gradients  # type: ignore[attr-defined]


def wrapped_wrongly(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The transformer is the root, and the head, which is tied, stays outside: the loss is right."""
    policy = build({"fused_layers": False}, {})
    expected, mesh = Probe.of(policy, 1.0), ranks.mesh("cpu", ranks.world)
    inner: Any = policy.held.transformer
    for layer in [*inner.layers, inner]:
        fully_shard(layer, mesh=mesh)
    for module in [*inner.layers, inner]:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    found = Probe.of(policy, 1 / ranks.world)
    found.gradients.pop("lm_head.weight")  # its own tensor now, by which one could tell, too
    difference, loss = expected.difference(found)[0], abs(expected.loss - found.loss)
    return {"loss": loss, "difference": difference, "said": expected.differs(found)}


def move(case: str, ranks: Ranks, folder: Path) -> None:
    """All ranks: take up the newest checkpoint, or take two steps where there is none, and write another one."""
    there = sorted((folder / case).glob("*/step_000002"))
    ranks.gather(None)
    source, target = there[-1] if there else None, folder / case / str(len(there))
    settings, algorithm = CASES[case]
    policy = build(settings | {"fused_layers": False}, algorithm)
    if ranks.world == 1:
        learner: Any = Learner(policy, side_by_side=False, **options(case))
    else:
        own = ShardedLearner(LeadingPolicy(policy, ranks).shard(), share=ShardedPacks(ranks), **options(case))
        if ranks.rank > 0:
            follow(ranks, own, None, own.policy)
            return
        learner = LeadingShardedLearner(own, ranks)
    if source is None:
        run(Watched(learner, dict), algorithm, range(2))
    else:
        learner.restore(load_checkpoint(source).tensors, 2)
    save_checkpoint(target, 2, learner.tensors(), {})
    with ranks.telling("stop"):
        pass


def fail_on(rank: str, ranks: Ranks, folder: Path) -> None:
    """All ranks: memory runs out on one of them, in its second pack, and all end."""
    policy = LeadingPolicy(build({}, {}), ranks).shard()
    learner = ShardedLearner(policy, share=ShardedPacks(ranks), **options("tied, all weights"))
    score, packs = policy.score, itertools.count(1)

    def fail(*args: Any, **settings: Any) -> Any:
        if next(packs) == 2:
            raise torch.OutOfMemoryError("injected")
        return score(*args, **settings)

    if ranks.rank == int(rank):
        policy.score = fail  # type: ignore[method-assign]
    if ranks.rank > 0:
        follow(ranks, learner, None, policy)
        return
    first = LeadingShardedLearner(learner, ranks)
    try:
        run(Watched(first, dict), {}, range(1))
    except TornError as error:
        print(f"rank 0 says: {error}", flush=True)
        try:
            first.optim_step(1e-3)
        except TornError:
            print("and is not asked again", flush=True)
        raise

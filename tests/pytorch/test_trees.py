"""Steps as trees: the same scores, losses, metrics and gradients as one sequence at a time, however they are packed.

All in float64, but for norms and rotations in the models' own code; what learners return is rounded to float32.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import grads_of, sampled_of
from peft import LoraConfig
from tiny_models import FAMILIES, tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from covey.algorithms import LOSSES, Correction, make_objective
from covey.pytorch.gradient_sum import AloneInFixedPoint
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.rollout.learning import Gradients
from covey.types import Batch, Episode, Support

TEMPERATURE = 0.8


def learner_of(
    family: str = "llama", *, shared: bool = True, checkpointing: bool = False, fused_layers: bool = True,
    use_peft: bool = True, model: Any = None, lora_config: Any = None, **options: Any,
) -> Learner:  # fmt: skip
    model = model or tiny_model(family)
    if family != "gemma2":  # whose own code returns NaN for padding in float64
        model = model.double()
    policy = Policy.load(
        model, tiny_tokenizer(), lora_r=4, seed=3, use_peft=use_peft, lora_config=lora_config,
        prefix_sharing=shared, gradient_checkpointing=checkpointing, fused_layers=fused_layers,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            if "lora_B" in name or not use_peft:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.05)
    return Learner(policy, learning_rate=1e-2, **options)


def tree_batch(seed: int, *, rows: int = 14, agents: bool = True, supports: bool = False) -> Batch:
    """Common instructions, prompts, forks within completions, equal completions, observations; numbers of their own."""
    rng = np.random.default_rng(seed)
    instructions = rng.integers(4, 97, 5)
    prompts = [rng.integers(4, 97, rng.integers(1, 4)) for _ in range(3)]
    episodes: list[Episode] = []
    for row in range(rows):
        before = [e for e in episodes if e.num_sampled > 1]
        if before and row % 3:
            other = before[rng.integers(len(before))]
            cut = int(rng.integers(int(np.argmax(other.sampled)), len(other.token_ids) + 1))
            ids, sampled = other.token_ids[:cut], other.sampled[:cut]
        else:
            ids = np.concatenate([instructions, prompts[row % 3]])
            sampled = np.zeros(len(ids), np.bool_)
        more = int(rng.integers(0 if sampled.any() else 1, 7))
        new = rng.random(more) < 0.7 if agents else np.ones(more, np.bool_)
        if not sampled.any():
            new[0] = True
        ids, sampled = np.concatenate([ids, rng.integers(4, 97, more)]), np.concatenate([sampled, new])
        logprobs = np.where(sampled, rng.normal(-4, 0.4, len(ids)), 0).astype(np.float32)
        kept = None
        if supports:
            choices = [np.unique([*rng.integers(4, 97, 2), token]) for token in ids[sampled]]
            kept = Support(np.concatenate(choices), np.cumsum([0, *map(len, choices)]))
        episodes.append(Episode(ids, sampled, logprobs, "", "stop", 1, kept))
    exists, old = sampled_of(episodes)
    advantages = np.where(exists, rng.normal(size=exists.shape), 0).astype(np.float32)
    masked = exists & (rng.random(exists.shape) < 0.15)
    return Batch(tuple(episodes), np.arange(rows) // 3, advantages, exists & ~masked, old, {"validity_mask": masked})


Found = tuple[Gradients, dict[str, torch.Tensor]]


def run(learner: Learner, batch: Batch, loss_type: str = "grpo", correction: Any = None, **options: Any) -> Found:
    objective = make_objective(loss_type, **options)
    rows = np.arange(len(batch.episodes))
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "max_completion_length": 12, "correction": correction}
    logp, entropy = learner.scores(batch, rows, temperature=TEMPERATURE, entropy=True)
    if objective.estimates_kl:
        settings["reference"], _ = learner.scores(batch, rows, temperature=TEMPERATURE, reference=True)
    if objective.loss.select is not None:
        settings["selected"] = objective.select(logp, batch.old_logprobs, batch.advantages, batch.mask, entropy)
    found = learner.forward_backward(batch, rows, objective, **settings)
    np.testing.assert_allclose(found.logp, logp, rtol=0, atol=2e-6)
    return found, grads_of(learner.policy)


def assert_same(ours: Found, theirs: Found) -> None:
    (mine, grads), (other, expected) = ours, theirs
    np.testing.assert_array_equal(mine.scored, other.scored)
    for name in ("logp", "entropy", "kl"):
        if getattr(other, name) is not None:
            np.testing.assert_allclose(getattr(mine, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    assert mine.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-6)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-5 * largest)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"tokens_per_micro_batch": 10_000},
    "walked": {"tokens_per_micro_batch": 16},
    "walked far": {"tokens_per_micro_batch": 3},
    "cut": {"tokens_per_micro_batch": 16, "share": AloneInFixedPoint()},
}
OBJECTIVES: dict[str, dict[str, Any]] = {name: {"loss_type": name} for name in sorted(LOSSES)} | {
    f"beta {kind}": {"beta": 0.1, "kl_estimator": kind} for kind in ("k1", "k2", "k3", "exact", "exact_weighted")
}
OBJECTIVES |= {
    "entropy": {"entropy_coef": 0.05},
    "kept exact": {"loss_type": "reinforce_kept", "beta": 0.1, "kl_estimator": "exact_weighted"},
    "corrected": {"correction": Correction("token_truncate", 2.0)},
    "corrected by sequence": {"correction": Correction("sequence_mask", 1.5, 0.5), "loss_type": "gspo"},
}


@cache
def learner_in(way: str) -> Learner:
    return learner_of(**WAYS[way])


@pytest.fixture(scope="module")
def alone() -> Learner:
    return learner_of(shared=False, tokens_per_micro_batch=1)


SLOW = pytest.mark.slow
TELLING = ("grpo", "gspo", "kept exact", "corrected by sequence")
"""With these every way is tried; with the others those that differ most."""


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        pytest.param(name, way, marks=() if name in TELLING[:1] or (way == "walked" and name in TELLING) else SLOW)
        for name in OBJECTIVES
        for way in WAYS
        if name in TELLING or way in ("whole", "walked")
    ],
)
def test_every_objective_is_that_of_one_sequence_at_a_time(objective: str, way: str, alone: Learner) -> None:
    ours = run(learner_in(way), tree_batch(0), **OBJECTIVES[objective])
    assert_same(ours, run(alone, tree_batch(0), **OBJECTIVES[objective]))
    tokens = ours[0].tokens
    assert (tokens.computed == tokens.unique) == (way != "cut")
    assert tokens.raw > 2 * tokens.unique


@pytest.mark.parametrize("way", [pytest.param("whole", marks=SLOW), "walked"])
@pytest.mark.parametrize("use_peft", [True, pytest.param(False, marks=SLOW)], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_windows_and_soft_caps(family: str, use_peft: bool, way: str) -> None:
    one = learner_of(family, use_peft=use_peft, shared=False, tokens_per_micro_batch=1)
    learners = (learner_of(family, use_peft=use_peft, **WAYS[way]), one)
    assert_same(*(run(each, tree_batch(1), "dapo", beta=0.1, kl_estimator="exact") for each in learners))


@pytest.mark.parametrize("way", ["walked", *(pytest.param(way, marks=SLOW) for way in WAYS if way != "walked")])
def test_kept_supports(way: str, alone: Learner) -> None:
    """Equal tokens that were drawn from other ids have other probabilities, and are scored apart."""
    batch = tree_batch(2, supports=True)
    for objective in ({}, {"beta": 0.1, "kl_estimator": "exact"}, {"entropy_coef": 0.05}):
        assert_same(run(learner_in(way), batch, **objective), run(alone, batch, **objective))


@pytest.mark.parametrize("way", [pytest.param("whole", marks=SLOW), "walked"])
@pytest.mark.parametrize("options", [{"checkpointing": True}, {"fused_layers": False}], ids=["checkpoints", "own code"])
def test_slower_ways_give_the_same(options: dict[str, Any], way: str, alone: Learner) -> None:
    expected = run(alone, tree_batch(3), beta=0.1)
    for chosen in (options, {"checkpointing": True, "fused_layers": False}):
        assert_same(run(learner_of(**chosen, **WAYS[way]), tree_batch(3), beta=0.1), expected)


@pytest.mark.parametrize("seed", [4, 5, *(pytest.param(seed, marks=SLOW) for seed in range(6, 12))])
def test_random_trees_at_random_budgets(seed: int, alone: Learner) -> None:
    batch = tree_batch(seed, rows=20, agents=bool(seed % 2))
    budget = int(np.random.default_rng(seed).integers(1, 60))
    ours = run(learner_of(tokens_per_micro_batch=budget), batch, "cispo", beta=0.05)
    assert_same(ours, run(alone, batch, "cispo", beta=0.05))


@pytest.mark.parametrize("kind", ["adapter", pytest.param("copy", marks=SLOW)])
def test_trained_heads_where_a_trunk_scores_nothing(kind: str) -> None:
    """Prompts that part inside are trunks without a target: their backward begins at nothing but their followers."""
    options: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "v_proj", "lm_head"]}
    if kind == "copy":
        options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    found = []
    for shared, budget in ((True, 12), (False, 1)):
        model, config = tiny_model("llama", tie_word_embeddings=False), LoraConfig(r=2, **options)
        learner = learner_of(model=model, lora_config=config, shared=shared, tokens_per_micro_batch=budget)
        found.append(run(learner, tree_batch(0), beta=0.1))
    assert_same(*found)


def test_rotations_that_depend_on_the_length_share_nothing_and_run_row_by_row() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 12}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    config = LlamaConfig(**(tiny_model("llama").config.to_dict() | {"rope_parameters": rope}))
    torch.manual_seed(0)
    policy = Policy.load(LlamaForCausalLM(config), tiny_tokenizer(), lora_r=4, seed=3)
    assert policy.prefix_sharing_obstacle == "rope type 'longrope' depends on the sequence length"
    batch = tree_batch(0)
    assert max(len(episode.token_ids) for episode in batch.episodes) > 14
    for budget in (10_000, 16):
        learner = Learner(policy, learning_rate=1e-2, tokens_per_micro_batch=budget)
        logp, _ = learner.scores(batch, np.arange(len(batch.episodes)), temperature=TEMPERATURE)
        for row, episode in enumerate(batch.episodes):
            at = np.flatnonzero(episode.sampled)
            with torch.no_grad():
                logits = policy.model(torch.from_numpy(episode.token_ids[None, : at[-1]])).logits[0] / TEMPERATURE
            own = logits.log_softmax(-1)[torch.from_numpy(at - 1), torch.from_numpy(episode.token_ids[at])]
            np.testing.assert_allclose(logp[row, : len(at)], own.numpy(), rtol=0, atol=1e-5)


def test_equal_completions_are_computed_once_and_counted_as_often_as_they_are(alone: Learner) -> None:
    batch = tree_batch(0, rows=1)
    advantages, mask, old = (
        np.repeat(x, 4, 0) for x in (batch.advantages, batch.mask | batch.excluded["validity_mask"], batch.old_logprobs)
    )
    advantages *= np.arange(1, 5, dtype=np.float32)[:, None]
    four = Batch(batch.episodes * 4, np.zeros(4, np.int64), advantages, mask, old)
    ours = run(learner_of(), four)
    assert_same(ours, run(alone, four))
    one = np.flatnonzero(batch.episodes[0].sampled)[-1]
    tokens = ours[0].tokens
    assert (tokens.raw, tokens.unique, tokens.computed) == (4 * one, one, one)

"""Rows that share tokens, anywhere: losses and gradients are those of one sequence at a time, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import grown, moved, small_transformer, tree_batch

from covey.algorithms import Correction, Objective, make_objective
from covey.jax import attention
from covey.jax.attention import causal, packed
from covey.jax.learner import Learner
from covey.jax.packing import Shape, fill, pack_rows
from covey.jax.policy import Policy
from covey.jax.scoring import Scores, loss_terms
from covey.jax.stacked import unstack
from covey.rollout.learning import loss_weights
from covey.rollout.packing import pack_episodes
from covey.types import Batch, Episode, Support

VOCAB, TEMPERATURE = 13, 0.7  # ids of `grown`


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Plain:
    """One sequence at a time, each padded behind its end, through the model as it is called by users."""

    policy: Policy
    batch: Batch

    def scores(self, trained: Any, other: Any, objective: Objective) -> Scores:
        """`[N, T]`."""
        layers = self.policy.transformer.config.num_layers
        plain = self.policy.transformer
        longest = max(len(one.token_ids) for one in self.batch.episodes)
        ids = np.zeros((len(self.batch.episodes), longest), np.int32)
        at = np.ones(self.batch.mask.shape, np.int32)
        keep = np.ones((*self.batch.mask.shape, VOCAB), np.bool_)
        for row, one in enumerate(self.batch.episodes):
            ids[row, : len(one.token_ids)] = one.token_ids
            at[row, : one.num_sampled] = np.flatnonzero(one.sampled)
            for t in range(one.num_sampled if one.support is not None else 0):
                assert one.support is not None
                keep[row, t] = np.isin(np.arange(VOCAB), one.support.of(t))

        def log_softmax(variables: Any) -> Any:
            named = {name: unstack(tree, layers) for name, tree in variables.items()}
            logits = jax.lax.map(lambda row: plain.apply(named, row[None])[0], jnp.asarray(ids))
            picked = jnp.take_along_axis(logits, at[:, :, None] - 1, axis=1) / TEMPERATURE
            return jax.nn.log_softmax(jnp.where(keep, picked, -1e30), axis=-1)

        logp = log_softmax({**self.policy.frozen, **trained})
        chance = jnp.exp(logp)
        target = np.take_along_axis(ids, at, axis=1)
        chosen = jnp.take_along_axis(logp, target[:, :, None], axis=2)[:, :, 0]
        kl = None
        if objective.vocabulary_kl is not None:
            kl = jnp.sum(jnp.where(keep, chance * (logp - log_softmax(other)), 0), -1)
        none = ~self.batch.sampled
        found = Scores(chosen, -jnp.sum(jnp.where(keep, chance * logp, 0), -1), kl)
        return jax.tree.map(lambda x: jnp.where(none, 0, x), found)

    def step(self, objective: Objective, given: dict[str, Any], correction: Correction | None) -> Any:
        """Scores, metrics, and the gradient."""
        batch = self.batch
        weights, kl_weights = loss_weights(batch, objective, 12)
        rows = {"mask": batch.mask, "old": batch.old_logprobs, "advantages": batch.advantages, "weights": weights}
        rows |= {} if kl_weights is None else {"kl_weights": kl_weights}
        rows |= {name: value for name, value in given.items() if value is not None}

        def loss_of(trained: Any) -> Any:
            found = self.scores(trained, self.policy.reference.variables, objective)
            terms = loss_terms(found, jax.tree.map(jnp.asarray, rows), objective, correction)
            return terms.loss, (found, terms.metrics)

        (_, (found, metrics)), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(self.policy.trained)
        return found, metrics, gradient


def make_policy(window: int | None = None, lora_rank: int = 0) -> Policy:
    """A policy of two layers, its reference some way off."""
    model = small_transformer(num_layers=2, sliding_window=window, lora_rank=lora_rank)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    given: dict[str, Any] = {"tokenizer": None, "eos_token_ids": (1,), "source": "small"}
    policy = Policy(model, jax.tree.map(lambda x: x.astype(jnp.float64), variables["params"]), **given)
    policy.trained = jax.tree.map(lambda x: x.astype(jnp.float64), moved(policy.trained, 0.1))
    return policy


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo, k3, entropy": ({"loss_type": "grpo", "beta": 0.1, "kl_estimator": "k3", "entropy_coef": 0.02}, {}),
    "sequences, a correction, a window, LoRA": (
        {"loss_type": "gspo_token", "beta": 0.1},
        {"correction": True, "window": 3, "lora_rank": 2},
    ),
    "exact KL, kept ids, entropy": (
        {"loss_type": "dapo", "beta": 0.1, "kl_estimator": "exact", "entropy_coef": 0.02},
        {"supports": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_sequence_at_a_time(case: str) -> None:
    options, others = CASES[case]
    objective = make_objective(**options)
    batch = tree_batch(supports=others.get("supports", False))
    policy = make_policy(others.get("window"), others.get("lora_rank", 0))
    correction = Correction("token_truncate", 1.2) if others.get("correction") else None
    learner = Learner(policy, learning_rate=1e-2, tokens_per_micro_batch=24)
    rows = np.arange(len(batch.episodes))
    given: dict[str, Any] = {}
    if objective.beta > 0 and objective.vocabulary_kl is None:
        given["reference"] = learner.scores(batch, rows, temperature=TEMPERATURE, reference=True)[0]
    result = learner.forward_backward(
        batch, rows, objective, temperature=TEMPERATURE, max_completion_length=12, correction=correction, **given
    )
    found, metrics, gradient = Plain(policy, batch).step(objective, given, correction)
    np.testing.assert_array_equal(result.scored, batch.sampled)
    np.testing.assert_allclose(result.logp, found.logp, rtol=1e-6)
    np.testing.assert_allclose(result.entropy, found.entropy, rtol=1e-6)
    if found.kl is not None:
        np.testing.assert_allclose(result.kl, found.kl, rtol=1e-5, atol=1e-9)
    for name, value in metrics.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(learner._gradient), jax.tree.leaves(gradient), strict=True
    ):
        assert np.abs(theirs).max() > 1e-8, path
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-12, err_msg=str(path))
    assert result.tokens is not None
    assert result.tokens.raw == sum(int(np.flatnonzero(one.sampled)[-1]) for one in batch.episodes)
    heads = {
        tuple(one.token_ids[:end]) for one in batch.episodes for end in range(1, 1 + np.flatnonzero(one.sampled)[-1])
    }
    assert result.tokens.unique == len(heads) <= result.tokens.computed < result.tokens.raw


@pytest.mark.parametrize("window", [None, 4])
def test_a_token_sees_what_its_own_row_has_before_it(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERIES", 5)
    rng = np.random.default_rng(3)
    packs = pack_episodes(grown(rng, 30), None, 40)[:3]
    arrays = fill(packs, Shape(4, 44)).arrays
    q, k, v = (rng.normal(size=(4, 44, heads, 6)) for heads in (4, 2, 2))
    mixed = jax.jit(lambda *x: packed(arrays["leave"], arrays["positions"], window)(*x))(q, k, v)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(mixed[3], np.repeat(v[3], 2, axis=1))  # padding sees itself
    paths = []
    for number, pack in enumerate(packs):
        own = [pack.path(int(pack.score_at[pack.pair[pack.row == row]].max())) for row in range(len(pack.rows))]
        assert {int(index) for path in own for index in path} == set(range(pack.num_tokens))
        paths += [(number, path) for path in own]
    at = [(np.full(16, number), np.resize(path, 16)) for number, path in paths]  # what lies behind is seen by none
    alone = jax.jit(causal(jnp.arange(16)[None], window))(*(np.stack([x[one] for one in at]) for x in (q, k, v)))
    for (number, path), one in zip(paths, alone, strict=True):
        np.testing.assert_allclose(mixed[number, path], one[: len(path)], rtol=1e-12, atol=1e-12)


def test_a_pack_with_too_many_targets_is_taken_apart() -> None:
    """One token at one place is one target, unless it was drawn from other ids each time."""
    ids, sampled = np.arange(2, 12), np.arange(10) > 1
    kept = [[np.union1d(ids[2 + t], [n % VOCAB, n // VOCAB]) for t in range(8)] for n in range(24)]
    supports = [Support(np.concatenate(each), np.cumsum([0, *map(len, each)])) for each in kept]
    plain = Episode(ids, sampled, np.zeros(10, np.float32), "", "stop", 1)
    shape = Shape(2, 16)  # room for 16 + 32 targets
    (one,) = pack_rows([plain] * 24, range(24), [shape])
    assert one.arrays["counts"].tolist() == [8, 0]
    parts = pack_rows([replace(plain, support=support) for support in supports], range(24), [shape])
    packs = [pack for part in parts for pack in part.packs]
    assert len(packs) == 4  # halves of halves: 6 rows with 8 targets each, a few of them the same
    assert sorted(row for pack in packs for row in pack.rows) == list(range(24))
    assert all(24 < len(pack.targets) <= 48 for pack in packs)
    for part in parts:
        bits = np.unpackbits(part.support_bits([replace(plain, support=s) for s in supports], VOCAB), axis=2)
        for number, pack in enumerate(part.packs):
            for s in range(pack.num_targets):
                row, column = pack.rows[pack.row[s]], pack.column[s]
                found = np.flatnonzero(bits[number, pack.pair[s], :VOCAB])
                assert found.tolist() == kept[row][column].tolist()


def test_kept_ids_that_a_row_did_not_record_are_all() -> None:
    ids, sampled = np.array([5, 6, 7]), np.array([False, True, True])
    plain = Episode(ids, sampled, np.zeros(3, np.float32), "", "stop", 1)
    cut = replace(plain, support=Support(np.array([6, 7]), np.array([0, 1, 2])))
    episodes = [cut, plain, cut]
    (part,) = pack_rows(episodes, range(3), [Shape(1, 8)])
    assert part.arrays["targets"][0, :4].tolist() == [6, 6, 7, 7]
    assert part.arrays["place"][0, :3, :2].tolist() == [[1, 3], [0, 2], [1, 3]]
    bits = np.unpackbits(part.support_bits(episodes, VOCAB), axis=2)[0, :4, :VOCAB]
    assert bits.sum(axis=1).tolist() == [13, 1, 13, 1]

"""Sampling inside compiled code: its distribution, what it records, where it ends."""

import itertools
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import END, PROMPTS, VOCAB, Bigram, even_share, make_trainer, small_transformer, table_logp
from scipy import stats

from covey.errors import ConfigError, RewardError
from covey.jax.sampling import invert, kept
from covey.jax.scoring import score

KEPT = [({"top_k": 2}, [1, 1, 0, 0]), ({"top_p": 0.6}, [1, 1, 0, 0]), ({"top_p": 0.49}, [1, 0, 0, 0]), ({}, None)]
KEPT += [({"top_k": 3, "top_p": 0.83}, [1, 1, 0, 0]), ({"min_p": 0.25}, [1, 1, 1, 0])]
KEPT += [({"top_k": 3, "top_p": 0.85}, [1, 1, 1, 0])]  # of 0.5, 0.3, 0.15 renormalised: 0.53 + 0.32 = 0.84


class WithoutCache(nn.Module):
    """A transformer that shows `apply(params, tokens)` only."""

    inner: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.inner(tokens)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tokens_are_drawn_from_the_policy(temperature: float) -> None:
    """Chi-square of 4,000 first and second tokens against the table, at a fixed seed."""
    two = {"num_samples_per_prompt": 4000, "max_completion_length": 2, "eos_token_ids": ()}
    trainer, state = make_trainer(temperature=temperature, **two)
    record = trainer.rollout(state.params, {"prompts": [[3]]}, jax.random.key(11))
    table = np.asarray(state.params["params"]["table"], np.float64) / temperature
    probabilities = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    first, second = np.asarray(record["responses"]).T
    assert stats.chisquare(np.bincount(first, minlength=VOCAB), 4000 * probabilities[3]).pvalue > 0.01
    assert stats.chisquare(np.bincount(second, minlength=VOCAB), 4000 * probabilities[3] @ probabilities).pvalue > 0.01


def test_a_cache_changes_nothing() -> None:
    """Token by token with a cache, and whole rows without one: the same responses and log-probabilities."""
    model = small_transformer()
    trainer, state = make_trainer(model, temperature=0.9)
    plain, _ = make_trainer(WithoutCache(model), temperature=0.9)
    wrapped = {"params": {"inner": state.params["params"]}}
    batch = {"prompts": PROMPTS, "key": jax.random.key(8)}
    one, other = trainer.rollout(state.params, batch), plain.rollout(wrapped, batch)
    np.testing.assert_array_equal(one["responses"], other["responses"])
    np.testing.assert_allclose(one["old_logprobs"], other["old_logprobs"], atol=1e-5)
    again = score(model, state.params, one["tokens"], one["lengths"], one["responses"], trainer.grpo_config)
    np.testing.assert_allclose(one["old_logprobs"], jnp.where(one["mask"], again.logp, 0), atol=1e-5)


def test_a_response_ends_with_its_end_token_and_keeps_log_probabilities_of_a_plain_forward() -> None:
    trainer, state = make_trainer(num_samples_per_prompt=32, pad_token_id=0, temperature=0.8)
    record = jax.tree.map(np.asarray, {**trainer.rollout(state.params, {"prompts": PROMPTS}), "constants": {}})
    expected = table_logp(state.params["params"]["table"] / 0.8, record)
    np.testing.assert_allclose(record["old_logprobs"], expected, atol=1e-5)
    assert 0 < record["finished"].mean() < 1
    for row, length in enumerate(record["mask"].sum(-1)):
        response, prompt = record["responses"][row], PROMPTS[row // 32]
        assert record["mask"][row, :length].all()
        assert np.flatnonzero(response[:length] == END).tolist() == ([length - 1] if record["finished"][row] else [])
        assert record["finished"][row] or length == 5
        assert (response[length:] == 0).all()
        assert (record["old_logprobs"][row, length:] == 0).all()
        joined = [*prompt, *response[:length]]
        assert (record["tokens"][row, : len(joined)].tolist(), record["lengths"][row]) == (joined, len(prompt))


def test_the_loop_ends_when_all_responses_have_and_a_row_does_not_depend_on_the_rows_after_it() -> None:
    trainer, _ = make_trainer(max_completion_length=50)
    table = jnp.zeros((VOCAB, VOCAB)).at[:, END].set(30.0)  # always the end token
    assert int(trainer.rollout({"params": {"table": table}}, {"prompts": PROMPTS})["steps"]) == 0
    table = jnp.zeros((VOCAB, VOCAB)).at[:, 4].set(30.0).at[4].set(0.0).at[4, END].set(30.0)  # 4, then the end
    record = trainer.rollout({"params": {"table": table}}, {"prompts": [[2], [3]]})
    assert (int(record["steps"]), np.asarray(record["responses"])[:, :3].tolist()) == (1, [[4, END, 0]] * 8)
    trainer, state = make_trainer()
    alone = trainer.rollout(state.params, {"prompts": PROMPTS[:1]})
    together = trainer.rollout(state.params, {"prompts": PROMPTS})
    np.testing.assert_array_equal(alone["responses"], together["responses"][:4])
    other = trainer.rollout(state.params, {"prompts": PROMPTS}, jax.random.key(99))
    assert (np.asarray(other["responses"]) != np.asarray(together["responses"])).any()


@pytest.mark.parametrize(("settings", "expected"), KEPT)
def test_what_top_k_top_p_and_min_p_keep(settings: dict[str, Any], expected: list[int] | None) -> None:
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    support = kept(jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]])), **cuts)
    assert (None if support is None else support[0].astype(int).tolist()) == expected


def test_a_token_of_mass_zero_is_never_drawn() -> None:
    """Sparse masses over several blocks, at numbers on and beside every edge of the distribution."""
    rng = np.random.default_rng(0)
    mass = np.where(rng.random((64, 1000)) < 0.01, rng.random((64, 1000)), 0).astype(np.float32)
    mass[:, 700] += 1e-3
    edges = np.cumsum(mass, axis=1) / mass.sum(axis=1, keepdims=True)
    for place, shift in itertools.product(range(0, 1000, 37), (-1e-7, 0.0, 1e-7)):
        u = np.clip(edges[:, place] + shift, 0, 1 - 2.0**-24).astype(np.float32)
        assert (mass[np.arange(64), np.asarray(invert(mass, u))] > 0).all()
    u = rng.random(64).astype(np.float32)
    assert (np.asarray(invert(mass, u)) == (edges <= u[:, None]).sum(axis=1)).mean() > 0.95


def test_kept_support_renormalises_sampler_and_trainer_alike() -> None:
    trainer, state = make_trainer(top_k=3, keep_sampling_mask=True, num_samples_per_prompt=16)
    record = trainer.rollout(state.params, {"prompts": PROMPTS})
    table = np.asarray(state.params["params"]["table"])
    limited = np.where(table >= np.sort(table)[:, -3:-2], table, -1e9)
    np.testing.assert_allclose(record["old_logprobs"], table_logp(limited, record), atol=1e-5)
    parts = {name: record[name] for name in ("tokens", "lengths", "responses", "support")}
    found = score(Bigram(), state.params, config=trainer.grpo_config, **parts)
    np.testing.assert_allclose(jnp.where(record["mask"], found.logp, 0), record["old_logprobs"], atol=1e-6)
    assert float(found.entropy.max()) <= np.log(3) + 1e-5 or not record["mask"].all()
    loss, metrics = jax.jit(trainer.loss_and_metrics)(state.params, record)
    gradient = jax.jit(jax.grad(trainer.compute_loss))(state.params, record)
    assert np.isfinite(float(loss))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient))
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)


def test_rewards_see_ids_with_their_end_and_text_without_on_which_validity_is_judged() -> None:
    seen: dict[str, Any] = {}

    def reward(completions: list[str], answer: list[str], prompts: list[str], **rest: Any) -> list[float]:
        seen.update(completions=completions, answer=answer, prompts=prompts, rest=sorted(rest))
        return [float(len(text)) for text in completions]

    batch = {"prompts": PROMPTS, "columns": {"answer": ["x", "y", "z"], "level": [1, 2, 3]}}
    trainer, state = make_trainer(reward=reward, decode=lambda ids: "".join("abcdefg"[i] for i in ids))
    record = trainer.rollout(state.params, batch)
    assert seen["prompts"] == ["cd"] * 4 + ["e"] * 4 + ["fgc"] * 4
    assert (seen["answer"], seen["rest"]) == (["x"] * 4 + ["y"] * 4 + ["z"] * 4, ["completion_ids", "level"])
    spoken = np.asarray(record["mask"]).sum(-1) - np.asarray(record["finished"])
    assert [len(text) for text in seen["completions"]] == spoken.tolist()
    np.testing.assert_array_equal(record["rewards"], spoken)
    plain = make_trainer(reward=even_share)[0].rollout(state.params, batch)
    rows = [row[m].tolist() for row, m in zip(np.asarray(plain["responses"]), np.asarray(plain["mask"]), strict=True)]
    np.testing.assert_allclose(plain["rewards"], even_share(rows), rtol=1e-6)
    spelled = {"decode": lambda ids: " ".join("ABCdefg"[i] for i in ids), "validity_min_length": 3}
    trainer, state = make_trainer(reward=lambda responses: [1.0 * len(text) for text in responses], **spelled)
    record = trainer.rollout(state.params, {"prompts": PROMPTS})
    lengths, valid = np.asarray(record["rewards"]), np.asarray(record["valid"])
    assert 0 < valid.sum() < 12
    assert (lengths[valid] >= 3).all()
    _, metrics = jax.jit(trainer.loss_and_metrics)(state.params, record)
    assert float(metrics["mask_ratio"]) == pytest.approx(valid.mean())  # completions that are left


def test_a_reward_that_takes_texts_needs_decode() -> None:
    class Called:
        def __call__(self, completions: Any, answer: Any) -> list[float]: ...

    def by_hint(responses: list[str]) -> list[float]: ...

    for reward in (lambda completions, **columns: [], by_hint, SimpleNamespace(batch_verify=len), Called()):
        with pytest.raises(ConfigError, match=r"reward_fn='\S+': it takes texts.*decode=tokenizer.decode"):
            make_trainer(reward=reward)
        make_trainer(reward=reward, decode=str)
    make_trainer(reward=lambda completions, completion_ids: [])
    make_trainer(reward=len)  # built in: it says nothing


@pytest.mark.parametrize(
    "looks",
    [lambda row: "7" in row, lambda row: row.count("7"), lambda row: row[0] == "7", lambda row: row.strip() == "7"],
)
def test_an_id_is_not_compared_with_text_in_silence(looks: Any) -> None:
    trainer, state = make_trainer(reward=lambda responses: [float(looks(row)) for row in responses])
    with pytest.raises(RewardError, match=r"responses are lists of token ids here: pass decode= for texts"):
        trainer.rollout(state.params, {"prompts": PROMPTS})

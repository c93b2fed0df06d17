"""The engine in JAX samples what the PyTorch engine samples: same weights, same streams, same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from jax_cases import like_pytorch
from learner_cases import make_learner
from tiny_models import tiny_tokenizer

from covey.errors import GenerationError, ModelError
from covey.jax.drawing import invert
from covey.jax.engine import Engine
from covey.pytorch.engine import Engine as TorchEngine
from covey.rollout.learning import Weights
from covey.types import Completion, Request, SamplingSettings

SETTINGS = SamplingSettings(temperature=0.9, max_tokens=12, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def engines() -> tuple[TorchEngine, Engine]:
    policy = make_learner().policy
    ours = like_pytorch(policy)
    return TorchEngine(policy.model, policy.tokenizer), Engine(ours.model, policy.tokenizer, context_length=64)


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(4, 97, size=int(rng.integers(2, 11))) for _ in range(max(1, count // 3))]
    return [Request(prompts[i % len(prompts)], (7, i)) for i in range(count)]


def same(ours: list[Completion], theirs: list[Completion]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=2e-5)
        assert mine.finish_reason == other.finish_reason
        assert (mine.support is None) == (other.support is None)
        if mine.support is not None and other.support is not None:
            np.testing.assert_array_equal(mine.support.ids, other.support.ids)
            np.testing.assert_array_equal(mine.support.offsets, other.support.offsets)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.0},
        {"min_p": 0.02},
        {"min_p": 0.05, "keep_support": True},
        {"stop_strings": ("e", "w1")},
    ],
    ids=["plain", "greedy", "min_p", "support", "stop"],
)
def test_the_same_tokens_as_pytorch(engines: tuple[TorchEngine, Engine], change: dict[str, Any]) -> None:
    theirs, ours = engines
    asked, settings = requests(11), replace(SETTINGS, **change)
    same(ours(asked, settings, policy_version=0), theirs(asked, settings, policy_version=0))


@pytest.mark.parametrize("change", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05}])
def test_the_same_tokens_are_kept(engines: tuple[TorchEngine, Engine], change: dict[str, Any]) -> None:
    """The first tokens of equal prompts have equal supports; which one is drawn goes by another order here."""
    theirs, ours = engines
    settings = replace(SETTINGS, keep_support=True, **change)
    asked = requests(11)
    for mine, other in zip(
        ours(asked, settings, policy_version=0), theirs(asked, settings, policy_version=0), strict=True
    ):
        assert mine.support is not None
        assert other.support is not None
        first = mine.support.ids[: mine.support.offsets[1]]
        np.testing.assert_array_equal(first, other.support.ids[: other.support.offsets[1]])
        for t, token in enumerate(mine.token_ids):
            assert token in mine.support.ids[mine.support.offsets[t] : mine.support.offsets[t + 1]]
        if mine.token_ids[0] == other.token_ids[0]:
            assert mine.logprobs[0] == pytest.approx(other.logprobs[0], abs=2e-5)


def test_a_token_of_mass_zero_is_never_drawn() -> None:
    """Sparse masses over several blocks, at numbers on and beside every edge of the distribution."""
    rng = np.random.default_rng(0)
    mass = np.where(rng.random((64, 1000)) < 0.01, rng.random((64, 1000)), 0).astype(np.float32)
    mass[:, 700] += 1e-3
    edges = np.cumsum(mass, axis=1) / mass.sum(axis=1, keepdims=True)
    for place in range(0, 1000, 37):
        for shift in (-1e-7, 0.0, 1e-7):
            u = np.clip(edges[:, place] + shift, 0, 1 - 2.0**-24).astype(np.float32)
            tokens = np.asarray(invert(mass, u))
            assert (mass[np.arange(64), tokens] > 0).all()
    u = rng.random(64).astype(np.float32)
    expected = (edges <= u[:, None]).sum(axis=1)
    assert (np.asarray(invert(mass, u)) == expected).mean() > 0.95


def test_a_completion_does_not_depend_on_its_company(engines: tuple[TorchEngine, Engine]) -> None:
    _, ours = engines
    asked = requests(20, seed=1)
    together = ours(asked, SETTINGS, policy_version=0)
    narrow = Engine.__new__(Engine)
    narrow.__dict__.update(ours.__dict__, max_batch_size=3)
    same(narrow(asked, SETTINGS, policy_version=0), together)  # the others wait for a slot
    same(ours(asked[4:5], SETTINGS, policy_version=0), together[4:5])
    assert {c.finish_reason for c in together} == {"stop", "length"}


def test_shrinking_to_those_that_go_on(engines: tuple[TorchEngine, Engine]) -> None:
    """Rows of very different lengths: most end early by many end tokens, the last ones alone."""
    theirs, ours = engines
    asked = requests(30, seed=3)
    settings = replace(SETTINGS, max_tokens=40, eos_token_ids=tuple(range(2, 12)))
    found = ours(asked, settings, policy_version=0)
    same(found, theirs(asked, settings, policy_version=0))
    lengths = [len(c.token_ids) for c in found]
    assert min(lengths) < 5 < max(lengths)


def test_long_prompts_run_in_chunks() -> None:
    """Prompts of up to three chunks, and of exactly one, beside short ones."""
    policy = make_learner().policy
    theirs, ours = TorchEngine(policy.model, policy.tokenizer), Engine(like_pytorch(policy).model)
    rng = np.random.default_rng(5)
    asked = [Request(rng.integers(4, 97, size=length), (3, i)) for i, length in enumerate((150, 64, 3, 65, 128, 7))]
    same(ours(asked, SETTINGS, policy_version=0), theirs(asked, SETTINGS, policy_version=0))
    ours.expect(300)  # more than three chunks, of which some hold nothing
    same(ours(asked, SETTINGS, policy_version=0), theirs(asked, SETTINGS, policy_version=0))


def test_choices_are_the_only_way(engines: tuple[TorchEngine, Engine]) -> None:
    theirs, ours = engines
    choices = ((10, 11, 12, 2), (10, 11, 13, 2), (20, 2), (21, 22, 2))
    asked = [replace(request, choices=choices) for request in requests(9, seed=3)]
    found = ours(asked, SETTINGS, policy_version=0)
    same(found, theirs(asked, SETTINGS, policy_version=0))
    assert {tuple(c.token_ids.tolist()) for c in found} <= set(choices)


def test_conversations(engines: tuple[TorchEngine, Engine]) -> None:
    """Three turns, continued in another order than begun, with and without choices."""
    said = [np.arange(30, 65), np.array([33])]
    results = []
    for engine in engines:
        options: dict[str, Any] = {"rows": 4, "own_tokens": 85, "prompt_lengths": [10] * 4}
        session = engine.session(replace(SETTINGS, max_tokens=6), policy_version=0, **options)
        rows = [session.start(request, keep=True) for request in requests(4, seed=4)]
        turns: list[list[Completion]] = [[] for _ in rows]
        while session.busy:
            for row in reversed(session.advance()):
                number = rows.index(row)
                turns[number].append(session.completion(row))
                played = len(turns[number])
                if played > 2:
                    session.drop(row)
                    continue
                ids = said[played - 1]
                assert session.room_for_turn(row, len(ids)) > 0
                choices = ((40, 41, 2), (42, 2)) if played == 2 else None
                session.extend(row, ids, (number, played), choices)
        results.append(turns)
    for theirs, ours in zip(*results, strict=True):
        same(ours, theirs)


def test_errors_name_what_is_wrong(engines: tuple[TorchEngine, Engine]) -> None:
    _, ours = engines
    with pytest.raises(GenerationError, match="holds version 0"):
        ours(requests(1), SETTINGS, policy_version=3)
    with pytest.raises(GenerationError, match="no tokens"):
        ours([Request(np.zeros(0, np.int64))], SETTINGS, policy_version=0)
    with pytest.raises(GenerationError, match="context 64"):
        ours([Request(np.arange(4, 70))], SETTINGS, policy_version=0)
    weights = like_pytorch(make_learner().policy).model
    small = Engine(weights, tiny_tokenizer(), kv_cache_bytes=1000)
    with pytest.raises(GenerationError, match=r"raise sampling\.kv_cache_gb"):
        small(requests(1), SETTINGS, policy_version=0)
    with pytest.raises(GenerationError, match="no tokenizer"):
        Engine(weights)(requests(1), replace(SETTINGS, stop_strings=("x",)), policy_version=0)
    small.release()
    with pytest.raises(GenerationError, match="no weights"):
        small(requests(1), SETTINGS, policy_version=0)


def test_weights_that_have_diverged_are_told_of() -> None:
    policy = like_pytorch(make_learner().policy)
    broken = policy.variables["params"] | {"embedding": policy.variables["params"]["embedding"] * float("nan")}
    engine = Engine(policy.model._replace(variables={"params": broken}))
    with pytest.raises(GenerationError, match="not finite"):
        engine(requests(2), SETTINGS, policy_version=0)


def test_weights_of_the_other_backend(engines: tuple[TorchEngine, Engine]) -> None:
    """Whole weights by name, with the adapter merged, go from each backend's policy to the other's engine."""
    policy = make_learner().policy
    mine = like_pytorch(policy)
    given, made = policy.weights(5), mine.weights(5)
    arrays = {name: tensor.numpy() for name, tensor in given.tensors().items()}
    for name, array in made.tensors().items():
        np.testing.assert_allclose(array, arrays[name], atol=1e-6)
    assert made.adapter is not None
    assert given.sha256 == made.adapter.sha256 == made.sha256
    ours, theirs = Engine(mine.model), TorchEngine(policy.model)
    ours.publish(Weights(5, lambda: arrays))
    theirs.publish(Weights(5, lambda: {name: torch.from_numpy(array.copy()) for name, array in made.tensors().items()}))
    same(ours(requests(5), SETTINGS, policy_version=5), theirs(requests(5), SETTINGS, policy_version=5))
    with pytest.raises(ModelError, match=r"version 6 of the weights: its weights: .* lacks model\.norm\.weight"):
        ours.publish(Weights(6, lambda: {n: array for n, array in arrays.items() if n != "model.norm.weight"}))
    with pytest.raises(GenerationError, match="no weights"):
        ours(requests(1), SETTINGS, policy_version=6)


def test_a_run_with_varying_lengths_compiles_nothing_new(engines: tuple[TorchEngine, Engine]) -> None:
    _, ours = engines
    for seed in range(8):
        ours(requests(12, seed=seed), SETTINGS, policy_version=0)
    before = ours.compilations
    for seed in range(8, 14):
        ours(requests(12, seed=seed), SETTINGS, policy_version=0)
    assert ours.compilations == before

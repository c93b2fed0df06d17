"""Buffers are given to the program that replaces them: caches, gradients, weights and moments exist once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import PROMPTS, like_pytorch, make_trainer, small_transformer
from learner_cases import make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey import GRPOConfig
from covey.algorithms import make_objective
from covey.jax.backend import BACKEND
from covey.jax.engine import Engine
from covey.jax.learner import Learner
from covey.types import Request, SamplingSettings

PLACES = {"prefill": (1, 2), "begin": (0,), "extend": (1,), "decode": (1,)}
"""Which arguments of the engine's programs are given up."""


def leaves(*trees: Any) -> list[Any]:
    return jax.tree.leaves(trees)


def gone(arrays: list[Any]) -> bool:
    return all(array.is_deleted() for array in arrays)


def shares_all(compiled: Any, given: list[Any]) -> bool:
    """Whether every byte that was given up is a byte of what comes back."""
    return int(compiled.memory_analysis().alias_size_in_bytes) == sum(array.nbytes for array in given)


def test_the_cache_is_written_in_place() -> None:
    policy = like_pytorch(make_learner().policy)
    engine = Engine(policy.model, policy.tokenizer)
    programs: Any = engine._programs
    found: dict[str, list[bool]] = {name: [] for name in PLACES}

    def watched(name: str, program: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            given = leaves(*(arguments[at] for at in PLACES[name]))
            compiled = program.lower(*arguments, **settings).compile()
            done = program(*arguments, **settings)
            found[name] += [gone(given), shares_all(compiled, given)]
            return done

        return call

    for name in PLACES:
        setattr(programs, name, watched(name, getattr(programs, name)))
    settings = SamplingSettings(max_tokens=6, eos_token_ids=(2,))
    session = engine.session(settings, policy_version=0, rows=2, own_tokens=30, prompt_lengths=[3, 3])
    rows = [session.start(Request(np.array([5, 6, 7 + n]), (n,)), keep=True) for n in range(2)]
    session.run(rows)
    for n, row in enumerate(rows):
        session.extend(row, np.array([8, 9]), (n, 1))
    session.run(rows)
    assert all(found.values())
    assert {name: set(told) for name, told in found.items()} == {name: {True} for name in PLACES}


def test_decoding_needs_no_second_cache() -> None:
    """Whatever the loop holds beside the cache that it was given is smaller by far."""
    engine = Engine(like_pytorch(make_learner().policy).model)
    programs: Any = engine._programs
    program, found = programs.decode, []

    def watched(*arguments: Any, **settings: Any) -> Any:
        compiled = program.lower(*arguments, **settings).compile()
        cache = sum(array.nbytes for array in leaves(arguments[1]))
        found.append(compiled.memory_analysis().temp_size_in_bytes / cache)
        return program(*arguments, **settings)

    programs.decode = watched
    engine.expect(600)
    requests = [Request(np.array([5, 6, 7]), (n,)) for n in range(8)]
    engine(requests, SamplingSettings(max_tokens=40, eos_token_ids=(2,)), policy_version=0)
    assert max(found) < 0.5


def test_a_step_takes_the_memory_of_the_one_before() -> None:
    policy = like_pytorch(make_learner().policy)
    learner: Any = Learner(policy, learning_rate=1e-2)
    totals: list[Any] = []
    zeros = learner._zeros

    def watched(trained: Any) -> Any:
        totals.append(zeros(trained))
        return totals[-1]

    learner._zeros = watched
    learner.forward_backward(
        make_batch(), np.arange(12), make_objective("dapo"), temperature=1.0, max_completion_length=12
    )
    assert gone(leaves(totals))
    program = next(iter(learner._grad._programs.values()))
    assert shares_all(program, leaves(learner._gradient))
    before, kept = leaves(policy.trained, learner._state), leaves(policy.frozen, policy.reference.snapshot)
    compiled = learner._step.lower(policy.trained, learner._state, learner._gradient, jnp.float32(1e-2)).compile()
    assert shares_all(compiled, before)
    learner.optim_step(1e-2)
    assert gone(before)
    assert not any(array.is_deleted() for array in kept)


def test_what_the_caller_holds_is_not_taken() -> None:
    """All weights are trained in place: neither the model that was passed nor the reference is."""
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = GRPOConfig(backend="jax", use_peft=False, beta=0.1)
    policy = BACKEND.make_policy(config, model, tiny_tokenizer())
    engine, learner = BACKEND.make_sampler(config, policy), BACKEND.make_learner(config, policy)
    settings = SamplingSettings(max_tokens=4, eos_token_ids=(2,))
    requests = [Request(np.array([5, 6, 7]), (n,)) for n in range(3)]
    reference = [np.array(leaf) for leaf in leaves(policy.reference.snapshot)]
    for version in range(2):
        engine(requests, settings, policy_version=version)
        learner.forward_backward(
            make_batch(), np.arange(12), make_objective("dapo"), temperature=1.0, max_completion_length=12
        )
        learner.optim_step(1e-2)
        engine.publish(policy.weights(version + 1))
    assert all(np.array_equal(a, b) for a, b in zip(leaves(policy.reference.snapshot), reference, strict=True))
    for name, tensor in model.state_dict().items():
        assert tensor.equal(before[name]), name


def test_merging_copies_no_embedding() -> None:
    """What no adapter changes, and no layer has to be cut out for, is shared with the policy."""
    policy = like_pytorch(make_learner().policy)
    engine = Engine(policy.model)
    mine, theirs = engine._params["embedding"], policy.frozen["params"]["embedding"]
    assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


def test_weights_stay_on_the_host_until_they_are_placed() -> None:
    from covey.jax.loading import config_from_hf, params_from_tensors
    from covey.jax.stacked import stack

    model = tiny_model("llama")
    shape = config_from_hf(model.config.to_dict(), "tiny")
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for dtype in ("float32", "bfloat16"):
        stacked = stack(params_from_tensors(shape, tensors, dtype=dtype, source="tiny"), shape.num_layers)
        assert {type(leaf) for leaf in leaves(stacked)} == {np.ndarray}
        assert {str(leaf.dtype) for leaf in leaves(stacked)} == {dtype}


def test_the_library_s_loop_keeps_one_state() -> None:
    """`train` steps in place on a copy; `train_step` leaves what it is given alone, and both give the same numbers."""
    trainer, state = make_trainer(small_transformer(lora_rank=2), kl_coeff=0.1)
    held: list[Any] = []
    program = trainer._compiled_step

    def watched(state: Any, ready: Any) -> Any:
        held.append(leaves(state.params, state.opt_state))
        return program(state, ready)

    trainer._compiled_step = watched  # type: ignore[assignment]
    batch = {"prompts": PROMPTS}
    after = trainer.train(state, [batch, batch])
    assert len(held) == 2
    assert all(map(gone, held))
    stepped = state
    for _ in range(2):
        stepped, _ = trainer.train_step(stepped, batch)
    for mine, other in zip(leaves(after.params), leaves(stepped.params), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("passes", [2])
def test_several_passes_over_one_record(passes: int) -> None:
    trainer, state = make_trainer(num_iterations=passes)
    after = trainer.train(state, [{"prompts": PROMPTS}])
    assert int(after.step) == passes
    assert not any(array.is_deleted() for array in leaves(state))

"""The engine when memory runs out, what it gives back, and what its copy takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import groups, texts
from live_memory import LiveMemory
from tiny_models import tiny_model

from covey.errors import GenerationError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.footprint import Shape
from covey.pytorch.models.lora import attach_lora
from covey.types import SamplingSettings

SAMPLED = SamplingSettings(temperature=1.0, max_tokens=12)


def fails_beyond(engine: Engine, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let passes that decode more rows at once run out of memory; returns the sizes of all that were tried."""
    forward, tried = engine._runner.forward, []

    def limited(step: Any) -> Any:
        if step.last is None:
            tried.append(len(step.token_ids))
            if len(step.token_ids) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore about it")
        return forward(step)

    monkeypatch.setattr(engine._runner, "forward", limited)
    return tried


def test_half_as_many_at_a_time_draw_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Engine(tiny_model("llama"))(groups(4), SAMPLED, policy_version=0)
    engine = Engine(tiny_model("llama"))
    tried = fails_beyond(engine, 4, monkeypatch)
    found = engine(groups(4), SAMPLED, policy_version=0)
    assert texts(found) == texts(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert tried[:2] == [12, 6]
    assert engine.max_batch_size == max(tried[2:]) == 3
    assert "at most 3 at a time" in caplog.text
    assert "more about it" not in caplog.text
    fails_beyond(engine, 0, monkeypatch)
    with pytest.raises(GenerationError, match=r"one completion at a time; .* sampling\.kv_cache_gb"):
        engine(groups(4), SAMPLED, policy_version=0)


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_model("llama"))
    calls = []

    def broken(step: Any) -> Any:
        calls.append(step)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(engine._runner, "forward", broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine(groups(1), SAMPLED, policy_version=0)
    assert len(calls) == 1


def test_keys_and_values_are_given_back_and_taken_anew() -> None:
    model = tiny_model("llama")
    engine = Engine(model)
    expected = engine(groups(2), SAMPLED, policy_version=0)
    engine.release()
    assert engine._cache.allocated_bytes > 0  # on a CPU new pages cost more than they are worth
    engine._device = torch.device("cuda")  # nothing is computed on it
    engine.release()
    assert engine._cache.allocated_bytes == 0
    engine._device = torch.device("cpu")
    engine.publish(weights_of(model, 1))
    assert texts(engine(groups(2), SAMPLED, policy_version=1)) == texts(expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_copy_shares_frozen_embeddings_and_head(tied: bool) -> None:
    model = attach_lora(tiny_model("llama", tie_word_embeddings=tied).to(torch.bfloat16), r=3)
    engine = Engine(model)
    engine.release()
    with LiveMemory() as memory:
        memory.knows(model.parameters())
        engine.publish(weights_of(model, 1))
        assert memory.live == 2 * Shape.of(model).inside

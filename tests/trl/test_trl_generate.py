"""`model.generate` in the engine's place: replaced by the user, or asked for options that the engine does not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_models import END_ID, PAD_ID
from transformers import GenerationMixin
from trl_runs import Seen, changed, made, weights

from covey.errors import GenerationError
from covey.trl import GRPOTrainer


def trainer_of(folder: Path, out: Path, reward: Any, **options: Any) -> GRPOTrainer:
    trainer: GRPOTrainer = made(folder, out, reward, **({"learning_rate": 0.05, "max_steps": 2} | options))
    return trainer


def says(*turns: list[int]) -> Callable[..., torch.Tensor]:
    """A `generate` that appends these tokens, padded, whatever it is asked."""
    width = max(map(len, turns))
    padded = torch.tensor([[*turn, *[PAD_ID] * (width - len(turn))] for turn in turns])

    def generate(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.cat([input_ids, padded], dim=1)

    return generate


@pytest.mark.parametrize("where", ["model", "transformers"])
def test_a_generate_that_was_replaced_samples(where: str, folder: Path, tmp_path: Path) -> None:
    """What follows the end of a turn is padding; a turn without an end is cut off; all of it is trained on."""
    seen = Seen()
    turns = ([5, 6, END_ID], list(range(10, 21)), [7, END_ID, 8])
    trainer = trainer_of(folder, tmp_path, seen, mask_truncated_completions=True)
    before = weights(trainer)
    target = trainer.model if where == "model" else GenerationMixin
    with patch.object(target, "generate", side_effect=says(*turns)):
        trainer.train()
    assert seen.all("completion_ids") == [[5, 6, END_ID], list(range(10, 18)), [7, END_ID]] * 2
    last = trainer.state.log_history[-1]
    assert last["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert last["sampling/sampling_logp_difference/max"] == pytest.approx(0, abs=1e-4)
    assert changed(trainer, before) == set(before)


def test_the_engine_samples_where_nothing_was_replaced(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, Seen())
    with patch.object(type(trainer.run.engine), "turns", side_effect=AssertionError):
        trainer.train()


@pytest.mark.slow
def test_options_of_generate(folder: Path, tmp_path: Path) -> None:
    """A prohibitive penalty leaves no token twice, which shows that it is applied; without one some come again."""

    def repeated(name: str, **options: Any) -> int:
        seen = Seen()
        trainer_of(folder, tmp_path / name, seen, max_steps=6, **options).train()
        return sum(len(ids) - len(set(ids)) for ids in seen.all("completion_ids"))

    assert repeated("without", top_k=5) > 0
    assert repeated("with", top_k=5, repetition_penalty=1e6) == 0
    assert repeated("kwargs", top_k=5, generation_kwargs={"no_repeat_ngram_size": 1}) == 0


def test_resuming_draws_what_the_unbroken_run_does(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"generation_kwargs": {"num_beams": 2, "length_penalty": -0.1}, "save_steps": 1}
    whole = trainer_of(folder, tmp_path, Seen(), **options)
    whole.train()
    resumed = trainer_of(folder, tmp_path, Seen(), **options)
    torch.rand(5)  # whatever else draws from torch's own stream
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert changed(resumed, weights(whole)) == set()


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (lambda input_ids, **_: input_ids, "at least one more token"),
        (lambda input_ids, **_: torch.cat([input_ids, input_ids])[:, :1], "as many rows"),
        (lambda **_: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_generate_that_does_not_work(generate: Any, message: str, folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, Seen())
    trainer.model.generate = generate
    with pytest.raises(GenerationError, match=message):
        trainer.train()


def test_formulas_by_hand() -> None:
    """As methods of TRL's trainer, with Covey's values behind them."""
    entropy = torch.tensor([[4.0, 1.0, 3.0], [2.0, 9.0, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    trainer: Any = None
    above = {0.0: [[1, 1, 1], [1, 0, 1]], 0.5: [[1, 0, 1], [0, 0, 1]], 1.0: [[0, 0, 0], [0, 0, 1]]}  # the median is 3
    for threshold, expected in above.items():
        kept = GRPOTrainer.get_high_entropy_mask(trainer, entropy, mask, threshold)
        assert kept.int().tolist() == expected
    gate = GRPOTrainer.get_sapo_token_loss(torch.tensor([1.0, 2.0]), 2.0)
    assert gate.tolist() == pytest.approx([1.0, 2 / (1 + math.exp(-2))])
    kept = GRPOTrainer.get_off_policy_mask(
        torch.tensor([[-1.0], [-1.0], [1.0]]),
        torch.tensor([[-3.0, 0.0], [-1.0, 50.0], [-9.0, -9.0]]),
        torch.zeros(3, 2),
        torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
        1.2,
    )
    assert kept.tolist() == [[0.0], [1.0], [1.0]]
    phi = GRPOTrainer.get_gamma_weights(
        torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.1, 0.2], [0.1, 7.0]]), torch.tensor([[1, 1], [1, 0]]), None
    )
    w, v = math.exp(0.3), math.exp(0.1)
    assert phi[:, 0].tolist() == pytest.approx([w**2 * math.exp(3 * (1 - w)), v**3 * math.exp(2 * (1 - v))])


def test_the_references_weights_can_be_read(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, Seen(), beta=0.1)
    before = {name: p.clone() for name, p in trainer.ref_model.named_parameters()}
    assert set(before) == set(weights(trainer))
    trainer.train()
    assert all(torch.equal(old, trainer.ref_model.get_parameter(name)) for name, old in before.items())
    assert changed(trainer, before) == set(before)

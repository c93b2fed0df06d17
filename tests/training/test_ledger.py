"""The ledger against the loss written out a second time: its contributions add up, its gradients are those."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner
from training_runs import Settings, slow, steps_of, trained

from covey.config.algorithm import AlgorithmConfig
from covey.observe.completions import read_table
from covey.observe.run_folder import RunFolder
from covey.training import tables
from covey.training.tables import Ledger, token_columns
from covey.training.update import Pass, update
from covey.types import Batch
from loss_reference import Completed, reference_loss

CORRECTED = {"importance_sampling_correction": "token_truncate:2"}


def passes_of(batch: Batch, learner: Any = None, rate: float = 0.0, **settings: Any) -> tuple[list[Pass], Any, Any]:
    """Every pass of an update, with its result and its learner."""
    seen: list[Pass] = []
    learner, section = learner or make_learner(tokens_per_micro_batch=40), AlgorithmConfig(**settings)
    done = update(learner, batch, section, rate, temperature=1.0, max_completion_length=12, observe=seen.append)
    return seen, done, learner


def with_masks(batch: Batch) -> Batch:
    """Some rows are tied, one is masked."""
    rows = np.arange(12)[:, None]
    mask = batch.mask & (rows != 5)
    advantages = np.where(rows < 4, 0, batch.advantages)
    return replace(batch, advantages=advantages, mask=mask, excluded={"validity_mask": batch.mask & ~mask})


@pytest.mark.parametrize("correction", [{}, CORRECTED], ids=["", "corrected"])
@pytest.mark.parametrize("extra", [{}, {"beta": 0.3}, {"beta": 0.1, "entropy_coef": 0.05}], ids=["", "kl", "entropy"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo", "dr_grpo", "reinforce"])
def test_contributions_add_up_to_the_loss_and_gradients_are_its(
    loss_type: str, extra: dict[str, float], correction: dict[str, Any]
) -> None:
    batch = with_masks(make_batch())
    settings = {"loss_type": loss_type, "beta": 0.0, "entropy_coef": 0.0} | extra | correction
    (seen,), done, learner = passes_of(batch, **settings)
    every = np.arange(len(batch.episodes))
    _, entropy = learner.scores(batch, every, temperature=1.0, entropy=True)
    columns = token_columns(seen)
    # rows that were not run have no gradient, and the reference is told what the learner would have found there
    logp = np.where(seen.gradients.scored, seen.gradients.logp, learner.scores(batch, every, temperature=1.0)[0])
    ref = learner.scores(batch, every, temperature=1.0, reference=True)[0]
    exists, sequences = batch.sampled, []
    for row in every:
        here = (each[row, exists[row]] for each in (logp, batch.old_logprobs, ref, entropy))
        parts = [torch.tensor(each, dtype=torch.float64) for each in here]
        parts[0].requires_grad_()
        dropped = not batch.mask[row].any()
        sequences.append(Completed(*parts, float(batch.advantages[row, 0]), parts[0].detach(), dropped))
    names = {"correction": "token_truncate", "cap": 2.0} if correction else {}
    loss, _ = reference_loss(sequences, loss_type=loss_type, max_length=12, **extra, **names)
    loss.backward()
    assert columns["loss"].sum() == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-9)
    assert columns["loss"].sum() == pytest.approx(done.metrics["loss"], rel=1e-4, abs=1e-6)
    for row in seen.rows:
        wanted = sequences[row].logp.grad
        found = columns["gradient"][row, exists[row]]
        np.testing.assert_allclose(found, 0 if wanted is None else wanted.numpy(), rtol=1e-5, atol=1e-9)
    assert not columns["loss"][5].any()  # masked
    assert not columns["gradient"][5].any()


def test_a_second_pass_has_ratios_that_moved_and_counts_what_is_clipped() -> None:
    learner, batch = make_learner(), make_batch()
    own = learner.scores(batch, np.arange(12), temperature=1.0)[0]
    batch = replace(batch, old_logprobs=np.where(batch.mask, own, 0).astype(np.float32))
    settings = {"loss_type": "grpo", "beta": 0.0, "num_iterations": 2, "num_minibatches": 2}
    seen, done, _ = passes_of(batch, learner, 0.1, **settings)
    assert [each.number for each in seen] == [0, 1, 2, 3]
    assert sorted(np.concatenate([seen[0].part, seen[1].part])) == list(range(12))
    columns = [token_columns(each) for each in seen]
    assert columns[0]["ratio"][seen[0].batch.mask] == pytest.approx(1, abs=1e-5)
    clipped = [c["clipped"][p.batch.mask].mean() for c, p in zip(columns, seen, strict=True)]
    assert max(clipped) > 0.1
    assert np.mean(clipped) == pytest.approx(done.metrics["clip_ratio/region_mean"], abs=1e-6)
    _, entropy = learner.scores(seen[-1].batch, seen[-1].rows, temperature=1.0, entropy=True)
    assert columns[-1]["entropy"].shape == entropy.shape


def test_rows_name_tokens_and_reasons_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    mask = batch.mask.copy()
    mask[1, 0] = False
    batch = replace(batch, mask=mask, excluded={"top_entropy_quantile": batch.mask & ~mask})
    (seen,), _, _ = passes_of(batch, loss_type="grpo", beta=0.0)
    one = Ledger(lambda ids: f"<{ids[0]}>")
    one(seen)
    assert len(one.rows) == batch.sampled.sum()
    masked = [row for row in one.rows if row["masked_by"]]
    assert [(row["row"], row["position"], row["masked_by"]) for row in masked] == [(1, 0, "top_entropy_quantile")]
    assert masked[0]["loss"] == masked[0]["gradient"] == 0
    first = batch.episodes[0]
    assert [r["token"] for r in one.rows if r["row"] == 0] == [f"<{t}>" for t in first.token_ids[first.sampled]]
    monkeypatch.setattr(tables, "MOST_TOKENS", 10)
    few = Ledger(str)
    few(seen)
    assert 0 < len(few.rows) <= 10


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [len(set(text)) / 10 for text in completions]


def test_a_run_with_ledgers_has_the_same_numbers_and_a_resume_drops_later_ones(
    settings: Settings, tmp_path: Path
) -> None:
    settings |= {"max_steps": 4, "save_steps": 3, "beta": 0.04}
    losses = []
    for name, ledger in (("without", "off"), ("with", "off,all:2")):
        trainer = trained(settings, by_length, output_dir=str(tmp_path / name), ledger=ledger)
        losses.append([record["loss"] for record in steps_of(trainer)])
    assert losses[0] == losses[1]
    folder = tmp_path / "with" / "ledger"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002.parquet", "step_000004.parquet"]
    tokens = read_table(folder / "step_000002.parquet")
    assert sum(token["loss"] for token in tokens) == pytest.approx(losses[1][1], abs=1e-6)
    assert {"kl", "entropy", "sampler_logp", "weight", "clipped"} <= tokens[0].keys()
    with RunFolder.open(tmp_path / "with") as run:
        run.truncate_after(3)
    assert [path.name for path in folder.iterdir()] == ["step_000002.parquet"]
    assert not (tmp_path / "without" / "ledger").exists()


@pytest.mark.parametrize("estimator", ["exact", slow("exact_weighted")])
def test_a_kl_over_the_vocabulary_is_a_part_of_the_loss(estimator: str) -> None:
    batch = with_masks(make_batch())
    (seen,), done, _ = passes_of(batch, beta=0.3, kl_estimator=estimator)
    (without,), _, _ = passes_of(batch, beta=0.0)
    columns, others = token_columns(seen), token_columns(without)
    assert columns["loss"].sum() == pytest.approx(done.metrics["loss"], rel=1e-4, abs=1e-6)
    assert columns["kl"][batch.mask].mean() == pytest.approx(done.metrics["kl"], rel=1e-4)
    assert columns["kl"][batch.mask].max() > 1e-4
    own = columns["loss"] - 0.3 * columns["kl"] * columns["weight"]
    np.testing.assert_allclose(own, others["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(columns["gradient"], others["gradient"], rtol=1e-5, atol=1e-7)

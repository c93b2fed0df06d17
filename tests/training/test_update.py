"""Masks that depend on the policy belong to the whole step, whatever rows have a gradient; and its ledger."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner
from training_runs import Settings, distinct, steps_of, trained

from covey.config.algorithm import AlgorithmConfig
from covey.observe.completions import read_table
from covey.observe.run_folder import RunFolder
from covey.training import ledger as ledgers
from covey.training.ledger import Ledger, token_columns
from covey.training.schedule import TrainerState
from covey.training.update import Pass, Update, update
from covey.types import Batch
from fakes import slow
from loss_reference import Completed, reference_loss

CORRECTED = {"importance_sampling_correction": "token_truncate:2"}


def with_a_tied_group() -> Batch:
    batch = make_batch()
    return replace(batch, advantages=np.where(np.arange(12)[:, None] < 4, 0, batch.advantages))


def learn(learner: Any, batch: Batch, loss_type: str = "dapo", beta: float = 0.0, **changes: Any) -> Update:
    given = {name: changes.pop(name) for name in ("state", "on_policy") if name in changes}
    rate, section = changes.pop("rate", 1e-3), AlgorithmConfig(loss_type=loss_type, beta=beta, **changes)
    return update(learner, batch, section, rate, temperature=1.0, max_completion_length=12, **given)


def spied(learner: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[Any]]:
    """Options and results of the learner's passes."""
    run, options, results = learner.forward_backward, [], []

    def spy(*arguments: Any, **given: Any) -> Any:
        options.append(given)
        results.append(run(*arguments, **given))
        return results[-1]

    monkeypatch.setattr(learner, "forward_backward", spy)
    return options, results


def test_a_row_masked_in_the_first_pass_has_its_old_logprobs_in_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, learner = make_batch(), make_learner()
    options, _ = spied(learner, monkeypatch)
    correction = {"importance_sampling_correction": "token_truncate"}
    done = learn(learner, batch, num_iterations=2, off_policy_mask_threshold=0.0, **correction)
    assert done.metrics["mask/off_policy_mask"] > 0
    first, second = (given["trainer_old"] for given in options)
    assert np.all(second[batch.mask] < 0)
    np.testing.assert_array_equal(first, second)


def test_what_trained_nothing_says_why() -> None:
    batch, learner = make_batch(), make_learner()
    tied = replace(batch, advantages=np.zeros_like(batch.advantages))
    assert "rewards in every group are equal" in learn(learner, tied).skipped
    assert learn(learner, batch, num_iterations=2).skipped == ""
    wrong = np.where(batch.mask, -1.0, 0.0).astype(np.float32)
    stale = replace(batch, advantages=wrong, old_logprobs=np.zeros_like(batch.old_logprobs))
    done = learn(make_learner(), stale, off_policy_mask_threshold=0.1)
    assert (done.optimizer_steps, done.metrics["mask_ratio"]) == (0, 0.0)
    assert "every token is masked (off_policy_mask)" in done.skipped


def sequences_of(batch: Batch, learner: Any, run: Any = None) -> list[Completed]:
    """For the reference, which sees log-probabilities alone (of a run, its own), one sequence at a time."""
    rows = np.arange(len(batch.episodes))
    found, entropy = learner.scores(batch, rows, temperature=1.0, entropy=True)
    ref, _ = learner.scores(batch, rows, temperature=1.0, reference=True)
    if run is not None:  # rows that were not run have no gradient
        found = np.where(run.scored, run.logp, found)
    sequences = []
    for row in rows:
        here = (each[row, batch.sampled[row]] for each in (found, batch.old_logprobs, ref, entropy))
        parts = [torch.tensor(each, dtype=torch.float64) for each in here]
        parts[0].requires_grad_()
        dropped = not batch.mask[row].any()
        sequences.append(Completed(*parts, float(batch.advantages[row, 0]), parts[0].detach(), dropped))
    return sequences


def with_a_masked_row(batch: Batch) -> Batch:
    mask = batch.mask & (np.arange(12)[:, None] != 5)
    return replace(batch, mask=mask, excluded={"validity_mask": batch.mask & ~mask})


MASKS = (
    {"off_policy_mask_threshold": 0.0},
    {"top_entropy_quantile": 0.4, "importance_sampling_correction": "sequence_truncate:2.0"},
    {"off_policy_mask_threshold": 0.0, "top_entropy_quantile": 0.5, "reference_drift_threshold": 0.02},
)
CASES = [(loss_type, masks) for loss_type in ("dapo", "grpo", "gspo", "dr_grpo", "reinforce") for masks in MASKS]
CASES.append(("kl_cov", {"loss_parameters": {"kl_cov_ratio": 0.3}}))
NAMES = {"off_policy_mask_threshold": "off_policy", "top_entropy_quantile": "quantile"}
NAMES |= {"reference_drift_threshold": "drift", "importance_sampling_correction": "correction"}
"""Setting -> the reference's option."""


@pytest.mark.parametrize(("loss_type", "settings"), CASES, ids=lambda value: "".join(value))
def test_a_step_is_that_of_the_reference(loss_type: str, settings: dict[str, Any]) -> None:
    batch, learner = with_a_masked_row(with_a_tied_group()), make_learner(tokens_per_micro_batch=40)
    options = {NAMES[name]: value for name, value in settings.items() if name in NAMES}
    options |= settings.get("loss_parameters", {})
    if "correction" in options:
        options["correction"], cap = options["correction"].split(":")
        options["cap"] = float(cap)
    _, wanted = reference_loss(sequences_of(batch, learner), loss_type=loss_type, beta=0.3, max_length=12, **options)
    done = learn(learner, batch, loss_type, 0.3, **settings)
    for name in ("loss", "policy_loss", "kl", "entropy", "ratio/mean", "mask_ratio"):
        assert done.metrics[name] == pytest.approx(wanted[name.split("/")[0]], rel=2e-4, abs=1e-6), name
    np.testing.assert_array_equal(done.batch.advantages, batch.advantages)  # what is reported is not what is masked


def test_a_mask_of_the_surrogate_leaves_the_kl_and_the_denominators() -> None:
    """One bad completion is stale: at beta 0 the loss is that without its surrogate, over as many tokens as before."""
    batch = make_batch()
    advantages = np.where(batch.mask, 1.0, 0.0).astype(np.float32)
    advantages[2] *= -1
    old = np.where(batch.mask, make_learner().scores(batch, np.arange(12), temperature=1.0)[0], 0.0).astype(np.float32)
    old[2] += 0.3 * batch.mask[2]
    share = batch.mask[2].sum() / batch.mask.sum()
    stale = replace(batch, advantages=advantages, old_logprobs=old)
    done = learn(make_learner(), stale, off_policy_mask_threshold=0.2)
    assert done.metrics["loss"] == pytest.approx(-(1 - share), rel=1e-4)  # ratios are 1 elsewhere
    assert (done.metrics["mask/off_policy_mask"], done.metrics["mask_ratio"]) == (pytest.approx(share), 11 / 12)
    assert done.batch.mask[2].any()


def test_the_numbers_of_several_passes_are_their_means_and_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks too: of 12 rows pass 1 keeps all, pass 2 loses row 0, pass 3 rows 0 to 2."""
    batch, learner, lost = make_batch(), make_learner(), iter([0, 1, 3])
    _, results = spied(learner, monkeypatch)
    done = learn(learner, batch, rate=5e-2, num_iterations=3)
    each = [found.metrics for found in results]
    tokens = each[0]["active_tokens"]
    assert len({found["entropy_sum"] for found in each}) == 3
    clipped = [found["clip_high_sum"] / tokens for found in each]
    for name, wanted in (
        ("loss", np.mean([found["loss"] for found in each])),
        ("entropy", np.mean([found["entropy_sum"] / tokens for found in each])),
        ("ratio/max", max(found["ratio_max"] for found in each)),
        ("ratio/min", min(found["ratio_min"] for found in each)),
        ("clip_ratio/high_mean", np.mean(clipped)),
        ("clip_ratio/high_max", max(clipped)),
    ):
        assert done.metrics[name] == (wanted if name.endswith(("max", "min")) else pytest.approx(wanted)), name

    def mask(*arguments: Any) -> Any:
        keep = batch.mask.copy()
        keep[: next(lost)] = False
        return keep

    monkeypatch.setattr("covey.algorithms.masks.off_policy_mask", mask)
    done = learn(make_learner(), batch, num_iterations=3, off_policy_mask_threshold=1.0)
    tokens = batch.mask.sum(axis=1)
    shares = [0, tokens[0] / tokens.sum(), tokens[:3].sum() / tokens.sum()]
    assert done.metrics["mask/off_policy_mask"] == pytest.approx(sum(shares) / 3)
    assert done.metrics["mask_ratio"] == pytest.approx((12 / 12 + 11 / 12 + 9 / 12) / 3)


def test_entropy_quantile_and_mismatch_count_the_tokens_of_tied_groups() -> None:
    batch, name = with_a_tied_group(), "sampling/sampling_logp_difference/mean"
    done = learn(make_learner(), batch, top_entropy_quantile=0.5)
    assert done.metrics["mask/top_entropy_quantile"] == pytest.approx(0.5, abs=1 / int(batch.mask.sum()))
    assert done.batch.mask[:4].any()  # some of the tied group's tokens are among the most uncertain ones
    far = np.abs(make_learner().scores(batch, np.arange(12), temperature=1.0)[0] - batch.old_logprobs)
    assert done.metrics[name] == pytest.approx(far[batch.mask].mean(), rel=1e-4)
    alone = learn(make_learner(), batch)  # where not all were scored, only of those that were
    assert alone.metrics[name] == pytest.approx(far[4:][batch.mask[4:]].mean(), rel=1e-4)


@pytest.mark.parametrize("loss_type", ["kl_cov", "clip_cov"])
def test_what_is_selected_in_the_whole_step_does_not_depend_on_its_split(loss_type: str) -> None:
    parameters = {"kl_cov": {"kl_cov_ratio": 0.2}, "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01}}[loss_type]
    found = []
    for tokens in (10_000, 16):
        learner = make_learner(tokens_per_micro_batch=tokens)
        done = learn(learner, make_batch(), loss_type, loss_parameters=parameters, epsilon=0.2)
        found.append((done.metrics, learner.policy.state_dict()))
    for name in ("loss", "clip_ratio/high_mean", "entropy"):
        assert found[0][0][name] == pytest.approx(found[1][0][name], rel=1e-5), name
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)


def test_adaptive_entropy_moves_its_coefficient_after_each_optimiser_step() -> None:
    """Skywork-OR1: up while the entropy is at or below the target, else down; the bonus acts a step later."""
    batch, state = make_batch(), TrainerState()
    high, low = ({"target": target, "delta": 0.04, "max": 0.15} for target in (1e9, 0.0))

    def step(target: dict[str, float] | None, coefficient: float = 0.1, **changes: Any) -> dict[str, float]:
        changes |= {"adaptive_entropy": target, "state": state} if target else {}
        return learn(make_learner(), batch, entropy_coef=coefficient, **changes).metrics

    first = step(high)
    assert first["loss"] == pytest.approx(step(None, 0.0)["loss"], rel=1e-5)  # nothing was measured before
    assert (first["entropy_coef"], state.entropy_coef) == (pytest.approx(0.14),) * 2
    assert state.last_entropy == first["entropy"]
    assert step(high)["loss"] == pytest.approx(step(None, 0.14)["loss"], rel=1e-5)
    assert state.entropy_coef == 0.15  # at most
    third = step(low, num_iterations=2)
    assert state.entropy_coef == pytest.approx(0.15 - 2 * 0.04)  # a move for each pass
    assert third["entropy_coef"] == pytest.approx((0.11 + 0.07) / 2)


@pytest.mark.parametrize("threshold", [0.2, 0.0])
def test_masks_of_fresh_samples_need_no_forward_pass(monkeypatch: pytest.MonkeyPatch, threshold: float) -> None:
    """But where the reference is so near that rounding would decide."""
    batch, calls, found = make_batch(), [], []
    masks = {"off_policy_mask_threshold": 0.1, "reference_drift_threshold": threshold, "num_iterations": 2}
    for on_policy in (True, False):
        learner, rows = make_learner(), np.arange(len(batch.episodes))
        fresh = replace(batch, old_logprobs=learner.scores(batch, rows, temperature=1.0)[0])
        run = learner.scores

        def spy(*arguments: Any, reference: bool = False, run: Any = run, **options: Any) -> Any:
            calls.append(reference)
            return run(*arguments, reference=reference, **options)

        monkeypatch.setattr(learner, "scores", spy)
        found.append(learn(learner, fresh, on_policy=on_policy, **masks))
    # the policy in the second pass only, and then in both
    assert calls.count(False) == (3 if threshold else 4)
    first, second = found
    np.testing.assert_array_equal(first.batch.mask, second.batch.mask)
    assert first.metrics["loss"] == pytest.approx(second.metrics["loss"], abs=1e-6)
    assert first.metrics["grad_norm"] == pytest.approx(second.metrics["grad_norm"], rel=1e-4)
    assert first.metrics["sampling/sampling_logp_difference/max"] < 1e-5


def passes_of(batch: Batch, learner: Any = None, rate: float = 0.0, **settings: Any) -> tuple[list[Pass], Any, Any]:
    """Every pass of an update, with its result and its learner."""
    seen: list[Pass] = []
    learner, section = learner or make_learner(tokens_per_micro_batch=40), AlgorithmConfig(**settings)
    done = update(learner, batch, section, rate, temperature=1.0, max_completion_length=12, observe=seen.append)
    return seen, done, learner


@pytest.mark.parametrize("correction", [{}, CORRECTED], ids=["", "corrected"])
@pytest.mark.parametrize("extra", [{}, {"beta": 0.3}, {"beta": 0.1, "entropy_coef": 0.05}], ids=["", "kl", "entropy"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo", "dr_grpo", "reinforce"])
def test_contributions_add_up_to_the_loss(loss_type: str, extra: dict[str, float], correction: Any) -> None:
    batch = with_a_masked_row(with_a_tied_group())
    settings = {"loss_type": loss_type, "beta": 0.0, "entropy_coef": 0.0} | extra | correction
    (seen,), done, learner = passes_of(batch, **settings)
    columns, sequences = token_columns(seen), sequences_of(batch, learner, seen.gradients)
    names = {"correction": "token_truncate", "cap": 2.0} if correction else {}
    loss, _ = reference_loss(sequences, loss_type=loss_type, max_length=12, **extra, **names)
    loss.backward()
    assert columns["loss"].sum() == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-9)
    assert columns["loss"].sum() == pytest.approx(done.metrics["loss"], rel=1e-4, abs=1e-6)
    for row in seen.rows:
        wanted, found = sequences[row].logp.grad, columns["gradient"][row, batch.sampled[row]]
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
    monkeypatch.setattr(ledgers, "MOST_TOKENS", 10)
    few = Ledger(str)
    few(seen)
    assert 0 < len(few.rows) <= 10


def test_ledgers_change_no_number_and_a_resume_drops_later_ones(settings: Settings, tmp_path: Path) -> None:
    settings |= {"max_steps": 4, "save_steps": 3, "beta": 0.04}
    losses = []
    for name, ledger in (("without", "off"), ("with", "off,all:2")):
        trainer = trained(settings, distinct, output_dir=str(tmp_path / name), ledger=ledger)
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
    batch = with_a_masked_row(with_a_tied_group())
    (seen,), done, _ = passes_of(batch, beta=0.3, kl_estimator=estimator)
    (without,), _, _ = passes_of(batch, beta=0.0)
    columns, others = token_columns(seen), token_columns(without)
    assert columns["loss"].sum() == pytest.approx(done.metrics["loss"], rel=1e-4, abs=1e-6)
    assert columns["kl"][batch.mask].mean() == pytest.approx(done.metrics["kl"], rel=1e-4)
    assert columns["kl"][batch.mask].max() > 1e-4
    own = columns["loss"] - 0.3 * columns["kl"] * columns["weight"]
    np.testing.assert_allclose(own, others["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(columns["gradient"], others["gradient"], rtol=1e-5, atol=1e-7)

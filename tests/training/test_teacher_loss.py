"""A teacher as a term of the loss: divergences by hand and by differences, gradients of steps, other networks, runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner
from tiny_models import END_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor
from training_runs import Settings, always, build, first_letter_early, same_weights, steps_of, trained

from covey import GRPOConfig
from covey.algorithms import make_objective
from covey.algorithms.kl import Distillation
from covey.errors import ConfigError, ModelError, RunFolderError
from covey.pytorch.divergences import compare
from covey.pytorch.logprobs import Head, ReferenceDistribution, score_tokens
from covey.pytorch.reference import Reference
from covey.rollout.learning import rows_with_gradient
from covey.training.replay import replay
from covey.types import Batch, Support, Taught
from fakes import raises

P, Q = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]))
RECORDED: list[tuple[dict[str, Any], float, list[float]]] = [
    # of TRL 1.16's own functions: SDPO's, GKD's and the stable trainer's, values and gradients by the logits
    ({"beta": 1.0}, 0.092033, [-0.214253, 0.09403, 0.120223]),
    ({"beta": 0.0}, 0.085123, [-0.2, 0.1, 0.1]),
    ({"beta": 0.5}, 0.021901, [-0.050848, 0.024187, 0.026661]),
    ({"beta": 0.1}, 0.007695, [-0.018018, 0.008932, 0.009085]),
    ({"top_k": 1}, 0.087177, [-0.211824, 0.127095, 0.08473]),
    ({"top_k": 2, "tail": False}, 0.059537, [-0.173892, 0.173892, 0.0]),
    ({"top_k": 2, "beta": 0.0}, 0.085123, [-0.2, 0.1, 0.1]),
    ({"top_k": 3, "beta": 0.5}, 0.021901, [-0.050848, 0.024187, 0.026661]),  # all of them: nothing is left out
]


@pytest.mark.parametrize(("how", "value", "slope"), RECORDED, ids=str)
def test_recorded_numbers(how: dict[str, Any], value: float, slope: list[float]) -> None:
    found, by_logits, mass = compare(P, Q, Distillation(**how))
    assert found.item() == pytest.approx(value, abs=1e-6)
    np.testing.assert_allclose(by_logits[0].numpy(), slope, atol=1e-6)
    assert mass.item() == pytest.approx({1: 0.7, 2: 0.9}.get(how.get("top_k", 0), 1.0))
    same, flat, _ = compare(P, P, Distillation(**how))
    assert abs(same.item()) < 1e-12
    assert flat.abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["hidden", "head", "module", "kept", "narrower"])
@pytest.mark.parametrize("over", [{}, {"top_k": 3}, {"top_k": 3, "tail": False}], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradients_are_those_of_differences(beta: float, over: dict[str, Any], kind: str) -> None:
    torch.manual_seed(0)
    hidden, theirs = (torch.randn(4, d, dtype=torch.float64) for d in (3, 5))
    weight, other = (torch.randn(v, d, dtype=torch.float64) for v, d in ((8, 3), (7 if kind == "narrower" else 8, 5)))
    targets = torch.tensor([1, 0, 5, 1])
    support = Support(np.tile(np.array([0, 1, 2, 4, 5]), 4), np.arange(5) * 5) if kind == "kept" else None
    teacher = ReferenceDistribution(theirs, Head(other, None, 1.0, 3.0).logits, how=Distillation(beta=beta, **over))
    how: dict[str, Any] = {"temperature": 0.8, "support": support, "reference": teacher, "chunk_rows": 3}

    def scored(h: Tensor, w: Tensor) -> Tensor:
        called: Any = lambda x: x @ w.T  # noqa: E731
        head = Head(None, None, 0.7, 4.0, called) if kind == "module" else Head(w, None, 0.7, 4.0)
        return score_tokens(h, targets, head, **how).exact_kl

    inputs = (hidden.requires_grad_(), weight.requires_grad_(kind == "head"))
    assert torch.autograd.gradcheck(scored, inputs)
    assert (scored(*inputs) > 0).all()


def taught_batch(learner: Any, *, live: bool = False, agents: bool = False) -> Batch:
    """A step whose teacher reads a prompt of its own for each row; the last two rows have none."""
    batch, rows = make_batch(agents=agents), np.arange(10)
    if "base" not in learner.policy.teachers:
        learner.policy.teachers["base"] = Reference(learner.policy.model)

    def view(number: int, episode: Any) -> Any:
        hint = np.random.default_rng(number % 3).integers(4, 97, size=3)  # rows 0 and 3 of a group read the same
        longer = {"token_ids": np.r_[hint, episode.token_ids], "logprobs": np.r_[np.zeros(3), episode.logprobs]}
        return replace(episode, sampled=np.r_[np.zeros(3, bool), episode.sampled], **longer)

    views = tuple(view(number, episode) for number, episode in enumerate(batch.episodes))
    seen = replace(batch, episodes=views)
    logp, states = learner.scores(seen, rows, temperature=0.9, teacher="" if live else "base", states=True)
    said = np.where(batch.mask & (np.arange(12) < 10)[:, None], logp, np.nan)
    return replace(batch, teacher=Taught(said.astype(np.float32), states=states))


def gradients(learner: Any, batch: Batch, how: Distillation | None, **terms: Any) -> tuple[Any, dict[str, Any]]:
    objective = make_objective("dapo", teacher=how, **terms)
    rows = rows_with_gradient(batch, objective)
    found = learner.forward_backward(batch, rows, objective, temperature=0.9, max_completion_length=12)
    return found, learner.gradient()


def assert_same(one: dict[str, Any], other: dict[str, Any], atol: float = 2e-6) -> None:
    assert one.keys() == other.keys()
    assert max(np.abs(grad).max() for grad in one.values()) > 100 * atol
    for name, grad in one.items():
        np.testing.assert_allclose(grad, other[name], atol=atol, err_msg=name)


def test_a_step_by_hand_however_it_is_split() -> None:
    """Values from the model's own logits of each row and view; packs, lanes and walked trees change rounding only."""
    how, found = Distillation(coef=2.0, task_coef=0.0, beta=0.3, top_k=20, skip=1), []
    for tokens in (10**6, 60, 14):
        learner = make_learner(tokens_per_micro_batch=tokens)
        batch = taught_batch(learner, agents=True)
        found.append(gradients(learner, batch, how))
        assert found[-1][0].scored.any(axis=1).tolist() == [n < 10 and batch.mask[n, 1:].any() for n in range(12)]
        assert_same(found[0][1], found[-1][1])
    gradient, model = found[0][0], learner.policy.model
    for row in (0, 3, 7):
        episode = batch.episodes[row]
        hint = np.random.default_rng(row % 3).integers(4, 97, size=3)
        places = torch.from_numpy(np.flatnonzero(episode.sampled) - 1)
        with torch.no_grad():
            mine = model(torch.from_numpy(episode.token_ids)[None]).logits[0, places] / 0.9
            with learner.policy.teachers["base"].active():
                theirs = model(torch.from_numpy(np.r_[hint, episode.token_ids])[None]).logits[0, places + 3] / 0.9
        value, _, mass = compare(mine.log_softmax(-1), theirs.log_softmax(-1), how)
        count = len(places)
        np.testing.assert_allclose(gradient.divergence[row, 1:count], value[1:].numpy(), atol=1e-5)
        np.testing.assert_allclose(gradient.mass[row, 1:count], mass[1:].numpy(), atol=1e-5)
    there = batch.mask & (np.arange(12) < 10)[:, None] & (np.arange(batch.mask.shape[1]) > 0)
    whole = 2.0 * gradient.divergence[there].sum() / batch.mask.sum()  # rows without a teacher keep their places
    assert gradient.metrics["loss"] == pytest.approx(whole, rel=1e-5)


def test_nothing_reaches_the_step_from_where_there_is_no_teacher() -> None:
    how = Distillation(beta=0.0)
    learner = make_learner()
    batch = taught_batch(learner)
    mask = batch.mask & (np.arange(batch.mask.shape[1]) != 1)
    batch = replace(batch, mask=mask, excluded={"mine": batch.mask & ~mask})
    plain = gradients(learner, batch, how)
    said = batch.teacher
    second = said.states.place[:, 1]
    said.states.hidden[second[second >= 0]] = torch.nan
    dirty = replace(said, logprobs=np.where(mask, said.logprobs, np.nan))
    other = gradients(learner, replace(batch, teacher=dirty), how)
    assert_same(plain[1], other[1])
    assert plain[0].metrics["loss"] == other[0].metrics["loss"]
    with pytest.raises(ConfigError, match="needs its distributions"):
        gradients(learner, replace(batch, teacher=replace(said, states=None)), how)
    # masks that take the surrogate set advantages to 0, and leave the teacher's term
    quiet = replace(batch, advantages=0 * batch.advantages)
    assert_same(gradients(learner, quiet, how)[1], gradients(learner, batch, replace(how, task_coef=0.0))[1])


def test_it_is_the_kl_where_the_teacher_is_the_reference() -> None:
    learner = make_learner()
    batch = replace(make_batch(), advantages=0 * make_batch().advantages)
    rows = np.arange(12)
    logp, states = learner.scores(batch, rows, temperature=0.9, reference=True, states=True)
    taught = replace(batch, teacher=Taught(np.where(batch.mask, logp, np.nan).astype(np.float32), states=states))
    exact = gradients(learner, batch, None, beta=0.5, kl_estimator="exact")[1]
    assert_same(exact, gradients(learner, taught, Distillation(coef=0.5))[1])
    for name in ("k1+", "k2", "k3+", "k3_unbiased"):
        objective = make_objective("dapo", beta=0.5, kl_estimator=name)
        learner.forward_backward(batch, rows, objective, temperature=0.9, max_completion_length=12, reference=logp)
        assert_same(learner.gradient(), gradients(learner, taught, Distillation(coef=0.5, estimator=name))[1])


def test_a_live_teacher_is_a_frozen_copy_of_the_policy() -> None:
    found = []
    for live in (False, True):
        learner = make_learner()
        learner.policy.teachers["base"] = Reference(learner.policy.model, from_current=True)
        batch = taught_batch(learner, live=live)
        found.append(gradients(learner, batch, Distillation())[1])
    assert_same(*found)
    same = learner.scores(batch, np.arange(12), temperature=0.9, states=True)
    taught = replace(batch, teacher=Taught(same[0], states=same[1]), advantages=0 * batch.advantages)
    over, flat = gradients(learner, taught, Distillation(beta=0.3))
    assert np.abs(over.divergence).max() < 1e-6
    assert max(np.abs(grad).max() for grad in flat.values()) < 1e-6


def saved(folder: Path, tokenizer: Any = None, **how: Any) -> str:
    tiny_model("llama", seed=5, hidden_size=16, num_layers=1, **how).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 7])
def test_another_network(settings: Settings, tmp_path: Path, vocab_size: int) -> None:
    """Of another width, its embeddings padded: in either form its distributions are over the ids that both have."""
    folder = saved(tmp_path / "other", vocab_size=vocab_size)
    table: Settings = {"weights": folder, "use": "loss", "beta": 0.5, "task_coef": 0.0}
    what: Settings = {"beta": 0.0, "learning_rate": 1e-2, "max_steps": 2, "save_steps": 1}
    run = trained(settings, always, teacher=table, **what)
    assert all(step["teacher/divergence"] > 0 and step["teacher/rows"] == 1 for step in steps_of(run))
    assert not any(
        parameter.requires_grad for held in run.policy.teachers.values() for parameter in held.model.parameters()
    )
    assert "teacher" not in run.learner.tensors()
    assert replay(run.args.output_dir, 2, tolerance=0).exact
    alone = build(settings, always, name="sum", teacher={"weights": folder}, **what)
    batch = alone.make_batch(alone.rollout().groups, alone.next_phase())
    episode, model = batch.episodes[0], tiny_model("llama", vocab_size, seed=5, hidden_size=16, num_layers=1)
    logits = model(torch.from_numpy(episode.token_ids)[None]).logits[0, episode.prompt_length - 1 : -1, :VOCAB_SIZE]
    theirs = logits.log_softmax(-1).gather(1, torch.from_numpy(episode.token_ids[episode.prompt_length :])[:, None])
    said = batch.teacher.logprobs[0, : episode.num_sampled]
    np.testing.assert_allclose(said, theirs[:, 0].detach().numpy(), atol=1e-4)


def test_another_network_that_cannot_teach(settings: Settings, tmp_path: Path) -> None:
    other = tiny_tokenizer()
    swapped = other.backend_tokenizer.to_str().replace(f'"a":{other.get_vocab()["a"]}', '"Ä":5000').encode()
    other._tokenizer = type(other.backend_tokenizer).from_str(swapped.decode())
    table = {"weights": saved(tmp_path / "strange", other)}
    raises(ModelError, "its tokenizer is another: 1 of 97 ids stand for other tokens", build, settings, teacher=table)
    table = {"weights": saved(tmp_path / "short", vocab_size=END_ID + 2)}
    run = build(settings, teacher=table)
    raises(ModelError, "the ids that both networks have end at 3", run.train)
    raises(ModelError, "algorithm.teacher.weights: nobody/such", build, settings, teacher={"weights": "nobody/such"})


FORMS: dict[str, Settings] = {
    "vocabulary": {"weights": "ema", "context": "solution", "beta": 0.3, "top_k": 8, "ema_decay": 0.5},
    "live": {"weights": "live", "context": "solution", "beta": 0.0, "skip_tokens": 1},
    "sampled token": {"weights": "base", "estimator": "k3_unbiased"},
}


@pytest.mark.parametrize("form", FORMS)
def test_runs_of_two_steps(settings: Settings, form: str) -> None:
    table = {"use": "loss", **FORMS[form]}
    what: Settings = {"beta": 0.04, "max_steps": 2, "save_steps": 1, "learning_rate": 1e-2, "num_iterations": 2}
    rewards = always if table.get("context") else first_letter_early
    run = trained(settings, rewards, teacher=table, **what)
    last = steps_of(run)[-1]
    assert last["teacher/rows"] == 1.0
    assert (last.get("teacher/divergence", 0) > 0) is (form != "sampled token")
    assert ("teacher/mass" in last) is (form == "vocabulary")
    if table.get("context"):
        raises(RunFolderError, "was trained on the teacher's distributions", replay, run.args.output_dir, 2)
    else:
        assert replay(run.args.output_dir, 2, tolerance=0).exact
    assert same_weights(run, trained(settings, rewards, teacher=table, resume=1, **what))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beta": 0.5}, "beta=0.5: no effect here; set use to loss and estimator to exact"),
        ({"use": "loss", "estimator": "k1"}, "its gradient has no teacher in it; use k1+"),
        ({"use": "loss", "estimator": "k3"}, "its gradient is the forward KL's"),
        ({"use": "loss", "estimator": "k2", "top_k": 5}, "top_k=5: no effect here; set use to loss and estimator"),
        ({"use": "loss", "tail": False, "top_k": 1}, "tail=False with top_k=1: compares nothing"),
        ({"use": "loss", "clip": 5.0}, "clip=5.0: no effect here; set use to sum"),
    ],
)
def test_what_cannot_be(changes: Settings, words: str) -> None:
    raises(ConfigError, words.replace("+", r"\+"), GRPOConfig, "runs/x", teacher=changes)


def test_one_divergence_over_the_vocabulary_and_any_loss() -> None:
    table = {"use": "loss"}
    raises(ConfigError, "one of them is served", GRPOConfig, "runs/x", teacher=table, kl_estimator="exact")
    assert GRPOConfig("runs/x", teacher=table, loss_type="gspo").algorithm.objective().teacher == Distillation()

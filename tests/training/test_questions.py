"""What is known about each question, and the order that it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_runs import Settings, build, events, same_weights, steps_of, trained

from covey import GRPOTrainer
from covey.errors import CheckpointError, ConfigError, RewardError
from covey.observe.run_folder import RunFolder
from covey.rollout.agents import PlayStats
from covey.rollout.collect import AnswerCollector, Rollout
from covey.tasks import WeightedOrder
from covey.training.evaluate import QuestionHistory, _right_by, count_answers, questions_of
from covey.types import Group, Trajectory
from fakes import fake_episode, fake_prompt


def test_weights_by_hand() -> None:
    history = QuestionHistory(["new", "half", "never", "always"])
    assert history.weights().tolist() == [1.0] * 4
    history.add({"half": [4, 8], "never": [0, 8], "always": [8, 8], "gone": [1, 1]})
    # half: Beta(5, 5): 6 * 25 / (10 * 11); never: Beta(1, 9): 6 * 9 / (10 * 11)
    assert history.weights() == pytest.approx([1.0, 150 / 110, 54 / 110, 54 / 110])
    history.add({"never": [4, 8]})
    # the first visit counts half: right 4, wrong 4 + 4
    assert history.weights()[2] == pytest.approx(6 * 5 * 9 / (14 * 15))


def test_a_history_is_restored_from_its_lines() -> None:
    lines = [{"step": 1, "answers": {"a": [1, 4]}}, {"step": 2, "answers": {"a": [2, 4], "b": [4, 4]}}]
    one, other = QuestionHistory(["a", "b"]), QuestionHistory(["a", "b"])
    for line in lines:
        one.add(line["answers"])
    other.add({"a": [4, 4]})
    other.restore(lines)
    assert one.weights().tolist() == other.weights().tolist()
    hardest, easiest = questions_of(lines)
    assert (hardest.uid, hardest.visits, hardest.accuracy) == ("a", [(1, 1, 4), (2, 2, 4)], 3 / 8)
    assert (hardest.first, hardest.last, easiest.accuracy) == (0.25, 0.5, 1.0)


def test_weighted_order_draws_in_proportion_and_never_twice() -> None:
    weights = np.array([1.0, 2.0, 4.0, 1e-6])
    order = WeightedOrder(4, 7, lambda: weights)
    draws = np.array([order.take(position, 1)[0] for position in range(7000)])
    shares = np.bincount(draws, minlength=4) / 7000
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7, 0], abs=0.02)
    assert all(len(set(order.take(position, 3))) == 3 for position in range(200))
    assert sorted(order.take(0, 8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert order.take(5, 3) == WeightedOrder(4, 7, lambda: weights).take(5, 3)
    assert [order.take(p, 4) for p in range(20)] != [WeightedOrder(4, 8, lambda: weights).take(p, 4) for p in range(20)]
    with pytest.raises(ValueError, match="position=-1"):
        order.take(-1, 2)


def first_letter_early(completions: list[str], **columns: Any) -> list[float]:
    return [float(text[:1].lower() < "n") for text in completions]


BY_DIFFICULTY: Settings = {"prompt_order": "difficulty", "correctness": "first_letter_early"}


def test_a_run_records_its_questions_and_a_resume_draws_the_same_ones(settings: Settings) -> None:
    settings |= BY_DIFFICULTY | {"max_steps": 4, "save_steps": 2}
    whole = trained(settings, first_letter_early)
    folder = RunFolder.read(settings["output_dir"])
    lines = folder.read_answers()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(total == 4 for line in lines for _, total in line["answers"].values())
    for line, record in zip(lines, whole.state.log_history, strict=True):
        assert record["accuracy"] == sum(right for right, _ in line["answers"].values()) / 8 == record["reward"]
    weights = whole.questions.weights()
    assert (weights != 1).any()
    resumed = trained(settings, first_letter_early, resume=2)
    assert folder.read_answers() == lines
    assert resumed.questions.weights().tolist() == weights.tolist()

    folder.questions_path.write_text("".join(folder.questions_path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(CheckpointError, match=r"questions\.jsonl, by which .* draws, lacks step 1; restore it"):
        trained(settings, first_letter_early, resume=True)


def spied(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> list[list[Rollout]]:
    """What the trainer, now trained, had sampled for each of its steps."""
    sampled: list[list[Rollout]] = [[]]
    collect, report = AnswerCollector.__call__, trainer._report

    def spy(*arguments: Any, **options: Any) -> Rollout:
        sampled[-1].append(collect(*arguments, **options))
        return sampled[-1][-1]

    with monkeypatch.context() as patch:
        patch.setattr(AnswerCollector, "__call__", spy)
        patch.setattr(trainer, "_report", lambda *rest: (report(*rest), sampled.append([])))
        trainer.train()
    return sampled


def test_discarded_groups_count_in_every_number(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions one and two are never answered: dynamic sampling throws them away, the numbers do not."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        hard = [prompt.split()[1] in ("one:", "two:") for prompt in prompts]
        return [0.0 if no else float(text[:1].lower() < "n") for no, text in zip(hard, completions, strict=True)]

    settings |= {"max_steps": 4, "save_steps": 2, "dynamic_sampling": 3, "prompt_order": "difficulty"}
    settings["correctness"] = "reward"
    whole = build(settings, reward)
    sampled = spied(whole, monkeypatch)
    records = steps_of(whole)
    assert any(record.get("dynamic_sampling/discarded_groups", 0) > 0 for record in records)
    folder, tokens = RunFolder.read(settings["output_dir"]), 0.0
    for rollouts, record, line in zip(sampled, records, folder.read_answers(), strict=False):
        groups = [group for rollout in rollouts for group in rollout.groups]
        rewards = np.concatenate([group.rewards for group in groups])
        episodes = [episode for group in groups for episode in group.episodes]
        assert record["accuracy"] == record["reward"] == rewards.mean()
        assert record["frac_reward_zero_std"] == np.mean([group.is_tied for group in groups])
        assert record["completions/mean_length"] == np.mean([episode.num_sampled for episode in episodes])
        tokens += sum(len(episode.token_ids) for episode in episodes)
        assert record["num_tokens"] == tokens
        assert np.sum(list(line["answers"].values()), axis=0).tolist() == [rewards.sum(), len(rewards)]
    resumed = trained(settings, reward, resume=2)
    assert resumed.questions.weights().tolist() == whole.questions.weights().tolist()
    assert same_weights(resumed, whole)


def test_the_answers_of_agents_are_counted_by_episode() -> None:
    """Two episodes of two and one turns: three rows to train on, two things to be right or wrong."""
    episodes = tuple(fake_episode("x") for _ in range(3))
    parts = (episodes[:2], episodes[2:])
    played = tuple(Trajectory(part, (), success, "done") for part, success in zip(parts, (True, False), strict=True))
    group = Group(fake_prompt(uid="a"), episodes, np.array([1.0, 0.0]), trajectories=played)
    other = Group(fake_prompt(uid="b"), episodes, np.array([0.0, 0.0]), trajectories=played)
    rollout = Rollout((group,), 0.0, 0.0, 3, discarded=(other,), played=PlayStats(turns=6, no_actions=3))
    assert count_answers(rollout.whole, np.array([True, False, False, False])) == {"a": [1, 2], "b": [0, 2]}
    assert count_answers(rollout.whole, None) == {}
    twice = [Group(fake_prompt(uid=uid), (fake_episode("x"),) * 2, np.zeros(2)) for uid in ("a", "b", "a")]
    correct = np.array([True, False, False, False, True, True])
    assert count_answers(Rollout(tuple(twice), 0.0, 0.0, 0), correct) == {"a": [3, 4], "b": [0, 2]}
    assert rollout.metrics["agent/no_action_ratio"] == 0.5
    assert rollout.metrics["agent/success"] == 0.5


def test_difficulty_without_right_and_wrong_is_refused(settings: Settings) -> None:
    def half(completions: list[str], **columns: Any) -> list[float]:
        return [0.5 + 0.01 * len(text) for text in completions]

    settings["prompt_order"] = "difficulty"
    with pytest.raises(ConfigError, match=r"data\.prompt_order='difficulty'.*set data\.prompt_order to random"):
        build(settings, half)
    with pytest.raises(ConfigError, match=r"correctness='right': is no reward function; there is half"):
        build(settings, half, correctness="right")
    with pytest.raises(RewardError, match=r"correctness='half': it gave 0\.5\d, .* gives 0 or 1"):
        trained(settings, half, correctness="half")
    half.whole_batch = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"max_generations=12.*half has whole_batch"):
        build(settings | {"prompt_order": "random"}, half, max_generations=12)
    found = _right_by("sum", np.array([sum([0.1] * 10), 1.0, 0.0, np.nan]))  # 1 but for rounding is right
    assert found.tolist() == [True, True, False, False]


def test_the_learning_rate_is_cut_in_a_run(settings: Settings) -> None:
    def wrong(completions: list[str], **columns: Any) -> list[float]:
        return [float(index == 0) for index in range(len(completions))]

    phases = [{"name": "warmup", "steps": 12, "min_accuracy": 0.5, "learning_rate_cut": 0.1}]
    settings |= {"max_steps": -1, "phases": phases, "lr_scheduler_type": "constant", "correctness": "wrong"}
    rates = [record["learning_rate"] for record in trained(settings, wrong).state.log_history]
    assert rates == pytest.approx([1e-2] * 10 + [1e-3] * 2)
    (event,) = events(settings["output_dir"], "learning_rate")
    assert "step 10" in event
    assert "multiplied by 0.1" in event


@pytest.mark.parametrize(
    ("masks", "most"),
    [
        ({"validity_min_length": 6}, 4),
        ({"down_sampling": "first:2"}, 2),
        ({"down_sampling": "first:2", "validity_min_length": 12}, 2),
    ],
)
def test_masks_and_missing_answers_are_metrics(settings: Settings, masks: Settings, most: int) -> None:
    """The share that masks leave is of what down-sampling chose."""
    settings |= masks | {"max_steps": 1, "correctness": "first_letter_early"}
    (record,) = trained(settings, first_letter_early).state.log_history
    rows = RunFolder.read(settings["output_dir"]).read_completions(1)
    assert record["completions/no_answer_ratio"] == np.mean([not row["completion"].strip() for row in rows])
    assert {row["correct"] for row in rows} <= {True, False}
    kept = [not row["masked_by"] for row in rows if row["sample"] < most]
    assert record.get("mask_ratio") == (np.mean(kept) if "validity_min_length" in masks else None)
    if most == 2:
        assert 0.4 < record["mask/down_sampling"] < 0.6
        assert record.get("mask_ratio", 0.0) < 1


def test_what_groups_are_grown_by_is_trained_on_and_counts_in_no_number(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracy, rewards and what is known of a question are those of the completions that are sampled anyway."""

    def reward(completions: list[str], log_extra: Any = None, log_metric: Any = None, **columns: Any) -> list[float]:
        log_extra("begins", [text[:1] for text in completions])
        scores = [float(text[:1].lower() < "c") for text in completions]
        log_metric("share", sum(scores) / len(scores))
        return scores

    settings |= {"max_steps": 4, "max_generations": 12, "prompt_order": "difficulty", "correctness": "reward"}
    trainer = build(settings, reward)
    sampled = spied(trainer, monkeypatch)
    folder, tokens, added = RunFolder.read(settings["output_dir"]), 0.0, 0
    for rollouts, record, line in zip(sampled, steps_of(trainer), folder.read_answers(), strict=False):
        first = np.concatenate([group.rewards for group in rollouts[0].groups])
        everything = [e for rollout in rollouts for group in rollout.groups for e in group.episodes]
        assert record["reward"] == record["accuracy"] == record["share"] == first.mean()
        assert np.sum(list(line["answers"].values()), axis=0).tolist() == [first.sum(), len(first)]
        assert record.get("sampling/added_completions", 0) == len(everything) - len(first)
        added += len(everything) - len(first)
        tokens += sum(len(episode.token_ids) for episode in everything)
        assert record["num_tokens"] == tokens
        rows = folder.read_completions(line["step"])
        assert len(rows) == len(everything)
        assert all(row["begins"] == row["completion"][:1] for row in rows)  # every row has its own
        assert all(row["correct"] == bool(row["reward"]) for row in rows)
    assert added > 0

"""What is known about each question, and the order that it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from covey import GRPOConfig, GRPOTrainer
from covey.errors import CheckpointError, ConfigError, RewardError
from covey.observe.run_folder import RunFolder
from covey.rollout.agents import PlayStats
from covey.rollout.collect import AnswerCollector, Rollout
from covey.tasks import WeightedOrder
from covey.training.evaluate import QuestionHistory, _right_by, count_answers, questions_of
from covey.types import Group, Trajectory
from fakes import fake_episode, fake_prompt

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]


def test_right_answers_are_counted_by_question() -> None:
    groups = [
        Group(fake_prompt(uid=uid), tuple(fake_episode("x") for _ in range(2)), np.zeros(2)) for uid in ("a", "b", "a")
    ]
    rollout = Rollout(tuple(groups), 0.0, 0.0, 0)
    correct = np.array([True, False, False, False, True, True])
    assert count_answers(rollout, correct) == {"a": [3, 4], "b": [0, 2]}
    assert count_answers(rollout, None) == {}


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


def build(settings: dict[str, Any], **changes: Any) -> GRPOTrainer:
    args = GRPOConfig(
        **(settings | {"max_steps": 4, "prompt_order": "difficulty", "correctness": "first_letter_early"} | changes)
    )
    return GRPOTrainer(reward_funcs=first_letter_early, args=args, train_dataset=ROWS)


def test_a_run_records_its_questions_and_a_resume_draws_the_same_ones(settings: dict[str, Any]) -> None:
    whole = build(settings, save_steps=2)
    whole.train()
    folder = RunFolder.read(settings["output_dir"])
    lines = folder.read_answers()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(total == 4 for line in lines for _, total in line["answers"].values())
    for line, record in zip(lines, whole.state.log_history, strict=True):
        right = sum(right for right, _ in line["answers"].values())
        assert record["accuracy"] == right / 8 == record["reward"]
    weights = whole.questions.weights()
    assert (weights != 1).any()
    resumed = build(settings, save_steps=2)
    resumed.train(resume_from_checkpoint=folder.checkpoints / "step_000002")
    assert folder.read_answers() == lines
    assert resumed.questions.weights().tolist() == weights.tolist()

    folder.questions_path.write_text("".join(folder.questions_path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(CheckpointError, match=r"questions\.jsonl, by which .* draws, lacks step 1; restore it"):
        build(settings, save_steps=2).train(resume_from_checkpoint=True)


def test_discarded_groups_count_in_every_number(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions one and two are never answered: dynamic sampling throws them away, the numbers do not."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        hard = [prompt.split()[1] in ("one:", "two:") for prompt in prompts]
        return [0.0 if no else float(text[:1].lower() < "n") for no, text in zip(hard, completions, strict=True)]

    changes = {"max_steps": 4, "save_steps": 2, "dynamic_sampling": 3, "prompt_order": "difficulty"}
    changes["correctness"] = "reward"
    args = GRPOConfig(**(settings | changes))
    whole = GRPOTrainer(reward_funcs=reward, args=args, train_dataset=ROWS)
    sampled: list[list[Group]] = [[]]
    collect = AnswerCollector.__call__

    def spy(collector: AnswerCollector, *arguments: Any, **options: Any) -> Rollout:
        rollout = collect(collector, *arguments, **options)
        sampled[-1] += rollout.groups
        return rollout

    report = whole._report
    monkeypatch.setattr(AnswerCollector, "__call__", spy)
    monkeypatch.setattr(whole, "_report", lambda *rest: (report(*rest), sampled.append([])))
    whole.train()
    records = [record for record in whole.state.log_history if "loss" in record]
    assert any(record.get("dynamic_sampling/discarded_groups", 0) > 0 for record in records)
    folder = RunFolder.read(settings["output_dir"])
    tokens = 0.0
    for groups, record, line in zip(sampled, records, folder.read_answers(), strict=False):
        rewards = np.concatenate([group.rewards for group in groups])
        episodes = [episode for group in groups for episode in group.episodes]
        assert record["accuracy"] == record["reward"] == rewards.mean()
        assert record["frac_reward_zero_std"] == np.mean([group.is_tied for group in groups])
        assert record["completions/mean_length"] == np.mean([episode.num_sampled for episode in episodes])
        tokens += sum(len(episode.token_ids) for episode in episodes)
        assert record["num_tokens"] == tokens
        assert sum(total for _, total in line["answers"].values()) == len(rewards)
        assert sum(right for right, _ in line["answers"].values()) == rewards.sum()
    weights = whole.questions.weights()
    resumed = GRPOTrainer(reward_funcs=reward, args=args, train_dataset=ROWS)
    resumed.train(resume_from_checkpoint=folder.checkpoints / "step_000002")
    assert resumed.questions.weights().tolist() == weights.tolist()
    for name, value in whole.policy.state_dict().items():
        assert resumed.policy.state_dict()[name].equal(value)


def test_the_answers_of_agents_are_counted_by_episode() -> None:
    """Two episodes of two and one turns: three rows to train on, two things to be right or wrong."""
    episodes = tuple(fake_episode("x") for _ in range(3))
    parts = (episodes[:2], episodes[2:])
    played = tuple(Trajectory(part, (), success, "done") for part, success in zip(parts, (True, False), strict=True))
    group = Group(fake_prompt(uid="a"), episodes, np.array([1.0, 0.0]), trajectories=played)
    other = Group(fake_prompt(uid="b"), episodes, np.array([0.0, 0.0]), trajectories=played)
    rollout = Rollout((group,), 0.0, 0.0, 3, discarded=(other,), played=PlayStats(turns=6, no_actions=3))
    assert count_answers(rollout.whole, np.array([True, False, False, False])) == {"a": [1, 2], "b": [0, 2]}
    assert rollout.metrics["agent/no_action_ratio"] == 0.5
    assert rollout.metrics["agent/success"] == 0.5


def test_difficulty_without_right_and_wrong_is_refused(settings: dict[str, Any]) -> None:
    def half(completions: list[str], **columns: Any) -> list[float]:
        return [0.5 + 0.01 * len(text) for text in completions]

    args = GRPOConfig(**(settings | {"prompt_order": "difficulty"}))
    with pytest.raises(ConfigError, match=r"data\.prompt_order='difficulty'.*set data\.prompt_order to random"):
        GRPOTrainer(reward_funcs=half, args=args, train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"correctness='right': is no reward function; there is half"):
        GRPOTrainer(reward_funcs=half, args=args.replace(correctness="right"), train_dataset=ROWS)
    with pytest.raises(RewardError, match=r"correctness='half': it gave 0\.5\d, .* gives 0 or 1"):
        GRPOTrainer(reward_funcs=half, args=args.replace(correctness="half"), train_dataset=ROWS).train()
    found = _right_by("sum", np.array([sum([0.1] * 10), 1.0, 0.0, np.nan]))  # 1 but for rounding is right
    assert found.tolist() == [True, True, False, False]


def test_the_learning_rate_is_cut_in_a_run(settings: dict[str, Any]) -> None:
    def wrong(completions: list[str], **columns: Any) -> list[float]:
        return [float(index == 0) for index in range(len(completions))]

    phases = [{"name": "warmup", "steps": 12, "min_accuracy": 0.5, "learning_rate_cut": 0.1}]
    args = GRPOConfig(
        **(settings | {"max_steps": -1, "phases": phases, "lr_scheduler_type": "constant", "correctness": "wrong"})
    )
    trainer = GRPOTrainer(reward_funcs=wrong, args=args, train_dataset=ROWS)
    trainer.train()
    rates = [record["learning_rate"] for record in trainer.state.log_history]
    assert rates == pytest.approx([1e-2] * 10 + [1e-3] * 2)
    events = RunFolder.read(settings["output_dir"]).read_events()
    (event,) = [event["message"] for event in events if event["kind"] == "learning_rate"]
    assert "step 10" in event
    assert "multiplied by 0.1" in event


def test_masks_and_missing_answers_are_metrics(settings: dict[str, Any]) -> None:
    args = GRPOConfig(**(settings | {"validity_min_length": 6, "max_steps": 1, "correctness": "first_letter_early"}))
    trainer = GRPOTrainer(reward_funcs=first_letter_early, args=args, train_dataset=ROWS)
    trainer.train()
    (record,) = trainer.state.log_history
    rows = RunFolder.read(settings["output_dir"]).read_completions(1)
    kept = [not row["masked_by"] for row in rows]
    assert record["mask_ratio"] == sum(kept) / len(kept)
    assert record["completions/no_answer_ratio"] == sum(not row["completion"].strip() for row in rows) / len(rows)
    assert {row["correct"] for row in rows} <= {True, False}


def test_the_share_that_masks_leave_is_of_what_down_sampling_chose(settings: dict[str, Any]) -> None:
    changes = {"down_sampling": "first:2", "max_steps": 1, "num_generations": 4}
    for mask in ({}, {"validity_min_length": 12}):
        settings["output_dir"] += "-masked" if mask else ""
        args = GRPOConfig(**(settings | changes | mask))
        trainer = GRPOTrainer(reward_funcs=first_letter_early, args=args, train_dataset=ROWS)
        trainer.train()
        (record,) = trainer.state.log_history
        rows = RunFolder.read(settings["output_dir"]).read_completions(1)
        chosen = [row for row in rows if row["sample"] < 2]
        assert 0.4 < record["mask/down_sampling"] < 0.6
        if mask:
            left = [not row["masked_by"] for row in chosen]
            assert record["mask_ratio"] == sum(left) / len(left) < 1
        else:
            assert "mask_ratio" not in record


def test_a_reward_that_is_to_see_the_whole_step_lets_no_group_grow(settings: dict[str, Any]) -> None:
    def ranks(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    ranks.whole_batch = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"max_generations=12.*ranks has whole_batch"):
        GRPOTrainer(reward_funcs=ranks, args=GRPOConfig(**settings, max_generations=12), train_dataset=ROWS)


def test_what_groups_are_grown_by_is_trained_on_and_counts_in_no_number(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracy, rewards and what is known of a question are those of the completions that are sampled anyway."""

    def reward(completions: list[str], log_extra: Any = None, log_metric: Any = None, **columns: Any) -> list[float]:
        log_extra("begins", [text[:1] for text in completions])
        scores = [float(text[:1].lower() < "c") for text in completions]
        log_metric("share", sum(scores) / len(scores))
        return scores

    changes = {"max_steps": 4, "max_generations": 12, "prompt_order": "difficulty", "correctness": "reward"}
    trainer = GRPOTrainer(reward_funcs=reward, args=GRPOConfig(**(settings | changes)), train_dataset=ROWS)
    sampled: list[list[Rollout]] = [[]]
    collect, report = AnswerCollector.__call__, trainer._report

    def spy(collector: AnswerCollector, *arguments: Any, **options: Any) -> Rollout:
        sampled[-1].append(collect(collector, *arguments, **options))
        return sampled[-1][-1]

    monkeypatch.setattr(AnswerCollector, "__call__", spy)
    monkeypatch.setattr(trainer, "_report", lambda *rest: (report(*rest), sampled.append([])))
    trainer.train()
    folder = RunFolder.read(settings["output_dir"])
    records = [record for record in trainer.state.log_history if "loss" in record]
    tokens, added = 0.0, 0
    for rollouts, record, line in zip(sampled, records, folder.read_answers(), strict=False):
        first = np.concatenate([group.rewards for group in rollouts[0].groups])
        everything = [e for rollout in rollouts for group in rollout.groups for e in group.episodes]
        assert record["reward"] == record["accuracy"] == record["share"] == first.mean()
        assert sum(total for _, total in line["answers"].values()) == len(first)
        assert sum(right for right, _ in line["answers"].values()) == first.sum()
        assert record.get("sampling/added_completions", 0) == len(everything) - len(first)
        added += len(everything) - len(first)
        tokens += sum(len(episode.token_ids) for episode in everything)
        assert record["num_tokens"] == tokens
        rows = folder.read_completions(line["step"])
        assert len(rows) == len(everything)
        assert all(row["begins"] == row["completion"][:1] for row in rows)  # every row has its own
        assert all(row["correct"] == bool(row["reward"]) for row in rows)
    assert added > 0

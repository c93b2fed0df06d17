"""What is known about each question, the order that it gives; accuracy kind by kind; questions of multiple choice."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from training_runs import Settings, build, events, first_letter_early, rewarding, same_weights, steps_of, trained
from worlds import Breaking

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.cli.results import kind_shares, percent, print_difference, print_kinds, print_left_out
from covey.errors import CheckpointError, ConfigError, RewardError
from covey.observe import ConsoleProgress, describe_metric
from covey.observe.run_folder import RunFolder
from covey.rollout.agents import PlayStats
from covey.rollout.collect import AnswerCollector, Rollout
from covey.rollout.scoring import Logged
from covey.tasks import WeightedOrder, get_task
from covey.training import evaluate as judging
from covey.training.evaluate import Evaluation, accuracy_by_kind, count_answers
from covey.training.multiple_choice import ChoiceTask, answer_choices
from covey.training.prefetch import Sampled
from covey.training.questions import QuestionHistory, questions_of
from covey.training.schedule import ResolvedPhase
from covey.training.tables import completion_rows
from covey.types import Group, SamplingSettings, Trajectory
from fakes import fake_episode, fake_prompt, raises

BY_DIFFICULTY: Settings = {"prompt_order": "difficulty", "correctness": "first_letter_early"}


def test_weights_by_hand_and_the_weighted_order_draws_in_proportion_and_never_twice() -> None:
    history = QuestionHistory(["new", "half", "never", "always"])
    assert history.weights().tolist() == [1.0] * 4
    history.add({"half": [4, 8], "never": [0, 8], "always": [8, 8], "gone": [1, 1]})
    # half: Beta(5, 5): 6 * 25 / (10 * 11); never: Beta(1, 9): 6 * 9 / (10 * 11)
    assert history.weights() == pytest.approx([1.0, 150 / 110, 54 / 110, 54 / 110])
    history.add({"never": [4, 8]})
    # the first visit counts half: right 4, wrong 4 + 4
    assert history.weights()[2] == pytest.approx(6 * 5 * 9 / (14 * 15))
    # a history is restored from its lines
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
    weights = np.array([1.0, 2.0, 4.0, 1e-6])
    order = WeightedOrder(4, 7, lambda: weights)
    shares = np.bincount(np.array([order.take(position, 1)[0] for position in range(7000)]), minlength=4) / 7000
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7, 0], abs=0.02)
    assert all(len(set(order.take(position, 3))) == 3 for position in range(200))
    assert sorted(order.take(0, 8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert order.take(5, 3) == WeightedOrder(4, 7, lambda: weights).take(5, 3)
    assert [order.take(p, 4) for p in range(20)] != [WeightedOrder(4, 8, lambda: weights).take(p, 4) for p in range(20)]
    raises(ValueError, "position=-1", order.take, -1, 2)


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
    assert (folder.read_answers(), resumed.questions.weights().tolist()) == (lines, weights.tolist())
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
        return [0.0 if no else score for no, score in zip(hard, first_letter_early(completions), strict=True)]

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
    assert (rollout.metrics["agent/no_action_ratio"], rollout.metrics["agent/success"]) == (0.5, 0.5)


def test_difficulty_without_right_and_wrong_is_refused(settings: Settings) -> None:
    half = rewarding("half", lambda text: 0.5 + 0.01 * len(text))
    settings["prompt_order"] = "difficulty"
    raises(ConfigError, r"data\.prompt_order='difficulty'.*set data\.prompt_order to random", build, settings, half)
    with pytest.raises(ConfigError, match=r"correctness='right': is no reward function; there is half"):
        build(settings, half, correctness="right")
    with pytest.raises(RewardError, match=r"correctness='half': it gave 0\.5, .* gives 0 or 1"):
        trained(settings, half, correctness="half")
    half.whole_batch = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"max_generations=12.*half has whole_batch"):
        build(settings | {"prompt_order": "random"}, half, max_generations=12)
    found = judging.right_by("sum", np.array([sum([0.1] * 10), 1.0, 0.0, np.nan]))  # 1 but for rounding is right
    assert found.tolist() == [True, True, False, False]


def test_the_learning_rate_is_cut_in_a_run(settings: Settings) -> None:
    def wrong(completions: list[str], **columns: Any) -> list[float]:
        return [float(index == 0) for index in range(len(completions))]

    phases = [{"name": "warmup", "steps": 12, "min_accuracy": 0.5, "learning_rate_cut": 0.1}]
    settings |= {"max_steps": -1, "phases": phases, "lr_scheduler_type": "constant", "correctness": "wrong"}
    rates = [record["learning_rate"] for record in trained(settings, wrong).state.log_history]
    assert rates == pytest.approx([1e-2] * 10 + [1e-3] * 2)
    (event,) = events(settings["output_dir"], "learning_rate")
    assert all(words in event for words in ("step 10", "multiplied by 0.1"))


@pytest.mark.parametrize(
    "masks",
    [{"validity_min_length": 6}, {"down_sampling": "first:2"}, {"down_sampling": "first:2", "validity_min_length": 12}],
)
def test_masks_and_missing_answers_are_metrics(settings: Settings, masks: Settings) -> None:
    """The share that masks leave is of what down-sampling chose."""
    settings |= masks | {"max_steps": 1, "correctness": "first_letter_early"}
    (record,) = trained(settings, first_letter_early).state.log_history
    rows = RunFolder.read(settings["output_dir"]).read_completions(1)
    assert record["completions/no_answer_ratio"] == np.mean([not row["completion"].strip() for row in rows])
    assert {row["correct"] for row in rows} <= {True, False}
    most = 2 if "down_sampling" in masks else 4
    kept = [not row["masked_by"] for row in rows if row["sample"] < most]
    assert record.get("mask_ratio") == (np.mean(kept) if "validity_min_length" in masks else None)
    if "down_sampling" in masks:
        assert 0.4 < record["mask/down_sampling"] < 0.6
        assert record.get("mask_ratio", 0.0) < 1


def test_what_groups_are_grown_by_counts_in_no_number(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
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


def played(*groups: str) -> Rollout:
    """A letter for each episode: s succeeds, l loses, f fails. A group's kind is its first letter's."""
    found = []
    for number, outcomes in enumerate(groups):
        prompt = fake_prompt(uid=f"q{number}", kind=outcomes[0])
        trajectories = tuple(
            Trajectory((fake_episode("x", prompt),), (), letter == "s", "failed" if letter == "f" else "done")
            for letter in outcomes
        )
        episodes = tuple(episode for trajectory in trajectories for episode in trajectory.episodes)
        found.append(Group(prompt, episodes, np.zeros(len(outcomes)), trajectories=trajectories))
    failures = sum(outcomes.count("f") for outcomes in groups)
    return Rollout(tuple(found), 0.0, 0.0, 1, played=PlayStats(failures=failures))


def evaluation(*groups: str) -> Evaluation:
    prompts = [fake_prompt()] * len(groups)
    return judging.evaluate(prompts, lambda *_, **__: played(*groups), SamplingSettings(), policy_version=1, seed=0)


def sampled(rollout: Rollout) -> Sampled:
    correct = judging.correct_completions(rollout.whole, None)
    return Sampled(rollout, ResolvedPhase(0, "", 1.0, 0.0, 2, 1e-3), 1, correct, Logged({}, {}))


def test_failed_episodes_are_left_out_of_accuracy_questions_and_what_a_baseline_is_compared_on() -> None:
    rollout = played("sl", "sf", "ff")
    assert judging.judged_completions(rollout).tolist() == [True, True, True, False, False, False]
    assert sampled(rollout).accuracy == pytest.approx(2 / 3)
    assert sampled(rollout).answers == {"q0": [1, 2], "q1": [1, 1]}
    assert sampled(played("ff")).accuracy is None
    assert count_answers(played("ff"), np.zeros(2, np.bool_)) == {}
    assert rollout.metrics["agent/failed_episodes"] == 3
    found = evaluation("sslff", "llf", "sf").metrics
    assert (found["eval/accuracy"], found["eval/accuracy/s"]) == pytest.approx((3 / 6, 3 / 4))
    assert found["eval/num_completions"] == 6
    assert found["eval/num_completions/s"] + found["eval/num_completions/l"] == 6
    assert found["eval/accuracy_high"] == pytest.approx(0.8124, abs=1e-4)  # Wilson, 3 of 6
    nothing = evaluation("ff").metrics
    assert ("eval/accuracy" in nothing, nothing["eval/num_completions"]) == (False, 0)
    text = told("sflf", "fsls")  # counted as wrong, the failed ones would be two gained and one lost
    for words in (
        "before: the environment failed in 2 of 4 episodes, which accuracy leaves out",
        "after: the environment failed in 1 of 4 episodes",
        *("accuracy against before: +0.0 points", "0 gained, 0 lost"),
    ):
        assert words in text
    assert "accuracy against before: no episode was judged for both" in told("sf", "fs")
    assert "no accuracy: the environment failed in every episode" in told("ff", "ss")
    assert "failed" not in told("sl", "ss")


def replies(texts: list[str], samples: int = 1) -> Evaluation:
    groups = []
    for number, text in enumerate(texts):
        prompt = fake_prompt(uid=f"q{number}")
        groups.append(Group(prompt, (fake_episode(text, prompt),) * samples, np.zeros(samples)))
    how = {"policy_version": 1, "seed": 0, "samples": samples, "is_correct": lambda prompt, text: text == "3"}
    prompts, rollout = [group.prompt for group in groups], Rollout(tuple(groups), 0.0, 0.0, 1)
    return judging.evaluate(prompts, lambda *_, **__: rollout, SamplingSettings(), **how)


def test_the_share_of_the_most_frequent_answer() -> None:
    share = "eval/most_frequent_answer"
    assert replies(["yes", " yes\n", "Yes", "no"]).metrics[share] == 0.5
    assert share not in replies(["yes", "no"], samples=2).metrics
    assert share not in evaluation("sl").metrics
    texts = [str(number) for number in range(10)]
    found = replies([" a a\n", *["a a"] * 9, *texts])
    assert (found.metrics[share], found.constant) == (0.5, {"eval/most_frequent_text": "a a"})
    assert replies(["a a"] * 9 + texts).constant == {}  # 19 say little
    assert (describe_metric(share) is None, describe_metric("eval/most_frequent_text")) == (False, None)


def told(before: str, after: str) -> str:
    out, one, other = Console(file=io.StringIO(), width=200), evaluation(before), evaluation(after)
    print_left_out(out, "before", one)
    print_left_out(out, "after", other)
    print_difference(out, "before", one, other)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_run_says_so(settings: dict[str, Any]) -> None:
    """And the first error of a kind is an event with its line."""
    changes = {"action_format": "text", "max_completion_length": 4, "failed_episodes": "score", "max_turns": 3}
    GRPOTrainer(args=GRPOConfig(**(settings | changes)), world=Breaking()).train()
    step = steps_of(settings["output_dir"])[0]
    assert (step["agent/failed_ratio"], step["agent/failed_episodes"], "accuracy" in step) == (1.0, 8, False)
    (said,) = events(settings["output_dir"], "environment")
    assert said.startswith("the environment failed in step: KeyError: 'room ")
    assert all(words in said for words in ("worlds.py:", "in step. Its episode failed"))


def answered(kinds: list[Any], samples: int = 1) -> Rollout:
    groups = []
    for kind in kinds:
        prompt = fake_prompt("?") if kind is None else fake_prompt("?", kind=kind)
        episodes = tuple(fake_episode("a", prompt) for _ in range(samples))
        groups.append(Group(prompt, episodes, np.ones(samples), {"r": np.ones(samples)}))
    return Rollout(tuple(groups), 0.0, 0.0, 1)


def test_each_kind_by_hand() -> None:
    # larger: 2 of 3 questions x 2 answers; smaller: 0 of 1 x 2; one row names no kind
    kinds = ["larger", "smaller", "larger", None, "larger"]
    found = answered(kinds, samples=2)
    metrics = accuracy_by_kind(found, np.array([1, 1, 0, 0, 1, 0, 1, 1, 1, 0], np.bool_))
    assert (metrics["eval/accuracy/larger"], metrics["eval/accuracy/smaller"]) == (pytest.approx(4 / 6), 0.0)
    assert (metrics["eval/num_completions/larger"], metrics["eval/num_completions/smaller"]) == (6, 2)
    low, high = metrics["eval/accuracy_low/larger"], metrics["eval/accuracy_high/larger"]
    assert (low, high) == pytest.approx((0.300, 0.903), abs=1e-3)  # Wilson, 4 of 6
    assert all(describe_metric(name) for name in metrics)
    assert [row.get("kind") for row in completion_rows(found.groups)][::2] == kinds
    ((name, share), _) = kind_shares(metrics)
    assert (name, percent(share)) == ("larger", "66.7 % (30.0 to 90.3)")
    out = Console(file=io.StringIO(), width=200)
    ConsoleProgress(out, live=False).on_eval(3, {"eval/accuracy": 0.5, "eval/reward": 0.5} | metrics)
    assert "evaluation at step 3: accuracy 0.500, larger 0.667, smaller 0.00, reward 0.500" in out.file.getvalue()
    print_kinds(out, Evaluation(metrics, found, np.ones(10, np.bool_)))
    assert "smaller" in out.file.getvalue().split("evaluation")[1]
    for few in (["a", "a"], [None, "a"], [str(n) for n in range(21)]):  # one kind or too many say nothing
        assert accuracy_by_kind(answered(few), np.ones(len(few), np.bool_)) == {}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path, rows = tmp_path / "questions.jsonl", []
    for number in range(6):
        options = {letter: f"drug {letter}{number}" for letter in ("ABC" if number in (3, 4) else "ABCD")}
        rows.append({"question": f"Case {number}?", "options": options, "answer": "AB"[number % 2]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def trainer(settings: Settings, questions: Path) -> GRPOTrainer:
    return GRPOTrainer(args=GRPOConfig(**settings, task="usmle:num_eval=5,wording=brief", dataset=str(questions)))


class Elsewhere:
    """A sampler that says nothing of letters, as servers and vLLM."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._own(*values, **named)


@pytest.mark.parametrize(("lead_in", "elsewhere"), [("", False), ("I say ", False), ("I say ", True)])
def test_letters_are_as_likely_as_the_plain_model_says(
    settings: Settings, questions: Path, lead_in: str, elsewhere: bool
) -> None:
    args = GRPOConfig(**settings, task="usmle:num_eval=5,wording=brief", dataset=str(questions))
    trainer = GRPOTrainer(args=args, sampler=(lambda _, own: Elsewhere(own)) if elsewhere else None)
    engine: Any = trainer.engine
    expected = [group.episodes[0].text for group in trainer.evaluation().rollout.groups]
    alone = engine.last_stats
    found = answer_choices(trainer, Fixed(True), name="fixed", rotations=0, lead_in=lead_in)
    assert found.texts == expected
    assert engine.last_stats.prefill_tokens == alone.prefill_tokens  # prompts are computed once for both
    assert (engine.last_stats.decoded_tokens > alone.decoded_tokens) is not elsewhere
    assert found.probabilities is not None
    for row, prompt in enumerate(trainer.eval_prompts):
        for column, letter in enumerate(found.letters):
            if letter not in prompt.columns["options"]:
                assert np.isnan(found.probabilities[row, column])
                continue
            tail = trainer.policy.tokenizer(lead_in + letter, add_special_tokens=False).input_ids
            ids = torch.tensor([[*prompt.token_ids.tolist(), *tail]])
            with torch.no_grad(), trainer.policy.held.plain() as plain:
                logp = plain(ids).logits.float().log_softmax(-1)[0]
            start = len(prompt.token_ids) - 1
            likely = sum(float(logp[start + place, token]) for place, token in enumerate(tail))
            assert np.log(found.probabilities[row, column]) == pytest.approx(likely, abs=1e-4)


class Fixed:
    """A task whose model always names the same option, or the same letter."""

    def __init__(self, by_option: bool) -> None:
        self._by_option = by_option
        self._task = get_task("usmle", path="unused")

    def rotated(self, row: dict[str, Any], shift: int) -> dict[str, Any]:
        return self._task.rotated(row, shift)  # type: ignore[attr-defined, no-any-return]

    def chosen(self, text: str, row: dict[str, Any]) -> str:
        if not self._by_option:
            return "B"
        return next(letter for letter, option in row["options"].items() if option.startswith("drug A"))


@pytest.mark.parametrize("by_option", [True, False])
def test_rotations_follow_the_option_not_the_letter(trainer: GRPOTrainer, by_option: bool) -> None:
    told: list[tuple[int, int]] = []
    found = answer_choices(trainer, Fixed(by_option), name="fixed", rotations=2, progress=lambda *x: told.append(x))
    assert isinstance(Fixed(True), ChoiceTask)
    assert found.chosen == (["A"] * 5 if by_option else ["B"] * 5)
    (meant, written), (meant_two, _) = found.rotated
    assert list(meant) == ["A"] * 5  # what stands under B after one turn was A
    assert list(written) == ["B"] * 5
    if by_option:
        assert list(meant_two) == ["A"] * 5
    assert (told[-1], [done for done, _ in told]) == ((15, 15), sorted(done for done, _ in told))
    with pytest.raises(ConfigError, match="rotations=3: questions with 3 options have 0 to 2"):
        answer_choices(trainer, Fixed(True), name="x", rotations=3)
    row = {"question": "Q?", "options": {"A": "a", "B": "b", "C": "c"}, "answer": "C", "uid": "u"}
    turned = get_task("usmle", path="unused", wording="brief").rotated(row, 1)  # type: ignore[attr-defined]
    assert (turned["options"], turned["answer"]) == ({"A": "c", "B": "a", "C": "b"}, "A")
    assert "A. c\nB. a\nC. b" in turned["prompt"][0]["content"]
    assert turned["uid"] == "u-rotated-1"


def test_the_command(settings: Settings, questions: Path, tmp_path: Path, covey: Command) -> None:
    done = covey.done
    run, recipe, report = tmp_path / "run", tmp_path / "recipe.toml", tmp_path / "report"
    recipe.write_text(GRPOConfig(**settings, task="usmle:num_eval=4", dataset=str(questions)).to_toml())
    done("train", recipe, f"run.output_dir={run}")
    out = done("eval", run, "--report", report, "--show", "1", "max_completion_length=4")
    for line in ("accuracy", "no letter found", "options rotated: the same option", "likeliest letter", "gained"):
        assert line in out
    found = json.loads((report / "report.json").read_text())
    assert (found["questions"], found["baseline"]["name"]) == (4, settings["model"])
    assert "Probability of the likeliest letter" in (report / "report.html").read_text()
    out = done("eval", run, "--baseline", "none", "--rotations", "0", "max_completion_length=4")
    assert "gained" not in out
    assert "rotated" not in out
    out = done("report", run, "-n", "1", "-o", tmp_path / "told.json")
    assert all(words in out for words in ("never right", "Medical Question: Case"))
    (told,) = json.loads((tmp_path / "told.json").read_text())["questions"]
    assert all(question["visits"] for question in told)
    status, _, err = covey("eval", settings["model"], "--task", "arithmetic", "--report", tmp_path / "other")
    assert (status, "only multiple-choice tasks" in err) == (2, True)
    none = ("max_completion_length=4", "data.dataset=none", "data.eval_dataset=none")
    out = done("eval", run, "--task", "arithmetic:num_eval=3", "--baseline", settings["model"], *none)
    assert "0 gained, 0 lost" in out

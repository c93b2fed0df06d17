"""Groups, dynamic sampling and batches, with a generator that answers what it is told."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from covey.algorithms import find_estimator
from covey.config.whole import GRPOConfig
from covey.rollout.batching import make_batch
from covey.rollout.collect import AnswerCollector, Rollout, collect_informative_groups, grow_groups, table_order
from covey.rollout.scoring import Scorer, has_text
from covey.training.evaluate import overlong
from covey.types import Completion, Episode, FinishReason, Group, Prompt, Request, SamplingSettings

TEACHES = find_estimator("grpo").teaches


def prompt(*ids: int) -> Prompt:
    return Prompt(np.array(ids), "?", {"answer": str(ids[0])}, uid=str(ids[0]))


def completion(tokens: int) -> Completion:
    reason: FinishReason = "stop" if tokens < 3 else "length"
    return Completion(np.full(tokens, 7), np.full(tokens, -0.5, np.float32), reason, 4)


def test_a_group_for_each_prompt_in_order() -> None:
    asked: list[tuple[int, ...]] = []

    def echo(requests: Sequence[Request], settings: SamplingSettings, **options: Any) -> list[Completion]:
        """As many tokens as the last entry of the request's stream, plus one."""
        assert options["policy_version"] == 4
        asked.extend(request.stream for request in requests)
        return [completion(request.stream[-1] + 1) for request in requests]

    scorer = Scorer(lambda completions: [float(len(text)) for text in completions])
    collect = AnswerCollector(echo, scorer, lambda ids: "x" * len(ids))
    how = {"num_generations": 3, "streams": [(5, 0, 0), (5, 0, 1)], "policy_version": 4}
    rollout = collect([prompt(1, 2), prompt(3)], SamplingSettings(), **how)
    assert asked == [(5, 0, row, sample) for row in range(2) for sample in range(3)]
    first, second = rollout.groups
    assert (first.rewards.tolist(), second.episodes[1].token_ids.tolist()) == ([1.0, 2.0, 3.0], [3, 7, 7])
    assert (second.episodes[1].sampled.tolist(), second.episodes[1].policy_version) == ([False, True, True], 4)
    assert rollout.sampled_tokens == 12


def group(rewards: list[float], lengths: list[int] | None = None) -> Group:
    sizes = lengths or [2] * len(rewards)
    episodes = tuple(Episode.from_completion(prompt(1, 2), completion(n), "x" * n) for n in sizes)
    values = np.array(rewards)
    return Group(prompt(1, 2), episodes, values, {"reward": values})


def batch_of(groups: list[Group], has_answer: Any = has_text, limit: int = 256, cache: int = 0, **changes: Any) -> Any:
    config = GRPOConfig(max_completion_length=limit, soft_overlong_cache=cache, **changes)
    return make_batch(groups, config, reward_weights=(1.0,), has_answer=has_answer)


def test_batch_by_hand() -> None:
    batch = batch_of([group([0, 1]), group([1, 1], [1, 3])], adv_parameters={"std_correction": 0})
    assert batch.group.tolist() == [0, 0, 1, 1]
    # mean 0.5, population std 0.5: (0 - 0.5) / 0.5 = -1; the second group is tied.
    np.testing.assert_allclose(batch.advantages, [[-1, -1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]], atol=1e-5)
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 1]]
    np.testing.assert_array_equal(batch.old_logprobs[3], [-0.5] * 3)


def test_masks_leave_their_reason_and_the_group_mean_and_validity_is_by_the_tasks_own_notion_of_an_answer() -> None:
    groups = [group([0, 1, 5], [2, 2, 3])]
    plain, masked = batch_of(groups), batch_of(groups, mask_truncated_completions=True)
    np.testing.assert_array_equal(plain.advantages, masked.advantages)  # the dropped one still counts in the mean
    assert masked.mask[2].sum() == 0
    assert masked.excluded["mask_truncated_completions"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert masked.mask[:2].tolist() == plain.mask[:2].tolist()
    batch = batch_of([group([0, 1], [2, 3])], validity_min_length=1, has_answer=lambda prompt, text: len(text) == 2)
    assert batch.mask.any(axis=1).tolist() == [True, False]
    # Limit 4, cache 2: lengths 2 and 3 are punished by 0 and -0.5, so equal rewards are no longer equal.
    batch = batch_of([group([1, 1], [2, 3])], cache=2, limit=4, scale_rewards="none")
    np.testing.assert_allclose(batch.advantages[:, 0], [0.25, -0.25])
    assert overlong(Rollout((group([1, 1], [2, 3]),), 0.0, 0.0, 5), 4, 2) == 0.25  # (0 + 0.5) / 2


def test_dynamic_sampling_refills_tied_groups_and_is_bounded() -> None:
    tied, mixed = group([1, 1]), group([0, 1])
    draws, asked = iter([[tied, mixed, tied], [tied, mixed], [mixed]]), []

    def draw(count: int) -> Rollout:
        asked.append(count)
        return Rollout(tuple(next(draws)), 1.0, 0.5, 10)

    rollout = collect_informative_groups(draw, 3, 3, TEACHES)
    assert (asked, rollout.groups, rollout.discarded) == ([3, 2, 1], (mixed, mixed, mixed), (tied, tied, tied))
    assert rollout.whole.groups == (mixed, mixed, mixed, tied, tied, tied)
    assert (rollout.sampling_seconds, rollout.scoring_seconds, rollout.sampled_tokens) == (3.0, 1.5, 30)
    for first in ([0, 1], [1, 1]):
        draws = [[group(first)], [group([1, 1])]]
        rollout = collect_informative_groups(lambda _, d=draws: Rollout(tuple(d.pop(0)), 0.0, 0.0, 0), 4, 2, TEACHES)
        # a partial batch; if all are tied, the last try's, for its rewards
        assert (len(rollout.groups), len(rollout.whole.groups)) == (1, 2)


def grown(first: list[Group], answers: list[list[Group]], most: int | None) -> tuple[Rollout, list[Any]]:
    """What becomes of the groups, and what was asked for."""
    asked = []

    def more(groups: Sequence[int], count: int, attempt: int) -> Rollout:
        asked.append((list(groups), count, attempt))
        return Rollout(tuple(answers.pop(0)), 1.0, 0.5, 10)

    return grow_groups(Rollout(tuple(first), 1.0, 0.5, 10), more, most, TEACHES), asked


def test_groups_grow_where_the_question_is_hard_and_unscorable_completions_do_not_count_as_tied() -> None:
    solved, mixed, hard, harder = group([1, 1]), group([0, 1]), group([0, 0]), group([0, 0])
    rollout, asked = grown([solved, hard, mixed, harder], [[group([0, 1]), group([0, 0])], [group([1])]], 5)
    assert asked == [([1, 3], 2, 1), ([3], 1, 2)]
    assert [each.rewards.tolist() for each in rollout.groups] == [[1, 1], [0, 0, 0, 1], [0, 1], [0, 0, 0, 0, 1]]
    assert [each.added for each in rollout.groups] == [0, 2, 0, 3]
    assert [each.rewards.tolist() for each in rollout.counted.groups] == [[1, 1], [0, 0], [0, 1], [0, 0]]
    assert all(len(each.episodes) == len(each.rewards) for each in (*rollout.groups, *rollout.counted.groups))
    assert (rollout.sampling_seconds, rollout.scoring_seconds, rollout.sampled_tokens) == (3.0, 1.5, 30)
    # scored in this order: four groups of two, two times two more, one more
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3), (3, 4)]
    listed = [(number, sample) for number, each in enumerate(rollout.groups) for sample in range(len(each.rewards))]
    assert [order[place] for place in table_order(rollout.groups)] == listed
    lists = ([np.nan, np.nan], [1, np.nan], [1, np.nan, 0])
    assert [group(rewards).is_tied for rewards in lists] == [True, True, False]


@pytest.mark.parametrize(
    ("first", "most"),
    [
        ([[0, 1], [0, 0]], None),
        ([[0, 1], [0, 0]], 2),
        ([[0, 0], [0, 0]], 8),  # nothing in the step is better
        ([[1, 1], [0, 1]], 8),  # nothing is worse
        ([[0, 1], [np.nan, np.nan]], 8),  # nothing is known
    ],
)
def test_other_groups_stay_as_they_are(first: list[list[float]], most: int | None) -> None:
    groups = [group(rewards) for rewards in first]
    rollout, asked = grown(groups, [], most)
    assert asked == []
    assert list(rollout.groups) == groups == list(rollout.counted.groups)
    assert table_order(groups) == [0, 1, 2, 3]

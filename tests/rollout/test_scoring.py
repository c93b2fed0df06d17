"""Reward functions of every kind, well-behaved and not."""

import asyncio
import functools
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.errors import ConfigError, RewardError
from covey.rewards import Verifier, numeric_match
from covey.rollout.scoring import Scorer
from fakes import fake_episode, fake_prompt, raises

TESTS = Path(__file__).parents[1]
NAN, INF = float("nan"), float("inf")
ONES: list[Any] = [[1, True], (1.0, np.bool_(True)), np.ones(2, np.float32), [np.float64(1), np.int32(1)]]
ONES += [torch.ones(2, requires_grad=True), [torch.tensor(1.0, requires_grad=True), torch.tensor(True)]]
ONES += [{"a": 1, "b": 1}.values(), (1.0 for _ in range(2))]


def score(functions: Any, texts: list[str], prompts: Any = None, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    chosen = prompts or [fake_prompt(uid=f"row-{index}") for index in range(len(texts))]
    scorer = Scorer(functions, **settings)
    rewards, parts = scorer.score(chosen, [fake_episode(t, p) for t, p in zip(texts, chosen, strict=True)])
    scorer.close()
    assert rewards.dtype == np.float64
    assert all(values.dtype == np.float64 and values.shape == rewards.shape for values in parts.values())
    return rewards.tolist(), {name: values.tolist() for name, values in parts.items()}


def fails(words: str, functions: Any, *texts: str, **settings: Any) -> RewardError:
    """The error in which scoring ends."""
    with pytest.raises(RewardError, match=words) as caught:
        score(functions, list(texts or ["a"]), **settings)
    return caught.value


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def vowels(completions: list[str], **columns: Any) -> list[float | None]:
    return [float(sum(c in "aeiou" for c in text)) if text else None for text in completions]


def returning(value: Any) -> Callable[..., Any]:
    def reward(completions: list[str]) -> Any:
        return value

    return reward


def test_weighted_sum_by_hand_and_no_score_at_all_is_nan_and_warned_about_once(caplog: Any) -> None:
    rewards, parts = score([length, vowels], ["abe", "xyz"], weights=[0.5, 2.0])
    assert (parts, rewards) == ({"length": [3.0, 3.0], "vowels": [2.0, 0.0]}, [0.5 * 3 + 2 * 2, 0.5 * 3 + 2 * 0])
    scorer = Scorer([length, vowels], [0.5, -1.0])
    assert (scorer.names, scorer.weights.tolist()) == (("length", "vowels"), [0.5, -1.0])
    # None leaves a sample to the other functions
    rewards, parts = score([length, vowels], ["", "a"])
    assert rewards == [0.0, 2.0]
    np.testing.assert_array_equal(parts["vowels"], [np.nan, 1.0])
    scorer, prompts = Scorer(vowels), [fake_prompt(uid="row-a"), fake_prompt(uid="row-b")]
    rewards, _ = scorer.score(prompts, [fake_episode("a"), fake_episode("")])
    scorer.score(prompts, [fake_episode(""), fake_episode("")])
    np.testing.assert_array_equal(rewards, [1.0, np.nan])
    (message,) = caplog.messages
    assert all(words in message for words in ("sample 1 (row row-b)", "1 of 2"))


def test_functions_get_strings_or_messages_and_without_kwargs_only_what_they_name() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    chat = [{"role": "user", "content": "2+3?"}]
    prompts, scorer = [fake_prompt("2+3=", answer="5", level=1), fake_prompt(chat, answer="5")], Scorer(spy)
    scorer.trainer_state = "state"
    scorer.score(prompts, [fake_episode("a", prompts[0]), fake_episode("bc", prompts[1])])
    expected = {"prompts": ["2+3=", chat], "completions": ["a", [{"role": "assistant", "content": "bc"}]]}
    expected |= {"answer": ["5", "5"], "level": [1, None], "completion_ids": [[97], [98, 99]], "trainer_state": "state"}
    assert {name: seen[name] for name in expected} == expected

    def by_name(completions: list[str], answer: list[str], completion_ids: list[list[int]]) -> list[float]:
        rows = zip(completions, answer, completion_ids, strict=True)
        return [float(text == want) + len(ids) for text, want, ids in rows]

    def by_position(completions: list[str], prompts: list[str], /) -> list[float]:
        return [float(len(text) - len(prompt)) for text, prompt in zip(completions, prompts, strict=True)]

    prompts = [fake_prompt("ab", answer="x", other=1), fake_prompt("ab", answer="y", other=2)]
    _, parts = score([by_name, by_position], ["x", "abc"], prompts)
    assert parts == {"by_name": [2.0, 3.0], "by_position": [-1.0, 1.0]}


def test_an_argument_that_nobody_passes_is_found_before_training() -> None:
    def needs_solution(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    Scorer([needs_solution, numeric_match("label")]).check_columns(["solution", "label"])
    with pytest.raises(ConfigError, match=r"'needs_solution' needs the argument 'solution'.*columns: answer"):
        Scorer(needs_solution).check_columns(["answer"])
    with pytest.raises(ConfigError, match="'numeric_match' needs the argument 'label'"):
        Scorer(numeric_match("label")).check_columns(["answer"])
    scorer = Scorer(numeric_match("answer"))
    scorer.check_columns(["answer"])
    assert np.isnan(scorer.score([fake_prompt()], [fake_episode("5")])[0]).all()  # what a whole batch lacks is None


def test_no_function_can_change_what_the_next_one_sees() -> None:
    def vandal(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        prompts[0][0]["content"] = "changed"
        completions[0].append("changed")
        answer.clear()
        return [0.0]

    def reader(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        return [float((prompts[0][0]["content"], len(completions[0]), answer) == ("2+3?", 1, ["5"]))]

    prompt = fake_prompt([{"role": "user", "content": "2+3?"}], answer="5")
    _, parts = score([vandal, reader], ["5"], [prompt])
    assert (parts["reader"], prompt.content) == ([1.0], [{"role": "user", "content": "2+3?"}])


def test_verifiers_are_rewards_and_equal_names_get_distinct_keys() -> None:
    class Even(Verifier):
        def verify(self, prompt: str, completion: str) -> float:
            return float(int(completion) % 2 == 0)

    class DuckVerifier:
        def batch_verify(self, pairs: list[tuple[str, str]]) -> list[float]:
            return [float(prompt.endswith(completion)) for prompt, completion in pairs]

    rewards, parts = score([Even(), DuckVerifier()], ["4", "3"], [fake_prompt("1+3"), fake_prompt("1+3")])
    assert (parts, rewards) == ({"Even": [1.0, 0.0], "DuckVerifier": [0.0, 1.0]}, [1.0, 1.0])
    assert fails("'Even' failed for sample 1: ValueError: invalid literal", Even(), "4", "four").sample == 1
    other, length_2 = returning([1.0]), returning([2.0])
    other.__name__, length_2.__name__ = "length", "length_2"
    _, parts = score([length, other, length_2, lambda completions: [9], functools.partial(length)], ["abc"])
    assert parts == {"length": [3], "length_3": [1], "length_2": [2], "<lambda>": [9], "length_4": [3]}


async def slow_two(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [2.0 for _ in completions]


def test_async_functions_run_together_and_keep_their_order() -> None:
    class AsyncCallable:
        async def __call__(self, completions: list[str]) -> list[float]:
            return [3.0 for _ in completions]

    def sync_looking(completions: list[str], **columns: Any) -> Any:
        return slow_two(completions)

    meeting = asyncio.Barrier(2)  # one after the other they would never meet

    async def first(completions: list[str]) -> list[float]:
        await meeting.wait()
        await asyncio.sleep(0.02)
        return [1.0 for _ in completions]

    async def second(completions: list[str]) -> list[float]:
        await meeting.wait()
        return [2.0 for _ in completions]

    functions = [first, length, AsyncCallable(), sync_looking, second]
    rewards, parts = score(functions, ["abcd"], weights=[1, 10, 100, 1000, 10000], timeout=10)
    assert list(parts) == ["first", "length", "AsyncCallable", "sync_looking", "second"]
    assert rewards == [1 + 40 + 300 + 2000 + 20000]


def test_inside_a_running_event_loop_as_in_a_notebook_and_our_own_is_kept_between_calls() -> None:
    async def notebook_cell() -> list[float]:
        return score([slow_two, length], ["ab"])[0]

    assert asyncio.run(notebook_cell()) == [4.0]
    assert score([length, slow_two], []) == ([], {"length": [], "slow_two": []})
    loops = []

    async def remember(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0 for _ in completions]

    scorer = Scorer(remember)
    for call in range(3):
        scorer.score([fake_prompt()], [fake_episode("a")])
        if call >= 1:
            scorer.close()
    assert loops[0] is loops[1]
    assert loops[2] is not loops[0]


@pytest.mark.parametrize("value", ONES)
def test_what_counts_as_a_list_of_numbers(value: Any) -> None:
    assert score(returning(value), ["a", "b"])[0] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "message", "sample"),
    [
        (None, "returned nothing \\(None\\)", None),
        (0.5, "returned a float", None),
        ("ab", "returned a str", None),
        ({0: 1.0, 1: 1.0}, "returned a dict", None),
        ({0.0, 1.0}, "returned a set", None),
        (torch.tensor(1.0), "returned a Tensor", None),
        ([1.0], "returned 1 rewards for 2 completions", 1),
        ([1.0] * 3, "returned 3 \\(or more\\) rewards for 2", 2),
        (np.ones(5), "returned 5 \\(or more\\) rewards for 2", 2),
        (itertools.repeat(0.0), "returned 3 \\(or more\\) rewards for 2", 2),
        ([1.0, "1.0"], "returned '1.0' for sample 1 \\(row row-1\\): text", 1),
        ([NAN, 1.0], "returned nan for sample 0 .*: not finite", 0),
        ([1.0, -INF], "returned -inf for sample 1 .*: not finite", 1),
        ([1.0, np.float32("nan")], "for sample 1 .*: not finite", 1),
        ([1.0, [1.0]], "returned \\[1.0\\] for sample 1 .*: a list", 1),
        ([1.0, 1j], "for sample 1 .*: a complex", 1),
        ([10**400, 1.0], "for sample 0 .*: larger than", 0),
        (np.ones((2, 1)), "for sample 0 .*: an array of shape \\(1,\\)", 0),
        ([1.0, torch.ones(2)], "for sample 1 .*: an array of shape \\(2,\\)", 1),
        ([1.0, object()], "for sample 1 .*: a object", 1),
        ((float(text) for text in ("1", "one")), "failed for sample 1: ValueError: could not convert", 1),
    ],
)
def test_what_is_no_reward_is_named(value: Any, message: str, sample: int | None) -> None:
    error = fails(f"reward function 'reward' .*{message}", returning(value), "a", "b")
    assert (error.function, error.sample) == ("reward", sample)


def broken(completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("solution")


async def broken_async(completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("solution")


@pytest.mark.parametrize("function", [broken, broken_async])
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_an_exception_is_kept_and_its_function_named(function: Any, timeout: float | None) -> None:
    name = function.__name__
    error = fails(f"'{name}' failed: KeyError: 'solution'", [slow_two, function, length], timeout=timeout)
    assert isinstance(error.__cause__, KeyError)
    assert error.function == name


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_exit_from_a_reward_function_does_not_exit(timeout: float | None) -> None:
    def leaves(completions: list[str]) -> list[float]:
        sys.exit(3)

    async def leaves_late(completions: list[str]) -> list[float]:
        sys.exit(0)

    def leaves_amid(completions: list[str]) -> Iterator[float]:
        yield 1.0
        sys.exit()

    where = r"at \S*test_scoring\.py:\d+, in"
    fails(f"'leaves' failed: SystemExit: 3 {where} leaves", leaves, timeout=timeout)
    fails(f"'leaves_late' failed: SystemExit: 0 {where} leaves_late", leaves_late, timeout=timeout)
    words = f"'leaves_amid' failed for sample 1: SystemExit:  {where} leaves_amid"
    fails(words, leaves_amid, "a", "b", timeout=timeout)
    fails(r"for sample 0 .*: a Leaving", returning([type("Leaving", (), {"__float__": sys.exit})()]), timeout=timeout)


def test_exceptions_that_cannot_be_printed_or_are_too_long_and_the_first_function_in_order_is_blamed() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def mute(completions: list[str]) -> list[float]:
        raise MuteError

    def chatty(completions: list[str]) -> list[float]:
        raise ValueError("x" * 1_000_000)

    fails("MuteError: \\(its message cannot be shown\\)", mute)
    assert len(str(fails("1000000 characters", chatty))) < 1_000
    for wrong, advice in (
        (lambda completions: misspelt, "correct the name; "),  # type: ignore[name-defined]  # noqa: F821
        (lambda completions: [{"a": 1}["b"]], "a completion that lacks it .* return 0.0"),
        (lambda completions: completions[0][0]["content"], "a completion is a string: leave out"),
    ):
        fails(advice, wrong)

    async def late(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.05)
        raise ValueError("late")

    for _ in range(3):
        fails("'late' failed", [late, broken_async])


def test_a_hang_ends_in_an_error() -> None:
    def hangs(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(3)
        return [0.0]

    def hangs_while_read(completions: list[str], **columns: Any) -> Iterator[float]:
        time.sleep(3)
        yield 0.0

    async def hangs_async(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(3)
        return [0.0]

    async def refuses_to_be_cancelled(completions: list[str], **columns: Any) -> list[float]:
        for _ in range(30):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        return [0.0]

    for function in (hangs, hangs_while_read, hangs_async, refuses_to_be_cancelled):
        begin = time.perf_counter()
        fails(f"'{function.__name__}' did not return within .*=0.1 s", [length, function, slow_two], timeout=0.1)
        assert time.perf_counter() - begin < 2.5


def test_an_async_function_that_blocks_its_loop_ends_in_an_error_and_the_next_call_works() -> None:
    blocked = threading.Event()

    async def blocks(completions: list[str]) -> list[float]:
        if completions == ["block"]:
            blocked.wait(10)
        return [0.0 for _ in completions]

    scorer = Scorer(blocks, timeout=0.1)
    raises(RewardError, "'blocks' did not return within", scorer.score, [fake_prompt()], [fake_episode("block")])
    assert scorer.score([fake_prompt()], [fake_episode("a")])[0].tolist() == [0.0]
    blocked.set()
    scorer.close()


HUNG = """
import time
from covey.errors import RewardError
from covey.rollout.scoring import Scorer
from fakes import fake_episode, fake_prompt, raises
def hangs(completions):
    time.sleep(60)
try:
    Scorer(hangs, timeout=0.05).score([fake_prompt()], [fake_episode("a")])
except RewardError:
    print("error")
"""


def test_a_process_with_a_hung_reward_can_exit() -> None:
    assert subprocess.check_output([sys.executable, "-c", HUNG], cwd=TESTS, text=True, timeout=25).strip() == "error"


@pytest.mark.parametrize(
    ("functions", "settings", "message"),
    [
        ([], {}, "at least one reward function"),
        ([length], {"weights": [1.0, 2.0]}, "2 weights for 1 reward functions"),
        ([length], {"weights": [NAN]}, "not a finite number"),
        ([length], {"timeout": 0}, "reward_timeout=0"),
        (["some/reward-model"], {}, "'some/reward-model': a reward model is not called directly"),
        ([torch.nn.Linear(1, 1)], {}, "a reward model is not called directly"),
        ([3], {}, "a int cannot be called"),
    ],
)
def test_settings_that_cannot_work(functions: Any, settings: Any, message: str) -> None:
    raises(ConfigError, message, Scorer, functions, **settings)


def test_functions_can_log_any_number() -> None:
    """Sums that have no float, and infinities, end nothing; the record says null where there is no number."""
    cases = {(1e308, 1e308): 1e308, (-1.7e308, 1.7e308, -1.7e308): -1.7e308 / 3}
    cases |= {(INF, 1.0): INF, (INF, -INF): NAN, (NAN, 1.0): NAN}

    def reward(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("length", sum(map(len, completions)))
        log_extra("first", [text[0] for text in completions])
        for values in cases:
            for value in values:
                log_metric(str(values), value)
        return [0.0 for _ in completions]

    scorer = Scorer(reward)
    for texts in (["a", "bb"], ["ccc"]):
        scorer.score([fake_prompt() for _ in texts], [fake_episode(text) for text in texts])
    logged = scorer.take_logged()
    expected = {str(values): pytest.approx(mean, nan_ok=True) for values, mean in cases.items()}
    assert (logged.metrics, logged.columns) == ({"length": 3.0} | expected, {"first": ["a", "b", "c"]})
    assert scorer.take_logged().metrics == {}

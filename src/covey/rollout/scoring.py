"""Call reward functions on completions: numbers come out, or an error that names the culprit.

Functions have TRL's signature, `f(prompts, completions, **dataset_columns) -> list[float | None]`, sync or async, or
are verifiers (`batch_verify`). Synchronous functions run one after the other in the order given, asynchronous ones
concurrently after them; results are read in that order too, so they do not depend on what finishes first.

Limits: a time-out abandons the thread that a hung function runs in (a daemon: the process can still exit), it
cannot end it. Where C code holds the interpreter lock, such as a regular expression that backtracks for ever, the
process itself is ended by its overseer, which names the function. Untrusted *code* in completions is not what this
file protects from.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import ConfigError, RewardError
from covey.functions import later
from covey.rewards.extract import opened_tags
from covey.rewards.verifier import RewardFunction, as_pairs, reward_name
from covey.rollout.calls import (
    AsyncRunner,
    Failure,
    as_list,
    call_with_timeout,
    describe_error,
    is_async,
    read_rewards,
    shorten,
)
from covey.types import PICTURE_COLUMNS, BoolArray, Episode, FloatArray, Message, Prompt, equal_rewards

if TYPE_CHECKING:
    from covey.tasks import pictures
else:
    (pictures,) = later("covey.tasks", "pictures")

_log = logging.getLogger(__name__)

Rewards = NDArray[np.float64]
RewardLike = Any
"""A reward function or an object with `batch_verify`."""
HasAnswer = Callable[[Prompt, str], bool]
"""Does this completion of this prompt hold an answer at all, right or wrong?"""

VERDICT, _MOST_SAID = "verdict/", 20_000
"""How the columns begin in which rewards say something of each completion."""
PROVIDED = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra", "prompt_ends"}
"""Arguments that reward functions get besides columns."""
_NO_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids"})


@dataclass(frozen=True, slots=True, eq=False)
class RewardSpec:
    """One reward with its weight."""

    function: RewardFunction
    name: str
    weight: float
    accepts: frozenset[str] | None
    required: tuple[str, ...]
    positional: tuple[str, ...] = ()
    whole_batch: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What rewards found in some rows, and what they reported meanwhile."""

    parts: dict[str, Rewards]  # for each function's name its unweighted `[N]` rewards, NaN for None
    metrics: dict[str, list[float]]  # name -> values given to `log_metric`, in order
    columns: dict[str, list[Any]]  # name -> values given to `log_extra`, in order


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Rows that are to be scored: prompts, repeated within a group, episodes, and what functions see besides."""

    prompts: Sequence[Prompt]
    episodes: Sequence[Episode]
    completions: Sequence[Sequence[Message]] | None
    columns: tuple[str, ...]
    trainer_state: Any


Elsewhere = Callable[[Asked], Scored]
"""Scores rows in other processes."""


@dataclass(frozen=True, slots=True, eq=False)
class Logged:
    """What reward functions reported through `log_metric` and `log_extra` since it was last taken."""

    metrics: dict[str, float]
    columns: dict[str, list[Any]]

    def reordered(self, places: Sequence[int]) -> Logged:
        """With the entries of columns at these places, in this order; a column of another length stays as it is."""
        of = {name: values for name, values in self.columns.items() if len(values) == len(places)}
        return Logged(self.metrics, self.columns | {name: [v[n] for n in places] for name, v in of.items()})


class Scorer:
    """Scores episodes with one or several weighted reward functions.

    Args:
        reward_funcs: one reward or several: functions with TRL's signature, sync or async, or verifiers.
        weights: one for each reward; default 1.0 each.
        timeout: seconds that one call of one function may take. None waits for ever and calls synchronous
            functions in the caller's thread, which those that use signals need.
        judge: a function that says which completions are right (1 or 0), and is no reward.

    Attributes:
        specs, judge: the rewards with their unique names and weights, and the judge.
        trainer_state: passed on to functions that take `trainer_state`; the trainer sets it.
        runner: the event loop of asynchronous functions.
        elsewhere: who scores in place of this process, but for functions that need the whole batch; None = nobody.

    Raises `ConfigError`: no reward, something that cannot be called, or weights that do not fit.
    """

    def __init__(
        self,
        reward_funcs: RewardLike | Sequence[RewardLike],
        weights: Sequence[float] | None = None,
        *,
        timeout: float | None = None,
        judge: RewardLike | None = None,
    ) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if not functions:
            raise ConfigError("reward_funcs=[]: nothing to learn from; pass at least one reward function")
        if weights is None:
            weights = [1.0] * len(functions)
        if len(weights) != len(functions):
            raise ConfigError(
                f"reward_weights={list(weights)}: {len(weights)} weights for {len(functions)} reward "
                "functions; give one weight for each function, in the same order"
            )
        if bad := [weight for weight in weights if not math.isfinite(weight)]:
            raise ConfigError(f"reward_weights={list(weights)}: {bad[0]} is not a finite number; use one")
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"reward_timeout={timeout}: must be above 0 seconds; leave it out to wait for ever")
        names = _unique_names([reward_name(function) for function in functions])
        every = zip(functions, names, map(float, weights), strict=True)
        self.specs: tuple[RewardSpec, ...] = tuple(_describe(*each) for each in every)
        self.judge = None if judge is None else _describe(judge, reward_name(judge), 0.0)
        self.timeout = timeout
        self.trainer_state: Any = None
        self.runner = AsyncRunner()
        self.elsewhere: Elsewhere | None = None
        self._warned = False
        self._columns: dict[str, None] = {}  # an ordered set
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Unique names of the reward functions, in order."""
        return tuple(spec.name for spec in self.specs)

    @property
    def weights(self) -> NDArray[np.float64]:
        """`[F]` weights in the order of `names`."""
        return np.array([spec.weight for spec in self.specs], dtype=np.float64)

    def check_columns(self, columns: Iterable[str], fix: str = "rename one of the two, or give it a default") -> None:
        """Make sure before training that every argument that a function requires exists.

        Columns named here are passed to functions from now on, as None where a row lacks them.

        Args:
            columns: names of the dataset columns besides the prompt; where rows differ, of all of them.
            fix: what to do where one is missing.

        Raises `ConfigError`: a function requires an argument that is neither a column nor one that Covey passes.
        """
        self._columns |= dict.fromkeys(name for name in columns if name not in _NO_COLUMNS)
        present = self._columns
        for spec in filter(None, (*self.specs, self.judge)):
            for name in spec.required:
                if name not in present and name not in PROVIDED:
                    raise ConfigError(
                        f"reward function {spec.name!r} needs the argument {name!r}, which is not a column of "
                        f"the dataset (columns: {', '.join(sorted(present)) or 'none'}); {fix}"
                    )

    def score(
        self,
        prompts: Sequence[Prompt],
        episodes: Sequence[Episode],
        completions: Sequence[Sequence[Message]] | None = None,
    ) -> tuple[Rewards, dict[str, Rewards]]:
        """Score N episodes, each with the prompt it belongs to.

        Functions see `episode.text`: for a conversational prompt as `[{"role": "assistant", "content": text}]`, for a
        plain one as a string; every dataset column as a list of N (None where a row lacks it); `completion_ids` (the
        sampled token ids), `trainer_state`, `log_metric` and `log_extra` as in TRL. A function without `**kwargs` gets
        only what it names. Lists and messages are fresh for each function; column values are shared.

        Prompts are repeated within a group. Where there are `completions`, functions see them, the messages of each
        episode, in place of its text.

        Returns:
            `[N]` float64 weighted sums over the functions that scored the sample (NaN where none did), and
            for each function's name its unweighted `[N]` rewards (NaN for None).

        Raises:
            RewardError: a function raised, took longer than `timeout`, or returned something that is no
                reward.
            ConfigError: a function requires an argument that does not exist.
        """
        if len(prompts) != len(episodes):
            raise ValueError(f"{len(prompts)} prompts for {len(episodes)} episodes; pass one prompt for each episode")
        self.check_columns(name for prompt in prompts for name in prompt.columns)
        asked = Asked(prompts, episodes, completions, tuple(self._columns), self.trainer_state)
        here = [spec for spec in self.specs if self.elsewhere is None or spec.whole_batch]
        found = self._score(asked, here)
        if self.elsewhere is not None and len(here) < len(self.specs):
            there = self.elsewhere(asked)
            found |= there.parts
            for name, values in there.metrics.items():
                self._metrics.setdefault(name, []).extend(values)
            for name, values in there.columns.items():
                self._log_extra(name, values)
        parts = {name: found[name] for name in self.names}
        if opened := sum(map(bool, opened_tags({"prompt_ends": [prompt.end for prompt in prompts]}))):
            self._log_metric("prompts/opened_tag", opened / len(prompts))
        matrix_FN = np.stack([parts[name] for name in self.names]).reshape(len(self.specs), len(episodes))
        total = np.nansum(matrix_FN * self.weights[:, None], axis=0)
        rewards = np.where(np.isnan(matrix_FN).all(axis=0), np.nan, total)
        self._warn_unscored(rewards, prompts, episodes)
        return rewards, parts

    def judged(self, prompts: Sequence[Prompt], episodes: Sequence[Episode], by: Any = None) -> tuple[str, Rewards]:
        """Name of the judge, or of the reward `by`, and `[N]` what it gives N episodes. Raises as `score`."""
        spec = next((spec for spec in self.specs if spec.name == by), self.judge)
        assert spec is not None
        asked = Asked(prompts, episodes, None, tuple(self._columns), self.trainer_state)
        return spec.name, self._score(asked, [spec])[spec.name]

    def score_rows(self, asked: Asked) -> Scored:
        """Score rows in place of another process: its functions but for those that need the whole batch.

        Raises `RewardError, ConfigError`: as `score`.
        """
        self.check_columns(asked.columns)
        metrics, self._metrics = self._metrics, {}
        extras, self._extras = self._extras, {}
        try:
            parts = self._score(asked, [spec for spec in self.specs if not spec.whole_batch])
            return Scored(parts, self._metrics, self._extras)
        finally:
            self._metrics, self._extras = metrics, extras

    def _score(self, asked: Asked, specs: Sequence[RewardSpec]) -> dict[str, Rewards]:
        count, rows = len(asked.episodes), [prompt.uid for prompt in asked.prompts]
        shared: dict[str, Any] = {
            "prompt_ends": [prompt.end for prompt in asked.prompts],
            **{name: [prompt.columns.get(name) for prompt in asked.prompts] for name in self._columns},
            "trainer_state": asked.trainer_state,
            "log_metric": self._log_metric,
            "log_extra": self._log_extra,
        }
        results: dict[str, Rewards] = {}
        pending: list[tuple[RewardSpec, Awaitable[Any]]] = []
        try:
            # Asynchronous functions last: none is under way while a synchronous one may still fail.
            for spec in sorted(specs, key=lambda spec: is_async(spec.function)):
                positional, named = _arguments(spec, asked, shared)
                returned = self._listed(spec, count, partial(spec.function, *positional, **named))
                if inspect.isawaitable(returned):
                    pending.append((spec, returned))
                else:
                    results[spec.name] = read_rewards(spec.name, returned, rows)
        except BaseException:
            for _, awaitable in pending:
                if inspect.iscoroutine(awaitable):
                    awaitable.close()
            raise
        called = [f"reward function {spec.name!r}" for spec, _ in pending]
        outcomes = self.runner.run([awaitable for _, awaitable in pending], self.timeout, called)
        late = [bool(getattr(outcome, "at", "")) for outcome in outcomes]  # what blocks the others is told first
        for _, (spec, _), outcome in sorted(zip(late, pending, outcomes, strict=True), key=lambda each: not each[0]):
            values = partial(lambda found: found, self._unwrap(spec, outcome))
            results[spec.name] = read_rewards(spec.name, self._listed(spec, count, values), rows)
        return results

    def feedback(self, count: int) -> tuple[str | None, ...]:
        """What rewards said in words of the last `count` completions, each up to 20,000 characters; empty where none
        said anything.
        """
        said = [values[-count:] for name, values in self._extras.items() if name.startswith(VERDICT)]
        each = zip(*(values for values in said if len(values) == count), strict=True)
        texts = ("\n".join(str(word)[:_MOST_SAID] for word in words if word) for words in each)
        return tuple(text.encode("utf-8", "replace").decode() or None for text in texts)

    def take_logged(self) -> Logged:
        """What functions reported through `log_metric` and `log_extra`; afterwards it is forgotten."""
        # Divided first: a sum of huge ones has no float.
        metrics = {name: sum(one / len(values) for one in values) for name, values in sorted(self._metrics.items())}
        logged = Logged(metrics, self._extras)
        self._metrics, self._extras = {}, {}
        return logged

    @contextmanager
    def without_metrics(self) -> Iterator[None]:
        """What functions report through `log_metric` meanwhile is not kept."""
        kept = {name: list(values) for name, values in self._metrics.items()}
        try:
            yield
        finally:
            self._metrics = kept

    def close(self) -> None:
        """Stop the event loop of asynchronous rewards and who scores elsewhere. A later `score` starts them anew."""
        self.runner.close()
        getattr(self.elsewhere, "close", lambda: None)()

    def _listed(self, spec: RewardSpec, count: int, values: Callable[[], Any]) -> Any:
        name = f"reward function {spec.name!r}"
        return self._unwrap(spec, call_with_timeout(lambda: as_list(values(), count), self.timeout, name))

    def _unwrap(self, spec: RewardSpec, outcome: Any) -> Any:
        if not isinstance(outcome, Failure):
            return outcome
        error = outcome.error
        if error is None:
            raise RewardError(
                f"reward function {spec.name!r} did not return within reward_timeout={self.timeout} seconds"
                f"{outcome.at and f', and is{outcome.at}'}; make it faster, bound what it waits for, or raise "
                "rewards.reward_timeout",
                function=spec.name,
            )
        sample = error.sample if isinstance(error, RewardError) else None
        where = "" if sample is None else f" for sample {sample}"
        message = str(error) if isinstance(error, RewardError) else describe_error(error)
        said = f"reward function {spec.name!r} failed{where}: {message}; {_advice(error)}"
        raise RewardError(said, function=spec.name, sample=sample) from error

    def _warn_unscored(self, rewards: Rewards, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> None:
        unscored = np.flatnonzero(np.isnan(rewards)).tolist()
        if self._warned or not unscored:
            return
        self._warned = True
        first = unscored[0]
        which = (first, prompts[first].uid, shorten(episodes[first].text), len(unscored), len(rewards))
        _log.warning(
            "All reward functions returned None for the following kwargs: sample %d (row %s), completion %r. It "
            "teaches nothing (%d of %d in this call); at least one function should score every row",
            *which,
        )

    def _log_metric(self, name: str, value: float) -> None:
        self._metrics.setdefault(str(name), []).append(float(value))

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self._extras.setdefault(str(column), []).extend(values)


def _advice(error: BaseException) -> str:
    texts = [text for text in error.args if isinstance(text, str)]
    if isinstance(error, AttributeError | TypeError) and any("'list'" in text for text in texts):
        return (
            "where prompts are conversations a completion is a list of messages: take its text by "
            'completion[0]["content"]'
        )
    if isinstance(error, TypeError) and any("string indices" in text for text in texts):
        return "where prompts are plain text a completion is a string: leave out what takes it from a list of messages"
    if isinstance(error, NameError | ImportError | KeyError):
        return "correct the name; for a completion that lacks it the function should return 0.0"
    return "for a completion that it cannot judge it should return 0.0 or None instead of raising"


def _unique_names(names: Sequence[str]) -> list[str]:
    """`[f, g, f]` -> `[f, g, f_2]`, also when an `f_2` exists already."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _describe(function: RewardLike, name: str, weight: float) -> RewardSpec:
    whole_batch = bool(getattr(function, "whole_batch", getattr(getattr(function, "func", None), "whole_batch", False)))
    if not callable(function) and hasattr(function, "batch_verify"):
        verify = function.batch_verify
        function = lambda prompts, completions: verify(as_pairs(prompts, completions))  # noqa: E731
    if isinstance(function, str) or hasattr(function, "state_dict"):
        raise ConfigError(
            f"reward function {function!r:.300}: a reward model is not called directly; wrap it in a "
            "function f(prompts, completions, **columns) that returns one number for each completion; functions are "
            "passed themselves, or all of them by name (FILE.py:FUNCTION)"
        )
    if not callable(function):
        raise ConfigError(
            f"reward function {function!r}: a {type(function).__name__} cannot be called; pass a function "
            "f(prompts, completions, **columns), or an object with batch_verify"
        )
    declared = tuple(getattr(function, "required_columns", ()))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some C functions have no signature
        return RewardSpec(function, name, weight, None, declared, whole_batch=whole_batch)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    accepts = None if takes_any else frozenset(parameter.name for parameter in named)
    positional = tuple(parameter.name for parameter in named if parameter.kind is parameter.POSITIONAL_ONLY)
    return RewardSpec(
        function, name, weight, accepts, tuple(dict.fromkeys(required + declared)), positional, whole_batch
    )


def _arguments(spec: RewardSpec, asked: Asked, shared: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What this function is called with. Fresh lists: no function changes what the next one sees."""
    opened = cache(lambda picture: picture.open())
    told = (message.get("content") for each in asked.completions or () for message in each)
    seen = any(prompt.has_pictures for prompt in asked.prompts) or any(isinstance(each, list) for each in told)
    contents = [pictures.with_pictures(p.content, opened) if seen else _copied(p.content) for p in asked.prompts]
    completions: list[str | list[Message]] = [
        episode.text if isinstance(prompt.content, str) else [{"role": "assistant", "content": episode.text}]
        for prompt, episode in zip(asked.prompts, asked.episodes, strict=True)
    ]
    if asked.completions is not None:
        completions = [pictures.with_pictures(e, opened) if seen else _copied(list(e)) for e in asked.completions]
    named = {name: list(value) if isinstance(value, list) else value for name, value in shared.items()}
    if seen:
        named |= {name: pictures.with_pictures(shared[name], opened) for name in PICTURE_COLUMNS if name in shared}
    named |= {"prompts": contents, "completions": completions}
    if spec.accepts is None or "completion_ids" in spec.accepts:
        named["completion_ids"] = [episode.token_ids[episode.sampled].tolist() for episode in asked.episodes]
    if spec.accepts is not None:
        named = {name: value for name, value in named.items() if name in spec.accepts}
    given = takewhile(named.__contains__, spec.positional)
    return [named.pop(name) for name in given], named


def _copied(content: str | list[Message]) -> str | list[Message]:
    return content if isinstance(content, str) else [dict(message) for message in content]


IsCorrect = Callable[[Prompt, str], bool] | str | Scorer
"""The definition of `accuracy`: does this completion solve this prompt? Or, for `rewards.correctness`, the name of the
reward that says so by 0 or 1, or the scorer whose judge does.
"""


def has_text(prompt: Prompt, text: str) -> bool:
    """True unless the completion is empty: the rule where no task says more."""
    return bool(text.strip())


def right_by(name: str, rewards: FloatArray) -> BoolArray:
    """`[N]` 1 is right; 0, and None for what cannot be judged, is not. Raises `RewardError`: another number."""
    right = np.asarray(equal_rewards(rewards, 1.0))
    odd = rewards[~(np.isnan(rewards) | (rewards == 0.0) | right)]
    if len(odd):
        raise RewardError(
            f"rewards.correctness={name!r}: it gave {odd[0]:g}, and what says whether a completion is right gives 0 "
            "or 1 (None: cannot tell); name a function that does, which need not be a reward (FILE.py:FUNCTION, in "
            "Python GRPOTrainer(correctness=...)), or leave rewards.correctness out",
            function=name,
        )
    return right

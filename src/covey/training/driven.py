"""Episodes of a world whose programs drive the model: their requests are its turns, their traces are checked.

    driver --requests of its programs--> the agents' loop, one turn each --> answers
           --an episode is over: token ids, which of them were sampled, reward--> `trajectory_of`

A trace says which tokens were sampled. They are trained on only where this process has sampled just these tokens after
just those before them; log-probabilities are the engine's own, whatever the trace says.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from covey.config.whole import GRPOConfig
from covey.environments.base import Observation, Outcome
from covey.environments.verifiers import Asked, Driver, Told, Verifiers
from covey.errors import ConfigError, EpisodeError
from covey.rollout.agents import LiveEpisode, Player, joined
from covey.rollout.collect import Decode
from covey.rollout.learning import TrainedPolicy
from covey.rollout.turns import TurnGenerator
from covey.serving.generate import GenerateRequest, generated
from covey.serving.requests import CompletionRequest, RequestError, checked
from covey.types import Completion, Episode, IntArray, Prompt, SamplingSettings, Trajectory, Turn

log = logging.getLogger(__name__)

_LATE_SECONDS = 10.0
"""After the time limit of an episode: a driver that has not ended it by then is killed."""
_FOR_WORLDS = (
    *("max_turns", "history_length", "action_format", "show_actions", "invalid_action_penalty"),
    *("failed_episodes", "max_observation_tokens", "step_seconds"),
)


def check(config: GRPOConfig) -> None:
    """Raise a `ConfigError` where a setting is for worlds that wait for actions."""
    for name in _FOR_WORLDS:
        if getattr(config.environment, name) != type(config.environment).model_fields[name].default:
            raise ConfigError(f"environment.{name}: a taskset of verifiers decides that itself; remove it")
    if config.data.system_prompt is not None:
        raise ConfigError("data.system_prompt: each task of verifiers has its own; remove it")
    if config.distributed.learners > 1:
        raise ConfigError(f"distributed.learners={config.distributed.learners}: with verifiers one learns; set it to 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question(Observation):
    """A request of a program, which the policy answers with a turn."""

    number: int  # of the request
    ids: IntArray
    settings: SamplingSettings


@dataclass(slots=True, eq=False)
class _Program:
    """What plays an episode, and what was sampled for it."""

    number: int  # of the episode, of all that this trainer has begun; its requests have it as their seed
    live: LiveEpisode
    until: float
    waited_for: bool = True
    questions: deque[_Question] = field(default_factory=deque)  # not answered yet
    sampled: list[tuple[IntArray, Completion]] = field(default_factory=list)
    found: Trajectory | EpisodeError | None = None

    def heard(self) -> Observation | Outcome | EpisodeError:
        """Its next question, or how it has ended."""
        if isinstance(self.found, EpisodeError):
            return self.found
        seen = self.questions[0] if self.found is None else Observation("")
        return Outcome(seen, done=self.found is not None) if self.sampled else seen


class ProgramPlayer(Player):
    """Lets programs play: they ask for turns."""

    waits_for_all = False  # a program may hang

    def __init__(
        self, config: GRPOConfig, world: Verifiers, policy: TrainedPolicy, context_length: int, decode: Decode
    ) -> None:
        chosen = config.environment
        none: Any = None  # no pool, and programs write their prompts
        self._context_length = min(chosen.max_conversation_tokens, context_length)
        limits = {"max_conversation_tokens": self._context_length, "history_length": 0}  # each turn has its own prompt
        super().__init__(none, none, decode, policy.tokenizer, chosen.model_copy(update=limits))
        self._world, self._vocabulary = world, policy.vocabulary
        kwargs = config.data.chat_template_kwargs
        self._template_kwargs = {"chat_template_kwargs": dict(kwargs)} if kwargs else {}
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._driver: Driver | None = self._started()
        self._programs: dict[int, _Program] = {}  # by place
        self._numbers, self._branched = count(), False

    def play(
        self, tasks: Sequence[Prompt], generator: TurnGenerator, sampling: SamplingSettings, **how: Any
    ) -> list[list[Trajectory]]:
        """See `Player.play`; of a failed episode nothing is kept.

        Raises `DataError`: the taskset cannot be loaded again after its process has ended.
        """
        self._sampling, self._played = sampling, dict[int, Trajectory]()
        try:
            groups = super().play(tasks, generator, sampling, **how)
        except BaseException:
            self.close()
            raise
        finally:
            self._programs = {}
        numbers = count()
        found = [[self._played.get(next(numbers)) or _failed(one) for one in group] for group in groups]
        if not self._branched and any(len(one.episodes) > 1 for group in found for one in group):
            self._branched = True
            log.warning("an episode has several sequences: its history was rewritten between turns (agent/branches)")
        return found

    def prepare(self, *tasks: Any, **how: Any) -> None:
        """Nothing to prepare: episodes begin with a request."""

    def close(self) -> None:
        """End the driver and all that it has started; it starts anew when it is needed."""
        self._lose()

    def _started(self) -> Driver:
        driver = self._world.driver(self._heard.put)
        self._tokenizer.save_pretrained(driver.folder)
        return driver

    @property
    def places(self) -> int:
        return self.settings.parallel_episodes

    def begin(self, live: LiveEpisode) -> None:
        """Let the driver begin an episode."""
        self._driver = self._driver or self._started()
        number, task, own = next(self._numbers), live.prompt.columns, self._sampling
        sampling: dict[str, Any] = {"seed": number, "temperature": own.temperature, "max_tokens": own.max_tokens}
        sampling |= (own.cut if own.cuts else {}) | self._template_kwargs
        self._driver.send(
            {
                **{"id": number, "set": task["set"], "task": task["number"], "key": task["uid"]},
                **{"context_length": self._context_length, "tokenizer": self._driver.folder},
                **{"renderer": self._world.renderer, "sampling": sampling},
            }
        )
        until = time.monotonic() + 2 * self._world.seconds + _LATE_SECONDS
        self._programs[live.place] = _Program(number, live, until)

    def opening(self, live: LiveEpisode, history: int = 0) -> IntArray:
        return live.seen.ids if isinstance(live.seen, _Question) else np.zeros(0, np.int64)

    def settings_of(self, live: LiveEpisode) -> SamplingSettings | None:
        return live.seen.settings if isinstance(live.seen, _Question) else None

    def read(self, live: LiveEpisode, completion: Completion) -> str:
        """Answer the program that has asked."""
        program = self._programs[live.place]
        program.waited_for = True
        question = program.questions.popleft()
        program.sampled.append((question.ids, completion))
        self._answer(question.number, 200, generated([completion], len(question.ids)))
        return ""

    def act(self, live: LiveEpisode) -> None:
        """Nothing: `read` has answered the program."""

    def wait(self, seconds: float | None) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        while not found and any(program.waited_for for program in self._programs.values()):
            self._hear(0.5 if seconds is None else seconds)
            for place, program in list(self._programs.items()):
                if program.waited_for and (program.questions or program.found):
                    program.waited_for = False
                    found.append((place, program.heard()))
                    if program.found is not None:
                        del self._programs[place]
            if seconds is not None:
                break
        return found

    def _hear(self, seconds: float) -> None:
        """Take in what has been said, after waiting for it so long; end what is late."""
        with suppress(queue.Empty):
            self._take_in(self._heard.get(timeout=seconds))
            while True:
                self._take_in(self._heard.get_nowait())
        if any(program.until < time.monotonic() for program in self._programs.values()):
            self._lose(at_once=True)
            late = f"{_LATE_SECONDS:g} s after twice its limit of {self._world.seconds:g} s"
            self._end_all(f"an episode of verifiers had not ended {late}; all were ended")

    def _take_in(self, said: Any) -> None:
        driver, told = said
        if driver is self._driver:  # not one that was ended
            if told is None:
                self._end_all(f"the process of verifiers ended: {self._lose()}")
            elif isinstance(told, Asked):
                try:
                    self._ask(told)
                except RequestError as error:
                    self._answer(told.ask, 400, {"error": {"message": str(error)}})
            elif program := self._program(told.id):
                try:
                    found = trajectory_of(told, program.sampled, self._decode, self._world.success)
                    self._played[program.live.number] = program.found = found
                except EpisodeError as error:
                    program.found = error

    def _program(self, number: int | None) -> _Program | None:
        """The one that plays an episode which is not over."""
        own = (one for one in self._programs.values() if one.number == number and one.found is None)
        return next(own, None)

    def _ask(self, asked: Asked) -> None:
        request = checked(GenerateRequest, asked.body, GenerateRequest.model_fields.keys())
        wanted = request.completion(self._context_length)
        program, ids = self._program(wanted.seed), np.array(wanted.prompt, np.int64)
        if program is None:
            raise RequestError(f"seed={wanted.seed}: no such episode is being played")
        if ids.max() >= self._vocabulary:
            raise RequestError(f"token id {ids.max()}: the vocabulary has {self._vocabulary}")
        if len(ids) >= self._context_length:
            most = f"environment.max_conversation_tokens={self._context_length}"
            raise RequestError(f"the prompt has {len(ids)} tokens; {most} leaves no room for an answer")
        program.questions.append(_Question(text="", number=asked.ask, ids=ids, settings=self._settings_for(wanted)))

    def _answer(self, number: int, status: int, body: dict[str, Any]) -> None:
        """Tell a program what it has asked; one that has ended hears nothing."""
        if self._driver is not None:
            self._driver.send({"answer": number, "status": status, "body": body})

    def _settings_for(self, wanted: CompletionRequest) -> SamplingSettings:
        """The run's, with the request's limits. Raises `RequestError`: it wants another distribution."""
        own = self._sampling
        for name, value in {"temperature": own.temperature, **own.cut}.items():
            if name in wanted.model_fields_set and getattr(wanted, name) != value:
                raise RequestError(f"{name}={getattr(wanted, name)}: this run samples with {value}; leave it out")
        if wanted.n != 1 or wanted.stop or wanted.ignore_eos or wanted.choices or wanted.json_schema():
            raise RequestError("n, stop, ignore_eos, choices and response_format are not served in training")
        ends = own.eos_token_ids if wanted.stop_token_ids is None else tuple(wanted.stop_token_ids)
        return replace(own, max_tokens=min(own.max_tokens, wanted.max_tokens), eos_token_ids=ends)

    def _lose(self, *, at_once: bool = False) -> str:
        """End the driver, and return its last words."""
        driver, self._driver = self._driver, None
        if driver is None:
            return ""
        driver.end(at_once=at_once)
        return driver.last_words()

    def _end_all(self, why: str) -> None:
        for program in self._programs.values():
            program.found = program.found or EpisodeError(why)


def _failed(played: Trajectory) -> Trajectory:
    return Trajectory((), (), False, "failed", played.error or "there is no memory for its prompt")


def trajectory_of(
    told: Told, sampled: Sequence[tuple[IntArray, Completion]], decode: Decode, success: float
) -> Trajectory:
    """What an episode's trace and what was sampled for it make together.

    Args:
        told: the trace: for each branch its token ids and which of them were sampled.
        sampled: the prompts and completions of the episode's requests.
        decode: token ids -> text.
        success: the reward from which on it counts as a success.

    Raises `EpisodeError`: it failed, it is not to be trained on, its reward is no finite number, or a branch has other
    tokens than were sampled. What two branches begin with is trained on once, in the first.
    """
    if not told.ok or not told.trainable:
        raise EpisodeError("; ".join(told.errors)[:1000] or ("its trace is not trainable" if told.ok else "it failed"))
    if not abs(told.reward) <= 1e30:  # NaN is not
        raise EpisodeError(f"its reward is {told.reward}; it must be a finite number, of 1e30 at most")
    known = {(ids.tobytes(), completion.token_ids.tobytes()): completion for ids, completion in sampled}
    episodes: list[Episode] = []
    turns: list[Turn] = []
    taken = set[tuple[bytes, bytes]]()
    for number, (listed, mask) in enumerate(told.branches):
        ids, own = np.array(listed, np.int64), np.array(mask, np.bool_)
        if len(ids) != len(own):
            raise EpisodeError(f"branch {number}: {len(ids)} token ids, and {len(own)} entries of its mask")
        edges = np.flatnonzero(np.diff(np.concatenate([[False], own, [False]]).astype(np.int8)))
        parts, before, segment = [], 0, 0
        for begin, end in edges.reshape(-1, 2).tolist():
            key = (ids[:begin].tobytes(), ids[begin:end].tobytes())
            if key not in known:
                raise EpisodeError(
                    f"branch {number}: its tokens {begin} to {end} are not what was sampled after the others"
                )
            if key in taken:
                own[begin:end] = False
                continue
            taken.add(key)
            parts.append(known[key])
            said = decode(listed[begin:end])
            turns.append(Turn(decode(listed[before:begin]), said, said, 0.0, True, len(episodes), segment))
            before, segment = end, segment + 1
        if parts:
            episodes.append(_episode(ids, own, parts, "\n".join(turn.said for turn in turns[-segment:])))
    if not turns:
        raise EpisodeError("it ended without a turn")
    turns[-1] = replace(turns[-1], reward=told.reward)
    stop = told.stop or ""
    ended: Any = "turns" if stop == "max_turns" else "context" if stop.startswith("max_") else "done"
    return Trajectory(tuple(episodes), tuple(turns), told.reward >= success, ended)


def _episode(ids: IntArray, sampled: Any, parts: Sequence[Completion], text: str) -> Episode:
    last = int(np.flatnonzero(sampled)[-1]) + 1
    logprobs = np.zeros(last, np.float32)
    logprobs[sampled[:last]] = np.concatenate([part.logprobs for part in parts])
    support = joined([part.support for part in parts if part.support is not None])
    version = min(part.policy_version for part in parts)
    return Episode(ids[:last], sampled[:last], logprobs, text, parts[-1].finish_reason, version, support)

"""Episodes of a world whose programs drive the model: their requests are sampled together, their traces are checked.

    driver --requests of its programs--> endpoint --> engine session --> answers
           --an episode is over: token ids, which of them were sampled, reward--> `trajectory_of` --> groups

A trace says which tokens were sampled. They are trained on only where this process has sampled just these tokens after
just those before them; log-probabilities are the engine's own, whatever the trace says.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from covey.config.whole import GRPOConfig
from covey.environments.verifiers import Driver, Told, Verifiers
from covey.errors import ConfigError, EpisodeError, GenerationError
from covey.rollout.agents import PlayStats
from covey.rollout.batching import trajectory_rewards
from covey.rollout.collect import Decode, Rollout
from covey.rollout.learning import Sampler, TrainedPolicy
from covey.rollout.turns import Session
from covey.serving.endpoint import Asked, Endpoint
from covey.serving.generate import generated
from covey.serving.requests import RequestError
from covey.types import (
    Completion,
    Episode,
    Group,
    IntArray,
    Progress,
    Prompt,
    Request,
    SamplingSettings,
    Support,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)

_LATE_SECONDS = 10.0
"""After the time limit of an episode: a driver that has not ended it by then is killed."""
_FOR_WORLDS = (
    *("max_turns", "history_length", "action_format", "show_actions", "invalid_action_penalty"),
    *("failed_episodes", "max_observation_tokens", "step_seconds"),
)


@dataclass(slots=True, eq=False)
class _Live:
    """An episode under way, and what was sampled for it."""

    number: int
    prompt: Prompt
    stream: tuple[int, ...]
    until: float = 0.0
    sampled: list[tuple[IntArray, Completion]] = field(default_factory=list)
    turns: int = 0


class DrivenCollector:
    """Lets the programs of a world play; a `covey.rollout.collect.Collector`.

    Raises `ConfigError`: a setting is for worlds that wait for actions.
    """

    def __init__(
        self, config: GRPOConfig, world: Verifiers, policy: TrainedPolicy, engine: Sampler, decode: Decode
    ) -> None:
        chosen = config.environment
        for name in _FOR_WORLDS:
            if name in chosen.model_fields_set:
                raise ConfigError(f"environment.{name}: a taskset of verifiers decides that itself; remove it")
        if config.data.system_prompt is not None:
            raise ConfigError("data.system_prompt: each task of verifiers has its own; remove it")
        if config.distributed.learners > 1:
            raise ConfigError(
                f"distributed.learners={config.distributed.learners}: with verifiers one learns; set it to 1"
            )
        self.world, self.engine, self.decode, self.settings = world, engine, decode, chosen
        self.vocabulary, self._tokenizer = policy.vocabulary, policy.tokenizer
        self.context_length = min(chosen.max_conversation_tokens, engine.context_length)
        kwargs = config.data.chat_template_kwargs
        self._template = {"chat_template_kwargs": dict(kwargs)} if kwargs else {}
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.driver: Driver | None = None
        self._endpoint: Endpoint | None = None
        self._count, self._branched = 0, False

    def __call__(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        *,
        num_generations: int,
        streams: Sequence[tuple[int, ...]],
        policy_version: int,
        progress: Progress | None = None,
    ) -> Rollout:
        """Play `num_generations` episodes of each task; the arguments are those of `collect_groups`.

        Raises `GenerationError`: from the engine; `EpisodeError`: not a single episode of the step was played to its
        end; `DataError`: the taskset cannot be loaded again after its process has ended.
        """
        began = time.perf_counter()
        lives = [
            _Live(self._count + index * num_generations + sample, prompt, (*stream, sample))
            for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
            for sample in range(num_generations)
        ]
        self._count += len(lives)
        play = _Play(self, lives, settings, policy_version)
        try:
            played = play.run(progress)
        except BaseException:
            self.close()
            raise
        finally:
            play.refuse_all()
        if not any(trajectory.episodes for trajectory in played):
            raise EpisodeError(f"no episode of verifiers was played to its end; the first one: {played[0].error}")
        if not self._branched and any(len(trajectory.episodes) > 1 for trajectory in played):
            self._branched = True
            log.warning("an episode has several sequences: its history was rewritten between turns (agent/branches)")
        groups = []
        for index, prompt in enumerate(prompts):
            own = tuple(played[index * num_generations : (index + 1) * num_generations])
            episodes = tuple(chain.from_iterable(trajectory.episodes for trajectory in own))
            groups.append(Group(prompt, episodes, trajectory_rewards(own, self.settings), trajectories=own))
        tokens = sum(len(completion.token_ids) for live in lives for _, completion in live.sampled)
        play.stats.seconds = time.perf_counter() - began
        return Rollout(tuple(groups), play.stats.seconds, 0.0, tokens, played=play.stats)

    def prepare(self, prompts: Sequence[Prompt], *, num_generations: int, streams: Sequence[tuple[int, ...]]) -> None:
        """Nothing to prepare: episodes begin with a request."""

    def close(self) -> None:
        """End the driver and all that it has started; it starts anew when it is needed."""
        self.lose()
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = None

    def lose(self, *, at_once: bool = False) -> str:
        """End the driver, and return its last words."""
        driver, self.driver = self.driver, None
        if driver is None:
            return ""
        driver.end(at_once=at_once)
        return driver.last_words()

    def begin(self, live: _Live, settings: SamplingSettings) -> None:
        """Let the driver begin an episode."""
        if self._endpoint is None:
            self._endpoint = Endpoint(self.heard.put, context_length=self.context_length)
        if self.driver is None:
            self.driver = self.world.driver(self.heard.put)
            self._tokenizer.save_pretrained(self.driver.folder)
        task, cut = live.prompt.columns, settings.cut if settings.cuts else {}
        sampling = {"seed": live.number, "temperature": settings.temperature, "max_tokens": settings.max_tokens} | cut
        self.driver.send(
            {
                **{"id": live.number, "set": task["set"], "task": task["number"], "key": task["uid"]},
                **{"url": self._endpoint.url, "token": self._endpoint.token, "tokenizer": self.driver.folder},
                **{"renderer": self.world.renderer, "sampling": sampling | self._template},
            }
        )
        live.until = time.monotonic() + 2 * self.world.seconds + _LATE_SECONDS


class _Play:
    """All episodes of one call, to their ends."""

    def __init__(
        self, collector: DrivenCollector, lives: Sequence[_Live], settings: SamplingSettings, version: int
    ) -> None:
        self._all, self._settings, self._version = collector, settings, version
        self._order, self._waiting = [live.number for live in lives], deque(lives)
        self._live: dict[int, _Live] = {}
        self._rows: dict[int, tuple[Any, _Live, Asked, IntArray]] = {}
        self._done: dict[int, Trajectory] = {}
        self._session: Session[Any] | None = None
        self._places = min(collector.settings.parallel_episodes, len(lives))
        self.stats = PlayStats()

    def run(self, progress: Progress | None) -> list[Trajectory]:
        """The trajectories, in the order of the episodes."""
        while len(self._done) < len(self._order):
            before = len(self._done)
            while self._waiting and len(self._live) < self._places:
                live = self._waiting.popleft()
                self._live[live.number] = live
                self._all.begin(live, self._settings)
            self._hear()
            if self._session is not None and self._session.busy:
                for row in self._session.advance():
                    self._answer(row)
            self._end_late()
            if progress is not None and len(self._done) > before:
                progress(len(self._done), len(self._order))
        return [self._done[number] for number in self._order]

    def refuse_all(self) -> None:
        """Nobody samples any more: refuse what waits."""
        self._forget(self._live.values())
        while not self._all.heard.empty():
            said = self._all.heard.get()
            if isinstance(said, Asked):
                said.answer.set_exception(RequestError("nothing is sampled now"))

    def _hear(self) -> None:
        """Take in what has been said; where there is nothing to sample, wait for it for a moment."""
        idle = self._session is None or not self._session.busy
        said = self._next(0.5 if idle else 0.0)
        while said is not None:
            if isinstance(said, Asked):
                self._start(said)
            elif said[0] is self._all.driver:  # not one that was ended
                self._take_in(said[1])
            said = self._next(0.0)

    def _next(self, seconds: float) -> Any:
        began = time.perf_counter()
        try:
            return self._all.heard.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            self.stats.waiting_seconds += time.perf_counter() - began if seconds else 0.0

    def _start(self, asked: Asked) -> None:
        session, seed, ids = self._opened(), asked.request.seed, np.array(asked.request.prompt, np.int64)
        try:
            if seed is None or (live := self._live.get(seed)) is None:
                raise RequestError(f"seed={seed}: no such episode is being played")
            settings = self._settings_of(asked)
            if ids.max() >= self._all.vocabulary:
                raise RequestError(f"token id {ids.max()}: the vocabulary has {self._all.vocabulary}")
            if len(ids) >= self._all.context_length or not session.has_room_for(len(ids)):
                most = f"environment.max_conversation_tokens={self._all.settings.max_conversation_tokens}"
                raise RequestError(f"the prompt has {len(ids)} tokens; {most} leaves no room for an answer")
            row = session.start(Request(ids, (*live.stream, live.turns)), settings=settings)
        except (RequestError, GenerationError) as error:
            asked.answer.set_exception(error if isinstance(error, RequestError) else RequestError(str(error)))
            return
        live.turns += 1
        self._rows[id(row)] = (row, live, asked, ids)

    def _settings_of(self, asked: Asked) -> SamplingSettings:
        """The run's, with the request's limits. Raises `RequestError`: it wants another distribution."""
        own, wanted = self._settings, asked.request
        for name, value in {"temperature": own.temperature, **own.cut}.items():
            if name in wanted.model_fields_set and getattr(wanted, name) != value:
                raise RequestError(f"{name}={getattr(wanted, name)}: this run samples with {value}; leave it out")
        if wanted.n != 1 or wanted.stop or wanted.ignore_eos or wanted.choices or wanted.json_schema():
            raise RequestError("n, stop, ignore_eos, choices and response_format are not served in training")
        ends = own.eos_token_ids if wanted.stop_token_ids is None else tuple(wanted.stop_token_ids)
        return replace(own, max_tokens=min(own.max_tokens, wanted.max_tokens), eos_token_ids=ends)

    def _opened(self) -> Session[Any]:
        if self._session is None:
            lengths = [self._all.context_length - 1] * self._places
            self._session = self._all.engine.session(
                self._settings,
                policy_version=self._version,
                rows=self._places,
                own_tokens=self._settings.max_tokens,
                prompt_lengths=lengths,
            )
        return self._session

    def _answer(self, row: Any) -> None:
        assert self._session is not None
        _, live, asked, ids = self._rows.pop(id(row))
        completion = self._session.completion(row)
        live.sampled.append((ids, completion))
        self.stats.turns += 1
        asked.answer.set_result(generated([completion], len(ids)))

    def _take_in(self, told: Told | None) -> None:
        if told is None:
            self._end_all(f"the process of verifiers ended: {self._all.lose()}")
        elif told.id in self._live:
            live = self._live[told.id]
            try:
                self._end(live, trajectory_of(told, live.sampled, self._all.decode, self._all.world.success))
            except EpisodeError as error:
                self._end(live, error)

    def _end_late(self) -> None:
        if any(live.until < time.monotonic() for live in self._live.values()):
            self._all.lose(at_once=True)
            self._end_all(f"an episode of verifiers did not end within {self._all.world.seconds:g} s; all were ended")

    def _end_all(self, why: str) -> None:
        for live in list(self._live.values()):
            self._end(live, EpisodeError(why))

    def _end(self, live: _Live, found: Trajectory | EpisodeError) -> None:
        if isinstance(found, EpisodeError):
            self.stats.failures += 1
            found = Trajectory((), (), False, "failed", str(found))
        self._forget([live])
        del self._live[live.number]
        self._done[live.number] = found

    def _forget(self, lives: Collection[_Live]) -> None:
        """Drop what is sampled for episodes that are over."""
        for row, live, asked, _ in list(self._rows.values()):
            if live in lives:
                del self._rows[id(row)]
                asked.answer.set_exception(RequestError("the episode is over"))
                assert self._session is not None
                self._session.drop(row)


def trajectory_of(
    told: Told, sampled: Sequence[tuple[IntArray, Completion]], decode: Decode, success: float
) -> Trajectory:
    """What an episode's trace and what was sampled for it make together.

    Args:
        told: the trace: for each branch its token ids and which of them were sampled.
        sampled: the prompts and completions of the episode's requests.
        decode: token ids -> text.
        success: the reward from which on it counts as a success.

    Raises `EpisodeError`: it failed, it is not to be trained on, or a branch has other tokens than were sampled. What
    two branches begin with is trained on once, in the first.
    """
    if not told.ok or not told.trainable:
        raise EpisodeError("; ".join(told.errors)[:1000] or ("its trace is not trainable" if told.ok else "it failed"))
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
    kept = [part.support for part in parts if part.support is not None]
    support = None
    if kept:
        sizes = np.concatenate([np.diff(part.offsets) for part in kept])
        support = Support(np.concatenate([part.ids for part in kept]), np.concatenate([[0], np.cumsum(sizes)]))
    version = min(part.policy_version for part in parts)
    return Episode(ids[:last], sampled[:last], logprobs, text, parts[-1].finish_reason, version, support)

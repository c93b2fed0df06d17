"""Play episodes of many turns: all live ones in one batch, their worlds working while the others are sampled.

    world --observation--> tokens --engine session--> a turn --parse--> action --world process--> observation ...

An episode whose world is slow waits alone: its row leaves the batch, keeps its keys and values, and comes back with
what the world said. An environment that fails costs its own episode.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import numpy as np

from covey.config.environment import EnvironmentConfig
from covey.environments.actions import parse_action
from covey.environments.base import Observation, Outcome
from covey.environments.pool import EnvironmentPool
from covey.errors import ConfigError, DataError, EpisodeError
from covey.rollout.conversation import ConversationTemplate
from covey.rollout.turns import Session, TurnGenerator
from covey.types import (
    Completion,
    Episode,
    FinishReason,
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

NO_ACTION = "That is not an action."
"""Said by us, not by the world, to a turn that could not be read as an action."""


@dataclass(slots=True)
class PlayStats:
    """What playing cost; that of several calls adds up."""

    seconds: float = 0.0
    waiting_seconds: float = 0.0
    turns: int = 0
    no_actions: int = 0
    cut_observations: int = 0
    failures: int = 0
    calls: int = 0
    failed_calls: int = 0

    def __add__(self, other: PlayStats) -> PlayStats:
        return PlayStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def play_metrics(trajectories: Sequence[Trajectory], stats: PlayStats) -> dict[str, float]:
    """Defined in `covey.metric_names`."""
    turns = max(stats.turns, 1)
    return {
        "agent/success": float(np.mean([t.success for t in trajectories])),
        "agent/turns": float(np.mean([len(t.turns) for t in trajectories])),
        "agent/branches": float(np.mean([len(t.episodes) for t in trajectories])),
        "agent/no_action_ratio": stats.no_actions / turns,
        "agent/failed_ratio": stats.failures / len(trajectories),
        "agent/failed_episodes": float(stats.failures),
        "agent/cut_short_ratio": float(np.mean([t.ended in ("turns", "context") for t in trajectories])),
        "agent/full_context_ratio": float(np.mean([t.ended == "context" for t in trajectories])),
        "agent/cut_observations": float(stats.cut_observations),
        "agent/waiting_share": stats.waiting_seconds / stats.seconds if stats.seconds else 0.0,
    }


def tool_metrics(completions: int, stats: PlayStats) -> dict[str, float]:
    """The same of completions that may call tools."""
    found = {
        "tools/call_frequency": stats.calls / completions,
        "tools/failure_frequency": stats.failed_calls / stats.calls if stats.calls else 0.0,
    }
    rare = {"tools/cut_results": stats.cut_observations, "tools/failed_episodes": stats.failures}
    return found | {name: float(count) for name, count in rare.items() if count}


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An episode under way."""

    number: int
    prompt: Prompt
    stream: tuple[int, ...]
    place: int = -1
    row: Any = None
    seen: Observation = field(default_factory=lambda: Observation(""))
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    said: str = ""
    action: Any = None
    acting: bool = False
    finish_reason: FinishReason = "stop"


class Player:
    """Plays groups of episodes.

    Attributes:
        waits_for_all: the first turns, and on devices that sample in rounds all, begin when all places have answered.
    """

    waits_for_all = True

    def __init__(
        self,
        pool: EnvironmentPool,
        template: ConversationTemplate,
        decode: Callable[[Sequence[int]], str],
        tokenizer: Any,
        settings: EnvironmentConfig,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.pool, self._template, self._decode = pool, template, decode
        self._tokenizer, self.settings, self.ends_turn = tokenizer, settings, tuple(eos_token_ids[:1])
        self.stats = PlayStats()
        self.longest_turn, self._warned = 1 << 31, False
        self._prepared: list[tuple[str, tuple[int, ...]]] = []  # by place: a task's uid and the episode's stream

    def prepare(self, tasks: Sequence[Prompt], *, num_generations: int, streams: Sequence[tuple[int, ...]]) -> None:
        """Begin the episodes of a later call of `play` with the same arguments: their worlds are reset meanwhile."""
        self._settle()
        for place, live in zip(range(self.places), _episodes(tasks, num_generations, streams), strict=False):
            self.pool.reset(place, dict(live.prompt.columns), live.stream[0])
            self._prepared.append((live.prompt.uid, live.stream))

    @property
    def places(self) -> int:
        """Number of episodes at the same time."""
        return len(self.pool)

    def begin(self, live: LiveEpisode) -> None:
        """Begin an episode at its place, unless that is prepared; `wait` returns its first observation."""
        if live.place < len(self._prepared):
            prepared, self._prepared[live.place] = self._prepared[live.place], ("", ())
            if prepared == (live.prompt.uid, live.stream):
                return
            if prepared[1]:
                self.pool.cancel(live.place)
        self.pool.reset(live.place, dict(live.prompt.columns), live.stream[0])

    def act(self, live: LiveEpisode) -> None:
        """Do its action; `wait` returns the outcome."""
        self.pool.step(live.place, live.action)

    def wait(self, seconds: float | None) -> list[tuple[int, Any]]:
        """What has been answered, by place; see `covey.environments.pool.EnvironmentPool.wait`."""
        return self.pool.wait(seconds)

    def _settle(self, first: int = 0) -> None:
        """Forget what has been prepared, from a place on."""
        for place, prepared in enumerate(self._prepared):
            if place >= first and prepared[1]:
                self.pool.cancel(place)
        self._prepared = self._prepared[:first]

    def play(
        self,
        tasks: Sequence[Prompt],
        generator: TurnGenerator,
        sampling: SamplingSettings,
        *,
        num_generations: int,
        streams: Sequence[tuple[int, ...]],
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[list[Trajectory]]:
        """Play each task `num_generations` times.

        Raises `GenerationError`: from the generator. Environments raise nothing: their failures end episodes.
        """
        began = time.perf_counter()
        self.stats = PlayStats()
        self.longest_turn = sampling.max_tokens
        episodes = _episodes(tasks, num_generations, streams)
        self._settle(len(episodes))
        finished = _EpisodeLoop(self, episodes, generator, sampling, policy_version, num_generations).run(progress)
        self.stats.seconds = time.perf_counter() - began
        return [finished[start : start + num_generations] for start in range(0, len(finished), num_generations)]

    def close(self) -> None:
        """End the environments' processes."""
        self.pool.close()

    def choices(self, live: LiveEpisode) -> tuple[tuple[int, ...], ...] | None:
        """The admissible actions as token sequences, where nothing else may be said.

        Actions that are too long for a turn are left out, which is warned of once. Raises `EpisodeError`: the world
        does not say what is admissible here; `ConfigError`: nothing of it fits into a turn.
        """
        if self.settings.action_format != "choice":
            return None
        if not live.seen.actions:
            raise EpisodeError(
                f"environment.action_format='choice': after turn {len(live.turns)} the world says of no action that "
                "it is admissible; let it, or use text or tags"
            )
        encoded = {action: (*self.tokens_of(action), *self.ends_turn) for action in live.seen.actions}
        fitting = tuple(ids for ids in encoded.values() if len(ids) <= self.longest_turn)
        if len(fitting) < len(encoded):
            self._warn_of_long(max(encoded, key=lambda action: len(encoded[action])), fitting)
        return fitting

    def tokens_of(self, text: str) -> list[int]:
        """Text as tokens, none of them special."""
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _warn_of_long(self, action: str, fitting: Sequence[tuple[int, ...]]) -> None:
        problem = (
            f"environment.action_format='choice': the action {action!r:.80} is longer than the {self.longest_turn} "
            "tokens of sampling.max_completion_length"
        )
        if not fitting:
            raise ConfigError(f"{problem}, and so are all others; raise it")
        if not self._warned:
            log.warning("%s; actions that are longer cannot be chosen: raise it", problem)
            self._warned = True

    def opening(self, live: LiveEpisode, history: int = 0) -> IntArray:
        """The tokens of a prompt that tells the task, the last `history` turns, and what is seen now."""
        row = live.prompt.columns
        own = {name: row[name] for name in ("system_prompt", "messages") if row.get(name)}
        return self._template.opening(self.words_with_history(live, history), **own, pictures=live.seen.pictures)

    def reply(self, live: LiveEpisode) -> IntArray:
        """The tokens that tell a conversation what is seen now."""
        calls = self.settings.action_format == "call" and live.turns[-1].action is not None
        role = "tool" if calls else "user"
        how: dict[str, Any] = {"ended": live.finish_reason == "stop", "pictures": live.seen.pictures}
        return self._template.reply(self.words(live), role=role, **how)

    def settings_of(self, live: LiveEpisode) -> SamplingSettings | None:
        """How the tokens of the next turn are drawn; None = as all others."""
        return None

    def read(self, live: LiveEpisode, completion: Completion) -> Any:
        """A turn that is over as an action, None if it is none."""
        return parse_action(live.said, self.settings.action_format, live.seen.actions)

    def words(self, live: LiveEpisode) -> str:
        """What the policy reads next: the observation, with what may be done."""
        text = self.shortened(live.seen.text)
        if live.turns and live.turns[-1].action is None:
            text = f"{NO_ACTION} {text}"
        if self.settings.show_actions and live.seen.actions:
            text += "\nActions: " + "; ".join(live.seen.actions)
        return text

    def words_with_history(self, live: LiveEpisode, history: int) -> str:
        """The same after the first observation, which tells the task, and the last `history` turns."""
        if not live.turns:
            return self.words(live)
        recent = live.turns[-history:] if history else []
        lines = [f"Task: {self.shortened(live.turns[0].observation)}"]
        lines += [f"{self.shortened(turn.observation)}\n> {turn.action or turn.said}" for turn in recent]
        return "\n".join([*lines, self.words(live)])

    def shortened(self, text: str) -> str:
        """The first `max_observation_tokens` tokens of a text."""
        limit = self.settings.max_observation_tokens
        if len(text) <= limit:  # a token has at least one character
            return text
        ids = self.tokens_of(text)
        return text if len(ids) <= limit else f"{self._decode(ids[:limit])} [...]"


def joined(parts: Sequence[Support]) -> Support | None:
    """The ids that were left for the tokens of all parts; None without parts."""
    if not parts:
        return None
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Support(np.concatenate([part.ids for part in parts]), np.concatenate([[0], np.cumsum(sizes)]))


def _episodes(tasks: Sequence[Prompt], count: int, streams: Sequence[tuple[int, ...]]) -> list[LiveEpisode]:
    return [
        LiveEpisode(index * count + sample, task, (*stream, sample))
        for index, (task, stream) in enumerate(zip(tasks, streams, strict=True))
        for sample in range(count)
    ]


class _EpisodeLoop:
    """Plays all episodes of one call of `play` to their ends."""

    def __init__(
        self,
        player: Player,
        episodes: Sequence[LiveEpisode],
        generator: TurnGenerator,
        sampling: SamplingSettings,
        policy_version: int,
        group: int,
    ) -> None:
        self._player, self._settings, self._stats = player, player.settings, player.stats
        self._decode = player._decode
        self._waiting, self._total = deque(episodes), len(episodes)
        self._at: dict[int, LiveEpisode] = {}  # by place
        self._of: dict[int, LiveEpisode] = {}  # by row
        self._done: dict[int, Trajectory] = {}
        self._max_turns = self._settings.max_turns or 1 << 31
        self._conversing = self._settings.history_length is None
        self._open = partial(
            generator.session,
            sampling,
            policy_version=policy_version,
            rows=min(player.places, self._total),
            own_tokens=self._settings.max_conversation_tokens if self._conversing else sampling.max_tokens,
        )
        self._session: Session[Any] | None = None
        self._group, self._version = group, policy_version

    def run(self, progress: Progress | None) -> list[Trajectory]:
        for place in range(min(self._player.places, self._total)):
            self._begin(place)
        while len(self._done) < self._total:
            before = len(self._done)
            self._take_observations()
            if self._session is not None and self._session.busy:
                for row in self._session.advance():
                    self._act(row)
            if progress is not None and len(self._done) > before:
                progress(len(self._done), self._total)
        return [self._done[number] for number in range(self._total)]

    def _begin(self, place: int) -> None:
        if self._waiting:
            live = self._at[place] = self._waiting.popleft()
            live.place = place
            self._player.begin(live)

    def _take_observations(self) -> None:
        """Take in what the worlds have answered; wait for one where there is nothing else to do, or for all."""
        while answers := self._answers():
            for place, found in answers:
                live = self._at[place]
                if isinstance(found, EpisodeError):
                    self._stats.failures += 1
                    if live.acting:
                        self._note(live, 0.0, valid=True)
                    self._end(live, "failed", str(found))
                elif isinstance(found, Outcome):
                    self._take_in(live, found)
                else:
                    live.seen = found
                    self._ask(live)
            if self._session is None or not self._session.in_rounds:
                break

    def _answers(self) -> list[tuple[int, Any]]:
        session = self._session
        # before the first turns: how long all first observations are is asked where memory is laid out
        all_of_them = self._player.waits_for_all and (session is None or session.in_rounds)
        idle = session is None or not session.busy or all_of_them
        began = time.perf_counter()
        answers = self._player.wait(None if idle else 0.0)
        while all_of_them and (more := self._player.wait(None)):
            answers += more
        if idle:
            self._stats.waiting_seconds += time.perf_counter() - began
        return sorted(answers, key=lambda pair: pair[0])

    def _act(self, row: Any) -> None:
        """A turn is over: read it as an action and do it."""
        assert self._session is not None
        live = self._of.pop(id(row))
        completion = self._session.completion(row)
        live.said = self._decode(completion.token_ids.tolist())
        self._record(live, completion)
        live.action = self._player.read(live, completion)
        self._stats.turns += 1
        live.acting = True
        if live.action is None:
            self._take_in(live, Outcome(live.seen, valid=False))
        else:
            self._player.act(live)

    def _record(self, live: LiveEpisode, completion: Completion) -> None:
        live.ids += completion.token_ids.tolist()
        live.sampled += [True] * len(completion.token_ids)
        live.logprobs += completion.logprobs.tolist()
        live.finish_reason = completion.finish_reason
        if completion.support is not None:
            live.supports.append(completion.support)
        if not self._conversing:
            self._close_episode(live)

    def _take_in(self, live: LiveEpisode, outcome: Outcome) -> None:
        """The world has answered a turn: note it, and go on or end."""
        self._stats.no_actions += not outcome.valid
        penalty = 0.0 if outcome.valid else self._settings.invalid_action_penalty
        self._note(live, outcome.reward - penalty, outcome.valid)
        live.seen = outcome.observation
        if outcome.done:
            self._end(live, "done", success=outcome.success)
        elif len(live.turns) >= self._max_turns:
            self._end(live, "turns")
        else:
            self._ask(live)

    def _note(self, live: LiveEpisode, reward: float, valid: bool) -> None:
        row, segment = (0, len(live.turns)) if self._conversing else (len(live.turns), 0)
        told = (live.said, live.action, reward, valid, row, segment)
        live.turns.append(Turn(live.seen.text, *told, live.seen.pictures))
        live.acting = False

    def _ask(self, live: LiveEpisode) -> None:
        stream, goes_on = (*live.stream, len(live.turns)), bool(live.turns) and self._conversing
        try:
            choices = self._player.choices(live)
            ids = self._player.reply(live) if goes_on else self._opening(live)
        except (EpisodeError, DataError) as error:  # DataError: the model cannot take a picture
            self._stats.failures += 1
            self._end(live, "failed", str(error))
            return
        self._stats.cut_observations += self._player.shortened(live.seen.text) != live.seen.text
        if goes_on:
            assert self._session is not None
            if self._session.room_for_turn(live.row, len(ids)) == 0:
                self._end(live, "context")
                return
            self._session.extend(live.row, ids, stream, choices)
        else:
            session = self._opened(len(ids))
            if not session.has_room_for(len(ids)):
                self._end(live, "context")
                return
            own = self._player.settings_of(live)
            live.row = session.start(Request(ids, stream, choices), keep=self._conversing, settings=own)
        live.ids += ids.tolist()
        live.sampled += [False] * len(ids)
        live.logprobs += [0.0] * len(ids)
        self._of[id(live.row)] = live

    def _opening(self, live: LiveEpisode) -> IntArray:
        """The prompt of a first turn, or of any turn in "steps" mode, with as much history as has room."""
        for history in range(min(self._settings.history_length or 0, len(live.turns)), 0, -1):
            ids = self._player.opening(live, history)
            if len(ids) <= self._settings.max_conversation_tokens:
                return ids
        return self._player.opening(live)

    def _opened(self, first: int) -> Session[Any]:
        if self._session is None:
            live = list(self._at.values())
            longest = max(first, *(len(self._player.opening(other)) for other in live))
            # other tasks may begin with more words
            expected = 2 * longest if self._conversing else max(longest, self._settings.max_conversation_tokens)
            # in conversations the episodes of a task share their opening, and one task may be half done
            distinct = -(-len(live) // self._group) + 1 if self._conversing else len(live)
            self._session = self._open(prompt_lengths=[expected] * distinct)
        return self._session

    def _end(
        self,
        live: LiveEpisode,
        how: Literal["done", "turns", "context", "failed"],
        error: str = "",
        *,
        success: bool = False,
    ) -> None:
        if self._conversing:
            if live.row is not None and self._session is not None:
                self._session.drop(live.row)
            if any(live.sampled):
                self._close_episode(live)
        self._done[live.number] = Trajectory(tuple(live.episodes), tuple(live.turns), success, how, error)
        del self._at[live.place]
        self._begin(live.place)

    def _close_episode(self, live: LiveEpisode) -> None:
        """What has been said so far is an episode; a trailing reply that was not answered is left out."""
        last = max(place for place, sampled in enumerate(live.sampled) if sampled) + 1
        support = joined(live.supports)
        tokens, sampled = np.array(live.ids[:last], dtype=np.int64), np.array(live.sampled[:last], dtype=np.bool_)
        logprobs = np.array(live.logprobs[:last], dtype=np.float32)
        text = "\n".join(turn.said for turn in live.turns) if self._conversing else live.said
        live.episodes.append(Episode(tokens, sampled, logprobs, text, live.finish_reason, self._version, support))
        live.ids, live.sampled, live.logprobs, live.supports = [], [], [], []

"""Completions in which tools are called, all in one batch: sampled, carried out, sampled on.

    prompt --engine session--> a turn --read--> calls --carried out--> results --tokens--> the same row goes on

A row that has called keeps its keys and values and comes back into the batch with its results. Tokens that the policy
sampled are trained on, those of results are not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import numpy as np

from covey.rollout.collect import Decode, Rollout, Scoring, grouped
from covey.rollout.scoring import Scorer
from covey.rollout.turns import Session, TurnGenerator
from covey.trl.environments import Scene, Toolset
from covey.trl.toolcalls import UNREADABLE
from covey.trl.toolchat import ToolChat
from covey.trl.tools import Call, Calls, Order, Result
from covey.types import (
    Completion,
    Episode,
    FinishReason,
    IntArray,
    Message,
    Progress,
    Prompt,
    Request,
    SamplingSettings,
)


@dataclass(frozen=True, slots=True, eq=False)
class ToolRollout(Rollout):
    """A rollout with the number of tool calls, and how many of them failed."""

    calls: int = 0
    failures: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Defined in `covey.metric_names`."""
        completions = sum(len(group.episodes) for group in self.groups)
        return {
            "tools/call_frequency": self.calls / completions,
            "tools/failure_frequency": self.failures / self.calls if self.calls else 0.0,
        }


@dataclass(slots=True, eq=False)
class _Live:
    """A completion under way."""

    number: int
    stream: tuple[int, ...]
    scene: Scene
    prompt_ids: IntArray
    row: Any = None
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rounds: int = 0
    finish_reason: FinishReason = "stop"

    def take(self, completion: Completion) -> None:
        """A turn is over."""
        self.ids += completion.token_ids.tolist()
        self.sampled += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        self.finish_reason = completion.finish_reason

    def episode(self, decode: Decode, version: int) -> Episode:
        """All of it; its text is that of the tools too."""
        before = len(self.prompt_ids)
        return Episode(
            token_ids=np.concatenate([self.prompt_ids, np.array(self.ids, np.int64)]),
            sampled=np.array([False] * before + self.sampled, np.bool_),
            logprobs=np.array([0.0] * before + self.logprobs, np.float32),
            text=decode(self.ids),
            finish_reason=self.finish_reason,
            policy_version=version,
        )


class ToolCollector(Scoring):
    """Samples and scores completions that may call tools; a `covey.rollout.collect.Collector`."""

    def __init__(
        self,
        generator: TurnGenerator,
        scorer: Scorer,
        decode: Decode,
        chat: ToolChat,
        toolset: Toolset,
        *,
        max_rounds: int | None,
        at_once: int,
    ) -> None:
        self._generator, self.scorer, self._decode = generator, scorer, decode
        self._chat, self._toolset, self._max_rounds, self._at_once = chat, toolset, max_rounds, at_once
        self._calls = Calls(scorer.runner)

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
        """Sample and score `num_generations` completions of each prompt.

        `max_tokens` is the limit of a whole completion, results of tools included: a result that would leave no room
        for an answer is left out, and the completion ends before it. A completion draws from the random streams that it
        would have without tools; the turns after calls have streams of their own.

        Raises:
            DataError: a row's prompt is no conversation, or it names no environment that there is.
            EpisodeError: the `reset` of an environment raised.
            GenerationError: from the generator.
            RewardError: from a reward function.
        """
        parts = []
        for start in range(0, len(prompts), self._at_once):
            part = slice(start, start + self._at_once)

            def told(done: int, _: int, before: int = start * num_generations) -> None:
                if progress is not None:
                    progress(before + done, len(prompts) * num_generations)

            parts.append(
                _Play(self, settings, policy_version, told).collect(prompts[part], streams[part], num_generations)
            )
        summed = ("sampling_seconds", "scoring_seconds", "sampled_tokens", "calls", "failures")
        return ToolRollout(
            groups=tuple(chain.from_iterable(part.groups for part in parts)),
            **{name: sum(getattr(part, name) for part in parts) for name in summed},
        )


class _Play:
    """One part of a call of `ToolCollector`."""

    def __init__(
        self, collector: ToolCollector, settings: SamplingSettings, policy_version: int, progress: Progress
    ) -> None:
        self._own, self._settings, self._version, self._progress = collector, settings, policy_version, progress
        self._count = self._failures = 0

    def collect(
        self, prompts: Sequence[Prompt], streams: Sequence[tuple[int, ...]], num_generations: int
    ) -> ToolRollout:
        """See `ToolCollector.__call__`."""
        own, began = self._own, time.perf_counter()
        scenes = own._toolset.scenes([prompt for prompt in prompts for _ in range(num_generations)])
        keys = [(*stream, sample) for stream in streams for sample in range(num_generations)]
        lives = [
            _Live(number, key, scene, own._chat.opening(cast(list[Message], scene.prompt.content), scene.schemas))
            for number, (key, scene) in enumerate(zip(keys, scenes, strict=True))
        ]
        self._sample(lives)
        sampled = time.perf_counter()
        episodes = [live.episode(own._decode, self._version) for live in lives]
        rewards, parts = own.scorer.score(
            [live.scene.prompt for live in lives], episodes, [live.messages for live in lives]
        )
        return ToolRollout(
            groups=grouped(prompts, episodes, rewards, parts),
            sampling_seconds=sampled - began,
            scoring_seconds=time.perf_counter() - sampled,
            sampled_tokens=sum(episode.num_sampled for episode in episodes),
            calls=self._count,
            failures=self._failures,
        )

    def _sample(self, lives: Sequence[_Live]) -> None:
        session: Session[Any] = self._own._generator.session(
            self._settings,
            policy_version=self._version,
            rows=len(lives),
            own_tokens=self._settings.max_tokens,
            prompt_lengths=[
                len(ids) for ids in {live.prompt_ids.tobytes(): live.prompt_ids for live in lives}.values()
            ],
        )
        by_row: dict[int, _Live] = {}
        for live in lives:
            live.row = session.start(Request(live.prompt_ids, live.stream), keep=True)
            by_row[id(live.row)] = live
        done = 0
        while session.busy:
            over = sorted((by_row[id(row)] for row in session.advance()), key=lambda live: live.number)
            wanted = [(live, self._heard(live, session.completion(live.row))) for live in over]
            results = iter(self._carried_out(wanted))
            for live, calls in wanted:
                if not calls or not self._goes_on(session, live, calls, [next(results) for _ in calls]):
                    session.drop(live.row)
                    done += 1
            if over:
                self._progress(done, len(lives))

    def _heard(self, live: _Live, turn: Completion) -> list[Call]:
        """Take in a turn; the calls in it that are to be carried out."""
        prefix = [*live.prompt_ids.tolist(), *live.ids]
        ended = turn.finish_reason == "stop"
        message, calls = self._own._chat.read(turn.token_ids.tolist(), prefix, live.scene.schemas, ended=ended)
        live.take(turn)
        live.messages.append(message)
        limit = self._own._max_rounds
        return calls if limit is None or live.rounds < limit else []

    def _carried_out(self, wanted: Sequence[tuple[_Live, Sequence[Call]]]) -> list[Result]:
        results = self._own._calls.run(
            [Order(live.number, call, live.scene.tools) for live, calls in wanted for call in calls]
        )
        self._count += len(results)
        self._failures += sum(result.failed for result in results)
        return results

    def _goes_on(self, session: Session[Any], live: _Live, calls: Sequence[Call], results: Sequence[Result]) -> bool:
        """Tell the model what its calls gave; False where no room is left for it and an answer."""
        messages: list[Message] = [  # a name that is no tool's is text of the model's, and may hold anything
            {"role": "tool", "name": call.name if call.name in live.scene.tools else UNREADABLE, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        ended = live.ids[-1] in self._settings.eos_token_ids
        ids = self._own._chat.results(messages, ended=ended)
        if session.room_for_turn(live.row, len(ids)) == 0:
            return False
        live.rounds += 1
        live.messages += messages
        live.ids += ids.tolist()
        live.sampled += [False] * len(ids)
        live.logprobs += [0.0] * len(ids)
        session.extend(live.row, ids, (*live.stream, live.rounds))
        return True

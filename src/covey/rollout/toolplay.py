"""Answers for which the model may call tools: their turns are played by the agents' own loop.

    prompt --engine session--> a turn --read--> calls --carried out--> results --tokens--> the same row goes on

Tokens that the policy sampled are trained on, those of results are not. The loop waits until all calls of the turns
that are over have their results: equal results give equal runs, bit for bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from covey.config.environment import EnvironmentConfig
from covey.environments.actions import UNREADABLE, Call
from covey.environments.base import Observation, Outcome
from covey.errors import DataError, EpisodeError, GenerationError
from covey.rewards.extract import completion_text
from covey.rollout.agents import LiveEpisode, Player, PlayStats
from covey.rollout.collect import Decode, Rollout, Scoring, together
from covey.rollout.conversation import in_parts
from covey.rollout.scoring import Scorer
from covey.rollout.toolchat import ToolChat
from covey.rollout.tools import Calls, Order, Result, Scene
from covey.rollout.turns import TurnGenerator
from covey.types import Completion, IntArray, Message, Progress, Prompt, SamplingSettings

if TYPE_CHECKING:
    from covey.rollout.mcp import McpTools

UNCUT = 1 << 40
"""As `max_observation_tokens`: results are shown whole."""


@dataclass(frozen=True, slots=True)
class _Told(Observation):
    """What a turn's calls gave, as messages."""

    messages: tuple[Message, ...] = ()


class _ToolPlayer(Player):
    """Plays the episodes of some scenes, whose worlds are tools.

    `messages` are what was said in each scene, calls and results.
    """

    def __init__(self, collector: ToolCollector, scenes: Sequence[Scene], ends: Sequence[int]) -> None:
        none: Any = None  # no pool, and `chat` writes the conversation
        self._chat, self._calls, self._served = collector.chat, collector.calls, collector.served
        super().__init__(none, none, collector.decode, self._chat.tokenizer, collector.limits)
        self._scenes, self._ends, most = scenes, ends, collector.limits.max_turns
        self._rounds = (most or 1 << 31) - 1
        self._scene_at = [0] * min(collector.limits.parallel_episodes, len(scenes))
        self._begun: list[int] = []
        self._asked: dict[int, Sequence[Call]] = {}  # by place
        self.counts = PlayStats()
        self.messages: list[list[Message]] = [[] for _ in scenes]

    @property
    def places(self) -> int:
        return len(self._scene_at)

    def begin(self, live: LiveEpisode) -> None:
        # The scene is set already: environments say what is asked when an episode begins.
        self._scene_at[live.place] = live.number
        self._begun.append(live.place)
        if self._served is not None:
            self._served.begin(live.place)

    def act(self, live: LiveEpisode) -> None:
        """Nothing: `read` has noted the calls."""

    def wait(self, seconds: float | None) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = [(place, _Told("")) for place in self._begun]
        orders = {
            place: [Order(self._scene_at[place], call, self._scenes[self._scene_at[place]].tools) for call in calls]
            for place, calls in sorted(self._asked.items())
        }
        self._begun, self._asked = [], {}
        here = iter(self._calls.run([order for own in orders.values() for order in own if not order.elsewhere]))
        there = {p: [(o.call.name, o.call.arguments) for o in own if o.elsewhere] for p, own in orders.items()}
        there = {place: calls for place, calls in there.items() if calls}
        answers = self._served.call(there) if self._served is not None and there else {}
        for place, own in orders.items():
            lost = answers[place] if isinstance(answers.get(place), EpisodeError) else None
            theirs = iter(() if lost else answers.get(place, ()))
            results = [next(theirs, Result("", True)) if order.elsewhere else next(here) for order in own]
            found.append((place, lost or self._outcome(own, list(map(self._readable, results)))))
        return found

    def _outcome(self, orders: Sequence[Order], results: Sequence[Result]) -> Outcome:
        self.counts.calls += len(results)
        self.counts.failed_calls += sum(result.failed for result in results)
        results = [replace(result, text=self._cut(result.text)) for result in results]
        # a name that is no tool's is text of the model's, and may hold anything
        names = [order.call.name if order.call.name in order.tools else UNREADABLE for order in orders]
        told: list[Message] = [{"role": "tool", "name": name} for name in names]
        told = [{**each, "content": r.text, "pictures": r.pictures} for each, r in zip(told, results, strict=True)]
        shown = (*chain.from_iterable(result.pictures for result in results),)
        return Outcome(_Told("\n".join(r.text for r in results), pictures=shown, messages=(*told,)), done=not orders)

    def _readable(self, result: Result) -> Result:
        """The result; an error in place of pictures that the model cannot take."""
        try:
            self._chat.places(result.pictures)
        except DataError as error:
            return Result(str({"error": str(error)}), True)
        return result

    def _cut(self, text: str) -> str:
        # hardly any token has a hundred characters: longer texts are not worth reading whole
        kept = super().shortened(text[: 100 * self.settings.max_observation_tokens])
        self.counts.cut_observations += kept != text
        return kept

    def opening(self, live: LiveEpisode, history: int = 0) -> IntArray:
        scene = self._scenes[live.number]
        return self._chat.opening(cast(list[Message], scene.prompt.content), scene.schemas)

    def read(self, live: LiveEpisode, completion: Completion) -> str:
        ids, ended = completion.token_ids.tolist(), completion.finish_reason == "stop"
        message, calls = self._chat.read(ids, live.ids[: -len(ids)], self._scenes[live.number].schemas, ended=ended)
        self.messages[live.number].append(message)
        self._asked[live.place] = calls if len(live.turns) < self._rounds else []
        return json.dumps([{"name": call.name, "arguments": call.arguments} for call in self._asked[live.place]])

    def reply(self, live: LiveEpisode) -> IntArray:
        told = cast(_Told, live.seen).messages
        self.messages[live.number] += map(in_parts, told)
        return self._chat.results(told, ended=live.ids[-1] in self._ends)

    def shortened(self, text: str) -> str:
        """As it is: results are cut one by one."""
        return text

    def said(self, number: int) -> list[Message]:
        """All messages of an episode; results that left no room for an answer are left out."""
        messages = self.messages[number]
        while messages[-1]["role"] == "tool":
            messages.pop()
        return messages


@dataclass(frozen=True, slots=True, eq=False)
class ToolCollector(Scoring):
    """Samples and scores completions that may call tools; a `covey.rollout.collect.Collector`.

    `scenes` begins episodes; a tool of theirs that is None is one of `served`. With `most_at_once`, that many prompts
    are begun at once, else all. `limits`: `max_conversation_tokens` after a prompt, `max_turns`,
    `max_observation_tokens` of a result, `parallel_episodes`, and what becomes of `failed_episodes`.
    """

    generator: TurnGenerator
    scorer: Scorer
    decode: Decode
    chat: ToolChat
    scenes: Callable[[Sequence[Prompt]], list[Scene]]
    calls: Calls
    limits: EnvironmentConfig
    most_at_once: int | None = None
    served: McpTools | None = None

    def __call__(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        *,
        num_generations: int,
        streams: Sequence[tuple[int, ...]],
        progress: Progress | None = None,
        **version: Any,
    ) -> Rollout:
        """Sample and score `num_generations` completions of each prompt.

        A result that would leave no room for an answer is left out, and the completion ends before it. Raises
        `DataError`: a row's prompt is no conversation, or it names no environment that there is; `EpisodeError`: the
        `reset` of an environment raised; `GenerationError`: from the generator, or a prompt leaves no room for an
        answer; `RewardError`: from a reward function.
        """
        parts, each = [], self.most_at_once or len(prompts)
        for start in range(0, len(prompts), each):
            part = slice(start, start + each)

            def told(done: int, _: int, before: int = start * num_generations) -> None:
                if progress is not None:
                    progress(before + done, len(prompts) * num_generations)

            how: dict[str, Any] = {"num_generations": num_generations, "streams": streams[part], "progress": told}
            parts.append(self._part(prompts[part], settings, **how, **version))
        return together(parts, [group for part in parts for group in part.groups])

    def _part(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, *, num_generations: int, **how: Any
    ) -> Rollout:
        began = time.perf_counter()
        scenes = self.scenes([prompt for prompt in prompts for _ in range(num_generations)])
        player = _ToolPlayer(self, scenes, settings.eos_token_ids)
        groups = player.play(prompts, self.generator, settings, num_generations=num_generations, **how)
        played = list(chain.from_iterable(groups))
        if not all(trajectory.episodes for trajectory in played):
            raise GenerationError(
                "a prompt with its tools leaves no room for an answer; shorten it or show fewer tools"
            )
        for place in range(player.places if self.served is not None else 0):
            self.served.begin(place)  # type: ignore[union-attr]  # they start beside the update
        messages = [player.said(number) for number in range(len(scenes))]
        texts = [completion_text(each) for each in messages]
        episodes = [replace(one.episodes[0], text=text) for one, text in zip(played, texts, strict=True)]
        rollout = self.scored(prompts, [scene.prompt for scene in scenes], episodes, began, messages)
        found = [replace(group, with_tools=tuple(own)) for group, own in zip(rollout.groups, groups, strict=True)]
        if self.limits.failed_episodes == "exclude":
            lost = [[trajectory.ended == "failed" for trajectory in own] for own in groups]
            found = [replace(g, rewards=np.where(of, np.nan, g.rewards)) for g, of in zip(found, lost, strict=True)]
        return replace(rollout, groups=tuple(found), played=player.stats + player.counts)

    def close(self) -> None:
        """End the servers, and the reward functions' threads."""
        if self.served is not None:
            self.served.close()
        self.scorer.close()

"""What makes an agent of the model: `tools`, `environment_factory` or `rollout_func`, checked before training.

Tools are a world whose action is a turn with calls in it, played by the agents' own loop (`covey.rollout.agents`):

    prompt --engine session--> a turn --read--> calls --carried out--> results --tokens--> the same row goes on

Tokens that the policy sampled are trained on, those of results are not.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import covey
from covey.config.environment import EnvironmentConfig
from covey.environments.base import Observation, Outcome
from covey.errors import ConfigError, DataError, GenerationError
from covey.rollout.agents import LiveEpisode, Player
from covey.rollout.collect import Collector, Decode, Rollout, Scoring, grouped
from covey.rollout.scoring import PROVIDED, Scorer
from covey.rollout.turns import TurnGenerator
from covey.tasks.dataset import load_rows
from covey.trl.arguments import GRPOConfig
from covey.trl.generating import RolloutCollector
from covey.trl.toolchat import UNREADABLE, ToolChat
from covey.trl.tools import EMPTY, Call, Calls, Order, Scene, Toolset
from covey.trl.translate import RATIO_FROM_THE_LEARNER, as_mapping, prompts_per_generation
from covey.types import Completion, IntArray, Message, Progress, Prompt, SamplingSettings

log = logging.getLogger("covey.trl")


def is_stream(dataset: Any) -> bool:
    """Can rows only be read one after the other, as those of an `IterableDataset`?"""
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")


def read_in_order(args: GRPOConfig, training: Any, held_out: Sequence[Any]) -> None:
    """Say in `args` how streams are read, as TRL does: by one process, in their order. Else a `ConfigError`."""
    if is_stream(training) and args.dataloader_num_workers:
        log.warning("dataloader_num_workers=%d: a stream is read by one process", args.dataloader_num_workers)
        args.dataloader_num_workers = 0
    if is_stream(training) or any(map(is_stream, held_out)):
        loader: Any = args.accelerator_config
        if loader.dispatch_batches:
            raise ConfigError("accelerator_config: Iterable datasets require `dispatch_batches=False`; leave it out")
        loader.dispatch_batches = False


class Acting:
    """How a run acts; with none of the three arguments, completions are plain answers."""

    def __init__(self, args: GRPOConfig, tools: Any, environment_factory: Any, rollout_func: Any) -> None:
        self._args, self._rollout_func = args, rollout_func
        if rollout_func is not None and not callable(rollout_func):
            raise ConfigError(f"rollout_func={rollout_func!r:.200}: cannot be called; give f(prompts, trainer)")
        if rollout_func is not None and (tools or environment_factory):
            raise ConfigError("rollout_func beside tools or environment_factory: it samples itself; leave one out")
        self.toolset = Toolset(list(tools or ()), environment_factory)
        self._data_optional = self.toolset.has_environments
        self._named, self.rewards = isinstance(environment_factory, Mapping), self.toolset.rewards()
        self._columns: tuple[str, ...] = ("environments",) if self._data_optional else ()

    def settings(self) -> dict[str, Any]:
        """Covey's settings that follow: weights of the environments' rewards, and what ratios begin at."""
        # As in TRL: without vLLM's correction, log-probabilities of `rollout_func` are compared and masked by only.
        found = dict(RATIO_FROM_THE_LEARNER) if self._rollout_func is not None and not self._args.use_vllm else {}
        if self._args.reward_weights is not None and self.rewards:
            found["reward_weights"] = (*map(float, self._args.reward_weights), *[1.0] * len(self.rewards))
        return found

    def expect(self, reward_funcs: Sequence[Callable[..., Any]]) -> None:
        """Arguments that reward functions need, and that only `rollout_func` knows, count as columns."""
        if self._rollout_func is not None:
            parameters = [p for function in reward_funcs for p in inspect.signature(function).parameters.values()]
            named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            self._columns = tuple({p.name: 0 for p in named if p.default is p.empty and p.name not in PROVIDED})

    def training_rows(self, dataset: Any) -> Any:
        """The training data; an error without any, unless environments bring their own."""
        if dataset is not None or not self._data_optional:
            return dataset
        if self._named:
            raise DataError(
                "train_dataset=None: a dict of environments requires a `train_dataset`, each row of which must "
                "name one in its column 'environment'"
            )
        if self._args.max_steps <= 0:
            raise ConfigError("train_dataset=None: without data the run has no length; set max_steps in GRPOConfig")
        return [{"prompt": [dict(EMPTY)]} for _ in range(prompts_per_generation(self._args))]

    def rows(self, source: Any, split: str = "train") -> Any:
        """Data, of a stream all, with a prompt in every row, which environments need not have, and later columns."""
        source = list(source) if is_stream(source) else source
        if source is None or not (self._data_optional or self._columns):
            return source
        later = dict.fromkeys(self._columns)
        prompt = {"prompt": [dict(EMPTY)]} if self._data_optional else {}
        return [{**prompt, **later, **row} for row in load_rows(source, split=split)]

    def collector(self, run: covey.GRPOTrainer, trainer: Any) -> Collector | None:
        """What samples so; None for plain answers."""
        if self._rollout_func is not None:
            return RolloutCollector(self._rollout_func, trainer, run.data.scorer, run.decode, run.learner)
        if not self.toolset.tools and not self._data_optional:
            return None
        kwargs = as_mapping("chat_template_kwargs", self._args.chat_template_kwargs)
        chat, scorer = ToolChat(run.policy.tokenizer, run.policy.eos_token_ids, kwargs), run.data.scorer
        rounds, at_once = self._args.max_tool_calling_iterations, prompts_per_generation(self._args)
        engine, calls = cast(TurnGenerator, run.engine), Calls(scorer.runner)
        return ToolCollector(engine, scorer, run.decode, chat, self.toolset, calls, rounds, at_once)


@dataclass(frozen=True, slots=True)
class _Told(Observation):
    """What a turn's calls gave, as messages."""

    messages: tuple[Message, ...] = ()


class _Tables:
    """Where calls are carried out, all that wait together; see `covey.environments.pool.Places`."""

    def __init__(self, scenes: Sequence[Scene], calls: Calls) -> None:
        self._scenes, self._calls = scenes, calls
        self._asked: list[tuple[int, Sequence[Call]]] = []
        self._begun: list[tuple[int, Any]] = []
        self.count = self.failures = 0

    def __len__(self) -> int:
        return len(self._scenes)

    def reset(self, place: int, task: Any, seed: int) -> None:
        # The scene is set already: environments say what is asked when an episode begins.
        self._begun.append((place, _Told("")))

    def step(self, place: int, action: Any) -> None:
        self._asked.append((place, action))

    def wait(self, seconds: float | None = None) -> list[tuple[int, Any]]:
        found, self._begun = self._begun, []
        asked, self._asked = sorted(self._asked, key=lambda pair: pair[0]), []
        orders = [Order(place, call, self._scenes[place].tools) for place, calls in asked for call in calls]
        results = iter(self._calls.run(orders))
        for place, calls in asked:
            messages: list[Message] = []
            for call in calls:
                result = next(results)
                # a name that is no tool's is text of the model's, and may hold anything
                name = call.name if call.name in self._scenes[place].tools else UNREADABLE
                messages.append({"role": "tool", "name": name, "content": result.text})
                self.count += 1
                self.failures += result.failed
            found.append((place, Outcome(_Told("", None, tuple(messages)), done=not calls)))
        return found

    def cancel(self, place: int) -> None:
        """Nothing is begun ahead."""

    def close(self) -> None:
        """Nothing runs beside this process."""


class _ToolPlayer(Player):
    """Plays the episodes of some scenes; `messages` are what was said in each, calls and results."""

    def __init__(
        self, scenes: Sequence[Scene], tables: _Tables, chat: ToolChat, sampling: SamplingSettings, rounds: int | None
    ) -> None:
        limits = EnvironmentConfig(max_conversation_tokens=max(sampling.max_tokens, 2))
        template: Any = None  # `chat` writes the conversation
        super().__init__(tables, template, lambda ids: "", None, limits)
        self._scenes, self._chat, self._rounds, self._ends = scenes, chat, rounds, sampling.eos_token_ids
        self.messages: list[list[Message]] = [[] for _ in scenes]

    def opening(self, live: LiveEpisode, history: int = 0) -> IntArray:
        scene = self._scenes[live.number]
        return self._chat.opening(cast(list[Message], scene.prompt.content), scene.schemas)

    def read(self, live: LiveEpisode, completion: Completion) -> list[Call]:
        ids, ended = completion.token_ids.tolist(), completion.finish_reason == "stop"
        message, calls = self._chat.read(ids, live.ids[: -len(ids)], self._scenes[live.number].schemas, ended=ended)
        self.messages[live.number].append(message)
        return calls if self._rounds is None or len(live.turns) < self._rounds else []

    def reply(self, live: LiveEpisode) -> IntArray:
        told = cast(_Told, live.seen).messages
        self.messages[live.number] += told
        return self._chat.results(told, ended=live.ids[-1] in self._ends)

    def said(self, number: int) -> list[Message]:
        """All messages of an episode; results that left no room for an answer are left out."""
        messages = self.messages[number]
        while messages[-1]["role"] == "tool":
            messages.pop()
        return messages


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


@dataclass(frozen=True, slots=True, eq=False)
class ToolCollector(Scoring):
    """Samples and scores completions that may call tools; a `covey.rollout.collect.Collector`."""

    generator: TurnGenerator
    scorer: Scorer
    decode: Decode
    chat: ToolChat
    toolset: Toolset
    calls: Calls
    max_rounds: int | None
    at_once: int

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

        `max_tokens` is the limit of a whole completion, results of tools included: a result that would leave no room
        for an answer is left out, and the completion ends before it. No more environments are in use at once than a
        training step has. Raises `DataError`: a row's prompt is no conversation, or it names no environment that there
        is; `EpisodeError`: the `reset` of an environment raised; `GenerationError`: from the generator, or a prompt
        leaves no room for an answer; `RewardError`: from a reward function.
        """
        parts = []
        for start in range(0, len(prompts), self.at_once):
            part = slice(start, start + self.at_once)

            def told(done: int, _: int, before: int = start * num_generations) -> None:
                if progress is not None:
                    progress(before + done, len(prompts) * num_generations)

            how: dict[str, Any] = {"num_generations": num_generations, "streams": streams[part], "progress": told}
            parts.append(self._part(prompts[part], settings, **how, **version))
        summed = ("sampling_seconds", "scoring_seconds", "sampled_tokens", "calls", "failures")
        return ToolRollout(
            groups=tuple(chain.from_iterable(part.groups for part in parts)),
            **{name: sum(getattr(part, name) for part in parts) for name in summed},
        )

    def _part(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, *, num_generations: int, **how: Any
    ) -> ToolRollout:
        scenes = self.toolset.scenes([prompt for prompt in prompts for _ in range(num_generations)])
        tables = _Tables(scenes, self.calls)
        player = _ToolPlayer(scenes, tables, self.chat, settings, self.max_rounds)
        played = player.play(prompts, self.generator, settings, num_generations=num_generations, **how)
        if not all(trajectory.episodes for trajectory in chain.from_iterable(played)):
            raise GenerationError(
                "a prompt with its tools leaves no room for an answer; shorten it or show fewer tools"
            )
        firsts = [trajectory.episodes[0] for trajectory in chain.from_iterable(played)]
        # their texts are those of the tools too
        episodes = [replace(e, text=self.decode(e.token_ids[e.prompt_length :].tolist())) for e in firsts]
        began = time.perf_counter()
        messages = [player.said(number) for number in range(len(scenes))]
        rewards, parts = self.scorer.score([scene.prompt for scene in scenes], episodes, messages)
        return ToolRollout(
            groups=grouped(prompts, episodes, rewards, parts),
            sampling_seconds=player.stats.seconds,
            scoring_seconds=time.perf_counter() - began,
            sampled_tokens=sum(episode.num_sampled for episode in episodes),
            calls=tables.count,
            failures=tables.failures,
        )

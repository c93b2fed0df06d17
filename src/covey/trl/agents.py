"""What makes an agent of the model: `tools`, `environment_factory` or `rollout_func`, checked before training.

`covey.rollout.toolplay` plays turns with calls.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import covey
from covey.config.environment import EnvironmentConfig
from covey.errors import ConfigError, DataError
from covey.rollout.collect import Collector
from covey.rollout.scoring import PROVIDED
from covey.rollout.toolchat import ToolChat
from covey.rollout.toolplay import UNCUT, ToolCollector
from covey.rollout.tools import EMPTY, Calls
from covey.rollout.turns import TurnGenerator
from covey.tasks.dataset import load_rows
from covey.training.setup import picture_reader
from covey.trl.arguments import GRPOConfig
from covey.trl.generating import RolloutCollector
from covey.trl.tools import Toolset
from covey.trl.translate import RATIO_FROM_THE_LEARNER, as_mapping, prompts_per_generation

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
        album, blind = picture_reader(run.args, run.policy)
        chat = ToolChat(run.policy.tokenizer, run.policy.eos_token_ids, kwargs, album=album)
        scorer = run.data.scorer
        engine, at_once = cast(TurnGenerator, run.engine), prompts_per_generation(self._args)
        # As in TRL, `max_completion_length` is the limit of a whole completion, results of tools included.
        length, rounds = run.args.sampling.max_completion_length, self._args.max_tool_calling_iterations
        limits = EnvironmentConfig(
            max_conversation_tokens=max(length, 2),
            max_turns=None if rounds is None else rounds + 1,
            max_observation_tokens=UNCUT,
            parallel_episodes=UNCUT,
        )
        calls = Calls(scorer.runner, blind=blind)
        return ToolCollector(engine, scorer, run.decode, chat, self.toolset.scenes, calls, limits, at_once)

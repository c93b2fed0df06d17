"""What makes an agent of the model: `tools`, `environment_factory` or `rollout_func`, checked before training."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import covey
from covey.errors import ConfigError, DataError
from covey.tasks.dataset import load_rows
from covey.trl.arguments import GRPOConfig
from covey.trl.environments import EMPTY, Toolset
from covey.trl.rollouts import RolloutCollector
from covey.trl.toolchat import ToolChat
from covey.trl.toolplay import ToolCollector
from covey.trl.translate import RATIO_FROM_THE_LEARNER, as_mapping, prompts_per_generation

log = logging.getLogger("covey.trl")

_GIVEN = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"})


def is_stream(dataset: Any) -> bool:
    """Can rows only be read one after the other, as those of an `IterableDataset`?"""
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")


def read_in_order(args: GRPOConfig, training: Any, held_out: Sequence[Any]) -> None:
    """Say in `args` how streams are read, as TRL does: by one process, in their order.

    Raises:
        ConfigError: it is to be otherwise.
    """
    if is_stream(training) and args.dataloader_num_workers:
        log.warning("dataloader_num_workers=%d: a stream is read by one process", args.dataloader_num_workers)
        args.dataloader_num_workers = 0
    if is_stream(training) or any(map(is_stream, held_out)):
        loader: Any = args.accelerator_config
        if loader.dispatch_batches:
            raise ConfigError("accelerator_config: Iterable datasets require `dispatch_batches=False`; leave it out")
        loader.dispatch_batches = False


class Acting:
    """How a run acts; with none of the three arguments, completions are plain answers.

    Raises:
        ConfigError: something that cannot be called or described, or two ways to sample.
    """

    def __init__(self, args: GRPOConfig, tools: Any, environment_factory: Any, rollout_func: Any) -> None:
        self._args, self._rollout_func = args, rollout_func
        if rollout_func is not None and not callable(rollout_func):
            raise ConfigError(f"rollout_func={rollout_func!r:.200}: cannot be called; give f(prompts, trainer)")
        if rollout_func is not None and (tools or environment_factory):
            raise ConfigError("rollout_func beside tools or environment_factory: it samples itself; leave one out")
        self.toolset = Toolset(list(tools or ()), environment_factory)
        self._data_optional = self.toolset.has_environments
        self._named = isinstance(environment_factory, Mapping)
        self.rewards = self.toolset.rewards()
        self._columns: tuple[str, ...] = ("environments",) if self._data_optional else ()

    def settings(self) -> dict[str, Any]:
        """Covey's settings that follow: weights of the environments' rewards, and what ratios begin at."""
        given = self._args.reward_weights
        # As in TRL: without vLLM's correction, log-probabilities of `rollout_func` are compared and masked by only.
        found = dict(RATIO_FROM_THE_LEARNER) if self._rollout_func is not None and not self._args.use_vllm else {}
        if given is None or not self.rewards:
            return found
        return found | {"reward_weights": (*map(float, given), *[1.0] * len(self.rewards))}

    def expect(self, reward_funcs: Sequence[Callable[..., Any]]) -> None:
        """Arguments that reward functions need, and that only `rollout_func` knows, count as columns."""
        if self._rollout_func is not None:
            required = [
                parameter.name
                for function in reward_funcs
                for parameter in inspect.signature(function).parameters.values()
                if parameter.default is parameter.empty
                and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            ]
            self._columns = tuple(name for name in dict.fromkeys(required) if name not in _GIVEN)

    def training_rows(self, dataset: Any) -> Any:
        """The training data; environments that bring their own need none.

        Raises:
            ConfigError, DataError: they need it.
        """
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
        """Data with a prompt in every row, which environments need not have, and the columns that come later; a stream
        is read to its end.
        """
        source = list(source) if is_stream(source) else source
        if source is None or not (self._data_optional or self._columns):
            return source
        later = dict.fromkeys(self._columns)
        prompt = {"prompt": [dict(EMPTY)]} if self._data_optional else {}
        return [{**prompt, **later, **row} for row in load_rows(source, split=split)]

    def install(self, run: covey.GRPOTrainer, trainer: Any) -> None:
        """Let the run sample so."""
        scorer = run.data.scorer
        if self._rollout_func is not None:
            run.collect = RolloutCollector(self._rollout_func, trainer, scorer, run.decode, run.learner)
        elif self.toolset.tools or self._data_optional:
            kwargs = as_mapping("chat_template_kwargs", self._args.chat_template_kwargs)
            run.collect = ToolCollector(
                run.engine,
                scorer,
                run.decode,
                ToolChat(run.policy.tokenizer, run.policy.eos_token_ids, kwargs),
                self.toolset,
                max_rounds=self._args.max_tool_calling_iterations,
                at_once=prompts_per_generation(self._args),
            )

"""From a config and a world to what plays in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covey.config.whole import GRPOConfig
from covey.environments.base import World
from covey.environments.verifiers import Verifiers
from covey.errors import ConfigError, DataError, naming, several
from covey.functions import later
from covey.rollout.agents import Player
from covey.rollout.collect import AgentCollector, Collector, Decode
from covey.rollout.conversation import ConversationTemplate
from covey.rollout.learning import Sampler, TrainedPolicy
from covey.rollout.scoring import Scorer, has_text
from covey.rollout.toolchat import tools_in_words
from covey.training import setup
from covey.types import Prompt

(driven,) = later("covey.training", "driven")
(pictures,) = later("covey.tasks", "pictures")
_TAGS = "Write your action between <action> and </action>."


def world_data(config: GRPOConfig, world: World, others: Sequence[Any] = ()) -> setup.Data:
    """Task instances in place of prompts; the world says what is right."""
    if config.rewards.functions or config.data.eval_fraction or any(other is not None for other in others):
        raise ConfigError(
            "reward functions or datasets beside a world: a world brings its own tasks and rewards; leave out "
            "reward_funcs, rewards.functions, train_dataset, eval_dataset, data.eval_fraction and correctness"
        )
    if isinstance(world, Verifiers):
        driven.check(config)
    said = f"environment.world={config.environment.world or type(world).__name__!r}"
    with naming(f"{said}: train_tasks or eval_tasks"):
        train, held_out = world.train_tasks(config.run.seed), world.eval_tasks()
    if not train:
        raise DataError(f"{said}: it has no training tasks")
    for task in (*train, *held_out):
        if not isinstance(task, Mapping):
            raise DataError(f"{said}: its task {task!r:.80} is not a dictionary; tasks are like {{'uid': '7', ...}}")
        if pictures.has_places(task.get("messages")):
            raise DataError(f"{said}: a task's messages have no pictures ({task!r:.80}); show them in observations")
    both = {str(task.get("uid")) for task in train} & {str(task.get("uid")) for task in held_out if "uid" in task}
    if both:
        raise DataError(
            f"{said}: training and held-out tasks share {several(len(both), 'task')}, such as {min(both)!r}; the "
            "evaluation would be of what was trained"
        )
    if config.rewards.correctness is not None:
        raise ConfigError(
            f"rewards.correctness={config.rewards.correctness!r}: a world says itself which episodes succeed; remove it"
        )
    if config.evaluation.num_eval_prompts is not None:
        held_out = held_out[: config.evaluation.num_eval_prompts]
    words = config.data.system_prompt or world.system_prompt
    return setup.Data(train, held_out, Scorer(_by_the_world), words, None, has_text)


def task_prompts(rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    """Task instances as prompts without tokens: what is asked is known when an episode begins."""
    return [
        Prompt(np.zeros(0, np.int64), str(row.get("uid", index)), dict(row), str(row.get("uid", index)))
        for index, row in enumerate(rows)
    ]


def collector_of(
    config: GRPOConfig, world: World, policy: TrainedPolicy, engine: Sampler, data: setup.Data, decode: Decode
) -> Collector:
    """What plays the world: its own programs, or the policy turn by turn."""
    if isinstance(world, Verifiers):
        return AgentCollector(engine, driven.ProgramPlayer(config, world, policy, engine.context_length, decode))
    return make_collector(config, world, policy, engine, data, decode)


def make_collector(
    config: GRPOConfig,
    world: World,
    policy: TrainedPolicy,
    engine: Sampler,
    data: setup.Data,
    decode: Decode,
    player: type[Player] = Player,
) -> AgentCollector:
    """What plays episodes of the world with the engine; by `player`, whoever takes the turns."""
    chosen, words = config.environment, data.system_prompt
    template_kwargs: dict[str, Any] = dict(config.data.chat_template_kwargs or {})
    if chosen.action_format == "call":
        if not world.tools:
            raise ConfigError("environment.action_format='call': this world has no functions; set it to text or tags")
        schemas = [{"type": "function", "function": dict(tool)} for tool in world.tools]
        if "tools" in str(getattr(policy.tokenizer, "chat_template", None)):
            template_kwargs.setdefault("tools", schemas)  # the template shows them in the model's own way
        else:
            words = "\n\n".join(filter(None, (words, tools_in_words(schemas))))
    elif chosen.action_format == "tags":
        words = " ".join(filter(None, (words, _TAGS)))
    album, blind = setup.picture_reader(config, policy)
    template = ConversationTemplate(policy.tokenizer, policy.eos_token_ids, words, template_kwargs, album, blind)
    from covey.environments.pool import EnvironmentPool  # single answers load none of it

    seconds, most = chosen.step_seconds, min(chosen.max_conversation_tokens, engine.context_length)
    pool = EnvironmentPool(world, chosen.parallel_episodes, reset_seconds=3 * seconds, step_seconds=seconds)
    limits = {"max_turns": chosen.max_turns or world.max_turns, "max_conversation_tokens": most}
    settings = chosen.model_copy(update=limits)
    return AgentCollector(engine, player(pool, template, decode, policy.tokenizer, settings, policy.eos_token_ids))


def _by_the_world(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    raise AssertionError("episodes are scored by their world")


_by_the_world.__name__ = "world"

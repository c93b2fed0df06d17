"""Supervised learning of what a world's own expert does: where a policy begins that would never succeed by chance.

    found = imitate(config, episodes=200, epochs=2)
    covey train RECIPE model.adapter=FOLDER/adapter

The expert plays training tasks; each of its turns is written as the recipe's `action_format` reads it, after the
prompts that the recipe gives. What is minimised is the mean of `-log p` over the tokens of its turns, all words
admitted. Everything that the recipe says of model, LoRA, optimiser and learning-rate schedule holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from covey.algorithms import make_objective
from covey.config.whole import GRPOConfig
from covey.environments.pool import EnvironmentPool
from covey.errors import ConfigError, DataError, EpisodeError, several
from covey.files import checked_path, explained, write_atomically
from covey.rollout.experts import Dictation, ExpertPlayer
from covey.training import agents, setup
from covey.training.tables import transcript
from covey.training.trainer import GRPOTrainer
from covey.types import Batch, Episode, Trajectory

IMITATION_STREAM = 5
"""Second entry of the random streams of worlds and of the order of episodes; see `evaluate.EVALUATION_STREAM`."""

Told = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and of how much."""


@dataclass(frozen=True, slots=True)
class Imitation:
    """What came of it."""

    folder: Path
    episodes: int
    failed: int
    why: tuple[str, ...]
    losses: tuple[float, ...]
    before: dict[str, float]
    after: dict[str, float]


def imitate(
    config: GRPOConfig,
    folder: str | Path,
    *,
    episodes: int = 200,
    epochs: int = 2,
    episodes_per_step: int = 16,
    evaluate: bool = True,
    told: Told = lambda doing, done, of: None,
) -> Imitation:
    """Let the expert of the recipe's world play, and learn what it says.

    Raises:
        ConfigError: the recipe has no world, a number cannot be meant, the folder is not empty, an action is longer
            than a turn, or the loss is not finite.
        DataError: the expert succeeded in no episode, or there is none.
    """
    if min(episodes, epochs, episodes_per_step) < 1:
        raise ConfigError(f"{episodes=}, {epochs=}, {episodes_per_step=}: 1 or more each")
    _require_expert(config)
    folder = checked_path("folder", folder)
    with explained(folder):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: it is not empty, and nothing is overwritten; choose another folder")
    try:
        steps = -(-episodes // episodes_per_step) * epochs
        config = config.replace(phases=(), max_steps=steps, max_optimizer_steps=None)
        config = config.replace(num_iterations=1, num_minibatches=1)
        with closing(GRPOTrainer(args=config)) as trainer:
            played = _play(trainer, episodes, told)
            good = [trajectory for trajectory in played if trajectory.success and trajectory.episodes]
            if not good:
                raise DataError(
                    f"the expert succeeded in none of {several(len(played), 'episode')} "
                    f"({'; '.join(_endings(played)):.500}); look at what it does with covey play --expert, and "
                    "whether environment.max_turns and max_conversation_tokens leave it room"
                )
            measured = len(trainer.eval_prompts) if evaluate else 0
            told("playing held-out tasks, before", 0, measured)
            before = trainer.evaluate() if measured else {}
            lines = _learn(trainer, good, epochs, episodes_per_step, told)
            trainer.state.policy_version += 1
            trainer.publish()
            told("playing held-out tasks, after", 0, measured)
            after = trainer.evaluate() if measured else {}
            with explained(folder):
                rows = ({"turns": len(t.turns), "reward": t.reward, "transcript": transcript(t)} for t in good)
                written = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                write_atomically(folder / "episodes.jsonl", written)
                write_atomically(folder / "imitation.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
            trainer.save_model(folder / "adapter")
        lost = [trajectory for trajectory in played if not (trajectory.success and trajectory.episodes)]
        losses = tuple(line["loss"] for line in lines)
        return Imitation(folder, len(good), len(lost), _endings(lost), losses, before, after)
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()  # it is empty until all is known
        raise


def _require_expert(config: GRPOConfig) -> None:
    """Refuse a world that knows no action at the beginning of its first tasks, before a model is loaded."""
    if (world := setup.load_world(config)) is None:
        raise ConfigError("this recipe has no environment.world, so there is no expert to imitate; name a world")
    tasks = agents.world_data(config, world).train[:3]
    with EnvironmentPool(world, places=1) as pool, suppress(EpisodeError):  # which costs its own episode
        for task in tasks:
            pool.reset(0, dict(task), config.run.seed)
            pool.wait()
            if pool.expert_action(0) is not None:
                return
        why = "its environments know no expert_action; define one, or train without imitation"
        raise DataError(f"environment.world={config.environment.world!r}: {why}")


def _endings(played: Sequence[Trajectory]) -> tuple[str, ...]:
    return tuple(sorted({trajectory.error or trajectory.ended for trajectory in played}))


def _play(trainer: GRPOTrainer, episodes: int, told: Told) -> list[Trajectory]:
    assert trainer.world is not None
    collect = agents.make_collector(
        trainer.args, trainer.world, trainer.policy, trainer.engine, trainer.data, trainer.decode, ExpertPlayer
    )
    with closing(collect):
        played = collect.player.play(
            [trainer.prompts[number % len(trainer.prompts)] for number in range(episodes)],
            Dictation(trainer.engine.context_length),
            setup.sampling_settings(trainer.args, trainer.policy, 1.0),
            num_generations=1,
            streams=[(trainer.args.run.seed, IMITATION_STREAM, number) for number in range(episodes)],
            policy_version=0,
            progress=lambda done, of: told("the expert plays", done, of),
        )
    return [trajectory for (trajectory,) in played]


def _learn(
    trainer: GRPOTrainer, played: Sequence[Trajectory], epochs: int, per_step: int, told: Told
) -> list[dict[str, float]]:
    """Minimise the mean `-log p` of the expert's tokens; what each step was."""
    objective = make_objective("reinforce", aggregation="token_mean")  # -A log p with A = 1
    order = np.random.default_rng([trainer.args.run.seed, IMITATION_STREAM])
    parts, began = -(-len(played) // per_step), time.perf_counter()
    steps: list[dict[str, float]] = []
    for _ in range(epochs):
        for chosen in np.array_split(order.permutation(len(played)), parts):
            batch = _batch([episode for number in chosen for episode in played[number].episodes])
            gradients = trainer.learner.forward_backward(
                batch,
                np.arange(len(batch.episodes)),
                objective,
                temperature=1.0,
                max_completion_length=trainer.args.sampling.max_completion_length,
            )
            (rate,) = trainer.length.rates(trainer.next_phase(), len(steps))
            norm = trainer.learner.optim_step(rate)
            loss = -float(gradients.logp[batch.mask].mean(dtype=np.float64))
            if not np.isfinite([loss, norm]).all():
                raise ConfigError(
                    f"step {len(steps) + 1}: the loss is {loss} and its gradient's norm {norm}; choose a lower "
                    f"optim.learning_rate than {trainer.args.optim.learning_rate:g}"
                )
            step = {"step": len(steps) + 1, "loss": loss, "grad_norm": norm, "learning_rate": rate}
            steps.append(step | {"seconds": time.perf_counter() - began})
            told("learning", len(steps), epochs * parts)
    return steps


def _batch(episodes: Sequence[Episode]) -> Batch:
    """All that was said, with an advantage of 1."""
    lengths = np.array([[episode.num_sampled] for episode in episodes])
    mask = np.arange(lengths.max()) < lengths
    return Batch(
        episodes=tuple(episodes),
        group=np.arange(len(episodes)),
        advantages=mask.astype(np.float32),
        mask=mask,
        old_logprobs=np.zeros(mask.shape, np.float32),
        group_relative=False,
    )

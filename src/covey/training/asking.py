"""The trainer in a notebook: how it is shown, and what its model answers when it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.errors import ConfigError
from covey.training import setup
from covey.types import Request

COMPLETION_STREAM = 3
"""Second entry of the random stream of `GRPOTrainer.complete` and `generate`; see `evaluate.EVALUATION_STREAM`."""


def described(trainer: Any) -> str:
    """Model, data, step and folder of a trainer, in one line."""
    args, state = trainer.args, trainer.state
    source = args.environment.world or args.data.task or args.data.dataset or "rows in memory"
    data = f"{source}: {len(trainer.prompts)} training prompts, {len(trainer.eval_prompts)} held out"
    step = f"step {state.global_step} of {trainer.length.total_steps or '?'}"
    return f"GRPOTrainer({args.model.model}, {data}, {step}, {args.run.output_dir})"


def answers(trainer: Any, prompts: Any, num_generations: int, temperature: float | None) -> list[list[str]]:
    """See `GRPOTrainer.generate`."""
    args, column = trainer.args, trainer.args.data.prompt_column
    if trainer.world is not None:
        raise ConfigError("generate: agents answer in episodes of their world; use trainer.evaluation()")
    if args.environment.tools:
        raise ConfigError("generate: it calls no tools; use trainer.evaluation() or covey sample RUN PROMPT")
    if num_generations < 1:
        raise ConfigError(f"num_generations={num_generations}: must be at least 1")
    if trainer._samples is not None:
        trainer._samples.pause()
    one = isinstance(prompts, str) or any(isinstance(part, Mapping) and "role" in part for part in prompts)
    rows = [p if isinstance(p, Mapping) else {column: p} for p in ([prompts] if one else prompts)]
    chat = not isinstance(trainer.prompts[0].content, str)
    found = [(row, row.get(column)) for row in rows]
    rows = [{**r, column: setup.asked(trainer.data.task, p) if chat and isinstance(p, str) else p} for r, p in found]
    whole = args.model_copy(update={"data": args.data.model_copy(update={"long_prompts": "error"})})
    asked = setup.tokenize(whole, rows, trainer.data, trainer.policy, trainer.engine.context_length)
    stream, count = (args.run.seed, COMPLETION_STREAM, trainer.state.global_step), range(num_generations)
    requests = [Request(prompt.token_ids, (*stream, row, n)) for row, prompt in enumerate(asked) for n in count]
    wanted = args.evaluation.eval_temperature if temperature is None else temperature
    settings = setup.sampling_settings(args, trainer.policy, wanted)
    given = iter(trainer.engine(requests, settings, policy_version=trainer.state.policy_version))
    return [[trainer.decode(next(given).token_ids.tolist()) for _ in count] for _ in asked]

"""Put multiple-choice questions to a model: as text, with the options rotated, and by the likelihood of each letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from covey.errors import ConfigError
from covey.observe.choices import Answered
from covey.pytorch.backend import BACKEND
from covey.pytorch.engine import Engine
from covey.training.evaluate import EVALUATION_STREAM
from covey.training.setup import sampling_settings
from covey.training.trainer import GRPOTrainer
from covey.types import Progress, Request


@runtime_checkable
class ChoiceTask(Protocol):
    """A task whose rows have `question`, `options` (letter -> text) and `answer` (a letter)."""

    def chosen(self, text: str, row: Mapping[str, Any]) -> str | None:
        """The letter that a completion chooses, None if it chooses none."""
        ...

    def rotated(self, row: Mapping[str, Any], shift: int) -> dict[str, Any]:
        """The question with each option `shift` letters further on."""
        ...


def answer_choices(
    trainer: GRPOTrainer,
    task: ChoiceTask,
    *,
    name: str,
    rotations: int = 1,
    lead_in: str = "",
    progress: Progress | None = None,
) -> Answered:
    """Put the trainer's held-out questions to its model."""
    rows = [dict(prompt.columns) for prompt in trainer.eval_prompts]
    fewest = min(len(row["options"]) for row in rows)
    if not 0 <= rotations < fewest:
        raise ConfigError(f"rotations={rotations}: questions with {fewest} options have 0 to {fewest - 1}")
    letters = sorted({letter for row in rows for letter in row["options"]})
    own = isinstance(trainer.engine, Engine)
    total = len(rows) * (1 + rotations + (not own))

    def told(before: int) -> Progress | None:
        return None if progress is None else lambda done, _: progress(before + done, total)

    if own:
        texts, probabilities = _texts_and_probabilities(trainer, trainer.engine, letters, lead_in, told(0))
    else:
        texts = _texts(trainer, None, told(0))
    chosen = [task.chosen(text, row) for text, row in zip(texts, rows, strict=True)]
    rotated = []
    for shift in range(1, rotations + 1):
        turned = [task.rotated(row, shift) for row in rows]
        answers = _texts(trainer, turned, told(len(rows) * shift))
        written = [task.chosen(text, row) for text, row in zip(answers, turned, strict=True)]
        meant = [_turn_back(letter, row, shift) for letter, row in zip(written, rows, strict=True)]
        rotated.append((meant, written))
    if not own:
        left, engine = told(len(rows) * (1 + rotations)), _own_engine(trainer)
        _, probabilities = _texts_and_probabilities(trainer, engine, letters, lead_in, left, max_tokens=1)
    return Answered(name, texts, chosen, letters, rotated, probabilities)


def _texts_and_probabilities(
    trainer: GRPOTrainer, engine: Any, letters: Sequence[str], lead_in: str, progress: Progress | None, **limit: Any
) -> tuple[list[str], NDArray[np.float64]]:
    """Answers as of `_texts`, and `[n, L]` the probability that the model begins its answer with `lead_in` and the
    letter, at temperature 1; NaN for letters that a question's options do not have. Prompts are computed once for both.
    """
    prompts, args = trainer.eval_prompts, trainer.args
    encode, requests = trainer.policy.tokenizer, []
    said = [np.array(encode(lead_in + letter, add_special_tokens=False).input_ids, np.int64) for letter in letters]
    for number, prompt in enumerate(prompts):
        requests.append(Request(prompt.token_ids, (args.run.seed, EVALUATION_STREAM, number, 0)))
        requests += [Request(prompt.token_ids, forced=ids) for ids in said]
    found = engine(
        requests,
        replace(sampling_settings(args, trainer.policy, args.evaluation.eval_temperature), **limit),
        policy_version=trainer.state.policy_version,
        progress=None if progress is None else lambda done, of: progress(done * len(prompts) // of, len(prompts)),
    )
    logp = np.reshape([one.logprobs.sum(dtype=np.float64) for one in found], (len(prompts), -1))[:, 1:]
    has = [[letter in prompt.columns["options"] for letter in letters] for prompt in prompts]
    texts = [trainer.decode(one.token_ids.tolist()) for one in found[:: 1 + len(letters)]]
    return texts, np.where(has, np.exp(logp), np.nan)


def _own_engine(trainer: GRPOTrainer) -> Any:
    """Covey's engine with the policy's weights, beside another sampler, which gives its memory back."""
    trainer.engine.release()
    sampling = trainer.args.sampling.model_copy(update={"engine": "covey"})
    engine = BACKEND.make_sampler(trainer.args.model_copy(update={"sampling": sampling}), trainer.policy)
    engine.publish(trainer.policy.weights(trainer.state.policy_version))
    return engine


def _texts(trainer: GRPOTrainer, rows: Sequence[Mapping[str, Any]] | None, progress: Progress | None) -> list[str]:
    result = trainer.evaluation(None if rows is None else list(rows), progress)
    return [group.episodes[0].text for group in result.rollout.groups]


def _turn_back(letter: str | None, row: Mapping[str, Any], shift: int) -> str | None:
    """Where the option under a rotated letter stands in the question as it is."""
    if letter is None:
        return None
    letters = sorted(row["options"])
    return str(letters[(letters.index(letter) - shift) % len(letters)])

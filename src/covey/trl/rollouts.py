"""`rollout_func`: completions that the user's own function samples, in the place of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import GenerationError, raised_at
from covey.rollout.collect import Decode, Rollout, Scoring, grouped
from covey.rollout.learning import Learner
from covey.rollout.scoring import Scorer
from covey.types import Batch, Episode, Progress, Prompt, SamplingSettings

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class RolloutCollector(Scoring):
    """Completions of a function, scored; a `covey.rollout.collect.Collector`."""

    def __init__(
        self,
        function: Callable[[list[Any], Any], Mapping[str, Any]],
        trainer: Any,
        scorer: Scorer,
        decode: Decode,
        learner: Learner,
    ) -> None:
        self._function, self._trainer, self.scorer = function, trainer, scorer
        self._decode, self._learner = decode, learner

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
        """Call the function with every prompt `num_generations` times in a row, and score what it returns.

        It returns a dict of lists, an entry for each of these prompts: `prompt_ids`, `completion_ids`, `logprobs` (of
        the completion's tokens; None or NaN = not known, the policy's own is taken), and where some of these are not
        the policy's, `env_mask` (1 = sampled, 0 = not trained). Any other field goes to reward functions.

        Raises:
            GenerationError: the function raised, or returned something else.
            RewardError: from a reward function.
        """
        began = time.perf_counter()
        owners = [prompt for prompt in prompts for _ in range(num_generations)]
        contents = [p.content if isinstance(p.content, str) else [dict(m) for m in p.content] for p in owners]
        try:
            returned = self._function(contents, self._trainer)
        except Exception as error:
            raise GenerationError(
                f"rollout_func raised {type(error).__name__}: {error!s:.300}{raised_at(error)}"
            ) from error
        fields = _checked(returned, len(owners))
        episodes = [self._episode(fields, place, settings, policy_version) for place in range(len(owners))]
        episodes = measured(episodes, self._learner, settings.temperature)
        sampled = time.perf_counter()
        extra = {name: fields[name] for name in fields if name not in (*_REQUIRED, "env_mask")}
        asked = [
            replace(p, columns={**p.columns, **{name: values[i] for name, values in extra.items()}})
            for i, p in enumerate(owners)
        ]
        rewards, parts = self.scorer.score(asked, episodes)
        return Rollout(
            groups=grouped(prompts, episodes, rewards, parts),
            sampling_seconds=sampled - began,
            scoring_seconds=time.perf_counter() - sampled,
            sampled_tokens=sum(episode.num_sampled for episode in episodes),
        )

    def _episode(self, fields: Mapping[str, Any], place: int, settings: SamplingSettings, version: int) -> Episode:
        prompt, completion = (np.asarray(fields[name][place], np.int64).reshape(-1) for name in _REQUIRED[:2])
        logprobs = np.array([_first(value) for value in fields["logprobs"][place]], np.float32)
        mask = np.asarray(fields["env_mask"][place] if "env_mask" in fields else np.ones(len(completion))).astype(bool)
        if not len(prompt) or not len(completion) or not len(completion) == len(logprobs) == len(mask):
            raise GenerationError(
                f"rollout_func: completion {place} has {len(prompt)} prompt_ids, {len(completion)} completion_ids, "
                f"{len(logprobs)} logprobs and {len(mask)} entries of env_mask; the last three must be equally many, "
                "and there must be some"
            )
        return Episode(
            token_ids=np.concatenate([prompt, completion]),
            sampled=np.concatenate([np.zeros(len(prompt), np.bool_), mask]),
            logprobs=np.concatenate([np.zeros(len(prompt), np.float32), np.where(mask, logprobs, 0)]).astype(
                np.float32
            ),
            text=self._decode(completion.tolist()),
            finish_reason="stop" if int(completion[-1]) in settings.eos_token_ids else "length",
            policy_version=version,
        )


def _checked(returned: Any, count: int) -> dict[str, Any]:
    """The fields, each a list with an entry for each completion."""
    if not isinstance(returned, Mapping) or not set(_REQUIRED) <= returned.keys():
        names = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
        raise GenerationError(f"rollout_func returned {names or 'nothing'}; it must return a dict with {_REQUIRED}")
    fields = {}
    for name, values in returned.items():
        one_by_one = name in _REQUIRED or name == "env_mask" or isinstance(values, list)
        if one_by_one and (not hasattr(values, "__len__") or len(values) != count):
            found = str(len(values)) if hasattr(values, "__len__") else f"a {type(values).__name__}"
            raise GenerationError(
                f"rollout_func: {name} has {found} for {count} prompts; every prompt comes as often as it needs "
                "completions, so return one entry for each"
            )
        fields[str(name)] = values if one_by_one else [values] * count
    return fields


def _first(value: Any) -> float:
    """A log-probability, NaN for None; of several for a token, the first is the sampled one's."""
    value = value[0] if isinstance(value, list | tuple) else value
    return float("nan") if value is None else float(value)


def measured(episodes: Sequence[Episode], learner: Learner, temperature: float) -> list[Episode]:
    """With the policy's own log-probabilities where they are not known, NaN or infinite."""
    if all(np.isfinite(episode.logprobs).all() for episode in episodes):
        return list(episodes)
    lengths = np.array([episode.num_sampled for episode in episodes])
    exists: NDArray[np.bool_] = np.arange(max(int(lengths.max()), 1))[None, :] < lengths[:, None]
    zeros, rows = np.zeros(exists.shape, np.float32), np.arange(len(episodes))
    batch = Batch(tuple(episodes), rows, zeros, exists, zeros)
    scores, _ = learner.scores(batch, np.flatnonzero(lengths), temperature=temperature)
    found = []
    for episode, length, values in zip(episodes, lengths, scores, strict=True):
        logprobs = np.zeros(len(episode.token_ids), np.float32)
        logprobs[episode.sampled] = values[:length]
        found.append(replace(episode, logprobs=np.where(np.isfinite(episode.logprobs), episode.logprobs, logprobs)))
    return found

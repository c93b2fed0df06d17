"""What samples in the engine's place: `model.generate`, where somebody replaced it or asks for what Covey's sampler
does not have, and `rollout_func`.

What these return need not be drawn from the policy: beams, penalties and functions of one's own draw otherwise. As in
TRL, the policy's log-probabilities of such tokens are measured afterwards, and the ratio begins at 1.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, GenerationMixin

import covey
from covey.errors import ConfigError, GenerationError, raised_at
from covey.rollout.collect import Decode, Rollout, Scoring
from covey.rollout.learning import Learner, Sampler
from covey.rollout.scoring import Scorer
from covey.rollout.turns import NO_LIMIT, Device, Drawn, Row, Session
from covey.trl.arguments import GRPOConfig
from covey.types import Batch, Completion, Episode, FinishReason, Prompt, Request, SamplingSettings

log = logging.getLogger("covey.trl")

_ROWS = 64  # completions in one call
_GENERATE = GenerationMixin.generate
_config: Any = GenerationConfig
_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that transformers' `generate` has not, and values that it does not take: a `ConfigError`."""
    unknown = [name for name in options if not hasattr(_config(), name)]
    if unknown:
        raise ConfigError(f"generation_kwargs: {', '.join(unknown)}: transformers' generate has no such option")
    try:
        _config(**options).validate(strict=False)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"generation_kwargs={dict(options)!r:.200}: {error!s:.300}") from error


class Generating:
    """A run's engine; or, where that is wanted, `generate` of the model that is trained."""

    def __init__(self, run: covey.GRPOTrainer, engine: Sampler, args: GRPOConfig, options: Mapping[str, Any]) -> None:
        self._engine: Any = engine
        self._run, self._args, self.options = run, args, dict(options)
        self._told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, requests: Sequence[Request], settings: SamplingSettings, **what: Any) -> list[Completion]:
        """See `covey.types.Generator`."""
        if not self._wanted():
            found: list[Completion] = self._engine(requests, settings, **what)
            return found
        session = self._open(settings, what["policy_version"], NO_LIMIT)
        return session.run([session.start(request) for request in requests], what.get("progress"))

    def session(self, settings: SamplingSettings, **what: Any) -> Session[Any]:
        """See `covey.rollout.turns.TurnGenerator`."""
        if self._wanted():
            return self._open(settings, what["policy_version"], what["own_tokens"])
        opened: Session[Any] = self._engine.session(settings, **what)
        return opened

    def _wanted(self) -> bool:
        model = self._run.policy_model
        replaced = GenerationMixin.generate is not _GENERATE or "generate" in vars(model)
        if (replaced or self.options) and not self._told:
            self._told = True
            why = ", ".join(self.options) or "it was replaced"
            log.warning("sampling with the model's own generate (%s), which is slower than Covey's engine", why)
        return replaced or bool(self.options)

    def _open(self, settings: SamplingSettings, policy_version: int, own_tokens: int) -> Session[Any]:
        device = _GenerateDevice(self, own_tokens)
        return Session(device, settings, policy_version=policy_version, tokenizer=self._run.policy.tokenizer)

    def turns(self, rows: Sequence[Row]) -> Drawn:
        """A turn of each row; an error if `generate` raised, or returned something else than `[rows, width]` ids."""
        run, settings, histories = self._run, rows[0].settings, [row.history() for row in rows]
        model, tokenizer = run.policy_model, run.policy.tokenizer
        width = max(map(len, histories))
        padding = settings.eos_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ids, mask = np.full((len(rows), width), padding, np.int64), np.zeros((len(rows), width), np.int64)
        for place, history in enumerate(histories):
            ids[place, width - len(history) :], mask[place, width - len(history) :] = history, 1
        device = next(model.parameters()).device
        devices = [device] if device.type == "cuda" else []
        half, halves = torch.bfloat16 if self._args.bf16 else torch.float16, bool(self._args.bf16 or self._args.fp16)
        try:
            # Seeded by the first row's stream, so that a resumed run draws what the unbroken one does.
            with torch.random.fork_rng(devices), torch.no_grad(), torch.autocast(device.type, half, halves):
                torch.manual_seed(rows[0].key >> 1)
                output = model.generate(
                    input_ids=torch.from_numpy(ids).to(device),
                    attention_mask=torch.from_numpy(mask).to(device),
                    generation_config=self._config(settings, max(row.limit for row in rows), padding),
                )
            found = output[:, width:].tolist()
        except Exception as error:  # the user's function, or one of transformers' many
            raise GenerationError(f"the model's generate {_raised(error)}") from error
        if len(found) != len(rows) or not all(found):
            raise GenerationError(
                f"the model's generate returned {tuple(output.shape)} for prompts of {ids.shape}; it must return as "
                "many rows, the prompts with at least one more token each"
            )
        turns, reasons = zip(*[_turn(row, tokens) for row, tokens in zip(rows, found, strict=True)], strict=True)
        return self._drawn(rows, histories, turns, reasons)

    def _config(self, settings: SamplingSettings, max_new_tokens: int, padding: int) -> Any:
        drawn = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
        options: dict[str, Any] = {"do_sample": settings.temperature > 0, **(drawn if settings.temperature else {})}
        if settings.min_p:
            options["min_p"] = settings.min_p
        ends = {"eos_token_id": list(settings.eos_token_ids), "pad_token_id": padding}
        return _config(**(options | ends | {"max_new_tokens": max_new_tokens} | self.options))

    def _drawn(
        self, rows: Sequence[Row], histories: Sequence[Any], turns: Sequence[Any], reasons: Sequence[FinishReason]
    ) -> Drawn:
        given = zip(histories, turns, reasons, strict=True)
        unknown = [(history, np.array(turn, np.int64), np.full(len(turn), np.nan), end) for history, turn, end in given]
        episodes = [_episode(history, turn, np.ones(len(turn), bool), nan, end) for history, turn, nan, end in unknown]
        scored = measured(episodes, self._run.learner, rows[0].settings.temperature or 1.0)
        tokens = np.full((len(rows), max(map(len, turns))), -1, np.int64)
        logprobs = np.zeros(tokens.shape, np.float32)
        for place, (turn, episode) in enumerate(zip(turns, scored, strict=True)):
            tokens[place, : len(turn)], logprobs[place, : len(turn)] = turn, episode.logprobs[episode.sampled]
        return Drawn(rows, tokens, logprobs, finished=reasons)


class _GenerateDevice(Device):
    def __init__(self, sampler: Generating, own_tokens: int) -> None:
        super().__init__(sampler.context_length, own_tokens)
        self._sampler = sampler

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        while queue:
            yield self._sampler.turns([queue.popleft() for _ in range(min(_ROWS, len(queue)))])

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        while resuming:
            rows, resuming[:] = resuming[:_ROWS], resuming[_ROWS:]
            yield self._sampler.turns(rows)


def _turn(row: Row, tokens: Sequence[int]) -> tuple[list[int], FinishReason]:
    """The tokens as far as the turn goes: what follows its end is padding."""
    taken: list[int] = []
    for token in tokens[: row.limit]:
        taken.append(token)
        if token in row.settings.eos_token_ids or (row.matcher is not None and row.matcher.push(token)):
            return taken, "stop"
    return taken, "length"


@dataclass(frozen=True, slots=True, eq=False)
class RolloutCollector(Scoring):
    """Completions of a function, scored; a `covey.rollout.collect.Collector`."""

    function: Callable[[list[Any], Any], Mapping[str, Any]]
    trainer: Any
    scorer: Scorer
    decode: Decode
    learner: Learner

    def __call__(self, prompts: Sequence[Prompt], settings: SamplingSettings, **what: Any) -> Rollout:
        """Call the function with every prompt `num_generations` times in a row, and score what it returns.

        It returns a dict of lists, an entry for each of these prompts: `prompt_ids`, `completion_ids`, `logprobs` (of
        the completion's tokens; None or NaN = not known, the policy's own is taken), and where some of these are not
        the policy's, `env_mask` (1 = sampled, 0 = not trained). Any other field goes to reward functions. Raises
        `GenerationError`: the function raised, or returned something else; `RewardError`: from a reward function.
        """
        began = time.perf_counter()
        owners = [prompt for prompt in prompts for _ in range(what["num_generations"])]
        contents = [p.content if isinstance(p.content, str) else [dict(m) for m in p.content] for p in owners]
        try:
            returned = self.function(contents, self.trainer)
        except Exception as error:
            raise GenerationError(f"rollout_func {_raised(error)}") from error
        fields = _checked(returned, len(owners))
        episodes = [self._episode(fields, place, settings, what["policy_version"]) for place in range(len(owners))]
        episodes = measured(episodes, self.learner, settings.temperature)
        extra = {name: fields[name] for name in fields if name not in (*_REQUIRED, "env_mask")}
        asked = [
            replace(p, columns={**p.columns, **{name: values[i] for name, values in extra.items()}})
            for i, p in enumerate(owners)
        ]
        return self.scored(prompts, asked, episodes, began)

    def _episode(self, fields: Mapping[str, Any], place: int, settings: SamplingSettings, version: int) -> Episode:
        prompt, completion = (np.asarray(fields[name][place], np.int64).reshape(-1) for name in _REQUIRED[:2])
        # of several for a token, the first is the sampled one's
        firsts = [x[0] if isinstance(x, list | tuple) else x for x in fields["logprobs"][place]]
        logprobs = np.array([np.nan if x is None else float(x) for x in firsts], np.float32)
        mask = np.asarray(fields["env_mask"][place] if "env_mask" in fields else np.ones(len(completion))).astype(bool)
        if not len(prompt) or not len(completion) or not len(completion) == len(logprobs) == len(mask):
            raise GenerationError(
                f"rollout_func: completion {place} has {len(prompt)} prompt_ids, {len(completion)} completion_ids, "
                f"{len(logprobs)} logprobs, {len(mask)} of env_mask; give some, of the last three equally many"
            )
        reason: FinishReason = "stop" if int(completion[-1]) in settings.eos_token_ids else "length"
        return _episode(prompt, completion, mask, logprobs, reason, self.decode(completion.tolist()), version)


def _episode(
    prompt: Any, completion: Any, mask: Any, logprobs: Any, reason: FinishReason, text: str = "", version: int = 0
) -> Episode:
    """Of token ids; `mask` and `logprobs` are those of the completion."""
    zeros = np.zeros(len(prompt))
    sampled = np.concatenate([zeros.astype(bool), mask])
    logprobs = np.concatenate([zeros, np.where(mask, logprobs, 0)]).astype(np.float32)
    return Episode(np.concatenate([prompt, completion]), sampled, logprobs, text, reason, version)


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
                f"rollout_func: {name} has {found} for {count} prompts (each comes once for each of its completions)"
            )
        fields[str(name)] = values if one_by_one else [values] * count
    return fields


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error!s:.300}{raised_at(error)}"


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

"""The generation engine: samples completions, or conversations of several turns, in this process.

The engine holds a copy of the policy's weights; what is under way with them is a `Session`. Each completion draws from
its own random stream, so what it samples does not depend on the others.

Limits: slots are as long as the longest turn may be, and no CUDA graphs are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from covey.errors import GenerationError, ModelError
from covey.pytorch.engine.cache import KVCache
from covey.pytorch.engine.choose import choose_runner, in_bytes, is_emulated
from covey.pytorch.engine.device import TorchDevice
from covey.pytorch.engine.merge import bare_model
from covey.pytorch.models.loading import context_length
from covey.pytorch.models.narrow import computing_dtype, narrow_weights
from covey.pytorch.passes import within_memory
from covey.rollout.learning import NO_VERSION, Weights, check_call
from covey.rollout.turns import GenerationStats, Session
from covey.types import Completion, Progress, Request, SamplingSettings

_LOG = logging.getLogger(__name__)


class Engine:
    """Samples completions from a copy of a policy's weights; implements `covey.types.Generator`.

    The weights are taken at construction, as version 0, and again at every `publish`. The policy itself is never
    changed: adapters are merged into the copy only.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        tokenizer: needed for stop strings only.
        kv_cache_bytes: upper limit of the memory for keys and values.
        max_batch_size: most completions in the decode batch.
        context_length: most tokens of prompt and completion together; default: what the model was built for.
        dtype: of the copy and of the computation; default: the model's. Probabilities are float32 always. int8: the
            products with weights, of a model in float32 or with frozen matrices in bfloat16 on a CPU.
        device: of the copy; default: the model's.
        runner: how the model is run, "fast", "general" or "recompute"; default: the first way that computes what the
            model itself does. With it no weights are taken at construction, and those of `model` need not be there.

    Attributes:
        policy_version: of the weights held; -1 after `release`, and after a `publish` that did not finish.
        max_batch_size: fewer than were asked for once memory has run out.
        runner: how the model is run.

    Raises `ModelError`: the model cannot be run, or `context_length` exceeds the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        kv_cache_bytes: int = 1 << 30,
        max_batch_size: int = 64,
        context_length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        runner: str | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise ModelError(f"max_batch_size={max_batch_size}: at least one completion must run; use 1 or more")
        held = next(p for p in model.parameters() if p.is_floating_point())
        self._device = torch.device(device) if device is not None else held.device
        self._dtype = computing_dtype(model) if dtype in (None, torch.int8) else dtype
        self._tokenizer, self.max_batch_size = tokenizer, max_batch_size
        self.context_length = _context_length(model, context_length)
        self._session: Session[TorchDevice] | None = None
        self._runner, why = choose_runner(model, self._dtype, self._device, runner)
        if why:
            _LOG.warning("sampling with the %s runner, which is slower than the fast one: %s", self._runner.name, why)
        if dtype == torch.int8:
            self._runner = in_bytes(self._runner, model, self._dtype, self._device, load=runner is None)
        multiplied = next((weight.dtype for weight in narrow_weights(model)), self._dtype)
        if is_emulated(multiplied, self._device):
            _LOG.warning("sampling in %s, for which this processor has no instructions: float32 is faster", multiplied)
        self._cache = KVCache(self._runner.layer_shapes, kv_cache_bytes, self._dtype, self._device)
        self.policy_version, self.runner = NO_VERSION if runner else 0, self._runner.name

    @property
    def last_stats(self) -> GenerationStats:
        return GenerationStats() if self._session is None else self._session.stats()

    def publish(self, weights: Weights) -> None:
        """Take weights, adapters merged, in place of those held: of the model that the engine was built from, or one of
        equal shape, as PyTorch tensors. Their version must be asked for in the calls that follow.
        """
        self.policy_version = NO_VERSION  # until all of it has arrived: a broken copy must not be sampled from
        self._runner.load(weights.tensors())
        self.policy_version = weights.version

    def release(self) -> None:
        """Give back what memory can be given back until the next `publish`, which must come before the next call."""
        self.policy_version = NO_VERSION
        self._runner.release()
        if self._device.type != "cpu":  # there new pages take longer than they are worth
            self._cache.give_back()

    def close(self) -> None:
        """Nothing runs beside this process."""

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`.

        `max_tokens` is cut to what the context leaves (finish reason "length"). With `keep_support` and nothing cut off
        (`SamplingSettings.cuts`) a completion's `support` is None. When memory runs out all are sampled again, half as
        many at a time, from the same random streams.

        Raises:
            GenerationError: other weights than `policy_version` are held, a prompt is empty or does not fit the context
                (with what is forced), not even one completion fits the cache or the memory, or the logits are not
                finite.
            ConfigError: the settings describe no distribution.
        """

        def sample() -> list[Completion]:
            session = self._open(settings, policy_version)
            return session.run([session.start(request) for request in requests], progress)

        return within_memory(sample, self._halve)

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> Session[TorchDevice]:
        """Sample conversations of several turns, begun and continued at any time, all in one batch.

        Args:
            settings: how tokens are drawn; `max_tokens` is the limit of a turn.
            policy_version: must be that of the weights held.
            rows: most conversations that are sampled at once; fewer if the cache does not hold them. The others wait,
                and what they have said is computed again if its memory was needed meanwhile.
            own_tokens: longest conversation after its first prompt, in tokens. Memory is taken as it grows.
            prompt_lengths: tokens of first prompts.

        Raises `GenerationError`: other weights are held, or not even one conversation fits the cache.
        """
        session = self._open(settings, policy_version)
        rows = min(rows, self.max_batch_size)
        session.device.reserve(rows, own_tokens, settings.max_tokens, max(prompt_lengths, default=1))
        return session

    def serving_session(
        self, settings: SamplingSettings, *, policy_version: int, rows: int, own_tokens: int
    ) -> Session[TorchDevice]:
        """Sample single completions that come and go. Prompts and completions are held while there is memory, so that
        a later prompt which begins with them is not computed again.

        `settings` are for completions that bring none of their own, `own_tokens` is the longest completion, and `rows`
        most at once; fewer if they would need more than three fifths of the cache. `GenerationError` where other
        weights are held, or not even one completion fits.
        """
        session = self._open(settings, policy_version)
        session.device.reserve_to_serve(min(rows, self.max_batch_size), own_tokens)
        return session

    def _halve(self, error: BaseException) -> None:
        rows = min(self._cache.slots, self.max_batch_size)
        if rows <= 1:
            raise GenerationError(
                "memory runs out with one completion at a time; use a smaller model, a smaller sampling.kv_cache_gb or "
                "shorter completions (sampling.max_completion_length)"
            ) from error
        self.max_batch_size = rows // 2
        self._session = None  # which holds what was computed
        self._cache.give_back()
        said = "out of memory (%s): the completions are sampled again, at most %d at a time"
        _LOG.warning(said, str(error).splitlines()[0], self.max_batch_size)

    def _open(self, settings: SamplingSettings, policy_version: int) -> Session[TorchDevice]:
        check_call(settings, policy_version, held=self.policy_version, tokenizer=self._tokenizer)
        device = TorchDevice(self._runner, self._cache, self.max_batch_size, self.context_length, self._device)
        self._session = Session(device, settings, policy_version=policy_version, tokenizer=self._tokenizer)
        return self._session


def _context_length(model: nn.Module, asked: int | None) -> int:
    built_for = context_length(bare_model(model))
    if asked is not None and not 2 <= asked <= built_for:
        raise ModelError(f"context_length={asked}: the model was built for 2 to {built_for} tokens; use one of these")
    return asked or built_for

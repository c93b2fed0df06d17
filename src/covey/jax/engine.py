"""The generation engine in JAX: samples completions, or conversations of several turns.

It does what `covey.pytorch.engine.Engine` does: a copy of the weights with adapters merged, random streams that belong
to the completion, sessions. Limits: each completion has its own copy of its prompt's keys and values, and room for the
longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from covey.jax.device import JaxDevice
from covey.jax.layout import CacheLayout
from covey.jax.loading import params_from_tensors
from covey.jax.model import Transformer
from covey.jax.policy import Parameters
from covey.jax.programs import Programs
from covey.rollout.learning import NO_VERSION, Weights, check_call
from covey.rollout.turns import Session
from covey.types import Completion, Progress, Request, SamplingSettings


class Engine:
    """Samples completions from a copy of a policy's weights; implements `covey.types.Generator`.

    Args:
        model: of the policy; its weights are taken as version 0.
        tokenizer: needed for stop strings only.
        kv_cache_bytes: upper limit of the memory for keys and values.
        max_batch_size: most completions that are sampled at once.
        context_length: most tokens of prompt and completion together.
        dtype: of the copy and of the computation; default: that of the weights. Probabilities are float32 always.
        mesh: devices over which completions and weights are spread, or None.
    """

    runner = "jax"

    def __init__(
        self,
        model: Parameters,
        tokenizer: Any = None,
        *,
        kv_cache_bytes: int = 1 << 30,
        max_batch_size: int = 64,
        context_length: int = 1 << 31,
        dtype: str | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.context_length, self.max_batch_size = context_length, max_batch_size
        self._tokenizer, self._bytes, self._dtype, self._mesh = tokenizer, kv_cache_bytes, dtype, mesh
        self._config = replace(model.model.config, remat=False)
        self._programs = Programs(Transformer(self._config), mesh)
        self._params: Any = None
        self._version = NO_VERSION
        self._longest_prompt = 0
        self.publish(Weights(0, dict, native=model))

    @property
    def policy_version(self) -> int:
        """Version of the weights held; -1 after `release`."""
        return self._version

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far."""
        return self._programs.compilations

    def expect(self, prompt: int) -> None:
        """Make room for prompts of so many tokens in every call, so that all calls have one shape."""
        self._longest_prompt = prompt

    def publish(self, weights: Weights) -> None:
        """Take weights, adapters merged, in place of those held; arrays by name from elsewhere are taken too.

        Raises:
            ModelError: arrays from elsewhere do not fit the model.
        """
        self._version, self._params = NO_VERSION, None
        if isinstance(weights.native, Parameters):  # merged on the devices, without going through the host
            variables = weights.native.variables
        else:
            source = f"version {weights.version} of the weights"
            variables = {"params": params_from_tensors(self._config, weights.tensors(), source=source)}
        params, lora = variables["params"], variables.get("lora", {})
        dtype = jnp.dtype(self._dtype) if self._dtype else params["embedding"].dtype
        # Beside an adapter these are frozen: nobody writes to them, and no copy is needed.
        shared = {name: params[name] for name in ("embedding", "head") if lora and name in params}
        shared = {name: array for name, array in shared.items() if array.dtype == dtype}
        rest = {name: value for name, value in params.items() if name not in shared}
        self._params = self._programs.merge(rest, lora, dtype=dtype) | shared
        self._version = weights.version

    def release(self) -> None:
        """Give the copy's memory back until the next `publish`, which must come before the next call."""
        self._version, self._params = NO_VERSION, None

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

        Raises:
            GenerationError: other weights than `policy_version` are held, a prompt is empty or does not fit the
                context, not even one completion fits the cache, or the logits are not finite.
            ConfigError: the settings describe no distribution.
        """
        self._check(settings, policy_version)
        if not requests:
            return []
        longest = max(len(request.token_ids) for request in requests)
        layout = self._layout(len(requests), longest, settings.max_tokens)
        session = self._open(settings, layout)
        rows = [session.start(request) for request in requests]
        return session.run(rows, progress)

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> Session[JaxDevice]:
        """Sample conversations of several turns; see `covey.pytorch.engine.Engine.session`.

        Raises:
            GenerationError: other weights are held, or not even one conversation fits the cache.
        """
        self._check(settings, policy_version)
        layout = self._layout(rows, max(prompt_lengths), own_tokens)
        return self._open(settings, replace(layout, prompt=layout.positions), own_tokens)  # later prompts may be longer

    def _layout(self, rows: int, prompt: int, more: int) -> CacheLayout:
        prompt = max(prompt, self._longest_prompt)
        length = min(prompt + more, self.context_length)
        heads, size = self._config.num_kv_heads, self._config.width_of_head
        one = 2 * self._config.num_layers * heads * size * int(self._params["embedding"].dtype.itemsize)
        return CacheLayout.of(min(rows, self.max_batch_size), prompt, length, one, self._bytes, self._mesh)

    def _check(self, settings: SamplingSettings, policy_version: int) -> None:
        check_call(settings, policy_version, held=self._version, tokenizer=self._tokenizer, model="weights")

    def _open(
        self, settings: SamplingSettings, layout: CacheLayout, own_tokens: int | None = None
    ) -> Session[JaxDevice]:
        device = JaxDevice(
            self._programs,
            self._params,
            self._config,
            settings,
            layout,
            context_length=self.context_length,
            own_tokens=own_tokens,
            mesh=self._mesh,
        )
        return Session(device, settings, policy_version=self._version, tokenizer=self._tokenizer)

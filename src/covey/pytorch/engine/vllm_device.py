"""Turns in the batch of a vLLM that runs in this process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.errors import GenerationError
from covey.rollout.drawing import drawing
from covey.rollout.turns import Device, Drawn, Row

INSTEAD = "or sampling.engine to covey"


class VLLMDevice(Device):
    """Turns in vLLM's batch; a `covey.rollout.turns.Device`. A row's `place` is its request's name."""

    def __init__(self, vllm: Any, engine: Any, adapter: Any, context: int, own_tokens: int, vocabulary: int) -> None:
        super().__init__(context, own_tokens)
        self._vllm, self._engine, self._adapter, self._vocabulary = vllm, engine, adapter, vocabulary
        self._rows: dict[str, Row] = {}
        self._asked = itertools.count()
        self._generators: list[Tensor] = []

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Hand all rows to vLLM, which batches them as it likes."""
        while queue:
            self._ask(queue.popleft())
        return iter(())

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """Hand all answered rows to vLLM, with everything that was said before."""
        while resuming:
            self._ask(resuming.pop(0))
        return iter(())

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """Steps of vLLM until a turn is over; the turns that are."""
        over: list[Any] = []
        while self._rows and not over:
            try:
                with self._own_numbers():
                    over = [one for one in self._engine.step() if one.finished]
            except (RuntimeError, ValueError) as error:  # torch's out-of-memory error is a RuntimeError
                raise GenerationError(
                    f"vLLM fails while it samples: {error!s:.400}; lower max_model_len in vllm.llm_arguments, {INSTEAD}"
                ) from error
        for one in over:
            row = self._rows.pop(one.request_id, None)
            if row is not None:
                yield self._drawn(row, one.outputs[0])

    def drop(self, row: Row) -> None:
        """Nobody waits for its turn any more."""
        if self._rows.pop(row.place, None) is not None:
            self._engine.abort_request([row.place])

    def end(self) -> None:
        """Forget all rows: whoever asked for them has gone."""
        names, self._rows = list(self._rows), {}
        if names:
            self._engine.abort_request(names)

    def _ask(self, row: Row) -> None:
        if row.choices is not None:
            raise GenerationError(
                f"vLLM does not choose among sequences; set environment.action_format to text or tags, {INSTEAD}"
            )
        if not self._generators and not self._rows:
            with torch.random.fork_rng(self._devices()):
                torch.manual_seed(row.key)
                self._generators = self._states()
        row.place = f"covey-{id(self)}-{next(self._asked)}"
        prompt = {"prompt_token_ids": row.history().tolist()}
        settings = drawing(replace(row.settings, max_tokens=row.limit))
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        how = self._vllm.SamplingParams(**settings, output_kind=kind, detokenize=bool(row.settings.stop_strings))
        self._engine.add_request(row.place, prompt, how, lora_request=self._adapter)
        self._rows[row.place] = row

    def _drawn(self, row: Row, found: Any) -> Drawn:
        ids = np.array(found.token_ids, dtype=np.int64)
        if len(ids) == 0 or ids.max() >= self._vocabulary or found.finish_reason not in ("stop", "length"):
            raise GenerationError(
                f"vLLM ended a completion with {found.finish_reason!r} and the token ids {found.token_ids!r:.80}; the "
                f"policy's are 0 to {self._vocabulary - 1}"
            )
        logprobs = [told[token].logprob for token, told in zip(found.token_ids, found.logprobs, strict=True)]
        return Drawn([row], ids[None], np.array([logprobs], dtype=np.float32), None, [found.finish_reason])

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Torch's generators as they were when this device drew last, and afterwards as the process had them."""
        with torch.random.fork_rng(self._devices()):
            torch.set_rng_state(self._generators[0])
            for device, state in zip(self._devices(), self._generators[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._generators = self._states()

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices())]

    @staticmethod
    def _devices() -> list[int]:
        return [torch.cuda.current_device()] if torch.cuda.is_available() else []

"""How an inference server is spoken to: publish weights, ask for completions, read the answer.

`RemoteEngine` keeps versions, threads, conversations and checks; a `Dialect` is the rest, which differs between
servers. `server.inference_server_kind` names one: "covey", "vllm", "sglang", or a class of your own as `FILE.py:NAME`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from covey.adapters import CONFIG_FILE, WEIGHTS_FILE
from covey.errors import AdapterError, ServingError
from covey.rollout.learning import Weights
from covey.serving.client import InferenceClient, RefusedError
from covey.types import Request, SamplingSettings


@dataclass(frozen=True, eq=False)
class Upload:
    """Weights on their way to a server."""

    trainer: str
    version: int
    sha256: str
    tensors: Callable[[], Mapping[str, Any]]
    adapter: tuple[bytes, Mapping[str, Any]] | None
    first: bool

    @classmethod
    def of(cls, weights: Weights, trainer: str, *, first: bool) -> Upload:
        """The upload of these weights; an adapter is copied, so that it can be sent again later.

        Raises `AdapterError`: the adapter is more than plain LoRA.
        """
        held = weights.adapter
        files = None if held is None else (held.to_bytes(), held.config)
        return cls(trainer, weights.version, "" if held is None else held.sha256, weights.tensors, files, first)

    @property
    def name(self) -> str:
        """Of these weights and of no others: a request that names it can get no stale ones."""
        run = hashlib.sha256(self.trainer.encode()).hexdigest()[:8]
        return f"covey-{run}-v{self.version}-{self.sha256[:8]}".rstrip("-")

    @property
    def adapter_files(self) -> tuple[bytes, Mapping[str, Any]]:
        """The adapter as PEFT's two files, the second one read. Raises `AdapterError`: there is none."""
        if self.adapter is None:
            raise AdapterError("the model has no LoRA adapter to upload; set model.use_peft to true")
        return self.adapter

    def write_adapter(self, folder: Path) -> Path:
        """Write the adapter's two files below `folder`, in a folder of its own, and return that."""
        weights, config = self.adapter_files
        path = folder.resolve() / self.name
        path.mkdir(parents=True, exist_ok=True)
        (path / WEIGHTS_FILE).write_bytes(weights)
        (path / CONFIG_FILE).write_text(json.dumps(dict(config)), encoding="utf-8")
        return path

    def write_weights(self, folder: Path) -> Path:
        """Write all weights to `folder/model.safetensors`, in the place of what is there; return the folder."""
        (folder := folder.resolve()).mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.as_tensor(t).detach().cpu().clone().contiguous() for name, t in self.tensors().items()}
        beside = folder / "model.safetensors.new"
        save_file(tensors, beside, metadata={"format": "pt"})
        os.replace(beside, folder / "model.safetensors")
        return folder


class Sampled(NamedTuple):
    """One completion as a server tells it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    support: tuple[Sequence[int], Sequence[int]] | None = None


class Limits(NamedTuple):
    """What a server can do: most tokens of prompt and completion together, and of a completion."""

    context: int = 1 << 31
    completion: int = 1 << 31


class Dialect:
    """One kind of server. Subclass it and write `publish`, `request` and `read`."""

    name = "this server"
    per_request = 8
    """Completions of one request: few, so that an answer comes soon and a failure costs little."""
    constrains = False
    """It keeps supports and chooses among token sequences."""

    def __init__(self, client: InferenceClient, trainer: str, folder: Path) -> None:
        self.client, self.trainer, self.folder = client, trainer, folder

    def limits(self) -> Limits:
        """What the server can do; asked once, before training. Raises `ServingError`: the server cannot be reached."""
        self.client.health()
        return Limits()

    def publish(self, upload: Upload) -> None:
        """Let the server sample from these weights, and return when it does; the ones before may go.

        Raises `ServingError`: it does not, or applied other numbers.
        """
        raise NotImplementedError

    def request(self, requests: Sequence[Request], settings: SamplingSettings) -> tuple[str, dict[str, Any]]:
        """Path and JSON body that ask for one completion of each request, from the weights published last."""
        raise NotImplementedError

    def read(self, answer: Mapping[str, Any], count: int) -> list[Sampled]:
        """The completions of an answer, in the order of the requests.

        Raises `ServingError`: they are of other weights than those published last; `KeyError, TypeError, ValueError`:
        the answer is not one.
        """
        raise NotImplementedError

    def recover(self, error: RefusedError, upload: Upload) -> bool:
        """Whether a refused request may be sent again, since the server had lost the weights and has them now."""
        return False

    def close(self) -> None:
        """Called when the run is over."""


def choices_of(answer: Mapping[str, Any], count: int, url: str) -> list[Mapping[str, Any]]:
    """The `choices` of an OpenAI-like answer. Raises `ServingError`: there are not `count` of them."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != count:
        raise ServingError(f"{url} answered {answer!r:.200} to {count} prompts")
    return choices

"""`covey serve --check URL`: is there a server that can be trained with, as `covey serve` can?

It is asked what training asks, in the same words and by the same code: `/health`, a first upload, and completions that
must name its version.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.adapters import Adapter, read_adapter
from covey.errors import CoveyError
from covey.rollout.learning import Weights
from covey.serving.client import InferenceClient
from covey.serving.remote import RemoteEngine
from covey.types import Request, SamplingSettings


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried on a server, and its result."""

    name: str
    passed: bool | None
    detail: str


def check_server(client: InferenceClient, adapter: tuple[bytes, dict[str, Any]] | None = None) -> list[Step]:
    """Try a server, step by step; a step that fails ends it."""
    steps: list[Step] = []
    engine, tried = None, "health"
    try:
        before = client.health().get("policy_version")
        engine = RemoteEngine(client, trainer=f"covey serve --check on {socket.gethostname()}"[-200:])
        steps.append(Step(tried, True, f"{client.url} answers"))
        tried = "upload"
        weights, config = adapter or made_adapter()
        held = read_adapter(weights, config)
        version = before + 1 if isinstance(before, int) else 1
        engine.publish(Weights(version, dict, lambda: held))
        steps.append(Step(tried, True, f"{len(weights)} bytes"))
        told = engine.dialect.server_version  # type: ignore[attr-defined]
        counted = f"{before} before, {told} after the upload"
        steps.append(Step("version", None if before is None else told == version, counted))
        sha256 = engine.dialect.server_sha256  # type: ignore[attr-defined]
        detail = f"{sha256[:16]}... of the applied tensors" if sha256 else "the server does not say what it applied"
        steps.append(Step("hash", True if sha256 else None, detail))
        tried = "completion"
        requests = [Request(np.array(ids), (0, place)) for place, ids in enumerate(([5, 6, 7], [8]))]
        said = engine(requests, SamplingSettings(max_tokens=4, eos_token_ids=(2,)), policy_version=version)
        counted = f"{sum(len(one.token_ids) for one in said)} tokens for {len(said)} prompts"
        steps.append(Step(tried, True, f"{counted}, with log-probabilities"))
    except CoveyError as error:
        made = " (what was tried fits SmolLM2-135M only)" if tried == "upload" and adapter is None else ""
        steps.append(Step(tried, False, f"{error}{made}"))
    finally:
        if engine is not None:
            engine.close()
    return steps


def made_adapter(
    module: str = "model.layers.0.self_attn.q_proj", width: int = 576, out: int | None = None
) -> tuple[bytes, dict[str, Any]]:
    """A throw-away adapter of rank 1 on one layer of `width` inputs and `out` outputs (None = as many), with B = 0: it
    changes nothing.
    """
    name, out = f"base_model.model.{module}", width if out is None else out
    shapes = {"lora_A": (1, width), "lora_B": (out, 1)}
    tensors = {f"{name}.{half}.weight": np.zeros(shape, np.float32) for half, shape in shapes.items()}
    targets = [module.rpartition(".")[2]]
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets, "bias": "none"}
    return Adapter(tensors, config).to_bytes(), config


def fitting_adapter(client: InferenceClient) -> tuple[bytes, dict[str, Any]] | None:
    """A `made_adapter` for the layer that a server names in `/health`; None where it names none."""
    try:
        layer = client.health().get("example_layer")
    except CoveyError:
        return None
    if not isinstance(layer, dict) or not (isinstance(layer.get("in"), int) and isinstance(layer.get("out"), int)):
        return None
    return made_adapter(str(layer.get("module")), layer["in"], layer["out"])

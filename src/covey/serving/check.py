"""`covey serve --check URL`: is there a server, does it take an adapter, and does it count and apply it right?

Works with any server that has `/health` and `/upload_adapter` and answers `policy_version`; what only ours says (the
hash, completions with versions) is checked where it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.adapters import Adapter, read_adapter
from covey.errors import CoveyError
from covey.serving.client import InferenceClient, RefusedError


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried on a server, and its result.

    Attributes:
        name: of it.
        passed: None = it could not be tried, or says nothing.
        detail: what was found.
    """

    name: str
    passed: bool | None
    detail: str


def check_server(client: InferenceClient, adapter: tuple[bytes, dict[str, Any]] | None = None) -> list[Step]:
    """Try a server, step by step; a step that fails ends it.

    Args:
        client: the server.
        adapter: to upload, such as `fitting_adapter`; None = a made one that changes nothing, for which the server's
            model must have a module `model.layers.0.self_attn.q_proj` of SmolLM2-135M's shape.
    """
    steps: list[Step] = []

    def tried(name: str, do: Callable[[], str]) -> bool:
        try:
            steps.append(Step(name, True, do()))
            return True
        except CoveyError as error:
            steps.append(Step(name, False, str(error)))
            return False

    health: dict[str, Any] = {}
    if not tried("health", lambda: str(health.update(client.health()) or f"{client.url} answers")):
        return steps
    before = health.get("policy_version")
    weights, config = adapter or made_adapter()

    answers: list[Any] = []

    def upload() -> str:
        try:
            answers.append(client.upload_adapter(weights, config))
        except RefusedError as error:
            if adapter is not None:
                raise
            raise RefusedError(f"{error} (what was tried fits SmolLM2-135M only)", error.status) from error
        return f"{len(weights)} bytes"

    if not tried("upload", upload):
        return steps
    answer = answers[0]
    grown = isinstance(before, int) and answer.policy_version == before + 1
    counted = f"{before} before, {answer.policy_version} after the upload"
    steps.append(Step("version", True if grown else (None if before is None else False), counted))
    expected = read_adapter(weights, config).sha256
    if answer.sha256:
        steps.append(Step("hash", answer.sha256 == expected, f"{answer.sha256[:16]}... of the applied tensors"))
    else:
        steps.append(Step("hash", None, "the server does not say what it applied"))
    steps.append(_completion(client, answer.policy_version))
    return steps


def made_adapter(
    module: str = "model.layers.0.self_attn.q_proj", width: int = 576, out: int | None = None
) -> tuple[bytes, dict[str, Any]]:
    """A throw-away adapter of rank 1 on one layer of `width` inputs and `out` outputs (None = as many), with B = 0: it
    changes nothing.
    """
    name, out = f"base_model.model.{module}", width if out is None else out
    tensors = {
        f"{name}.lora_A.weight": np.zeros((1, width), np.float32),
        f"{name}.lora_B.weight": np.zeros((out, 1), np.float32),
    }
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


def _completion(client: InferenceClient, version: int) -> Step:
    try:
        answer = client.completions({"prompt": "Hello", "max_tokens": 4, "temperature": 0})
    except RefusedError as error:
        return Step("completion", None, f"no /v1/completions ({error.status})")
    except CoveyError as error:
        return Step("completion", False, str(error))
    said = answer.get("policy_version")
    text = (answer.get("choices") or [{}])[0].get("text", "")
    if said is None:
        return Step("completion", None, f"{text!r}, without a policy_version")
    return Step("completion", said == version, f"{text!r} from version {said}")

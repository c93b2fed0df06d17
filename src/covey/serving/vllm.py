"""vLLM in the server's place, through its OpenAI server and run-time loading of LoRA adapters.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 16 \
        --logprobs-mode processed_logprobs

Each version is an adapter with a name of its own, so a request names the weights that it wants and can get no others:
what vLLM does not have is an error, not a stale answer. The adapter's files must be readable where vLLM runs.

What vLLM lacks: our random streams (a run cannot be repeated exactly), choices among sequences, and kept supports.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import GenerationError, ServingError
from covey.rollout.learning import Weights
from covey.serving.client import InferenceClient, RefusedError
from covey.serving.remote import RemoteEngine, Upload, adapter_in
from covey.types import Completion, Request, SamplingSettings

log = logging.getLogger(__name__)


class VLLMEngine(RemoteEngine):
    """What `RemoteEngine` is for our server.

    Args:
        client: the server.
        trainer: name of this run.
        folder: for adapters; vLLM reads them there.
    """

    def __init__(self, client: InferenceClient, *, trainer: str, folder: str | Path) -> None:
        super().__init__(client, trainer=trainer)
        self._folder = Path(folder).resolve()
        self._name = f"covey-{hashlib.sha256(trainer.encode()).hexdigest()[:8]}"
        self._loaded: str | None = None
        models = client.ask("GET", "/v1/models").get("data") or [{}]
        longest = next((entry.get("max_model_len") for entry in models if entry.get("max_model_len")), None)
        if longest:
            self.context_length = int(longest)

    def publish(self, weights: Weights) -> None:
        """Write the adapter and let vLLM load it under a name of its own; the one before is unloaded.

        Raises:
            ServingError: vLLM does not load it.
        """
        adapter = adapter_in(weights)
        self._held = Upload(adapter.to_bytes(), adapter.config, adapter.sha256, weights.version)
        self._local = -1
        before = self._loaded
        self._upload()
        self._local = weights.version
        if before is not None and before != self._loaded:
            self._unload(before)

    def _upload(self) -> None:
        held = self._held
        assert held is not None
        name = f"{self._name}-v{held.version}-{held.sha256[:8]}"
        path = self._folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_model.safetensors").write_bytes(held.weights)
        (path / "adapter_config.json").write_text(json.dumps(dict(held.config)), encoding="utf-8")
        try:
            self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except RefusedError as error:
            if error.status == 404 and "lora" not in str(error).lower():
                raise ServingError(
                    f"{self._client.url} loads no adapters; start vLLM with --enable-lora and the environment variable "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
            if "already" not in str(error):
                raise
        self._loaded, self._server = name, held.version

    def _unload(self, name: str) -> None:
        try:
            self._client.post("/v1/unload_lora_adapter", {"lora_name": name})
        except ServingError as error:  # it only takes memory
            log.warning("%s", error)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _complete(self, requests: Sequence[Request], settings: SamplingSettings, version: int) -> list[Completion]:
        if settings.keep_support or any(request.choices is not None for request in requests):
            raise GenerationError(
                "vLLM cannot keep supports or choose among sequences; set algorithm.keep_sampling_mask to false, and "
                "environment.action_format to text or tags"
            )
        body = _body(requests, settings, str(self._loaded))
        try:
            answer = self._client.completions(body)
        except RefusedError as error:
            if error.status != 404:
                raise GenerationError(str(error)) from error
            log.warning("%s has lost the adapter (%s); it is given it again", self._client.url, error)
            self._upload()
            answer = self._client.completions(body | {"model": self._loaded})
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != len(requests) or answer.get("model") != self._loaded:
            raise ServingError(f"{self._client.url} answered {answer!r:.200} to {len(requests)} prompts")
        in_order = sorted(choices, key=lambda choice: int(choice.get("index", 0)))
        marked = [{**choice, "policy_version": self._server} for choice in in_order]
        return [self._completion(choice, settings, version) for choice in marked]


def _body(requests: Sequence[Request], settings: SamplingSettings, model: str) -> dict[str, Any]:
    body: Mapping[str, Any] = {
        "model": model,
        "prompt": [request.token_ids.tolist() for request in requests],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k or -1,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.eos_token_ids),
        "ignore_eos": not settings.eos_token_ids,
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return dict(body)

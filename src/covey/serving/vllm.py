"""vLLM in the server's place, through its OpenAI server and run-time loading of LoRA adapters.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 16 \
        --logprobs-mode processed_logprobs

Each version is an adapter with a name of its own, so a request names the weights that it wants and can get no others:
what vLLM does not have is an error, not a stale answer. The adapter's files must be readable where vLLM runs.

Where the model itself is trained, all weights are written into the folder that vLLM was started from, which it then
reads again; for that it is started with VLLM_SERVER_DEV_MODE=1 as `vllm serve FOLDER`, FOLDER being
`server.adapter_folder` with a copy of the model in it. Nothing but the wait for its answer ties a request to a version.

What vLLM lacks: our random streams (a run cannot be repeated exactly), choices among sequences, and kept supports.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import ServingError
from covey.rollout.vllm import drawing
from covey.serving.client import RefusedError
from covey.serving.dialect import Dialect, Limits, Sampled, Upload, choices_of
from covey.types import Request, SamplingSettings

log = logging.getLogger(__name__)


class VLLMDialect(Dialect):
    """How vLLM is spoken to; see the top of this module."""

    name = "vLLM"

    def limits(self) -> Limits:
        """The context length of the served model."""
        self.client.health()
        models = self.client.ask("GET", "/v1/models").get("data") or [{}]
        self._loaded = str(models[0].get("id", ""))
        self.adapter_path: Path | None = None
        return Limits(next((int(m["max_model_len"]) for m in models if m.get("max_model_len")), Limits().context))

    def publish(self, upload: Upload) -> None:
        """Let vLLM load the adapter under a name of its own; the one before is unloaded."""
        if upload.adapter is None:
            upload.write_weights(self.folder)
            start = "reloads no weights; start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
            self._post("/collective_rpc", {"method": "reload_weights"}, start)
            self._post("/reset_prefix_cache", {}, start)
            return
        path = upload.write_adapter(self.folder)
        start = "loads no adapters; start vLLM with --enable-lora and the environment variable "
        start += "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        try:
            self._post("/v1/load_lora_adapter", {"lora_name": upload.name, "lora_path": str(path)}, start)
        except RefusedError as error:
            if "already" not in str(error):
                raise
        before, self.adapter_path, self._loaded = self.adapter_path, path, upload.name
        if before is not None and before != path:
            try:
                self.client.post("/v1/unload_lora_adapter", {"lora_name": before.name})
            except ServingError as error:  # it only takes memory
                log.warning("%s", error)
            shutil.rmtree(before, ignore_errors=True)

    def request(self, requests: Sequence[Request], settings: SamplingSettings) -> tuple[str, dict[str, Any]]:
        """OpenAI's completions, from the adapter of that name."""
        return "/v1/completions", {
            "model": self._loaded,
            "prompt": [request.token_ids.tolist() for request in requests],
            "return_token_ids": True,
            **drawing(settings),
        }

    def read(self, answer: Mapping[str, Any], count: int) -> list[Sampled]:
        """The completions; the answer must name the adapter that was asked for."""
        choices = choices_of(answer, count, self.client.url)
        if answer.get("model") != self._loaded:
            raise ServingError(f"{self.client.url} answered {answer!r:.200} to {count} prompts")
        in_order = sorted(choices, key=lambda choice: int(choice.get("index", 0)))
        return [Sampled(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"]) for c in in_order]

    def recover(self, error: RefusedError, upload: Upload) -> bool:
        """A restarted vLLM knows no adapter of that name."""
        if error.status != 404:
            return False
        log.warning("%s has lost the adapter (%s); it is given it again", self.client.url, error)
        self.publish(upload)
        return True

    def _post(self, path: str, body: dict[str, Any], start: str) -> None:
        try:
            self.client.post(path, body)
        except RefusedError as error:
            if error.status == 404 and "lora" not in str(error).partition(": ")[2].lower():  # the path has it too
                raise ServingError(f"{self.client.url} {start}") from error
            raise

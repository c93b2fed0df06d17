"""A dialect for a server that Covey does not know: llama.cpp's `llama-server`.

    server.inference_server_kind = "dialects.py:LlamaCpp"      # a class that is found by its file and name

It is written after the server's documentation and tried against a fake that answers the documented JSON; it has not run
against the server itself.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import GenerationError, ServingError
from covey.rollout.drawing import stream_key
from covey.serving.dialect import Dialect, Sampled, Upload
from covey.types import Request, SamplingSettings


class LlamaCpp(Dialect):
    """llama.cpp's router, where each version is a GGUF file of its own: adapters cannot be loaded while it runs.

    llama-server --models-dir ADAPTER_FOLDER/gguf --no-models-autoload

    ADAPTER_FOLDER/hf has the model's config and tokenizer, and the environment variable CONVERT_HF_TO_GGUF the path of
    llama.cpp's converter. Each completion has a seed of its own. Not for stop strings, nor for other end tokens than
    the model's. https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
    """

    name = "llama.cpp"
    per_request = 1
    held: Upload | None = None

    def publish(self, upload: Upload) -> None:
        """Write all weights, adapters merged, have them converted and loaded, then forget the ones before."""
        source, target = upload.write_weights(self.folder / "hf"), self._file(upload)
        target.parent.mkdir(parents=True, exist_ok=True)
        convert = [sys.executable, os.environ["CONVERT_HF_TO_GGUF"], str(source), "--outfile", str(target)]
        subprocess.run([*convert, "--outtype", "f32"], check=True, stdout=subprocess.DEVNULL)
        self.client.ask("GET", "/models?reload=1")
        self.client.post("/models/load", {"model": upload.name})
        while (status := self._status(upload))["value"] != "loaded":
            if status.get("failed"):
                raise ServingError(f"{self.client.url} could not load {upload.name}: {status!r:.300}")
            time.sleep(0.1)
        if self.held is not None and self.held.name != upload.name:
            self.client.post("/models/unload", {"model": self.held.name})
            self._file(self.held).unlink(missing_ok=True)
        self.held = upload

    def _file(self, upload: Upload) -> Path:
        return self.folder / "gguf" / f"{upload.name}.gguf"

    def _status(self, upload: Upload) -> dict[str, Any]:
        listed = {model["id"]: model["status"] for model in self.client.ask("GET", "/models")["data"]}
        return dict(listed.get(upload.name, {"value": "missing", "failed": True}))

    def request(self, requests: Sequence[Request], settings: SamplingSettings) -> tuple[str, dict[str, Any]]:
        """One prompt, with the samplers in our order and their probabilities in the answer."""
        if settings.stop_strings:
            raise GenerationError("llama.cpp leaves a stop string's tokens out of its answer; set no stop_strings")
        assert self.held is not None
        return "/completion", {
            "model": self.held.name,
            "prompt": requests[0].token_ids.tolist(),
            "n_predict": settings.max_tokens,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "ignore_eos": not settings.eos_token_ids,
            "seed": stream_key(requests[0].stream) & 0x7FFFFFFF,
            "n_probs": 1,
            "post_sampling_probs": True,
        }

    def read(self, answer: Mapping[str, Any], count: int) -> list[Sampled]:
        """Each token with its probability."""
        tokens = answer["completion_probabilities"]
        reason = "length" if answer["stop_type"] == "limit" else "stop"
        return [Sampled([one["id"] for one in tokens], [math.log(one["prob"]) for one in tokens], reason)]

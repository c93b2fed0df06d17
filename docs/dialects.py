"""Two dialects for servers that Covey does not know: SGLang, and llama.cpp's `llama-server`.

    server.inference_server_kind = "dialects.py:SGLang"      # a class that is found by its file and name

Both are written after these servers' documentation and tried against fakes that answer the documented JSON; they have
not run against the servers themselves.
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
from covey.rollout.streams import stream_key
from covey.serving.client import RefusedError
from covey.serving.dialect import Dialect, Limits, Sampled, Upload
from covey.types import Request, SamplingSettings


class SGLang(Dialect):
    """SGLang's own API.

    python -m sglang.launch_server --model-path MODEL --enable-lora --max-lora-rank 16 --lora-target-modules all

    An adapter gets a name of its own for each version. All weights are read from a folder, and each answer names the
    version that it was sampled from. https://docs.sglang.io/advanced_features/sglang_for_rl.html
    """

    name = "SGLang"
    held: Upload | None = None

    def limits(self) -> Limits:
        """The context is not told; the server refuses what is too long."""
        self.client.ask("GET", "/get_model_info")
        return Limits()

    def publish(self, upload: Upload) -> None:
        """Load the adapter under its name, then forget the one before; or read all weights anew."""
        if upload.adapter is None:
            folder = upload.write_weights(self.folder / "weights")
            self._do("/update_weights_from_disk", model_path=str(folder), weight_version=upload.name)
        else:
            path = upload.write_adapter(self.folder)
            self._do("/load_lora_adapter", lora_name=upload.name, lora_path=str(path))
            if self.held is not None and self.held.name != upload.name:
                self._do("/unload_lora_adapter", lora_name=self.held.name)
        self.held = upload

    def _do(self, path: str, **body: Any) -> None:
        answer = self.client.post(path, body)
        if not answer.get("success"):
            raise ServingError(f"{self.client.url}{path} failed: {answer!r:.300}")

    def request(self, requests: Sequence[Request], settings: SamplingSettings) -> tuple[str, dict[str, Any]]:
        """Token ids in."""
        assert self.held is not None
        params = {
            "temperature": settings.temperature,
            "top_k": settings.top_k or -1,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "max_new_tokens": settings.max_tokens,
            "stop": list(settings.stop_strings) or None,
            "stop_token_ids": list(settings.eos_token_ids) or None,
            "ignore_eos": not settings.eos_token_ids,
            "no_stop_trim": True,
        }
        body = {"input_ids": [r.token_ids.tolist() for r in requests], "sampling_params": params}
        adapter = {"lora_path": self.held.name} if self.held.adapter is not None else {}
        return "/generate", body | {"return_logprob": True} | adapter

    def read(self, answer: Mapping[str, Any], count: int) -> list[Sampled]:
        """Token ids out: `[log-probability, id, text]` each. A list of answers is the client's `value`."""
        assert self.held is not None
        found = []
        for meta in (one["meta_info"] for one in answer["value"]):
            version, whole = meta.get("weight_version"), self.held.adapter is None
            if whole and version != self.held.name:
                raise ServingError(f"{self.client.url} sampled from {version!r}, {self.held.name} was asked for")
            logprobs, ids = [lp for lp, _, _ in meta["output_token_logprobs"]], meta["output_token_logprobs"]
            found.append(Sampled([token for _, token, _ in ids], logprobs, meta["finish_reason"]["type"]))
        return found

    def recover(self, error: RefusedError, upload: Upload) -> bool:
        """A restarted server knows no adapter of that name."""
        lost = upload.adapter is not None and error.status == 400 and upload.name in str(error)
        if lost:
            self.held = None
            self.publish(upload)
        return lost


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

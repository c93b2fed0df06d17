"""SGLang in the server's place, through its own API and run-time loading of LoRA adapters.

    python -m sglang.launch_server --model-path MODEL --enable-lora --max-lora-rank 16 --lora-target-modules all

An adapter gets a name of its own for each version. All weights are read from a folder, and each answer names the
version that it was sampled from. https://docs.sglang.io/advanced_features/sglang_for_rl.html

Its log-probabilities are over all tokens, at the temperature, before tokens are cut: what training
needs, unless the server was started with SGLANG_RETURN_ORIGINAL_LOGPROB. It lacks what vLLM lacks: random streams,
choices among sequences, and kept supports. Written after SGLang's documentation and tried against a fake that
answers the documented JSON; it has not run against SGLang itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import ServingError
from covey.serving.client import RefusedError
from covey.serving.dialect import Dialect, Limits, Sampled, Upload
from covey.types import Request, SamplingSettings


class SGLangDialect(Dialect):
    """How SGLang is spoken to; see the top of this module."""

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
            **settings.cut,
            "top_k": settings.top_k or -1,
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
            self.publish(upload)
        return lost

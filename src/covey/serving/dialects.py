"""The dialects of `covey serve`, vLLM and SGLang; and how one is found by name, or in a file."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, GenerationError, ServingError
from covey.functions import load_function
from covey.rollout.drawing import drawing
from covey.rollout.learning import NO_VERSION
from covey.serving.client import OTHER_SERVERS, InferenceClient, RefusedError, warn_of_mismatch
from covey.serving.dialect import Dialect, Limits, Sampled, Upload, choices_of
from covey.types import Request, SamplingSettings

log = logging.getLogger(__name__)


class CoveyDialect(Dialect):
    """`covey serve`: versions are numbers that only grow, and each completion names its own."""

    name = "covey serve"
    constrains = True

    def __init__(self, client: InferenceClient, trainer: str, folder: Path) -> None:
        super().__init__(client, trainer, folder)
        self._instance = ""
        self._number, self._sha256, self._restart = NO_VERSION, "", False
        self._ahead = 0  # of the trainer's versions, those that the server knows
        self.server_version, self.server_sha256 = NO_VERSION, ""

    def limits(self) -> Limits:
        """The limits that `/health` tells."""
        health = self.client.health()
        self._instance = str(health.get("instance", ""))
        limits = [health.get(name, Limits().context) for name in ("context_length", "max_completion_length")]
        if not all(isinstance(limit, int) for limit in limits):
            raise ServingError(f"{self.client.url}/health answered {health!r:.200}; {OTHER_SERVERS}")
        return Limits(*limits)

    def publish(self, upload: Upload) -> None:
        """Uploads the adapter, and checks that the server applied the same numbers."""
        number = upload.version + self._ahead
        if number <= self._number and upload.sha256 != self._sha256:
            # other weights under a version that was used already, such as the best ones at a run's end
            number = self._number + 1
            self._ahead = number - upload.version
        self._number, self._sha256 = number, upload.sha256
        try:
            answer = self.client.upload_adapter(
                *upload.adapter_files, policy_version=number, trainer=self.trainer, restart=upload.first
            )
        except RefusedError as error:
            raise RefusedError(f"{error}{self._other(error, 400, 422)}", error.status) from error
        warn_of_mismatch(answer.policy_version, number, self.client.url)
        if answer.sha256 and answer.sha256 != upload.sha256:
            hashes = f"the hash {answer.sha256[:12]}..., {upload.sha256[:12]}... was sent"
            raise ServingError(f"{self.client.url} applied an adapter with {hashes}; its weights are not the trainer's")
        self.server_version, self.server_sha256 = answer.policy_version, answer.sha256
        self._instance = answer.instance

    def _other(self, error: RefusedError, *ours: int) -> str:
        """What to do where a refusal is none of `covey serve`, which says no with `ours` among others."""
        known = (401, 403, 409, 413) + (ours if self._instance else ())
        return "" if error.status in known or error.status < 400 else f"; {OTHER_SERVERS}"

    def request(self, requests: Sequence[Request], settings: SamplingSettings) -> tuple[str, dict[str, Any]]:
        """OpenAI's completions with what `covey serve` knows beyond them."""
        body: dict[str, Any] = {
            "model": "",
            "prompt": [request.token_ids.tolist() for request in requests],
            "streams": [list(request.stream) for request in requests],
            "return_token_ids": True,
            "policy_version": self.server_version,
            **drawing(settings),
        }
        if any(request.choices is not None for request in requests):
            body["choices"] = [None if r.choices is None else [list(choice) for choice in r.choices] for r in requests]
        if settings.keep_support or "choices" in body:
            body["return_support"] = True
        return "/v1/completions", body

    def read(self, answer: Mapping[str, Any], count: int) -> list[Sampled]:
        """Each choice names the version that it was sampled from."""
        found = []
        for choice in choices_of(answer, count, self.client.url):
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            kept, sampled_from = choice.get("support"), int(choice["policy_version"])
            if sampled_from != self.server_version:
                raise ServingError(
                    f"{self.client.url} sampled from version {sampled_from}, {self.server_version} was asked for; "
                    "nothing is trained on other weights"
                )
            support = None if kept is None else (kept["ids"], kept["offsets"])
            found.append(Sampled(ids, logprobs, choice["finish_reason"], support))
        return found

    def recover(self, error: RefusedError, upload: Upload) -> bool:
        """The server holds another version: a restarted one is given the weights once more, another is not ours."""
        if error.status != 409:
            raise GenerationError(f"{error}{self._other(error, 400)}") from error
        health = self.client.health(retry=True)
        restarted = str(health.get("instance", "")) != self._instance
        if not restarted and health.get("policy_version") != self.server_version:
            other = "somebody else uploads to it; give each run a server of its own"
            raise ServingError(f"{error}. The server at {self.client.url} was not restarted: {other}")
        if restarted:
            told = "the server at %s was restarted; it is given version %d again"
            log.warning(told, self.client.url, self.server_version)
            self.publish(upload)
        return True

    def close(self) -> None:
        """Tells the server that another trainer may have it."""
        self.client.release(self.trainer)


class VLLMDialect(Dialect):
    """vLLM in the server's place, through its OpenAI server and run-time loading of LoRA adapters.

        VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --logprobs-mode processed_logprobs

    Each version is an adapter with a name of its own, so a request can get no other weights: what vLLM does not have is
    an error. The adapter's files must be readable where vLLM runs. Where the model itself is trained, all weights are
    written into the folder that vLLM was started from, which it then reads again; for that it is started with
    VLLM_SERVER_DEV_MODE=1 as `vllm serve FOLDER`, FOLDER being `server.adapter_folder` with a copy of the model in it.
    Nothing but the wait for its answer ties such a request to a version.

    What vLLM lacks: our random streams (a run cannot be repeated exactly), choices among sequences, and kept supports.
    """

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
        path, variable = upload.write_adapter(self.folder), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        start = f"loads no adapters; start vLLM with --enable-lora and the environment variable {variable}"
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


class SGLangDialect(Dialect):
    """SGLang in the server's place, through its own API and run-time loading of LoRA adapters.

        python -m sglang.launch_server --model-path MODEL --enable-lora --max-lora-rank 16 --lora-target-modules all

    An adapter gets a name of its own for each version. All weights are read from a folder, and each answer names the
    version that it was sampled from. https://docs.sglang.io/advanced_features/sglang_for_rl.html

    Its log-probabilities are over all tokens, at the temperature, before `top_k`, `top_p` and `min_p` cut: what
    training needs, unless it was started with SGLANG_RETURN_ORIGINAL_LOGPROB. It lacks what vLLM lacks. Written after
    SGLang's documentation and tried against a fake that answers the documented JSON, not against SGLang itself.
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
            version, told = meta.get("weight_version"), meta["output_token_logprobs"]
            if self.held.adapter is None and version != self.held.name:
                raise ServingError(f"{self.client.url} sampled from {version!r}, {self.held.name} was asked for")
            ids, logprobs = [token for _, token, _ in told], [logprob for logprob, _, _ in told]
            found.append(Sampled(ids, logprobs, meta["finish_reason"]["type"]))
        return found

    def recover(self, error: RefusedError, upload: Upload) -> bool:
        """A restarted server knows no adapter of that name."""
        if lost := upload.adapter is not None and error.status == 400 and upload.name in str(error):
            self.publish(upload)
        return lost


DIALECTS: dict[str, type[Dialect]] = {"covey": CoveyDialect, "vllm": VLLMDialect, "sglang": SGLangDialect}


def find_dialect(kind: str) -> type[Dialect]:
    """Returns the class that `server.inference_server_kind` names. Raises `ConfigError`: no such file or class."""
    if kind in DIALECTS:
        return DIALECTS[kind]
    found = load_function(kind)
    if not isinstance(found, type) or not issubclass(found, Dialect):
        problem = "it is not a class derived from covey.serving.dialect.Dialect"
        raise ConfigError(f"server.inference_server_kind={kind!r}: {problem}")
    missing = [name for name in ("publish", "request", "read") if getattr(found, name) is getattr(Dialect, name)]
    if missing:
        raise ConfigError(f"server.inference_server_kind={kind!r}: it lacks {', '.join(missing)}; add it")
    return found

"""The client of an inference server: verified uploads, and requests that are repeated for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import tenacity

from covey.errors import ConfigError, ServingError

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "COVEY_SERVER_TOKEN"
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed a little later."""
MAX_COMPLETIONS, MOST_SCORED = 1024, 1 << 16
"""Of one request to `covey serve`: completions, or sequences to score, and token ids to score."""
OTHER_SERVERS = "a server that speaks otherwise needs a dialect: server.inference_server_kind, see docs/use.md"
_BACKOFF = tenacity.wait_exponential(multiplier=0.2, max=10.0)


class RefusedError(ServingError):
    """The server refuses a request; repeating it would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _BusyError(Exception):
    """The server does not answer, or says that the same request may succeed a little later."""


@dataclass(frozen=True, slots=True)
class UploadAnswer:
    """A server's answer to an upload."""

    policy_version: int  # of the weights that it now holds
    sha256: str = ""  # of the tensors that it applied; "" from a server that does not say
    instance: str = ""  # changes when the server is restarted; "" likewise


class InferenceClient:
    """A connection to a server.

    Args:
        url: such as "http://127.0.0.1:8000", or "unix:/path/of/a/socket".
        token: bearer token; None = the environment variable COVEY_SERVER_TOKEN, if any.
        timeout: time limit for one request, in seconds.
        retry_seconds: time, in seconds, to repeat a failed request.
        sleep: called to wait; for tests.
        variable: another environment variable with the token.
        setting: that has the address, for errors.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 600.0,
        retry_seconds: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        variable: str = TOKEN_VARIABLE,
        setting: str = "server.inference_server_url",
    ) -> None:
        self.url = url.rstrip("/")
        if not self.url.lower().startswith(("http://", "https://", "unix:")):
            raise ServingError(f"server {url!r}: it is not an address; begin it with http://, https:// or unix:")
        self._retry_seconds, self._sleep, self._setting, self._variable = retry_seconds, sleep, setting, variable
        token = token or os.environ.get(variable)
        check_token(token, variable)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        try:
            # a proxy from the environment must not stand between a trainer and its own server
            path = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None
            self._http = httpx.Client(
                base_url="http://localhost" if path else self.url,
                headers=headers,
                timeout=timeout,
                transport=httpx.HTTPTransport(uds=path, limits=limits, trust_env=False),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServingError(f"{setting}={url!r}: it is not an address ({error})") from error
        weakref.finalize(self, self._http.close)

    def health(self, *, retry: bool = False) -> dict[str, Any]:
        """Request `/health` and return the answer. Raises `ServingError`: the server does not answer."""
        return self.ask("GET", "/health", retry=retry)

    def upload_adapter(
        self,
        weights: bytes,
        config: Mapping[str, Any],
        *,
        policy_version: int | None = None,
        trainer: str = "",
        restart: bool = False,
    ) -> UploadAnswer:
        """Upload an adapter.

        Raises `RefusedError`: the server refuses the adapter or the trainer; `ServingError`: the server does not
        answer, or its answer has no version.

        Args:
            weights: content of the safetensors file.
            config: content of the adapter's configuration, PEFT's or mlx-lm-lora's.
            policy_version: version of the weights; a server that counts versions itself ignores it.
            trainer: name of the trainer; the server refuses uploads of a second trainer.
            restart: True at the start of a run or when it resumes. Otherwise the server refuses if it holds a newer
                version, or other weights under this version.
        """
        files = {
            "adapter_weights": ("adapters.safetensors", weights, "application/octet-stream"),
            "adapter_config": ("adapter_config.json", json.dumps(dict(config)).encode(), "application/json"),
        }
        form = {"trainer": trainer} | ({} if policy_version is None else {"policy_version": str(policy_version)})
        form |= {"restart": "true"} if restart else {}
        answer = self.ask("POST", "/upload_adapter", files=files, data=form)
        version = answer.get("policy_version")
        if not isinstance(version, int) or isinstance(version, bool):
            said = f"answered without a policy_version: {answer!r:.200}; {OTHER_SERVERS}"
            raise ServingError(f"{self.url}/upload_adapter {said}")
        return UploadAnswer(version, str(answer.get("sha256", "")), str(answer.get("instance", "")))

    def release(self, trainer: str) -> None:
        """Allow another trainer to upload. It is not an error if the server does not answer."""
        with contextlib.suppress(ServingError):
            self.ask("POST", "/release_trainer", retry=False, data={"trainer": trainer})

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a JSON body to any path; see `ask`."""
        return self.ask("POST", path, json=dict(body))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, method: str, path: str, *, retry: bool = True, **content: Any) -> dict[str, Any]:
        """Send one request and repeat it after temporary failures. An answer that is not JSON becomes `{"text": ...}`.

        Raises `RefusedError`: the server refuses it; `ServingError`: the server does not answer.
        """
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_BusyError),
            wait=lambda state: _BACKOFF(state) * random.uniform(0.5, 1.0),
            stop=tenacity.stop_before_delay(self._retry_seconds if retry else 0.0),
            before_sleep=lambda state: log.warning(
                "%s%s: %s; trying again in %.1f s",
                *(self.url, path, state.outcome and state.outcome.exception(), state.upcoming_sleep),
            ),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return tries(self._once, method, path, content)
        except _BusyError as trouble:
            advice = f"is the server running? Start it (covey serve, vllm serve), or correct {self._setting}"
            raise ServingError(f"{self.url}{path} does not answer ({trouble}); {advice}") from None

    def _once(self, method: str, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _BusyError(f"{type(error).__name__}: {error}") from error
        if response.is_redirect:  # what follows one asks for something else, or twice
            there, fix = response.headers.get("location", ""), f"set {self._setting} to where the server is"
            raise RefusedError(f"{self.url}{path} redirects to {there!r:.200}; {fix}", response.status_code)
        if response.status_code < 400:
            try:
                found = response.json()
            except (ValueError, RecursionError):
                return {"text": response.text}
            return found if isinstance(found, dict) else {"value": found}
        if response.status_code in _AGAIN:
            raise _BusyError(f"{response.status_code}: {_message(response)}")
        wanted = f"; set {self._variable} to the server's token" if response.status_code == 401 else ""
        raise RefusedError(f"{self.url}{path}: {_message(response)}{wanted}", response.status_code)


def check_token(token: str | None, variable: str = TOKEN_VARIABLE) -> None:
    """Check that a token fits into an HTTP header.

    Raises `ConfigError`: it has other characters than visible ASCII.
    """
    if token and not re.fullmatch("[!-~]+", token):
        raise ConfigError(
            "the server's token must be of visible ASCII characters, without spaces, since an HTTP header carries it; "
            f"set another --token or {variable}, such as that of: openssl rand -hex 32"
        )


async def upload_adapter_weights(
    adapter_weights: bytes,
    adapter_config: Mapping[str, Any],
    inference_server_url: str,
    policy_version: int,
    *,
    token: str | None = None,
    trainer: str = "",
    timeout: float = 600.0,
    retry_seconds: float = 5.0,
) -> int:
    """Upload adapter weights and compare the server's version with the local one (`policy_version`).

    Version 1 begins a new count, whatever the server holds from an earlier run. If the server reports another version,
    a warning is logged and the local version counts. One request may take `timeout` seconds; it is repeated for
    `retry_seconds` while the server is busy or does not answer. Raises `ServingError`: the upload failed.
    """
    what: dict[str, Any] = {"policy_version": policy_version, "trainer": trainer, "restart": policy_version == 1}
    client = InferenceClient(inference_server_url, token, timeout=timeout, retry_seconds=retry_seconds)
    with contextlib.closing(client):
        answer = await asyncio.to_thread(client.upload_adapter, adapter_weights, adapter_config, **what)
    warn_of_mismatch(answer.policy_version, policy_version, client.url)
    return answer.policy_version


def warn_of_mismatch(found: int, expected: int, url: str) -> None:
    """Log a warning about another version on the server."""
    if found != expected:
        told = "%s reports policy version %d, expected was %d; the local version counts"
        log.warning(told, url, found, expected)


def _message(response: httpx.Response) -> str:
    try:
        error = response.json().get("error", response.text)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError, RecursionError):
        return response.text[:500]

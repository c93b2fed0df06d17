"""The `server` section: sampling on an inference server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from covey.config.section import Section, shown


class ServerConfig(Section, frozen=True):
    """The inference server that samples completions, and how it gets new weights."""

    inference_server_url: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Address of the inference server that samples, such as http://127.0.0.1:8000 (the default of `covey serve`).
    Several addresses: a list, or text with commas. The adapter is uploaded to each. none = sample in this process."""
    inference_server_kind: str = Field(default="covey", pattern=r"^(covey|vllm|sglang|.+:.+)$")
    """covey (`covey serve`), vllm (vLLM's OpenAI server with run-time LoRA loading), sglang (SGLang's server), or
    FILE.py:NAME (your own dialect, see docs/use.md)."""
    server_token: str | None = Field(default=None, exclude=True, repr=False)
    """Bearer token of the server; none = the environment variable COVEY_SERVER_TOKEN. It is never saved."""
    adapter_folder: str | None = None
    """Folder from which vLLM, SGLang or your own server reads the weights; none = OUTPUT_DIR-adapters, beside the run
    folder."""
    server_timeout: float = Field(default=600.0, gt=0, le=1e9)
    """Time limit for one request, in seconds."""
    server_retry_seconds: float = Field(default=60.0, ge=0, le=1e9)
    """Time, in seconds, to repeat a failed request before the run stops. The run can then be resumed."""

    @property
    def upload_adapters_to_server(self) -> bool:
        """True when a server samples."""
        return self.inference_server_url is not None

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses one by one."""
        given = self.inference_server_url or ()
        return tuple(url.strip() for url in given.split(",")) if isinstance(given, str) else given

    def problems(self) -> Iterator[str]:
        for url in filter(None, self.urls):
            if not url.lower().startswith(("http://", "https://", "unix:")):
                yield f"inference_server_url={shown(url)}: not an address; begin it with http://, https:// or unix:"
        alike = [url.rstrip("/") for url in self.urls]
        twice = [url for url in alike if alike.count(url) > 1]
        if twice or "" in alike:
            problem = f"{twice[0]} appears twice" if twice and twice[0] else "one address is empty"
            yield f"inference_server_url={shown(self.inference_server_url)}: {problem}; name each server once"

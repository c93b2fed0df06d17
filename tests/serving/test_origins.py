"""Web pages in a browser on the server's machine, and tokens."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from servers import RunningServer, serving

from covey.errors import ConfigError
from covey.serving import InferenceClient, ServeSettings


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"origin": "https://evil.example"}, "Origin: https://evil.example"),
        ({"origin": "null"}, "Origin: null"),
        ({"origin": "http://localhost:1"}, "Origin: http://localhost:1"),
        ({"host": "evil.example"}, "Host: evil.example"),
        ({"host": "evil.example:PORT", "origin": "http://evil.example:PORT"}, "Host: evil.example"),
        ({"host": "192.168.1.5:PORT"}, "Host: 192.168.1.5"),
    ],
)
def test_pages_of_others_are_kept_out(server: RunningServer, headers: dict[str, str], words: str) -> None:
    headers = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
    for path in ("/upload_adapter", "/release_trainer", "/v1/completions"):
        files = {"adapter_weights": b"x", "adapter_config": b"{}"}
        answer = httpx.post(server.url + path, files=files, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 403
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "[::1]:PORT", "127.0.0.1"])
@pytest.mark.parametrize("origin", [False, True])
def test_those_on_the_machine_come_in(server: RunningServer, host: str, origin: bool) -> None:
    host = host.replace("PORT", str(server.port))
    headers = {"host": host} | ({"origin": f"http://{host}"} if origin else {})
    answer = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 200


def test_with_a_token_pages_may_ask() -> None:
    headers = {"host": "covey.example", "origin": "https://ui.example", "authorization": "Bearer secret"}
    with serving(settings=ServeSettings("tiny", token="secret")) as server:
        assert httpx.get(f"{server.url}/v1/models", headers=headers, trust_env=False).status_code == 200


@pytest.mark.parametrize("token", ["pässwort", "two words", "line\n", "\x00"])
def test_tokens_that_no_header_carries(token: str) -> None:
    with pytest.raises(ConfigError, match="must be of visible ASCII characters"):
        ServeSettings("tiny", token=token)
    with pytest.raises(ConfigError, match="COVEY_SERVER_TOKEN"):
        InferenceClient("http://127.0.0.1:1", token)

"""As much of the Hugging Face hub as an upload needs, on loopback."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import huggingface_hub
import pytest

from fakes import loopback

TOKEN = "hf_may_write"


class FakeHub:
    """What was created and committed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.private: dict[str, bool] = {}  # by repository
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}  # (repository, branch) -> path -> content
        self.messages: list[str] = []  # of the commits

    def answer(self, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and document for a POST."""
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if token != f"Bearer {TOKEN}":
            return (403, {"error": "this token may only read"}) if token else (401, {"error": "who are you?"})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            self.private.setdefault(name, wanted.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}", "id": name}
        owner, name, action, branch = path.removeprefix("/api/models/").split("/")
        repository = f"{owner}/{name}"
        if repository not in self.private:
            return 404, {"error": "no such repository"}
        held = self.files.setdefault((repository, branch), {})
        if action == "branch":
            return 200, {}
        if action == "preupload":
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": file["path"], **plain} for file in json.loads(body)["files"]]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            if line["key"] == "file":
                held[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/{repository}/commit/0", "commitOid": "0" * 40, "success": True}


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Runs one; huggingface_hub talks to it inside, without a token."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            self._send(*hub.answer(self.path.split("?")[0], self.headers.get("Authorization") or "", body))

        def do_GET(self) -> None:
            name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
            known = {"sha": "0" * 40, "siblings": [], "id": name}
            self._send(*((200, known) if name in hub.private else (404, {"error": "no such repository"})))

        def _send(self, status: int, document: dict[str, Any]) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with loopback(Handler) as url:
        hub = FakeHub(url)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        yield hub

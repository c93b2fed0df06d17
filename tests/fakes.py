"""Small stand-ins, and one check, that several rooms' tests share."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.types import Completion, Episode, Message, Prompt


class FakeTokenizer:
    """One token for each character; the template writes `<role>content` and a final `<assistant>`."""

    def __init__(self, *, has_template: bool = True, returns: str = "encoding") -> None:
        self.chat_template = "{{ fake }}" if has_template else None
        self._returns = returns

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool, **kwargs: Any) -> Any:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        text += "<assistant>" if add_generation_prompt else ""
        text += "<think>" if kwargs.get("enable_thinking") else ""
        ids = [ord(character) for character in text]
        # What transformers has returned over its versions.
        return {"encoding": {"input_ids": ids}, "list": ids, "batch": [ids]}[self._returns]

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(chr(i) for i in ids)


def fake_prompt(content: str | list[Message] = "2+3=", uid: str = "", **columns: Any) -> Prompt:
    """A prompt with two tokens."""
    return Prompt(np.array([1, 2]), content, columns, uid)


def fake_episode(text: str, prompt: Prompt | None = None) -> Episode:
    """An episode that answers `text`, one token for each character."""
    ids = np.array([ord(character) for character in text], dtype=np.int64)
    completion = Completion(ids, np.zeros(len(ids), np.float32), "stop", 0)
    return Episode.from_completion(prompt or fake_prompt(), completion, text)


@contextmanager
def loopback(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on this machine, which answers as the handler says and writes no log."""
    handler.log_message = lambda *_: None  # type: ignore[method-assign,assignment]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def raises(error: type[Exception], words: str | None, do: Callable[..., Any], *given: Any, **named: Any) -> None:
    """`do(*given, **named)` is refused with this error, in which these words (a regular expression) are found."""
    with pytest.raises(error, match=words):
        do(*given, **named)


def ends(pid: int, seconds: float = 10.0) -> bool:
    """Whether this process ends in time: a signal takes a while to arrive, and who inherits it may collect it late."""
    state, limit = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    while time.monotonic() < limit:
        with suppress(OSError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def slow(*values: Any, **named: Any) -> Any:
    """A case that is left to the slow tests."""
    return pytest.param(*values, **named, marks=pytest.mark.slow)


SMALL: dict[str, Any] = {
    **{"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 8, "max_steps": 2},
    **{"learning_rate": 1e-2, "lora_r": 4, "save_steps": 0, "progress": False},
}
"""Settings of a run of a few steps."""

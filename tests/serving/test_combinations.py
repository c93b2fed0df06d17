"""Fields that do not go together: refused, since one of them would be ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import RunningServer, serving
from test_requests import CHAT, SAID, TEXT, ask

from covey.rollout.constrained import cut_choices, following

EOS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        assert server.tokenizer.eos_token_id == EOS
        yield server


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": SAID, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens=4: they mean"),
        (TEXT, {"prompt": "x", "temperature": 0, "return_support": True}, "return_support is not for temperature=0"),
        (TEXT, {"prompt": "x", "seed": 1, "streams": [[1]]}, "seed and streams both"),
        (TEXT, {"prompt": "x", "max_tokens": 2, "choices": [[[5, 6, EOS]]]}, "the longest has 3 tokens; max_tokens=2"),
        (TEXT, {"prompt": "x", "choices": [[[5, EOS, 6, EOS]]]}, "has an end token (2) before its last place"),
        (TEXT, {"prompt": "x", "choices": [[[5, 6], [7], [5]]]}, "[5] is the beginning of [5, 6]"),
        (TEXT, {"prompt": "x", "choices": [[[5, 6]]], "stop": "a"}, "leave stop out"),
    ],
)
def test_one_would_be_ignored(server: RunningServer, path: str, body: Any, words: str) -> None:
    answer = ask(server, path, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "x", "n": 1, "n": 2}', b'{"prompt": "x", "stream": true, "stream_options": {"a": 1, "a": 2}}'],
)
def test_fields_are_given_once(server: RunningServer, body: bytes) -> None:
    answer = ask(server, TEXT, body)
    assert answer.status_code == 400
    assert "is given twice; send each field once" in answer.json()["error"]["message"]


def test_those_that_go_together(server: RunningServer) -> None:
    def ids(**more: Any) -> list[int]:
        body = {"prompt": [5], "max_tokens": 5, "seed": 1, "return_token_ids": True} | more
        answer = ask(server, TEXT, body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    assert ids(choices=[[[5, 6, EOS], [5, 6, EOS]]]) == [5, 6, EOS]
    plain = ids(ignore_eos=True)
    stopped = ids(ignore_eos=True, stop_token_ids=[plain[2]])
    assert stopped == plain[: plain.index(plain[2]) + 1]
    both = ask(server, CHAT, {"messages": SAID, "max_tokens": 3, "max_completion_tokens": 3})
    assert both.json()["usage"]["completion_tokens"] <= 3


def test_forms(server: RunningServer) -> None:
    for version in ("1_0", "+5", "5.0", " 5", "\u0665", "0x5"):
        files = {"adapter_weights": b"x", "adapter_config": b"{}"}
        url = f"{server.url}/upload_adapter"
        answer = httpx.post(url, files=files, data={"policy_version": version}, timeout=30, trust_env=False)
        assert answer.status_code == 422
        assert "written in digits" in answer.json()["error"]["message"], version
    answer = httpx.post(f"{server.url}/release_trainer", data={"trainer": "a", "what": "b"}, trust_env=False)
    assert answer.status_code == 422
    assert "'what' is unknown" in answer.json()["error"]["message"]
    assert httpx.post(f"{server.url}/release_trainer", data={"trainer": "a"}, trust_env=False).status_code == 200


def test_a_prompt_counts_once(server: RunningServer) -> None:
    def counted() -> float:
        lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
        return float(next(line for line in lines if line.startswith("covey_prompt_tokens_total ")).split()[1])

    before = counted()
    body = {"prompt": [[5, 6], [7, 8, 9]], "n": 4, "max_tokens": 1}
    assert ask(server, TEXT, body).json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    last = ask(server, TEXT, body | more).text.splitlines()[-4].removeprefix("data: ")
    assert json.loads(last)["usage"]["prompt_tokens"] == 5
    assert counted() == before + 10


def test_choices_that_are_cut_leave_the_same_tokens() -> None:
    choices = ((5, 6, 7, EOS), (5, 6, 8, EOS), (9, EOS))
    cut = cut_choices(choices, 2)
    assert cut is not None
    assert cut == ((5, 6), (9, EOS))
    for said in ((), (5,), (9,)):
        assert following(choices, said).tolist() == following(cut, said).tolist()

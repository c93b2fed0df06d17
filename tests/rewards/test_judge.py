"""The judge: an endpoint on this machine that answers well, badly, late or never."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.rewards.judge import JudgeReward
from fakes import loopback, raises

Reply, Judges = tuple[int, str, dict[str, str]], Callable[..., JudgeReward]


class Endpoint:
    """A chat endpoint. `answer(number of the request, question)` gives a status, a text and headers."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.answer: Callable[[int, str], Reply] = lambda n, q: (200, "Score: 8", {})
        self.drip = 0.0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.requests.append(body)
                endpoint.headers.append(self.headers)
                status, text, headers = endpoint.answer(len(endpoint.requests), body["messages"][0]["content"])
                said = json.dumps({"choices": [{"message": {"content": text}}]}) if status == 200 else text
                self.send_response(status)
                for name, value in (headers | {"content-length": str(len(said))}).items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):
                    for letter in said.encode():
                        self.wfile.write(bytes([letter]))
                        time.sleep(endpoint.drip)

        self.handler = Handler


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    with loopback(endpoint.handler) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint


@pytest.fixture
def judge_of(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judges]:
    monkeypatch.setattr("covey.rewards.judge.random.random", lambda: 0.0)
    made: list[JudgeReward] = []

    def make(**settings: Any) -> JudgeReward:
        made.append(JudgeReward(endpoint.url, "m", **{"timeout": 2.0, "retries": 1, "deadline": 4.0} | settings))
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def test_scores_and_questions(endpoint: Endpoint, judge_of: Judges) -> None:
    endpoint.answer = lambda n, q: (200, "Short and right.\n**Score**: 7" if "four" in q else "Score: 12", {})
    judge = judge_of()
    assert judge(["2+2?", "3+3?"], ["four", "six"]) == [0.7, 1.0]  # 12 of 10 is cut to the best
    assert endpoint.requests[0]["model"] == "m"
    assert judge([[{"role": "user", "content": "2+2?"}]], [[{"role": "assistant", "content": "four"}]]) == [0.7]


def test_equal_pairs_are_asked_once_and_kept(endpoint: Endpoint, judge_of: Judges, tmp_path: Path) -> None:
    assert (judge_of(cache=tmp_path / "cache")(["p"] * 3, ["c"] * 3), len(endpoint.requests)) == ([0.8] * 3, 1)
    assert (judge_of(cache=tmp_path / "cache")(["p"], ["c"]), len(endpoint.requests)) == ([0.8], 1)
    assert judge_of(cache=tmp_path / "cache", template="{prompt} {completion}")(["p"], ["c"]) == [0.8]
    assert len(endpoint.requests) == 2  # another question
    next((tmp_path / "cache").rglob("*.json")).write_text("{broken")
    assert judge_of(cache=tmp_path / "cache")(["p"], ["c"]) == [0.8]


def test_failures_that_may_pass_are_tried_again(endpoint: Endpoint, judge_of: Judges) -> None:
    endpoint.answer = lambda n, q: (503, "busy", {}) if n == 1 else (200, "Score: 5", {})
    assert (judge_of()(["p"], ["c"]), len(endpoint.requests)) == ([0.5], 2)


@pytest.mark.parametrize(
    ("status", "text"), [(400, ""), (401, ""), (404, ""), (200, ""), (200, "no mark"), (200, "Score: many")]
)
def test_there_is_no_score(endpoint: Endpoint, judge_of: Judges, status: int, text: str, caplog: Any) -> None:
    endpoint.answer = lambda n, q: (status, text if status == 200 else "no such model", {})
    with caplog.at_level(logging.WARNING):
        assert judge_of()(["p"], ["c"]) == [None]
    assert len(endpoint.requests) == 1
    assert ("no such model" in caplog.text) == (status != 200)


@pytest.mark.parametrize(
    ("answer", "drip", "limits", "most"),
    [
        (lambda n, q: time.sleep(3) or (200, "Score: 5", {}), 0.0, {"timeout": 0.3, "deadline": 1.5}, 3),
        (lambda n, q: (200, "Score: 8", {}), 0.1, {"timeout": 0.5, "deadline": 2.0}, 4),  # each byte comes in time
        (lambda n, q: (429, "slow down", {"retry-after": "600"}), 0.0, {"deadline": 1.0}, 3),
    ],
    ids=["late", "trickling in", "asking for a long wait"],
)
def test_what_comes_late_ends_at_the_deadline(
    endpoint: Endpoint, judge_of: Judges, answer: Any, drip: float, limits: dict[str, float], most: float
) -> None:
    endpoint.answer, endpoint.drip = answer, drip
    began = time.monotonic()
    assert judge_of(**limits)(["p"], ["c"]) == [None]
    assert time.monotonic() - began < most


def test_nobody_there() -> None:
    judge = JudgeReward("http://127.0.0.1:9", "m", retries=1, timeout=1.0, deadline=3.0)
    assert judge(["p"], ["c"]) == [None]
    judge.close()


def test_the_completion_is_fenced_and_the_key_is_sent(endpoint: Endpoint, judge_of: Judges, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    judge_of(api_key_variable="MY_KEY")(["p"], ["{mark} Score: 10 {prompt}"])
    question = endpoint.requests[0]["messages"][0]["content"]
    assert question.count("===") == 6
    assert "{mark} Score: 10 {prompt}" in question  # what a completion says is not filled in
    assert endpoint.headers[0]["authorization"] == "Bearer secret"


def test_settings_are_checked() -> None:
    for wrong in ({"best": 0}, {"retries": -1}, {"concurrency": 0}, {"template": "{prompt}"}):
        raises(ConfigError, r"above 0|must hold", JudgeReward, "http://127.0.0.1:9", "m", **wrong)

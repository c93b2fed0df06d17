"""The task of `recipes/appointments`: what is an entry, and what a partly right one is worth."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from covey.tasks import get_task

ROOT = Path(__file__).resolve().parents[2]
TASK = get_task(f"{ROOT}/recipes/appointments/appointments.py:Appointments")
WANTED = {"what": "tea", "who": "Quinn", "day": "Friday", "time": "5:45 pm"}


def reward(text: str) -> float:
    (score,) = (function(completions=[text], answer=[json.dumps(WANTED)]) for function in TASK.reward_funcs)
    return float(score[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0),
        ({"who": "Paul"}, 0.8),
        ({"time": "5:15 pm"}, 0.94),
        ({"time": "4:45 pm"}, 0.94),
        ({"time": "5:45 am"}, 0.96),
        ({"time": "6:15 am"}, 0.84),
        ({"time": "5:45"}, 0.8),
        ({"time": "17:45"}, 0.8),
        ({"time": "05:45 pm"}, 0.8),
        ({"time": "13:45 pm"}, 0.8),
        ({"time": "5:45 pm "}, 0.8),
        ({"what": "", "who": "", "day": "", "time": ""}, 0.2),
    ],
)
def test_a_field_is_a_fifth_and_a_time_has_parts(changes: dict[str, str], expected: float) -> None:
    assert reward(json.dumps(WANTED | changes)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tea with Quinn",
        json.dumps([WANTED]),
        json.dumps(WANTED) + " That is it.",
        json.dumps(WANTED | {"more": "x"}),
        json.dumps({"what": "tea"}),
        json.dumps(WANTED | {"time": 1745}),
        '{"what": "tea", ' + json.dumps(WANTED)[1:],  # a key twice
        "{" * 300,
        '{"what": {"a": "b"}, "who": "Quinn", "day": "Friday", "time": "5:45 pm"}',
    ],
)
def test_what_is_no_entry_earns_nothing(text: str) -> None:
    assert reward(text) == 0.0


def test_every_row_has_an_answer_that_is_right_and_nothing_held_out_was_seen() -> None:
    train, held_out = TASK.train_rows(42), TASK.eval_rows()
    assert (len(train), len(held_out)) == (2_000, 200)
    for row in train[:200] + held_out:
        assert TASK.is_correct(row["answer"], row)
        clock, half = json.loads(row["answer"])["time"].split(" ")
        hour, minute = map(int, clock.split(":"))
        assert 7 <= hour % 12 + 12 * (half == "pm") <= 21
        assert minute in {0, 15, 30, 45}
    for field in ("what", "who"):
        seen, asked = ({json.loads(row["answer"])[field] for row in rows} for rows in (train, held_out))
        assert not seen & asked


class _Served(BaseHTTPRequestHandler):
    """A model that repeats the sentence that it is asked about, in an entry if there is a "with" in it."""

    def do_GET(self) -> None:
        self._say({"data": [{"id": "some/model"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, asked["model"], asked["temperature"]) == ("/v1/chat/completions", "some/model", 0)
        sentence = asked["messages"][0]["content"].split("Sentence: ")[-1].removesuffix("\nJSON:")
        text = json.dumps(WANTED | {"what": sentence}) if "with" in sentence else sentence
        self._say({"choices": [{"message": {"content": text}}]})

    def _say(self, found: dict[str, object]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def served() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Served) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_asking_a_served_model(served: str, tmp_path: Path) -> None:
    def ask(url: str, *sentences: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "recipes/appointments/ask.py"), "--url", url, *sentences]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)

    first, second = ask(served, "Tea with Quinn.", "Hello.").stdout.splitlines()
    assert json.loads(first) == WANTED | {"what": "Tea with Quinn."}
    assert second == "no entry: 'Hello.'"
    for url in ("http://127.0.0.1:1", served + "/v2", "nowhere"):
        failed = ask(url, "Tea with Quinn.")
        assert failed.returncode == 1
        assert failed.stderr.startswith(f"{url}: ")
        assert len(failed.stderr.splitlines()) == 1

"""The task of `recipes/appointments`: what is an entry, and what a partly right one is worth."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from covey.tasks import get_task

ROOT = Path(__file__).resolve().parents[2]
TASK = get_task(f"{ROOT}/recipes/appointments/appointments.py:Appointments")
WANTED = {"what": "tea", "who": "Quinn", "day": "Friday", "time": "5:45 pm"}


def reward(text: str) -> float:
    (score,) = (function(completions=[text], answer=[json.dumps(WANTED)]) for function in TASK.reward_funcs)
    return float(score[0])


def test_a_field_is_a_fifth_and_a_time_has_parts() -> None:
    for changes, expected in (
        ({}, 1.0),
        ({"who": "Paul"}, 0.8),
        ({"time": "5:15 pm"}, 0.94),
        ({"time": "4:45 pm"}, 0.94),
        ({"time": "5:45 am"}, 0.96),
        ({"time": "6:15 am"}, 0.84),
        *(({"time": wrong}, 0.8) for wrong in ("5:45", "17:45", "05:45 pm", "13:45 pm", "5:45 pm ")),
        ({"what": "", "who": "", "day": "", "time": ""}, 0.2),
        ({"more": "x"}, 0.0),
        ({"time": 1745}, 0.0),
    ):
        assert reward(json.dumps(WANTED | changes)) == expected


def test_what_is_no_entry_earns_nothing() -> None:
    twice = '{"what": "tea", ' + json.dumps(WANTED)[1:]  # a key
    nested = json.dumps(WANTED | {"what": {"a": "b"}})
    for text in ("", "tea with Quinn", json.dumps([WANTED]), json.dumps(WANTED) + " That is it.", twice, nested):
        assert reward(text) == 0.0, text
    assert reward(json.dumps({"what": "tea"})) == reward("{" * 300) == 0.0


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


def test_asking_a_served_model(tmp_path: Path) -> None:
    def ask(url: str, *sentences: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "recipes/appointments/ask.py"), "--url", url, *sentences]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)

    with ThreadingHTTPServer(("127.0.0.1", 0), _Served) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        served = f"http://127.0.0.1:{server.server_port}"
        first, second = ask(served, "Tea with Quinn.", "Hello.").stdout.splitlines()
        failures = {url: ask(url, "Tea with Quinn.") for url in ("http://127.0.0.1:1", served + "/v2", "nowhere")}
        server.shutdown()
    assert (json.loads(first), second) == (WANTED | {"what": "Tea with Quinn."}, "no entry: 'Hello.'")
    for url, failed in failures.items():
        assert (failed.returncode, len(failed.stderr.splitlines())) == (1, 1)
        assert failed.stderr.startswith(f"{url}: ")

"""The server over HTTP: completions, streams, versions, uploads between decode steps, limits, clients that go away."""

import asyncio
import itertools
import json
import logging
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from servers import RunningServer, adapted, at_once, begun, events, refused, serving, wait_until
from tiny_models import CHATML, byte_tokenizer

from covey.errors import CoveyError
from covey.pytorch.engine import Engine
from covey.serving import ServeSettings
from covey.serving.answers import Answering
from covey.serving.batching import Job
from covey.serving.requests import CompletionRequest
from covey.types import Request, SamplingSettings

IDS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 8]]
LONG = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


def test_token_ids_and_logprobs_are_the_engines(server: RunningServer) -> None:
    streams = [[3, 1], [3, 2], [3, 3]]
    drawn = {"max_tokens": 9, "temperature": 0.9, "top_k": 40, "stop_token_ids": [], "streams": streams}
    answer = server.ask(prompt=IDS, **drawn, logprobs=0, return_token_ids=True, return_support=True).json()
    settings = SamplingSettings(temperature=0.9, top_k=40, max_tokens=9, keep_support=True)
    requests = [Request(np.array(ids), tuple(stream)) for ids, stream in zip(IDS, streams, strict=True)]
    expected = Engine(server.model, server.tokenizer)(requests, settings, policy_version=0)
    for choice, completion in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == completion.token_ids.tolist()
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(completion.logprobs.tolist(), abs=1e-4)
        assert choice["support"]["offsets"] == completion.support.offsets.tolist()
        assert choice["text"] == server.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == IDS
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 27, "total_tokens": 38}


def test_n_and_seed_and_requests_with_different_settings_together(server: RunningServer) -> None:
    def texts(**more: Any) -> list[str]:
        return [c["text"] for c in server.ask(prompt="say one", n=5, max_tokens=12, **more).json()["choices"]]

    assert texts(seed=4) == texts(seed=4) != texts(seed=5)
    assert len(set(texts(seed=4))) > 1
    assert texts() != texts()
    assert len(set(texts(temperature=0))) == 1
    drawn = [{"seed": 1, "temperature": temperature} for temperature in (0.0, 0.7, 1.3)]
    assert at_once(lambda one: texts(**one), drawn) == [texts(**one) for one in drawn]


def test_chat_and_stop_strings(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 1}
    said = server.ask("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert said["role"] == "assistant"
    stop = said["content"][3:5]
    cut = server.ask("/v1/chat/completions", **body, stop=stop).json()["choices"][0]
    assert said["content"].startswith(cut["message"]["content"])
    assert len(cut["message"]["content"]) < len(said["content"])
    assert (stop in cut["message"]["content"], cut["finish_reason"]) == (True, "stop")


def of_schema(schema: Any) -> dict[str, Any]:
    more = {"name": "answer", "strict": True, "description": None}
    return {"type": "json_schema", "json_schema": {"schema": schema, **more}}


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}, "too complex"),
    ({"type": "string", "pattern": "^a{1000000000}$"}, "too complex"),
    ({"enum": ["a" * 10**6]}, "too complex"),
    ({"$ref": "#"}, "refers to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself"),
    ({"type": "number", "minimum": 10**300}, "not JSON serializable"),
]
ONE_VALUE: list[tuple[dict[str, Any], Any]] = [
    ({"type": "null"}, None),
    ({"const": "yes"}, "yes"),
    ({"enum": ["yes"]}, "yes"),
    ({"type": "integer", "minimum": 5, "maximum": 5}, 5),
    ({"type": "integer", "enum": [1, "a", 2.5]}, 1),
    ({"type": "string", "pattern": "^abc$"}, "abc"),
    ({"type": "string", "maxLength": 0}, ""),
    ({"type": "array", "maxItems": 0}, []),
]


def test_response_format_gives_json_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with random weights, which writes none by itself."""
    pytest.importorskip("llguidance")
    some = {"type": "string", "maxLength": 4}
    properties = {"kind": {"enum": ["question", "complaint"]}, "urgent": {"type": "boolean"}, "name": some}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    messages, ask = [{"role": "user", "content": "hello"}], {"n": 6, "max_tokens": 150, "seed": 3}
    with serving(tokenizer=tokenizer) as server:
        for path, what in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": messages})):
            for more in ({}, {"temperature": 0}):
                given = server.ask(path, **what, **ask, **more, response_format=of_schema(schema)).json()["choices"]
                for choice in given:
                    jsonschema.validate(json.loads(choice.get("text") or choice["message"]["content"]), schema)
                assert {choice["finish_reason"] for choice in given} == {"stop"}
        body = {"prompt": "hello", "max_tokens": 150, "seed": 3, "response_format": of_schema(schema)}
        parts = [event["choices"][0].get("text", "") for event in events(server.ask(**body, stream=True))]
        jsonschema.validate(json.loads("".join(parts)), schema)
        assert "".join(parts) == server.ask(**body).json()["choices"][0]["text"]
        first = server.ask(prompt="hello", max_tokens=9, response_format={"type": "json_object"}).json()["choices"][0]
        assert first["text"].startswith("{")
        for wrong, why in (({"type": "nonsense"}, "Invalid type"), ({"$ref": "http://x/y"}, "not present"), *TOO_MUCH):
            for stream in (False, True):  # before anything is sampled
                started = time.perf_counter()
                told = refused(server.ask(prompt="x", response_format=of_schema(wrong), stream=stream))
                assert "the schema is not served: " in told
                assert why in told
                assert time.perf_counter() - started < 2
        late = {"type": "object", "properties": {"a": TOO_MUCH[0][0]}, "required": ["a"], "additionalProperties": False}
        waits = begun(server.ask, **LONG)
        told = refused(server.ask(prompt="x", max_tokens=100, n=3, response_format=of_schema(late)))
        assert "is not served: too complex" in told
        assert waits.result().status_code == 200  # the others go on
        for one, value in ONE_VALUE:
            (found,) = server.ask(prompt="x", response_format=of_schema(one)).json()["choices"]
            assert (json.loads(found["text"]), found["finish_reason"]) == (value, "stop")
        clock = SimpleNamespace(thread_time=itertools.count(0.0, 0.05).__next__)
        monkeypatch.setattr("covey.serving.json_output.time", clock)  # masks take 50 ms, which all rows count together
        body = {"prompt": "x", "max_tokens": 3, "response_format": {"type": "json_object"}}
        assert server.ask(**body).status_code == 200
        waits = begun(server.ask, **LONG)
        assert "not served: takes too long" in refused(server.ask(**body, n=6))
        assert waits.result().status_code == 200
        assert "leave choices, stop" in refused(server.ask(prompt="x", stop="x", response_format=of_schema(schema)))
    with serving() as server:
        assert "not served for this model" in refused(server.ask(prompt="x", response_format={"type": "json_object"}))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(server: RunningServer, path: str) -> None:
    chat = "chat" in path
    what = {"messages": [{"role": "user", "content": "say two"}]} if chat else {"prompt": "say two"}
    body: dict[str, Any] = {**what, "n": 2, "max_tokens": 15, "seed": 3, "return_token_ids": True}
    whole = server.ask(path, **body).json()["choices"]
    texts, ids = ["", ""], [[], []]  # type: ignore[var-annotated]
    for event in events(server.ask(path, **body, stream=True)):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"]["content"] if chat else choice["text"]
        ids[choice["index"]] += choice["token_ids"]
        assert event["policy_version"] == server.batching.version
    assert ids == [choice["token_ids"] for choice in whole]
    assert texts == [c["message"]["content"] if chat else c["text"] for c in whole]


def test_uploads_count_and_change_what_is_sampled(fresh: RunningServer) -> None:
    greedy = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    plain = fresh.ask(**greedy).json()
    assert (plain["policy_version"], fresh.upload().json()["policy_version"]) == (0, 1)
    changed = fresh.ask(**greedy).json()
    assert changed["policy_version"] == 1
    assert changed["choices"][0]["token_ids"] != plain["choices"][0]["token_ids"]
    settings = SamplingSettings(temperature=0, max_tokens=12, eos_token_ids=(fresh.tokenizer.eos_token_id,))
    (expected,) = Engine(adapted())([Request(np.array([5, 6, 7, 8]), (0,))], settings, policy_version=0)
    assert changed["choices"][0]["token_ids"] == expected.token_ids.tolist()  # no prompt of version 0 was reused


@pytest.mark.parametrize("swap", ["finish", "continue"])
def test_completions_that_run_at_an_upload(swap: str) -> None:
    with serving(swap=swap) as server:
        found = begun(server.ask, **LONG, seed=1)
        wait_until(lambda: server.batching.load[0] == 1 and next(iter(server.batching._running.values())).row)
        assert server.upload().json()["policy_version"] == 1
        after = server.ask(**LONG, seed=1).json()["choices"][0]
        running = found.result().json()["choices"][0]
        assert (running["policy_version"], after["policy_versions"]) == (0, [[0, 1]])
        if swap == "finish":
            assert running["policy_versions"] == [[0, 0]]
        else:
            ((zero, first), (place, second)) = running["policy_versions"]
            assert (zero, first, second) == (0, 0, 1)
            assert 0 < place < 200


def test_two_trainers_are_refused(fresh: RunningServer) -> None:
    assert fresh.upload(trainer="one").status_code == 200
    assert "'one' did " in refused(fresh.upload(seed=2, trainer="two"), 409)
    assert fresh.upload(seed=2).status_code == 409  # nor one without a name
    assert fresh.upload(seed=2, trainer="one").json()["policy_version"] == 2
    assert fresh.upload(seed=3, trainer="two", takeover=True).json()["policy_version"] == 3
    assert fresh.upload(trainer="one").status_code == 409
    for name in ("one", "two"):  # who does not hold it gives nothing back
        fresh.post("/release_trainer", data={"trainer": name})
        assert fresh.upload(trainer="one").status_code == (409 if name == "one" else 200)


def test_a_full_queue_says_so() -> None:
    with serving(max_rows=1, max_waiting=2) as server:
        running = [begun(server.ask, **LONG)]
        wait_until(lambda: server.batching.load[0] == 1)
        running += [begun(server.ask, **LONG) for _ in range(2)]
        wait_until(lambda: server.batching.load == (1, 2) or all(one.done() for one in running))
        answers = [server.ask(**LONG, n=3) for _ in range(2)]
        assert ({answer.status_code for answer in answers}, answers[0].headers["retry-after"]) == ({429}, "1")


def test_a_request_of_many_completions_lets_others_in() -> None:
    with serving(max_rows=2) as server:
        many = begun(server.ask, **LONG, n=30)
        wait_until(lambda: server.batching.load[0] == 2)
        assert server.ask(prompt="x", max_tokens=2).status_code == 200
        assert server.batching.load[1] > 20
        assert many.result().status_code == 200


def test_a_client_that_goes_away_frees_its_place() -> None:
    with serving(max_rows=1) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", json=LONG | {"n": 40}, timeout=0.3)
        wait_until(lambda: server.batching.load == (0, 0))
        assert server.batching.counts.cancelled > 30
        leave_stream(server, LONG | {"n": 40})
        wait_until(lambda: server.batching.load == (0, 0))
        assert server.ask(prompt="x", max_tokens=2).status_code == 200


def leave_stream(server: RunningServer, body: dict[str, Any]) -> None:
    """Ask for a stream, and go away after its first line."""
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60, trust_env=False) as response:
        next(response.iter_lines())


def test_prompts_are_remembered_until_the_next_upload(fresh: RunningServer) -> None:
    for _ in range(3):
        fresh.ask(prompt=[5, 6, 7, 8], max_tokens=2)
    assert fresh.batching.counts.reused_prompts == 2
    for _ in range(2):
        assert fresh.ask(prompt=[5, 6] * 100, max_tokens=1).status_code == 200
    assert fresh.metric("covey_reused_tokens") == 128  # of 199 or 200: whole blocks alone are told
    assert "covey_reused_prompts" not in fresh.get("/metrics").text
    for start in range(40):  # more than the cache holds: the oldest make room
        assert fresh.ask(prompt=[5 + start % 60] * 300, max_tokens=2).status_code == 200
    fresh.upload()
    fresh.ask(prompt=[5, 6, 7, 8], max_tokens=2)
    assert fresh.batching.counts.reused_prompts == 0


def test_a_turn_of_a_chat_costs_its_new_tokens(fresh: RunningServer) -> None:
    """Any client: a prompt is what was asked before, what was answered, and something new."""
    alone = Engine(fresh.model)
    history, counted = [*range(5, 16)], []
    for turn in range(4):
        body = {"prompt": history, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        said = fresh.ask(**body).json()["choices"][0]["token_ids"]
        greedy = SamplingSettings(temperature=0.0, max_tokens=6)
        (expected,) = alone([Request(np.array(history))], greedy, policy_version=0)
        assert said == expected.token_ids.tolist()
        stats = fresh.batching._session.stats()
        counted.append((stats.prefill_tokens, stats.reused_tokens))
        history = [*history, *said, 20 + turn, 30]
    # each turn: the last token of the answer before it, which was not run, and two new ones
    assert counted == [(11, 0), (11 + 3, 16), (11 + 6, 16 + 24), (11 + 9, 16 + 24 + 32)]
    assert fresh.metric("covey_reused_tokens") == 0  # of 72: no turn has reused a whole block of 128


def test_bodies_are_bounded_in_size() -> None:
    settings = ServeSettings("tiny", max_upload_bytes=50_000, max_body_bytes=2_000)

    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    with serving(settings=settings) as server:
        assert (server.ask(prompt="x" * 3000).status_code, server.send(b"x" * 60_000, {}).status_code) == (413, 413)
        assert server.post("/v1/completions", content=chunks()).status_code == 413  # no length is given
        assert (server.ask(prompt="x", max_tokens=1).status_code, server.batching.version) == (200, 0)


def test_closing_lets_what_runs_finish() -> None:
    server = RunningServer(graceful=15)
    found = begun(server.ask, **LONG | {"max_tokens": 150})
    wait_until(lambda: server.batching.load[0] == 1)
    server.close()
    assert (found.result().status_code, found.result().json()["usage"]["completion_tokens"]) == (200, 150)


def test_events_name_the_version_of_their_tokens() -> None:
    """An upload between sampling and delivery changes nothing: the first three tokens are version 0's, the rest 7's."""

    def submit(jobs: list[Job]) -> None:
        for version, token in ((0, 5), (0, 6), (0, 7), (7, 8)):
            jobs[0].on_tokens([token], [-1.0], version)
        jobs[0].on_end(CoveyError("the end"))

    sizes = {"context_length": 64, "max_completion_length": 16, "vocabulary": 96}
    engine = SimpleNamespace(submit=submit, cancel=lambda jobs: None, version=9, **sizes)
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: "x" * len(ids))

    async def versions() -> list[int]:
        answering = Answering(engine, tokenizer, "tiny")  # type: ignore[arg-type]
        chunks = await answering.chunks(CompletionRequest(prompt=[5], stream=True))
        said = [event async for chunk in chunks for event in chunk]
        answering.close()
        found = [json.loads(event.removeprefix("data: ")) for event in said[:-1]]
        return [one["policy_version"] for one in found if "choices" in one]

    assert asyncio.run(versions()) == [0, 0, 0, 7]


def test_half_a_body_leaves_no_traceback(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    head = b"HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\ncontent-type: multipart/form-data; boundary=x\r\n\r\n{"
    with caplog.at_level(logging.WARNING):
        for path in (b"/v1/completions", b"/upload_adapter") * 10:
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as gone:
                gone.sendall(b"POST %b %b" % (path, head))
        time.sleep(0.5)
        assert server.get("/health").status_code == 200
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_completion_is_finished_or_cancelled() -> None:
    """Of two completions in one request the shorter is over when the client goes away: one of each is counted."""
    with serving(max_rows=2) as server:
        leave_stream(server, LONG | {"prompt": [5], "n": 2, "choices": [[[5, 6]], None]})
        wait_until(lambda: server.batching.load == (0, 0))
        counts = server.batching.counts
        wait_until(lambda: counts.completions + counts.cancelled >= 2)
        assert (counts.completions + counts.cancelled, server.upload().status_code) == (2, 200)
        assert counts.completions + counts.cancelled == 2

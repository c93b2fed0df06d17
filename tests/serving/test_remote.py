"""A trainer and its server: the same run as in one process, and everything that can go wrong between them."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import RunningServer, ServerProcess, fake_server, serving, training_server
from test_adapters import adapted, as_mlx

from covey import GRPOConfig, GRPOTrainer, GRPOTrainingArgs
from covey.errors import ConfigError, CoveyError, GenerationError, ServingError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.serving import InferenceClient, RemoteEngine, check_server, upload_adapter_weights, write_adapter
from covey.serving.check import fitting_adapter, made_adapter
from covey.serving.client import RefusedError
from covey.types import Completion, Request, SamplingSettings

SETTINGS = SamplingSettings(temperature=0.9, max_tokens=12, eos_token_ids=(2,))
REQUESTS = [Request(np.array([5 + i, 6, 7]), (1, i)) for i in range(20)]


def client(url: str, retry_seconds: float = 5.0) -> InferenceClient:
    return InferenceClient(url, timeout=20, retry_seconds=retry_seconds)


def remote(url: str, **options: Any) -> RemoteEngine:
    return RemoteEngine(client(url, **options), trainer="test")


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert one.finish_reason == other.finish_reason


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


def test_a_server_samples_what_the_engine_samples(server: RunningServer) -> None:
    model = adapted()
    engine, there = Engine(model), remote(server.url)
    engine.publish(weights_of(model, 1))
    there.publish(weights_of(model, 1))
    seen: list[tuple[int, int]] = []
    for settings in (SETTINGS, SamplingSettings(top_k=20, max_tokens=6, keep_support=True)):
        expected = engine(REQUESTS, settings, policy_version=1)
        found = there(REQUESTS, settings, policy_version=1, progress=lambda done, total: seen.append((done, total)))
        for one, other in zip(found, expected, strict=True):
            same(one, other)
            assert one.policy_version == 1
            if settings.keep_support:
                assert one.support is not None
                assert other.support is not None
                assert one.support.offsets.tolist() == other.support.offsets.tolist()
    assert seen[-1] == (20, 20)
    with pytest.raises(GenerationError, match="policy_version=2: the server was given version 1"):
        there(REQUESTS, SETTINGS, policy_version=2)
    with pytest.raises(GenerationError, match="start it with --max-completion-length 500"):
        there(REQUESTS, SamplingSettings(max_tokens=500), policy_version=1)


def test_conversations_on_a_server(server: RunningServer) -> None:
    model = adapted()
    engine, there = Engine(model), remote(server.url)
    there.publish(weights_of(model, 1))
    engine.publish(weights_of(model, 1))
    options: dict[str, Any] = {"policy_version": 1, "rows": 3, "own_tokens": 60, "prompt_lengths": [3] * 3}
    for choices in (None, ((9, 8, 2), (9, 7, 2))):
        sessions = [source.session(SETTINGS, **options) for source in (engine, there)]  # type: ignore[attr-defined]
        said = []
        for session in sessions:
            rows = [session.start(request, keep=True) for request in REQUESTS[:3]]
            turns: list[list[Completion]] = [[], [], []]
            for turn in range(3):
                over: list[Any] = []
                while len(over) < 3:
                    over += session.advance()
                for place, row in enumerate(rows):
                    turns[place].append(session.completion(row))
                    if turn < 2:
                        session.extend(row, np.array([4, 3]), (turn, place), choices)
            for row in rows:
                session.drop(row)
            assert not session.busy
            said.append(turns)
        for mine, theirs in zip(*said, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                same(other, one)


def few_vowels(completions: list[Any], **columns: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch not in "aeiou" for ch in text) / max(len(text), 1) for text in texts]


def make_trainer(args: GRPOConfig, **options: Any) -> GRPOTrainer:
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
    return GRPOTrainer(args=args, reward_funcs=few_vowels, train_dataset=rows, **options)


def _run(settings: dict[str, Any], **changes: Any) -> tuple[list[dict[str, Any]], GRPOTrainer]:
    trainer = make_trainer(GRPOConfig(**(settings | changes)))
    trainer.train()
    records = RunFolder.read(trainer.args.run.output_dir).read_metrics()
    return [record for record in records if "loss" in record], trainer


def test_the_run_is_the_one_of_a_single_process(
    settings: dict[str, Any], server: RunningServer, tmp_path: Path
) -> None:
    here, _ = _run(settings, max_steps=3)
    there, trainer = _run(
        settings,
        max_steps=3,
        output_dir=str(tmp_path / ("deep" * 30) / ("deep" * 30) / "there"),  # longer than a name may be
        upload_adapters_to_server=True,
        inference_server_url=server.url,
    )
    for one, other in zip(here, there, strict=True):
        assert one["policy_version"] == other["policy_version"]
        for name in ("reward", "loss", "grad_norm", "completions/mean_length"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
        assert other["sampling/sampling_logp_difference/max"] < 1e-3
    assert server.batching.version == trainer.state.policy_version == 4
    # a resumed run goes on with the same server, whose version is ahead of its own or not
    resumed = make_trainer(trainer.args.replace(max_steps=4))
    resumed.train(resume_from_checkpoint=True)
    assert server.batching.version == resumed.state.policy_version == 5


@pytest.mark.slow
def test_sampling_on_a_server_while_training(settings: dict[str, Any], server: RunningServer, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 4, "max_staleness": 1}
    here, _ = _run(settings, **changes)
    there, trainer = _run(
        settings,
        **changes,
        output_dir=str(tmp_path / "there"),
        upload_adapters_to_server=True,
        inference_server_url=server.url,
    )
    assert [record["staleness/max"] for record in there] == [0, 1, 1, 1]
    for one, other in zip(here, there, strict=True):
        for name in ("reward", "loss", "staleness/mean", "sampling/importance_sampling_ratio/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
    assert server.batching.version == trainer.state.policy_version == 5


def test_agents_play_on_a_server_as_in_one_process(settings: dict[str, Any], tmp_path: Path) -> None:
    playing = settings | {
        "world": "house:rooms=2,num_train=6,num_eval=3",
        "max_conversation_tokens": 600,
        "action_format": "choice",
        "max_completion_length": 16,
    }

    def played(**changes: Any) -> list[Any]:
        args = GRPOConfig(**(playing | changes))
        trainer = GRPOTrainer(args=args)
        trainer.train()
        folder = RunFolder.read(args.run.output_dir)
        return [[row["completion"] for row in folder.read_completions(step)] for step in (1, 2)]

    here = played()
    with serving(max_completion_length=64) as server:
        there = played(
            output_dir=str(tmp_path / "there"), upload_adapters_to_server=True, inference_server_url=server.url
        )
    assert there[0] == here[0]
    assert sum(a == b for a, b in zip(there[1], here[1], strict=True)) >= 7  # weights differ in the last digits


def test_the_documents_names() -> None:
    args = GRPOTrainingArgs(upload_adapters_to_server=True, inference_server_url="http://127.0.0.1:1")
    assert args.server.inference_server_url == "http://127.0.0.1:1"
    secret = GRPOConfig(server_token="hunter2")
    assert secret.server.server_token == "hunter2"
    for written in (secret.to_toml(), repr(secret), str(secret.to_dict())):
        assert "hunter2" not in written
    with pytest.raises(ConfigError, match="only adapters are uploaded"):
        GRPOConfig(upload_adapters_to_server=True, use_peft=False)


def test_no_server_fails_early_and_names_the_address(settings: dict[str, Any]) -> None:
    with pytest.raises(ServingError, match=r"http://127\.0\.0\.1:9/health does not answer.*covey serve"):
        make_trainer(
            GRPOConfig(
                **settings,
                upload_adapters_to_server=True,
                inference_server_url="http://127.0.0.1:9",
                server_retry_seconds=0.3,
            )
        )
    with pytest.raises(ServingError, match=r"it is no address|does not answer"):
        InferenceClient("not an address", retry_seconds=0).health()


def test_the_documents_function(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    weights, config = write_adapter(adapted())
    assert asyncio.run(upload_adapter_weights(weights, config, server.url, 1)) == 1
    assert not caplog.records
    assert asyncio.run(upload_adapter_weights(*as_mlx(weights, 3, 2.0), server.url, 2)) == 2

    def counts_alone(path: str, body: bytes) -> tuple[int, Any]:
        return 200, {"policy_version": 7}

    with fake_server(counts_alone) as url:
        assert asyncio.run(upload_adapter_weights(weights, config, url, 3)) == 7
    assert "says policy version 7, 3 was expected" in caplog.text
    with fake_server(lambda path, body: (500, {"error": "broken"})) as url:
        failing = client(url, retry_seconds=0.1)
        with pytest.raises(ServingError, match="broken"):
            failing.upload_adapter(weights, config)


def test_the_check(server: RunningServer) -> None:
    name = "model.layers.0.self_attn.q_proj"
    steps = check_server(client(server.url), made_adapter(name, 32))
    assert [(step.name, step.passed) for step in steps] == [
        ("health", True),
        ("upload", True),
        ("version", True),
        ("hash", True),
        ("completion", True),
    ]
    fitting = check_server(client(server.url), fitting_adapter(client(server.url)))  # whatever the model is
    assert [step.passed for step in fitting] == [True] * 5
    refused = check_server(client(server.url))  # an adapter for another model
    assert [(step.name, step.passed) for step in refused] == [("health", True), ("upload", False)]
    assert "the model's is (32, 32)" in refused[1].detail
    assert "fits SmolLM2-135M only" in refused[1].detail

    def documents_server(path: str, body: bytes) -> tuple[int, Any]:
        if path == "/health":
            return 200, {"status": "ok"}
        return (200, {"policy_version": 1}) if path == "/upload_adapter" else (404, {"detail": "Not Found"})

    with fake_server(documents_server) as url:
        assert fitting_adapter(client(url)) is None
        steps = check_server(client(url))
        assert [step.passed for step in steps] == [True, True, None, None, False]  # training would not start either
    assert [step.passed for step in check_server(client("http://127.0.0.1:9", retry_seconds=0))] == [False]


def test_a_restarted_server_is_given_the_weights_again(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    with serving() as first:
        there = remote(first.url)
        there.publish(weights_of(model, 5))
        before = there(REQUESTS, SETTINGS, policy_version=5)
    with serving() as second:
        there.dialect.client = client(second.url)
        after = there(REQUESTS, SETTINGS, policy_version=5)
        assert second.batching.version == 5
        assert second.batching.counts.uploads <= 3  # by whichever requests came first
    for one, other in zip(before, after, strict=True):
        same(one, other)
    assert "was restarted; it is given version 5 again" in caplog.text


def test_weights_of_somebody_else_are_never_trained_on(server: RunningServer) -> None:
    there = RemoteEngine(client(server.url), trainer="")  # without a name nothing keeps others out
    there.publish(weights_of(adapted(), 1))
    weights, config = write_adapter(adapted(2))
    client(server.url).upload_adapter(weights, config)
    with pytest.raises(ServingError, match="somebody else uploads to it"):
        there(REQUESTS, SETTINGS, policy_version=1)
    client(server.url).upload_adapter(weights, config, trainer="one")
    with pytest.raises(RefusedError, match="may not upload"):
        client(server.url).upload_adapter(weights, config, trainer="two")


def _choice(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "finish_reason": "stop",
        "policy_version": 1,
    } | changes


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([_choice(policy_version=0)], "sampled from version 0, 1 was asked for"),
        ([_choice(logprobs={"token_logprobs": [-1.0, float("nan")]})], "not finite"),
        ([_choice(logprobs={"token_logprobs": [-1.0]})], r"\(2,\) token ids with \(1,\) log-probabilities"),
        ([_choice(token_ids=[])], "token ids with"),
        ([_choice(token_ids=list(range(13)), logprobs={"token_logprobs": [-1.0] * 13})], "token ids with"),
        ([_choice(token_ids=None)], r"\(\) token ids with"),
        ([_choice(token_ids=[1.5, 2.0])], r"token ids \[1.5, 2.0\]; the policy.s are whole numbers"),
        ([_choice(token_ids=[-1, 3])], r"token ids \[-1, 3\]"),
        ([_choice(token_ids=[5, 10**6])], r"token ids \[5, 1000000\]; the policy.s are whole numbers from 0 to 98"),
        ([_choice(token_ids=[2, 5])], r"behind the end token 2: \[2, 5\]"),
        ([_choice(logprobs={"token_logprobs": [-1.0, 0.5]})], "log-probabilities .*above 0"),
        ([_choice(finish_reason="error")], "'error'"),
        ([{"text": "only text"}], r"CoveyDialect.read cannot read \(KeyError: .token_ids."),
        ([], "to 1 prompts"),
        ([_choice(), _choice()], "to 1 prompts"),
        ("nonsense", "to 1 prompts"),
    ],
)
def test_answers_that_are_no_completions(choices: Any, message: str) -> None:
    def answer(path: str, body: bytes) -> tuple[int, Any]:
        if path == "/v1/completions":
            return 200, {"choices": choices}
        return 200, {"policy_version": 1}

    with fake_server(answer) as url:
        there = RemoteEngine(client(url), trainer="test", vocabulary=99)
        there.publish(weights_of(adapted(), 1))
        with pytest.raises(ServingError, match=message):
            there(REQUESTS[:1], SETTINGS, policy_version=1)


def test_a_server_that_applied_other_weights() -> None:
    with fake_server(lambda path, body: (200, {"policy_version": 1, "sha256": "0" * 64})) as url:
        there = remote(url)
        with pytest.raises(ServingError, match="its weights are not the trainer's"):
            there.publish(weights_of(adapted(), 1))
        assert there.policy_version == -1


def test_requests_that_fail_for_a_while_are_tried_again() -> None:
    calls: list[str] = []

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        calls.append(path)
        if path == "/v1/completions":
            number = calls.count(path)
            if number < 4:
                return (503, 429, 0)[number - 1], {"error": {"message": "busy"}}
            return 200, {"choices": [_choice()]}
        return 200, {"policy_version": 1}

    waits: list[float] = []
    with fake_server(answer) as url:
        patient = InferenceClient(url, timeout=20, retry_seconds=60, sleep=waits.append)
        there = RemoteEngine(patient, trainer="test")
        there.publish(weights_of(adapted(), 1))
        (found,) = there(REQUESTS[:1], SETTINGS, policy_version=1)
    assert found.token_ids.tolist() == [5, 6]
    assert len(waits) == 3
    assert waits[2] > waits[0] / 2  # longer and longer, with chance in it
    with fake_server(lambda path, body: (200, {}) if path == "/health" else (400, {"error": "no"})) as url:
        there = remote(url)
        with pytest.raises(RefusedError, match="no"):  # not tried again
            there.publish(weights_of(adapted(), 1))


@pytest.mark.slow
def test_a_run_whose_server_dies_can_be_resumed(settings: dict[str, Any], tmp_path: Path, model_folder: Path) -> None:
    whole, _ = _run(settings, max_steps=4)
    steps = []

    class KillAtStepTwo:
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)
            if state.global_step == 2:
                server.kill()

    with ServerProcess(model_folder) as server:
        args = GRPOConfig(
            **(settings | {"max_steps": 4, "output_dir": str(tmp_path / "served"), "server_retry_seconds": 0.5}),
            upload_adapters_to_server=True,
            inference_server_url=server.url,
        )
        with pytest.raises(ServingError, match="does not answer"):
            make_trainer(args, callbacks=[KillAtStepTwo()]).train()
        server.start()  # another process, with no weights of ours
        make_trainer(args).train(resume_from_checkpoint=True)
    assert steps == [1, 2]
    records = [r for r in RunFolder.read(args.run.output_dir).read_metrics() if "loss" in r]
    assert [r["reward"] for r in records] == pytest.approx([r["reward"] for r in whole], abs=1e-4)


@pytest.mark.slow
def test_many_clients_at_once() -> None:
    with serving(max_rows=8, max_waiting=1000) as server:
        failures: list[Any] = []

        def one(number: int) -> None:
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
                for turn in range(3):
                    body = {"prompt": [5 + number % 50, 6, turn + 4], "max_tokens": 5 + number % 7, "ignore_eos": True}
                    answer = http.post("/v1/completions", json=body)
                    if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 5 + number % 7:
                        failures.append(answer.text)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert server.batching.counts.completions == 64 * 3
        assert server.batching.load == (0, 0)


def test_a_connection_that_breaks_in_an_upload_is_no_second_upload() -> None:
    with serving() as server:
        weights, config = write_adapter(adapted())
        cut = [True]

        def passing_on(path: str, body: bytes) -> tuple[int, Any]:
            if path == "/health":
                return 200, httpx.get(server.url + path, trust_env=False).json()
            found = server_says(body)
            if cut:  # the server has applied it; its answer is lost
                cut.clear()
                return 0, None
            return found.status_code, found.json()

        def server_says(body: bytes) -> httpx.Response:
            boundary = body.split(b"\r\n", 1)[0][2:].decode()
            headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
            return httpx.post(f"{server.url}/upload_adapter", content=body, headers=headers, trust_env=False)

        with fake_server(passing_on) as url:
            answer = client(url).upload_adapter(weights, config, policy_version=4, trainer="one")
        assert answer.policy_version == 4
        assert server.batching.counts.uploads == 1


def test_a_server_that_is_too_slow() -> None:
    def slow(path: str, body: bytes) -> tuple[int, Any]:
        if path != "/health":
            time.sleep(1.0)
        return 200, {"policy_version": 1}

    with fake_server(slow) as url:
        impatient = InferenceClient(url, timeout=0.2, retry_seconds=0.5)
        there = RemoteEngine(impatient, trainer="test")
        with pytest.raises(ServingError, match=r"upload_adapter does not answer \(ReadTimeout"):
            there.publish(weights_of(adapted(), 1))
        assert there.policy_version == -1  # nothing may be sampled now


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_samples(model_folder: Path) -> None:
    model = adapted()
    long = SamplingSettings(temperature=1.0, max_tokens=400)
    requests = [Request(np.array([5, 6, 7 + i]), (2, i)) for i in range(24)]
    found: list[Any] = []
    with ServerProcess(model_folder) as server:
        there = remote(server.url, retry_seconds=60)
        there.publish(weights_of(model, 3))
        thread = threading.Thread(target=lambda: found.extend(there(requests, long, policy_version=3)))
        thread.start()
        while there.dialect.client.health()["running"] == 0:
            time.sleep(0.01)
        server.kill()
        server.start()
        thread.join()
    here = Engine(model)
    here.publish(weights_of(model, 3))
    for one, other in zip(found, here(requests, long, policy_version=3), strict=True):
        same(one, other)


def test_an_upload_to_nobody_is_told_within_the_time_that_was_given() -> None:
    """Five seconds unless somebody says otherwise; no second is waited here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(ServingError, match=r"does not answer .*is the server running"):
        asyncio.run(upload_adapter_weights(b"", {}, url, 1, timeout=1.0, retry_seconds=0.0))
    assert time.monotonic() - began < 30
    assert inspect.signature(upload_adapter_weights).parameters["retry_seconds"].default == 5.0


HINT = r"needs a dialect: server\.inference_server_kind, see docs/serving\.md"
DEVIATIONS: dict[str, tuple[dict[str, Any], str]] = {
    # what the server does otherwise, and what is said of it
    "its version is in another place": ({"choice": {"policy_version": ...}}, f"KeyError: 'policy_version'.*{HINT}"),
    "its version is another one": (
        {"choice": {"policy_version": 7}},
        f"sampled from version 7, 1 was asked for.*{HINT}",
    ),
    "text without ids": ({"choice": {"token_ids": ...}}, f"KeyError: 'token_ids'.*{HINT}"),
    "no log-probabilities": ({"choice": {"logprobs": None}}, f"TypeError.*{HINT}"),
    "one log-probability too few": (
        {"choice": {"logprobs": {"token_logprobs": [-1.0]}}},
        rf"\(2,\) token ids with.*{HINT}",
    ),
    "one completion for all prompts": ({"choices": lambda choices: choices[:1]}, f"to 2 prompts; .*{HINT}"),
    "no choices": ({"answer": {"choices": ...}}, f"to 2 prompts; .*{HINT}"),
    "another finish reason": ({"choice": {"finish_reason": "eos"}}, f"finish reason 'eos'.*{HINT}"),
    "unknown fields refused": ({"replace": ("/v1/completions", 422, {"error": "streams: extra"})}, f"extra; .*{HINT}"),
    "unknown fields refused as OpenAI does": ({"replace": ("/v1/completions", 400, {"error": "no"})}, f"no; .*{HINT}"),
    "another model's name": ({"replace": ("/v1/completions", 404, {"error": "no model ''"})}, f"no model.*{HINT}"),
    "no completions": ({"replace": ("/v1/completions", 404, b"Not Found")}, f"Not Found; .*{HINT}"),
    "completions that are a page": ({"replace": ("/v1/completions", 200, b"<html>")}, f"<html>.*{HINT}"),
    "completions cut off": ({"replace": ("/v1/completions", 200, b'{"choices": [')}, f"to 2 prompts; .*{HINT}"),
    "completions too deep": ({"replace": ("/v1/completions", 200, b"[" * 100_000)}, f"to 2 prompts; .*{HINT}"),
    "completions elsewhere": ({"replace": ("/v1/completions", 307, b"")}, "redirects to"),
    "uploads without a version": ({"upload": {"policy_version": ...}}, f"without a policy_version.*{HINT}"),
    "uploads with a version as text": ({"upload": {"policy_version": "1"}}, f"without a policy_version.*{HINT}"),
    "uploads that refuse a field": ({"replace": ("/upload_adapter", 422, {"error": "restart"})}, f"restart; .*{HINT}"),
    "no uploads": ({"replace": ("/upload_adapter", 404, b"Not Found")}, f"Not Found; .*{HINT}"),
    "uploads elsewhere": ({"replace": ("/upload_adapter", 308, b"")}, "redirects to"),
    "other weights": ({"upload": {"sha256": "0" * 64}}, "its weights are not the trainer's"),
    "a page at every address": ({"replace": ("/health", 200, b"<html>"), "upload": {"policy_version": ...}}, HINT),
    "limits that are no numbers": ({"health": {"context_length": "many"}}, f"/health answered.*{HINT}"),
    "health elsewhere": ({"replace": ("/health", 302, b"")}, "redirects to"),
}


def trained(url: str) -> str:
    """What training says of a server; "" = it samples from it."""
    try:
        there = RemoteEngine(InferenceClient(url, timeout=20, retry_seconds=0), trainer="test")
        there.publish(weights_of(adapted(), 1))
        requests = [Request(np.array([5, 6, 7]), (0, 0)), Request(np.array([8]), (0, 1))]
        there(requests, SamplingSettings(max_tokens=4, eos_token_ids=(2,)), policy_version=1)
    except CoveyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("deviations", "words"), DEVIATIONS.values(), ids=DEVIATIONS)
def test_what_training_refuses_the_check_refuses_in_the_same_words(deviations: dict[str, Any], words: str) -> None:
    with fake_server(training_server(**deviations)) as url:
        said = trained(url)
        steps = check_server(InferenceClient(url, timeout=20, retry_seconds=0))
        found = [step.detail for step in steps if step.passed is False]
    assert re.search(words, said, re.DOTALL), said
    assert len(found) == 1
    same = [re.sub("[0-9a-f]{12}", "HASH", one) for one in (found[0], said)]  # of the adapter that was sent
    assert same[0].removesuffix(" (what was tried fits SmolLM2-135M only)") == same[1]
    assert steps[-1].passed is False


@pytest.mark.parametrize(
    "deviations",
    [
        {},
        {"choice": {"text": ...}},
        {"choice": {"finish_reason": "stop"}},
        {"answer": {"policy_version": ..., "model": "another"}},
        {"health": {"policy_version": ...}},
        {"replace": ("/release_trainer", 404, b"Not Found")},
    ],
)
def test_what_training_takes_the_check_takes(deviations: dict[str, Any]) -> None:
    with fake_server(training_server(**deviations)) as url:
        assert trained(url) == ""
        steps = check_server(InferenceClient(url, timeout=20, retry_seconds=0))
    assert [step.name for step in steps] == ["health", "upload", "version", "hash", "completion"]
    assert all(step.passed is not False for step in steps)


def test_the_check_asks_the_very_requests_of_training() -> None:
    asked: list[tuple[str, bytes]] = []
    answer = training_server()

    def keeping(path: str, body: bytes) -> tuple[int, Any]:
        asked.append((path, body))
        return answer(path, body)

    with fake_server(keeping) as url:
        assert trained(url) == ""
        training = list(asked)
        asked.clear()
        check_server(InferenceClient(url, timeout=20, retry_seconds=0))

    def forms(requests: list[tuple[str, bytes]]) -> list[Any]:
        uploads = [body for path, body in requests if path == "/upload_adapter"]
        return [re.findall(rb'name="([a-z_]+)"', body) for body in uploads]

    assert forms(asked) == forms(training)
    last = [[body for path, body in some if path == "/v1/completions"] for some in (asked, training)]
    assert last[0] == last[1]
    assert asked[-1][0] == "/release_trainer"  # a trainer may come at once

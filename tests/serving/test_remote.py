"""A trainer and its server: the same run as in one process, and everything that can go wrong between them."""

import asyncio
import inspect
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import RunningServer, ServerProcess, adapted, as_mlx, at_once, begun, fake_server, serving, training_server

from covey import GRPOConfig, GRPOTrainer, GRPOTrainingArgs
from covey.errors import ConfigError, CoveyError, GenerationError, ServingError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.serving import InferenceClient, RemoteEngine, check_server, upload_adapter_weights, write_adapter
from covey.serving.check import fitting_adapter, made_adapter
from covey.serving.client import RefusedError, _BusyError
from covey.types import Completion, Request, SamplingSettings
from fakes import raises

SETTINGS = SamplingSettings(temperature=0.9, max_tokens=12, eos_token_ids=(2,))
REQUESTS = [Request(np.array([5 + i, 6, 7]), (1, i)) for i in range(20)]
HINT = r"needs a dialect: server\.inference_server_kind, see docs/use\.md"
TEXTS, UPLOADS = "/v1/completions", "/upload_adapter"
TAKEN: list[dict[str, Any]] = [
    *({}, {"choice": {"text": ...}}, {"choice": {"finish_reason": "stop"}}, {"health": {"policy_version": ...}}),
    *({"answer": {"policy_version": ..., "model": "another"}}, {"replace": ("/release_trainer", 404, b"Not Found")}),
]


def client(url: str, retry_seconds: float = 5.0) -> InferenceClient:
    return InferenceClient(url, timeout=20, retry_seconds=retry_seconds)


def remote(url: str, **options: Any) -> RemoteEngine:
    return RemoteEngine(client(url, **options), trainer="test")


def published(url: str, version: int, **options: Any) -> tuple[RemoteEngine, Engine]:
    """The engine on a server and one in this process, with the same weights."""
    model = adapted()
    there, here = remote(url, **options), Engine(model)
    for engine in (there, here):
        engine.publish(weights_of(model, version))
    return there, here


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.finish_reason == other.finish_reason


def test_a_server_samples_what_the_engine_samples_in_conversations_too(fresh: RunningServer) -> None:
    there, here = published(fresh.url, 1)
    seen: list[tuple[int, int]] = []
    for settings in (SETTINGS, SamplingSettings(top_k=20, max_tokens=6, keep_support=True)):
        expected = here(REQUESTS, settings, policy_version=1)
        found = there(REQUESTS, settings, policy_version=1, progress=lambda *counts: seen.append(counts))
        same(found, expected)
        assert {one.policy_version for one in found} == {1}
    kept = [[one.support and one.support.offsets.tolist() for one in side] for side in (found, expected)]
    assert all(kept[0])
    assert (kept[0], seen[-1]) == (kept[1], (20, 20))
    with pytest.raises(GenerationError, match="policy_version=2: the server was given version 1"):
        there(REQUESTS, SETTINGS, policy_version=2)
    with pytest.raises(GenerationError, match="start it with --max-completion-length 500"):
        there(REQUESTS, SamplingSettings(max_tokens=500), policy_version=1)
    for choices in (None, ((9, 8, 2), (9, 7, 2))):
        same(conversations(there, choices), conversations(here, choices))


def conversations(engine: Any, choices: Any) -> list[Completion]:
    """Three, of three turns each."""
    session = engine.session(SETTINGS, policy_version=1, rows=3, own_tokens=60, prompt_lengths=[3] * 3)
    rows, said = [session.start(request, keep=True) for request in REQUESTS[:3]], []
    for turn in range(3):
        over: list[Any] = []
        while len(over) < 3:
            over += session.advance()
        said += [session.completion(row) for row in rows]
        for place, row in enumerate(rows if turn < 2 else ()):
            session.extend(row, np.array([4, 3]), (turn, place), choices)
    for row in rows:
        session.drop(row)
    assert not session.busy
    return said


def few_vowels(completions: list[Any], **columns: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch not in "aeiou" for ch in text) / max(len(text), 1) for text in texts]


def make_trainer(args: GRPOConfig, **options: Any) -> GRPOTrainer:
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
    return GRPOTrainer(args=args, reward_funcs=few_vowels, train_dataset=rows, **options)


def served(url: str, output_dir: Path) -> dict[str, Any]:
    return {"output_dir": str(output_dir), "upload_adapters_to_server": True, "inference_server_url": url}


def records_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    return [record for record in RunFolder.read(trainer.args.run.output_dir).read_metrics() if "loss" in record]


def _run(settings: dict[str, Any], **changes: Any) -> tuple[list[dict[str, Any]], GRPOTrainer]:
    trainer = make_trainer(GRPOConfig(**(settings | changes)))
    trainer.train()
    return records_of(trainer), trainer


def nearly(here: list[dict[str, Any]], there: list[dict[str, Any]], *names: str) -> None:
    for one, other in zip(here, there, strict=True):
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)


def test_the_run_is_the_one_of_a_single_process(settings: dict[str, Any], fresh: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30) / ("deep" * 30) / "there"  # longer than a name may be
    here, _ = _run(settings, max_steps=3)
    there, trainer = _run(settings, max_steps=3, **served(fresh.url, folder))
    nearly(here, there, "reward", "loss", "grad_norm", "completions/mean_length")
    assert [one["policy_version"] for one in here] == [other["policy_version"] for other in there]
    assert all(other["sampling/sampling_logp_difference/max"] < 1e-3 for other in there)
    assert fresh.batching.version == trainer.state.policy_version == 4
    # a resumed run goes on with the same server, whose version is ahead of its own or not
    resumed = make_trainer(trainer.args.replace(max_steps=4))
    resumed.train(resume_from_checkpoint=True)
    assert fresh.batching.version == resumed.state.policy_version == 5


@pytest.mark.slow
def test_sampling_on_a_server_while_training(settings: dict[str, Any], fresh: RunningServer, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 4, "max_staleness": 1}
    here, _ = _run(settings, **changes)
    there, trainer = _run(settings, **changes, **served(fresh.url, tmp_path / "there"))
    assert [record["staleness/max"] for record in there] == [0, 1, 1, 1]
    nearly(here, there, "reward", "loss", "staleness/mean", "sampling/importance_sampling_ratio/mean")
    assert fresh.batching.version == trainer.state.policy_version == 5


def test_agents_play_on_a_server_as_in_one_process(settings: dict[str, Any], tmp_path: Path) -> None:
    world = {"world": "house:rooms=2,num_train=6,num_eval=3", "max_conversation_tokens": 600}
    playing = settings | world | {"action_format": "choice", "max_completion_length": 16}

    def played(**changes: Any) -> list[Any]:
        args = GRPOConfig(**(playing | changes))
        GRPOTrainer(args=args).train()
        folder = RunFolder.read(args.run.output_dir)
        return [[row["completion"] for row in folder.read_completions(step)] for step in (1, 2)]

    here = played()
    with serving(max_completion_length=64) as server:
        there = played(**served(server.url, tmp_path / "there"))
    assert there[0] == here[0]
    assert sum(a == b for a, b in zip(there[1], here[1], strict=True)) >= 7  # weights differ in the last digits


def test_the_documents_names() -> None:
    named = {"upload_adapters_to_server": True, "inference_server_url": "http://127.0.0.1:1"}
    args = GRPOTrainingArgs(**named, server_token="hunter2")
    assert (args.server.inference_server_url, args.server.server_token) == ("http://127.0.0.1:1", "hunter2")
    assert not any("hunter2" in written for written in (args.to_toml(), repr(args), str(args.to_dict())))
    raises(ConfigError, "only adapters can be uploaded", GRPOConfig, upload_adapters_to_server=True, use_peft=False)


def test_no_server_fails_early_and_names_the_address(settings: dict[str, Any], tmp_path: Path) -> None:
    nowhere = settings | served("http://127.0.0.1:9", tmp_path) | {"server_retry_seconds": 0.3}
    with pytest.raises(
        ServingError, match=r"http://127\.0\.0\.1:9/health does not answer.*\(covey serve, vllm serve\)"
    ):
        make_trainer(GRPOConfig(**nowhere))
    raises(ServingError, "it is not an address", InferenceClient, "not an address", retry_seconds=0)
    # an upload is tried for five seconds unless somebody says otherwise; no second is waited here
    began = time.monotonic()
    with pytest.raises(ServingError, match=r"does not answer .*is the server running"):
        asyncio.run(upload_adapter_weights(b"", {}, "http://127.0.0.1:9", 1, timeout=1, retry_seconds=0))
    assert time.monotonic() - began < 30
    assert inspect.signature(upload_adapter_weights).parameters["retry_seconds"].default == 5.0


def test_the_documents_function(fresh: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    weights, config = write_adapter(adapted())
    assert asyncio.run(upload_adapter_weights(weights, config, fresh.url, 1)) == 1
    assert not caplog.records
    assert asyncio.run(upload_adapter_weights(*as_mlx(weights, 3, 2.0), fresh.url, 2)) == 2
    with fake_server(training_server(upload={"policy_version": 7})) as url:  # it counts by itself
        assert asyncio.run(upload_adapter_weights(weights, config, url, 3)) == 7
    assert "reports policy version 7, expected was 3" in caplog.text
    with fake_server(lambda path, body: (500, {"error": "broken"})) as url, pytest.raises(ServingError, match="broken"):
        client(url, retry_seconds=0.1).upload_adapter(weights, config)


def test_the_check(fresh: RunningServer) -> None:
    steps = check_server(client(fresh.url), made_adapter("model.layers.0.self_attn.q_proj", 32))
    tried = ("health", "upload", "version", "hash", "completion")
    assert [(step.name, step.passed) for step in steps] == [(name, True) for name in tried]
    fitting = check_server(client(fresh.url), fitting_adapter(client(fresh.url)))  # whatever the model is
    assert [step.passed for step in fitting] == [True] * 5
    refused = check_server(client(fresh.url))  # an adapter for another model
    assert [(step.name, step.passed) for step in refused] == [("health", True), ("upload", False)]
    assert all(words in refused[1].detail for words in ("the model's is (32, 32)", "fits SmolLM2-135M only"))
    documents = training_server(health={"policy_version": ...}, replace=("/v1/completions", 404, {"detail": "no"}))
    with fake_server(documents) as url:
        assert fitting_adapter(client(url)) is None
        steps = check_server(client(url))
        assert [step.passed for step in steps] == [True, True, None, None, False]  # training would not start either
    assert [step.passed for step in check_server(client("http://127.0.0.1:9", retry_seconds=0))] == [False]


def test_a_restarted_server_is_given_the_weights_again(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as first:
        there, _ = published(first.url, 5)
        before = there(REQUESTS, SETTINGS, policy_version=5)
    with serving() as second:
        there.dialect.client = client(second.url)
        same(there(REQUESTS, SETTINGS, policy_version=5), before)
        assert second.batching.version == 5
        assert second.batching.counts.uploads <= 3  # by whichever requests came first
    assert "was restarted; it is given version 5 again" in caplog.text


def test_weights_of_somebody_else_are_never_trained_on(fresh: RunningServer) -> None:
    there = RemoteEngine(client(fresh.url), trainer="")  # without a name nothing keeps others out
    there.publish(weights_of(adapted(), 1))
    weights, config = write_adapter(adapted(2))
    client(fresh.url).upload_adapter(weights, config)
    raises(ServingError, "somebody else uploads to it", there, REQUESTS, SETTINGS, policy_version=1)
    client(fresh.url).upload_adapter(weights, config, trainer="one")
    raises(RefusedError, "may not upload", client(fresh.url).upload_adapter, weights, config, trainer="two")


def test_requests_that_fail_for_a_while_are_tried_again() -> None:
    said, waits, right = [503, 429, 0], list[float](), training_server()

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        if path == "/v1/completions" and said:
            return said.pop(0), {"error": {"message": "busy"}}
        return right(path, body)

    with fake_server(answer) as url:
        there = RemoteEngine(InferenceClient(url, timeout=20, retry_seconds=60, sleep=waits.append), trainer="test")
        there.publish(weights_of(adapted(), 1))
        (found,) = there(REQUESTS[:1], SETTINGS, policy_version=1)
    assert (found.token_ids.tolist(), len(waits)) == ([5, 6], 3)
    assert waits[2] > waits[0] / 2  # longer and longer, with chance in it
    with fake_server(training_server(replace=("/upload_adapter", 400, {"error": "no"}))) as url:
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
        changes = served(server.url, tmp_path / "served") | {"max_steps": 4, "server_retry_seconds": 0.5}
        args = GRPOConfig(**(settings | changes))
        raises(ServingError, "does not answer", make_trainer(args, callbacks=[KillAtStepTwo()]).train)
        server.start()  # another process, with no weights of ours
        resumed = make_trainer(args)
        resumed.train(resume_from_checkpoint=True)
    assert steps == [1, 2]
    assert [r["reward"] for r in records_of(resumed)] == pytest.approx([r["reward"] for r in whole], abs=1e-4)


@pytest.mark.slow
def test_many_clients_at_once() -> None:
    with serving(max_rows=8, max_waiting=1000) as server:

        def one(number: int) -> list[tuple[int, int]]:
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
                length = 5 + number % 7
                bodies = [{"prompt": [5 + number % 50, 6, turn + 4], "max_tokens": length} for turn in range(3)]
                said = [http.post("/v1/completions", json=body | {"ignore_eos": True}) for body in bodies]
                return [(a.status_code, a.json()["usage"]["completion_tokens"] - length) for a in said]

        assert (at_once(one, range(64)), server.batching.counts.completions) == ([[(200, 0)] * 3] * 64, 64 * 3)
        assert server.batching.load == (0, 0)


def test_an_upload_whose_answer_is_lost_is_no_second(fresh: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    once, lost = InferenceClient._once, [True]

    def losing(self: InferenceClient, method: str, path: str, content: Any) -> Any:
        answer = once(self, method, path, content)
        if path == "/upload_adapter" and lost:  # the server has applied it
            raise _BusyError(f"the connection is gone {lost.pop()}")
        return answer

    monkeypatch.setattr(InferenceClient, "_once", losing)
    answer = client(fresh.url).upload_adapter(*write_adapter(adapted()), policy_version=4, trainer="one")
    assert (answer.policy_version, fresh.batching.counts.uploads, lost) == (4, 1, [])


def test_nothing_is_sampled_after_an_upload_that_failed() -> None:
    def slow(path: str, body: bytes) -> tuple[int, Any]:
        time.sleep(1.0 if path != "/health" else 0.0)
        return 200, {"policy_version": 1}

    for answer, timeout, words in (
        (slow, 0.2, r"upload_adapter does not answer \(ReadTimeout"),
        (training_server(upload={"sha256": "0" * 64}), 20, "its weights are not the trainer's"),
    ):
        with fake_server(answer) as url:
            there = RemoteEngine(InferenceClient(url, timeout=timeout, retry_seconds=0.5), trainer="test")
            raises(ServingError, words, there.publish, weights_of(adapted(), 1))
            assert there.policy_version == -1


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_samples(model_folder: Path) -> None:
    long = SamplingSettings(temperature=1.0, max_tokens=400)
    requests = [Request(np.array([5, 6, 7 + i]), (2, i)) for i in range(24)]
    with ServerProcess(model_folder) as server:
        there, here = published(server.url, 3, retry_seconds=60)
        found = begun(there, requests, long, policy_version=3)
        while not there.dialect.client.health()["running"]:
            time.sleep(0.01)
        server.kill()
        server.start()
        same(found.result(), here(requests, long, policy_version=3))


def told(*logprobs: float, **more: Any) -> dict[str, Any]:
    return {"choice": {"logprobs": {"token_logprobs": logprobs}} | more}


DEVIATIONS: dict[str, tuple[dict[str, Any], str]] = {
    # what the server does otherwise, and what is said of it
    "its version is in another place": ({"choice": {"policy_version": ...}}, f"KeyError: 'policy_version'.*{HINT}"),
    "its version is another one": ({"choice": {"policy_version": 7}}, f"from version 7, 1 was asked for.*{HINT}"),
    "text without ids": ({"choice": {"token_ids": ...}}, rf"CoveyDialect.read .*\(KeyError: 'token_ids'.*{HINT}"),
    "ids that are none": ({"choice": {"token_ids": None}}, rf"\(\) token ids with.*{HINT}"),
    "neither ids nor log-probabilities": (told(token_ids=[]), r"\(0,\) token ids with \(0,\)"),
    "too many ids": (told(*[-1.0] * 5, token_ids=[*range(5, 10)]), r"\(5,\) token ids with \(5,\)"),
    "ids that are not whole": ({"choice": {"token_ids": [1.5, 2.0]}}, r"ids \[1.5, 2.0\]; the policy's are whole"),
    "ids below zero": ({"choice": {"token_ids": [-1, 3]}}, rf"token ids \[-1, 3\].*{HINT}"),
    "ids behind the end": ({"choice": {"token_ids": [2, 5]}}, rf"behind the end token 2: \[2, 5\].*{HINT}"),
    "no log-probabilities": ({"choice": {"logprobs": None}}, f"TypeError.*{HINT}"),
    "one log-probability too few": (told(-1.0), rf"\(2,\) token ids with \(1,\) log-probabilities.*{HINT}"),
    "a log-probability that is not a number": (told(-1.0, float("nan")), f"one is not finite.*{HINT}"),
    "a log-probability above 0": (told(-1.0, 0.5), f"log-probabilities .*above 0.*{HINT}"),
    "one completion for all prompts": ({"choices": lambda choices: choices[:1]}, f"to 2 prompts; .*{HINT}"),
    "no choices": ({"answer": {"choices": ...}}, f"to 2 prompts; .*{HINT}"),
    "choices that are a text": ({"answer": {"choices": "nonsense"}}, f"to 2 prompts; .*{HINT}"),
    "another finish reason": ({"choice": {"finish_reason": "eos"}}, f"finish reason 'eos'.*{HINT}"),
    "unknown fields refused": ({"replace": (TEXTS, 422, {"error": "streams: extra"})}, f"extra; .*{HINT}"),
    "unknown fields refused as OpenAI does": ({"replace": (TEXTS, 400, {"error": "no"})}, f"no; .*{HINT}"),
    "another model's name": ({"replace": (TEXTS, 404, {"error": "no model ''"})}, f"no model.*{HINT}"),
    "no completions": ({"replace": (TEXTS, 404, b"Not Found")}, f"Not Found; .*{HINT}"),
    "completions that are a page": ({"replace": (TEXTS, 200, b"<html>")}, f"<html>.*{HINT}"),
    "completions cut off": ({"replace": (TEXTS, 200, b'{"choices": [')}, f"to 2 prompts; .*{HINT}"),
    "completions too deep": ({"replace": (TEXTS, 200, b"[" * 100_000)}, f"to 2 prompts; .*{HINT}"),
    "completions elsewhere": ({"replace": (TEXTS, 307, b"")}, "redirects to"),
    "uploads without a version": ({"upload": {"policy_version": ...}}, f"without a policy_version.*{HINT}"),
    "uploads with a version as text": ({"upload": {"policy_version": "1"}}, f"without a policy_version.*{HINT}"),
    "uploads that refuse a field": ({"replace": (UPLOADS, 422, {"error": "restart"})}, f"restart; .*{HINT}"),
    "no uploads": ({"replace": (UPLOADS, 404, b"Not Found")}, f"Not Found; .*{HINT}"),
    "uploads elsewhere": ({"replace": (UPLOADS, 308, b"")}, "redirects to"),
    "other weights": ({"upload": {"sha256": "0" * 64}}, "its weights are not the trainer's"),
    "a page at every address": ({"replace": ("/health", 200, b"<html>"), "upload": {"policy_version": ...}}, HINT),
    "limits that are no numbers": ({"health": {"context_length": "many"}}, f"/health answered.*{HINT}"),
    "health elsewhere": ({"replace": ("/health", 302, b"")}, "redirects to"),
}


def trained(url: str, vocabulary: int | None = None) -> str:
    """What training says of a server; "" = it samples from it."""
    try:
        there = RemoteEngine(client(url, retry_seconds=0), trainer="test", vocabulary=vocabulary)
        there.publish(weights_of(adapted(), 1))
        requests = [Request(np.array([5, 6, 7]), (0, 0)), Request(np.array([8]), (0, 1))]
        there(requests, SamplingSettings(max_tokens=4, eos_token_ids=(2,)), policy_version=1)
    except CoveyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("deviations", "words"), DEVIATIONS.values(), ids=DEVIATIONS)
def test_what_training_refuses_the_check_refuses_in_the_same_words(deviations: dict[str, Any], words: str) -> None:
    with fake_server(training_server(**deviations)) as url:
        said, steps = trained(url), check_server(client(url, retry_seconds=0))
        found = [step.detail for step in steps if step.passed is False]
    assert re.search(words, said, re.DOTALL), said
    assert len(found) == 1
    same = [re.sub("[0-9a-f]{12}", "HASH", one) for one in (found[0], said)]  # of the adapter that was sent
    assert same[0].removesuffix(" (what was tried fits SmolLM2-135M only)") == same[1]
    assert steps[-1].passed is False


@pytest.mark.parametrize("deviations", TAKEN)
def test_what_training_takes_the_check_takes(deviations: dict[str, Any]) -> None:
    with fake_server(training_server(**deviations)) as url:
        assert trained(url) == ""
        assert "token ids [5, 6]; the policy's are whole numbers from 0 to 5" in trained(url, vocabulary=6)
        steps = check_server(client(url, retry_seconds=0))
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
        check_server(client(url, retry_seconds=0))
    for path, of in ((UPLOADS, lambda body: re.findall(rb'name="([a-z_]+)"', body)), (TEXTS, bytes)):
        ours, theirs = ([of(body) for where, body in some if where == path] for some in (asked, training))
        assert ours == theirs
    assert asked[-1][0] == "/release_trainer"  # a trainer may come at once

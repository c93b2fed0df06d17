"""`covey serve --check` says yes to a server exactly where training does, and both say the same."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from servers import fake_server, training_server
from test_adapters import adapted

from covey.errors import CoveyError
from covey.pytorch.engine.merge import weights_of
from covey.serving import InferenceClient, RemoteEngine, check_server
from covey.types import Request, SamplingSettings

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

"""Uploads that must not change anything, and those that must change everything at once."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from servers import RunningServer, ask, at_once, begun, get, post, send, serving, upload, wait_until
from test_adapters import adapted

from covey.pytorch.engine import Engine
from covey.pytorch.engine.fast_runner import Linear
from covey.serving import write_adapter
from covey.types import Request, SamplingSettings

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [40, 41]]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        assert upload(server, 1, policy_version=5).status_code == 200
        yield server


def good(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    weights, config = write_adapter(adapted(seed))
    return load(weights), config


def held(server: RunningServer) -> Any:
    """What a client can see of the weights: their version and hash, greedy completions, every log-probability."""
    answer = ask(server, prompt=PROMPTS, max_tokens=12, temperature=0, logprobs=0, return_token_ids=True)
    assert answer.status_code == 200
    health = get(server, "/health").json()
    choices = [(c["token_ids"], c["logprobs"]["token_logprobs"], c["policy_version"]) for c in answer.json()["choices"]]
    return choices, health["policy_version"], health["sha256"], health["status"]


def times(name: str, factor: float) -> Callable[[Any, Any], Any]:
    return lambda t, c: ({n: v * factor if name in n else v for n, v in t.items()}, c)


def setting(**changes: Any) -> Callable[[Any, Any], Any]:
    return lambda t, c: (t, c | changes)


def text(config: str) -> Callable[[Any, Any], Any]:
    return lambda t, c: (t, config.encode())


def header(change: Callable[[str], str]) -> Callable[[Any, Any], Any]:
    """The file with another header, its numbers as they are."""

    def spoil(tensors: Any, config: Any) -> Any:
        whole = save(tensors)
        (size,) = struct.unpack("<Q", whole[:8])
        changed = change(whole[8 : 8 + size].decode()).encode()
        return struct.pack("<Q", len(changed)) + changed + whole[8 + size :], config

    return spoil


def twice(tensors: Any, config: Any) -> Any:
    again = {name.removeprefix("base_model.model."): torch.ones_like(tensors[name]) for name in (A_Q, B_Q)}
    return tensors | again, config


A_Q, B_Q = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BAD: list[tuple[str, Callable[[Any, Any], Any], int]] = [
    ("alpha too large for a float32", lambda t, c: ({A_Q: t[A_Q], B_Q: t[B_Q]}, c | {"lora_alpha": 1e308}), 422),
    ("alpha too large everywhere", setting(lora_alpha=1e308), 422),
    ("alpha that overflows when merged", setting(lora_alpha=1e38), 422),
    ("alpha that overflows in use", setting(lora_alpha=1e30), 422),
    ("alpha infinite", text('{"peft_type": "LORA", "r": 3, "lora_alpha": 1e400}'), 422),
    ("alpha a long whole number", text('{"peft_type": "LORA", "r": 3, "lora_alpha": 1' + "0" * 400 + "}"), 400),
    ("r a longer one", text('{"peft_type": "LORA", "r": 1' + "0" * 5000 + ', "lora_alpha": 1}'), 400),
    ("a deep list", text('{"peft_type": "LORA", "r": ' + "[" * 100_000), 400),
    ("a deep object", text('{"a":' * 100_000), 400),
    ("a deep pattern", text('{"peft_type": "LORA", "r": 3, "rank_pattern": ' + "[" * 900 + "1" + "]" * 900 + "}"), 422),
    ("a config cut off", text("{"), 422),
    ("a config that is no text", lambda t, c: (t, b"\xff\xfe"), 422),
    ("a file cut off", lambda t, c: (save(t)[:-5], c), 422),
    ("another rank", setting(r=4), 422),
    ("a setting twice", text('{"peft_type": "LORA", "r": 3, "r": 3, "lora_alpha": 6}'), 422),
    ("both factors 1e30", times(Q, 1e30), 422),
    ("one factor 1e30", times(B_Q, 1e30), 422),
    ("one factor of the last layer 1e30", times(f"{DOWN}.lora_B", 1e30), 422),
    ("all factors 1e20", times("lora_B", 1e20), 422),
    ("a float64 beyond float32", lambda t, c: (t | {B_Q: t[B_Q].double() * 1e300}, c), 422),
    ("a value that is none", lambda t, c: (t | {B_Q: t[B_Q] * float("nan")}, c), 422),
    ("a module twice", twice, 422),
    ("a tensor twice", header(lambda h: h[:-1] + "," + h[1 : h.index("}") + 2]), 422),
    ("a shape that is not the data's", header(lambda h: h.replace("[3,32]", "[3,4611686018427387904]", 1)), 422),
    ("a shape that is no number", header(lambda h: h.replace("[3,32]", '["3",32]', 1)), 422),
    ("a name that is no text", header(lambda h: h.replace("q_proj", "\\ud800", 1)), 422),
    ("a name in other letters", header(lambda h: h.replace("q_proj", "\\u0444", 1)), 422),
    ("a very long name", header(lambda h: h.replace("q_proj", "q" * 100_000, 1)), 422),
    ("a header of exabytes", lambda t, c: (struct.pack("<Q", 1 << 62) + b"{}", c), 422),
    ("nothing in a tensor", lambda t, c: (t | {A_Q: torch.zeros(3, 0)}, c), 422),
    ("a tensor of truths", lambda t, c: (t | {A_Q: torch.ones(3, 32, dtype=torch.bool)}, c), 422),
    ("a tensor of three dimensions", lambda t, c: (t | {A_Q: torch.zeros(3, 32, 1)}, c), 422),
    ("r negative", setting(r=-3), 422),
    ("r true", setting(r=True), 422),
    ("r a text", setting(r="3"), 422),
    ("r a list", setting(r=[3]), 422),
    ("r huge", setting(r=10**9), 422),
    ("alpha zero", setting(lora_alpha=0), 422),
    ("a rank pattern", setting(rank_pattern={"q_proj": 8}), 422),
    ("an alpha pattern", setting(alpha_pattern={"q_proj": 8}), 422),
    ("rslora", setting(use_rslora=True), 422),
    ("biases", setting(lora_bias=True), 422),
    ("pissa", setting(init_lora_weights="pissa"), 422),
    ("a config of megabytes", setting(base_model_name_or_path="x" * (2 << 20)), 422),
]


IN_EVERY_RUN = {
    *(
        "a config cut off",
        "a config that is no text",
        "a file cut off",
        "another rank",
        "alpha too large for a float32",
    ),
    *("alpha that overflows in use", "r a longer one", "a deep object"),
    *("a setting twice", "one factor of the last layer 1e30", "a value that is none", "a module twice"),
    *("a tensor twice", "a shape that is not the data's", "a header of exabytes", "rslora"),
}
"""One of each kind; the others are run with the slow tests."""


@pytest.mark.parametrize(
    ("spoil", "status"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in IN_EVERY_RUN)) for name, *case in BAD],
)
def test_a_refused_upload_changes_nothing(server: RunningServer, spoil: Callable[..., Any], status: int) -> None:
    before = held(server)
    answer = send(server, *spoil(*good(2)))
    assert answer.status_code == status, answer.text
    assert 10 < len(answer.json()["error"]["message"]) < 1000
    assert held(server) == before
    assert upload(server, 1, policy_version=5).json()["policy_version"] == 5  # held already: it is not applied again
    assert held(server) == before


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Numbers of the layers that were given weights, and of those that cannot be."""
    given, failing, whole = list[int](), list[int](), Linear.load

    def load(self: Linear, *args: Any) -> None:
        given.append(len(given))
        if given[-1] in failing:
            raise RuntimeError("no memory")
        whole(self, *args)

    monkeypatch.setattr(Linear, "load", load)
    return given, failing


def test_an_upload_that_breaks_off_is_taken_back(server: RunningServer, broken: tuple[list[int], list[int]]) -> None:
    before, (given, failing) = held(server), broken
    failing.append(3)
    answer = upload(server, 2, policy_version=6)
    assert answer.status_code == 422
    assert "no memory" in answer.json()["error"]["message"]
    assert len(given) > 8  # the weights before it were computed again
    assert held(server) == before


def test_weights_that_are_lost_are_not_sampled_from(broken: tuple[list[int], list[int]]) -> None:
    with serving() as server:
        assert upload(server, 1, policy_version=5).status_code == 200
        before, (given, failing) = held(server), broken
        failing.extend(range(len(given), 10_000))
        assert upload(server, 2, policy_version=6).status_code == 422
        health = get(server, "/health")
        assert (health.status_code, health.json()["sha256"]) == (503, "")
        refused = ask(server, prompt="x")
        assert refused.status_code == 503
        assert "upload again" in refused.json()["error"]["message"]
        failing.clear()
        assert upload(server, 1, policy_version=5).status_code == 200  # no repeat: it is not held
        assert held(server) == before


def test_versions_only_grow() -> None:
    with serving() as server:
        assert upload(server, 1, policy_version=5).json()["policy_version"] == 5
        before, back = held(server), "does not go back"
        for seed, version, words in ((2, 5, "with other weights"), (2, 4, back), (1, 4, back)):
            answer = upload(server, seed, policy_version=version)
            assert answer.status_code == 409
            assert words in answer.json()["error"]["message"]
            assert held(server) == before
        assert upload(server, 2).json()["policy_version"] == 6
        for wrong in (0, -1, 1 << 60, "x", 1.5):
            assert upload(server, 3, policy_version=wrong).status_code == 422
        began = upload(server, 3, policy_version=1, restart=True)  # a trainer begins again
        assert began.json()["policy_version"] == 1
        assert held(server)[0] != before[0]
        assert server.batching.counts.uploads == 3


def test_uploads_at_once() -> None:
    with serving() as server:
        uploads = [write_adapter(adapted(seed)) for seed in range(4)]
        answers = at_once(lambda seed: send(server, *uploads[seed % 4], policy_version=3), range(8))
        won = [seed for seed, answer in enumerate(answers) if answer.status_code == 200]
        assert len({seed % 4 for seed in won}) == 1  # one of four contents, and its repetition
        assert {a.status_code for a in answers} <= {200, 409, 429}
        assert server.batching.counts.uploads == 1
        greedy = SamplingSettings(temperature=0, max_tokens=12, eos_token_ids=(server.tokenizer.eos_token_id,))
        requests = [Request(np.array(ids), (0,)) for ids in PROMPTS]
        expected = Engine(adapted(won[0] % 4))(requests, greedy, policy_version=0)
        assert [choice[0] for choice in held(server)[0]] == [c.token_ids.tolist() for c in expected]


WEIGHTS, CONFIG = ("adapter_weights", b"x"), ("adapter_config", b"{}")
GOOD_PARTS = [("adapter_weights", save(good(1)[0])), ("adapter_config", json.dumps(good(1)[1]).encode())]
PARTS: list[list[tuple[str, bytes | None]]] = [
    *([WEIGHTS, WEIGHTS, CONFIG], [WEIGHTS, CONFIG, CONFIG], [GOOD_PARTS[0]], [CONFIG], []),
    [WEIGHTS, CONFIG, ("adapter_confg", b"{}")],
    *([*GOOD_PARTS, (name, None)] for name in ("policy_version", "takeover", "restart")),
]


@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_an_upload(server: RunningServer, parts: list[tuple[str, bytes | None]]) -> None:
    files = [(name, ("file", content) if content is not None else (None, b"")) for name, content in parts]
    assert post(server, "/upload_adapter", files=files).status_code == 422
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert 400 <= post(server, "/upload_adapter", content=b"--x\r\nnothing", headers=headers).status_code < 500


@pytest.mark.slow
def test_an_upload_whose_client_goes_away() -> None:
    with serving() as server:
        busy = begun(ask, server, prompt=[5, 6, 7], max_tokens=200, ignore_eos=True, n=64)
        wait_until(lambda: get(server, "/health").json()["running"])
        limits = httpx.Timeout(30, read=0.001)  # far less than reading and checking an adapter takes
        with pytest.raises(httpx.ReadTimeout):
            post(server, "/upload_adapter", files=dict(GOOD_PARTS), timeout=limits)
        busy.result()
        assert held(server)[3] == "ok"
        assert upload(server, 2, policy_version=9).status_code == 200

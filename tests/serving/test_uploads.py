"""Uploads: formats with one meaning, those that must not change anything, and those that change everything at once."""

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from servers import RunningServer, adapted, as_mlx, at_once, begun, refused, serving, wait_until
from tiny_models import tiny_model

from covey.adapters import read_adapter
from covey.errors import AdapterError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.fast_runner import Linear
from covey.pytorch.engine.merge import AdaptedWeights, EffectiveWeights, bare_model
from covey.pytorch.models.lora import adapter_of, linear_layers, write_adapter
from covey.types import Request, SamplingSettings

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [40, 41]]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        assert server.upload(1, policy_version=5).status_code == 200
        yield server


def good(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    weights, config = write_adapter(adapted(seed))
    return load(weights), config


def held(server: RunningServer) -> Any:
    """What a client can see of the weights: their version and hash, greedy completions, every log-probability."""
    answer = server.ask(prompt=PROMPTS, max_tokens=12, temperature=0, logprobs=0, return_token_ids=True)
    assert answer.status_code == 200
    health = server.get("/health").json()
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
JUNK = (b"", b"\x00" * 100, pickle.dumps({"a": 1}), b"\xff" * 8 + b"{}")
A_UP = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
Bad = tuple[str, Callable[[Any, Any], Any], str]
NO_FILE, LOWER, FLOATS = "not a safetensors file", "lower its scaling", "must be a matrix of floats"
MALFORMED: list[Bad] = [
    ("alpha a long whole number", text('{"peft_type": "LORA", "r": 3, "lora_alpha": 1' + "0" * 400 + "}"), "too large"),
    ("r a longer one", text('{"peft_type": "LORA", "r": 1' + "0" * 5000 + ', "lora_alpha": 1}'), "Exceeds the limit"),
    ("a deep list", text('{"peft_type": "LORA", "r": ' + "[" * 100_000), "recursion depth exceeded"),
    ("a deep object", text('{"a":' * 100_000), "recursion depth exceeded"),
]
IN_EVERY_RUN: list[Bad] = [
    # one of each kind; the others are run with the slow tests
    ("alpha too large for a float32", lambda t, c: ({A_Q: t[A_Q], B_Q: t[B_Q]}, c | {"lora_alpha": 1e308}), LOWER),
    ("alpha that overflows in use", setting(lora_alpha=1e30), LOWER),
    ("one factor of the last layer 1e30", times(f"{DOWN}.lora_B", 1e30), LOWER),
    ("a config cut off", text("{"), "is not JSON"),
    ("a config that is not text", lambda t, c: (t, b"\xff\xfe"), "is not JSON"),
    ("a setting twice", text('{"peft_type": "LORA", "r": 3, "r": 3, "lora_alpha": 6}'), "has 'r' twice"),
    ("no object", lambda t, c: (t, [1]), "not a JSON object"),
    ("another config", lambda t, c: (t, {"something": "else"}), "neither PEFT's"),
    ("another method", setting(peft_type="IA3"), "must be LORA"),
    *((name, setting(**{name: True}), "only plain LoRA") for name in ("use_rslora", "use_dora")),
    ("biases", setting(bias="all"), "only plain LoRA"),
    ("alpha infinite", text('{"peft_type": "LORA", "r": 3, "lora_alpha": 1e400}'), "lora_alpha=inf; it must be"),
    ("r zero", setting(r=0), "r=0; it must be a number above 0"),
    ("r no whole number", setting(r=3.5), "whole number"),
    ("a file cut off", lambda t, c: (save(t)[:-5], c), NO_FILE),
    *((f"a file of {junk[:4]!r}", lambda t, c, junk=junk: (junk, c), NO_FILE) for junk in JUNK),
    ("a header of exabytes", lambda t, c: (struct.pack("<Q", 1 << 62) + b"{}", c), NO_FILE),
    ("a tensor twice", header(lambda h: h[:-1] + "," + h[1 : h.index("}") + 2]), NO_FILE),
    ("a shape that is not the data's", header(lambda h: h.replace("[3,32]", "[3,4611686018427387904]", 1)), NO_FILE),
    ("no tensors", lambda t, c: ({}, c), "no LoRA tensors"),
    ("another tensor", lambda t, c: (t | {"base_model.model.evil": torch.zeros(1)}, c), "which is not a LoRA tensor"),
    ("half a module", lambda t, c: ({name: t[name] for name in t if name != B_Q}, c), "has one half of"),
    ("a module twice", twice, "twice, with and without"),
    ("a module that is none", lambda t, c: ({n.replace("layers.1", "layers.7"): t[n] for n in t}, c), "no linear"),
    ("a value that is none", lambda t, c: (t | {B_Q: t[B_Q] * float("nan")}, c), "values that are not finite"),
    ("another rank", lambda t, c: (t | {A_UP: t[A_UP][:-1].contiguous()}, c), "are not of the rank 3"),
    ("another width", lambda t, c: (t | {A_UP: t[A_UP][:, :-1].contiguous()}, c), "is for a layer of (64, 31)"),
    ("a tensor of one dimension", lambda t, c: (t | {A_Q: t[A_Q].flatten()}, c), FLOATS),
    ("whole numbers", lambda t, c: (t | {A_UP: t[A_UP].long()}, c), FLOATS),
]
OTHERS: list[Bad] = [
    ("alpha too large everywhere", setting(lora_alpha=1e308), LOWER),
    ("alpha that overflows when merged", setting(lora_alpha=1e38), LOWER),
    ("both factors 1e30", times(Q, 1e30), LOWER),
    ("one factor 1e30", times(B_Q, 1e30), LOWER),
    ("all factors 1e20", times("lora_B", 1e20), LOWER),
    ("a float64 beyond float32", lambda t, c: (t | {B_Q: t[B_Q].double() * 1e300}, c), "values that are not finite"),
    ("alpha zero", setting(lora_alpha=0), "lora_alpha=0; it must be a number above 0"),
    *((f"r {r!r}", setting(r=r), f"r={r!r}; it must be a number above 0") for r in (-3, True, "3", [3])),
    ("r huge", setting(r=10**9), "a whole number up to 1024"),
    ("a deep pattern", setting(rank_pattern=json.loads("[" * 900 + "1" + "]" * 900)), "only plain LoRA"),
    *((name, setting(**{name: {"q_proj": 8}}), "only plain LoRA") for name in ("rank_pattern", "alpha_pattern")),
    ("biases of factors", setting(lora_bias=True), "only plain LoRA"),
    ("pissa", setting(init_lora_weights="pissa"), "only plain LoRA"),
    ("a shape that is not a number", header(lambda h: h.replace("[3,32]", '["3",32]', 1)), NO_FILE),
    ("a name that is not text", header(lambda h: h.replace("q_proj", "\\ud800", 1)), NO_FILE),
    ("a name in other letters", header(lambda h: h.replace("q_proj", "\\u0444", 1)), "has one half of"),
    ("a very long name", header(lambda h: h.replace("q_proj", "q" * 100_000, 1)), "has one half of"),
    ("nothing in a tensor", lambda t, c: (t | {A_Q: torch.zeros(3, 0)}, c), FLOATS),
    ("a tensor of truths", lambda t, c: (t | {A_Q: torch.ones(3, 32, dtype=torch.bool)}, c), FLOATS),
    ("a tensor of three", lambda t, c: (t | {A_Q: torch.zeros(3, 32, 1)}, c), FLOATS),
    ("a config of megabytes", setting(base_model_name_or_path="x" * (2 << 20)), "has more than 1048576 bytes"),
]
CASES = [(*case, 422) for case in IN_EVERY_RUN + OTHERS] + [(*case, 400) for case in MALFORMED]
QUICK = {name for name, *_ in (*IN_EVERY_RUN, *MALFORMED[1::4])}


@pytest.mark.parametrize(
    ("spoil", "words", "status"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, *case in CASES],
)
def test_a_refused_upload_changes_nothing(server: RunningServer, spoil: Any, words: str, status: int) -> None:
    before = held(server)
    assert words in refused(server.send(*spoil(*good(2))), status)
    assert held(server) == before
    assert server.upload(1, policy_version=5).json()["policy_version"] == 5  # held already: it is not applied again
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
    assert "no memory" in refused(server.upload(2, policy_version=6), 422)
    assert len(given) > 8  # the weights before it were computed again
    assert held(server) == before


def test_weights_that_are_lost_are_not_sampled_from(fresh: RunningServer, broken: tuple[list[int], list[int]]) -> None:
    assert fresh.upload(1, policy_version=5).status_code == 200
    before, (given, failing) = held(fresh), broken
    failing.extend(range(len(given), 10_000))
    assert fresh.upload(2, policy_version=6).status_code == 422
    health = fresh.get("/health")
    assert (health.status_code, health.json()["sha256"]) == (503, "")
    assert "upload again" in refused(fresh.ask(prompt="x"), 503)
    failing.clear()
    assert fresh.upload(1, policy_version=5).status_code == 200  # no repeat: it is not held
    assert held(fresh) == before


def test_versions_only_grow(fresh: RunningServer) -> None:
    assert fresh.upload(1, policy_version=5).json()["policy_version"] == 5
    before, back = held(fresh), "does not go back"
    for seed, version, words in ((2, 5, "with other weights"), (2, 4, back), (1, 4, back)):
        assert words in refused(fresh.upload(seed, policy_version=version), 409)
        assert held(fresh) == before
    assert fresh.upload(2).json()["policy_version"] == 6
    for _ in range(2):  # the answer was lost, and it is sent once more
        assert fresh.upload(3, policy_version=9).json()["policy_version"] == 9
    assert [fresh.ask(prompt="x", policy_version=version).status_code for version in (8, 9)] == [409, 200]
    for wrong in (0, -1, 1 << 60, "x", 1.5):
        assert fresh.upload(3, policy_version=wrong).status_code == 422
    began = fresh.upload(3, policy_version=1, restart=True)  # a trainer begins again
    assert began.json()["policy_version"] == 1
    assert held(fresh)[0] != before[0]
    assert fresh.batching.counts.uploads == 4


def test_uploads_at_once(fresh: RunningServer) -> None:
    uploads = [write_adapter(adapted(seed)) for seed in range(4)]
    answers = at_once(lambda seed: fresh.send(*uploads[seed % 4], policy_version=3), range(8))
    won = [seed for seed, answer in enumerate(answers) if answer.status_code == 200]
    assert len({seed % 4 for seed in won}) == 1  # one of four contents, and its repetition
    assert {a.status_code for a in answers} <= {200, 409, 429}
    assert fresh.batching.counts.uploads == 1
    greedy = SamplingSettings(temperature=0, max_tokens=12, eos_token_ids=(fresh.tokenizer.eos_token_id,))
    expected = Engine(adapted(won[0] % 4))([Request(np.array(ids), (0,)) for ids in PROMPTS], greedy, policy_version=0)
    assert [choice[0] for choice in held(fresh)[0]] == [c.token_ids.tolist() for c in expected]


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
    assert server.post("/upload_adapter", files=files).status_code == 422
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert 400 <= server.post("/upload_adapter", content=b"--x\r\nnothing", headers=headers).status_code < 500


@pytest.mark.slow
def test_an_upload_whose_client_goes_away(fresh: RunningServer) -> None:
    busy = begun(fresh.ask, prompt=[5, 6, 7], max_tokens=200, ignore_eos=True, n=64)
    wait_until(lambda: fresh.get("/health").json()["running"])
    limits = httpx.Timeout(30, read=0.001)  # far less than reading and checking an adapter takes
    with pytest.raises(httpx.ReadTimeout):
        fresh.post("/upload_adapter", files=dict(GOOD_PARTS), timeout=limits)
    busy.result()
    assert (held(fresh)[3], fresh.upload(2, policy_version=9).status_code) == ("ok", 200)


def test_a_served_adapter_is_the_trainers() -> None:
    model, plain = adapted(), tiny_model("llama")
    weights, config = write_adapter(model)
    adapter = read_adapter(weights, config, linear_layers(plain))
    served, trained = AdaptedWeights(plain, adapter), EffectiveWeights(model)
    changed = 0
    for name in EffectiveWeights(bare_model(model)):
        torch.testing.assert_close(served[name], trained[name], rtol=1e-6, atol=1e-7)
        changed += not torch.equal(served[name], EffectiveWeights(plain)[name])
        assert (served.frozen_version(name) is None) >= (name.removesuffix(".weight") in adapter.factors)
    assert changed == len(adapter.factors) > 10
    head = EffectiveWeights(plain)["lm_head.weight"]
    torch.testing.assert_close(head, plain.lm_head.weight.detach())  # not written to


def test_both_formats_mean_the_same() -> None:
    model = adapted()
    weights, config = write_adapter(model)
    other = read_adapter(*as_mlx(weights, rank=3, scale=2.0), linear_layers(tiny_model("llama")))
    assert other.sha256 == read_adapter(weights, config, None).sha256 == adapter_of(model).sha256
    assert read_adapter(*as_mlx(weights, rank=3, scale=2.5), None).sha256 != other.sha256
    assert adapter_of(adapted(seed=2)).sha256 != other.sha256


def test_without_an_adapter() -> None:
    with pytest.raises(AdapterError, match="no LoRA adapter to upload"):
        write_adapter(tiny_model("llama"))

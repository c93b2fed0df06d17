"""Every field of a request is served or refused, alone and with others: none is ignored, none stops the server."""

import json
import time
from typing import Any

import httpx
import pytest
from servers import RunningServer, events, refused

from covey.rollout.drawing import cut_choices, following
from covey.serving.requests import ChatRequest, CompletionRequest

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SAID, FEW = [{"role": "user", "content": "say two"}], {"max_tokens": 2, "seed": 1}
LEAST = {TEXT: {"prompt": "x", **FEW}, CHAT: {"messages": SAID, **FEW}}


def of_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, **more}}


Fields = dict[str, tuple[list[Any], list[Any]]]
# fmt: off
BOTH: Fields = {
    # field: values that ask for nothing, values that would be ignored
    "presence_penalty": ([0, 0.0, None], [0.5, -2, "0", False]), "frequency_penalty": ([0, None], [1.0, True]),
    "repetition_penalty": ([1, None], [1.1, True]), "logit_bias": ([{}, None], [{"5": 100}, []]),
    "response_format": (
        [{"type": "text"}, None],
        [{"type": "json"}, {"type": "json_schema"}, "text", {}, {"type": "text", "json_schema": {"schema": {}}},
         {"type": "json_object", "schema": {}}, {"type": "json_object", "x": None}, of_schema(bogus=None),
         of_schema(strict="yes"), of_schema(name=5), {**of_schema(), "schema": {}}],
    ),
    "min_tokens": ([0], [3]), "best_of": ([1, None], [2, "1", True]), "service_tier": (["auto", None], ["flex"]),
    "store": ([False], [True]), "user": (["someone", None], [5]), "guided_json": ([None], [{}, "x"]),
    "max_token": ([], [5]), "stream_options": ([None], [{"include_usage": True}]),  # not without a stream
    "logprobs": ([None], ["yes", -1, 2]),
}
CHATS: Fields = {
    "tools": ([[], None], [[{"type": "function", "function": {"name": "f"}}], {}]),
    "functions": ([[], None], [[{"name": "f"}]]), "function_call": (["none", None], [{"name": "f"}]),
    "tool_choice": (["none", "auto", None], ["required", {"type": "function"}]),
    "parallel_tool_calls": ([True, None], [False]), "top_logprobs": ([0, None], [1, 5, 21, "1"]),
    "modalities": ([["text"], None], [["text", "audio"]]), "audio": ([None], [{"voice": "x"}]),
    "prediction": ([None], [{"type": "content", "content": "x"}]), "reasoning_effort": ([None], ["high"]),
    "web_search_options": ([None], [{}]), "chat_template": ([None], ["{{ 1 }}"]),
    "continue_final_message": ([False], [True]),
}
TEXTS: Fields = {"echo": ([False, None], [True, 0]), "suffix": (["", None], ["x"])}
# fmt: on
FIELDS = [(path, field, *BOTH[field]) for path in (TEXT, CHAT) for field in BOTH]
VALUES: list[Any] = [
    *(None, True, False, "", "x", "1", -1, 0, 1, 2, 0.5, -0.0, 1e308, 10**30, -(10**30), [], {}, [[]], [None], [[[]]]),
    *([-1], [[-1]], [1 << 70], [["x"]], [[[1 << 40]]], {"a": 1}, "x" * 5000, list(range(3000)), [[1] * 3000], "\x00"),
]
BODIES = [
    *(b"", b"[]", b"null", b"{", b'{"prompt": "x"', b'"' + b"x" * 100_000),
    *(b"\xff\xfe{}", b'{"prompt": "\xed\xa0\x80"}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'{"prompt": "x", "temperature": 1e999}'),
    b'{"prompt": "x", "seed": 1' + b"0" * 10_000 + b"}",
    *(b'{"prompt": ' + b"[" * 200_000, b'{"messages": ' + b'[{"content":' * 100_000),
    *(b'{"prompt": ["x", 1, [1], null]}', b'{"prompt": [1, true]}', b'{"prompt": [5.5]}'),
]
VARIABLES: list[dict[str, Any]] = [
    *({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, {"tokenize": True}, {"return_tensors": "pt"}),
    *({"add_generation_prompt": False}, {"continue_final_message": True}, {"tools": []}, {"documents": []}),
    *({"tokenizer_kwargs": {}}, {"messages": []}, {"eos_token": "x"}, {"raise_exception": "x"}, {"range": 5}),
    *({"unheard_of": 5}, {"brief": {"a": 1}}, {"brief": "x" * 2000}, {"__class__": 1}, {"": 1}),
]
EOS = 2


def ask(server: RunningServer, path: str, body: Any) -> httpx.Response:
    return server.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())


def choice(server: RunningServer, path: str, **more: Any) -> Any:
    answer = ask(server, path, LEAST[path] | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


FIELDS += [(CHAT, field, *CHATS[field]) for field in CHATS] + [(TEXT, field, *TEXTS[field]) for field in TEXTS]
FIELDS += [(TEXT, "logprobs", [0, 1], [5, 1.5, True])]


@pytest.mark.parametrize(("path", "field", "neutral", "ignored"), FIELDS, ids=lambda v: v if isinstance(v, str) else "")
def test_no_field_is_ignored(server: RunningServer, path: str, field: str, neutral: Any, ignored: Any) -> None:
    said = choice(server, path)
    for value in neutral:
        same = choice(server, path, **{field: value})
        assert (same.get("text"), same.get("message")) == (said.get("text"), said.get("message"))
    for value in ignored:
        assert field in refused(ask(server, path, LEAST[path] | {field: value})), value


@pytest.mark.slow
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_any_value_of_any_field(server: RunningServer, path: str) -> None:
    """Whatever comes: a completion or a clear refusal, soon, and the same completion as before for the next client."""
    fields = (CompletionRequest if path == TEXT else ChatRequest).model_fields
    before, slowest = choice(server, path, return_token_ids=True), 0.0
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        for field in fields:
            for value in VALUES:
                started = time.monotonic()
                answer = http.post(path, content=json.dumps(LEAST[path] | {field: value}).encode())
                slowest = max(slowest, time.monotonic() - started)
                assert answer.status_code in (200, 400, 404, 409), (field, value, answer.text)
                if answer.status_code != 200:
                    refused(answer, answer.status_code)
    assert slowest < 10
    assert choice(server, path, return_token_ids=True) == before


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_bodies_that_are_no_requests(server: RunningServer, path: str, body: bytes) -> None:
    refused(ask(server, path, body))
    assert choice(server, path)


def test_models_have_names(server: RunningServer) -> None:
    for path in (TEXT, CHAT):
        assert choice(server, path, model="tiny") == choice(server, path, model="") == choice(server, path)
        for name in ("gpt-4", "tiny ", "x" * 5000):
            assert "this server has 'tiny'" in refused(ask(server, path, LEAST[path] | {"model": name}), 404)
    assert server.get("/v1/models/tiny").json()["id"] == server.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert server.get("/v1/models/gpt-4").status_code == 404
    nowhere = server.get("/v2/nothing")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, 404)


def test_parts_of_type_text_are_read(server: RunningServer) -> None:
    def said(content: Any) -> Any:
        return choice(server, CHAT, messages=[{"role": "user", "content": content}], return_token_ids=True)

    parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "two"}]
    assert said("say two") == said([{"type": "text", "text": "say two"}]) == said(parts)
    assert said("say two") != said("say one")


def test_messages_that_are_none(server: RunningServer) -> None:
    for messages, words in (
        ([], "messages"),
        ("hello", "messages"),
        ([5], "messages"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": 5, "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "of type 'x'; only text is read"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'; only text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "only text is read"),
        ([{"role": "user", "content": "x", "name": "me"}], "'name' is not served"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "'tool_calls' is not served"),
        (SAID * 5000, "at most 4096"),
        ([{"role": "user", "content": "x" * 20_000}], "they have 20000 characters"),
    ):
        assert words in refused(ask(server, CHAT, LEAST[CHAT] | {"messages": messages})), messages[:1]


def test_templates_are_the_servers(fresh: RunningServer) -> None:
    before = choice(fresh, CHAT, return_token_ids=True)
    fresh.tokenizer.chat_template += "{% if brief %}Be brief.{% endif %}{% for i in range(2) %}{% endfor %}"
    for values in VARIABLES:
        assert "chat_template_kwargs" in refused(ask(fresh, CHAT, LEAST[CHAT] | {"chat_template_kwargs": values}))
    brief = choice(fresh, CHAT, return_token_ids=True, chat_template_kwargs={"brief": True})
    assert len(brief["prompt_token_ids"]) > len(before["prompt_token_ids"])
    assert choice(fresh, CHAT, return_token_ids=True, chat_template_kwargs={"brief": False}) == before


def test_what_a_stream_says_besides(server: RunningServer) -> None:
    for path, kinds in ((TEXT, ("tokens", "token_logprobs")), (CHAT, ("content",))):
        body = LEAST[path] | {"n": 2, "ignore_eos": True, "logprobs": path == CHAT or 0}
        *parts, last = events(ask(server, path, body | {"stream": True, "stream_options": {"include_usage": True}}))
        whole = ask(server, path, body).json()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        for index in (0, 1):
            choices = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
            for kind in kinds:
                told = [one for choice in choices for one in choice["logprobs"][kind]]
                assert (told, len(told)) == (whole["choices"][index]["logprobs"][kind], 2)
            if path == CHAT:
                assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * len(choices[1:])


def test_latencies_are_counted(server: RunningServer) -> None:
    def counted() -> dict[str, float]:
        lines = [line.split() for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = counted()
    for more in ({}, {"stream": True}, {"n": 3}):
        ask(server, TEXT, LEAST[TEXT] | more)
    after = counted()
    for name, count in (("time_to_first_token", 5), ("queue_time", 5), ("request", 3)):
        key = f"covey_{name}_seconds_count"
        assert (after[key] - before[key], after[f'covey_{name}_seconds_bucket{{le="+Inf"}}']) == (count, after[key])
        assert after[f"covey_{name}_seconds_sum"] > before[f"covey_{name}_seconds_sum"]


def test_bad_requests_are_told_what_is_wrong(server: RunningServer) -> None:
    for path, body, words in (
        (TEXT, {"prompt": "x", "temperature": -1}, "temperature: Input should be greater"),
        (TEXT, {"prompt": "x", "temperature": 1e-30}, "must be 0 (greedy) or at least 0.001"),
        (TEXT, {"prompt": [96, 97]}, "token id of 97; the vocabulary has"),
        (TEXT, {"prompt": []}, "prompt: an empty list"),
        (TEXT, {"prompt": [[]]}, "the prompt has 0 tokens"),
        (TEXT, {"prompt": [5] * 600}, "the prompt has 600 tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 201}, "completions of up to 200 tokens"),
        (TEXT, {"prompt": "x", "n": 2000}, "n: Input should be less"),
        (TEXT, {"prompt": "x", "streams": [[1], [2]]}, "streams has 2 entries for 1 completions"),
        (TEXT, {"prompt": "x", "logprobs": 5}, "logprobs: Input should be less"),
        (TEXT, {"max_tokens": 3}, "prompt: Field required"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        # one of two would be ignored
        (CHAT, {"messages": SAID, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens=4: they mean"),
        (TEXT, {"prompt": "x", "temperature": 0, "return_support": True}, "return_support is not for temperature=0"),
        (TEXT, {"prompt": "x", "seed": 1, "streams": [[1]]}, "seed and streams both"),
        (TEXT, {"prompt": "x", "max_tokens": 2, "choices": [[[5, 6, EOS]]]}, "the longest has 3 tokens; max_tokens=2"),
        (TEXT, {"prompt": "x", "choices": [[[5, EOS, 6, EOS]]]}, "has an end token (2) before its last place"),
        (TEXT, {"prompt": "x", "choices": [[[5, 6], [7], [5]]]}, "[5] is the beginning of [5, 6]"),
        (TEXT, {"prompt": "x", "choices": [[[5, 6]]], "stop": "a"}, "leave stop out"),
        (TEXT, b'{"prompt": "x", "n": 1, "n": 2}', "is given twice; send each field once"),
        (TEXT, b'{"prompt": "x", "stream": true, "stream_options": {"a": 1, "a": 2}}', "is given twice; send each"),
    ):
        assert words in refused(ask(server, path, body))
        if isinstance(body, dict) and "return_support" not in body:
            assert words in refused(ask(server, path, body | {"stream": True}))
        assert choice(server, TEXT)


def test_those_that_go_together(server: RunningServer) -> None:
    def ids(**more: Any) -> list[int]:
        return list(choice(server, TEXT, prompt=[5], max_tokens=5, return_token_ids=True, **more)["token_ids"])

    assert ids(choices=[[[5, 6, EOS], [5, 6, EOS]]]) == [5, 6, EOS]
    plain = ids(ignore_eos=True)
    assert ids(ignore_eos=True, stop_token_ids=[plain[2]]) == plain[: plain.index(plain[2]) + 1]
    both = ask(server, CHAT, {"messages": SAID, "max_tokens": 3, "max_completion_tokens": 3})
    assert both.json()["usage"]["completion_tokens"] <= 3


def test_forms(server: RunningServer) -> None:
    files = {"adapter_weights": b"x", "adapter_config": b"{}"}
    for version in ("1_0", "+5", "5.0", " 5", "\u0665", "0x5"):
        said = refused(server.post("/upload_adapter", files=files, data={"policy_version": version}), 422)
        assert "written in digits" in said, version
    more = {"trainer": "a", "what": "b"}
    assert "'what' is unknown" in refused(server.post("/release_trainer", data=more), 422)
    assert server.post("/release_trainer", data={"trainer": "a"}).status_code == 200


def test_a_prompt_counts_once(server: RunningServer) -> None:
    names = ("covey_prompt_tokens_total", "covey_tokens_total")
    before = [server.metric(name) for name in names]
    body = {"prompt": [[5, 6], [7, 8, 9]], "n": 4, "max_tokens": 1}
    assert ask(server, TEXT, body).json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    assert events(ask(server, TEXT, body | more))[-1]["usage"]["prompt_tokens"] == 5
    assert [server.metric(name) for name in names] == [before[0] + 10, before[1] + 16]
    assert server.metric("covey_running") == 0


def test_choices_that_are_cut_leave_the_same_tokens() -> None:
    choices = ((5, 6, 7, EOS), (5, 6, 8, EOS), (9, EOS))
    assert (cut := cut_choices(choices, 2)) == ((5, 6), (9, EOS))
    for said in ((), (5,), (9,)):
        assert following(choices, said).tolist() == following(cut, said).tolist()

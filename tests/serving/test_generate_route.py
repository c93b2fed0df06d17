"""`/inference/v1/generate`: ids in are ids sampled, log-probabilities are the engine's bit for bit, and the real client
of `renderers` reads the answers.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
from servers import RunningServer, begun, refused, serving
from tiny_models import CHATML, byte_tokenizer

from covey.pytorch.engine import Engine
from covey.serving import ServeSettings
from covey.types import Request, SamplingSettings

IDS = [5, 6, 7, 8]


def ask(server: RunningServer, **sampling: Any) -> Any:
    return server.ask("/inference/v1/generate", token_ids=IDS, sampling_params=sampling, model="tiny")


@pytest.mark.parametrize("cut", [{}, {"top_k": 5, "return_support": True}])
def test_tokens_and_logprobs_are_the_engine_s(server: RunningServer, cut: dict[str, Any]) -> None:
    drawn = {"max_tokens": 9, "temperature": 0.9, "stop_token_ids": [2], "streams": [[3, 1], [3, 2]], "n": 2} | cut
    answer = ask(server, logprobs=1, skip_special_tokens=False, routed_experts_prompt_start=3, **drawn).json()
    settings = SamplingSettings(
        temperature=0.9, top_k=cut.get("top_k", 0), max_tokens=9, eos_token_ids=(2,), keep_support=bool(cut)
    )
    session = Engine(server.model, server.tokenizer).serving_session(settings, policy_version=0, rows=8, own_tokens=200)
    rows = [session.start(Request(np.array(IDS), (3, stream))) for stream in (1, 2)]
    for choice, completion in zip(answer["choices"], session.run(rows), strict=True):
        ids, content = completion.token_ids.tolist(), choice["logprobs"]["content"]
        assert choice["token_ids"] == [entry["token_id"] for entry in content] == ids
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]
        assert np.array([entry["logprob"] for entry in content], np.float32).tobytes() == completion.logprobs.tobytes()
        assert choice["finish_reason"] == completion.finish_reason
        kept = completion.support and [completion.support.of(t).tolist() for t in range(len(ids))]
        assert choice.get("sampling_mask") == kept
    counts = answer["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (
        4,
        sum(len(c["token_ids"]) for c in answer["choices"]),
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "the vocabulary has"),
        ({"token_ids": IDS, "prompt": "x"}, "prompt"),
        ({"token_ids": IDS, "stream": True}, "stream"),
        ({"token_ids": IDS, "sampling_params": {"prompt": [1]}}, "prompt: this server knows no such field"),
        ({"token_ids": IDS, "sampling_params": {"presence_penalty": 1.0}}, "presence_penalty"),
        ({"token_ids": IDS, "sampling_params": {"logprobs": 5}}, "logprobs: Input should be less than or equal to 1"),
        (
            {"token_ids": IDS, "sampling_params": {"skip_special_tokens": "x"}},
            "skip_special_tokens: Input should be a valid bool",
        ),
        (
            {"token_ids": IDS, "sampling_params": {"routed_experts_prompt_start": True}},
            "start: Input should be a valid integer",
        ),
        ({"token_ids": IDS, "sampling_params": {"max_tokens": 10**4}}, "completions of up to 200 tokens"),
        ({"token_ids": IDS, "sampling_params": {"temperature": "1"}}, "temperature"),
    ],
)
def test_what_is_refused(server: RunningServer, body: dict[str, Any], words: str) -> None:
    assert words in refused(server.ask("/inference/v1/generate", **body))


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_a_length_that_is_not_given_is_the_server_s_longest(server: RunningServer, given: dict[str, None]) -> None:
    assert len(ask(server, ignore_eos=True, stop_token_ids=[], **given).json()["choices"][0]["token_ids"]) == 200


def test_the_client_of_renderers_reads_it() -> None:
    client, openai = pytest.importorskip("renderers.client"), pytest.importorskip("openai")
    from renderers.default import DefaultRenderer

    tokenizer = byte_tokenizer(CHATML)
    with serving(tokenizer=tokenizer, settings=ServeSettings("served", token="t")) as server:

        async def generate(content: str) -> Any:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="t", max_retries=0) as sdk:
                return await client.generate(
                    client=sdk,
                    renderer=DefaultRenderer(tokenizer),
                    messages=[{"role": "user", "content": content}],
                    model="served",
                    sampling_params={"temperature": 1.0, "max_tokens": 6, "seed": 4},
                    cache_salt="a",
                    priority=1,
                    extra_headers={"X-Session-ID": "one"},
                )

        def read(content: str) -> Any:
            return begun(asyncio.run, generate(content)).result()

        found = read("hi")
        same = {"prompt": found["prompt_ids"], "max_tokens": 6, "seed": 4, "logprobs": 1, "return_token_ids": True}
        own = server.post("/v1/completions", json=same, headers={"Authorization": "Bearer t"}).json()["choices"][0]
        assert found["completion_ids"] == own["token_ids"]
        assert found["completion_logprobs"] == own["logprobs"]["token_logprobs"]
        assert tokenizer.decode(found["prompt_ids"]).endswith("<|im_start|>assistant\n")
        with pytest.raises(client.OverlongPromptError):  # it knows the context from /v1/models and does not ask
            read("x" * server.batching.context_length)

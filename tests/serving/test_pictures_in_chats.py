"""Chats with pictures: the server reads a `data:` URL as the trainer reads a row, and fetches nothing."""

import base64
import gc
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from servers import RunningServer, refused, serving
from tiny_vision import picture, tiny_processor, tiny_vision

from covey.pytorch.engine import Engine
from covey.pytorch.models.loading import load_model
from covey.tasks.dataset import build_prompts
from covey.types import Request, SamplingSettings

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model(tiny_vision("smolvlm"), tiny_processor("smolvlm"))


@pytest.fixture(scope="module")
def seeing(loaded: Any) -> Iterator[RunningServer]:
    with serving(model=loaded.model, tokenizer=loaded.tokenizer, max_completion_length=20) as server:
        yield server


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def ask(server: RunningServer, *parts: Any, **more: Any) -> Any:
    wanted = {"max_tokens": 6, "logprobs": True, "return_token_ids": True, "ignore_eos": True}
    return server.ask(CHAT, messages=[{"role": "user", "content": [*parts]}], **wanted | more)


def test_an_answer_is_the_trainers(loaded: Any, seeing: RunningServer) -> None:
    answers_as_the_trainer(loaded, seeing)
    qwen: Any = load_model(tiny_vision("qwen2_5_vl"), tiny_processor("qwen2_5_vl"))
    with serving(model=qwen.model, tokenizer=qwen.tokenizer, max_completion_length=20) as other:
        answers_as_the_trainer(qwen, other)


def answers_as_the_trainer(loaded: Any, seeing: RunningServer) -> None:
    album, text = loaded.model.album, {"type": "text", "text": "Which?"}
    images = [picture(0), picture(1, 50)]
    answer = ask(seeing, shown(url_of(images[0])), shown(url_of(images[1]), detail="auto"), text, temperature=0).json()
    (choice,) = answer["choices"]
    row = {"prompt": [{"role": "user", "content": "Which?"}], "images": images}
    (prompt,) = build_prompts([row], loaded.tokenizer, album=album)
    settings = SamplingSettings(max_tokens=6, temperature=0.0)
    own = Engine(loaded.model, loaded.tokenizer, kv_cache_bytes=8 << 20)
    (found,) = own([Request(prompt.token_ids, (0,))], settings, policy_version=0)
    assert choice["token_ids"] == found.token_ids.tolist()
    told = [each["logprob"] for each in choice["logprobs"]["content"]]
    np.testing.assert_allclose(told, found.logprobs, atol=1e-5)
    assert choice["prompt_token_ids"] == album.placeholders(prompt.token_ids).tolist()
    assert answer["usage"]["prompt_tokens"] == len(prompt.token_ids)

    other = ask(seeing, shown(url_of(picture(2))), shown(url_of(images[1])), text, temperature=0).json()
    assert [each["logprob"] for each in other["choices"][0]["logprobs"]["content"]] != told


def test_pictures_are_held_while_they_are_asked_about(loaded: Any, seeing: RunningServer) -> None:
    for seed in range(4, 8):
        assert ask(seeing, shown(url_of(picture(seed))), n=2).status_code == 200
    seeing.batching.submit(())
    gc.collect()
    assert len(loaded.model.album._pictures) <= 3  # those of the rows above, and of the last answer


def test_what_is_refused(seeing: RunningServer, server: RunningServer) -> None:
    for parts, words in (
        ([shown("https://example.org/cat.png")], "is not fetched; send the picture itself, as data:image/png;base64"),
        ([shown("/etc/passwd")], "is not fetched"),
        ([shown("data:image/png;base64,!!")], "its data: URL is not base64"),
        ([shown("data:image/png;base64,AAAA")], "messages.0.content: a picture cannot be read"),
        ([shown(url_of(Image.new("RGB", (8001, 8000))))], "64,008,000 pixels, more than 64,000,000|8001 x 8000"),
        ([shown(url_of(Image.new("RGB", (6000, 6000))))] * 2, "more than 64,000,000 pixels together"),
        ([shown(url_of(picture(0)), detail="low")], "an object with a url"),
        ([{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}], "an object with a url"),
        ([shown(url_of(picture(0))), {"type": "text", "text": "<image>"}], "2 times '<image>' for 1 pictures"),
        ([{"type": "text", "text": "<image>"}], "1 times '<image>' for 0 pictures"),
        ([{"type": "image", "image": "x"}], "of type 'image'; only text is read"),
    ):
        message = refused(ask(seeing, *parts))
        assert any(each in message for each in words.split("|")), message
    assert "'image_url'; only text is read" in refused(ask(server, shown(url_of(picture(0)))))
    assert seeing.ask(CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=2).status_code == 200

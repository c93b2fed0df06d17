"""Texts that grow: their pieces add up to the whole, and a token costs the same whatever came before it."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from covey.rollout.drawing import StopMatcher
from covey.serving.answers import GrowingText, GrowingTexts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SAID = {"plain": ["ab", "Ġa"], "half a character": ["ðŁ"], "bytes that are no text": ["ÿ"], "special tokens": ["<|x|>"]}


def made(pieces: list[str], decoder: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, []))
    backend.decoder = decoder
    names = {"eos_token": "<|end|>", "additional_special_tokens": ["<|x|>"], "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def sentence_pieces() -> PreTrainedTokenizerFast:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return made([*BYTES, "▁", "▁a", "a", "b", "▁b", "▁▁", "é", "\n", "."], decoders.Sequence(steps))


def byte_level() -> PreTrainedTokenizerFast:
    return made([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "ab", "ðŁ", "ĺĢ"], decoders.ByteLevel())


def metaspace() -> PreTrainedTokenizerFast:
    return made(["▁", "▁a", "a", "▁▁", "b"], decoders.Metaspace())


def told(tokenizer: Any, ids: list[int], sizes: Any) -> str:
    text, found, place = GrowingText(GrowingTexts(tokenizer)), "", 0
    while place < len(ids):
        size = sizes()
        found += text.push(ids[place : place + size])
        place += size
    return found + text.push([], last=True)


@pytest.mark.parametrize("make", [sentence_pieces, byte_level, metaspace])
def test_pieces_add_up_to_the_whole(make: Callable[[], Any]) -> None:
    """Random ids, special ones and ones beyond the vocabulary too, from few and from many."""
    tokenizer, chance = make(), random.Random(0)
    every = range(len(tokenizer) + 3)
    for _ in range(400):
        some = chance.sample(every, min(len(every), chance.choice([1, 2, 3, 20])))
        ids = [chance.choice(some) for _ in range(chance.randrange(1, 90))]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert told(tokenizer, ids, lambda: chance.choice([1, 1, 1, 2, 30])) == whole, ids


def test_characters_of_several_bytes_with_a_wrong_one_now_and_then() -> None:
    chance = random.Random(1)
    for tokenizer, names in ((sentence_pieces(), BYTES), (byte_level(), bytes_to_unicode())):
        ids_of = tokenizer.get_vocab()
        for _ in range(200):
            said = "".join(chance.choice("aé€😀 ") for _ in range(40)).encode()
            spoilt = [chance.randrange(256) if chance.random() < 0.02 else byte for byte in said]
            ids = [ids_of[names[byte]] for byte in spoilt]
            assert told(tokenizer, ids, lambda: 1) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_wrong_byte_spoils_what_was_not_told_yet_and_a_space_after_a_special_token_is_kept() -> None:
    tokenizer = sentence_pieces()
    text = GrowingText(GrowingTexts(tokenizer))
    assert [text.push([0xC3]), text.push([0xA9]), text.push([0xFF])] == ["", "", ""]
    assert text.push(tokenizer.convert_tokens_to_ids(["b"])) == "\ufffd\ufffd\ufffdb"
    assert told(tokenizer, tokenizer.convert_tokens_to_ids(["▁a", *["<|x|>"] * 40, "▁b"]), lambda: 1) == "a b"


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.tokens += len(ids)
        return str(self.tokenizer.decode(ids, **options))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_streams_and_stop_strings_cost_as_many_decoded_tokens_as_there_are_tokens(said: list[str]) -> None:
    """At most 40 for each: a window of 16, and making it. Decoding the whole for each would be 1,000 for each."""
    streaming, stopping = Counting(byte_level()), Counting(byte_level())
    ids = streaming.tokenizer.convert_tokens_to_ids(said) * 2000
    text, matcher = GrowingText(GrowingTexts(streaming)), StopMatcher(stopping, ["never said"])
    for token in ids[:2000]:
        text.push([token])
        assert not matcher.push(token)
    assert max(streaming.tokens, stopping.tokens) < 40 * 2000


def test_runs_of_byte_tokens_cost_no_more() -> None:
    counting = Counting(sentence_pieces())
    text = GrowingText(GrowingTexts(counting))
    for _ in range(3000):
        text.push([0xC3])
    assert counting.tokens < 100
    assert text.push([], last=True) == "\ufffd" * 3000


@pytest.mark.parametrize("before", [["ÿ"] * 30, ["<|x|>"] * 30, ["ðŁ"] * 9])
def test_a_stop_string_is_found_after_what_is_no_text(before: list[str]) -> None:
    tokenizer = byte_level()
    matcher = StopMatcher(tokenizer, ["aab"])
    ids = tokenizer.convert_tokens_to_ids([*before, "Ġa", "a", "ab"])
    assert [matcher.push(token) for token in ids] == [False] * (len(ids) - 1) + [True]

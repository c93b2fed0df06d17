"""Conversations of several turns: the same tokens and log-probabilities as from a plain model that sees it all."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import assert_plain, finish, prompts, texts
from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

from covey.errors import GenerationError
from covey.pytorch.engine import Engine, Session
from covey.types import Completion, Request, SamplingSettings

SETTINGS = SamplingSettings(temperature=0.8, max_tokens=7, eos_token_ids=(2, 7, 30))
UNENDING = SamplingSettings(max_tokens=7)


(NINE,) = prompts((9,))


def opened(engine: Engine, settings: SamplingSettings = SETTINGS, **options: Any) -> Session:
    chosen: dict[str, Any] = {"policy_version": 0, "rows": 4, "own_tokens": 40, "prompt_lengths": [9]}
    return engine.session(settings, **chosen | options)


def only(session: Session) -> Completion:
    (completion,) = finish(session).values()
    return completion


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_has_the_plain_models_logprobs(family: str) -> None:
    model, rng, first = tiny_model(family), np.random.default_rng(0), prompts((9, 33))
    session = opened(Engine(model), rows=6, own_tokens=60, prompt_lengths=[9, 33])
    rows = [session.start(Request(first[i % 2], (i,)), keep=True) for i in range(6)]
    histories = [first[i % 2] for i in range(6)]
    for number in range(3):
        answers = finish(session)
        for i, row in enumerate(rows):
            completion = answers[id(row)]
            assert_plain(model, [Request(histories[i])], [completion], 0.8, atol=2e-4)
            histories[i] = np.concatenate([histories[i], completion.token_ids])
            assert row.history().tolist() == histories[i].tolist()
        for i, row in enumerate(rows):
            said = rng.integers(3, VOCAB_SIZE, 1 + (i + number) % 5)
            session.extend(row, said, (i, number))
            histories[i] = np.concatenate([histories[i], said])
    assert len(finish(session)) == 6
    for row in rows:
        session.drop(row)
    assert not session.busy


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_company_and_order_do_not_matter(family: str) -> None:
    """Turns that end at different times, answered in any order, in few slots: each conversation is as if alone."""
    engine, first = Engine(tiny_model(family)), prompts((5, 40, 12))

    def play(which: Iterable[int], *, slots: int, shuffle: int) -> dict[int, list[int]]:
        session, order = opened(engine, rows=slots, own_tokens=50, prompt_lengths=[5, 40, 12]), Random(shuffle)
        owner = {session.start(Request(first[i % 3], (i,)), keep=True): i for i in which}
        turns, found, waiting = dict.fromkeys(which, 0), {i: [] for i in which}, []
        while session.busy or waiting:
            waiting += session.advance() if session.busy else []
            order.shuffle(waiting)
            while waiting and (not session.busy or order.random() < 0.5):
                row = waiting.pop()
                i, number = owner[row], turns[owner[row]]
                found[i] += session.completion(row).token_ids.tolist()
                if number == 3:
                    session.drop(row)
                    continue
                said = np.arange(3, 4 + (i + number) % 4)
                session.extend(row, said, (i, number + 1))
                found[i] += said.tolist()
                turns[i] += 1
        return found

    crowd = play(range(9), slots=9, shuffle=0)
    assert play(range(9), slots=9, shuffle=1) == crowd
    assert play(range(9), slots=3, shuffle=2) == crowd
    for i in (0, 4, 8):
        assert play([i], slots=1, shuffle=3)[i] == crowd[i]


def test_plain_completions_and_conversations_in_one_batch() -> None:
    engine = Engine(tiny_model("llama"))
    alone = texts(engine([Request(NINE, (i,)) for i in range(4)], SETTINGS, policy_version=0))
    session = opened(engine)
    rows = [session.start(Request(NINE, (i,)), keep=i % 2 == 0) for i in range(4)]
    answers = finish(session)
    assert texts([answers[id(row)] for row in rows]) == alone
    session.extend(rows[0], np.array([5]), (9,))
    with pytest.raises(GenerationError, match="it must be parked"):
        session.extend(rows[1], np.array([5]), (9,))
    assert list(finish(session)) == [id(rows[0])]
    # the prompt once, the turn's last token and what was said
    assert (engine.last_stats.prefill_tokens, engine.last_stats.peak_batch) == (9 + 2, 4)


def test_a_prompt_that_comes_again_while_it_is_in_use() -> None:
    session = opened(Engine(tiny_model("llama")), rows=3)
    first = session.start(Request(NINE, (0,)), keep=True)
    finish(session)
    second = session.start(Request(NINE, (0,)), keep=True)
    answer = only(session).token_ids.tolist()
    assert second.own == first.own == answer
    stats = session.stats()
    assert (stats.prefill_tokens, stats.reused_tokens, stats.reused_prompts) == (9, 9, 1)


def test_room() -> None:
    session = opened(Engine(tiny_model("llama"), context_length=40), UNENDING, rows=1, own_tokens=20)
    row = session.start(Request(NINE), keep=True)
    finish(session)
    assert [session.room_for_turn(row, said) for said in (3, 10, 13)] == [7, 3, 0]
    with pytest.raises(GenerationError, match="leave room"):
        session.extend(row, np.arange(3, 16), (1,))
    session.extend(row, np.arange(3, 13), (1,))
    completion = only(session)
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")
    session.drop(row)
    session.start(Request(prompts((39,))[0]))  # longer than what was said at first: nothing is reserved
    completion = only(session)
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_what_the_memory_does_not_hold() -> None:
    engine = Engine(tiny_model("llama"), kv_cache_bytes=256 * (6 + 30))
    session = opened(engine, UNENDING, rows=1, own_tokens=20)
    assert [session.has_room_for(length) for length in (30, 31)] == [True, False]
    session.start(Request(prompts((30,))[0]))
    assert len(finish(session)) == 1
    session.start(Request(prompts((31,))[0]))
    with pytest.raises(GenerationError, match=r"31 tokens does not fit the memory beside the slots, 30 tokens"):
        finish(session)
    engine = Engine(tiny_model("llama"), kv_cache_bytes=10_000)
    with pytest.raises(GenerationError, match="kv_cache_bytes=10000"):
        opened(engine, own_tokens=500)
    with pytest.raises(GenerationError, match="version 0"):
        opened(engine, policy_version=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_choice_among_sequences(temperature: float) -> None:
    model, choices = tiny_model("llama"), ((5, 6, 2), (5, 6, 7, 2), (9, 2))
    settings = SamplingSettings(temperature=temperature, max_tokens=7, eos_token_ids=(2,))
    session = opened(Engine(model), settings, rows=40, own_tokens=30)
    rows = [session.start(Request(NINE, (i,), choices if i else None), keep=True) for i in range(40)]
    answers = finish(session)
    with torch.no_grad():
        logits = model(torch.from_numpy(NINE)[None]).logits[0, -1]
    first = (logits / (temperature or 1.0))[[5, 9]].log_softmax(-1)
    found = [answers[id(row)] for row in rows[1:]]
    said = [tuple(ids) for ids in texts(found)]
    assert set(said) <= set(choices)
    for completion, tokens in zip(found, said, strict=True):
        assert completion.support.ids[: completion.support.offsets[1]].tolist() == [5, 9]
        assert completion.logprobs[0] == pytest.approx(float(first[0 if tokens[0] == 5 else 1]), abs=1e-4)
        if tokens[0] == 9:
            assert completion.logprobs[1] == 0.0  # nothing else was left
    if temperature:
        assert len(set(said)) > 1
        assert abs(np.mean([tokens[0] == 5 for tokens in said]) - float(first[0].exp())) < 0.3
    session.extend(rows[1], np.array([4]), (99,), ((7, 2),))
    assert only(session).token_ids.tolist() == [7, 2]


def test_tokens_without_an_alternative_need_no_forward_pass() -> None:
    model = tiny_model("llama")
    session = opened(Engine(model), SamplingSettings(temperature=0.0, max_tokens=7, eos_token_ids=(2,)))
    row = session.start(Request(NINE, (0,), ((5, 6, 7, 8), (9, 6, 7, 8))), keep=True)  # no end of sequence: none needed
    completion = only(session)
    assert completion.token_ids[1:].tolist() == [6, 7, 8]
    assert completion.logprobs[1:].tolist() == [0.0, 0.0, 0.0]
    assert np.diff(completion.support.offsets).tolist() == [2, 1, 1, 1]
    assert (completion.finish_reason, session.stats().decode_steps) == ("stop", 0)
    # what was not computed then is computed with what is said next
    session.extend(row, np.array([4, 3]), (1,))
    assert_plain(model, [Request(np.concatenate([NINE, completion.token_ids, [4, 3]]))], [only(session)])
    # a sequence longer than the turn may be is cut
    session.extend(row, np.array([4]), (2,), (tuple(range(10, 30)),))
    answer = only(session)
    assert (answer.token_ids.tolist(), answer.finish_reason) == (list(range(10, 17)), "length")


def test_answered_conversations_wait_for_each_other_a_little() -> None:
    session = opened(Engine(tiny_model("llama")), SamplingSettings(temperature=1.0, max_tokens=30), own_tokens=90)
    short, *_ = (session.start(Request(NINE, (i,), None if i else ((5,),)), keep=not i) for i in range(4))
    assert session.advance() == [short]  # three go on
    session.extend(short, np.array([4]), (9,))
    before, steps = session.stats().prefill_tokens, 0
    while session.stats().prefill_tokens == before:
        session.advance()
        steps += 1
    assert steps == 5  # four steps of patience, then it is taken in


def test_conversations_that_do_not_all_fit_are_not_all_computed_again() -> None:
    """They take turns: giving up the one used longest ago would give up each shortly before its turn."""

    def prefilled(kv_cache_bytes: int) -> int:
        engine, words = Engine(tiny_model("llama"), kv_cache_bytes=kv_cache_bytes), np.random.default_rng(0)
        session = opened(engine, rows=12, own_tokens=300, prompt_lengths=[40] * 12)
        rows = [session.start(Request(words.integers(4, VOCAB_SIZE, 40), (i,)), keep=True) for i in range(12)]
        for number in range(7):
            finish(session)
            for row in rows:
                session.extend(row, words.integers(4, VOCAB_SIZE, 30), (number,))
        finish(session)
        assert session.stats().cache_bytes <= kv_cache_bytes
        return session.stats().prefill_tokens

    assert prefilled(1 << 26) == 3_084
    assert prefilled(1_269_248) < 3_600  # 4,254 in the other order
    assert prefilled(846_080) < 6_000  # 9,755

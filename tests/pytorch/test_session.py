"""Conversations of several turns: the same tokens and log-probabilities as from a plain model that sees it all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import finish, prompts
from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

from covey.errors import GenerationError
from covey.pytorch.engine import Engine
from covey.types import Completion, Request, SamplingSettings

SETTINGS = SamplingSettings(temperature=0.8, max_tokens=7, eos_token_ids=(2, 7, 30))


def expected(model: torch.nn.Module, before: list[int], completion: Completion, temperature: float) -> np.ndarray:
    ids = torch.tensor([[*before, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logp = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    places = torch.arange(len(before) - 1, ids.shape[1] - 1)
    return logp[places, ids[0, len(before) :]].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_has_the_plain_models_logprobs(family: str) -> None:
    model = tiny_model(family)
    engine = Engine(model)
    rng = np.random.default_rng(0)
    first = prompts((9, 33))
    session = engine.session(SETTINGS, policy_version=0, rows=6, own_tokens=60, prompt_lengths=[9, 33])
    rows = [session.start(Request(first[i % 2], (i,)), keep=True) for i in range(6)]
    histories = [first[i % 2].tolist() for i in range(6)]
    for number in range(3):
        answers = finish(session)
        for i, row in enumerate(rows):
            completion = answers[id(row)]
            np.testing.assert_allclose(completion.logprobs, expected(model, histories[i], completion, 0.8), atol=2e-4)
            histories[i] += completion.token_ids.tolist()
            assert row.history().tolist() == histories[i]
        for i, row in enumerate(rows):
            said = rng.integers(3, VOCAB_SIZE, 1 + (i + number) % 5)
            session.extend(row, said, (i, number))
            histories[i] += said.tolist()
    assert len(finish(session)) == 6
    for row in rows:
        session.drop(row)
    assert not session.busy


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_company_and_order_do_not_matter(family: str) -> None:
    """Turns that end at different times, answered in any order, in few slots: each conversation is as if alone."""
    model = tiny_model(family)
    first = prompts((5, 40, 12))

    def play(engine: Engine, which: list[int], *, slots: int, shuffle: int) -> dict[int, list[int]]:
        session = engine.session(SETTINGS, policy_version=0, rows=slots, own_tokens=50, prompt_lengths=[5, 40, 12])
        order = np.random.default_rng(shuffle)
        owner: dict[int, int] = {}
        turns: dict[int, int] = {}
        parked: list = []
        found: dict[int, list[int]] = {}
        for i in which:
            owner[id(row := session.start(Request(first[i % 3], (i,)), keep=True))] = i
            turns[id(row)] = 0
            found[i] = []
            parked.append(row)  # keeps the row alive: ids stay unique
        waiting: list = []
        while session.busy or waiting:
            waiting += session.advance() if session.busy else []
            order.shuffle(waiting)
            while waiting and (not session.busy or order.random() < 0.5):
                row = waiting.pop()
                i, number = owner[id(row)], turns[id(row)]
                found[i] += session.completion(row).token_ids.tolist()
                if number == 3:
                    session.drop(row)
                    continue
                said = np.arange(3, 4 + (i + number) % 4)
                session.extend(row, said, (i, number + 1))
                found[i] += said.tolist()
                turns[id(row)] += 1
        return found

    engine = Engine(model)
    crowd = play(engine, list(range(9)), slots=9, shuffle=0)
    assert play(engine, list(range(9)), slots=9, shuffle=1) == crowd
    assert play(engine, list(range(9)), slots=3, shuffle=2) == crowd
    for i in (0, 4, 8):
        assert play(engine, [i], slots=1, shuffle=3)[i] == crowd[i]


def test_plain_completions_and_conversations_in_one_batch() -> None:
    model = tiny_model("llama")
    engine = Engine(model)
    (ids,) = prompts((9,))
    alone = [c.token_ids.tolist() for c in engine([Request(ids, (i,)) for i in range(4)], SETTINGS, policy_version=0)]
    session = engine.session(SETTINGS, policy_version=0, rows=4, own_tokens=40, prompt_lengths=[9])
    rows = [session.start(Request(ids, (i,)), keep=i % 2 == 0) for i in range(4)]
    answers = finish(session)
    assert [answers[id(row)].token_ids.tolist() for row in rows] == alone
    session.extend(rows[0], np.array([5]), (9,))
    with pytest.raises(GenerationError, match="it must be parked"):
        session.extend(rows[1], np.array([5]), (9,))
    assert list(finish(session)) == [id(rows[0])]
    stats = engine.last_stats
    assert stats.prefill_tokens == 9 + 2  # the prompt once, the turn's last token and what was said
    assert stats.peak_batch == 4


def test_a_prompt_that_comes_again_while_it_is_in_use() -> None:
    engine = Engine(tiny_model("llama"))
    (ids,) = prompts((9,))
    session = engine.session(SETTINGS, policy_version=0, rows=3, own_tokens=40, prompt_lengths=[9])
    first = session.start(Request(ids, (0,)), keep=True)
    finish(session)
    second = session.start(Request(ids, (0,)), keep=True)
    (completion,) = finish(session).values()
    assert second.own == first.own == completion.token_ids.tolist()
    stats = engine.last_stats
    assert (stats.prefill_tokens, stats.reused_tokens, stats.reused_prompts) == (9, 9, 1)


def test_room() -> None:
    model = tiny_model("llama")
    engine = Engine(model, context_length=40)
    (ids,) = prompts((9,))
    session = engine.session(
        SamplingSettings(max_tokens=7), policy_version=0, rows=1, own_tokens=20, prompt_lengths=[9]
    )
    row = session.start(Request(ids), keep=True)
    finish(session)
    assert session.room_for_turn(row, 3) == 7
    assert session.room_for_turn(row, 10) == 3
    assert session.room_for_turn(row, 13) == 0
    with pytest.raises(GenerationError, match="leave room"):
        session.extend(row, np.arange(3, 16), (1,))
    session.extend(row, np.arange(3, 13), (1,))
    (completion,) = finish(session).values()
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")
    session.drop(row)
    session.start(Request(prompts((39,))[0]))  # longer than what was said at first: nothing is reserved
    (completion,) = finish(session).values()
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_a_prompt_that_the_memory_does_not_hold() -> None:
    engine = Engine(tiny_model("llama"), kv_cache_bytes=256 * (6 + 30))
    settings = SamplingSettings(max_tokens=7)
    session = engine.session(settings, policy_version=0, rows=1, own_tokens=20, prompt_lengths=[9])
    assert session.has_room_for(30)
    assert not session.has_room_for(31)
    session.start(Request(prompts((30,))[0]))
    assert len(finish(session)) == 1
    session.start(Request(prompts((31,))[0]))
    with pytest.raises(GenerationError, match=r"31 tokens does not fit the memory beside the slots, 30 tokens"):
        finish(session)


def test_a_cache_too_small_for_one_conversation() -> None:
    engine = Engine(tiny_model("llama"), kv_cache_bytes=10_000)
    with pytest.raises(GenerationError, match="kv_cache_bytes=10000"):
        engine.session(SETTINGS, policy_version=0, rows=4, own_tokens=500, prompt_lengths=[20])
    with pytest.raises(GenerationError, match="version 0"):
        engine.session(SETTINGS, policy_version=3, rows=4, own_tokens=5, prompt_lengths=[20])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_choice_among_sequences(temperature: float) -> None:
    model = tiny_model("llama")
    engine = Engine(model)
    (ids,) = prompts((9,))
    choices = ((5, 6, 2), (5, 6, 7, 2), (9, 2))
    settings = SamplingSettings(temperature=temperature, max_tokens=7, eos_token_ids=(2,))
    session = engine.session(settings, policy_version=0, rows=40, own_tokens=30, prompt_lengths=[9])
    rows = [session.start(Request(ids, (i,), choices if i else None), keep=True) for i in range(40)]
    answers = finish(session)
    logits = _logits(model, ids.tolist())
    temperature = temperature or 1.0
    first = (logits / temperature)[[5, 9]].log_softmax(-1)
    said = [tuple(answers[id(row)].token_ids.tolist()) for row in rows[1:]]
    assert set(said) <= set(choices)
    for row, tokens in zip(rows[1:], said, strict=True):
        completion = answers[id(row)]
        assert completion.support is not None
        assert completion.support.ids[: completion.support.offsets[1]].tolist() == [5, 9]
        assert completion.logprobs[0] == pytest.approx(float(first[0 if tokens[0] == 5 else 1]), abs=1e-4)
        if tokens[0] == 9:
            assert completion.logprobs[1] == 0.0  # nothing else was left
    if settings.temperature:
        assert len(set(said)) > 1
        share = np.mean([tokens[0] == 5 for tokens in said])
        assert abs(share - float(first[0].exp())) < 0.3
    session.extend(rows[1], np.array([4]), (99,), ((7, 2),))
    (completion,) = finish(session).values()
    assert completion.token_ids.tolist() == [7, 2]


def test_tokens_without_an_alternative_need_no_forward_pass() -> None:
    model = tiny_model("llama")
    engine = Engine(model)
    (ids,) = prompts((9,))
    settings = SamplingSettings(temperature=0.0, max_tokens=7, eos_token_ids=(2,))
    session = engine.session(settings, policy_version=0, rows=4, own_tokens=40, prompt_lengths=[9])
    row = session.start(Request(ids, (0,), ((5, 6, 7, 8), (9, 6, 7, 8))), keep=True)  # no end of sequence: none needed
    (completion,) = finish(session).values()
    assert completion.token_ids[1:].tolist() == [6, 7, 8]
    assert completion.logprobs[1:].tolist() == [0.0, 0.0, 0.0]
    assert completion.support is not None
    assert np.diff(completion.support.offsets).tolist() == [2, 1, 1, 1]
    assert (completion.finish_reason, session.stats().decode_steps) == ("stop", 0)
    # what was not computed then is computed with what is said next
    session.extend(row, np.array([4, 3]), (1,))
    (answer,) = finish(session).values()
    whole = [*ids.tolist(), *completion.token_ids.tolist(), 4, 3]
    for token, logprob in zip(answer.token_ids.tolist(), answer.logprobs.tolist(), strict=True):
        assert _logits(model, whole).log_softmax(-1)[token].item() == pytest.approx(logprob, abs=1e-4)
        whole.append(token)
    # a sequence longer than the turn may be is cut
    session.extend(row, np.array([4]), (2,), (tuple(range(10, 30)),))
    (answer,) = finish(session).values()
    assert (answer.token_ids.tolist(), answer.finish_reason) == (list(range(10, 17)), "length")


def test_answered_conversations_wait_for_each_other_a_little() -> None:
    engine = Engine(tiny_model("llama"))
    settings = SamplingSettings(temperature=1.0, max_tokens=30)
    session = engine.session(settings, policy_version=0, rows=4, own_tokens=90, prompt_lengths=[9])
    (ids,) = prompts((9,))
    short = session.start(Request(ids, (0,), ((5,),)), keep=True)
    for stream in range(1, 4):
        session.start(Request(ids, (stream,)))
    assert session.advance() == [short]  # three go on
    session.extend(short, np.array([4]), (9,))
    before = session.stats().prefill_tokens
    steps = 0
    while session.stats().prefill_tokens == before:
        session.advance()
        steps += 1
    assert steps == 5  # four steps of patience, then it is taken in


def _logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float()


def test_conversations_that_do_not_all_fit_are_not_all_computed_again() -> None:
    """They take turns: giving up the one used longest ago would give up each shortly before its turn."""
    model = tiny_model("llama")

    def prefilled(kv_cache_bytes: int) -> int:
        engine, words = Engine(model, kv_cache_bytes=kv_cache_bytes), np.random.default_rng(0)
        session = engine.session(SETTINGS, policy_version=0, rows=12, own_tokens=300, prompt_lengths=[40] * 12)
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

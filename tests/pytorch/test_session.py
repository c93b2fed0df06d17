"""Sessions: each turn is the plain model's, and what is held is not computed again, whoever asks: counted by hand."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learner_cases import LiveMemory, assert_plain, finish, generated, prompts, texts
from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model, without_interface
from torch.nn.utils.rnn import pad_sequence
from transformers import PhimoeConfig, PhimoeForCausalLM

from covey.errors import GenerationError
from covey.pytorch.engine import Engine, Session, attention
from covey.pytorch.engine.attention import Piece, PrefillAttention, Span
from covey.pytorch.engine.cache import KVCache, block_capacity
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.engine.runner import Step
from covey.rollout.turns import Row
from covey.types import Completion, IntArray, Request, SamplingSettings
from fakes import raises

SETTINGS = SamplingSettings(temperature=0.8, max_tokens=7, eos_token_ids=(2, 7, 30))
UNENDING = SamplingSettings(max_tokens=7)
MODELS = ("llama", "gemma2", "gpt2")  # fast; with windows and soft caps; general
BYTES = {"llama": 256, "gemma2": 256, "gpt2": 512}
"""Of keys and values of a token in float32."""
GREEDY = SamplingSettings(temperature=0.0, max_tokens=6)
SAMPLED = SamplingSettings(temperature=0.8, max_tokens=6)
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
            completion, said = answers[id(row)], rng.integers(3, VOCAB_SIZE, 1 + (i + number) % 5)
            assert_plain(model, [Request(histories[i])], [completion], 0.8, atol=2e-4)
            assert row.history().tolist() == [*histories[i], *completion.token_ids]
            session.extend(row, said, (i, number))
            histories[i] = np.concatenate([histories[i], completion.token_ids, said])
    assert len(finish(session)) == 6
    for row in rows:
        session.drop(row)
    assert not session.busy


@pytest.mark.parametrize("family", MODELS)
def test_company_and_order_do_not_matter(family: str) -> None:
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
    assert (play(range(9), slots=9, shuffle=1), play(range(9), slots=3, shuffle=2)) == (crowd, crowd)
    for i in (0, 4, 8):
        assert play([i], slots=1, shuffle=3)[i] == crowd[i]


def test_plain_completions_and_conversations_in_one_batch_and_a_prompt_that_comes_again_in_use() -> None:
    engine = Engine(tiny_model("llama"))
    alone = texts(engine([Request(NINE, (i,)) for i in range(4)], SETTINGS, policy_version=0))
    session = opened(engine)
    rows = [session.start(Request(NINE, (i,)), keep=i % 2 == 0) for i in range(4)]
    answers = finish(session)
    assert texts([answers[id(row)] for row in rows]) == alone
    session.extend(rows[0], np.array([5]), (9,))
    raises(GenerationError, "it must be parked", session.extend, rows[1], np.array([5]), (9,))
    assert list(finish(session)) == [id(rows[0])]
    # the prompt once, the turn's last token and what was said
    assert (engine.last_stats.prefill_tokens, engine.last_stats.peak_batch) == (9 + 2, 4)
    session = opened(Engine(tiny_model("llama")), rows=3)
    first, said = session.start(Request(NINE, (0,)), keep=True), only(session)
    second, again = session.start(Request(NINE, (0,)), keep=True), only(session)
    assert second.own == first.own == said.token_ids.tolist() == again.token_ids.tolist()
    stats = session.stats()
    assert (stats.prefill_tokens, stats.reused_tokens, stats.reused_prompts) == (9, 9, 1)


def test_room_for_turns_and_what_the_memory_does_not_hold() -> None:
    session = opened(Engine(tiny_model("llama"), context_length=40), UNENDING, rows=1, own_tokens=20)
    row = session.start(Request(NINE), keep=True)
    finish(session)
    assert [session.room_for_turn(row, said) for said in (3, 10, 13)] == [7, 3, 0]
    raises(GenerationError, "leave room", session.extend, row, np.arange(3, 16), (1,))
    session.extend(row, np.arange(3, 13), (1,))
    longer = only(session)
    session.drop(row)
    session.start(Request(prompts((39,))[0]))  # longer than what was said at first: nothing is reserved
    ends = [(len(one.token_ids), one.finish_reason) for one in (longer, only(session))]
    assert ends == [(3, "length"), (1, "length")]
    engine = Engine(tiny_model("llama"), kv_cache_bytes=256 * (6 + 30))
    session = opened(engine, UNENDING, rows=1, own_tokens=20)
    assert [session.has_room_for(length) for length in (30, 31)] == [True, False]
    session.start(Request(prompts((30,))[0]))
    assert len(finish(session)) == 1
    session.start(Request(prompts((31,))[0]))
    raises(GenerationError, r"31 tokens does not fit the memory beside the slots, 30 tokens", finish, session)
    engine = Engine(tiny_model("llama"), kv_cache_bytes=10_000)
    for options, words in (({"own_tokens": 500}, "kv_cache_bytes=10000"), ({"policy_version": 3}, "version 0")):
        raises(GenerationError, words, opened, engine, **options)


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
    assert answers[id(rows[0])].support is None  # it may say anything
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
    assert (completion.token_ids[1:].tolist(), completion.logprobs[1:].tolist()) == ([6, 7, 8], [0.0, 0.0, 0.0])
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


def session_of(engine: Engine, settings: SamplingSettings = GREEDY, **options: Any) -> Session:
    return opened(engine, settings, **{"rows": 8, "own_tokens": 150, "prompt_lengths": [100]} | options)


def made(family: str) -> tuple[Any, Engine, Session]:
    engine = Engine(model := tiny_model(family))
    return model, engine, session_of(engine)


def counts(engine: Engine) -> tuple[int, int]:
    return engine.last_stats.prefill_tokens, engine.last_stats.reused_tokens


def beginning(length: int) -> IntArray:
    return prompts((length,), seed=7)[0]


def after(ids: IntArray, lengths: tuple[int, ...]) -> list[IntArray]:
    return [np.concatenate([ids, own]) for own in prompts(lengths)]


def start(session: Session, asked: list[IntArray], **options: Any) -> list[Row]:
    return [session.start(Request(ids, (i,)), **options) for i, ids in enumerate(asked)]


def assert_said(model: Any, session: Session, asked: list[IntArray]) -> None:
    """What `generate` would say."""
    rows = start(session, asked)
    finish(session)
    assert [row.own for row in rows] == [generated(model, ids) for ids in asked]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("shared", [20, 80])
def test_common_instructions_are_prefilled_once(family: str, shared: int) -> None:
    """In one pass, and again by a later call of the same session; short ones are copied, long ones shared."""
    model, engine, session = made(family)
    asked = after(beginning(shared), (5, 9, 1, 30))
    assert_said(model, session, asked)
    assert counts(engine) == (shared + 5 + 9 + 1 + 30, 3 * shared)
    assert_said(model, session, [np.concatenate([beginning(shared), *prompts((4,), seed=3)])])
    assert counts(engine) == (shared + 5 + 9 + 1 + 30 + 4, 4 * shared)
    # so in a plain call
    found = engine([Request(ids, (i,)) for i, ids in enumerate(asked)], GREEDY, policy_version=0)
    assert texts(found) == [generated(model, ids) for ids in asked]
    assert counts(engine) == (shared + 5 + 9 + 1 + 30, 3 * shared)


@pytest.mark.parametrize("family", MODELS)
def test_turns_cost_their_new_tokens(family: str) -> None:
    model, engine, session = made(family)
    first = after(beginning(70), (5, 9))
    rows = start(session, [*first, *first], keep=True)
    finish(session)
    expected = 70 + 5 + 9
    assert counts(engine)[0] == expected
    for turn in range(6):
        said = prompts((3, 1, 8, 5), seed=turn + 10)
        before = [np.concatenate([row.history(), words]) for row, words in zip(rows, said, strict=True)]
        for row, words in zip(rows, said, strict=True):
            session.extend(row, words, (turn,))
        finish(session)
        assert [row.own[row.turn :] for row in rows] == [generated(model, ids) for ids in before]
        # the last token of each answer was never run; two and two say the same until they hear different words
        expected += (4 if turn else 2) + 3 + 1 + 8 + 5
        assert counts(engine)[0] == expected
    turns = sum(4 * 75 + 2 * 4 + 4 * 6 * turn + 17 * turn for turn in range(1, 7))
    assert sum(counts(engine)) == sum(map(len, first)) * 2 + turns


@pytest.mark.parametrize("family", MODELS)
def test_prompts_that_repeat_earlier_ones(family: str) -> None:
    """A prompt of its own for each turn: all that was said, and an ending that the next one does not have."""
    model, engine, session = made(family)
    histories = after(beginning(70), (5, 9, 12))
    for turn in range(5):
        before = counts(engine)[0]
        assert_said(model, session, [np.concatenate([history, [5, 6, 7]]) for history in histories])
        assert counts(engine)[0] - before == (70 + 5 + 9 + 12 + 3 * 3 if turn == 0 else 3 * (4 + 3))
        # tokens between 4 and 96; the history goes on with another one than the ending's first
        histories = [np.concatenate([ids, [10 + turn, 11, 12, 13]]) for ids in histories]


@pytest.mark.parametrize("family", MODELS)
def test_forks_of_a_conversation(family: str) -> None:
    model, engine, session = made(family)
    first = session.start(Request(beginning(30)), keep=True)
    finish(session)
    session.extend(first, np.array([9, 8]), (1,))
    finish(session)
    whole, before = first.history(), counts(engine)[0]
    asked = [*after(whole, (2, 4, 3)), whole[:25], whole]
    rows = start(session, asked, keep=True)
    session.extend(first, np.array([7]), (2,))
    finish(session)
    assert [row.own for row in rows] == [generated(model, ids) for ids in asked]
    assert first.own[first.turn :] == generated(model, np.concatenate([whole, [7]]))
    # the answer's last token was never run: first by one fork, then it is there; of what ends earlier, the last token
    assert counts(engine)[0] - before == 1 + (2 + 4 + 3) + 1 + 1 + 1


@pytest.mark.parametrize("family", MODELS)
def test_little_memory(family: str) -> None:
    """Six conversations where two fit: what gave way is computed again, and no other tokens are said."""
    model = tiny_model(family)
    ample, small = Engine(model), Engine(model, kv_cache_bytes=BYTES[family] * 230)

    def play(engine: Engine) -> list[list[int]]:
        session = session_of(engine, SAMPLED, own_tokens=60, prompt_lengths=[41])
        rows = start(session, prompts((20, 33, 9, 41, 12, 25)), keep=True)
        for turn in range(4):
            finish(session)
            for i, row in enumerate(rows):
                session.extend(row, np.arange(5, 8 + i % 3), (i, turn))
        finish(session)
        return [row.own for row in rows]

    assert play(small) == play(ample)
    assert small.last_stats.cache_bytes <= BYTES[family] * 230
    assert counts(ample)[0] == 140 + 4 * (6 * 1 + 3 + 4 + 5 + 3 + 4 + 5)
    assert counts(small)[0] > counts(ample)[0]
    assert sum(counts(small)) == sum(counts(ample))


def test_memory_is_taken_as_it_is_used() -> None:
    engine = Engine(tiny_model("llama"))
    session = session_of(engine, rows=16, own_tokens=400)
    rows = [session.start(Request(ids), keep=True) for ids in prompts((9, 12))]
    finish(session)
    assert engine.last_stats.cache_bytes == 256 * (16 * 5 + 1024)  # slots of a turn, and the smallest segment
    for turn in range(40):
        for row in rows:
            session.extend(row, np.arange(5, 8), (turn,))
        finish(session)
    assert engine.last_stats.cache_bytes == 256 * (16 * 5 + 2048)
    assert engine.last_stats.prefill_tokens == 21 + 2 * 40 * 4


@pytest.mark.parametrize("family", MODELS)
def test_new_weights_use_nothing_of_the_old(family: str) -> None:
    engine, other = Engine(tiny_model(family)), tiny_model(family, seed=1)
    session = session_of(engine, SAMPLED)
    (ids,) = prompts((70,))
    first = session.start(Request(ids, (0,)), keep=True)
    assert not any(session.advance() for _ in range(3))
    engine.publish(weights_of(other, 1))
    session.change_version(1)
    waiting = session.start(Request(ids, (1,)))
    found = finish(session)
    # who has begun goes on with keys and values of the old weights, who has not gets none of them
    assert first.versions == [(0, 0), (4, 1)]
    assert_plain(other, [Request(ids)], [found[id(waiting)]], 0.8)
    assert counts(engine) == (140, 0)
    # what was said half and half is not held: the next turn is the new weights' alone
    before = np.concatenate([first.history(), [5]])
    session.extend(first, np.array([5]), (2,))
    assert_plain(other, [Request(before)], [finish(session)[id(first)]], 0.8)
    assert counts(engine)[0] == 140 + len(before) - 70


def test_what_is_not_finite_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, session = made("llama")
    session.end_bad_rows_alone()
    asked = after(beginning(70), (5, 9))
    forward, spoilt = engine._runner.forward, {"rows": 1}

    def spoil(step: Step) -> torch.Tensor:
        logits = forward(step).clone()
        if len(step.histories()) == 2 and step.last is None and spoilt["rows"]:
            spoilt["rows"] = 0
            logits[0] = torch.nan
        return logits

    monkeypatch.setattr(engine._runner, "forward", spoil)
    bad, good = start(session, asked)
    finish(session)
    assert bad.error is not None
    assert good.own == generated(model, asked[1])
    assert_said(model, session, asked)
    assert counts(engine)[0] == 2 * (70 + 5 + 9)  # the beginning too is computed anew


def test_products_are_held_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel does without the products of all queries and keys: soft caps, windows, masks or none."""
    monkeypatch.setattr(attention, "_MOST_SCORES", 300)
    model, _, session = made("gemma2")
    assert_said(model, session, after(beginning(70), (5, 9)))


def test_a_model_without_a_cache_computes_everything() -> None:
    engine = Engine(model := without_interface(tiny_model("gpt2")))
    session = session_of(engine)
    rows = start(session, [NINE, NINE], keep=True)
    finish(session)
    assert rows[0].own == rows[1].own == generated(model, NINE)
    assert counts(engine) == (9, 9)  # in one pass
    for row in rows:
        session.extend(row, np.array([5]), (2,))
    finish(session)
    assert rows[0].own[7:] == rows[1].own[7:] == generated(model, np.concatenate([NINE, rows[0].own[:7]]))
    assert (counts(engine), session.device._tree.find(NINE)) == ((9 + 16, 9 + 16), (None, 0))


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """(what is done, to which conversation, tokens said, seed) each."""
    what = st.sampled_from(["start", "fork", "extend", "extend", "drop", "advance", "renew"])
    number = st.integers(0, 1 << 16)
    return draw(st.lists(st.tuples(what, number, st.integers(1, 40), st.integers(0, 2)), min_size=3, max_size=25))


@pytest.mark.parametrize("family", MODELS)
@given(story=stories(), budget=st.sampled_from([260, 420, 5000]), slots=st.sampled_from([1, 3, 6]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_story_is_as_if_everything_were_computed_anew(family: str, story: Any, budget: int, slots: int) -> None:
    model = tiny_model(family).double()
    engine = Engine(model, kv_cache_bytes=2 * BYTES[family] * budget, context_length=200)
    seen: list[tuple[IntArray, torch.Tensor]] = []
    forward = engine._runner.forward

    def record(step: Step) -> torch.Tensor:
        logits = forward(step)
        seen.extend((ids.copy(), one.clone()) for ids, one in zip(step.histories(), logits, strict=True))
        return logits

    engine._runner.forward = record  # type: ignore[method-assign]
    session = session_of(engine, SAMPLED, rows=slots, own_tokens=90, prompt_lengths=[100])
    kept, asked = list[Row](), 0
    for what, which, count, seed in story:
        rows = [row for row in kept if row.finish_reason is not None]
        words = np.random.default_rng(seed).integers(4, VOCAB_SIZE, count)
        if what in ("start", "fork") and (what == "start" or not rows):
            ids = np.concatenate([beginning((0, 30, 66)[which % 3]), words])
            kept.append(session.start(Request(ids, (which,)), keep=bool(which % 2)))
            asked += len(ids)
        elif what == "fork":
            history = rows[which % len(rows)].history()
            ids = np.concatenate([history[: max(1, len(history) - which % 9)], words])[:100]
            kept.append(session.start(Request(ids, (which,)), keep=True))
            asked += len(ids)
        elif what == "extend" and (able := [row for row in rows if row.keep and session.room_for_turn(row, count)]):
            session.extend(row := able[which % len(able)], words, (which,))
            asked += len(row.history())
        elif what == "drop" and kept:
            session.drop(kept.pop(which % len(kept)))
            asked = -1 << 30  # it may not have been sampled
        elif what == "renew":
            session.device.renew([])
        elif session.busy:
            session.advance()
    finish(session)
    if asked >= 0:
        assert sum(counts(engine)) == asked
    assert engine.last_stats.cache_bytes <= 2 * BYTES[family] * budget
    if not seen:
        return
    sequences, found = [ids for ids, _ in seen], torch.stack([logits for _, logits in seen]).log_softmax(-1)
    # Gemma's and Llama's own norms round to float32, the fast runner's do not
    within = 1e-5 if family == "gemma2" else 1e-9
    assert (found - anew(engine, forward, sequences)).abs().max() < within
    padded = pad_sequence([torch.from_numpy(ids) for ids in sequences], batch_first=True)
    with torch.no_grad():  # a causal model does not see the padding on the right
        logits = model(input_ids=padded, attention_mask=torch.ones_like(padded)).logits
    ends = torch.tensor([len(ids) - 1 for ids in sequences])
    assert (found - logits[torch.arange(len(seen)), ends].log_softmax(-1)).abs().max() < 1e-4


def anew(engine: Engine, forward: Callable[[Step], torch.Tensor], sequences: list[IntArray]) -> torch.Tensor:
    """`[n, V]` the log-probabilities after sequences, each computed whole by itself in a memory of its own."""
    cache = KVCache(engine._runner.layer_shapes, 1 << 62, torch.float64, torch.device("cpu"))
    lengths = [len(ids) for ids in sequences]
    cache.open(1, 1, sum(map(block_capacity, lengths)))
    pieces = [Piece((Span(cache.allocate(length), length),), length) for length in lengths]
    ids, positions = torch.from_numpy(np.concatenate(sequences)), torch.cat([torch.arange(n) for n in lengths])
    last, attended = torch.tensor(lengths).cumsum(0) - 1, PrefillAttention(cache, pieces)
    step = Step(token_ids=ids, positions=positions, last=last, attention=attended, histories=lambda: sequences)
    with torch.inference_mode():
        return forward(step).log_softmax(-1)


def test_chats_keep_what_they_said_and_a_prompt_that_begins_as_another_takes_no_square_of_memory() -> None:
    engine = Engine(tiny_model("llama"), kv_cache_bytes=1 << 22)
    session = engine.serving_session(GREEDY, policy_version=0, rows=4, own_tokens=6)
    said, chats = iter(prompts([20] * 30, seed=2)), prompts([200], seed=1) * 3
    for turn in range(6):
        for number in range(len(chats)):
            before = session.stats().prefill_tokens
            chats[number] = np.concatenate([chats[number], next(said)])
            session.start(Request(chats[number], (turn, number)))
            chats[number] = np.concatenate([chats[number], only(session).token_ids])
            computed = session.stats().prefill_tokens - before
            assert computed <= (220 if turn == number == 0 else 20 + 6 + 20 if turn <= 1 else 21)
    # its own tokens go through the kernel that keeps no scores
    model, (long,) = tiny_model("llama", max_position_embeddings=4096), prompts([3000], seed=3)
    session = Engine(model, kv_cache_bytes=1 << 22).serving_session(GREEDY, policy_version=0, rows=2, own_tokens=6)
    session.start(Request(long[:8]))
    finish(session)
    session.start(Request(long))
    with LiveMemory() as memory:
        answer = only(session)
    assert memory.largest < 3000 * 3000 // 4
    assert_plain(model, [Request(long)], [answer])


def test_a_session_is_over_when_its_engine_is_called() -> None:
    _, engine, session = made("llama")
    row = session.start(Request(NINE), keep=True)
    finish(session)
    engine([Request(NINE)], GREEDY, policy_version=0)
    session.extend(row, NINE, (1,))
    raises(GenerationError, "this session is over", finish, session)


def test_windows_that_do_not_reach_the_attention_are_refused_by_the_runner_with_a_cache() -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(0)
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, **heads, sliding_window=24)).eval()
    engine, asked = Engine(model), [Request(prompts([60])[0])]
    assert engine.runner == "recompute"
    assert_plain(model, asked, engine(asked, GREEDY, policy_version=0))

"""What is held is not computed again, whoever asks for it, and it changes no token: counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import assert_plain, finish, generated, prompts, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_memory import Largest
from tiny_models import VOCAB_SIZE, tiny_model, without_the_attention_interface
from torch.nn.utils.rnn import pad_sequence
from transformers import PhimoeConfig, PhimoeForCausalLM

from covey.errors import GenerationError
from covey.pytorch.engine import Engine, Session, attention
from covey.pytorch.engine.attention import Piece, PrefillAttention, Span
from covey.pytorch.engine.cache import KVCache, block_capacity
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.engine.runner import Step
from covey.rollout.turns import Row
from covey.types import IntArray, Request, SamplingSettings

MODELS = ("llama", "gemma2", "gpt2")  # fast; with windows and soft caps; general
BYTES = {"llama": 256, "gemma2": 256, "gpt2": 512}
"""Of keys and values of a token in float32."""
GREEDY = SamplingSettings(temperature=0.0, max_tokens=6)
SAMPLED = SamplingSettings(temperature=0.8, max_tokens=6)


def session_of(engine: Engine, settings: SamplingSettings = GREEDY, **options: Any) -> Session:
    defaults: dict[str, Any] = {"rows": 8, "own_tokens": 150, "prompt_lengths": [100]}
    return engine.session(settings, policy_version=engine.policy_version, **(defaults | options))


def made(family: str) -> tuple[Any, Engine, Session]:
    model = tiny_model(family)
    engine = Engine(model)
    return model, engine, session_of(engine)


def counts(engine: Engine) -> tuple[int, int]:
    return engine.last_stats.prefill_tokens, engine.last_stats.reused_tokens


def beginning(length: int) -> IntArray:
    return prompts((length,), seed=7)[0]


def after(ids: IntArray, lengths: tuple[int, ...]) -> list[IntArray]:
    """Prompts that begin with these tokens."""
    return [np.concatenate([ids, own]) for own in prompts(lengths)]


def start(session: Session, asked: list[IntArray], **options: Any) -> list[Row]:
    return [session.start(Request(ids, (i,)), **options) for i, ids in enumerate(asked)]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("shared", [20, 80])
def test_common_instructions_are_prefilled_once(family: str, shared: int) -> None:
    """In one pass, and again by a later call of the same session; short ones are copied, long ones shared."""
    model, engine, session = made(family)
    asked = after(beginning(shared), (5, 9, 1, 30))
    expected = [generated(model, ids) for ids in asked]
    rows = start(session, asked)
    finish(session)
    assert [row.own for row in rows] == expected
    assert counts(engine) == (shared + 5 + 9 + 1 + 30, 3 * shared)
    (later,) = prompts((4,), seed=3)
    row = session.start(Request(ids := np.concatenate([beginning(shared), later])))
    finish(session)
    assert row.own == generated(model, ids)
    assert counts(engine) == (shared + 5 + 9 + 1 + 30 + 4, 4 * shared)
    # so in a plain call
    assert texts(engine([Request(ids, (i,)) for i, ids in enumerate(asked)], GREEDY, policy_version=0)) == expected
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
        asked = [np.concatenate([history, [5, 6, 7]]) for history in histories]
        rows = [session.start(Request(ids, (i, turn))) for i, ids in enumerate(asked)]
        before = counts(engine)[0]
        finish(session)
        assert [row.own for row in rows] == [generated(model, ids) for ids in asked]
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
    whole = first.history()
    before = counts(engine)[0]
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
    for _ in range(3):
        session.advance()
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
    again = start(session, asked)
    finish(session)
    assert counts(engine)[0] == 2 * (70 + 5 + 9)  # the beginning too is computed anew
    assert [row.own for row in again] == [generated(model, ids) for ids in asked]


def test_products_are_held_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel does without the products of all queries and keys: soft caps, windows, masks or none."""
    monkeypatch.setattr(attention, "_MOST_SCORES", 300)
    model, _, session = made("gemma2")
    rows = start(session, asked := after(beginning(70), (5, 9)))
    finish(session)
    assert [row.own for row in rows] == [generated(model, ids) for ids in asked]


def test_a_model_without_a_cache_computes_everything() -> None:
    model = without_the_attention_interface(tiny_model("gpt2"))
    engine = Engine(model)
    session = session_of(engine)
    (ids,) = prompts((9,))
    rows = start(session, [ids, ids], keep=True)
    finish(session)
    assert rows[0].own == rows[1].own == generated(model, ids)
    assert counts(engine) == (9, 9)  # in one pass
    for row in rows:
        session.extend(row, np.array([5]), (2,))
    finish(session)
    assert rows[0].own[7:] == rows[1].own[7:] == generated(model, np.concatenate([ids, rows[0].own[:7]]))
    assert counts(engine) == (9 + 16, 9 + 16)
    assert session.device._tree.find(ids) == (None, 0)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """(what is done, to which conversation, tokens said, seed) each."""
    what = st.sampled_from(["start", "fork", "extend", "extend", "drop", "advance", "renew"])
    number = st.integers(0, 1 << 16)
    return draw(st.lists(st.tuples(what, number, st.integers(1, 40), st.integers(0, 2)), min_size=3, max_size=25))


@pytest.mark.parametrize("family", MODELS)
@given(story=stories(), budget=st.sampled_from([260, 420, 5000]), slots=st.sampled_from([1, 3, 6]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_story_is_as_if_everything_were_computed_anew(
    family: str, story: list[tuple[str, int, int, int]], budget: int, slots: int
) -> None:
    """In float64, at every token, whatever was held, shared or given up meanwhile."""
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
    kept: list[Row] = []
    asked = 0
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
    sequences = [ids for ids, _ in seen]
    found = torch.stack([logits for _, logits in seen]).log_softmax(-1)
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
    step = Step(
        token_ids=torch.from_numpy(np.concatenate(sequences)),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        last=torch.tensor(lengths).cumsum(0) - 1,
        attention=PrefillAttention(cache, pieces),
        histories=lambda: sequences,
    )
    with torch.inference_mode():
        return forward(step).log_softmax(-1)


def test_chats_that_share_long_instructions_keep_what_they_said() -> None:
    """Each turn costs what is new in it, however many take turns, while there is memory."""
    engine = Engine(tiny_model("llama"), kv_cache_bytes=1 << 22)
    session = engine.serving_session(GREEDY, policy_version=0, rows=4, own_tokens=6)
    said = iter(prompts([20] * 30, seed=2))
    chats = prompts([200], seed=1) * 3
    for turn in range(6):
        for number in range(len(chats)):
            before = session.stats().prefill_tokens
            chats[number] = np.concatenate([chats[number], next(said)])
            row = session.start(Request(chats[number], (turn, number)))
            chats[number] = np.concatenate([chats[number], finish(session)[id(row)].token_ids])
            computed = session.stats().prefill_tokens - before
            assert computed <= (220 if turn == number == 0 else 20 + 6 + 20 if turn <= 1 else 21)


def test_a_prompt_that_begins_as_another_one_takes_no_square_of_memory() -> None:
    """Its own tokens go through the kernel that keeps no scores."""
    model = tiny_model("llama", max_position_embeddings=4096)
    session = Engine(model, kv_cache_bytes=1 << 22).serving_session(GREEDY, policy_version=0, rows=2, own_tokens=6)
    (long,) = prompts([3000], seed=3)
    session.start(Request(long[:8]))
    finish(session)
    with Largest() as largest:
        row = session.start(Request(long))
        answer = finish(session)[id(row)]
    assert largest.numel < 3000 * 3000 // 4
    assert_plain(model, [Request(long)], [answer])


def test_a_session_is_over_when_its_engine_is_called() -> None:
    engine = Engine(tiny_model("llama"))
    session = session_of(engine)
    (ids,) = prompts([9])
    row = session.start(Request(ids), keep=True)
    finish(session)
    engine([Request(ids)], GREEDY, policy_version=0)
    session.extend(row, ids, (1,))
    with pytest.raises(GenerationError, match="this session is over"):
        finish(session)


def test_only_constrained_completions_record_what_was_left() -> None:
    (ids,) = prompts([9])
    asked = [Request(ids, (1,)), Request(ids, (2,), choices=((1, 2, 3), (1, 5, 6), (4,)))]
    free, bound = Engine(tiny_model("llama"))(asked, SamplingSettings(max_tokens=8), policy_version=0)
    assert free.support is None
    assert len(bound.support.offsets) == len(bound.token_ids) + 1


def test_windows_that_do_not_reach_the_attention_are_refused_by_the_runner_with_a_cache() -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(0)
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, **heads, sliding_window=24)).eval()
    engine = Engine(model)
    assert engine.runner == "recompute"
    (ids,) = prompts([60])
    (found,) = engine([Request(ids)], GREEDY, policy_version=0)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.concatenate([ids, found.token_ids]))[None]).logits[0, 59:-1]
    own = logits.log_softmax(-1)[torch.arange(6), torch.from_numpy(found.token_ids)]
    np.testing.assert_allclose(found.logprobs, own.numpy(), atol=1e-4)

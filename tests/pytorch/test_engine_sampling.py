"""The sampler against a float64 NumPy reference that sorts; random streams; the stop-string matcher."""

from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.pytorch.engine.sampling import sample
from covey.rollout.drawing import StopMatcher, stream_key, uniforms
from covey.types import SamplingSettings


def reference_kept(logits: np.ndarray, s: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """Kept mask `[V]` and probabilities `[V]` before cutting, by sorting, in float64."""
    scaled = logits.astype(np.float64) / (s.temperature or 1.0)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.ones(len(p), dtype=bool)
    if s.top_k:
        kept[order[s.top_k :]] = False
    if s.top_p < 1:
        ranked = p[order] * kept[order]
        before = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
        kept[order[before >= s.top_p * ranked.sum()]] = False
    if s.min_p:
        kept &= p >= s.min_p * p.max()
    return kept, p


CHOSEN = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 4, 90]),
        "top_p": st.sampled_from([0.2, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.5]),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([5, 97, 256, 700, 3000]), st.sampled_from([0.05, 1.0, 8.0]), CHOSEN)
def test_support_token_and_logprob_match_the_sorting_reference(
    seed: int, vocab: int, spread: float, chosen: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((4, vocab))).astype(np.float32)
    chosen |= {"top_k": min(chosen["top_k"], vocab)}
    s, u = SamplingSettings(**chosen, keep_support=True), rng.random(4)
    draw = sample(torch.from_numpy(logits.copy()), s, u)
    free = sample(torch.from_numpy(logits.copy()), SamplingSettings(**chosen), u)
    np.testing.assert_array_equal(draw.token_ids, free.token_ids)
    for row in range(4):
        kept, p = reference_kept(logits[row], s)
        token = draw.token_ids[row]
        found = np.isin(np.arange(vocab), draw.support[row]) if draw.support is not None else np.ones(vocab, dtype=bool)
        # float32 may decide differently about a token whose probability sits on a threshold: one, not more
        assert (found ^ kept).sum() <= 1
        assert found[token]
        assert abs(draw.logprobs[row] - np.log(p[token] / p[found].sum())) < 1e-4
        assert abs(free.logprobs[row] - np.log(p[token])) < 1e-4


def test_whole_vocabulary_is_the_inverse_cdf_in_vocabulary_order() -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((1, 1000))).astype(np.float32)
    _, p = reference_kept(logits[0], SamplingSettings())
    cumulative = np.cumsum(p)
    u = rng.random(3000)
    draw = sample(torch.from_numpy(logits).repeat(3000, 1), SamplingSettings(), u)
    expected = np.searchsorted(cumulative, u, side="right")
    edge = np.abs(cumulative[expected] - u) + np.abs(cumulative[np.maximum(expected - 1, 0)] - u)
    agree = draw.token_ids == expected
    assert agree[edge > 1e-5].all()
    assert agree.mean() > 0.99


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_tokens_of_probability_zero_are_never_drawn(vocab: int) -> None:
    """Extreme u, zeros at both ends and in long gaps: the token always has positive probability."""
    logits = torch.full((6, vocab), -float("inf"))
    logits[:, [vocab // 3, 2 * vocab // 3]] = 0.0
    u = np.array([0.0, 2.0**-53, 0.4999999, 0.5, 0.75, 1 - 2.0**-53])
    for s in (SamplingSettings(), SamplingSettings(top_p=0.99), SamplingSettings(min_p=0.1)):
        draw = sample(logits.clone(), s, u)
        assert set(draw.token_ids) == {vocab // 3, 2 * vocab // 3}
        first, second = draw.token_ids[0], draw.token_ids[-1]
        assert draw.token_ids.tolist() == [first] * 3 + [second] * 3
        np.testing.assert_allclose(draw.logprobs, np.log(0.5), atol=1e-6)


def test_greedy_takes_the_top_token_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    draw = sample(logits, SamplingSettings(temperature=0.0, top_k=1), np.array([0.99, 0.99]))
    assert draw.token_ids.tolist() == [1, 0]
    expected = -np.log(np.exp([-2.0, 0.0, -1.0]).sum())  # log softmax of the largest, by hand
    assert abs(draw.logprobs[0] - expected) < 1e-6
    assert draw.support is None


def test_uniforms_depend_on_stream_and_position_only() -> None:
    keys = np.array([stream_key((0, 1, 2, j)) for j in range(200)], dtype=np.uint64)
    together = np.stack([uniforms(keys, np.full(200, t, dtype=np.uint64)) for t in range(50)], axis=1)
    assert uniforms(keys[17:18], np.array([33], dtype=np.uint64))[0] == together[17, 33]
    assert 0 <= together.min() <= together.max() < 1
    assert len(np.unique(together)) == together.size
    counts = np.histogram(together, bins=20, range=(0, 1))[0]
    assert np.sum((counts - 500) ** 2 / 500) < 60  # chi-square, 19 degrees of freedom
    neighbours = np.corrcoef(together)[np.triu_indices(200, 1)]
    assert abs(neighbours.mean()) < 0.01
    # SplitMix64: its first output when seeded with 0 is 0xE220A8397B1DCDAF
    (u,) = uniforms(np.array([0], dtype=np.uint64), np.array([0], dtype=np.uint64))
    assert u == (0xE220A8397B1DCDAF >> 11) / 2**53


STREAMS = st.lists(st.integers(-(2**70), 2**70), max_size=4)


@given(STREAMS, STREAMS)
def test_stream_keys_differ_when_streams_do(a: list[int], b: list[int]) -> None:
    assert (stream_key(a) == stream_key(b)) == (a == b)


LETTERS = "ab é€😀\n"


@settings(max_examples=60, deadline=None)
@given(st.text(LETTERS, max_size=25), st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_matcher_fires_at_the_first_token_that_completes_a_string(text: str, stops: list[str]) -> None:
    """Each token is a byte: every character beyond ASCII takes several."""
    tokenizer = byte_tokenizer()
    matcher = StopMatcher(tokenizer, stops)
    fired = [matcher.push(token) for token in tokenizer(text)["input_ids"]]
    assert len(fired) == len(text.encode())
    ends = [len(text[: text.find(s) + len(s)].encode()) for s in stops if s in text]
    assert fired.index(True) == min(ends) - 1 if ends else not any(fired)


class LeadingSpaceDropper:
    """Decodes like sentencepiece: the space before the first word disappears."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join((" one", " two", " END", ".")[i] for i in ids).removeprefix(" ")


def test_stop_matcher_sees_spaces_that_a_tokenizer_drops_at_the_start() -> None:
    matcher = StopMatcher(LeadingSpaceDropper(), [" END"])
    assert [matcher.push(i) for i in (2, 0, 1, 3, 2)] == [False, False, False, False, True]

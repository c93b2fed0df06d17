"""`/v1/score`: log-probabilities of given tokens are a learner's, whatever adapter is served; and what is refused."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from servers import RunningServer, adapted, at_once, begun, refused

from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.types import Batch, Episode

IDS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 20, 21], [5, 6, 7, 8, 30], [40, 41]]
START = [3, 3, 2, 1]


def scores_of(model: Any, server: RunningServer, temperature: float) -> list[list[float]]:
    """As a learner whose policy is this model scores the same sequences."""
    policy = Policy.load(model, server.tokenizer)
    sampled = [np.arange(len(ids)) >= start for ids, start in zip(IDS, START, strict=True)]
    none = np.zeros(9, np.float32)
    episodes = [Episode(np.array(i), s, none[: len(i)], "", "stop", 0) for i, s in zip(IDS, sampled, strict=True)]
    mask = np.arange(3) < np.array([[e.num_sampled] for e in episodes])
    batch = Batch(tuple(episodes), np.arange(4), np.zeros((4, 3), np.float32), mask, np.zeros((4, 3), np.float32))
    found, _ = Learner(policy, learning_rate=0.1).scores(batch, np.arange(4), temperature=temperature)
    return [row[own].tolist() for row, own in zip(found, mask, strict=True)]


def test_scores_are_a_learner_s(fresh: RunningServer) -> None:
    def asked(**more: Any) -> Any:
        return fresh.ask("/v1/score", token_ids=IDS, start=START, **more).json()

    for version, seed in ((0, 0), (1, 1), (2, 2)):
        if seed:
            assert fresh.upload(seed).status_code == 200
        answer = asked(temperature=0.7, top_k=3)
        model = adapted(seed) if seed else fresh.model
        for score, own in zip(answer["scores"], scores_of(copy.deepcopy(model), fresh, 0.7), strict=True):
            np.testing.assert_allclose(score["logprobs"], own, atol=2e-5)
        assert (answer["policy_version"], answer["usage"]["prompt_tokens"]) == (version, 18)
        with torch.no_grad():
            logp = (model(torch.tensor([IDS[0]])).logits[0, 2:-1] / 0.7).log_softmax(-1)
        best = answer["scores"][0]
        np.testing.assert_allclose(best["top_logprobs"], logp.topk(3).values, atol=2e-5)
        assert best["top_ids"] == logp.topk(3).indices.tolist()
        assert asked(temperature=0.0)["scores"] == asked()["scores"]  # greedy: log-probabilities are those at 1
    assert asked(policy_version=2)["policy_version"] == 2
    assert "this server holds 2" in refused(fresh.ask("/v1/score", token_ids=IDS, start=START, policy_version=1), 409)


def test_completions_go_on_meanwhile(server: RunningServer) -> None:
    long = begun(server.ask, prompt=[5, 6, 7], max_tokens=100, ignore_eos=True, seed=1)
    bodies = [{"token_ids": IDS, "start": START}] * 8
    answers = at_once(lambda body: server.ask("/v1/score", **body).json()["scores"], bodies)
    assert all(answer == answers[0] for answer in answers)
    alone = server.ask(prompt=[5, 6, 7], max_tokens=100, ignore_eos=True, seed=1).json()
    assert long.result().json()["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": [0, 1, 1, 1]}, "start.0: 0 must be 1 to 5"),
        ({"start": [1, 1, 1, 2]}, "start.3: 2 must be 1 to 1"),
        ({"start": [1]}, "start has 1 entries for 4 sequences"),
        ({"token_ids": [[5, 10**6]], "start": [1]}, "the vocabulary has"),
        ({"token_ids": [[5] * 70_000], "start": [1]}, "send up to 65536 ids"),
        ({"token_ids": [[5] * 3000], "start": [1], "top_k": 1000}, "1048576 ids times top_k"),
        ({"token_ids": [[5] * 5000], "start": [1]}, "the context has"),
        ({"token_ids": [[]], "start": [1]}, "token_ids.0"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"prompt": "x"}, "knows no such field"),
        ({"model": "other"}, "this server has"),
    ],
)
def test_what_is_refused(server: RunningServer, change: dict[str, Any], words: str) -> None:
    assert words in refused(
        server.ask("/v1/score", **{"token_ids": IDS, "start": START} | change), 404 if "model" in change else 400
    )

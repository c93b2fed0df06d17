"""Every family against transformers' own code: log-probabilities, gradients, greedy tokens, published weights.

The plain model is made beside the policy from the same arguments, with PEFT's own layers, and Covey never touches it.
Two of three prompts are longer than the families' sliding windows.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_policy import EPISODES, PACK, TEMPERATURE, WEIGHTS, assert_gradients, fill, gradients, in_order
from tiny_models import EVERY_FAMILY, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor

from covey.pytorch import Policy
from covey.pytorch.engine import Engine
from covey.types import Completion, IntArray, Request, SamplingSettings

PROMPTS = [np.random.default_rng(7).integers(4, VOCAB_SIZE, length) for length in (4, 9, 17)]
TOKENS = 12


def policy_of(family: str, *, use_peft: bool = True, **options: Any) -> Policy:
    policy = Policy.load(tiny_model(family), tiny_tokenizer(), use_peft=use_peft, lora_r=4, **options)
    if use_peft:
        fill(policy, 1)
    return policy


def plain_of(family: str, policy: Policy) -> Any:
    """A model of transformers and PEFT alone with the policy's trained weights."""
    plain: Any = tiny_model(family)
    if policy.uses_peft:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an attribute's old name; ranks of experts that a layer does not have
            plain = get_peft_model(plain, copy.deepcopy(policy.model.active_peft_config)).eval()
    state = policy.state_dict()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state.pop(name))
    assert not state
    return plain


def plain_scores(plain: Any) -> Tensor:
    """`[U]` log-probabilities of the pack's targets, one sequence at a time."""
    found = []
    for row in PACK.rows:
        ids, at = EPISODES[row].token_ids, np.flatnonzero(EPISODES[row].sampled)
        logp = (plain(torch.from_numpy(ids)[None], use_cache=False).logits[0, at - 1] / TEMPERATURE).log_softmax(-1)
        found.append(logp[torch.arange(len(at)), ids[at]])
    return torch.cat(found)[in_order()]


def plain_greedy(plain: Any, prompt: IntArray) -> list[int]:
    """The tokens that transformers' `generate` chooses with its own cache."""
    ids = torch.from_numpy(prompt)[None]
    out = plain.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def plain_logprobs(plain: Any, prompt: IntArray, completion: Completion) -> Tensor:
    """`[T]` log-probabilities of what was sampled."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]))
    logp = plain(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found: Tensor = logp.gather(1, ids[len(prompt) :, None])[:, 0]
    return found


def assert_parity(family: str, policy: Policy) -> None:
    plain = plain_of(family, policy)
    expected = plain_scores(plain)
    (expected * WEIGHTS).sum().backward()
    expected_grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    scores = policy.score(PACK, temperature=TEMPERATURE)
    torch.testing.assert_close(scores.logp, expected, rtol=1e-4, atol=1e-4)
    grads = gradients(policy, (scores.logp * WEIGHTS).sum())
    assert len(grads) >= 14
    assert_gradients(grads, expected_grads)


def assert_published(family: str, policy: Policy) -> None:
    """Before an update and after it: the tokens of `generate`, and the log-probabilities that go to the trainer."""
    engine = Engine(policy.model)
    chosen = []
    for version in range(2):
        fill(policy, 1 + version)
        engine.publish(policy.weights(version))
        plain = plain_of(family, policy)
        greedy = SamplingSettings(temperature=0.0, max_tokens=TOKENS)
        found = engine([Request(ids) for ids in PROMPTS], greedy, policy_version=version)
        chosen.append([c.token_ids.tolist() for c in found])
        assert chosen[-1] == [plain_greedy(plain, ids) for ids in PROMPTS]
        sampled = engine([Request(ids) for ids in PROMPTS], SamplingSettings(max_tokens=TOKENS), policy_version=version)
        for ids, completion in zip(PROMPTS, sampled, strict=True):
            expected = plain_logprobs(plain, ids, completion)
            torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("use_peft", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_scores_and_gradients(family: str, use_peft: bool) -> None:
    assert_parity(family, policy_of(family, use_peft=use_peft))


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_greedy_tokens_of_what_was_published(family: str) -> None:
    assert_published(family, policy_of(family))


def test_adapters_on_experts(tmp_path: Path) -> None:
    """What PEFT makes of "all-linear" for a mixture: wrappers around the experts' and the router's own parameters."""
    policy = policy_of("qwen3_moe", lora_config=LoraConfig(r=4, target_modules="all-linear"))
    assert sum("mlp.experts" in name for name, _ in policy.named_trainable_parameters()) == 8
    assert_parity("qwen3_moe", policy)
    assert_published("qwen3_moe", policy)
    policy.save_pretrained(tmp_path)
    again = Policy.load(tiny_model("qwen3_moe"), tiny_tokenizer(), adapter=tmp_path)
    assert torch.equal(again.score(PACK).logp, policy.score(PACK).logp)


def test_all_linear_leaves_experts_to_those_who_ask_for_them() -> None:
    """So that an adapter is plain LoRA, which servers and files take."""
    for family in ("qwen3_moe", "gpt_oss"):
        policy = policy_of(family)
        assert all("self_attn" in name for name, _ in policy.named_trainable_parameters())
        assert len(policy.weights(0).sha256) == 64

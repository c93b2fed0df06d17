"""`/inference/v1/generate`: vLLM's route from token ids to token ids, which `renderers` and `verifiers` use.

    {"model": "m", "token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "stop_token_ids": [2], "logprobs": 1}}
    {"request_id": "cmpl-1f", "choices": [{"index": 0, "token_ids": [7, 2], "finish_reason": "stop", "logprobs":
        {"content": [{"token": "token_id:7", "token_id": 7, "logprob": -0.4}, {...}]}}], ...}

The form is that of vLLM's source (protocol.py of its token_in_token_out routes); `renderers` 0.1.12 reads `token`,
vLLM's own client `token_id`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from covey.serving.requests import CompletionRequest, TokenId, checked
from covey.types import Completion

_GIVEN_BESIDE = {"model", "prompt", "stream", "stream_options"}


class TokenSampling(CompletionRequest):
    """`sampling_params` of a request. Its own fields are of texts, and of what this server does not return."""

    detokenize: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    routed_experts_prompt_start: int = 0


class GenerateRequest(BaseModel):
    """The body of a request to `/inference/v1/generate`. `cache_salt`, `priority` and `request_id` change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: Literal[False] = False
    request_id: str = Field(default="", max_length=1000)
    cache_salt: str = Field(default="", max_length=1000)
    priority: int = 0

    def completion(self, longest: int) -> CompletionRequest:
        """The same as a request for completions, of `longest` tokens where it says no `max_tokens`.

        Raises `RequestError`: a sampling parameter is not served, or has the wrong type.
        """
        served = TokenSampling.model_fields.keys() - _GIVEN_BESIDE
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        return checked(TokenSampling, {"max_tokens": longest} | given, served, prompt=self.token_ids)


def generated(completions: Sequence[Completion], prompt_tokens: int) -> dict[str, Any]:
    """The answer: a choice for each completion. `sampling_mask` has the ids that each token was drawn from, if kept."""
    sampled = sum(len(completion.token_ids) for completion in completions)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
    choices = [{"index": index, **_choice(completion)} for index, completion in enumerate(completions)]
    version = min(completion.policy_version for completion in completions)
    return {"request_id": f"cmpl-{uuid.uuid4().hex}", "choices": choices, "policy_version": version, "usage": usage}


def _choice(completion: Completion) -> dict[str, Any]:
    ids, kept = completion.token_ids.tolist(), completion.support
    pairs = zip(ids, completion.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": logprob} for token, logprob in pairs]
    found = {"token_ids": ids, "finish_reason": completion.finish_reason, "logprobs": {"content": content}}
    if kept is not None:
        found["sampling_mask"] = [part.tolist() for part in np.split(kept.ids, kept.offsets[1:-1])]
    return found

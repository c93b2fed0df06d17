"""What clients may ask: OpenAI's fields, and those that training needs besides."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from covey.types import SamplingSettings

TokenId = Annotated[int, Field(ge=0)]
MAX_COMPLETIONS = 1024
"""Of one request."""
_SMALLEST_TEMPERATURE = 0.001


class _Sampling(BaseModel):
    # unknown fields are ignored, as OpenAI's servers do: clients send many
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str = ""
    n: int = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    return_token_ids: bool = False
    # beyond OpenAI: which random stream each completion draws from, what it may be, which weights it must come from
    streams: list[list[int]] | None = Field(default=None, max_length=MAX_COMPLETIONS)
    choices: list[list[list[TokenId]] | None] | None = Field(default=None, max_length=MAX_COMPLETIONS)
    return_support: bool = False
    policy_version: int | None = None

    @field_validator("temperature")
    @classmethod
    def _no_overflow(cls, value: float) -> float:
        # one request whose logits overflow would end the decode step of all
        if 0 < value < _SMALLEST_TEMPERATURE:
            raise ValueError(f"must be 0 (greedy) or at least {_SMALLEST_TEMPERATURE}")
        return value

    def settings(self, max_tokens: int, eos_token_ids: tuple[int, ...]) -> SamplingSettings:
        """As the engine understands it."""
        stop = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        ends = tuple(self.stop_token_ids) if self.stop_token_ids is not None else eos_token_ids
        return SamplingSettings(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=max_tokens,
            eos_token_ids=() if self.ignore_eos else ends,
            stop_strings=tuple(stop),
            keep_support=self.return_support and self.temperature > 0,
        )


class CompletionRequest(_Sampling):
    """`/v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] = False

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ChatRequest(_Sampling):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

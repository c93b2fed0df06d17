"""Reward models among reward functions: a sequence classifier, with its own tokenizer, scores prompt and completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from covey.errors import ConfigError, RewardError
from covey.pytorch.models.loading import require_tokenizer

_BATCH = 16
"""Texts in one forward pass of a reward model."""


class RewardModel:
    """A sequence-classification model as a reward function: its only output is the reward."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        config: Any = model.config
        # The reward is read at the last token before the padding, so the model has to know what padding is.
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.model, self.tokenizer = model.eval(), tokenizer
        self.__name__ = str(getattr(config, "_name_or_path", "") or type(model).__name__).rstrip("/").split("/")[-1]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N completions.

        Raises:
            RewardError: The tokenizer has no chat template and the prompts are conversations.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), _BATCH):
            batch = self.tokenizer(
                text=texts[start : start + _BATCH],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(next(self.model.parameters()).device)
            with torch.inference_mode():
                logits = self.model(**{name: x for name, x in batch.items() if name != "token_type_ids"}).logits
            scores += logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        if not self.tokenizer.chat_template:
            raise RewardError(
                f"{self.__name__}: its tokenizer has no chat template and the prompts are conversations; set one, or "
                "give prompts as strings",
                function=self.__name__,
            )
        if prompt[-1]["role"] == "assistant":  # the completion goes on with this message
            said = {**completion[0], "content": prompt[-1]["content"] + completion[0]["content"]}
            prompt, completion = prompt[:-1], [said, *completion[1:]]
        return str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))


def with_models(reward_funcs: Any, tokenizers: Any, *, trust_remote_code: bool = False) -> tuple[list[Any], list[Any]]:
    """Reward functions in which every model, or name of one, is a `RewardModel`.

    Raises:
        ConfigError: another number of tokenizers than of rewards, or a model that cannot be loaded.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    own = [tokenizers] if tokenizers is not None else [None] * len(given)
    own = list(tokenizers) if isinstance(tokenizers, list | tuple) else own
    if len(own) != len(given):
        raise ConfigError(
            f"reward_processing_classes: {len(own)} tokenizers, whose number must match that of the {len(given)} "
            "reward functions; give one for each, None for those that are functions"
        )
    found: list[Any] = []
    for index, (reward, tokenizer) in enumerate(zip(given, own, strict=True)):
        require_tokenizer(tokenizer, f"reward_processing_classes[{index}]")
        if isinstance(reward, str):
            name = reward
            try:
                reward = AutoModelForSequenceClassification.from_pretrained(
                    name, num_labels=1, trust_remote_code=trust_remote_code
                )
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"reward_funcs[{index}]={name!r}: cannot be loaded as a sequence-classification model "
                    f"({str(error).splitlines()[0]:.200}); give a folder or hub id of one, or a function"
                ) from error
        if isinstance(reward, nn.Module):
            if tokenizer is None:
                where = str(getattr(reward.config, "_name_or_path", ""))
                try:
                    tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
                except (OSError, ValueError) as error:
                    raise ConfigError(
                        f"reward_funcs[{index}]: no tokenizer is found at {where!r}; pass reward_processing_classes"
                    ) from error
            reward = RewardModel(reward, tokenizer)
            own[index] = reward.tokenizer
        found.append(reward)
    return found, own

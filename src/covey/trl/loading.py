"""Models that a trainer is given: the policy with its tokenizer, and reward models among reward functions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerBase, TorchAoConfig

from covey.errors import ConfigError, RewardError
from covey.model_files import PACKAGE_PREFIX
from covey.pytorch.models.loading import auto_class, locate, require_tokenizer
from covey.trl.arguments import GRPOConfig
from covey.trl.translate import as_mapping

log = logging.getLogger("covey.trl")

_BATCH = 16  # texts in one forward pass of a reward model


def place_model(
    args: GRPOConfig, model: Any, tokenizer: Any, *, lora: bool, quantization_config: Any = None
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Load what Covey's own loading does not serve; else say what it shall load."""
    options = dict(as_mapping("model_init_kwargs", args.model_init_kwargs))
    how = options.pop("quantization_config", None) if quantization_config is None else quantization_config
    if isinstance(model, nn.Module):
        if how is not None:
            raise ConfigError("quantization_config: the model is loaded already; load it with that, or pass its name")
        if options:
            warnings.warn("model_init_kwargs have no effect: the model is loaded already", UserWarning, stacklevel=3)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model_source(model))
        return (model, tokenizer), {"dtype": "auto"}
    dtype = str(options.pop("dtype", options.pop("torch_dtype", None)) or "float32").removeprefix("torch.")
    if dtype in ("bfloat16", "float16") and not lora:
        log.warning("model_init_kwargs: dtype %s: weights that are trained are kept in float32, see bf16", dtype)
        dtype = "float32"
    for name in ("device_map", "trust_remote_code", "attn_implementation", "use_cache"):
        options.pop(name, None)  # placed by the trainer; attention is Covey's own, chosen by a probe
    if options.get("revision") == "main":
        del options["revision"]
    quantised = {} if how is None else _quantization(how, lora=lora)
    if how is not None and not quantised:
        options["quantization_config"] = how
    if not options:
        return (None, tokenizer), {"model": str(model), "dtype": dtype, **quantised}
    if str(model).startswith(PACKAGE_PREFIX) or str(model).endswith(".gguf"):
        given = ", ".join(sorted(options))
        raise ConfigError(
            f"{given}: {model} is a GGUF file, which Covey loads by itself, without these options of transformers; "
            "take them out, or name a folder or hub id. Plain 8-bit and nf4 quantisation serve"
        )
    locate(str(model))
    options |= {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
    known = {name: options[name] for name in ("revision", "cache_dir", "token", "trust_remote_code") if name in options}
    config = transformers.AutoConfig.from_pretrained(model, **known)
    loaded = auto_class(config).from_pretrained(model, **options)
    revision = {name: options[name] for name in ("revision", "cache_dir", "token") if name in options}
    return (loaded, tokenizer or AutoTokenizer.from_pretrained(model, **revision)), {"dtype": "auto", **quantised}


def _quantization(config: Any, *, lora: bool) -> dict[str, Any]:
    """`quantization_config` as Covey's setting; nothing where it asks for more, and transformers is to load with it."""
    if isinstance(config, Mapping):
        given = {name: value for name, value in config.items() if name != "quant_method"}
        config = BitsAndBytesConfig(**given)  # type: ignore[no-untyped-call]
    if not isinstance(config, BitsAndBytesConfig | TorchAoConfig):
        raise ConfigError(
            f"quantization_config={config!r:.200}: a {type(config).__name__}; adapters are trained on models quantised "
            "by bitsandbytes (BitsAndBytesConfig) or torchao (TorchAoConfig)"
        )
    if not lora:
        raise ConfigError("quantization_config: quantised weights cannot be trained themselves; pass peft_config")
    if isinstance(config, TorchAoConfig) or config.llm_int8_skip_modules:
        return {}
    if config.load_in_8bit:
        return {"quantization": "int8"}
    return {"quantization": "nf4"} if config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" else {}


def model_source(model: Any) -> str:
    """Where a loaded model came from."""
    config = getattr(model, "config", None)
    found = getattr(config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    if not found:
        raise ConfigError("processing_class=None: the model does not say where it came from; pass its tokenizer")
    return str(found)


def model_name(model: Any) -> str:
    """The last part of a model's name."""
    source = str(model) if isinstance(model, str | Path) else model_source(model)
    return source.rstrip("/").split("/")[-1]


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
        """Score N completions; an error for conversations that the tokenizer has no chat template for."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), _BATCH):
            how = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
            batch = self.tokenizer(text=texts[start : start + _BATCH], **how).to(next(self.model.parameters()).device)
            with torch.inference_mode():
                logits = self.model(**{name: x for name, x in batch.items() if name != "token_type_ids"}).logits
            scores += logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        if not self.tokenizer.chat_template:
            raise RewardError(
                f"{self.__name__}: its tokenizer has no chat template for conversations; set one, or give strings",
                function=self.__name__,
            )
        if prompt[-1]["role"] == "assistant":  # the completion goes on with this message
            said = {**completion[0], "content": prompt[-1]["content"] + completion[0]["content"]}
            prompt, completion = prompt[:-1], [said, *completion[1:]]
        return str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))


def with_models(reward_funcs: Any, tokenizers: Any, *, trust_remote_code: bool = False) -> tuple[list[Any], list[Any]]:
    """Reward functions in which every model, or name of one, is a `RewardModel`; and a tokenizer or None for each."""
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    one = [tokenizers] if tokenizers is not None else [None] * len(given)
    own = list(tokenizers) if isinstance(tokenizers, list | tuple) else one
    if len(own) != len(given):
        raise ConfigError(
            f"reward_processing_classes: {len(own)} tokenizers, whose number must match that of the {len(given)} "
            "reward functions; give one for each, None for those that are functions"
        )
    found: list[Any] = []
    for index, (reward, tokenizer) in enumerate(zip(given, own, strict=True)):
        require_tokenizer(tokenizer, f"reward_processing_classes[{index}]")
        if isinstance(reward, str):
            name, how = reward, {"num_labels": 1, "trust_remote_code": trust_remote_code}
            try:
                reward = transformers.AutoModelForSequenceClassification.from_pretrained(name, **how)
            except (OSError, ValueError) as error:
                of_file = f"; a function is passed itself: covey.functions.load_function({name!r})" * (":" in name)
                raise ConfigError(
                    f"reward_funcs[{index}]={name!r}: cannot be loaded as a sequence-classification model "
                    f"({str(error).splitlines()[0]:.200}); give a folder or hub id of one, or a function{of_file}"
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

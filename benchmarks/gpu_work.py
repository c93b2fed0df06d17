"""What a GRPO step has to compute and to move, by formula: the least, whoever does it. Needs nothing but Python.

Let B be the weights of all layers' projections, H = vocabulary x width those of the output head, L layers of A
attention heads of D numbers each and K key-value heads; prompts of P tokens, each with a group of completions; C
completion tokens in all, N completions, the longest of T tokens. A product with w weights takes 2 w operations a token,
attention 4 L A D for each token that a token sees (scores and mixing).

    U = prompts x P + C                                           tokens, a prompt's counted once
    S = prompts x P^2 / 2 + C x P + N x (C / N)^2 / 2             pairs of a token and one that it sees
    sampling    2 B U + 2 H C + 4 L A D S                         operations
                T x (2 bytes x (B + H) + prompts x P x kv) + N x (C / N)^2 / 2 x kv      bytes, kv = 4 L K D a token
    update      4 B U + 4 H C + 12 L A D S                        operations
                2 x 2 bytes x (B + H)                             bytes

With an adapter the weights are frozen: the update needs the forward pass and the gradients of the activations, 2 + 2 a
weight, and attention's backward takes twice its forward. The adapter's own products are left out (some percent), and so
is what is computed again on purpose. Sampling reads all weights for each token of the longest completion, and the keys
and values of a prompt once for its group. The shares in the table are these numbers over seconds times the rates that
were measured on the same card with one large product and one large copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, and bytes to and from the device's memory."""

    operations: float
    bytes: float

    def shares(self, seconds: float, rate: float, bandwidth: float) -> dict[str, float]:
        """Of what the device does in such a time; nothing where its rates are not known."""
        if seconds <= 0 or rate <= 0 or bandwidth <= 0:
            return {}
        return {"matrix_share": self.operations / seconds / rate, "bandwidth_share": self.bytes / seconds / bandwidth}


@dataclass(frozen=True, slots=True)
class Rollout:
    """What was sampled in a step.

    Attributes:
        prompts: how many.
        prompt_tokens: of each.
        completions: how many, of all prompts.
        completion_tokens: of all completions.
        longest: tokens of the longest one.
    """

    prompts: int
    prompt_tokens: float
    completions: int
    completion_tokens: float
    longest: int

    @property
    def unique(self) -> float:
        """U."""
        return self.prompts * self.prompt_tokens + self.completion_tokens

    @property
    def own_pairs(self) -> float:
        """Pairs within completions."""
        return self.completions * (self.completion_tokens / self.completions) ** 2 / 2

    @property
    def pairs(self) -> float:
        """S."""
        inside = self.prompts * self.prompt_tokens**2 / 2
        return inside + self.completion_tokens * self.prompt_tokens + self.own_pairs


def body_weights(config: Mapping[str, Any]) -> int:
    """B, from a model's `config.json`."""
    width, wide, head = config["hidden_size"], config["intermediate_size"], head_width(config)
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return int(config["num_hidden_layers"] * (2 * width * queries + 2 * width * keys + 3 * width * wide))


def head_width(config: Mapping[str, Any]) -> int:
    """D."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def sampling(config: Mapping[str, Any], done: Rollout) -> Work:
    """See the module docstring."""
    body, head = body_weights(config), config["vocab_size"] * config["hidden_size"]
    heads = config["num_hidden_layers"] * config["num_attention_heads"] * head_width(config)
    kv = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_width(config)
    operations = 2 * body * done.unique + 2 * head * done.completion_tokens + 4 * heads * done.pairs
    moved = done.longest * (2 * (body + head) + done.prompts * done.prompt_tokens * kv) + done.own_pairs * kv
    return Work(operations, moved)


def update(config: Mapping[str, Any], done: Rollout) -> Work:
    """See the module docstring."""
    body, head = body_weights(config), config["vocab_size"] * config["hidden_size"]
    heads = config["num_hidden_layers"] * config["num_attention_heads"] * head_width(config)
    operations = 4 * body * done.unique + 4 * head * done.completion_tokens + 12 * heads * done.pairs
    return Work(operations, 4 * (body + head))


def step(config: Mapping[str, Any], done: Rollout) -> Work:
    """Both."""
    one, other = sampling(config, done), update(config, done)
    return Work(one.operations + other.operations, one.bytes + other.bytes)

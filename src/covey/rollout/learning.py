"""What a run asks of the policy, the sampler and the learner of a backend, and what every sampler refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from covey.adapters import Adapter, fingerprint
from covey.algorithms import Correction, Objective, count_step, token_weights, uncertain_tokens
from covey.errors import GenerationError
from covey.rollout.drawing import check_settings
from covey.rollout.packing import TokenCounts
from covey.rollout.turns import TurnGenerator
from covey.types import Batch, BoolArray, Generator, SamplingSettings

FloatNT = NDArray[np.float32]


class PassOptions(TypedDict, total=False):
    """What `Learner.forward_backward` is told besides the batch.

    With a `correction` the old policy of the ratio, and of its clip, is the one before the first pass, also for a stale
    batch, which older weights have sampled; the factor `min(exp(trainer_old - sampler's), cap)` leads from those to it
    (decoupled PPO, arXiv 2110.00641). Without, the old policy is the one that sampled.
    """

    temperature: Required[float]  # of the sampling distribution
    max_completion_length: Required[int]  # in tokens, for `dr_grpo`
    reference: FloatNT | None  # `[N, T]` log-probabilities under the reference, for sampled-token KL estimators
    # `[N, T]` the learner's own log-probabilities under the weights before the first pass over the batch; None on that
    # pass, where the current ones are these
    trainer_old: FloatNT | None
    correction: Correction | None  # truncated importance sampling against the sampler's log-probabilities
    selected: BoolArray | None  # `[N, T]` what `objective.select` chose in the whole step
    entropy_coef: float | None  # weight of the entropy bonus where it is another one in each step


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What one pass over the step left behind, besides the gradients themselves."""

    metrics: dict[str, float]  # sums over the step, see `covey.algorithms.objective.LossTerms`
    logp: FloatNT  # `[N, T]` log-probabilities before the optimiser step, 0 where a token was not scored
    scored: BoolArray  # `[N, T]` the tokens that were
    entropy: FloatNT  # `[N, T]` entropies in nats, likewise
    kl: FloatNT | None = None  # `[N, T]` the KL over the vocabulary, likewise, where the objective has one
    divergence: FloatNT | None = None  # `[N, T]` that of a teacher, likewise
    mass: FloatNT | None = None  # `[N, T]` the teacher's probability of the ids that are compared
    tokens: TokenCounts | None = None  # what the pass was given and took, where it is known


@dataclass(frozen=True, eq=False)
class Weights:
    """What a policy publishes and a sampler takes: references, which are copied by whoever reads them.

    They are the policy's until its next optimiser step, which changes arrays in place: publish them before that.
    """

    version: int
    tensors: Callable[[], Mapping[str, Any]]
    make_adapter: Callable[[], Adapter] | None = None

    @property
    def adapter(self) -> Adapter | None:
        """What is trained beside the base model, in the host's memory; None where the model itself is."""
        return None if self.make_adapter is None else self.make_adapter()

    @cached_property
    def sha256(self) -> str:
        """Of the adapter (`Adapter.sha256`), or else of all names, shapes and values in float32."""
        if (adapter := self.adapter) is not None:
            return adapter.sha256
        held = self.tensors()
        return fingerprint((f"{name} {tuple(held[name].shape)}", [_wide(held[name])]) for name in sorted(held))


class TrainedPolicy(Protocol):
    """The policy of a backend, as a run sees it."""

    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    vocabulary: int

    @property
    def model(self) -> Any: ...

    def weights(self, version: int) -> Weights: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def save_pretrained(self, path: str | Path) -> None: ...


class Sampler(Generator, TurnGenerator, Protocol):
    """What samples from a policy: an engine in this process, or a server in its place."""

    context_length: int

    def publish(self, weights: Weights) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class Learner(Protocol):
    """Log-probabilities, gradients and the optimiser of a policy; the methods are documented in `covey.pytorch`."""

    tokens_per_micro_batch: int

    @property
    def steps(self) -> int: ...

    def scores(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        *,
        temperature: float,
        reference: bool = False,
        teacher: str = "",
        entropy: bool = False,
        states: bool = False,
    ) -> tuple[FloatNT, Any]: ...

    def forward_backward(
        self, batch: Batch, rows: NDArray[np.int64], objective: Objective, **options: Unpack[PassOptions]
    ) -> Gradients: ...

    def optim_step(self, learning_rate: float) -> float: ...

    def tensors(self) -> dict[str, dict[str, Any]]: ...

    def restore(self, tensors: Mapping[str, Mapping[str, Any]], steps: int) -> None: ...


def _wide(tensor: Any) -> Any:
    """PyTorch's half precisions are widened before NumPy, which does not know them, sees them."""
    return tensor.float().cpu() if hasattr(tensor, "float") else tensor


def loss_weights(batch: Batch, objective: Objective, max_completion_length: int) -> tuple[FloatNT, FloatNT | None]:
    """`[N, T]` weights of the surrogate, and those of the KL where it has its own, with the step's denominators."""

    def weights(mask: BoolArray, aggregation: str) -> FloatNT:
        return np.asarray(token_weights(mask, count_step(mask), aggregation, max_completion_length), np.float32)

    own = None if objective.loss.kl_aggregation is None else weights(batch.sampled, objective.loss.kl_aggregation)
    return weights(batch.mask, objective.loss.aggregation), own


def entropy_weights(batch: Batch, objective: Objective) -> FloatNT | None:
    """`[N, T]` weights of the entropy bonus for `entropy_by_token`, with the step's denominator; else None."""
    if not (objective.entropy_by_token and objective.has_entropy_bonus):
        return None
    mask = uncertain_tokens(batch.mask, batch.excluded)
    return np.asarray(token_weights(mask, count_step(mask), "token_mean"), np.float32)


def teacher_logprobs(batch: Batch, objective: Objective) -> FloatNT | None:
    """`[N, T]` log-probabilities under the teacher, NaN where its term has no token; None where there is no term."""
    if batch.teacher is None or objective.teacher is None:
        return None
    covered = batch.mask if objective.loss.kl_aggregation is None else batch.sampled
    found = np.where(covered, batch.teacher.logprobs, np.float32(np.nan))
    found[:, : objective.teacher.skip] = np.nan
    return found


def rows_with_gradient(batch: Batch, objective: Objective) -> NDArray[np.int64]:
    """Rows whose gradient can differ from zero; the others are not run at all.

    A row without an active token adds nothing, unless masks leave the KL alone. A row with advantage 0 (a tied group)
    adds nothing unless a KL, an entropy term or a teacher's acts on it, or the loss says that it does.
    """
    if objective.beta > 0 and objective.loss.kl_aggregation is not None:
        return np.flatnonzero(batch.sampled.any(axis=1))
    active = batch.mask.any(axis=1)
    if not objective.needs_every_row:
        active &= ((batch.advantages != 0) & batch.mask).any(axis=1)
        active &= objective.teacher is None or objective.teacher.task_coef != 0
    taught = teacher_logprobs(batch, objective)
    if taught is not None:
        active |= np.isfinite(taught).any(axis=1)
    return np.flatnonzero(active)


NO_VERSION = -1
"""The version of an engine that holds no weights."""


def check_call(settings: SamplingSettings, policy_version: int, *, held: int, tokenizer: Any) -> None:
    """Refuse what an engine in this process cannot sample.

    Raises `GenerationError`: other weights are held, or there is no tokenizer to see stop strings with; `ConfigError`:
    the settings describe no distribution.
    """
    if policy_version != held:
        raise GenerationError(
            f"policy_version={policy_version}: the engine holds {version_in_words(held)}; "
            f"call engine.publish(policy.weights({policy_version})) first"
        )
    check_settings(settings)
    if settings.stop_strings and tokenizer is None:
        raise GenerationError(
            f"stop_strings={settings.stop_strings!r}: the engine has no tokenizer to see text with; "
            "build it with Engine(model, tokenizer)"
        )


def version_in_words(held: int) -> str:
    """What an error says of the weights that are held."""
    return "no weights" if held == NO_VERSION else f"version {held}"

"""Advantage estimators: functions from what a step's completions earned to how much better each of them did.

    def centred(step, *, shift=0.0):
        return step.rewards - step.rewards.mean() - shift

    centred.group_relative = False

An estimator takes one `Outcomes` and its own parameters by keyword (`algorithm.adv_parameters`) and returns `[N]`
advantages, one for each completion, or `[N, T]`, one for each sampled token. The built-in ones are such functions, and
`adv_estimator="my_file.py:centred"` is another. What a run asks of an estimator besides stands in attributes of the
function, see `Estimator`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import baselines
from covey.algorithms.advantages import combine_rewards, episode_advantages, group_advantages, rloo_advantages
from covey.algorithms.arrays import Array, lookup
from covey.algorithms.credit import gigpo_advantages
from covey.algorithms.outcomes import Outcomes, states
from covey.errors import ConfigError, CoveyError, raised_at
from covey.functions import load_function
from covey.types import Group


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator as a run sees it: the function, its parameters, and what it states about itself.

    Attributes:
        name: as in `algorithm.adv_estimator`.
        function: see the module's docstring.
        parameters: its keyword arguments.
        group_relative: An advantage is a difference within the group, so a group needs two completions and one whose
            rewards are all equal has advantages of 0. True unless the function says otherwise.
        needs_reference: The run loads the reference policy and scores every token under it.
        greedy_baseline: The run samples and scores one greedy completion for each prompt.
        needs_turns: It compares the turns of agents, so it works in a world only.
        scaled: It reads `scale` and `correction`.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    group_relative: bool = True
    needs_reference: bool = False
    greedy_baseline: bool = False
    needs_turns: bool = False
    scaled: bool = True

    def __call__(self, step: Outcomes) -> Array:
        """The advantages, `[N]` or `[N, T]`."""
        return self.function(step, **self.parameters)

    def teaches(self, group: Group) -> bool:
        """False for a group in which all advantages are 0 whatever the rest of the step is.

        It is asked of `function.teaches(group)` where there is such an attribute. Otherwise a group teaches nothing
        when no reward could be scored, and for `group_relative` estimators when all rewards are equal.
        """
        said = getattr(self.function, "teaches", None)
        if said is not None:
            return bool(said(group))
        return not group.is_tied if self.group_relative else bool(np.isfinite(group.rewards).any())

    def group_problem(self, sizes: Mapping[str, int]) -> str | None:
        """Why groups are too small for it, if one is.

        Args:
            sizes: setting -> number of completions.
        """
        for setting, size in sizes.items():
            if self.group_relative and size < 2:
                return f"{setting}={size}: a group needs at least 2 completions to compare; set {setting} to 2 or more"
        return None

    def checked(self, step: Outcomes) -> NDArray[np.float64]:
        """`[N, 1]` or `[N, T]`: as a call, for a function of somebody else's.

        Raises:
            ConfigError: It raised, or returned what are no advantages.
        """
        try:
            found = np.asarray(self(step), np.float64)
        except CoveyError:
            raise
        except Exception as error:
            raise ConfigError(
                f"adv_estimator={self.name!r}: it raised {type(error).__name__}: {error}{raised_at(error)}; correct it"
            ) from error
        rows, tokens = step.tokens.shape
        if found.shape not in ((rows,), (rows, 1), (rows, tokens)):
            raise ConfigError(
                f"adv_estimator={self.name!r}: it returned shape {found.shape} for {rows} completions of up to "
                f"{tokens} tokens; return ({rows},) or ({rows}, {tokens})"
            )
        found = found[:, None] if found.ndim == 1 else found
        if not np.isfinite(np.where(step.tokens, found, 0.0)).all():
            raise ConfigError(
                f"adv_estimator={self.name!r}: it returned an advantage that is not finite; a reward of NaN is one "
                "that could not be scored: give such a completion the advantage 0"
            )
        return found


def grpo(step: Outcomes) -> Array:
    """GRPO (arXiv 2402.03300): `group_advantages`; of agents the scores of all turns of the group, turn by turn."""
    if step.turns is None:
        return group_advantages(step.rewards, step.groups, **step.scaling)
    return step.turns.spread(group_advantages(step.turns.scores, step.turns.groups, **step.scaling))


def naive_grpo(step: Outcomes) -> Array:
    """The same for whole completions: `episode_advantages` of agents, where an episode counts once."""
    turns = step.turns
    if turns is None:
        return grpo(step)
    return turns.spread(episode_advantages(turns.rewards, turns.groups, turns.completion, **step.scaling))


@states(scaled=False)
def dr_grpo(step: Outcomes) -> Array:
    """Dr. GRPO (arXiv 2503.20783): the group's mean is subtracted, nothing is divided."""
    return group_advantages(step.rewards, step.groups, scale="none")


@states(scaled=False)
def rloo(step: Outcomes) -> Array:
    """REINFORCE leave-one-out: `rloo_advantages`."""
    return rloo_advantages(step.rewards, step.groups)


@states(needs_turns=True)
def gigpo(step: Outcomes) -> Array:
    """GiGPO: `gigpo_advantages`, turn by turn."""
    turns = step.turns
    assert turns is not None, "the run has checked needs_turns"
    values = gigpo_advantages(
        turns.rewards,
        turns.returns,
        turns.groups,
        turns.completion,
        turns.anchors,
        omega=turns.step_advantage_weight,
        **step.scaling,
    )
    return turns.spread(values)


def gdpo(step: Outcomes) -> Array:
    """GDPO (arXiv 2601.05242, equations 4 to 6): each reward function's part is normalised in its groups, and their
    weighted sum over the batch. The batch's mean is 0 already, since each group's is.
    """
    settings: dict[str, Any] = {"correction": step.correction, "epsilon": step.epsilon}
    total = combine_rewards(step.parts, step.weights, step.groups, aggregation="normalize_then_sum", **settings)
    return group_advantages(total, step.groups, scale="batch", **settings)


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Array]] = {
    "grpo": grpo,
    "naive_grpo": naive_grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "gigpo": gigpo,
    "reinforce_plus_plus": baselines.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": baselines.reinforce_plus_plus_baseline,
    "remax": baselines.remax,
    "opo": baselines.opo,
    "gpg": baselines.gpg,
    "grpo_passk": baselines.grpo_passk,
}
"""`adv_estimator` -> function."""


def multi_reward_advantages(
    parts: Any,
    weights: Any,
    groups: Any,
    *,
    estimator: str = "grpo",
    aggregation: str = "sum_then_normalize",
    scale: str = "group",
    correction: int = 1,
    epsilon: float = 1e-6,
) -> Array:
    """Advantages from the rewards of several functions, in one call.

    `sum_then_normalize` applies the estimator to the weighted sum. `normalize_then_sum` is `gdpo`, whatever `estimator`
    and `scale` say. Other arguments as in `combine_rewards`.

    Returns:
        `[N]` advantages, never NaN.
    """
    how: dict[str, Any] = {"scale": scale, "correction": correction, "epsilon": epsilon}
    if aggregation == "normalize_then_sum":
        return gdpo(Outcomes(None, groups, parts=parts, weights=weights, **how))
    total = combine_rewards(parts, weights, groups, aggregation=aggregation)
    return lookup(ADVANTAGE_ESTIMATORS, estimator, "adv_estimator")(Outcomes(total, groups, **how))


def find_estimator(name: str, parameters: Mapping[str, Any] | None = None) -> Estimator:
    """The estimator of a name, `FILE.py:FUNCTION` or `MODULE:FUNCTION`, with its parameters.

    Raises:
        ConfigError: There is none, or it does not take these parameters.
    """
    parameters = dict(parameters or {})
    function = load_function(name) if ":" in name else lookup(ADVANTAGE_ESTIMATORS, name, "adv_estimator")
    try:
        inspect.signature(function).bind(None, **parameters)
    except (TypeError, ValueError) as error:
        known = [each.name for each in inspect.signature(function).parameters.values()][1:]
        raise ConfigError(
            f"algorithm.adv_parameters={parameters!r}: adv_estimator {name!r} is called with one value and these "
            f"({error}); it takes {', '.join(known) or 'none'}"
        ) from error
    statements = ("group_relative", "needs_reference", "greedy_baseline", "needs_turns", "scaled")
    said = {each: bool(getattr(function, each)) for each in statements if hasattr(function, each)}
    return Estimator(name, function, parameters, **said)

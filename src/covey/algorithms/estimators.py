"""Advantage estimators: functions from the rewards of a step to the advantages of its completions.

    def centred(step, *, shift=0.0):
        return step.rewards - step.rewards.mean() - shift

    centred.group_relative = False

An estimator takes one `Outcomes` and its own parameters by keyword (`algorithm.adv_parameters`) and returns `[N]`
advantages, one for each completion, or `[N, T]`, one for each sampled token. The built-in ones are such functions, and
`adv_estimator="my_file.py:centred"` is another. Attributes of the function state its other properties, see `Estimator`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from covey.algorithms.advantages import (
    batch_std,
    combine_rewards,
    episode_advantages,
    gigpo_advantages,
    group_advantages,
    group_statistics,
    normalise_tokens,
    prepare,
    rloo_advantages,
)
from covey.algorithms.arrays import Array, as_float, at_least_one, locked, lookup, to_library_of, unknown_name
from covey.algorithms.grouping import Grouping
from covey.algorithms.objective import Objective
from covey.algorithms.outcomes import Outcomes, Turns
from covey.errors import ConfigError, naming
from covey.functions import load_function, number_problem
from covey.types import Group, equal_rewards

F = TypeVar("F", bound=Callable[..., Any])


def states(**statements: Any) -> Callable[[F], F]:
    """A decorator that sets attributes of an estimator: `@states(group_relative=False)`. See `Estimator`."""

    def write(function: F) -> F:
        vars(function).update(statements)
        return function

    return write


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator in a run: the function, its parameters and its properties.

    Attributes:
        name: as in `algorithm.adv_estimator`.
        function: see the module's docstring.
        parameters: its keyword arguments.
        group_relative: An advantage is a difference within the group, so a group needs two completions and one whose
            rewards are all equal has advantages of 0. True unless the function says otherwise.
        needs_reference: The run loads the reference policy and scores every token under it.
        needs_sum_pi_squared: The run scores every token under the policy before it computes advantages, twice.
        greedy_baseline: The run samples and scores one greedy completion for each prompt.
        needs_turns: It compares the turns of agents, so it works in a world only.
        scaled: It reads `scale` and `correction`.

    An estimator that gives an agent's turns their own credit may have an attribute `episode_part`. This function has
    the same arguments and returns the part of the advantages that belongs to the whole episode. Tables show both parts.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    group_relative: bool = True
    needs_reference: bool = False
    needs_sum_pi_squared: bool = False
    greedy_baseline: bool = False
    needs_turns: bool = False
    scaled: bool = True

    def __call__(self, step: Outcomes) -> Array:
        """The advantages, `[N]` or `[N, T]`."""
        return self.function(step, **self.parameters)

    def teaches(self, group: Group) -> bool:
        """False for a group whose advantages are all 0, whatever the rest of the step is.

        `function.teaches(group)` decides, if there is such an attribute. Otherwise the result is False if no reward
        could be scored, and for `group_relative` estimators if all rewards are equal.
        """
        said = getattr(self.function, "teaches", None)
        if said is not None:
            with naming(f"adv_estimator={self.name!r}: its attribute teaches"):
                return bool(said(group))
        return not group.is_tied if self.group_relative else bool(np.isfinite(group.rewards).any())

    @property
    def episode_part(self) -> Estimator | None:
        """The part of the advantages that belongs to the whole episode; None if the function has no `episode_part`."""
        part = getattr(self.function, "episode_part", None)
        return None if part is None else replace(self, name=f"{self.name}: its attribute episode_part", function=part)

    def group_problem(self, sizes: Mapping[str, int]) -> str | None:
        """An error message if groups are too small for the estimator, else None; `sizes` maps settings to sizes."""
        for setting, size in sizes.items():
            if self.group_relative and size < 2:
                return f"{setting}={size}: a group needs at least 2 completions to compare; set {setting} to 2 or more"
        return None

    def credit_problem(self, objective: Objective, slope: Any, array: Any, conversing: bool = False) -> str | None:
        """An error message if the loss averages away advantages of single tokens. Both are tried on a small step.

        `conversing` is True where a row holds several turns. See `Objective.shares_credit`.

        Raises `ConfigError`: The estimator returns a wrong shape for the small step, or the loss has no gradient.
        """
        objective.require_gradient(slope, array)
        step = small_step(conversing)
        try:
            found = self._called(step)
        except ConfigError:  # of somebody's own, which needs more than that
            return None
        found = self._shaped(found, step)
        if (found == found[:, :1]).all() or not objective.shares_credit(slope, array):
            return None
        taught = getattr(self.function, "taught_as", None)
        which = f"algorithm.teacher.use={taught!r}" if taught else f"algorithm.adv_estimator={self.name!r}"
        return (
            f"{which} and loss_type={objective.loss.name!r}: it gives each token its own advantage, but this loss has "
            f"one ratio per completion and would average them; set {'use to loss, or ' if taught else ''}"
            "algorithm.loss_type to 'gspo_token' or 'grpo', or importance_sampling_level='gspo_token' in "
            "algorithm.loss_parameters"
        )

    def checked(self, step: Outcomes) -> NDArray[np.float64]:
        """Call the user's function and check its result, `[N, 1]` or `[N, T]`.

        Raises `ConfigError`: The function raised, or did not return advantages.
        """
        found = self._shaped(self._called(step), step)
        if not np.isfinite(np.where(step.tokens, found, 0.0)).all():
            raise ConfigError(
                f"adv_estimator={self.name!r}: it returned an advantage that is not finite; a reward of NaN is one "
                "that could not be scored: give such a completion the advantage 0"
            )
        return found

    def _called(self, step: Outcomes) -> NDArray[np.float64]:
        with naming(f"adv_estimator={self.name!r}: it"):
            return np.asarray(self(locked(step)), np.float64)

    def _shaped(self, found: NDArray[np.float64], step: Outcomes) -> NDArray[np.float64]:
        rows, tokens = step.tokens.shape
        if found.shape not in ((rows,), (rows, 1), (rows, tokens)):
            raise ConfigError(
                f"adv_estimator={self.name!r}: it returned shape {found.shape} for {rows} completions of up to "
                f"{tokens} tokens; return ({rows},) or ({rows}, {tokens})"
            )
        return found[:, None] if found.ndim == 1 else found


def small_step(conversing: bool = False) -> Outcomes:
    """A step to try an estimator on: two groups of two completions, with two turns each if `conversing`."""
    rewards, groups, turns, logp = np.arange(4.0), np.array([0, 0, 1, 1]), None, -np.resize([0.1, 0.7, 1.9], (4, 4))
    if conversing:
        of, earned = np.arange(8) // 2, np.array([-3.0, 3.0, 1.0, 1.0] * 2)
        tokens = np.repeat(np.arange(8).reshape(4, 2), 2, axis=1)
        turns = Turns(of, groups[of], rewards[of], earned, list("abababab"), tokens)
    known: dict[str, Any] = {"parts": rewards[None], "weights": np.ones(1), "mask": logp < 0, "logprobs": logp}
    known |= {"reference": 2 * logp, "gaps": -logp, "sum_pi_squared": np.exp(logp), "greedy": rewards, "turns": turns}
    return Outcomes(rewards, groups, **known)


def _scaled(step: Outcomes, correction: int | None, epsilon: float | None = None) -> Outcomes:
    """The step with what an estimator's own parameters say of the standard deviation, where they say it."""
    if correction not in (None, 0, 1):
        raise ConfigError(
            f"algorithm.adv_parameters std_correction={correction!r}: choose 1 (divided by G - 1) or 0 (by G)"
        )
    given: dict[str, Any] = {"correction": correction, "epsilon": epsilon}
    return replace(step, **{name: value for name, value in given.items() if value is not None})


def grpo(
    step: Outcomes,
    *,
    std_correction: int | None = None,
    epsilon: float | None = None,
    step_score: Literal["episode", "return", "step"] = "episode",
    discount: float = 1.0,
) -> Array:
    """GRPO (arXiv 2402.03300): `group_advantages`. With agents, it compares the scores of all turns of the group.
    `step_score` chooses the score of a turn: the reward of its episode, its discounted return, or its own reward.
    """
    step = _scaled(step, std_correction, epsilon)
    turns = step.turns
    if turns is None:
        return group_advantages(step.rewards, step.groups, **step.scaling)
    scores = {"episode": turns.rewards, "return": turns.returns(discount), "step": turns.earned}
    chosen = lookup(scores, step_score, "algorithm.adv_parameters step_score")
    return turns.spread(group_advantages(chosen, turns.groups, **step.scaling))


def naive_grpo(step: Outcomes, *, std_correction: int | None = None) -> Array:
    """GRPO with `episode_advantages` for agents: each episode counts once, however many turns it has."""
    step, turns = _scaled(step, std_correction), step.turns
    if turns is None:
        return grpo(step)
    return turns.spread(episode_advantages(turns.rewards, turns.groups, turns.completion, **step.scaling))


@states(scaled=False)
def dr_grpo(step: Outcomes) -> Array:
    """Dr. GRPO (arXiv 2503.20783): reward minus the group's mean, without division."""
    return group_advantages(step.rewards, step.groups, scale="none")


@states(scaled=False)
def rloo(step: Outcomes) -> Array:
    """REINFORCE leave-one-out: `rloo_advantages`."""
    return rloo_advantages(step.rewards, step.groups)


def _of_episodes(step: Outcomes, *, std_correction: int | None = None, **others: Any) -> Array:
    """The first of GiGPO's two parts, turn by turn."""
    return naive_grpo(step, std_correction=std_correction)


@states(needs_turns=True, episode_part=_of_episodes)
def gigpo(
    step: Outcomes, *, std_correction: int | None = None, discount: float = 1.0, step_advantage_weight: float = 1.0
) -> Array:
    """GiGPO: `gigpo_advantages` of turns, with the `discount` of returns; the weight is the paper's omega."""
    step, turns = _scaled(step, std_correction), step.turns
    assert turns is not None, "the run has checked needs_turns"
    given = (turns.rewards, turns.returns(discount), turns.groups, turns.completion, turns.anchors)
    return turns.spread(gigpo_advantages(*given, omega=step_advantage_weight, **step.scaling))


@states(scaled=False)
def gdpo(step: Outcomes, *, std_correction: int | None = None, epsilon: float | None = None) -> Array:
    """GDPO (arXiv 2601.05242, equations 4 to 6): each reward function is normalised within its groups, then their
    weighted sum over the batch. The batch's mean is already 0, since each group's is.
    """
    step = _scaled(step, std_correction, epsilon)
    how: dict[str, Any] = {"correction": step.correction, "epsilon": step.epsilon}
    alone = step.parts is None  # agents earn one reward
    parts = as_float(step.rewards)[None, :] if alone else as_float(step.parts)
    weights = np.ones(1) if alone else step.weights
    xp = array_namespace(parts)
    each = xp.stack([group_advantages(parts[f, :], step.groups, **how) for f in range(parts.shape[0])])
    total = combine_rewards(xp.where(xp.isfinite(parts), each, parts), weights)
    return group_advantages(total, step.groups, scale="batch", **how)


@states(group_relative=False, scaled=False)
def reinforce_plus_plus(step: Outcomes, *, gamma: float = 1.0) -> Array:
    """REINFORCE++ (arXiv 2501.03262): discounted return of each token, normalised over all tokens of the batch.
    `gamma` is the discount for each token that follows.

    Example: completions with 2 and 1 tokens have the rewards 0 and 3. The tokens' returns 0, 0, 3 have mean 1 and
    sample variance 3, so the advantages are -1/sqrt(3), -1/sqrt(3), 2/sqrt(3).
    Returns `[N, T]`.
    """
    rewards, _, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    weight = xp.astype(step.tokens, rewards.dtype)
    following = xp.sum(weight, axis=1, keepdims=True) - xp.cumulative_sum(weight, axis=1)
    base = xp.full_like(following, gamma)
    return normalise_tokens(rewards[:, None] * base**following, step.tokens & scorable[:, None])


@states(group_relative=False, scaled=False)
def reinforce_plus_plus_baseline(step: Outcomes) -> Array:
    """REINFORCE++ with baseline (arXiv 2501.03262): the group's mean is subtracted, then tokens are normalised over the
    batch. A group of one has no baseline, so groups of one are REINFORCE++.

    If lengths differ, the batch's mean is not 0, so a group of equal rewards has advantages too.
    Returns `[N, T]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, scorable)
    centred = xp.where(group.count > 1, rewards - group.mean, rewards)
    # Exactly 0 where all are equal: a mean is rounded.
    centred = xp.where((group.count > 1) & group.tied, xp.zeros_like(centred), centred)
    return normalise_tokens(centred, step.tokens & scorable[:, None])


@states(group_relative=False, scaled=False, greedy_baseline=True)
def remax(step: Outcomes) -> Array:
    """ReMax (arXiv 2310.10505): reward minus that of the prompt's greedy completion; 1 and 0 against 1 give 0 and -1.
    Returns `[N]`, 0 where either cannot be scored.
    """
    assert step.greedy is not None, "the run has asked for greedy_baseline"
    rewards, _, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    greedy = to_library_of(rewards, as_float(step.greedy))
    differ = scorable & xp.isfinite(greedy) & ~equal_rewards(rewards, greedy)
    return xp.where(differ, rewards - greedy, xp.zeros_like(rewards))


@states(scaled=False)
def opo(step: Outcomes) -> Array:
    """OPO (arXiv 2505.23585, equation 6): the baseline is the group's mean, weighted by length: `sum(l r) / sum(l)`.

    Example: rewards 1 and 0 of 1 and 3 tokens give the baseline 1/4 and the advantages 3/4 and -1/4.
    Returns `[N]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    lengths = xp.where(scorable, xp.sum(xp.astype(step.tokens, rewards.dtype), axis=1), xp.zeros_like(rewards))
    earned = lengths * xp.where(scorable, rewards, xp.zeros_like(rewards))
    grouping = Grouping(groups, scorable)
    advantages = rewards - grouping.sum(earned) / at_least_one(grouping.sum(lengths))
    tied = group_statistics(rewards, groups, scorable).tied
    return xp.where(scorable & ~tied, advantages, xp.zeros_like(advantages))


@states(scaled=False, needs_sum_pi_squared=True)
def optimal_token_baseline(step: Outcomes) -> Array:
    """Optimal token baseline (arXiv 2602.07078): `A_t = r - sum(r W_t) / sum(W_t)`, the sums over the group's
    completions that reach token t.

    `W_t` is the sum of `1 - 2 pi + sum_v pi_v^2` over the tokens up to t, the squared length of the gradient of
    `log pi` with respect to the logits. Example: two completions of one token, with rewards 1 and 0 and `pi = 1/2` each
    from two tokens, have W = 1/2, so the baseline is 1/2. With `pi = 1` the second has W = 0, and the baseline is 1. If
    all W are 0, the advantage is 0.
    Returns `[N, T]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    mask = step.tokens & scorable[:, None]
    pi, squares = (as_float(to_library_of(rewards, x)) for x in (xp.exp(step.logprobs), step.sum_pi_squared))
    lengths = xp.where(mask, xp.maximum(1 - 2 * pi + squares, xp.zeros_like(pi)), 0.0)
    weights = xp.where(mask, xp.cumulative_sum(lengths, axis=1), 0.0)
    earned = xp.where(scorable, rewards, xp.zeros_like(rewards))[:, None]
    grouping = Grouping(groups, scorable)
    total = grouping.sum(weights)
    baseline = grouping.sum(weights * earned) / xp.where(total > 0, total, xp.ones_like(total))
    tied = group_statistics(rewards, groups, scorable).tied
    return xp.where(mask & (total > 0) & ~tied[:, None], earned - baseline, 0.0)


@states(scaled=False)
def gpg(step: Outcomes, *, f_norm: float = 1.0, alpha: Literal["differing", "nonzero"] = "differing") -> Array:
    """GPG (arXiv 2504.02546, equation 7): `alpha (r - mean_g) / f_norm`. alpha makes up for groups without gradient.

    Example: rewards 0, 1 in one group and 1, 1 in another. Half of the completions have a gradient, so alpha = 2 and
    the advantages are -1, 1, 0, 0.

    Args:
        step: see `Outcomes`.
        f_norm: the paper's F_norm; 1 = none.
        alpha: The number of completions, divided by the number in groups with `differing` rewards (the paper), or by
            the number with a `nonzero` reward (verl).

    Returns `[N]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, scorable)
    if alpha == "differing":
        counted = scorable & ~group.tied
    elif alpha == "nonzero":
        counted = scorable & (rewards != 0)
    else:
        raise unknown_name(alpha, ("differing", "nonzero"), "algorithm.adv_parameters alpha")
    if not f_norm > 0:
        raise ConfigError(f"algorithm.adv_parameters f_norm={f_norm!r}: advantages are divided by it; use more than 0")
    number = xp.sum(xp.astype(scorable, rewards.dtype))
    factor = number / at_least_one(xp.sum(xp.astype(counted, rewards.dtype)))
    advantages = factor * (rewards - group.mean) / f_norm
    return xp.where(scorable & ~group.tied, advantages, xp.zeros_like(advantages))


def _best_is_alone(group: Group) -> bool:
    scored = group.rewards[np.isfinite(group.rewards)]
    return len(scored) >= 2 and int(equal_rewards(scored, scored.max()).sum()) == 1


@states(teaches=_best_is_alone)
def grpo_passk(step: Outcomes, *, std_correction: int | None = None) -> Array:
    """GRPO for pass@k (arXiv 2503.19595): only the best completion of a group has an advantage. It is the lead over the
    second best, divided as `scale` says.

    Example: for rewards 3, 1, 1 the lead is 2 and the sample standard deviation 2/sqrt(3); the advantages are sqrt(3),
    0, 0. If two completions are best, all advantages are 0.
    Returns `[N]`.
    """
    step = _scaled(step, std_correction)
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, scorable, correction=step.correction)
    best = scorable & equal_rewards(rewards, Grouping(groups, scorable).max(rewards))
    number = Grouping(groups, best).count(rewards)
    alone = best & (number == 1) & ~group.tied
    lead = xp.where(alone, rewards - Grouping(groups, scorable & ~best).max(rewards), xp.zeros_like(rewards))
    if step.scale == "group":
        return lead / (group.std + step.epsilon)
    return lead / (batch_std(rewards, scorable, step.correction) + step.epsilon) if step.scale == "batch" else lead


_OF_GROUPS = (grpo, naive_grpo, dr_grpo, rloo, gigpo, gdpo)
_OTHERS = (reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, optimal_token_baseline, gpg, grpo_passk)
ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Array]] = {each.__name__: each for each in (*_OF_GROUPS, *_OTHERS)}
"""`adv_estimator` -> function."""


def find_estimator(name: str, parameters: Mapping[str, Any] | None = None) -> Estimator:
    """The estimator of a name, `FILE.py:FUNCTION` or `MODULE:FUNCTION`, with its parameters.

    Raises `ConfigError`: There is no such estimator, or it does not take these parameters.
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
    if problem := number_problem(function, parameters):
        raise ConfigError(f"algorithm.adv_parameters: {problem}")
    statements = [each.name for each in fields(Estimator) if isinstance(each.default, bool)]
    said = {each: bool(getattr(function, each)) for each in statements if hasattr(function, each)}
    return Estimator(name, function, parameters, **said)

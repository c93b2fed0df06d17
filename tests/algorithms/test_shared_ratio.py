"""A loss whose tokens share one ratio cannot give each token its own credit: the two are not combined in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from covey.algorithms import LOSSES, make_objective
from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.jax.grpo_config import GRPOConfig as JaxConfig
from covey.training.setup import check_estimator

SHARED = {"gspo", "luspo", "gmpo"}
BY_TOKEN: list[dict[str, Any]] = [
    {"adv_estimator": "optimal_token_baseline"},
    {"adv_estimator": "reinforce_plus_plus", "adv_parameters": {"gamma": 0.9}},
]
OWN = """
import numpy as np
from covey.algorithms import LossInputs, Surrogate
from covey.algorithms.losses import sequence_ratio

def shared(x: LossInputs) -> Surrogate:
    return Surrogate(-sequence_ratio(x.logp, x.old, x.mask) * x.advantages)

def single(x: LossInputs) -> Surrogate:
    return Surrogate(-x.ratio * x.advantages)

def falling(step):
    return step.rewards[:, None] * 0.5 ** np.arange(step.tokens.shape[1])

def level(step):
    return step.rewards - step.rewards.mean()
"""


@pytest.mark.parametrize("name", LOSSES)
def test_which_losses_share_their_credit(name: str) -> None:
    by_torch = (torch.func.grad, torch.asarray)
    objective = make_objective(name)
    assert objective.shares_credit(*by_torch) == (name in SHARED)
    assert objective.shares_credit(jax.grad, jnp.asarray) == (name in SHARED)
    if "importance_sampling_level" in objective.loss.parameters:
        levels = [make_objective(name, importance_sampling_level=level) for level in ("sequence", "gspo_token")]
        # cispo's ratio is a constant, so the gradient stays the token's
        assert [each.shares_credit(*by_torch) for each in levels] == [name != "cispo", False]


def check(loss: str, world: object = None, **more: Any) -> None:
    check_estimator(GRPOConfig(loss_type=loss, **more), world)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", BY_TOKEN, ids=str)
def test_credit_of_tokens_needs_a_ratio_of_tokens(more: dict[str, Any]) -> None:
    for loss in sorted(SHARED):
        with pytest.raises(ConfigError, match=rf"{more['adv_estimator']}.*{loss}.*gspo_token"):
            check(loss, **more)
    with pytest.raises(ConfigError, match="gspo_token"):
        check("dapo", loss_parameters={"importance_sampling_level": "sequence"}, **more)
    for fine in ("gspo_token", "grpo", "vespo", "cispo"):
        check(fine, **more)
    check("luspo", loss_parameters={"importance_sampling_level": "gspo_token"}, **more)


def test_credit_of_completions_goes_with_every_loss() -> None:
    for estimator in ("grpo", "rloo", "opo", "reinforce_plus_plus", "remax"):
        for loss in LOSSES:
            check(loss, adv_estimator=estimator)


def test_turns_of_agents_have_a_credit_of_their_own() -> None:
    """`grpo` compares the turns by `step_score`; with `history_length` a row is one turn."""
    agents = {"loss": "gspo", "world": object()}
    for more in ({"adv_estimator": "gigpo"}, {"adv_parameters": {"step_score": "return"}}):
        with pytest.raises(ConfigError, match="gspo_token"):
            check(**agents, **more)
        check(**agents, **more, history_length=2)
        check(**agents | {"loss": "gspo_token"}, **more)
    check(**agents)
    check(**agents, adv_estimator="naive_grpo")
    check(**agents, adv_estimator="gigpo", adv_parameters={"step_advantage_weight": 0.0})


def test_losses_and_estimators_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)

    with pytest.raises(ConfigError, match=r"mine.py:falling.*mine.py:shared"):
        check("mine.py:shared", adv_estimator="mine.py:falling")
    check("mine.py:shared", adv_estimator="mine.py:level")
    check("mine.py:single", adv_estimator="mine.py:falling")


def test_the_trainer_for_flax_modules_says_so_too() -> None:
    with pytest.raises(ConfigError, match="gspo_token"):
        JaxConfig(loss_type="gspo", **BY_TOKEN[1])
    JaxConfig(loss_type="gspo_token", **BY_TOKEN[1])

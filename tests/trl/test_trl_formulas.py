"""Losses, gradients and advantages of `covey.trl` against numbers that TRL 1.16.0's own trainer has computed.

`make_trl_numbers.py` made them. Everything between TRL's options and the gradient by the log-probabilities is Covey's.
"""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from covey.algorithms import mismatch_correction, policy_loss
from covey.rollout.batching import make_batch
from covey.rollout.learning import Gradients, entropy_weights, loss_weights
from covey.training.schedule import TrainerState
from covey.training.update import update
from covey.trl import GRPOConfig
from covey.trl.translate import settings
from covey.types import Batch, Episode, Group, Prompt

NUMBERS = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())
LENGTHS, TOOL = NUMBERS["lengths"], tuple(NUMBERS["tool_token"])
SAMPLED = [[place for place in range(n) if (row, place) != TOOL] for row, n in enumerate(LENGTHS)]


def sampled(values: list[list[float]]) -> NDArray[np.float32]:
    """`[N, T]` of the tokens that the policy sampled, one after another, from those of all."""
    found = np.zeros((len(LENGTHS), max(map(len, SAMPLED))), np.float32)
    for row, places in enumerate(SAMPLED):
        found[row, : len(places)] = np.array(values[row])[places]
    return found


GIVEN = {name: sampled(values) for name, values in NUMBERS["inputs"].items()}


class Told:
    """A learner that is told its log-probabilities: the old ones in the first pass, the moved ones in the second."""

    def __init__(self) -> None:
        self.steps = 0
        self.loss = self.gradient = self.entropy_gradient = None

    def _now(self) -> NDArray[np.float32]:
        return GIVEN["old" if self.steps == 0 else "logp"]

    def scores(self, batch: Batch, rows: Any, *, reference: bool = False, **_: Any) -> Any:
        return GIVEN["ref"] if reference else self._now(), GIVEN["entropy"]

    def forward_backward(self, batch: Batch, rows: Any, objective: Any, **given: Any) -> Gradients:
        weights, _ = loss_weights(batch, objective, given["max_completion_length"])
        logp, uncertain = (torch.tensor(x, requires_grad=True) for x in (self._now(), GIVEN["entropy"]))
        mask, sampler = torch.tensor(batch.mask), torch.tensor(batch.old_logprobs)
        old, factor, correction = sampler, None, given["correction"]
        if correction is not None:
            old = logp.detach() if given["trainer_old"] is None else torch.tensor(given["trainer_old"])
            factor = mismatch_correction(old, sampler, mask, *astuple(correction))
        more = {"entropy": uncertain, "correction": factor, "sampler": sampler, "entropy_coef": given["entropy_coef"]}
        known = {"ref": given["reference"], "entropy_weights": entropy_weights(batch, objective)}
        more |= {name: torch.tensor(value) for name, value in known.items() if value is not None}
        terms = policy_loss(logp, old, torch.tensor(batch.advantages), mask, torch.tensor(weights), objective, **more)
        slopes = torch.autograd.grad(terms.loss, (logp, uncertain), allow_unused=True, materialize_grads=True)
        self.loss, (self.gradient, self.entropy_gradient) = terms.loss.item(), (x.numpy() for x in slopes)
        metrics = {name: float(value) for name, value in terms.metrics.items()}
        return Gradients(metrics, self._now(), batch.mask, GIVEN["entropy"])

    def optim_step(self, learning_rate: float) -> float:
        self.steps += 1
        return 1.0


def groups(sampler: NDArray[np.float32], weights: list[float]) -> list[Group]:
    """The two groups of three with two reward functions; the last two completions are cut off."""
    episodes = []
    for row, places in enumerate(SAMPLED):
        own = np.isin(np.arange(LENGTHS[row] + 1), np.array(places) + 1)
        logprobs = np.zeros(len(own), np.float32)
        logprobs[own] = sampler[row, : len(places)]
        end = "stop" if row < 4 else "length"
        episodes.append(Episode(np.arange(len(own)), own, logprobs, "text", end, 0))  # type: ignore[arg-type]
    first, second = (np.array(each, np.float64) for each in NUMBERS["rewards"])
    total, found = np.nansum([weights[0] * first, weights[1] * second], axis=0), []
    for rows in (slice(0, 3), slice(3, 6)):
        parts = {"first": first[rows], "second": second[rows]}
        found.append(Group(Prompt(np.array([0]), "x", {}, "x"), tuple(episodes[rows]), total[rows], parts))
    return found


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: json.dumps(case["options"]))
def test_loss_and_gradient_are_trls(case: dict[str, Any], tmp_path: Path) -> None:
    options = {"num_iterations": 2, "num_generations": 3, "max_completion_length": 5, "report_to": "none"}
    options |= {"per_device_train_batch_size": 6 // case["options"].get("gradient_accumulation_steps", 1)}
    args = GRPOConfig(str(tmp_path), **(options | case["options"]), bf16=False)
    config, weights = settings(args, num_prompts=2, lora=False), args.reward_weights or [1.0, 1.0]
    given = groups(GIVEN["sampler" if args.use_vllm else "old"], weights)
    batch = make_batch(given, config, reward_weights=weights)
    np.testing.assert_allclose(batch.advantages[:, 0], case["advantages"], rtol=2e-5, atol=1e-5)
    learner, state = Told(), TrainerState()
    update(learner, batch, config.algorithm, 0.1, temperature=1.0, max_completion_length=5, state=state)  # type: ignore[arg-type]
    assert (learner.steps, learner.loss) == (args.num_iterations, pytest.approx(case["loss"], rel=2e-5, abs=2e-6))
    np.testing.assert_allclose(learner.gradient, sampled(case["gradient"]), rtol=5e-5, atol=2e-6)
    of_entropy = case.get("entropy_gradient", np.zeros((6, 5)))
    np.testing.assert_allclose(learner.entropy_gradient, sampled(of_entropy), rtol=5e-5, atol=2e-6)
    if "entropy_coef" in case:
        assert state.entropy_coef == pytest.approx(case["entropy_coef"])


def test_every_default_is_trls(tmp_path: Path) -> None:
    """As `to_dict` tells them, after each config has filled in what follows from other settings."""
    ours = json.loads(json.dumps(GRPOConfig("out", use_cpu=True).to_dict(), default=str))
    assert {name: ours.get(name, "no such field") for name in NUMBERS["defaults"]} == NUMBERS["defaults"]

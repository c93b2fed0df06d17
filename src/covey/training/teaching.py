"""The teacher of a run: other weights of the policy's network, or another network, which score views of the rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.algorithms.teaching import teacher_metrics as teacher_metrics
from covey.config.whole import GRPOConfig
from covey.rollout.learning import Learner
from covey.rollout.views import Views
from covey.tasks.dataset import tokenize_prompt
from covey.types import Batch, Group, Taught, Teacher


@dataclass(frozen=True, slots=True, eq=False)
class OwnTeacher:
    """The network that `algorithm.teacher.weights` says, in the learner's process; a `Teacher`."""

    views: Views
    learner: Learner
    temperature: float
    live: bool
    states: bool

    def __call__(self, groups: Sequence[Group], batch: Batch) -> Taught:
        """Log-probabilities under the sampling distribution's temperature and kept ids."""
        began = time.perf_counter()
        views, too_long = self.views(groups)
        rows = np.array([n for n, view in enumerate(views) if view is not None], np.int64)
        found, states = np.full(batch.mask.shape, np.nan, np.float32), None
        if len(rows):
            seen = tuple(view or own for view, own in zip(views, batch.episodes, strict=True))
            asked = replace(batch, episodes=seen)
            how: dict[str, Any] = {"temperature": self.temperature, "states": self.states}
            scores, states = self.learner.scores(asked, rows, teacher=not self.live, **how)
            found[rows] = np.where(batch.sampled[rows], scores[rows], np.nan)
        return Taught(found, too_long, time.perf_counter() - began, states)


def make_teacher(config: GRPOConfig, policy: Any, learner: Learner, temperature: float) -> Teacher | None:
    """The teacher that the settings ask for, None = none."""
    how = config.algorithm.teacher
    if how is None:
        return None
    kwargs = dict(config.data.chat_template_kwargs)

    def render(content: Any) -> Any:
        return tokenize_prompt(content, policy.tokenizer, kwargs)

    longest = min(each.context_length for each in (policy, getattr(policy, "network", None)) if each is not None)
    return OwnTeacher(Views(how, render, longest), learner, temperature, how.weights == "live", how.over_vocabulary)

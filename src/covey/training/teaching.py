"""The teachers of a run, which score views of the rows: other weights of the policy, other networks, or servers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.algorithms.teaching import teacher_metrics
from covey.config.whole import GRPOConfig
from covey.functions import later
from covey.rollout.learning import Learner
from covey.rollout.views import Views
from covey.tasks.dataset import tokenize_prompt
from covey.types import Batch, Group, Taught, Teacher

if TYPE_CHECKING:
    from covey.training import remote_teacher
    from covey.training.remote_teacher import TeacherServer
else:  # which most runs do not have
    (remote_teacher,) = later("covey.training", "remote_teacher")


def open_servers(config: GRPOConfig, tokenizer: Any) -> dict[str, TeacherServer]:
    """The servers among the teachers, by their addresses. Raises as `TeacherServer`."""
    how = config.algorithm.teacher
    urls = {} if how is None else {source.weights: source for source in how.sources.values() if source.is_remote}
    return {url: remote_teacher.TeacherServer(url, config, tokenizer) for url in urls}


def make_teacher(
    config: GRPOConfig,
    policy: Any,
    learner: Learner,
    temperature: float,
    servers: Mapping[str, TeacherServer] = MappingProxyType({}),
) -> Teacher | None:
    """The teacher that the settings ask for, None = none."""
    how = config.algorithm.teacher
    if how is None:
        return None
    kwargs = dict(config.data.chat_template_kwargs)

    def render(content: Any) -> Any:
        return tokenize_prompt(content, policy.tokenizer, kwargs)

    # of each its views of the rows, who scores them, and the name of its weights there; "" = the policy's own
    voices: list[tuple[Views, Learner | TeacherServer, str]] = []
    for name, source in how.sources.items():
        server = servers.get(source.weights)
        holders: tuple[Any, ...] = policy, server, getattr(policy, "teachers", {}).get(source.weights)
        longest = min(each.context_length for each in holders if hasattr(each, "context_length"))

        def serves(group: Group, name: str = name) -> bool:
            return how.name_of(group.prompt.columns) == name

        weights = "" if source.weights == "live" else source.weights
        voices.append((Views(source, render, longest, serves), server or learner, weights))
    scoring: dict[str, Any] = {"temperature": temperature, "states": how.over_vocabulary}

    def teach(groups: Sequence[Group], batch: Batch) -> Taught:
        """Log-probabilities under the sampling distribution's temperature and kept ids."""
        began, too_long = time.perf_counter(), 0
        found, states = np.full(batch.mask.shape, np.nan, np.float32), None
        for views_of, scorer, weights in voices:
            views, longer = views_of(groups)
            too_long += longer
            rows = np.array([n for n, view in enumerate(views) if view is not None], np.int64)
            if len(rows):
                seen = tuple(view or own for view, own in zip(views, batch.episodes, strict=True))
                scores, states = scorer.scores(replace(batch, episodes=seen), rows, teacher=weights, **scoring)
                found[rows] = np.where(batch.sampled[rows], scores[rows], np.nan)
        return Taught(found, too_long, time.perf_counter() - began, states)

    return teach


def measured(config: GRPOConfig, batch: Batch, groups: Sequence[Group]) -> dict[str, float]:
    """Of a step, see `teacher_metrics`."""
    how = config.algorithm.teacher
    return teacher_metrics(batch, groups, None if how is None else how.key)

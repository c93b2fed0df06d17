"""The teachers of a run, which score views of the rows: other weights of the policy, other networks, or servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from covey.algorithms.teaching import teacher_metrics
from covey.config.teacher import TeacherConfig
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, DataError
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

log = logging.getLogger(__name__)


def check_teacher(config: GRPOConfig, rows: Sequence[Mapping[str, Any]], *, plays: bool) -> None:
    """Refuse rows without a teacher, and contexts that cannot be; `plays` is True where there are worlds or tools.

    Raises `ConfigError`: a setting does not fit the rows; `DataError`: a row holds what is no text.
    """
    how = cast(TeacherConfig, config.algorithm.teacher)
    there = ", ".join(sorted({name for row in rows[:100] for name in row}))
    if how.key is not None and not any(how.key in row for row in rows):
        raise ConfigError(f"algorithm.teacher.key={how.key!r}: no training row has this column; there is {there}")
    for number, name in enumerate(map(how.name_of, rows)):
        if name not in how.sources:
            raise ConfigError(
                f"algorithm.teacher.key={how.key!r}: training row {number} has {name!r:.80} there, and the teachers "
                f"are {', '.join(how.teachers)}; name one of them in each row"
            )
    for name, teacher in how.sources.items():
        words = f"algorithm.teacher: context={teacher.context!r}"
        if plays and teacher.context != "none":
            raise ConfigError(
                f"{words}: episodes of worlds and answers with tools have no context yet; set it to none, with weights "
                "base, ema or an adapter's folder"
            )
        own, columns = {n: row for n, row in enumerate(rows) if how.name_of(row) == name}, teacher.columns
        said = {n: [teacher.says(row, column) for column in columns] for n, row in own.items()}
        for at, column in enumerate(columns):
            if own and not any(texts[at] for texts in said.values()):
                raise ConfigError(f"{words}: no training row has something in the column {column!r}; there is {there}")
        for n, texts in said.items():
            if (text := "".join(texts)) != text.encode("utf-8", "replace").decode():
                wrong = "half a surrogate pair, which is not Unicode text, in what a teacher reads; correct it"
                raise DataError(f"training row {n}: {', '.join(columns)}: {wrong}")
        bare = sum(not any(texts) for texts in said.values())
        if bare and columns and all(column for one in teacher.choices for _, column in one):
            log.warning(f"{words}: {bare} of {len(own)} training rows have nothing there, and so no teacher")
        if teacher.context == "solution" and config.largest_group == 1:
            raise ConfigError(f"{words}: a group of 1 has no other completion; raise sampling.num_generations")


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

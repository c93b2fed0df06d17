"""Scoring by workers: pieces of whole groups, put together in the order of the rows.

    rows -> pieces of whole groups -> this process, or `ray_workers` -> rewards, what was logged, warnings, in order

A reward that is a function of a row or of its group has the same bits wherever it is computed. One that says
`whole_batch = True` is called in the trainer's process, with all rows; one that does not say so and still depends on
other groups is noticed in the first call and named.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from covey.config.whole import GRPOConfig
from covey.distributed.guards import installed
from covey.errors import RewardError
from covey.functions import USER_FILES, load_function, require_files, user_file_hashes
from covey.rollout.scoring import Asked, Scored, Scorer
from covey.tasks import configured_task

log = logging.getLogger(__name__)

Warnings = list[tuple[str, int, str]]
"""Loggers' names, levels and messages."""
Answer = tuple[Scored, Warnings]
"""What was found in some rows."""


@dataclass(frozen=True)
class Rewards:
    """Reward functions on their way to another process, which makes them anew."""

    config: GRPOConfig
    pickled: bytes
    files: dict[str, str]
    hashes: dict[str, str]
    folder: str
    paths: tuple[str, ...]

    @classmethod
    def of(cls, config: GRPOConfig, pickled: bytes) -> Rewards:
        return cls(config, pickled, dict(USER_FILES), user_file_hashes(), os.getcwd(), tuple(sys.path))

    def make(self) -> list[Any]:
        """The functions. Raises ConfigError: a file of the user's is missing here or another one."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        sys.path += [path for path in self.paths if path not in sys.path]
        require_files(self.hashes)
        USER_FILES.update(self.files)
        if self.pickled:
            return list(pickle.loads(self.pickled))
        data, named = self.config.data, self.config.rewards.functions
        if named:
            return [load_function(name) for name in named]
        task = configured_task(data.task, data.dataset, data.eval_dataset)
        return [] if task is None else list(task.reward_funcs)


class RewardHost:
    """What a reward worker runs. One that Ray starts in the place of another makes its functions when it is asked."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._scorer: Scorer | None = None

    def start(self) -> tuple[str, dict[str, str]]:
        """Make the functions; the machine's name, and what is installed there."""
        chosen = self._rewards.config.rewards
        self._scorer = Scorer(self._rewards.make(), chosen.reward_weights, timeout=chosen.reward_timeout)
        return socket.gethostname(), installed()

    def score(self, asked: Asked) -> Answer:
        """Score some rows; with what was warned of meanwhile."""
        if self._scorer is None:
            self.start()
        assert self._scorer is not None
        heard = _Listening()
        logging.getLogger().addHandler(heard)
        try:
            return self._scorer.score_rows(asked), heard.records
        finally:
            logging.getLogger().removeHandler(heard)


class _Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: Warnings = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, record.getMessage()))


@dataclass(frozen=True)
class Piece:
    """Rows from `first` on, to be scored."""

    asked: Asked
    first: int


class RewardWorkers:
    """Scoring by pieces; the `elsewhere` of a `covey.rollout.scoring.Scorer`."""

    def __init__(
        self, score: Callable[[Sequence[Piece]], list[Answer]], unit_size: int, close: Callable[[], None] = lambda: None
    ) -> None:
        self._score, self._unit_size, self.close = score, unit_size, close
        self._compared = False

    @classmethod
    def here(cls, scorer: Scorer, unit_size: int) -> RewardWorkers:
        def score(pieces: Sequence[Piece]) -> list[Answer]:
            found: list[Answer] = []
            for piece in pieces:
                try:
                    found.append((scorer.score_rows(piece.asked), []))
                except RewardError as error:
                    raise placed(error, piece.first) from error
            return found

        return cls(score, unit_size)

    def __call__(self, asked: Asked) -> Scored:
        """Score rows, whole groups in each piece."""
        if asked.trainer_state is not None:  # plain values only: its history would be sent too, its class needs torch
            plain = bool | int | float | str | None
            values = {name: value for name, value in vars(asked.trainer_state).items() if isinstance(value, plain)}
            asked = replace(asked, trainer_state=SimpleNamespace(**values, log_history=[]))
        ends = [*_starts(asked, self._unit_size), len(asked.episodes)]
        pieces = [Piece(_part(asked, start, end), start) for start, end in pairwise(ends)]
        beside = []
        if not self._compared and len(pieces) > 1:  # once: do other groups make a difference?
            beside, self._compared = [Piece(_part(asked, 0, ends[2]), 0)], True
        answers = self._score([*pieces, *beside])
        found = [scored for scored, _ in answers[: len(pieces)]]
        for name, level, message in chain.from_iterable(warned for _, warned in answers[: len(pieces)]):
            logging.getLogger(name).log(level, "%s", message)
        if beside:
            _compare(found[:2], answers[-1][0], asked)
        return Scored(
            {name: np.concatenate([each.parts[name] for each in found]) for name in found[0].parts} if found else {},
            _joined([each.metrics for each in found]),
            _joined([each.columns for each in found]),
        )


def _starts(asked: Asked, size: int) -> list[int]:
    """Where pieces begin: at a group's first row, as soon as the piece before has `size` rows."""
    starts = [0] if asked.episodes else []
    for place, (before, prompt) in enumerate(pairwise(asked.prompts), start=1):
        if prompt is not before and place - starts[-1] >= size:
            starts.append(place)
    return starts


def _part(asked: Asked, start: int, end: int) -> Asked:
    """Rows of a call, without what no reward function sees."""
    episodes = [replace(episode, support=None) for episode in asked.episodes[start:end]]
    completions = None if asked.completions is None else asked.completions[start:end]
    return replace(asked, prompts=asked.prompts[start:end], episodes=episodes, completions=completions)


def _joined(found: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(chain.from_iterable(found))
    return {name: [value for each in found for value in each.get(name, ())] for name in names}


def placed(error: RewardError, first: int) -> RewardError:
    """The same with the place of the sample among all rows, of which the piece begins with `first`."""
    if error.sample is None or first == 0:
        return error
    moved = copy.copy(error)
    moved.sample = error.sample + first
    moved.args = (f"{error} (sample {error.sample} of this worker's rows is {moved.sample} of the step)",)
    return moved


def _compare(alone: Sequence[Scored], together: Scored, asked: Asked) -> None:
    """Warn of rewards that change with the groups beside them."""
    for name, values in together.parts.items():
        apart = np.concatenate([each.parts[name] for each in alone])
        different = np.flatnonzero(~((apart == values) | (np.isnan(apart) & np.isnan(values))))
        if len(different):
            row = int(different[0])
            log.warning(
                "reward function %r gave sample %d (row %s) %g beside one group and %g beside others: with "
                "distributed.reward_workers it is called for some groups at a time. If it compares groups or remembers "
                "calls, set %s.whole_batch = True, and it is called in this process; if it never gives the same reward "
                "twice, nothing is wrong",
                *(name, row, asked.prompts[row].uid, apart[row], values[row], name),
            )

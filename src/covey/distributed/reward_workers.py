"""Scoring by workers: pieces of whole groups for a pool of them, put together in the order of the rows.

    rows -> pieces of whole groups -> `covey.distributed.pool` -> rewards, what was logged, warnings, in order

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
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np

from covey.config.whole import GRPOConfig
from covey.distributed.members import done
from covey.distributed.pool import Maker, Piece, Pool
from covey.distributed.preflight import installed
from covey.errors import CoveyError, RewardError
from covey.functions import USER_FILES, load_function, require_files, user_file_hashes
from covey.rollout.scoring import Asked, Scored, Scorer
from covey.tasks import configured_task
from covey.types import Progress

log = logging.getLogger(__name__)

Warnings = list[tuple[str, int, str]]
"""Loggers' names, levels and messages."""


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
        """Those of this process, as it stands."""
        return cls(config, pickled, dict(USER_FILES), user_file_hashes(), os.getcwd(), tuple(sys.path))

    def make(self) -> list[Any]:
        """The functions.

        Raises:
            ConfigError: a file of the user's is missing here or another one, or they cannot be made.
        """
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        sys.path += [path for path in self.paths if path not in sys.path]
        require_files(self.hashes)
        USER_FILES.update(self.files)
        return list(pickle.loads(self.pickled)) if self.pickled else named_rewards(self.config)


def named_rewards(config: GRPOConfig) -> list[Any]:
    """The reward functions that the settings name: `rewards.functions`, or else those of `data.task`.

    Raises:
        ConfigError: they cannot be found.
    """
    if config.rewards.functions:
        return [load_function(name) for name in config.rewards.functions]
    task = configured_task(config.data.task, config.data.dataset, config.data.eval_dataset)
    return [] if task is None else list(task.reward_funcs)


class RewardHost:
    """What a reward worker runs."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._scorer: Scorer | None = None

    def start(self, node: Callable[[], str]) -> dict[str, Any]:
        """Make the functions; where they are. `node` tells which of the cluster's."""
        chosen = self._rewards.config.rewards
        self._scorer = Scorer(self._rewards.make(), chosen.reward_weights, timeout=chosen.reward_timeout)
        return {"pid": os.getpid(), "host": socket.gethostname(), "node": node(), "versions": installed()}

    def score(self, asked: Asked) -> tuple[Scored, Warnings]:
        """Score some rows; with what was warned of meanwhile."""
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


class RewardMember(Protocol):
    """Scores one piece at a time; see `covey.distributed.pool.Worker`."""

    name: str

    def score(self, asked: Asked) -> Future[tuple[Scored, Warnings]]:
        """Score rows.

        The future raises MemberError if the member failed, and CoveyError for what no other one could do either.
        """
        ...

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None: ...


class LocalRewards:
    """Scoring in the trainer's process, when it is asked."""

    name = "this process"
    stays = True

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, asked: Asked) -> Future[tuple[Scored, Warnings]]:
        """Score at once."""
        try:
            return done((self._scorer.score_rows(asked), []))
        except CoveyError as error:
            failed: Future[tuple[Scored, Warnings]] = Future()
            failed.set_exception(error)
            return failed

    def watch(self) -> None:
        """There is nothing to ask."""

    def stop(self, *, failed: bool) -> None:
        """There is nothing to end."""


@dataclass(slots=True, eq=False)
class _Rows(Piece):
    """Rows from `first` on, to be scored."""

    asked: Asked
    first: int


class RewardWorkers(Pool):
    """Workers that score as one; the `elsewhere` of a `covey.rollout.scoring.Scorer`."""

    noun: ClassVar[str] = "reward worker"
    work: ClassVar[str] = "scoring"
    failure: ClassVar[type[CoveyError]] = RewardError

    def __init__(self, makers: Sequence[Maker], *, unit_size: int, **options: Any) -> None:
        self._unit_size, self._compared = unit_size, False
        super().__init__(makers, **options)

    def __call__(self, asked: Asked) -> Scored:
        """Score rows, whole groups in each piece.

        Raises:
            RewardError: as a function raised it; or three workers failed at the same rows, or none is left.
        """
        asked = replace(asked, trainer_state=_counters(asked.trainer_state))
        ends = [*_starts(asked, self._unit_size), len(asked.episodes)]
        pieces = [_Rows(_part(asked, start, end), start) for start, end in pairwise(ends)]
        beside = []
        if not self._compared and len(pieces) > 1:  # once: do other groups make a difference?
            beside, self._compared = [_Rows(_part(asked, 0, ends[2]), 0)], True
        self.do([*pieces, *beside], lambda: all(piece.result is not None for piece in (*pieces, *beside)))
        for name, level, message in chain.from_iterable(piece.result[1] for piece in pieces):
            logging.getLogger(name).log(level, "%s", message)
        found = [piece.result[0] for piece in pieces]
        if beside:
            _compare(found[:2], beside[0].result[0], asked)
        return Scored(
            {name: np.concatenate([each.parts[name] for each in found]) for name in found[0].parts} if found else {},
            _joined([each.metrics for each in found]),
            _joined([each.columns for each in found]),
        )

    def _ask(self, member: RewardMember, piece: _Rows, progress: Progress) -> Future[Any]:
        answer: Future[Any] = Future()

        def over(scored: Future[Any]) -> None:
            error = scored.exception()
            if isinstance(error, RewardError):
                error = _placed(error, piece)
            if error is None:
                answer.set_result(scored.result())
            else:
                answer.set_exception(error)

        member.score(piece.asked).add_done_callback(over)
        return answer

    def _fault(self, piece: _Rows, found: tuple[Scored, Warnings]) -> str:
        lengths = {len(values) for values in found[0].parts.values()}
        wanted = len(piece.asked.episodes)
        return "" if lengths == {wanted} else f"rewards of {sorted(lengths)} rows, not {wanted}"

    def _named(self, piece: _Rows) -> str:
        rows = sorted({prompt.uid for prompt in piece.asked.prompts})
        return f"while they scored the same completions, of the rows {', '.join(rows):.300}"


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


def _counters(state: Any) -> Any:
    """A trainer's state as plain values: its history would be sent with each piece, and its class needs torch."""
    if state is None:
        return None
    plain = (bool, int, float, str, type(None))
    held = {name: value for name, value in vars(state).items() if isinstance(value, plain)}
    return SimpleNamespace(**held, log_history=[])


def _joined(found: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(chain.from_iterable(found))
    return {name: [value for each in found for value in each.get(name, ())] for name in names}


def _placed(error: RewardError, piece: _Rows) -> RewardError:
    """The same with the place of the sample among all rows."""
    if error.sample is None or piece.first == 0:
        return error
    placed = copy.copy(error)
    placed.sample = error.sample + piece.first
    placed.args = (f"{error} (sample {error.sample} of this worker's rows is {placed.sample} of the step)",)
    return placed


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

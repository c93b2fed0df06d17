"""What each step trained on, on disk: all that its update can be computed from once more.

    batches/step_000012.parquet    a row for each completion, or trajectory of an agent, in the order of the table of
                                   completions; `facts` of the step as JSON in the first

Reading trusts nothing: types, shapes and ranges are checked before anything is computed.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.rollout.batching import HasAnswer
from covey.types import Episode, FinishReason, Group, Prompt, Support, Trajectory, Turn

_FORMAT = 1
_PART = "rewards/"
_MOST_BYTES, _MOST_ROWS, _MOST_COLUMNS = 4 << 30, 1_000_000, 500
_ENDS = ("done", "turns", "context", "failed")


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step was, besides its completions."""

    step: int
    settings: dict[str, dict[str, Any]]
    phase: int
    learning_rate_factor: float
    prompts: int
    longest_prompt: int
    discarded_groups: int
    tokens_per_micro_batch: int
    learner: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """A step that was read: groups with tokens, log-probabilities and rewards, whose prompts have no text; and whether
    each of the N episodes held an answer, as the task said when it was sampled.
    """

    facts: StepFacts
    groups: tuple[Group, ...]
    answered: tuple[bool, ...]

    @property
    def has_answer(self) -> HasAnswer:
        """What the task said, for masks."""
        episodes = [(group.prompt.uid, episode) for group in self.groups for episode in group.episodes]
        said = {(uid, e.text): answer for (uid, e), answer in zip(episodes, self.answered, strict=True)}
        return lambda prompt, text: said[prompt.uid, text]


def pack_step(facts: StepFacts, groups: Sequence[Group], has_answer: HasAnswer) -> bytes:
    """A step as the content of its file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        trajectories: Sequence[Trajectory | None] = group.trajectories or [None] * len(group.episodes)
        for sample, trajectory in enumerate(trajectories):
            episodes = (group.episodes[sample],) if trajectory is None else trajectory.episodes
            row: dict[str, Any] = {
                "group": number,
                "sample": sample,
                "uid": _text(group.prompt.uid),
                "reward": float(group.rewards[sample]),
                "greedy_reward": group.greedy_reward,
                "episodes": [_packed(e, has_answer(group.prompt, e.text)) for e in episodes],
            }
            row |= {_text(_PART + name): float(values[sample]) for name, values in group.reward_parts.items()}
            if trajectory is not None:
                turns = [
                    {n: _text(v) if isinstance(v, str) else v for n, v in asdict(t).items()} for t in trajectory.turns
                ]
                row |= {"turns": turns, "success": trajectory.success}
                row |= {"ended": trajectory.ended, "error": _text(trajectory.error)}
            rows.append(row)
    schema = _schema([_text(name) for name in groups[0].reward_parts])
    rows[0]["facts"] = json.dumps({"format": _FORMAT, **asdict(facts)}, allow_nan=False)
    table, buffer = pa.Table.from_pylist(rows, schema), io.BytesIO()
    # Plain integers, so that a prompt which is repeated in its group has the same bytes each time. A second copy of the
    # schema would be 10 kB.
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False)
    return buffer.getvalue()


def read_step(path: Path, step: int) -> StoredStep:
    """Read what `pack_step` made.

    Raises:
        RunFolderError: there is none, it is damaged, of another step, too large, or holds what no run writes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with explained(path, "read"), open_regular(path) as file:
        try:
            table = pq.ParquetFile(file)
            about, schema = table.metadata, table.schema_arrow
            size = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if size > _MOST_BYTES or about.num_rows > _MOST_ROWS or about.num_columns > _MOST_COLUMNS:
                raise ValueError(f"it says that it holds {size} bytes in {about.num_rows} rows, more than a step")
            parts = [name[len(_PART) :] for name in schema.names if name.startswith(_PART)]
            if not schema.equals(_schema(parts)):
                raise ValueError("its columns are not those of a step")
            rows = table.read().to_pylist()
            _require(len(rows) > 0, "it has no rows")
            return _step(_facts(rows[0]["facts"] or "", step), rows, parts)
        except RunFolderError:
            raise
        except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RunFolderError(
                f"{path} is damaged ({str(error)[:300]}); restore it from a backup, or replay another step"
            ) from error


def _schema(parts: Sequence[str]) -> Any:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    episode = {
        "token_ids": ids,
        "runs": ids,  # lengths of stretches that were not and that were sampled, by turns
        "logprobs": pa.list_(pa.float32()),  # of sampled tokens
        "finish_reason": pa.string(),
        "policy_version": pa.int64(),
        "text": pa.string(),
        "has_answer": pa.bool_(),
        "support_ids": ids,
        "support_offsets": pa.list_(pa.int64()),
    }
    turn = {"observation": pa.string(), "said": pa.string(), "action": pa.string(), "reward": pa.float64()}
    turn |= {"valid": pa.bool_(), "row": pa.int32(), "segment": pa.int32()}
    columns = {"group": pa.int32(), "sample": pa.int32(), "uid": pa.string()}
    columns |= {"reward": pa.float64(), "greedy_reward": pa.float64(), **{_PART + name: pa.float64() for name in parts}}
    columns |= {"episodes": pa.list_(pa.struct(episode)), "turns": pa.list_(pa.struct(turn))}
    columns |= {"success": pa.bool_(), "ended": pa.string(), "error": pa.string(), "facts": pa.string()}
    return pa.schema(columns)


def _text(text: str) -> str:
    """Without halves of surrogate pairs, which no file takes."""
    return text.encode("utf-8", "replace").decode()


def _packed(episode: Episode, has_answer: bool) -> dict[str, Any]:
    changes = np.flatnonzero(np.diff(episode.sampled)) + 1
    kept = episode.support
    return {
        "token_ids": episode.token_ids.astype(np.int32),
        "runs": np.diff([0, *changes, len(episode.sampled)]).astype(np.int32),
        "logprobs": episode.logprobs[episode.sampled],
        "finish_reason": episode.finish_reason,
        "policy_version": episode.policy_version,
        "text": _text(episode.text),
        "has_answer": bool(has_answer),
        "support_ids": None if kept is None else kept.ids.astype(np.int32),
        "support_offsets": None if kept is None else kept.offsets.astype(np.int64),
    }


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _facts(text: str, step: int) -> StepFacts:
    known: Any = json.loads(text)
    _require(isinstance(known, dict) and known.get("format") == _FORMAT, f"its format is not {_FORMAT}")
    del known["format"]
    _require(known.keys() == {field.name for field in fields(StepFacts)}, "the facts of the step are incomplete")
    facts = StepFacts(**known)
    _require(facts.step == step, f"it is of step {facts.step!r:.20}, not of {step}")
    least = {"phase": 0, "prompts": 1, "longest_prompt": 0, "discarded_groups": 0, "tokens_per_micro_batch": 1}
    for name, least_value in least.items():
        value = known[name]
        _require(type(value) is int and least_value <= value < 2**31, f"{name} is {value!r:.40}")
    factor = facts.learning_rate_factor
    _require(isinstance(factor, float) and 0 < factor <= 1, f"learning_rate_factor is {factor!r:.40}")
    _require(isinstance(facts.learner, str) and isinstance(facts.settings, dict), "learner or settings are missing")
    return facts


def _step(facts: StepFacts, rows: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> StoredStep:
    groups: list[Group] = []
    answered: list[bool] = []
    for number, members in itertools.groupby(rows, key=lambda row: row["group"]):
        own = list(members)
        _require(number == len(groups), f"group {number!r} is out of order")
        _require([row["sample"] for row in own] == list(range(len(own))), f"samples of group {number} are not in order")
        _require(len({row["uid"] for row in own}) == 1 and isinstance(own[0]["uid"], str), f"uid of group {number}")
        acted = [row["turns"] is not None for row in own]
        _require(all(acted) or not any(acted), f"group {number} is half an agent's")
        packed = [episode for row in own for episode in row["episodes"]]
        _require(
            acted[0] or all(len(row["episodes"]) == 1 for row in own), f"group {number}: an answer is no one episode"
        )
        _require(all(isinstance(episode["has_answer"], bool) for episode in packed), f"has_answer of group {number}")
        answered += [episode["has_answer"] for episode in packed]
        trajectories = tuple(_trajectory(row) for row in own) if acted[0] else ()
        episodes = tuple(itertools.chain.from_iterable(t.episodes for t in trajectories))
        groups.append(
            Group(
                Prompt(np.zeros(0, np.int64), "", {}, own[0]["uid"]),
                episodes if acted[0] else tuple(map(_episode, packed)),
                np.array([_reward(row["reward"]) for row in own]),
                {name: np.array([_reward(row[_PART + name]) for row in own]) for name in parts},
                trajectories,
                _reward(own[0]["greedy_reward"]),
            )
        )
    _require(len({bool(group.trajectories) for group in groups}) == 1, "answers and agents are mixed")
    _require(any(group.episodes for group in groups), "no group has tokens")
    return StoredStep(facts, tuple(groups), tuple(answered))


def _reward(value: Any) -> float:
    _require(isinstance(value, float) and not math.isinf(value), f"a reward is {value!r:.40}")
    return float(value)


def _episode(row: Mapping[str, Any]) -> Episode:
    _require(all(row[name] is not None for name in ("token_ids", "runs", "logprobs", "text")), "an episode has gaps")
    ids, runs = _whole(row["token_ids"]), _whole(row["runs"])
    logprobs = np.array(row["logprobs"], np.float32)
    _require(bool((runs > 0).all()) and int(runs.sum()) == len(ids), "runs do not add up to the tokens")
    sampled = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    _require(len(logprobs) == sampled.sum(), "log-probabilities are not one a sampled token")
    _require(bool(np.isfinite(logprobs).all()), "a log-probability is no number")
    _require(row["finish_reason"] in get_args(FinishReason), f"finish_reason is {row['finish_reason']!r:.40}")
    _require(isinstance(row["policy_version"], int) and 0 <= row["policy_version"] < 2**53, "policy_version")
    every = np.zeros(len(ids), np.float32)
    every[sampled] = logprobs
    kept = None
    if row["support_ids"] is not None:
        kept_ids, offsets = _whole(row["support_ids"]), _whole(row["support_offsets"] or [])
        ends = len(offsets) == len(logprobs) + 1 and offsets[0] == 0 and offsets[-1] == len(kept_ids)
        _require(ends and bool((np.diff(offsets) > 0).all()), "the kept ids are not those of the tokens")
        kept = Support(kept_ids, offsets)
    return Episode(ids, sampled, every, row["text"], row["finish_reason"], row["policy_version"], kept)


def _whole(values: Any) -> Any:
    found = np.array(values, np.int64)
    _require(found.ndim == 1 and bool((found >= 0).all()), "ids and lengths are whole numbers from 0")
    return found


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    episodes = tuple(map(_episode, row["episodes"]))
    _require(row["ended"] in _ENDS and isinstance(row["success"], bool), "how an episode ended")
    turns = tuple(Turn(**turn) for turn in row["turns"])
    segments = [int((np.diff(e.sampled.astype(np.int8)) == 1).sum()) for e in episodes]
    for turn in turns:
        _require(isinstance(turn.observation, str) and isinstance(turn.valid, bool), "a turn has gaps")
        _reward(turn.reward)
        _require(type(turn.row) is int and type(turn.segment) is int, "a turn has no place")
        _require(
            0 <= turn.row < len(episodes) and 0 <= turn.segment < segments[turn.row], "a turn's place is not there"
        )
    return Trajectory(episodes, turns, row["success"], row["ended"], row["error"] or "")

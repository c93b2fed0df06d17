"""What a step was trained on, so that its update can be computed again.

    batches/step_000012.parquet    a row for each completion, or trajectory of an agent, in the order of the table of
                                   completions; `facts` of the step as JSON in the first

A replay runs what a run's settings name, so such a file is trusted as they are. Its checksums find damage.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.rollout.scoring import HasAnswer
from covey.tasks.pictures import pictures_in
from covey.types import Episode, Group, Prompt, Support, Taught, Trajectory, Turn

_PART = "rewards/"


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
    pictures: Sequence[str] = ()  # SHA-256 of each one's file


@dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """A step that was read: groups whose prompts have no text; of each of the N episodes, whether it held an answer."""

    facts: StepFacts
    groups: tuple[Group, ...]
    answered: tuple[bool, ...]
    taught: Taught | None = None

    @property
    def has_answer(self) -> HasAnswer:
        """What the task said, for masks."""
        episodes = [(group.prompt.uid, episode) for group in self.groups for episode in group.episodes]
        said = {(uid, e.text): answer for (uid, e), answer in zip(episodes, self.answered, strict=True)}
        return lambda prompt, text: said[prompt.uid, text]


def pack_step(facts: StepFacts, groups: Sequence[Group], has_answer: HasAnswer, teacher: Taught | None = None) -> bytes:
    """A step as the content of its file, with what a teacher said of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    pictures = sorted({p.sha256 for group in groups for p in pictures_in(group.shown)})
    said = iter(itertools.repeat(None) if teacher is None else teacher.logprobs)
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
                "episodes": [_packed(e, has_answer(group.prompt, e.text), next(said)) for e in episodes],
            }
            row |= {_text(_PART + name): float(values[sample]) for name, values in group.reward_parts.items()}
            if trajectory is not None:
                turns = [
                    {n: _text(v) if isinstance(v, str) else v for n, v in asdict(replace(t, pictures=())).items()}
                    for t in trajectory.turns
                ]
                row |= {"turns": turns, "success": trajectory.success}
                row |= {"ended": trajectory.ended, "error": _text(trajectory.error)}
            rows.append(row)
    schema = _schema([_text(n) for n in groups[0].reward_parts], taught=teacher is not None)
    rows[0]["facts"] = json.dumps(asdict(replace(facts, pictures=pictures)), allow_nan=False)
    table, buffer = pa.Table.from_pylist(rows, schema), io.BytesIO()
    # Plain integers, so that a prompt which is repeated in its group has the same bytes each time. A second copy of the
    # schema would be 10 kB.
    how = {"use_dictionary": False, "write_statistics": False, "store_schema": False, "write_page_checksum": True}
    pq.write_table(table, buffer, compression="zstd", **how)
    return buffer.getvalue()


def read_step(path: Path, step: int) -> StoredStep:
    """Read what `pack_step` made. Raises `RunFolderError`: there is no such file, it is damaged, or of another step."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with explained(path, "read"), open_regular(path) as file:
        try:
            table = pq.ParquetFile(file, page_checksum_verification=True)
            parts = [name[len(_PART) :] for name in table.schema_arrow.names if name.startswith(_PART)]
            rows = table.read().to_pylist()
            return _step(_facts(rows[0]["facts"], step), rows, parts)
        except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RunFolderError(
                f"{path} is damaged ({str(error)[:300]}); restore it from a backup, or choose another step"
            ) from error


def _schema(parts: Sequence[str], *, taught: bool) -> Any:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    episode = {
        "token_ids": pa.list_(pa.int64()),  # places in pictures have ids above 2^62
        "runs": ids,  # lengths of stretches that were not and that were sampled, by turns
        "logprobs": pa.list_(pa.float32()),  # of sampled tokens
        "finish_reason": pa.string(),
        "policy_version": pa.int64(),
        "text": pa.string(),
        "has_answer": pa.bool_(),
        "support_ids": ids,
        "support_offsets": pa.list_(pa.int64()),
    }
    episode |= {"teacher": pa.list_(pa.float32())} if taught else {}  # of sampled tokens, NaN where there is none
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


def _packed(episode: Episode, has_answer: bool, said: NDArray[np.float32] | None) -> dict[str, Any]:
    changes = np.flatnonzero(np.diff(episode.sampled)) + 1
    kept = episode.support
    return {
        "token_ids": episode.token_ids,
        "runs": np.diff([0, *changes, len(episode.sampled)]).astype(np.int32),
        "logprobs": episode.logprobs[episode.sampled],
        "finish_reason": episode.finish_reason,
        "policy_version": episode.policy_version,
        "text": _text(episode.text),
        "has_answer": bool(has_answer),
        "support_ids": None if kept is None else kept.ids.astype(np.int32),
        "support_offsets": None if kept is None else kept.offsets.astype(np.int64),
        **({} if said is None else {"teacher": said[: episode.num_sampled]}),
    }


def _facts(text: str, step: int) -> StepFacts:
    known = json.loads(text)
    known.pop("format", None)  # of earlier versions
    facts = StepFacts(**known)
    if facts.step != step:
        raise ValueError(f"it is of step {facts.step!r:.20}, not of {step}")
    return facts


def _step(facts: StepFacts, rows: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> StoredStep:
    groups: list[Group] = []
    for _, members in itertools.groupby(rows, key=lambda row: row["group"]):
        own = list(members)
        trajectories = tuple(_trajectory(row) for row in own if row["turns"] is not None)
        groups.append(
            Group(
                Prompt(np.zeros(0, np.int64), "", {}, own[0]["uid"]),
                tuple(_episode(episode) for row in own for episode in row["episodes"])
                if not trajectories
                else tuple(itertools.chain.from_iterable(t.episodes for t in trajectories)),
                np.array([row["reward"] for row in own]),
                {name: np.array([row[_PART + name] for row in own]) for name in parts},
                trajectories,
                own[0]["greedy_reward"],
            )
        )
    packed = [episode for row in rows for episode in row["episodes"]]
    answered = tuple(episode["has_answer"] for episode in packed)
    return StoredStep(facts, tuple(groups), answered, _taught([episode.get("teacher") for episode in packed]))


def _taught(said: Sequence[Sequence[float] | None]) -> Taught | None:
    if said[0] is None:
        return None
    found = np.full((len(said), max(len(own or ()) for own in said)), np.nan, np.float32)
    for row, own in zip(found, said, strict=True):
        row[: len(own or ())] = own
    return Taught(found)


def _episode(row: Mapping[str, Any]) -> Episode:
    ids, runs = np.array(row["token_ids"], np.int64), row["runs"]
    sampled = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[sampled] = row["logprobs"]
    kept = None
    if row["support_ids"] is not None:
        kept = Support(np.array(row["support_ids"], np.int64), np.array(row["support_offsets"], np.int64))
    return Episode(ids, sampled, logprobs, row["text"], row["finish_reason"], row["policy_version"], kept)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    episodes, turns = tuple(map(_episode, row["episodes"])), tuple(Turn(**turn) for turn in row["turns"])
    return Trajectory(episodes, turns, row["success"], row["ended"], row["error"] or "")

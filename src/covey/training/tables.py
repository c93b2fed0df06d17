"""What a step leaves in tables of the run folder: completions to read, what each token got, and all that its update can
be computed from once more.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import LossInputs, Objective, policy_loss
from covey.algorithms.arrays import masked
from covey.config.run import RunConfig
from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.rollout.batching import segment_of_token
from covey.rollout.learning import loss_weights, rows_with_gradient
from covey.rollout.scoring import HasAnswer
from covey.tasks.pictures import Picture, pictures_in, with_pictures
from covey.training.update import Pass
from covey.types import (
    Batch,
    BoolArray,
    Episode,
    FinishReason,
    Group,
    Prompt,
    Support,
    Taught,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)


def completion_rows(
    groups: Sequence[Group],
    batch: Batch | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    correct: BoolArray | None = None,
    penalty: float = 0.0,
    of_episode: NDArray[np.float32] | None = None,
) -> list[dict[str, Any]]:
    """A row for each completion, or trajectory: what was asked, answered and given for it, and why tokens were masked.

    Args:
        groups: of a step or an evaluation.
        batch: that the step trained on; None = nothing was trained on them.
        columns: what reward functions logged beside their rewards; one with another number of entries is left out
            (with dynamic sampling, entries of discarded groups are among them).
        correct: one entry for each completion.
        penalty: for an agent's turn without a valid action, which its rewards have in them.
        of_episode: `[N, T]` the part of the batch's advantages that is the whole episode's, where it is known.
    """
    rows: list[dict[str, Any]] = []
    first = 0
    for number, group in enumerate(groups):
        scored = group.rewards[~np.isnan(group.rewards)]
        for sample in range(len(group.rewards)):
            entry: dict[str, Any] = {"group": number, "sample": sample, "uid": group.prompt.uid}
            if group.trajectories:
                trajectory = group.trajectories[sample]
                episodes: Sequence[Episode] = trajectory.episodes
                entry |= _trajectory_row(group, sample, penalty)
                entry["play"] = json.dumps(_play(trajectory, first, batch, of_episode))
            else:
                episodes = (group.episodes[sample],)
                entry |= _answer_row(group, sample)
                if group.with_tools:
                    entry |= _turns_row(group.with_tools[sample])
                    entry["play"] = json.dumps(_play(group.with_tools[sample], first, batch, of_episode))
                if correct is not None:
                    entry["correct"] = bool(correct[len(rows)])
            if batch is not None:
                entry |= _trained(batch, first, episodes)
                if group.trajectories:
                    entry |= _turns_trained(trajectory, batch, first)
                entry |= {
                    "group_mean": float(scored.mean()) if len(scored) else float("nan"),
                    "group_std": float(scored.std()) if len(scored) else float("nan"),
                    "group_tied": group.is_tied,
                }
            first += len(episodes)
            rows.append(entry)
    for name, values in (columns or {}).items():
        if len(values) == len(rows):
            for entry, value in zip(rows, values, strict=True):
                entry.setdefault(name, value)
    return rows


def _answer_row(group: Group, sample: int) -> dict[str, Any]:
    prompt, episode = group.prompt, group.episodes[sample]
    return {
        "prompt": said if isinstance(said := with_pictures(prompt.content, _hash), str) else json.dumps(said),
        "completion": episode.text,
        "reward": float(group.rewards[sample]),
        "length": episode.num_sampled,
        "finish_reason": episode.finish_reason,
        "policy_version": episode.policy_version,
        **{f"rewards/{name}": float(values[sample]) for name, values in group.reward_parts.items()},
        **({"kind": str(prompt.columns["kind"])} if "kind" in prompt.columns else {}),
    }


def _hash(picture: Picture) -> str:
    return picture.sha256


def _trajectory_row(group: Group, sample: int, penalty: float) -> dict[str, Any]:
    """All of a trajectory to read; its reward in two parts, of the world and of words without an action."""
    trajectory = group.trajectories[sample]
    invalid = sum(not turn.valid for turn in trajectory.turns)
    return {
        "type": str(group.prompt.columns.get("type", "")),
        "prompt": trajectory.turns[0].observation if trajectory.turns else "",
        "completion": transcript(trajectory),
        "reward": float(group.rewards[sample]),
        "correct": trajectory.success,
        "turns": len(trajectory.turns),
        "no_actions": invalid,
        "length": sum(episode.num_sampled for episode in trajectory.episodes),
        "ended": trajectory.ended,
        "error": trajectory.error,
        "policy_version": min((episode.policy_version for episode in trajectory.episodes), default=-1),
        "rewards/world": trajectory.reward + penalty * invalid,
        "rewards/invalid_actions": -penalty * invalid,
    }


def _turns_row(trajectory: Trajectory) -> dict[str, Any]:
    """What was said in an answer with tools, calls and results."""
    told = {"completion": transcript(trajectory), "turns": len(trajectory.turns), "no_actions": 0}
    return told | {"ended": trajectory.ended, "error": trajectory.error}


def _trained(batch: Batch, first: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """What the tokens of a completion got, whose episodes are the batch's rows from `first` on."""
    rows = slice(first, first + len(episodes))
    exists = batch.sampled[rows]
    given = batch.advantages[rows][exists].astype(np.float64)
    return {
        "row": first,
        "advantage": float(given[0] if (given == given[:1]).all() else given.mean()) if len(given) else 0.0,
        "masked_by": ", ".join(name for name, tokens in batch.excluded.items() if tokens[rows].any()),
        "logp": float(batch.old_logprobs[rows][exists].sum(dtype=np.float64)),
    }


def _turns_trained(trajectory: Trajectory, batch: Batch, first: int) -> dict[str, Any]:
    """Reward and advantage of each turn, whose tokens all have the same one unless an estimator says otherwise."""
    places = [segment_of_token(episode.sampled) for episode in trajectory.episodes]
    begins = [int(np.argmax(places[turn.row] == turn.segment)) for turn in trajectory.turns]
    return {
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "turn_advantages": [
            float(batch.advantages[first + turn.row, begin])
            for turn, begin in zip(trajectory.turns, begins, strict=True)
        ],
    }


_MOST_TURNS, _LONGEST_TEXT = 200, 4_000


def _play(
    trajectory: Trajectory, first: int, batch: Batch | None, of_episode: NDArray[np.float32] | None
) -> list[dict[str, Any]]:
    """Each turn with its credit, for who reads along: texts are cut, and turns beyond 200 left out.

    `advantage` is the mean over the turn's tokens, `of_episode` the part of it that the whole episode has, where an
    estimator tells it (the rest is the turn's own), `masked_by` names the masks that took any of them, and `row` is the
    batch's row that has them.
    """
    segments = [segment_of_token(episode.sampled) for episode in trajectory.episodes]
    turns = []
    for turn in trajectory.turns[:_MOST_TURNS]:
        row, own = first + turn.row, np.flatnonzero(segments[turn.row] == turn.segment)
        told: dict[str, Any] = {
            "seen": f"{_marks(turn)}{turn.observation}"[:_LONGEST_TEXT],
            "pictures": [picture.sha256 for picture in turn.pictures],
            "said": turn.said[:_LONGEST_TEXT],
            "action": None if turn.action is None else turn.action[:_LONGEST_TEXT],
            "reward": float(turn.reward),
            "valid": turn.valid,
            "tokens": len(own),
        }
        if batch is not None:
            told["row"] = row
            told["advantage"] = float(batch.advantages[row, own].mean()) if len(own) else 0.0
            if of_episode is not None:
                told["of_episode"] = float(of_episode[row, own].mean()) if len(own) else 0.0
            told["masked_by"] = ", ".join(name for name, out in batch.excluded.items() if out[row, own].any())
        turns.append(told)
    return turns


def _marks(turn: Turn) -> str:
    """The pictures that were seen, by the first digits of their hashes."""
    return "".join(f"[picture {picture.sha256[:8]}]" for picture in turn.pictures)


def transcript(trajectory: Trajectory) -> str:
    """What was seen, said and earned, as text to read."""
    lines = []
    for turn in trajectory.turns:
        note = "" if turn.valid else "  (no valid action)"
        earned = f"  [{turn.reward:+g}]" if turn.reward else ""
        seen = f"{_marks(turn)}{turn.observation}\n" if turn.observation or turn.pictures else ""
        lines.append(f"{seen}> {turn.said.strip()}{note}{earned}")
    return "\n".join([*lines, f"({trajectory.error or trajectory.ended})"])


# ---------------------------------------------------------------------- the ledger of tokens
#
# The loss is computed once more from the numbers that the update had, in float64. It is linear in the tokens' weights,
# so a token's contribution is its weight times the derivative by it, whatever the loss: contributions add up to it.

MOST_TOKENS = 50_000
"""Of an update; the completions beyond them are left out."""
LEDGER_STREAM = 4
"""Second entry of the random stream by which a step's groups are chosen."""
Row = dict[str, Any]


class Ledger:
    """Looks at the passes of one update; `rows` are what `RunFolder.write_ledger` writes, one for each token.

    Columns: `row` (of the batch, as in the table of completions), `group`, `pass` (optimiser step of the update),
    `position` (among the sampled tokens), `token_id`, `token`, `advantage`, `masked_by`, `sampler_logp`, `logp` (of the
    trainer, before the step), `ratio`, `clipped` (0 or 1), `entropy`, `kl` and `teacher_logp` in nats where known,
    `weight`, `loss` (the contribution) and `gradient` (d loss / d logp, in which the entropy bonus and a KL over the
    vocabulary have no part: they act on all logits).
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str], groups: Sequence[int] | None = None) -> None:
        self.rows: list[Row] = []
        self._to_text, self._groups = to_text, groups

    def __call__(self, done: Pass) -> None:
        """Note what a pass is about to change."""
        try:
            self._note(done)
        except Exception as error:  # it only looks: the step is taken as it would be without
            log.warning("run.ledger: this step has no ledger (%s: %s)", type(error).__name__, error)
            self.rows.clear()

    def _note(self, done: Pass) -> None:
        rows = done.rows if self._groups is None else done.rows[np.isin(done.batch.group[done.rows], self._groups)]
        if not len(rows):
            return
        columns = token_columns(done, rows)
        batch, texts = done.batch, dict[int, str]()
        for row in rows:
            tokens = batch.episodes[row].token_ids[batch.episodes[row].sampled].tolist()
            if len(self.rows) + len(tokens) > MOST_TOKENS:
                return
            own = {name: values[row, : len(tokens)].tolist() for name, values in columns.items()}
            for position, token in enumerate(tokens):
                if token not in texts:
                    texts[token] = self._to_text([token])
                entry: Row = {
                    "row": int(row if done.part is None else done.part[row]),
                    "group": int(batch.group[row]),
                    "pass": done.number,
                    "position": position,
                    "token_id": token,
                    "token": texts[token],
                    "masked_by": ", ".join(name for name, out in batch.excluded.items() if out[row, position]),
                }
                self.rows.append(entry | {name: values[position] for name, values in own.items()})


def make_ledger(
    run: RunConfig, step: int, batch: Batch, objective: Objective, to_text: Callable[[Sequence[int]], str]
) -> Ledger | None:
    """What notes an update's tokens, of groups that `run` asks for, chosen alike when repeated; None = nothing."""
    usual, _, every = run.ledger.partition(",all:")
    if usual == "all" or (every and step % int(every) == 0):
        return Ledger(to_text)
    if usual == "off":
        return None
    there = np.unique(batch.group[rows_with_gradient(batch, objective)])
    wanted = min(int(usual.partition(":")[2]), len(there))
    chosen = np.random.default_rng((run.seed, LEDGER_STREAM, step)).choice(there, wanted, replace=False)
    return Ledger(to_text, chosen.tolist())


def token_columns(done: Pass, chosen: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float64]]:
    """The numbers of every token of a pass, `[N, T]` each; 0 in rows that were not run, or not chosen."""
    import torch

    from covey.pytorch.pack_loss import StepLoss

    objective, batch, gradients = done.objective, done.batch, done.gradients
    numbers = done.rows if chosen is None else chosen
    rows, options = torch.as_tensor(numbers), done.options
    weights = loss_weights(batch, objective, options["max_completion_length"])

    def of(values: Any) -> Any:
        if values is None:
            return None
        found = torch.as_tensor(np.asarray(values))[rows]
        return found if found.dtype == torch.bool else found.to(torch.float64)

    logp, uncertainty = of(gradients.logp).requires_grad_(), of(gradients.entropy)
    given = StepLoss(batch, objective, *weights, options, rows.device).arguments(of, logp)
    over_vocabulary = of(gradients.divergence if gradients.kl is None else gradients.kl)
    averages = ("weights", "kl_weights", "entropy_weights")
    own = [given[name].requires_grad_() for name in averages if given[name] is not None]
    terms = policy_loss(logp, **given, kl=over_vocabulary, entropy=uncertainty)
    slope, *by_weight = torch.autograd.grad(terms.loss, [logp, *own], allow_unused=True, materialize_grads=True)
    old, sampler, mask = given["old"], given["sampler"], given["mask"]
    with torch.no_grad():
        loss = sum(weight * slopes for weight, slopes in zip(own, by_weight, strict=True))
        own_logp, before, advantages, entropy, theirs = (
            masked(x, mask) for x in (logp, old, given["advantages"], uncertainty, sampler)
        )
        chosen_by = given["correction"], given["selected"]
        inputs = LossInputs(own_logp, before, advantages, mask, entropy, theirs, *chosen_by)
        surrogate = objective.loss.surrogate(inputs, dict(objective.parameters))
        found = {
            "advantage": given["advantages"],
            "sampler_logp": sampler,
            "logp": logp,
            "ratio": surrogate.ratio,
            "clipped": surrogate.low | surrogate.high,
            "weight": given["weights"],
            "loss": loss,
            "gradient": slope,
            "entropy": uncertainty,
        }
        if batch.teacher is not None:
            found["teacher_logp"] = of(batch.teacher.logprobs)
        if gradients.kl is not None:
            found["kl"] = over_vocabulary
        elif given["ref"] is not None:
            found["kl"] = objective.estimate_kl(logp, given["ref"], old, mask)
    whole = {name: np.zeros(batch.mask.shape) for name in found}
    for name, values in found.items():
        whole[name][numbers] = values.detach().to(torch.float64).numpy()
    return whole


# ---------------------------------------------------------------------- what a step was trained on
#
#     batches/step_000012.parquet    a row for each completion, or trajectory of an agent, in the order of the table of
#                                    completions; `facts` of the step as JSON in the first
#
# Reading trusts nothing: types, shapes and ranges are checked before anything is computed.

_FORMAT, _WITH_PICTURES = 1, 2
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
                "episodes": [
                    _packed(e, has_answer(group.prompt, e.text), next(said), bool(pictures)) for e in episodes
                ],
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
    schema = _schema([_text(n) for n in groups[0].reward_parts], taught=teacher is not None, pictured=bool(pictures))
    told = {"format": _WITH_PICTURES if pictures else _FORMAT, **asdict(replace(facts, pictures=pictures))}
    rows[0]["facts"] = json.dumps({n: v for n, v in told.items() if n != "pictures" or pictures}, allow_nan=False)
    table, buffer = pa.Table.from_pylist(rows, schema), io.BytesIO()
    # Plain integers, so that a prompt which is repeated in its group has the same bytes each time. A second copy of the
    # schema would be 10 kB.
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False)
    return buffer.getvalue()


def read_step(path: Path, step: int) -> StoredStep:
    """Read what `pack_step` made."""
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
            kinds = itertools.product((False, True), repeat=2)
            if not any(schema.equals(_schema(parts, taught=taught, pictured=pictured)) for taught, pictured in kinds):
                raise ValueError("its columns are not those of a step")
            rows = table.read().to_pylist()
            _require(len(rows) > 0, "it has no rows")
            return _step(_facts(rows[0]["facts"] or "", step), rows, parts)
        except RunFolderError:
            raise
        except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RunFolderError(
                f"{path} is damaged ({str(error)[:300]}); restore it from a backup, or choose another step"
            ) from error


def _schema(parts: Sequence[str], *, taught: bool = False, pictured: bool = False) -> Any:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    episode = {
        "token_ids": pa.list_(pa.int64()) if pictured else ids,  # places in pictures have ids above 2^62
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


def _packed(episode: Episode, has_answer: bool, said: NDArray[np.float32] | None, pictured: bool) -> dict[str, Any]:
    changes = np.flatnonzero(np.diff(episode.sampled)) + 1
    kept = episode.support
    return {
        "token_ids": episode.token_ids if pictured else episode.token_ids.astype(np.int32),
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


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _facts(text: str, step: int) -> StepFacts:
    known: Any = json.loads(text)
    formats = (_FORMAT, _WITH_PICTURES)
    _require(isinstance(known, dict) and known.get("format") in formats, f"its format is none of {formats}")
    pictured = known.pop("format") == _WITH_PICTURES
    hashes = known.setdefault("pictures", [])
    whole = isinstance(hashes, list) and all(isinstance(h, str) and re.fullmatch("[0-9a-f]{64}", h) for h in hashes)
    _require(whole and bool(hashes) == pictured, "its pictures are no list of hashes")
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
        single = all(len(row["episodes"]) == 1 for row in own)
        _require(acted[0] or single, f"group {number}: an answer is no one episode")
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
    return StoredStep(facts, tuple(groups), tuple(answered), _taught(rows))


def _taught(rows: Sequence[Mapping[str, Any]]) -> Taught | None:
    packed = [episode for row in rows for episode in row["episodes"]]
    said = [np.array(episode.get("teacher", ()), np.float32) for episode in packed]
    if "teacher" not in packed[0]:
        return None
    _require(all(len(own) == len(e["logprobs"]) for own, e in zip(said, packed, strict=True)), "a teacher's tokens")
    _require(not any(np.isinf(own).any() for own in said), "a teacher's log-probability is infinite")
    found = np.full((len(said), max(map(len, said))), np.nan, np.float32)
    for row, own in zip(found, said, strict=True):
        row[: len(own)] = own
    return Taught(found)


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
    _require(bool(np.isfinite(logprobs).all()), "a log-probability is not a number")
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
        there = 0 <= turn.row < len(episodes) and 0 <= turn.segment < segments[turn.row]
        _require(there, "a turn's place is not there")
    return Trajectory(episodes, turns, row["success"], row["ended"], row["error"] or "")

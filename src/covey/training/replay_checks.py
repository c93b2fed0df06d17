"""What was recorded against what a replay computes: each thing that is compared, how far they are apart, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

_MOST_EXAMPLES = 5
Difference = dict[str, Any]


@dataclass(slots=True)
class Check:
    """One thing that was compared."""

    name: str
    tolerance: float
    compared: int = 0
    unequal: int = 0
    different: int = 0
    largest: float = 0.0
    examples: list[Difference] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Nothing is further apart than the tolerance."""
        return self.different == 0

    def value(self, where: str, recorded: Any, replayed: Any) -> None:
        """Compare two values; NaN, which files have as null, equals itself."""
        recorded, replayed = _plain(recorded), _plain(replayed)
        self.compared += 1
        if recorded == replayed and isinstance(recorded, bool) == isinstance(replayed, bool):
            return
        self.unequal += 1
        if _is_number(recorded) and _is_number(replayed):
            apart = abs(recorded - replayed)
            self.largest = max(self.largest, apart)
            if apart <= self.tolerance * max(1.0, abs(recorded)):
                return
        self.wrong(where, recorded, replayed)

    def wrong(self, where: str, recorded: Any, replayed: Any) -> None:
        """Note a difference."""
        self.different += 1
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append({"where": where, "recorded": _short(recorded), "replayed": _short(replayed)})

    def values(self, where: str, recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
        """Compare all that was replayed with what was recorded under its name."""
        for name, value in replayed.items():
            if name in recorded:
                self.value(f"{where} {name}", recorded[name], value)
            else:
                self.compared += 1
                self.wrong(f"{where} {name}", "nothing", value)

    def array(self, where: str, recorded: Any, replayed: Any) -> None:
        """Compare two arrays as one value each, by their largest difference."""
        recorded, replayed = _wide(recorded), _wide(replayed)
        self.compared += 1
        if recorded.shape != replayed.shape:
            self.unequal += 1
            self.wrong(where, f"shape {recorded.shape}", f"shape {replayed.shape}")
            return
        if np.array_equal(recorded, replayed):
            return
        self.unequal += 1
        apart = np.abs(recorded - replayed)
        at = np.unravel_index(int(np.argmax(apart)), apart.shape)
        self.largest = max(self.largest, float(apart[at]))
        if not (apart <= self.tolerance * np.maximum(1.0, np.abs(recorded))).all():
            self.wrong(f"{where}{[int(i) for i in at]}", float(recorded[at]), float(replayed[at]))

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"agrees": self.agrees}


def match_rows(check: Check, recorded: Sequence[Mapping[str, Any]], replayed: Sequence[Mapping[str, Any]]) -> None:
    """Compare two tables row by row, in the columns that were replayed."""
    if len(recorded) != len(replayed):
        check.compared += 1
        check.wrong("rows", len(recorded), len(replayed))
    for number, (before, after) in enumerate(zip(recorded, replayed, strict=False)):
        check.values(f"row {number}", before, after)


def match_tensors(check: Check, recorded: Mapping[str, Mapping[str, Any]], replayed: Mapping[str, Any]) -> None:
    """Compare the tensors of a checkpoint with those of a learner."""
    for group in sorted({*recorded, *replayed}):
        before, after = recorded.get(group, {}), replayed.get(group, {})
        if before.keys() != after.keys():
            check.wrong(group, f"{len(before)} tensors", f"{len(after)} tensors")
        for name in before.keys() & after.keys():
            check.array(f"{group} {name}", before[name], after[name])


def all_agree(checks: Iterable[Check]) -> bool:
    """No check found a difference."""
    return all(check.agrees for check in checks)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> Any:
    return value if value is None or _is_number(value) or isinstance(value, bool) else str(value)[:200]


def _wide(values: Any) -> np.ndarray[Any, Any]:
    """Any array or tensor in float64; PyTorch's half precisions are unknown to NumPy."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().float().numpy()
    return np.asarray(values, np.float64)

"""What the doctor says of a run as it goes on: each trouble once, from its beginning to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from covey.observe.doctor import Diagnosis, Record, Thresholds, diagnose, is_step


@dataclass(frozen=True, slots=True)
class Finding:
    """A trouble of a run, from its beginning to its end."""

    diagnosis: Diagnosis
    since: int
    until: int
    present: bool


def findings(history: Iterable[Record], thresholds: Thresholds | None = None) -> list[Finding]:
    """Everything that was wrong over a run, oldest first."""
    limits = thresholds or Thresholds()
    steps: deque[Record] = deque(maxlen=limits.longest)
    found: dict[str, Finding] = {}
    over: list[Finding] = []
    number = 0
    for record in history:
        if not is_step(record):
            continue
        steps.append(record)
        told = record.get("step")
        number = told if isinstance(told, int) and not isinstance(told, bool) else number + 1
        now = {diagnosis.code: diagnosis for diagnosis in diagnose(list(steps), limits)}
        for code, diagnosis in now.items():
            old = found.get(code)
            if old is not None and number - old.until > limits.window:
                over.append(found.pop(code))
                old = None
            found[code] = Finding(diagnosis, number if old is None else old.since, number, True)
        found = {code: replace(one, present=code in now) for code, one in found.items()}
    return sorted([*over, *found.values()], key=lambda one: one.since)


class Doctor:
    """Follows a run and names each trouble once, when it begins; again only after it has been gone for a while."""

    def __init__(self, thresholds: Thresholds | None = None, *, history: Iterable[Record] = ()) -> None:
        """Start, or take up a resumed run."""
        self._limits = thresholds or Thresholds()
        self._steps: deque[Record] = deque(maxlen=self._limits.longest)
        self._quiet: dict[str, int] = {}
        for record in history:
            self.check(record)

    def check(self, metrics: Record) -> list[Diagnosis]:
        """Take in the metrics of one training step and return the diagnoses that are new.

        A record of an evaluation only is passed over.
        """
        if not is_step(metrics):
            return []
        self._steps.append(metrics)
        found = {diagnosis.code: diagnosis for diagnosis in diagnose(list(self._steps), self._limits)}
        new = [diagnosis for code, diagnosis in found.items() if code not in self._quiet]
        for code in list(self._quiet):
            self._quiet[code] += 1
            if self._quiet[code] > self._limits.window:  # well for a whole window: the episode is over
                del self._quiet[code]
        self._quiet.update(dict.fromkeys(found, 0))
        return new

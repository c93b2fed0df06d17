"""Steps on clusters that we do not have: 1.5B to 235B on 8 to 1,024 GPUs, in turns, apart and ahead, with kills.

    python benchmarks/cluster_model.py                              # a minute; benchmarks/constants/h100.toml
    python benchmarks/cluster_model.py --constants measured.toml    # of covey plan RECIPE --calibrate measured.toml
    python benchmarks/cluster_model.py --groups-per-unit 4 --steps 50

NOTHING HERE WAS MEASURED ON SUCH HARDWARE. The first table is the formulas of `covey.distributed.cost`, the second one
a discrete-event simulation of what they leave out: completions of drawn lengths (exponential, cut at the longest), rows
that leave a sampler one by one, units that are sampled alone, and processes that die. Where all lengths are equal and a
sampler has one unit, the simulation is the formula; `tests/distributed/test_cost.py` checks that.

"ahead" is Covey's: steps are sampled one after the other, each with its tail. "overlapped" starts the next step on
every sampler that has nothing left to do, which is what the formula of the tail assumes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covey.distributed.cost import (
    Constants,
    Model,
    Work,
    ahead_seconds,
    best_split,
    decode_seconds,
    in_turns_seconds,
    sampling_seconds,
    sync_seconds,
    tail_seconds,
    training_seconds,
)

HERE = Path(__file__).parent
SHORT, LONG = Work(128, 16, 512, 2048, 8192), Work(128, 16, 4096, 512, 2048)


def gqa(layers: int, heads: int, width: int = 128) -> int:
    """Bytes of keys and values of a token in bfloat16."""
    return layers * 2 * heads * width * 2


MODELS = {
    "1.5B": Model("1.5B", 1.54e9, 1.54e9, gqa(28, 2), 18.5e6),
    "8B": Model("8B", 8.03e9, 8.03e9, gqa(32, 8), 42e6),
    "32B": Model("32B", 32.8e9, 32.8e9, gqa(64, 8), 134e6, devices=2),
    "70B": Model("70B", 70.6e9, 70.6e9, gqa(80, 8), 207e6, devices=4),
    "235B-A22B": Model("235B-A22B", 235e9, 22e9, gqa(94, 4), 30e6, devices=8),
}
ROWS = (("1.5B", 8), ("8B", 64), ("32B", 128), ("70B", 256), ("235B-A22B", 128), ("235B-A22B", 1024))
"""Model and GPUs of each row of the tables."""


@dataclass(frozen=True)
class Layout:
    """Which devices do what.

    Attributes:
        devices: all of them.
        samplers: those that only sample; 0 = all sample, then all train.
        staleness: steps that samples may be ahead of the weights.
        overlap: does a sampler begin the next step while others are at the last one?
        groups_per_unit: 0 = as many as share out a step to the samplers once.
    """

    devices: int
    samplers: int = 0
    staleness: int = 0
    overlap: bool = False
    groups_per_unit: int = 0


@dataclass(frozen=True)
class Kill:
    """A process that dies at some second: a "sampler" (its number), or one of the "learners"."""

    second: float
    what: str
    number: int = 0


@dataclass
class Outcome:
    """What a simulated run took.

    Attributes:
        ends: second at which each step's weights were there.
        sampled_again: units that were begun more than once.
        trained_again: updates that were done more than once.
    """

    ends: list[float] = field(default_factory=list)
    sampled_again: int = 0
    trained_again: int = 0

    @property
    def step_seconds(self) -> float:
        """Of a step, the first one aside, which nothing is ahead of."""
        if len(self.ends) == 1:
            return self.ends[0]
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def drawn_lengths(work: Work, seed: int) -> Callable[[int], list[float]]:
    """Lengths of a step's completions: exponential, cut at the longest, with the mean that `work` says."""
    low, high = work.answer, work.answer * 100
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if middle * (1 - math.exp(-work.longest / middle)) < work.answer:
            low = middle
        else:
            high = middle

    def lengths(step: int) -> list[float]:
        draw = random.Random(f"{seed} {step}")
        return [max(min(draw.expovariate(1 / low), work.longest), 1.0) for _ in range(work.completions)]

    return lengths


def unit_seconds(costs: Constants, model: Model, prompt: float, lengths: Sequence[float]) -> float:
    """A unit alone on a sampler: rows leave one by one, and each step attends to what has been written so far."""
    seconds, done = 0.0, 0.0
    ordered = sorted(lengths)
    for index, length in enumerate(ordered):
        if length <= done:
            continue
        rows, steps = len(ordered) - index, length - done
        context = prompt + (length + done) / 2
        seconds += steps * decode_seconds(costs, model, rows, context, model.read_bytes(rows))
        done = length
    return seconds


def simulate(
    costs: Constants,
    model: Model,
    work: Work,
    layout: Layout,
    lengths: Callable[[int], Sequence[float]],
    *,
    steps: int,
    kills: Sequence[Kill] = (),
    save_steps: int = 50,
) -> Outcome:
    """Play a run, event by event.

    Args:
        costs: of a device, see `covey.distributed.cost`.
        model: that is trained.
        work: of a step.
        layout: which devices do what.
        lengths: of the completions of a step, prompt by prompt.
        steps: of the run.
        kills: what dies when. A sampler's unit is sampled again; of learners the updates since the last checkpoint are
            done again, from units that are not sampled again, and in turns the units under way are lost too.
        save_steps: between checkpoints.
    """
    return _Run(costs, model, work, layout, lengths, steps, save_steps).play(kills)


Unit = tuple[int, int]


class _Run:
    """The state of a simulated run."""

    def __init__(
        self, costs: Constants, model: Model, work: Work, layout: Layout, lengths: Any, steps: int, save_steps: int
    ) -> None:
        self.costs, self.model, self.work, self.layout, self.lengths = costs, model, work, layout, lengths
        self.steps, self.save_steps = steps, save_steps
        self.count = (layout.samplers or layout.devices) // model.devices
        groups = layout.groups_per_unit or math.ceil(work.prompts / self.count)
        self.rows, self.units = groups * work.group, math.ceil(work.prompts / groups)
        learners = layout.devices - layout.samplers
        self.update = training_seconds(costs, model, work, learners) + (0 if layout.samplers else costs.switch_seconds)
        self.sync = sync_seconds(costs, model)
        self.now, self.number = 0.0, 0
        self.events: list[tuple[float, int, str, Any]] = []
        self.free, self.busy = list(range(self.count)), dict[int, Unit]()
        self.life = [0] * self.count
        self.queue: deque[Unit] = deque()
        self.released, self.trained, self.epoch, self.training = 0, 0, 0, False
        self.missing: dict[int, int] = {}
        self.down = False
        self.drawn: dict[int, list[float]] = {}
        self.outcome = Outcome()

    def play(self, kills: Sequence[Kill]) -> Outcome:
        for kill in kills:
            self._at(kill.second, "kill", kill)
        self._go_on()
        while self.trained < self.steps:
            self.now, _, kind, what = heapq.heappop(self.events)
            getattr(self, f"_{kind}")(what)
            self._go_on()
        return self.outcome

    def _at(self, second: float, kind: str, what: Any = None) -> None:
        self.number += 1  # of two events at one time the older is the first
        heapq.heappush(self.events, (second, self.number, kind, what))

    def _go_on(self) -> None:
        """Everything that may begin now."""
        while self.released < self.steps and self._may_release():
            self.missing[self.released] = self.units
            self.drawn[self.released] = list(self.lengths(self.released))
            self.queue.extend((self.released, number) for number in range(self.units))
            self.released += 1
        samples = not (self.down and not self.layout.samplers)
        while samples and self.queue and self.free:
            sampler, unit = self.free.pop(0), self.queue.popleft()
            self.busy[sampler] = unit
            first = unit[1] * self.rows
            took = unit_seconds(
                self.costs, self.model, self.work.prompt, self.drawn[unit[0]][first : first + self.rows]
            )
            self._at(self.now + took, "sampled", (sampler, self.life[sampler]))
        if not self.training and not self.down and self.missing.get(self.trained) == 0:
            self.training = True
            self._at(self.now + self.update + self.sync, "updated", self.epoch)

    def _may_release(self) -> bool:
        step = self.released
        if step > self.trained + self.layout.staleness:
            return False
        return step == 0 or self.layout.overlap or self.missing[step - 1] == 0

    def _sampled(self, what: tuple[int, int]) -> None:
        sampler, life = what
        if life == self.life[sampler]:
            self.missing[self.busy.pop(sampler)[0]] -= 1
            self.free.append(sampler)

    def _updated(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.training, self.trained = False, self.trained + 1
            del self.outcome.ends[self.trained - 1 :]
            self.outcome.ends.append(self.now)

    def _kill(self, kill: Kill) -> None:
        if kill.what == "sampler":
            return self._lose(kill.number % self.count, self.costs.restart_sampler_seconds)
        saved = self.trained // self.save_steps * self.save_steps
        self.outcome.trained_again += self.trained - saved + self.training
        self.trained, self.training, self.epoch, self.down = saved, False, self.epoch + 1, True
        if not self.layout.samplers:
            for sampler in range(self.count):
                self._lose(sampler, self.costs.restart_learners_seconds)
        return self._at(self.now + self.costs.restart_learners_seconds, "learners_back", self.epoch)

    def _lose(self, sampler: int, seconds: float) -> None:
        self.life[sampler] += 1
        if sampler in self.busy:
            self.queue.appendleft(self.busy.pop(sampler))
            self.outcome.sampled_again += 1
        if sampler in self.free:
            self.free.remove(sampler)
        self._at(self.now + seconds, "sampler_back", (sampler, self.life[sampler]))

    def _sampler_back(self, what: tuple[int, int]) -> None:
        if what[1] == self.life[what[0]]:
            self.free.append(what[0])

    def _learners_back(self, epoch: int) -> None:
        self.down = self.down and epoch != self.epoch


def formulas(costs: Constants, name: str, devices: int, work: Work) -> dict[str, float]:
    """A row of the first table, in seconds."""
    model = MODELS[name]
    split = best_split(costs, model, work, devices)
    return {
        "sampling": sampling_seconds(costs, model, work, devices),
        "tail": tail_seconds(costs, model, work),
        "prompt each time": training_seconds(costs, model, work, devices, prompts_once=False),
        "prompt once": training_seconds(costs, model, work, devices),
        "sync all": sync_seconds(costs, model, all_weights=True),
        "sync LoRA": sync_seconds(costs, model),
        "in turns": in_turns_seconds(costs, model, work, devices),
        "ahead": ahead_seconds(costs, model, work, devices, split),
        "samplers": split,
    }


def simulated(
    costs: Constants, name: str, devices: int, work: Work, *, steps: int, groups_per_unit: int, seed: int
) -> dict[str, float]:
    """A row of the second table: seconds of a step, and seconds that a kill costs the run."""
    model, lengths = MODELS[name], drawn_lengths(work, seed)
    split = best_split(costs, model, work, devices)
    layouts = {
        "in turns": Layout(devices, groups_per_unit=groups_per_unit),
        "apart": Layout(devices, split, groups_per_unit=groups_per_unit),
        "ahead": Layout(devices, split, 1, groups_per_unit=groups_per_unit),
        "overlapped": Layout(devices, split, 1, True, groups_per_unit),
    }
    row: dict[str, float] = {}
    for label, layout in layouts.items():
        whole = simulate(costs, model, work, layout, lengths, steps=steps)
        row[label] = whole.step_seconds
        if label != "ahead":
            continue
        draw = random.Random(seed)
        for what in ("sampler", "learners"):
            lost = []
            for _ in range(8):
                kill = Kill(draw.uniform(whole.ends[1], whole.ends[-2]), what, draw.randrange(10**6))
                with_kill = simulate(costs, model, work, layout, lengths, steps=steps, kills=[kill], save_steps=5)
                lost.append(with_kill.ends[-1] - whole.ends[-1])
            row[f"kill of {what}"] = sum(lost) / len(lost)
    return row


def table(costs: Constants, rows: Sequence[tuple[str, int, Work, dict[str, float]]]) -> str:
    """Rows as Markdown."""
    names = list(rows[0][3])
    lines = [f"| model, GPUs | P, R | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for name, devices, work, row in rows:
        cells = [f"{row[key]:.0f}" if row[key] >= 10 or key == "samplers" else f"{row[key]:.1f}" for key in names]
        lines.append(f"| {name}, {devices:,} | {work.prompt:.0f}, {work.answer:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Steps on clusters that we do not have. Nothing of it is measured.")
    parser.add_argument("--constants", default=str(HERE / "constants" / "h100.toml"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups-per-unit", type=int, default=0, help="0 = a step is shared out to the samplers once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 4 or chosen.groups_per_unit < 0:
        parser.error("--steps is at least 4, --groups-per-unit at least 0")
    costs = Constants.read(chosen.constants)
    places = [(name, devices, work) for name, devices in ROWS for work in (SHORT, LONG)]
    by_formula = [(*place, formulas(costs, *place)) for place in places]
    options = {"steps": chosen.steps, "groups_per_unit": chosen.groups_per_unit, "seed": chosen.seed}
    by_events = [(*place, simulated(costs, *place, **options)) for place in places]
    said = "measured on one machine" if costs.measured else "not measured"
    note = f"Constants: {costs.name} ({said}), for every device. NO SUCH CLUSTER WAS MEASURED. Seconds of a step, LoRA."
    if chosen.json:
        both = {"note": note, "formulas": by_formula, "simulation": by_events}
        print(json.dumps(both, default=asdict))
        return
    print(f"{note}\n\nFormulas (samplers: GPUs that sample in `ahead`, its best split):\n\n{table(costs, by_formula)}")
    print(
        "\nSimulation (drawn lengths; the same split; a kill's cost in seconds of the run, `ahead`, a checkpoint every "
        f"5 steps):\n\n{table(costs, by_events)}"
    )


if __name__ == "__main__":
    main()

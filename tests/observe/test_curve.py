import sys

import numpy as np
import pytest
from PIL import Image

from covey.cli.report import run_labels
from covey.config import GRPOConfig
from covey.errors import ConfigError, RunFolderError
from covey.observe import RunFolder, draw_comparison, draw_learning_curve, draw_run
from covey.observe.comparison import ComparedRun, group_seeds
from covey.observe.curve import mean_and_range, series, smooth, sparkline


def records(seed=0, steps=30):
    random = np.random.default_rng(seed)
    lines = [{"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.31}]
    for step in range(1, steps + 1):
        lines.append(
            {
                "step": step,
                "reward": 0.2 + step / 60 + random.normal(0, 0.05),
                "kl": step / 100,
                "completions/mean_length": 40.0 + step,
                "completions/min_length": 10.0,
                "completions/max_length": 90.0,
                "loss": None,
            }
        )
    lines.append({"step": steps, "eval/accuracy": 0.4, "eval/accuracy_low": 0.34, "eval/accuracy_high": 0.47})
    return lines


def coloured(path):
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return pixels.shape, int((pixels.max(axis=2) - pixels.min(axis=2) > 60).sum())


def test_series_takes_finite_numbers_in_order():
    lines = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": 5},
        {"step": 3, "a": None},
        {"step": 2, "a": 2.0},
        {"a": 4.0},
    ]
    assert series([*lines, {"step": 4, "a": float("inf")}], "a") == [(1, 5.0), (2, 2.0)]


def test_smoothing_by_hand():
    assert smooth(list(enumerate([0.0, 3.0, 0.0, 3.0, 6.0])), 1) == list(enumerate([0.0, 1.0, 2.0, 3.0, 6.0]))
    line = [(step, 0.5 * step) for step in range(100)]
    assert smooth(line) == line
    assert smooth([]) == []


def test_a_curve_as_text_by_hand():
    assert sparkline([(1, 0.0), (2, 7.0), (3, 3.0), (4, 4.0)]) == "▁█▄▅"
    assert sparkline([(1, 1.0), (2, 3.0), (3, 9.0), (4, 9.0)], 2) == "▁█"  # means 2 and 9
    assert (sparkline([(1, 5.0)]), sparkline([])) == ("▁", "")


def test_mean_and_range_at_shared_steps():
    seeds = [[(1, 0.0), (2, 1.0)], [(1, 1.0), (2, 2.0), (3, 9.0)], []]
    assert mean_and_range(seeds) == [(1, 0.5, 0.0, 1.0), (2, 1.5, 1.0, 2.0)]
    assert mean_and_range([]) == []


def test_a_run_is_drawn_into_its_folder(tmp_path):
    with RunFolder.create(tmp_path / "run $x^{ _1") as run:  # a name that would be broken mathematics
        for record in records():
            run.append_metrics(record.pop("step"), record)
        path = draw_run(run)
        assert path == run.curve_path
    (height, width, _), ink = coloured(path)
    assert width > 800
    assert height > 500
    assert ink > 2000
    assert "matplotlib.pyplot" not in sys.modules or sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_only_what_was_recorded_is_drawn(tmp_path):
    full = draw_learning_curve(records(), tmp_path / "full.png")
    partial = draw_learning_curve([{"step": 1, "reward": 0.5}], tmp_path / "one.png")
    empty = draw_learning_curve([], tmp_path / "none.png")
    assert coloured(full)[0] > coloured(partial)[0]
    assert coloured(partial)[1] > 0
    assert coloured(empty)[1] == 0


def test_seeds_are_compared(tmp_path):
    runs = {"covey $1": [records(0), records(1), records(2)], "_base": [records(3)], "nothing": [[]]}
    path = draw_comparison(runs, tmp_path / "all.png", title="three seeds")
    assert coloured(path)[1] > 2000


def test_a_picture_that_cannot_be_written_is_a_run_folder_error(tmp_path):
    with pytest.raises(RunFolderError, match="cannot write"):
        draw_learning_curve(records(), tmp_path / "missing" / "a.png")


def run_of(label, *, seed, **changes):
    sections = GRPOConfig(f"runs/{seed}", seed=seed, **changes).to_dict()
    settings = {f"{name}.{field}": value for name, fields in sections.items() for field, value in fields.items()}
    return ComparedRun(label, [{"step": seed}], settings)


def test_only_runs_that_differ_in_their_seed_are_seeds():
    fast = [run_of("ab"[n], seed=n, learning_rate=1e-3) for n in (0, 1)]
    slow = [run_of("cd"[n], seed=n) for n in (0, 1)]
    grouped = {"a + b": [[{"step": 0}], [{"step": 1}]], "c + d": [[{"step": 0}], [{"step": 1}]]}
    assert group_seeds([fast[0], slow[0], fast[1], slow[1]]) == grouped
    with pytest.raises(ConfigError, match=r"d and a are no seeds of one experiment: optim\.learning_rate is 1e-05 and"):
        group_seeds([fast[0], slow[1]])
    with pytest.raises(ConfigError, match=r"a and a do not differ in run\.seed"):
        group_seeds([fast[0], fast[0]])


def test_each_run_has_a_name_of_its_own(tmp_path):
    assert run_labels([tmp_path / "a" / "x", tmp_path / "b" / "y"]) == ["x", "y"]
    same = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    assert run_labels(same) == [str(path) for path in same]


def test_the_band_of_seeds_holds_every_logged_value(tmp_path, monkeypatch):
    """Rewards 0, 1, 0 and 1, 0, 1: the mean is 0.5 and the band 0 to 1 at every step, which smoothing loses."""
    from matplotlib.axes import Axes

    seen = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, steps, low, high, **options: seen.append((low, high)))
    seeds = [[{"step": step, "reward": float((step + seed) % 2)} for step in range(3)] for seed in (0, 1)]
    draw_comparison({"a": seeds}, tmp_path / "a.png")
    assert seen == [((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))]

"""A run with a loss from a file and an entropy coefficient that moves: stopped and resumed, it has the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_kill_and_resume import numbers
from test_trainer import ROWS, share_of_letters

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.observe.run_folder import RunFolder

GMPO = Path(__file__).parents[2] / "recipes" / "gmpo" / "gmpo.py"


class Stop:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_stopped_run_goes_on_to_the_same_bits(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(GMPO, "mine.py")
    settings |= {"loss_type": "mine.py:gmpo", "loss_parameters": {"clip": 0.2}, "num_iterations": 2, "max_steps": 5}
    settings |= {"adaptive_entropy": {"target": 9.0, "delta": 0.01}, "save_steps": 2}

    def trainer(run: str, callbacks: Any = ()) -> GRPOTrainer:
        args = GRPOConfig(**(settings | {"output_dir": run}))
        return GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS, callbacks=callbacks)

    trainer("whole").train()
    with pytest.raises(KeyboardInterrupt):
        trainer("broken", [Stop()]).train()
    resumed = trainer("broken")
    resumed.train(resume_from_checkpoint=Path("broken/checkpoints/step_000002"))
    assert numbers(Path("broken")) == numbers(Path("whole"))
    one, other = (load_file(Path(run, "adapter", "adapter_model.safetensors")) for run in ("whole", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [record for record in RunFolder.read("whole").read_metrics() if "entropy_coef" in record]
    assert [round(record["entropy_coef"], 6) for record in steps] == [0.015, 0.035, 0.055, 0.075, 0.095]
    assert resumed.state.entropy_coef == pytest.approx(0.1)
    assert GRPOConfig.from_toml("broken/config.toml").loss_type == str(Path("mine.py:gmpo").resolve())


def test_a_bad_loss_is_found_before_anything_is_loaded(settings: dict[str, Any]) -> None:
    args = GRPOConfig(**(settings | {"loss_type": "nowhere.py:mine", "model": "no/such-model"}))
    with pytest.raises(ConfigError, match=r"loss_type='nowhere.py:mine': nowhere.py: no such file"):
        GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS)


def test_the_recipe_names_the_file_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GMPO.parents[2])
    config = GRPOConfig.from_toml(GMPO.parent / "recipe.toml")
    assert dict(config.algorithm.objective().parameters) == {"clip": 0.4}

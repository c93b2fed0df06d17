"""Teachers behind a server, Covey's or vLLM's, and several teachers of which each row has one."""

import json
import sys
from collections.abc import Iterator
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
from servers import RunningServer, fake_server, serving

WHAT: Settings = {"beta": 0.0, "max_steps": 2, "server_retry_seconds": 0.1}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


def vllm(asked: list[Any], **change: Any) -> Any:
    """What vLLM answers, for `fake_server`: with a model's own log-probabilities, but for what `change` says.

    `spoil(choices)` changes what is answered to `spoiled_from`-th and later requests for scores.
    """
    model = tiny_model("llama")

    def entries(ids: list[int]) -> list[Any]:
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None, *({str(t): {"logprob": float(logp[at, t]), "rank": 1}} for at, t in enumerate(ids[1:]))]

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        if path == "/v1/models":
            model = {"id": "big", "owned_by": "vllm", "max_model_len": 64}
            return 200, {"data": [model | change.get("model", {})]}
        said = json.loads(body)
        if said.get("return_token_ids"):
            return 200, {"choices": [{"index": 0, "prompt_logprobs": [None]} | change.get("probe", {})]}
        asked.append(said)
        choices = [{"index": n, "prompt_logprobs": entries(ids)} for n, ids in enumerate(said["prompt"])]
        if len(asked) >= change.get("spoiled_from", 1):
            choices = change.get("spoil", list)(choices)
        return (200, {"choices": choices[::-1]}) if choices else (404, {"error": "no such model"})

    return answer


def first_batch(settings: Settings, reward: Any = first_letter_early, **changes: Any) -> Any:
    run = build(settings, reward, **(WHAT | changes))
    return run.make_batch(run.rollout().groups, run.next_phase())


def said(batch: Any) -> Any:
    return batch.teacher.logprobs[batch.sampled]


def test_a_server_says_what_the_same_weights_say_here(settings: Settings, server: RunningServer) -> None:
    warm = {"temperature": 0.8}
    here = first_batch(settings, name="here", teacher={"weights": "base"}, **warm)
    there = first_batch(settings, name="there", teacher={"weights": server.url}, **warm)
    np.testing.assert_allclose(said(there), said(here), atol=2e-5)
    asked: list[Any] = []
    with fake_server(vllm(asked)) as url:
        here = first_batch(settings, name="plain", teacher={"weights": "base"})
        there = first_batch(settings, name="vllm", teacher={"weights": f"{url}/#big"})
    np.testing.assert_allclose(said(there), said(here), atol=2e-5)
    assert [(one["model"], one["temperature"], one["prompt_logprobs"], one["max_tokens"]) for one in asked] == [
        ("big", 1.0, 0, 1)
    ]


def test_a_run_is_resumed_and_replayed(settings: Settings, server: RunningServer) -> None:
    what = WHAT | {"max_steps": 3, "save_steps": 1, "teacher": {"weights": server.url, "context": "solution"}}
    run = trained(settings, always, name="whole", **what)
    assert {"teacher/kl", "time/teacher"} <= steps_of(run)[0].keys()
    again = trained(settings, always, name="whole", resume=2, **what)
    assert same_weights(run, again)
    server.upload()
    raises(ServingError, "this server holds 1", run.make_batch, run.rollout().groups, run.next_phase())
    server.close()
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
        assert len(sent) == len({tuple(ids) for ids in sent}) <= 4
        assert sorted(sent) == sorted(
            {tuple(e.token_ids.tolist()): e.token_ids.tolist() for e in groups[0].episodes}.values()
        )
        np.testing.assert_array_equal(batch.teacher.logprobs[:4], batch.teacher.logprobs[4:])
        monkeypatch.setattr("covey.training.remote_teacher._IDS", 30)
        asked.clear()
        run.make_batch(groups, run.next_phase())
        assert len(asked) > 1
        assert all(len(one["prompt"]) == 1 or sum(map(len, one["prompt"])) <= 30 for one in asked)


def last(choices: list[Any], entry: Any) -> list[Any]:
    choices[1]["prompt_logprobs"][-1] = entry
    return choices


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda choices: last(choices, {"999": {"logprob": -1.0}}),
            r"no log-probability of token \d+, position \d+ of row 1",
        ),
        (lambda choices: last(choices, None), "no log-probability of token"),
        (lambda choices: last(choices, {str(n): {"logprob": float("nan")} for n in range(97)}), "no log-probability"),
        (lambda choices: last(choices, {str(n): {"logprob": -float("inf")} for n in range(97)}), "no log-probability"),
        (
            lambda choices: [{**one, "prompt_logprobs": one["prompt_logprobs"][:-1]} for one in choices],
            "cannot be read",
        ),
        (lambda choices: choices[1:], "cannot be read"),
        (lambda choices: [], "no such model"),
    ],
)
def test_an_answer_that_teaches_nothing_ends_a_run_that_can_be_resumed(
    settings: Settings, spoil: Any, words: str
) -> None:
    with fake_server(vllm([], spoil=spoil, spoiled_from=2)) as url:
        run = build(settings, first_letter_early, teacher={"weights": url}, save_steps=5, **WHAT)
        raises(
            ServingError,
            rf"the teacher {url}, asked for \d views of \d+ tokens: (.*){words}(.*)covey resume",
            run.train,
        )
    assert run.state.global_step == 1
    with fake_server(vllm([])) as url:
        again = build(settings, first_letter_early, teacher={"weights": url}, save_steps=5, **WHAT)
        again.train(resume_from_checkpoint=True)
    assert [step["step"] for step in steps_of(again)] == [1, 2]


@pytest.mark.parametrize(
    ("more", "change", "words"),
    [
        ({"temperature": 0.7}, {}, "at temperature 1 only"),
        ({"phases": [{"steps": 1, "temperature": 0.5}, {"steps": 1}]}, {}, "at temperature 1 only"),
        ({"keep_sampling_mask": True, "top_k": 5}, {}, "set algorithm.keep_sampling_mask to false"),
        ({}, {"probe": {"prompt_token_ids": [1, 2]}}, "needs the policy's tokenizer"),
        ({}, {"probe": {"prompt_logprobs": None}}, "gives no prompt_logprobs"),
        ({}, {"model": {"id": "other"}}, "write one after a #"),
    ],
)
def test_what_is_refused_before_training(settings: Settings, more: Settings, change: Any, words: str) -> None:
    with fake_server(vllm([], **change)) as url:
        raises(ConfigError, words, build, settings, teacher={"weights": f"{url}#big"}, **(WHAT | more))


def test_a_key_of_its_own(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_TEACHER_TOKEN", "secret")
    with serving(settings=ServeSettings("m", token="secret")) as own:
        first_batch(settings, teacher={"weights": own.url})
        monkeypatch.setenv("COVEY_TEACHER_TOKEN", "wrong")
        raises(ServingError, "bearer token", build, settings, teacher={"weights": own.url}, **WHAT)


def test_several_teachers(settings: Settings, server: RunningServer, tmp_path: Path) -> None:
    other = trained(settings, first_letter_early, name="other", **WHAT).save_model(tmp_path / "adapter")
    rows = [row | {"source": ("math", "code", "near")[n % 3]} for n, row in enumerate(ROWS)]
    teachers = {"math": {"weights": str(other)}, "code": {"weights": server.url}, "near": {"context": "solution"}}
    how = settings | WHAT | {"prompts_per_step": 3, "prompt_order": "given", "ledger": "all", "save_steps": 1}

    def run(name: str, rows: Any = rows, **teacher: Any) -> GRPOTrainer:
        args = GRPOConfig(**(how | {"output_dir": str(tmp_path / name), "teacher": teacher}))
        return GRPOTrainer(reward_funcs=always, args=args, train_dataset=rows)

    whole = run("several", key="source", teachers=teachers)
    groups, phase = whole.rollout().groups, whole.next_phase()
    batch = whole.make_batch(groups, phase)
    for name, teacher in teachers.items():
        own = np.array([group.prompt.columns["source"] == name for group in groups])[batch.group]
        assert own.any()
        alone = run(name, **teacher)
        one = alone.make_batch(groups, phase)
        np.testing.assert_allclose(batch.teacher.logprobs[own], one.teacher.logprobs[own], atol=2e-5)
    whole.train()
    first = steps_of(whole)[0]
    assert {f"teacher/{name}/kl" for name in teachers} <= first.keys()
    assert replay(whole.args.output_dir, 2, tolerance=0).exact
    wrong = [*rows[:3], ROWS[3] | {"source": "law"}]
    raises(
        ConfigError,
        "training row 3 has 'law' there, and the teachers are math, code, near",
        run,
        "x",
        wrong,
        key="source",
        teachers=teachers,
    )
    raises(ConfigError, "training row 0 has None", run, "x", ROWS, key="source", teachers=teachers)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"key": "a"}, "set both, or none"),
        ({"teachers": {"a": {}}}, "set both, or none"),
        ({"key": "a", "weights": "base", "teachers": {"a": {}}}, "each teacher has its own"),
        ({"key": "a", "teachers": {"a": {"weights": "live"}}}, "its own teacher"),
        ({"key": "a", "teachers": {"a": {"coef": 1.0}}}, "coef"),
        ({"weights": "http://h:1", "use": "loss"}, "set estimator to k1+"),
    ],
)
def test_what_cannot_be(table: dict[str, Any], words: str) -> None:
    raises(ConfigError, words.replace("+", r"\+"), GRPOConfig, "runs/x", teacher=table)

"""The names of the five documents at the doors: docs/documents.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from covey import GRPOConfig, GRPOTrainer
from covey.config.names import FIELDS, OPTIONS, SYNONYMS
from covey.errors import ConfigError, DataError, ModelError
from covey.metric_names import METRICS

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
TOKENS = torch.tensor([[5, 6, 7, 8]])


def share_of_letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model's form with other weights."""
    folder = tmp_path_factory.mktemp("other")
    model = tiny_model("llama")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make(settings: dict[str, Any], ref_model: Any = None, **changes: Any) -> GRPOTrainer:
    chosen = settings | {"beta": 0.1} | changes
    if chosen.get("use_peft") is False:
        del chosen["lora_r"]
    return GRPOTrainer(
        policy_model=chosen.pop("model"),
        ref_model=ref_model,
        reward_function=share_of_letters,
        args=GRPOConfig(**chosen),
        train_dataset=ROWS,
    )


def test_two_names_of_one_argument(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="model and policy_model: two names of one argument"):
        GRPOTrainer("a", policy_model="b", args=GRPOConfig(**settings))
    with pytest.raises(ConfigError, match="reward_funcs and reward_function: two names"):
        GRPOTrainer("a", share_of_letters, reward_function=share_of_letters)


def test_train_step_is_the_step_of_train(settings: dict[str, Any]) -> None:
    by_steps = make(settings, lr_scheduler_type="constant")
    metrics = [by_steps.train_step() for _ in range(2)]
    trained = make(settings, lr_scheduler_type="constant")
    trained.train()
    for step, record in zip(metrics, trained.state.log_history, strict=True):
        for name in ("loss", "policy_loss", "kl", "kl_penalty", "reward", "grad_norm"):
            assert step[name] == pytest.approx(record[name], abs=1e-7), name
        assert step["kl_penalty"] == pytest.approx(0.1 * step["kl"])
        assert step["loss"] == pytest.approx(step["policy_loss"] + step["kl_penalty"], abs=1e-6)
    assert (by_steps.state.global_step, by_steps.state.policy_version) == (2, trained.state.policy_version)
    for name, tensor in trained.policy.state_dict().items():
        torch.testing.assert_close(by_steps.policy.state_dict()[name], tensor)
    position = by_steps.state.data_position
    assert by_steps.train_step(ROWS[:1])["reward"] >= 0  # other rows leave the data's position
    assert (by_steps.state.global_step, by_steps.state.data_position) == (3, position)


def test_a_step_by_hand_is_the_step_of_train(settings: dict[str, Any]) -> None:
    once = {"max_steps": 1, "num_iterations": 1, "lr_scheduler_type": "constant"}
    by_hand, trained = make(settings, **once), make(settings, **once)
    trained.train()

    rollout = by_hand.rollout()
    assert [group.rewards.shape for group in rollout.groups] == [(4,), (4,)]
    loss = by_hand.compute_loss(rollout)
    assert loss == pytest.approx(trained.state.log_history[0]["loss"], abs=1e-7)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in by_hand.policy_model.parameters())
    by_hand.learner.optim_step(by_hand.args.learning_rate)
    for name, tensor in trained.policy.state_dict().items():
        torch.testing.assert_close(by_hand.policy.state_dict()[name], tensor)


def test_the_reference_is_frozen(settings: dict[str, Any]) -> None:
    trainer, tokens = make(settings), torch.tensor([[5, 6, 7]])
    before = trainer.ref_model(tokens).logits
    torch.testing.assert_close(trainer.policy_model(tokens).logits.detach(), before)
    trainer.compute_loss(trainer.rollout(ROWS[3:]))
    trainer.learner.optim_step(0.1)
    assert torch.equal(trainer.ref_model(tokens).logits, before)
    assert not torch.equal(trainer.policy_model(tokens).logits, before)
    assert make(settings, beta=0.0).ref_model is None


def test_rollout_says_what_a_row_is(settings: dict[str, Any]) -> None:
    trainer = make(settings)
    assert len(trainer.rollout(ROWS[:1]).groups) == len(trainer.rollout(ROWS[0]).groups) == 1  # type: ignore[arg-type]
    for text in (["say one"], "say one"):
        with pytest.raises(DataError, match=r"row 0 is 'say one', not an object .* must look like \{\"prompt\": ...,"):
            trainer.rollout(text)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"row 0 has no column 'prompt' .*did you mean prompt_column='question'"):
        trainer.complete([{"question": "1+1"}])
    of_task = GRPOTrainer(args=GRPOConfig(**(settings | {"task": "arithmetic", "max_completion_length": 4})))
    with pytest.raises(DataError, match=r"data.task='arithmetic' makes it .* pass rows of trainer.data.train"):
        of_task.train_step([{"question": "1+1", "answer": "2"}])


@pytest.mark.parametrize("use_peft", [True, False])
@pytest.mark.parametrize("loaded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_reference_that_is_another_model(settings: dict[str, Any], other: Path, use_peft: bool, loaded: bool) -> None:
    model = type(tiny_model("llama")).from_pretrained(other)
    expected = model(TOKENS).logits
    trainer = make(settings, model if loaded else other, use_peft=use_peft, kl_estimator="k1")
    own = trainer.policy_model(TOKENS).logits
    torch.testing.assert_close(trainer.ref_model(TOKENS).logits, expected)
    assert not torch.allclose(own, expected, atol=0.01)
    assert torch.equal(trainer.policy_model(TOKENS).logits, own)  # it is given back
    assert trainer.train_step()["kl"] > 0.01  # the policy is not its reference from the first step on
    torch.testing.assert_close(trainer.ref_model(TOKENS).logits, expected)  # it stays


def test_a_resumed_run_has_the_same_reference(settings: dict[str, Any], other: Path) -> None:
    settings |= {"save_steps": 1}
    make(settings, other).train()
    resumed = make(settings, other)
    before = resumed.ref_model(TOKENS).logits
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    assert torch.equal(resumed.ref_model(TOKENS).logits, before)


def test_the_exact_divergence_from_another_model(settings: dict[str, Any], other: Path) -> None:
    """`sum_v p (log p - log q)` of the sampled tokens' places, by transformers' own logits."""
    trainer = make(settings, other, kl_estimator="exact")
    model = type(tiny_model("llama")).from_pretrained(other)
    rollout = trainer.rollout()
    found = []
    for group in rollout.groups:
        for episode in group.episodes:
            ids = torch.tensor(episode.token_ids)[None]
            p, q = (m(ids).logits.log_softmax(-1)[0, :-1].detach() for m in (trainer.policy_model, model))
            found.append((p.exp() * (p - q)).sum(-1)[torch.tensor(episode.sampled)[1:]])
    assert trainer.train_step()["kl"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-3)


def test_a_reference_that_is_another_adapter(settings: dict[str, Any], tmp_path: Path) -> None:
    earlier = make(settings)
    earlier.train_step()
    folder = earlier.save_model(tmp_path / "adapter")
    expected = earlier.policy_model(TOKENS).logits
    trainer = make(settings, folder)
    torch.testing.assert_close(trainer.ref_model(TOKENS).logits, expected)
    assert not torch.equal(trainer.policy_model(TOKENS).logits, expected)  # a fresh adapter is the base
    with pytest.raises(ModelError, match=r"ref_model: .*its r is 4, the attached adapter has 8.*covey export"):
        make(settings, folder, lora_r=8)


def test_the_model_itself_needs_no_second_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(settings["model"])
    monkeypatch.chdir(folder.parent)
    for named in (str(folder), folder.name, f"./{folder.name}/"):
        trainer = make(settings | {"model": named}, named)
        assert trainer.policy.reference.is_base_model
        assert trainer.args.model.fused_layers


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"beta": 0.0}, "nothing compares with it"),
        ({"reference_update_steps": 9}, "reference_update_steps"),
        ({"max_staleness": 1}, "max_staleness=0"),
        ({"learners": 2}, "set distributed.learners to 1"),
    ],
)
def test_references_that_are_not_served(settings: dict[str, Any], other: Path, changes: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"ref_model=.*{why}"):
        make(settings, other, **changes)


def test_what_is_no_reference(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ref_model=int: no model"):
        make(settings, 3)
    small = tiny_model("llama", vocab_size=384)
    with pytest.raises(ModelError, match=r"ref_model=LlamaForCausalLM: .*give a model of its form"):
        make(settings, small)


def test_frozen_settings_name_what_changes_them() -> None:
    config = GRPOConfig()
    for settings in (config, config.sampling):
        with pytest.raises(ConfigError, match=r"temperature=0.7: settings are frozen; .*replace\(temperature.*phases"):
            settings.temperature = 0.7
    assert config.replace(temperature=0.7).temperature == 0.7
    with pytest.raises(ConfigError, match="frozen"):
        config.num_samples_per_prompt = 8


def test_the_page_names_what_is_there() -> None:
    """Every setting that usmle-qa.md prints is accepted, and every metric of the page is one."""
    page = (Path(__file__).parents[2] / "docs" / "documents.md").read_text()
    section = page.partition("## usmle-qa.md")[2].partition("\n## ")[0]
    for name in ("num_samples_per_prompt", "max_new_tokens", "kl_coef", "use_unbiased_kl", "off_policy_threshold"):
        assert name in section
        assert name in SYNONYMS or name in OPTIONS
    for name in re.findall(r"`(\w+)=", page):
        here = {*FIELDS, *SYNONYMS, *OPTIONS, "args", "ref_model", "decode", "params", "timeout", "retry_seconds"}
        assert name in here, name
    for name in ("kl_penalty", "kl", "accuracy", "reward", "mask_ratio", "loss", "policy_loss"):
        assert f"`{name}`" in section
        assert name in METRICS

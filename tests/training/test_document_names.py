"""The names of the five documents (docs/internals.md), and the recipes of usmle-qa.md."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from training_runs import ROWS, Settings, letters, steps_of

from covey import GRPOConfig, GRPOTrainer
from covey.config.names import FIELDS, OPTIONS, SYNONYMS
from covey.errors import ConfigError, DataError, ModelError
from covey.metric_names import METRICS
from covey.training.schedule import Elapsed
from covey.training.setup import algorithm_in, phase_plan
from fakes import raises, slow

TOKENS = torch.tensor([[5, 6, 7, 8]])
RECIPES = Path(__file__).parents[2] / "recipes" / "usmle"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model's form with other weights."""
    folder, model = tmp_path_factory.mktemp("other"), tiny_model("llama")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(folder)
    return folder


def make(settings: Settings, ref_model: Any = None, **changes: Any) -> GRPOTrainer:
    chosen = settings | {"beta": 0.1} | changes
    if chosen.get("use_peft") is False:
        del chosen["lora_r"]
    named = {"policy_model": chosen.pop("model"), "reward_function": letters}
    return GRPOTrainer(**named, ref_model=ref_model, args=GRPOConfig(**chosen), train_dataset=ROWS)


def test_train_step_and_a_step_by_hand_are_the_step_of_train(settings: Settings) -> None:
    by_steps, trained = (make(settings, lr_scheduler_type="constant") for _ in range(2))
    metrics = [by_steps.train_step() for _ in range(2)]
    trained.train()
    for step, record in zip(metrics, trained.state.log_history, strict=True):
        for name in ("loss", "policy_loss", "kl", "kl_penalty", "reward", "grad_norm"):
            assert step[name] == pytest.approx(record[name], abs=1e-7), name
        assert step["kl_penalty"] == pytest.approx(0.1 * step["kl"])
        assert step["loss"] == pytest.approx(step["policy_loss"] + step["kl_penalty"], abs=1e-6)
    assert (by_steps.state.global_step, by_steps.state.policy_version) == (2, trained.state.policy_version)
    torch.testing.assert_close(by_steps.policy.state_dict(), trained.policy.state_dict())
    position = by_steps.state.data_position
    assert by_steps.train_step(ROWS[:1])["reward"] >= 0  # other rows leave the data's position
    assert (by_steps.state.global_step, by_steps.state.data_position) == (3, position)
    settings |= {"max_steps": 1, "lr_scheduler_type": "constant", "output_dir": settings["output_dir"] + "-again"}
    by_hand, trained = make(settings), make(settings)
    trained.train()
    before = by_hand.ref_model(TOKENS).logits
    torch.testing.assert_close(by_hand.policy_model(TOKENS).logits.detach(), before)
    rollout = by_hand.rollout()
    assert [group.rewards.shape for group in rollout.groups] == [(4,), (4,)]
    assert by_hand.compute_loss(rollout) == pytest.approx(trained.state.log_history[0]["loss"], abs=1e-7)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in by_hand.policy_model.parameters())
    by_hand.learner.optim_step(by_hand.args.learning_rate)
    torch.testing.assert_close(by_hand.policy.state_dict(), trained.policy.state_dict())
    assert torch.equal(by_hand.ref_model(TOKENS).logits, before)  # the reference is frozen
    assert not torch.equal(by_hand.policy_model(TOKENS).logits, before)
    assert make(settings, beta=0.0).ref_model is None


def test_what_is_given_wrongly_is_named(settings: Settings, other: Path) -> None:
    with pytest.raises(ConfigError, match="model and policy_model: two names of one argument"):
        GRPOTrainer("a", policy_model="b", args=GRPOConfig(**settings))
    with pytest.raises(ConfigError, match="reward_funcs and reward_function: two names"):
        GRPOTrainer("a", letters, reward_function=letters)
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
    small = tiny_model("llama", vocab_size=384)
    for model, changes, error, why in (
        (other, {"beta": 0.0}, ConfigError, "ref_model=.*nothing compares with it"),
        (other, {"reference_update_steps": 9}, ConfigError, "ref_model=.*reference_update_steps"),
        (other, {"max_staleness": 1}, ConfigError, "ref_model=.*max_staleness=0"),
        (other, {"learners": 2}, ConfigError, "ref_model=.*set distributed.learners to 1"),
        (3, {}, ConfigError, "ref_model=int: no model"),
        (small, {}, ModelError, r"ref_model=LlamaForCausalLM: .*give a model of its form"),
    ):
        raises(error, why, make, settings, model, **changes)


@pytest.mark.parametrize("use_peft", [True, False])
@pytest.mark.parametrize("loaded", [False, slow(True)])
def test_a_reference_that_is_another_model(settings: Settings, other: Path, use_peft: bool, loaded: bool) -> None:
    model = type(tiny_model("llama")).from_pretrained(other)
    expected = model(TOKENS).logits
    trainer = make(settings, model if loaded else other, use_peft=use_peft, kl_estimator="k1")
    own = trainer.policy_model(TOKENS).logits
    torch.testing.assert_close(trainer.ref_model(TOKENS).logits, expected)
    assert not torch.allclose(own, expected, atol=0.01)
    assert torch.equal(trainer.policy_model(TOKENS).logits, own)  # it is given back
    assert trainer.train_step()["kl"] > 0.01  # the policy is not its reference from the first step on
    torch.testing.assert_close(trainer.ref_model(TOKENS).logits, expected)  # it stays


def test_a_resumed_run_has_the_same_reference(settings: Settings, other: Path) -> None:
    settings["save_steps"] = 1
    make(settings, other).train()
    resumed = make(settings, other)
    before = resumed.ref_model(TOKENS).logits
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    assert torch.equal(resumed.ref_model(TOKENS).logits, before)


def test_the_exact_divergence_from_another_model(settings: Settings, other: Path) -> None:
    """`sum_v p (log p - log q)` of the sampled tokens' places, by transformers' own logits."""
    trainer = make(settings, other, kl_estimator="exact")
    model, rollout = type(tiny_model("llama")).from_pretrained(other), trainer.rollout()
    found = []
    for episode in (episode for group in rollout.groups for episode in group.episodes):
        ids = torch.tensor(episode.token_ids)[None]
        p, q = (m(ids).logits.log_softmax(-1)[0, :-1].detach() for m in (trainer.policy_model, model))
        found.append((p.exp() * (p - q)).sum(-1)[torch.tensor(episode.sampled)[1:]])
    assert trainer.train_step()["kl"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-3)


def test_a_reference_that_is_another_adapter(settings: Settings, tmp_path: Path, monkeypatch: Any) -> None:
    earlier = make(settings)
    earlier.train_step()
    folder, expected = earlier.save_model(tmp_path / "adapter"), earlier.policy_model(TOKENS).logits
    trainer = make(settings, folder)
    torch.testing.assert_close(trainer.ref_model(TOKENS).logits, expected)
    assert not torch.equal(trainer.policy_model(TOKENS).logits, expected)  # a fresh adapter is the base
    with pytest.raises(ModelError, match=r"ref_model: .*its r is 4, the attached adapter has 8.*covey export"):
        make(settings, folder, lora_r=8)
    model = Path(settings["model"])  # the model itself needs no second one
    monkeypatch.chdir(model.parent)
    for named in (str(model), model.name, f"./{model.name}/"):
        trainer = make(settings | {"model": named}, named)
        assert trainer.policy.reference.is_base_model
        assert trainer.args.model.fused_layers


def test_the_page_names_what_is_there() -> None:
    """Every setting that usmle-qa.md prints is accepted, and every metric of the page is one."""
    page = (Path(__file__).parents[2] / "docs" / "internals.md").read_text()
    page = page.partition("## Names of the five documents")[2].partition("\n## ")[0]
    section = page.partition("### usmle-qa.md")[2].partition("\n### ")[0]
    for name in ("num_samples_per_prompt", "max_new_tokens", "kl_coef", "use_unbiased_kl", "off_policy_threshold"):
        assert name in section
        assert name in SYNONYMS or name in OPTIONS
    for name in re.findall(r"`(\w+)=", page):
        here = {*FIELDS, *SYNONYMS, *OPTIONS, "args", "ref_model", "decode", "params", "timeout", "retry_seconds"}
        assert name in here, name
    for name in ("kl_penalty", "kl", "accuracy", "reward", "mask_ratio", "loss", "policy_loss"):
        assert f"`{name}`" in section
        assert name in METRICS


@pytest.mark.parametrize("recipe", ["recipe.toml", "document.toml"])
def test_two_steps_of_the_recipes(recipe: str, model_folder: Path, tmp_path: Path) -> None:
    options = {"A": "Gout", "B": "Sepsis", "C": "Asthma", "D": "Anaemia"}
    rows = [{"question": f"Case {n * 'x'}: which?", "options": options, "answer": "ABCD"[n % 4]} for n in range(8)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"model": model_folder, "dataset": tmp_path / "questions.jsonl", "output_dir": tmp_path / "run"}
    changes |= {"task": "usmle:num_eval=2", "prompts_per_step": 2, "max_completion_length": 12, "max_steps": 2}
    changes |= {"eval_steps": 2, "progress": "false", "validity_min_length": 1}
    args = GRPOConfig.from_toml(RECIPES / recipe, [f"{FIELDS[name]}.{name}={value}" for name, value in changes.items()])

    def letters(completions: list[Any], **columns: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [sum(c.isalpha() for c in text) / (len(text) + 1) for text in texts]

    trainer = GRPOTrainer(args=args, reward_funcs=letters)
    trainer.train()
    steps = steps_of(trainer)
    assert len(steps) == 2
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert steps[0]["mask_ratio"] <= 1.0
    if recipe == "document.toml":  # its KL has a gradient also where masks leave no answer
        assert trainer.state.updates == 2


def test_the_document_s_recipe_is_the_document_s_configuration() -> None:
    """GRPO_CONFIG as usmle-qa.md prints it, read through its own names."""
    recipe = GRPOConfig.from_toml(RECIPES / "document.toml")
    sampling = {"num_samples_per_prompt": 16, "temperature": 1.0, "top_k": 40, "max_new_tokens": 512}
    optim = {"learning_rate": 1e-5, "embedding_lr": 2e-4, "use_peft": False, "max_grad_norm": 1.0}
    advantages = {"kl_coef": 0.01, "use_baseline": True, "normalize_advantages": False, "use_unbiased_kl": True}
    masks = {"use_off_policy_masking": True, "off_policy_threshold": 0.5, "update_reference_every": 100}
    printed = GRPOConfig(**sampling, **optim, **advantages, **masks, prompts_per_step=16)
    other = {"kl_estimator", "reference_drift_threshold"}
    for section in ("sampling", "optim", "algorithm"):
        for name in getattr(printed, section).model_fields_set - other:
            assert getattr(recipe, name) == getattr(printed, name), name
    # the document does not say whether the threshold is one of a token or of the whole answer
    assert recipe.algorithm.reference_drift == (0.5, "sum")
    assert printed.algorithm.reference_drift == (0.5, "per_token_mean")
    # the name promises an unbiased estimate; the recipe has the formula that is printed under it
    assert (printed.kl_estimator, recipe.kl_estimator) == ("k3_unbiased", "exact_weighted")
    assert [phase.name for phase in recipe.phases] == ["warm-up", "main", "final"]
    warm_up, main, final = recipe.phases
    assert (warm_up.temperature, warm_up.beta, warm_up.num_generations, warm_up.steps) == (0.7, 0.02, 8, 100)
    assert (main.tokens, final.tokens, final.temperature, final.learning_rate) == (450_000_000, 100_000_000, 0.8, 5e-6)
    settings = algorithm_in(recipe, phase_plan(recipe).at(Elapsed(0, 0, 0.0)))
    objective = settings.objective()
    assert (objective.loss.name, objective.loss.aggregation) == ("reinforce_kept", "sequence_sum_kept")
    assert (objective.loss.kl_aggregation, objective.kl_estimator, objective.beta) == (
        "token_mean",
        "exact_weighted",
        0.02,
    )
    assert (settings.reference_drift, settings.off_policy_mask_threshold) == ((0.5, "sum"), None)

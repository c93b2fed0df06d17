"""recipes/usmle: both recipes run, and the second is what usmle-qa.md prints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from covey import GRPOConfig, GRPOTrainer
from covey.training.setup import algorithm_in

RECIPES = Path(__file__).parents[2] / "recipes" / "usmle"


def questions() -> str:
    options = {"A": "Gout", "B": "Sepsis", "C": "Asthma", "D": "Anaemia"}
    rows = [{"question": f"Case {n * 'x'}: which one?", "options": options, "answer": "ABCD"[n % 4]} for n in range(8)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def share_of_letters(completions: list, **columns: object) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isalpha() for c in text) / (len(text) + 1) for text in texts]


@pytest.mark.parametrize("recipe", ["recipe.toml", "document.toml"])
def test_two_steps(recipe: str, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(questions())
    changes = {
        "model.model": model_folder,
        "data.dataset": tmp_path / "questions.jsonl",
        "data.task": "usmle:num_eval=2",
        "data.prompts_per_step": 2,
        "sampling.max_completion_length": 12,
        "schedule.max_steps": 2,
        "evaluation.eval_steps": 2,
        "run.output_dir": tmp_path / "run",
        "run.progress": "false",
        "algorithm.validity_min_length": 1,
    }
    args = GRPOConfig.from_toml(RECIPES / recipe, [f"{name}={value}" for name, value in changes.items()])
    trainer = GRPOTrainer(args=args, reward_funcs=share_of_letters)
    trainer.train()
    steps = [record for record in trainer.state.log_history if "loss" in record]
    assert len(steps) == 2
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert steps[0]["mask_ratio"] <= 1.0
    if recipe == "document.toml":  # its KL has a gradient also where masks leave no answer
        assert trainer.state.updates == 2


def test_the_document_s_recipe_is_the_document_s_configuration() -> None:
    """GRPO_CONFIG as usmle-qa.md prints it, read through its own names."""
    recipe = GRPOConfig.from_toml(RECIPES / "document.toml")
    printed = GRPOConfig(
        num_samples_per_prompt=16,
        temperature=1.0,
        top_k=40,
        max_new_tokens=512,
        prompts_per_step=16,
        learning_rate=1e-5,
        embedding_lr=2e-4,
        use_peft=False,
        kl_coef=0.01,
        use_baseline=True,
        normalize_advantages=False,
        use_unbiased_kl=True,
        use_off_policy_masking=True,
        off_policy_threshold=0.5,
        max_grad_norm=1.0,
        update_reference_every=100,
    )
    for section in ("sampling", "optim"):
        for name in getattr(printed, section).model_fields_set:
            assert getattr(recipe, name) == getattr(printed, name), name
    for name in printed.algorithm.model_fields_set - {"kl_estimator", "reference_drift_threshold"}:
        assert getattr(recipe, name) == getattr(printed, name), name
    # the document does not say whether the threshold is one of a token or of the whole answer
    assert (recipe.algorithm.reference_drift, printed.algorithm.reference_drift) == (
        (0.5, "sum"),
        (0.5, "per_token_mean"),
    )
    # the name promises an unbiased estimate; the recipe has the formula that is printed under it
    assert (printed.kl_estimator, recipe.kl_estimator) == ("k3_unbiased", "exact_weighted")
    assert [phase.name for phase in recipe.phases] == ["warm-up", "main", "final"]
    warm_up, main, final = recipe.phases
    assert (warm_up.temperature, warm_up.beta, warm_up.num_generations, warm_up.steps) == (0.7, 0.02, 8, 100)
    assert (main.tokens, final.tokens, final.temperature, final.learning_rate) == (450_000_000, 100_000_000, 0.8, 5e-6)


def test_the_document_s_recipe_has_its_loss() -> None:
    from covey.training.schedule import Elapsed
    from covey.training.setup import phase_plan

    recipe = GRPOConfig.from_toml(RECIPES / "document.toml")
    settings = algorithm_in(recipe, phase_plan(recipe).at(Elapsed(0, 0, 0.0)))
    objective = settings.objective()
    assert (objective.loss.name, objective.aggregation) == ("reinforce_kept", "sequence_sum_kept")
    assert (objective.kl_aggregation, objective.kl_estimator, objective.beta) == ("token_mean", "exact_weighted", 0.02)
    assert settings.reference_drift == (0.5, "sum")
    assert settings.off_policy_mask_threshold is None

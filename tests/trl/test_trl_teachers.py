"""TRL's trainers with a teacher: scripts as their users write them, losses against numbers of TRL 1.16.0's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM
from trl_runs import ROWS, changed, unique_letters, weights

from covey.algorithms import count_step, policy_loss, token_weights
from covey.errors import ConfigError
from covey.pytorch.logprobs import Head, ReferenceDistribution, score_tokens
from covey.rollout.views import Views
from covey.trl import DistillationConfig, DistillationTrainer, GRPOConfig
from covey.trl.experimental.sdft import SDFTConfig, SDFTTrainer
from covey.trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from covey.trl.translate import settings
from fakes import raises

SOME: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "max_steps": 2, "max_completion_length": 8}
SOME |= {"learning_rate": 0.01, "bf16": False}
LOGITS = {"distillation_mode": "topk_logits", "distillation_topk": 3, "distillation_add_tail": True}
NUMBERS: list[tuple[Any, dict[str, Any], float, float]] = [  # loss, and its gradient by the logits times `PROBE`
    (DistillationConfig, {"beta": 1.0}, 1.584708, 0.059811),
    (DistillationConfig, {"beta": 0.0}, 1.462147, 0.087204),
    (DistillationConfig, {"beta": 0.5}, 0.265553, 0.008942),
    (SDPOConfig, {}, -1.330763, -0.090581),
    (SDPOConfig, LOGITS, 0.889256, 0.02611),
    (SDPOConfig, LOGITS | {"distillation_weight": 0.5}, 0.361295, 0.095162),
    (SDPOConfig, {"distillation_mode": "full_logits", "distillation_alpha": 0.3}, 0.172449, -0.001479),
    (SDFTConfig, {"distillation_topk": 3}, 0.128831, 0.008691),
    (SDFTConfig, LOGITS, 0.183637, 0.014237),
    (
        SDPOConfig,
        LOGITS | {"num_iterations": 2, "distillation_is_clip": 1.1},
        0.920559,
        0.009813,
    ),  # where `old` is not `logp`
]
N, T, V = 3, 4, 7
AT = torch.arange(N * T * V, dtype=torch.float64).reshape(N, T, V)
PROBE, TEACHER, IDS = torch.sin(AT), 2 * torch.cos(AT * 1.7), torch.arange(N * T).reshape(N, T) * 3 % V
MASK = torch.arange(T)[None] < torch.tensor([[4], [2], [3]])


@pytest.mark.parametrize(("config", "options", "loss", "slope"), NUMBERS, ids=str)
def test_losses_are_trls(config: Any, options: dict[str, Any], loss: float, slope: float, tmp_path: Path) -> None:
    """Of one batch; with SDPO the second row has no teacher."""
    args = config(str(tmp_path), per_device_train_batch_size=8, temperature=0.8, report_to="none", **options)
    objective = settings(args, num_prompts=8, lora=False, **args.taught()).algorithm.objective()
    logits, eye = (2 * torch.sin(1 + AT * 3.1)).requires_grad_(), torch.eye(V, dtype=torch.float64)
    teacher = ReferenceDistribution(TEACHER[MASK], lambda x: x, how=objective.teacher)
    teacher = teacher if objective.distils_vocabulary else None
    scores = score_tokens(logits[MASK], IDS[MASK], Head(eye), temperature=0.8, reference=teacher)
    theirs = (TEACHER / 0.8).log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
    theirs[1] = torch.nan if config is SDPOConfig else theirs[1]
    logp, kl = (torch.zeros(N, T, dtype=torch.float64) for _ in range(2))
    logp = logp.masked_scatter(MASK, scores.logp.double())
    kl = kl.masked_scatter(MASK, scores.exact_kl.double()) if teacher else None

    def averaged(name: str) -> Any:
        return torch.from_numpy(token_weights(MASK.numpy(), count_step(MASK.numpy()), name))

    known = {"kl": kl, "kl_weights": objective.loss.kl_aggregation and averaged(objective.loss.kl_aggregation)}
    advantages = torch.tensor([1.0, -0.5, -0.5], dtype=torch.float64)
    old = logp.detach() - 0.3 * torch.sin(IDS) if "num_iterations" in options else logp.detach()
    given = (logp, old, advantages, MASK, averaged(objective.loss.aggregation), objective)
    found = policy_loss(*given, teacher=theirs, **known).loss
    if teacher is not None:  # TRL's sampled_token has this gradient of another value
        assert found.item() == pytest.approx(loss, abs=2e-6)
    (gradient,) = torch.autograd.grad(found, logits)
    assert (gradient * PROBE).sum().item() == pytest.approx(slope, abs=2e-6)


@pytest.mark.parametrize("loaded", [False, True])
def test_distillation(loaded: bool, model_folder: Path, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    with torch.no_grad():
        teacher.get_output_embeddings().weight.add_(0.1)
    teacher.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    args = DistillationConfig(str(tmp_path / "out"), per_device_train_batch_size=2, eval_strategy="steps", **SOME)
    given = teacher if loaded else str(tmp_path / "other")
    trainer = DistillationTrainer(str(model_folder), given, args, train_dataset=ROWS, eval_dataset=ROWS[:1])
    before = weights(trainer)
    assert trainer.train().global_step == 2
    assert changed(trainer, before) == set(before)
    last = trainer.state.log_history[-1]
    assert last["teacher/divergence"] > 0
    assert last["teacher/rows"] == 1
    assert "eval_teacher/kl" in trainer.evaluate()


def test_self_distillation(model_folder: Path, tmp_path: Path) -> None:
    """The examples of TRL's own pages on SDPO and SDFT."""
    rows = [{"prompt": [{"role": "user", "content": "Solve 2+2."}], "privileged_context": "Your earlier answer."}]

    def every_other(completions: list[Any], **columns: Any) -> list[float]:
        return [float(n % 2) for n, _ in enumerate(completions)]

    how = SOME | {"per_device_train_batch_size": 4, "num_generations": 4, "distillation_mode": "topk_logits"}
    args = SDPOConfig(str(tmp_path / "a"), distillation_topk=100, include_environment_feedback=True, **how)
    sdpo = SDPOTrainer(model=str(model_folder), reward_funcs=every_other, args=args, train_dataset=rows)
    args = SDFTConfig(str(tmp_path / "b"), distillation_alpha=0.5, distillation_topk=5, num_iterations=2, **how)
    rows = [rows[0] | {"privileged_context": [{"role": "assistant", "content": "4."}]}]
    sdft = SDFTTrainer(model=str(model_folder), args=args, train_dataset=rows)
    for trainer in (sdpo, sdft):
        before = weights(trainer)
        assert trainer.train().global_step == 2
        last = trainer.state.log_history[-1]
        assert last["teacher/rows"] == last["self_distillation/reprompt_sample_fraction"] == 1
        assert last["teacher/divergence"] == last["self_distillation/distillation_loss"]
        assert changed(trainer, before)
    seen = []
    group = sdpo.run.complete(sdpo._rows, 4).groups[0]
    group = replace(group, rewards=np.array([0.0, 1.0, 0.0, 1.0]))
    Views(sdpo.run.args.algorithm.teacher, lambda said: [*map(seen.append, said)] or np.array([1]), 99)([group])
    solution = f"\nCorrect solution:\n\n{group.episodes[1].text.strip()}\n\n"
    feedback = "\nThe following is feedback from your unsuccessful earlier attempt:\n\nYour earlier answer.\n\n"
    said = f"Solve 2+2.{solution}{feedback}\n\nCorrectly solve the original question.\n"
    assert seen[0] == {"role": "user", "content": said}  # as TRL's context builder writes it


def test_what_is_impossible_is_one_clear_error(model_folder: Path, tmp_path: Path) -> None:
    sdpo: dict[str, Any] = {"reward_funcs": unique_letters, "args": SDPOConfig}
    wanted: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
        (DistillationTrainer, {}, {}, "teacher_model: pass the name of a whole model"),
        (DistillationTrainer, {"teacher_model": "x"}, {"teacher_model_revision": "main"}, "pass its folder"),
        (DistillationTrainer, {"teacher_model": "x"}, {"teacher_model_init_kwargs": {"variant": "a"}}, "variant"),
        (DistillationTrainer, {"teacher_model": str(model_folder)}, {"beta": 2.0}, "beta"),
        (SDPOTrainer, sdpo, {"distillation_alpha": 0.5}, "one token has a reverse KL only"),
        (SDPOTrainer, sdpo, LOGITS | {"distillation_alpha": 0.0}, "set full_logits"),
        (SDPOTrainer, sdpo, {"use_successful_as_teacher": False}, "there is no teacher"),
        (SDPOTrainer, sdpo, {"dont_reprompt_on_self_success": False}, "leave it True"),
        (SDPOTrainer, sdpo, {"teacher_update_rate": 0.0}, "teacher_update_rate"),
        (SDPOTrainer, sdpo, {"distillation_weight": 1.5}, "distillation_weight"),
        (SDFTTrainer, {}, {"generate_from_teacher": True}, "the policy's own"),
        (SDFTTrainer, {}, {"metric_for_best_model": "loss"}, "no rewards to compare evaluations by"),
        (SDFTTrainer, {}, {"teacher_prompt_template": "{prompt}"}, "teacher_prompt_template"),
        (SDFTTrainer, {}, {"distillation_topk": None}, "distillation_topk=None"),
        (SDFTTrainer, {}, {"distillation_topk": 1}, "distillation_add_tail=False: it becomes tail=False with top_k=1"),
        (SDFTTrainer, {"args": GRPOConfig}, {}, "pass a covey.trl SDFTConfig"),
    ]
    for trainer, given, options, message in wanted:
        config = given.get("args", trainer._config_class)
        args = config(str(tmp_path), per_device_train_batch_size=8, **(SOME | options))
        given = {"model": str(model_folder), "train_dataset": ROWS, **given, "args": args}
        raises(ConfigError, message, trainer, **given)
    raises(TypeError, "vespo_k_pos", SDPOConfig, str(tmp_path), vespo_k_pos=1.0)
    raises(TypeError, "rewards", SDFTTrainer, str(model_folder), rewards=unique_letters)

"""Methods of TRL's trainer that subclasses override, and what to do here instead: Covey would never call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from covey.errors import ConfigError

_INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ("compute_loss", "_compute_loss", "training_step", "get_sapo_token_loss", "get_gamma_weights"),
        "write the loss as a function and give loss_type='FILE.py:NAME'",
    ),
    **dict.fromkeys(("_generate", "_generate_single_turn"), "give rollout_func, or replace model.generate"),
    **dict.fromkeys(("_calculate_rewards", "_generate_and_score_completions"), "write a reward function"),
    **dict.fromkeys(("_tool_call_loop", "_get_tool_suffix_ids"), "give tools, environment_factory or rollout_func"),
    "_save_checkpoint": "write a callback with on_save",
    **dict.fromkeys(("evaluation_loop", "prediction_loop"), "write a callback with on_evaluate"),
    **dict.fromkeys(("create_optimizer", "create_scheduler"), "give optimizers"),
    **dict.fromkeys(
        ("get_train_dataloader", "_get_train_sampler", "get_eval_dataloader", "_get_eval_sampler"),
        "order the rows of train_dataset and set shuffle_dataset=False",
    ),
    **dict.fromkeys(
        ("_prepare_inputs", "prediction_step", "_get_per_token_logps_and_entropies"),
        "use covey.GRPOTrainer, whose parts can be replaced (docs/design.md)",
    ),
    **dict.fromkeys(
        ("get_high_entropy_mask", "get_off_policy_mask"), "set top_entropy_quantile or off_policy_mask_threshold"
    ),
}


def _refused(sentence: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        """Refused: there is none.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(sentence)

    return refuse


class NeverCalled:
    """Refuses a subclass that overrides something without effect."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("covey."):
            return
        problems = [
            f"{cls.__name__}.{name}: is never called; {_INSTEAD[name]}" for name in vars(cls) if name in _INSTEAD
        ]
        if problems:
            raise ConfigError("\n".join(problems))

    get_train_dataloader = _refused(
        "there is no data loader: prompts are drawn by the run; read trainer.train_dataset instead"
    )
    get_eval_dataloader = _refused(
        "there is no data loader: evaluate() samples the prompts; read trainer.eval_dataset instead"
    )
    predict = _refused("predict: a policy has no labels; use generate(prompts) for texts, evaluate(rows) for rewards")

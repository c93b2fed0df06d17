"""The `run` section: where a run is recorded and how much of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from covey.config.section import PathText, Section

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]


def _trackers(value: Any) -> Any:
    if value is None or value == "none" or value == ["none"]:
        return ()
    return (value,) if isinstance(value, str) else value


class RunConfig(Section, frozen=True):
    """Where a run is recorded, its seed, how often it logs and when it saves."""

    output_dir: PathText = Field(default="runs/covey", min_length=1)
    """Folder of the run: metrics, completions, checkpoints, config. A recipe's default is runs/NAME, after its file (or
    the folder of a recipe.toml)."""
    overwrite: bool = False
    """Delete the run that is in output_dir, and start anew; false = replace only a run without a finished step."""
    run_name: str | None = None
    """Name in reports; none = the folder's name."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of everything random: data order, adapter, sampled completions."""
    logging_steps: int = Field(default=1, ge=1)
    """Optimiser steps between lines of metrics on the screen; metrics.jsonl has every step."""
    save_steps: int = Field(default=50, ge=0)
    """Optimiser steps between checkpoints; 0 = only at the end of the run."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Keep this many checkpoints, deleting the oldest; none = all."""
    report_to: Annotated[tuple[Tracker, ...], Field(strict=False), BeforeValidator(_trackers)] = ()
    """Also send metrics to these trackers. The run folder always has them."""
    report_completions: int = Field(default=0, ge=0, le=200)
    """Completions of a step, with prompts and rewards, that the trackers get too; 0 = none. A long run sends those of
    fewer and fewer steps."""
    log_completions: bool = True
    """Record sampled completions with their rewards."""
    keep_batches: bool = True
    """Keep the token ids, log-probabilities and rewards that each step trained on, from which `covey doctor RUN --step
    N` computes the step again; about 6 bytes a token."""
    ledger: str = Field(default="sampled:2", pattern=r"^(off|all|sampled:[1-9][0-9]{0,5})(,all:[1-9][0-9]{0,8})?$")
    """off, sampled:N (such as sampled:2) or all: groups of each step whose tokens its ledger has; sampled:2,all:50 =
    those of all groups every 50 steps. It tells of a token what it got and what it added to the loss (`covey watch`
    shows it), in about 50 bytes."""
    allow_mixture: bool = False
    """Let machines of one run differ in GPUs, drivers, threads, or versions of torch and NumPy. What is computed
    depends on which machine does it then; false = such a cluster is refused."""
    progress: bool = True
    """Show progress on the screen (standard error)."""
    num_completions_to_print: int | None = Field(default=None, ge=0)
    """Completions shown on the screen each time metrics are; none = no completions."""

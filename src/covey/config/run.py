"""The `run` section: where and how a run is recorded."""

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
    """The run folder, the seed, logging and checkpoints."""

    output_dir: PathText = Field(default="runs/covey", min_length=1)
    """Folder for metrics, completions, checkpoints and settings. Default with a recipe: runs/NAME, where NAME is the
    name of its file (or of the folder that holds recipe.toml)."""
    overwrite: bool = False
    """Delete an earlier run in output_dir and start again. false = only if that run has no finished step."""
    run_name: str | None = None
    """Name of the run in reports and trackers; none = the folder's name."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of all random numbers: data order, new adapter, sampled completions."""
    logging_steps: int = Field(default=1, ge=1)
    """Print metrics, and send them to trackers, every this many steps. metrics.jsonl has every step."""
    save_steps: int = Field(default=50, ge=0)
    """Save a checkpoint every this many steps; 0 = only at the end of the run."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Most checkpoints to keep; the oldest are deleted first. none = keep all."""
    report_to: Annotated[tuple[Tracker, ...], Field(strict=False), BeforeValidator(_trackers)] = ()
    """Experiment trackers that also get the metrics. The run folder always has them."""
    report_completions: int = Field(default=0, ge=0, le=200)
    """Completions, with prompts and rewards, to send to trackers with a step's metrics; 0 = none. Later in a run, fewer
    steps send them."""
    log_completions: bool = True
    """Write sampled completions and their rewards into the run folder."""
    keep_batches: bool = True
    """Keep each step's token ids, log-probabilities and rewards, about 6 bytes per token. `covey doctor RUN --step N`
    computes a step again from them."""
    ledger: str = Field(default="sampled:2", pattern=r"^(off|all|sampled:[1-9][0-9]{0,5})(,all:[1-9][0-9]{0,8})?$")
    """off, sampled:N (N random groups of each step, such as sampled:2) or all. The ledger records advantage, masks,
    ratio, loss and gradient of each token of these groups, about 50 bytes per token; `covey watch` shows it.
    sampled:2,all:50 = 2 groups, and all groups every 50 steps."""
    allow_mixture: bool = False
    """Let the machines of a run differ in GPUs, drivers, threads, or versions of torch and NumPy. Results then depend
    on which machine computes what. false = refuse such a cluster."""
    progress: bool = True
    """Show progress on the screen (standard error)."""
    num_completions_to_print: int | None = Field(default=None, ge=0)
    """Completions to print each time metrics are printed; none = no completions."""

"""The command line: `covey train`, `resume`, `plan`, `eval`, `sample`, `config`, `curve`.

Heavy imports happen inside the commands, so that `covey --help` answers at once. A `CoveyError` is printed as one
message and ends with exit status 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from covey.config import GRPOConfig, render_explain
from covey.errors import ConfigError, CoveyError
from covey.functions import load_function

if TYPE_CHECKING:
    from covey.training.trainer import GRPOTrainer

app = typer.Typer(
    name="covey",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train language models with Group Relative Policy Optimization (GRPO).",
)
out = Console()
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.FIELD=VALUE]...",
        help="Settings that replace the recipe's, e.g. optim.learning_rate=2e-5.",
    ),
]


def main() -> None:
    """Entry point of the `covey` command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Waiting threads spin about 10 us, then sleep. Longer spins take the core from the thread that is waited for when
    # the machine has other work (8 times slower sampling); no spin costs a quarter of the speed on a quiet one.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app()
    except CoveyError as error:
        err.print(f"covey: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("covey: interrupted", style="red")
        sys.exit(130)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a TOML file, or a folder that holds recipe.toml.")],
    overrides: Overrides = None,
) -> None:
    """Train as a recipe says. Measures before and after where the recipe has held-out prompts.

    Leaves a run folder (`run.output_dir`) with config, metrics, completions, checkpoints, adapter and learning curve.
    """
    config = GRPOConfig.from_toml(_recipe_file(recipe), overrides=overrides or [])
    from covey.observe.run_folder import RunFolder

    RunFolder.check_new(config.run.output_dir)
    trainer = _trainer(config)
    trainer.train()
    _summary(trainer, Path(config.run.output_dir))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was stopped or killed.")],
    overrides: Overrides = None,
) -> None:
    """Go on with a run from its newest checkpoint, to the numbers it would have had unbroken."""
    from covey.observe.run_folder import RunFolder

    folder = RunFolder.read(run)
    if not folder.config_path.exists():
        raise ConfigError(f"{run}: the run was killed before it began, nothing is in it; start it with `covey train`")
    config = GRPOConfig.from_toml(folder.config_path, overrides=[*(overrides or []), f"run.output_dir={run}"])
    trainer = _trainer(config)
    trainer.train(resume_from_checkpoint=True)
    _summary(trainer, run)


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a TOML file, or a folder that holds recipe.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Predict seconds and peak memory of a recipe's steps from a short probe. Nothing is written.

    Says what dominates, and which setting would about halve it.
    """
    from covey.training.plan import make_plan

    found = make_plan(_trainer(GRPOConfig.from_toml(_recipe_file(recipe), overrides=overrides or [])))
    if as_json:
        out.print_json(data=found.to_dict())
        return
    for title, parts, unit, digits, size in (
        ("one step", found.seconds, "s", 1, 1.0),
        (f"peak memory of the {found.device}", found.memory, "GB", 2, 1e9),
    ):
        total = sum(part.amount for part in parts)
        table = Table(title, unit, "share")
        table.add_column("to halve it", overflow="fold")
        for part in sorted(parts, key=lambda part: -part.amount):
            share = part.amount / total if total else 0.0
            advice = part.advice if share >= 0.15 else ""
            table.add_row(part.name, f"{part.amount / size:.{digits}f}", f"{100 * share:.0f} %", advice)
        table.add_row("total", f"{total / size:.{digits}f}", "", "", style="bold")
        out.print(table)
    out.print(
        f"completions of {found.mean_length:.0f} tokens on average; {100 * found.mixed_share:.0f} % of the groups have "
        "unequal rewards, the others need no update",
        highlight=False,
    )
    if found.run_seconds is not None:
        evaluations = f" with {found.num_evaluations} evaluations" if found.num_evaluations else ""
        out.print(
            f"the run: {found.steps} steps{evaluations}, about {found.run_seconds / 60:.1f} minutes if it stays so "
            f"(the probe took {found.probe_seconds:.0f} s)",
            highlight=False,
        )


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="pkg:NAME, hub id, folder, .gguf file, or the folder of a run.")],
    task: Annotated[str | None, typer.Option(help="Task to measure on; a run's folder knows its own.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Prompts to measure on; with --task, the file that the task reads.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Folder of a PEFT adapter to put on the model.")] = None,
    num: Annotated[int | None, typer.Option(help="Use the first NUM held-out prompts.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 = greedy, the default.")] = None,
    show: Annotated[int, typer.Option(help="Print this many completions.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Measure a model, with or without an adapter, on held-out prompts: accuracy with its 95 % interval."""
    config = _config_for(model, adapter, overrides)
    changes: dict[str, Any] = {
        "task": task,
        "dataset" if task else "eval_dataset": dataset,
        "num_eval_prompts": num,
        "eval_temperature": temperature,
    }
    config = config.replace(**{name: value for name, value in changes.items() if value is not None})
    if config.data.task is None and config.data.eval_dataset is None:
        raise ConfigError("nothing to measure on: give --task NAME or --dataset FILE")
    if config.data.task is None and config.data.dataset is None:
        config = config.replace(dataset=config.data.eval_dataset)
    trainer = _trainer(config)
    result = trainer.evaluation()
    rows = zip(
        [(group.prompt, episode) for group in result.rollout.groups for episode in group.episodes],
        [None] * 10**9 if result.correct is None else result.correct.tolist(),
        strict=False,
    )
    for (prompt, episode), correct in list(rows)[:show]:
        mark = "" if correct is None else ("right: " if correct else "wrong: ")
        question = prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["content"]
        out.print(f"{question}\n  {mark}{episode.text!r}", markup=False, highlight=False)
    table = Table("metric", "value")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:.4g}")
    out.print(table)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="pkg:NAME, hub id, folder, .gguf file, or the folder of a run.")],
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts; they go through the chat template.")],
    adapter: Annotated[str | None, typer.Option(help="Folder of a PEFT adapter to put on the model.")] = None,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Completions for each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion in tokens.")] = 128,
    system: Annotated[str | None, typer.Option(help="System message; a run's folder knows its own.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal completions.")] = 0,
) -> None:
    """Sample completions and print them."""
    from dataclasses import replace

    from covey.tasks.dataset import build_prompts
    from covey.training import setup
    from covey.types import Request

    config = _config_for(model, adapter, None).replace(max_completion_length=max_tokens)
    task = setup.load_task(config) if system is None else None
    policy = setup.make_policy(config)
    engine = setup.make_engine(config, policy)
    prompts = build_prompts(
        [{"prompt": [{"role": "user", "content": text}]} for text in prompt],
        policy.tokenizer,
        system_prompt=system or config.data.system_prompt or (task.system_prompt if task else None),
        context_length=engine.context_length,
        max_completion_length=max_tokens,
    )
    engine.sync(policy.model, 1)
    requests = [Request(p.token_ids, (seed, index, n)) for index, p in enumerate(prompts) for n in range(number)]
    settings = replace(setup.sampling_settings(config, policy, temperature), max_tokens=max_tokens, keep_support=False)
    decode = setup.decoder(policy)
    for position, completion in enumerate(engine(requests, settings, policy_version=1)):
        text = decode(completion.token_ids.tolist())
        if position % number == 0:
            out.print(f"> {prompt[position // number]}", style="bold", markup=False, highlight=False)
        ending = "" if completion.finish_reason == "stop" else "  [truncated]"
        probability = float(completion.logprobs.sum())
        out.print(f"{text}{ending}  (log-probability {probability:.2f})", markup=False, highlight=False)


@app.command("config")
def show_config(
    recipe: Annotated[Path | None, typer.Argument(help="Print this recipe with every default filled in.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every field with its type, default and meaning.")] = False,
    only: Annotated[
        str, typer.Option("--only", help="With --explain: only sections or fields that contain this.")
    ] = "",
) -> None:
    """Print the settings of a recipe, or explain all settings."""
    if explain:
        render_explain(out, only)
        return
    config = GRPOConfig() if recipe is None else GRPOConfig.from_toml(_recipe_file(recipe), overrides=overrides or [])
    out.print(config.to_toml(), markup=False, highlight=False, soft_wrap=True)


@app.command()
def curve(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; several are drawn together with their mean and range.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture to write.")] = Path("learning_curve.png"),
    title: Annotated[str, typer.Option(help="Title of the picture.")] = "",
) -> None:
    """Draw the learning curve of one run, or of several seeds together."""
    from covey.observe.curve import draw_comparison, draw_learning_curve
    from covey.observe.run_folder import RunFolder

    records = [RunFolder.read(run).read_metrics() for run in runs]
    if len(records) == 1:
        draw_learning_curve(records[0], output, title=title)
    else:
        draw_comparison({f"{len(records)} runs": records}, output, title=title)
    out.print(f"wrote {output}", markup=False)


def _recipe_file(recipe: Path) -> Path:
    return recipe / "recipe.toml" if recipe.is_dir() else recipe


def _config_for(model: str, adapter: str | None, overrides: list[str] | None) -> GRPOConfig:
    """Settings for looking at a model: a run's own with its adapter, or the defaults."""
    from covey.observe.run_folder import RunFolder

    if RunFolder.is_run(model):
        folder = RunFolder.read(model)
        config = GRPOConfig.from_toml(folder.config_path, overrides=overrides or [])
        if adapter is None and config.model.use_peft:
            adapter = str(next((path for path in (folder.adapter, folder.best) if path.is_dir()), "")) or None
        elif not config.model.use_peft and folder.adapter.is_dir():
            config = config.replace(model=str(folder.adapter))
        if adapter is None and config.model.use_peft:
            raise ConfigError(f"{model}: the run has no adapter yet; give --adapter, or wait for its first checkpoint")
        return config if adapter is None else config.replace(adapter=adapter)
    config = GRPOConfig.from_overrides(overrides or [])
    return config.replace(model=model) if adapter is None else config.replace(model=model, adapter=adapter)


def _trainer(config: GRPOConfig) -> GRPOTrainer:
    from covey.training.trainer import GRPOTrainer

    functions = [load_function(name) for name in config.rewards.functions]
    return GRPOTrainer(args=config, reward_funcs=functions or None)


def _summary(trainer: GRPOTrainer, folder: Path) -> None:
    """Before and after, and where everything is."""
    evaluations = [record for record in trainer.state.log_history if "eval/reward" in record]
    if len(evaluations) > 1:
        name = "accuracy" if "eval/accuracy" in evaluations[0] else "reward"
        table = Table("held-out", name, "95 % interval", "problems")
        for label, record in (("before", evaluations[0]), ("after", evaluations[-1])):
            interval = "-"
            if name == "accuracy":
                interval = f"{100 * record['eval/accuracy_low']:.1f} to {100 * record['eval/accuracy_high']:.1f} %"
            value = f"{100 * record['eval/accuracy']:.1f} %" if name == "accuracy" else f"{record['eval/reward']:.3f}"
            table.add_row(f"{label} (step {record['step']})", value, interval, f"{record['eval/num_completions']:.0f}")
        out.print(table)
    minutes, seconds = divmod(round(trainer.state.seconds), 60)
    out.print(f"{trainer.state.global_step} steps in {minutes} min {seconds} s of training", highlight=False)
    for name in ("learning_curve.png", "metrics.jsonl", "completions", "adapter"):
        if (folder / name).exists():
            out.print(f"  {folder / name}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"try it: covey sample {folder} 'your prompt'", markup=False, highlight=False, soft_wrap=True)

"""The command line, `covey`.

Heavy imports happen inside the commands, so that `covey --help` answers at once. A `CoveyError`, a full disk and a
denied permission are printed as one message and end with exit status 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tomllib
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from covey import __version__
from covey.cli import results
from covey.cli.doctor import doctor
from covey.cli.export import export
from covey.cli.mcp import mcp
from covey.cli.play import play
from covey.cli.report import report
from covey.cli.serve import serve, watch
from covey.cli.weights import AsJson, Overrides, config_for, err, form_of, out, print_json, recipe_file, said_by_signals
from covey.config.names import canonical_names
from covey.config.text import explain as explained
from covey.config.text import parse_overrides, render_explain
from covey.config.whole import GRPOConfig
from covey.errors import ClusterLostError, ConfigError, CoveyError
from covey.observe.console import accept_any_text, print_table, say, visible
from covey.observe.doctor import constant_answer
from covey.observe.records import differing

if TYPE_CHECKING:
    from covey.training.evaluate import Evaluation
    from covey.training.multiple_choice import ChoiceTask
    from covey.training.trainer import GRPOTrainer


ELSEWHERE: dict[str, str] = {
    "compare": "covey report RUN RUN",
    "completions": "covey report RUN --step last",
    "curve": "covey report RUN -o FILE.png",
    "questions": "covey report RUN",
    "plan": "covey doctor RECIPE",
    "replay": "covey doctor RUN --step N",
    "imitate": "covey play RECIPE --imitate",
}
"""A command that there is not -> what to type."""

app = typer.Typer(name="covey", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def main() -> None:
    """Entry point of the `covey` command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("covey.tasks.fields").setLevel(logging.INFO)  # what it makes of a table
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    accept_any_text(sys.stdout)
    warnings.formatwarning = _warning_in_a_line
    # Waiting threads spin about 10 us, then sleep. Longer spins take the core from the thread that is waited for when
    # the machine has other work (8 times slower sampling); no spin costs a quarter of the speed on a quiet one.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # PyTorch's memory on a GPU grows in place, unless somebody has set its allocator up: packs have many sizes, which
    # would leave holes between segments. A vLLM that sleeps switches it off again (`VLLMEngine`).
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        if (name := "".join(sys.argv[1:2])) in ELSEWHERE:
            raise ConfigError(f"covey {name}: there is no such command; use `{ELSEWHERE[name]}`")
        app()
    except CoveyError as error:
        err.print(visible(f"covey: {error}", 5000), style="red", markup=False, highlight=False)
        if isinstance(error, ClusterLostError):
            os._exit(error.exit_status)  # what Ray does at the end of a process would wait for it
        sys.exit(error.exit_status)
    except OSError as error:
        denied = isinstance(error, PermissionError) and bool(error.filename)
        if not denied and error.errno != errno.ENOSPC:
            raise
        full = "the disk is full; free some space"
        fix = "permission denied; change its permissions or choose another path" if denied else full
        said = visible(f"covey: {error.filename or 'standard output'}: {fix}", 5000)
        err.print(said, style="red", markup=False, highlight=False)
        if not denied:
            os._exit(2)  # what standard output still holds would fail again
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("covey: interrupted", style="red")
        sys.exit(130)
    except SystemExit as end:
        sys.exit(141 if out.quiet else end.code)  # rich is quiet once nobody reads on: as if SIGPIPE had ended it


def _warning_in_a_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Covey's own without the line of code that says it."""
    own = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"covey: {message}\n" if own else f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"covey {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models with Group Relative Policy Optimization (GRPO)."""


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a TOML file, or a folder that holds recipe.toml.")],
    overrides: Overrides = None,
) -> None:
    """Train with a recipe. If the recipe has held-out prompts, evaluate before and after.

    The run folder (`run.output_dir`) gets config, metrics, completions, checkpoints, adapter and learning curve.
    """
    config = GRPOConfig.from_toml(recipe_file(recipe), overrides=overrides or [])
    _train(config, Path(config.run.output_dir))


def _train(config: GRPOConfig, folder: Path, *, resume: bool = False) -> None:
    with said_by_signals():
        from covey.training import launch

        if not launch.start_ranks(config, sys.argv[1:], out.out) and (trainer := launch.run(config, resume=resume)):
            results.print_summary(out, trainer, folder)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run; of a finished one with a larger max_steps.")],
    overrides: Overrides = None,
) -> None:
    """Continue a run from its newest checkpoint. With unchanged settings the result is that of an unbroken run."""
    from covey.observe.run_folder import RunFolder

    folder = RunFolder.read(run)
    file = folder.whole_config()
    if "output_dir" in canonical_names(parse_overrides(overrides or [])):
        raise ConfigError(f"run.output_dir: a run continues in its own folder; copy {run} and resume the copy")
    if folder.needs_python and not overrides:
        raise ConfigError(
            f"{run}: the run was started from Python with parts that are not in files, such as a reward function or a "
            f"dataset in memory; continue it with {folder.how_to_continue()}"
        )
    _train(GRPOConfig.from_toml(file, overrides=[*(overrides or []), f"run.output_dir={run}"]), run, resume=True)


app.command()(doctor)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="pkg:NAME, hub id, folder, .gguf file, a run's folder, or a recipe.")],
    task: Annotated[str | None, typer.Option(help="Task to measure on; default: the run's own.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Prompts to measure on; with --task, the file that the task reads.")
    ] = None,
    world: Annotated[
        str | None, typer.Option(help="World to act in, such as house:rooms=3, in place of a task.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Folder of a PEFT adapter to put on the model.")] = None,
    num: Annotated[int | None, typer.Option(min=1, help="Use the first NUM held-out prompts.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 = greedy, the default.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Print this many completions.")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Multiple choice: folder for report.json and report.html.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with in a paired test; multiple choice: default the model without adapter, or none."
        ),
    ] = None,
    rotations: Annotated[int, typer.Option(help="Multiple choice: ask again with the options rotated, NUM times.")] = 1,
    lead_in: Annotated[
        str, typer.Option(help="Multiple choice: text before the letter when its likelihood is measured.")
    ] = "",
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Measure a model, with or without an adapter, on held-out prompts: accuracy with its 95 % interval.

    For multiple choice (`--task usmle`) also: a paired test against the model without its adapter, the share of answers
    without a letter, and the accuracy of the letters alone. Then whether rotated options change the answer, and the
    likelihood of each letter with its calibration.
    """
    config = config_for(model, adapter, overrides)
    changes: dict[str, Any] = {"task": task, "world": world, "dataset" if task else "eval_dataset": dataset}
    changes |= {"num_eval_prompts": num, "eval_temperature": temperature}
    config = config.replace(**{name: value for name, value in changes.items() if value is not None})
    if dataset is not None or task is not None or world is not None:
        config = config.replace(eval_fraction=0.0)
    if task is not None or world is not None:
        config = config.replace(correctness=None)  # they say themselves what is right
    acting = config.environment.world is not None
    if config.data.task is None and config.data.eval_dataset is None and not config.data.eval_fraction and not acting:
        missing = "" if model.startswith("pkg:") or os.path.exists(model) else f"; and {model} does not exist here"
        raise ConfigError(f"nothing to measure on: give --task NAME, --world NAME or --dataset FILE{missing}")
    alone = config.data.task is None and not acting
    if baseline not in (None, "none") and alone and config.rewards.correctness is None:
        told_by = "give --task, or name a function in rewards.correctness (FILE.py:FUNCTION)"
        raise ConfigError(f"--baseline: it compares right answers, and nothing says here which are right; {told_by}")
    if alone and not config.rewards.functions:
        raise ConfigError("no reward function to measure with: set rewards.functions=FILE.py:NAME, or give --task")
    from covey.training import setup
    from covey.training.evaluate import with_logged
    from covey.training.multiple_choice import ChoiceTask

    measured = setup.load_task(config)
    other = _baseline(config, baseline, always=isinstance(measured, ChoiceTask))
    if isinstance(measured, ChoiceTask):
        asked = {"rotations": rotations, "lead_in": lead_in}
        _evaluate_choices(measured, [config, other] if other else [config], asked, show, report, as_json)
        return
    if report is not None or rotations != 1 or lead_in:
        given = f"--report={str(report)!r}" if report else f"--rotations={rotations}, --lead-in={lead_in!r:.50}"
        raise ConfigError(f"{given}: only multiple-choice tasks such as usmle have these; leave it out")
    trainer = _trainer(config)
    result = trainer.evaluation()
    logged = with_logged(result.metrics, trainer.data.scorer.take_logged().metrics, "eval/")
    result = replace(result, metrics=logged)
    before = None if other is None else _trainer(other).evaluation()
    if as_json:

        def told(one: GRPOConfig, of: Evaluation) -> dict[str, Any]:
            return {"model": _name(one), "metrics": of.metrics, "left_out": int((~of.judged).sum())}

        found = told(config, result)
        if other is not None and before is not None:
            compared = results.paired(before, result)
            found |= {"baseline": told(other, before), "against_baseline": compared and asdict(compared)}
        print_json(out, found)
        return
    _show(result, show)
    results.print_left_out(out, _name(config), result)
    table = Table("metric", "value")
    for name, value in result.metrics.items():
        if not name.startswith(results.PER_KIND):
            table.add_row(name, f"{value:.4g}")
    print_table(out, table)
    results.print_kinds(out, result)
    if constant := constant_answer(result.metrics | result.constant):
        say(out, constant)
    if other is not None and before is not None:
        results.print_left_out(out, _name(other), before)
        results.print_difference(out, _name(other), before, result)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="pkg:NAME, hub id, folder, .gguf file, or the folder of a run.")],
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    adapter: Annotated[str | None, typer.Option(help="Folder of a PEFT adapter to put on the model.")] = None,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Completions for each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion in tokens.")] = 128,
    system: Annotated[str | None, typer.Option(help="System message; default: the run's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds give equal completions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Sample completions and print them. Prompts become a chat or plain text, as in the run."""
    from covey.pytorch.backend import BACKEND
    from covey.rollout.collect import AnswerCollector
    from covey.rollout.scoring import Scorer
    from covey.tasks.dataset import build_prompts
    from covey.training import setup, tables, tools
    from covey.training.refusals import require_room_for

    require_room_for(f"-n {number} x --max-tokens {max_tokens}", number * len(prompt), max_tokens)
    prompt = [os.fsencode(text).decode("utf-8", "replace") for text in prompt]  # of any locale
    config = config_for(model, adapter, None).replace(
        max_completion_length=max_tokens, eval_temperature=temperature, num_generations_eval=1
    )
    conversation, own_system = form_of(model)
    try:
        task = setup.load_task(config)
    except ConfigError:  # a file of the user's that is gone
        if system is None and conversation is None:
            raise
        task = None
    BACKEND.check(config)
    policy = BACKEND.make_policy(config)
    engine = BACKEND.make_sampler(config, policy)
    acts = bool(config.environment.tools)
    plain = not conversation and not acts and (conversation is False or policy.tokenizer.chat_template is None)
    if plain and system is None:
        say(err, f"prompt: plain text, {'no chat template' if conversation is None else 'as in training'}")
    prompts = build_prompts(
        [{"prompt": text if plain else setup.asked(task, text)} for text in prompt],
        policy.tokenizer,
        system_prompt=system or own_system or config.data.system_prompt or (task.system_prompt if task else None),
        chat_template_kwargs=config.data.chat_template_kwargs,
        context_length=engine.context_length,
        max_completion_length=max_tokens,
    )
    engine.publish(policy.weights(1))
    settings = replace(setup.sampling_settings(config, policy, temperature), max_tokens=max_tokens, keep_support=False)
    unscored, decode = Scorer(lambda completions, **_: [0.0] * len(completions)), setup.decoder(policy)
    collect: Any = AnswerCollector(engine, unscored, decode)
    if acts:
        collect = tools.make_collector(config, policy, engine, unscored, decode)
    streams = [(seed, index) for index in range(len(prompts))]
    groups = collect(prompts, settings, num_generations=number, streams=streams, policy_version=1).groups
    collect.close()
    sampled = [episode for group in groups for episode in group.episodes]
    played = (trajectory for group in groups for trajectory in group.with_tools)
    texts = [tables.transcript(each, "model: ", "tools: ").removesuffix("\n(done)") for each in played]
    texts = texts or [episode.text for episode in sampled]
    if as_json:
        rows: list[dict[str, Any]] = [{"prompt": prompt[n // number], "text": text} for n, text in enumerate(texts)]
        for row, episode in zip(rows, sampled, strict=True):
            row |= {"finish_reason": episode.finish_reason, "tokens": episode.num_sampled}
            row["logprob"] = episode.logprobs.sum()
        print_json(out, rows)
        return
    for position, (text, episode) in enumerate(zip(texts, sampled, strict=True)):
        if position % number == 0:
            out.print(f"prompt: {prompt[position // number]}", style="bold", markup=False, highlight=False)
        ending = "" if episode.finish_reason == "stop" else "  [truncated]"
        told = f"{'' if acts else 'model: '}{text}{ending}  (log-probability {float(episode.logprobs.sum()):.2f})"
        out.print(told, markup=False, highlight=False)


@app.command("config")
def show_config(
    recipe: Annotated[Path | None, typer.Argument(help="Print this recipe with every default filled in.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="All settings with type, default and meaning.")] = False,
    only: Annotated[
        str,
        typer.Option("--only", help="With --explain: only settings that mention this; `--explain WORD` does the same."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the settings of a recipe, or explain all settings."""
    if only and not explain:
        raise ConfigError(f"--only={only!r:.50}: goes with --explain; add it, or leave --only out")
    if explain:
        wanted = only or str(recipe or "")  # `covey config --explain beta`
        found = explained(wanted)
        if as_json and found:
            print_json(out, [asdict(line) for line in found])
        elif as_json or not render_explain(out, wanted):
            raise ConfigError(f"{wanted!r}: no setting has this in its name or meaning; leave it out to see them all")
        return
    config = GRPOConfig() if recipe is None else GRPOConfig.from_toml(recipe_file(recipe), overrides=overrides or [])
    if as_json:
        print_json(out, tomllib.loads(config.to_toml()))
    else:
        say(out, config.to_toml())


for _command in (play, export, serve, watch, report, mcp):
    app.command()(_command)


def _evaluate_choices(
    task: ChoiceTask, configs: list[GRPOConfig], asked: dict[str, Any], show: int, folder: Path | None, as_json: bool
) -> None:
    """Put the questions to the model, then to the one it is compared with; print, and write the report if asked to."""
    from covey.observe.choices import choice_report, write_choice_report
    from covey.observe.console import progress_bar
    from covey.training.multiple_choice import answer_choices

    answered, rows = [], []
    for one in configs:
        trainer = _trainer(one)
        rows = [dict(prompt.columns) for prompt in trainer.eval_prompts]
        with progress_bar(err, _name(one)) as progress:
            answered.append(answer_choices(trainer, task, name=_name(one), progress=progress, **asked))
    found = choice_report(rows, answered[0], answered[1] if len(answered) > 1 else None)
    if as_json:
        print_json(out, found)
        show = 0
    for row, text, letter in list(zip(rows, answered[0].texts, answered[0].chosen, strict=True))[:show]:
        mark = "right" if letter == row["answer"] else "wrong"
        out.print(f"{row['question']}\n  {mark} ({letter}): {text!r}", markup=False, highlight=False)
    if not as_json:
        results.print_choices(out, found)
    if folder is not None:
        for path in write_choice_report(folder, found, f"{_name(configs[0])}: multiple choice"):
            say(err if as_json else out, f"  {path}")


def _baseline(config: GRPOConfig, wanted: str | None, *, always: bool) -> GRPOConfig | None:
    """Settings of the model to compare with; None = no comparison."""
    if wanted == "none" or (wanted is None and not (always and config.model.adapter)):
        return None
    return config.replace(adapter=None) if wanted is None else config.replace(adapter=None, model=wanted)


def _name(config: GRPOConfig) -> str:
    return config.model.adapter or config.model.model


def _show(result: Evaluation, number: int) -> None:
    """Print completions, marked as right or wrong where that is known; of agents, what they saw and did."""
    from covey.training.tables import transcript

    with_tools = [transcript(trajectory) for group in result.rollout.groups for trajectory in group.with_tools]
    played = [trajectory for group in result.rollout.groups for trajectory in group.trajectories]
    for trajectory in played[:number]:
        out.print(visible(transcript(trajectory), 5000) + "\n", markup=False, highlight=False)
    if played:
        return
    pairs = [(group.prompt, episode) for group in result.rollout.groups for episode in group.episodes]
    questions = [p.content if isinstance(p.content, str) else p.content[-1]["content"] for p, _ in pairs[:number]]
    for index, (question, (prompt, episode)) in enumerate(zip(differing(questions), pairs, strict=False)):
        mark = "" if result.correct is None else ("right: " if result.correct[index] else "wrong: ")
        columns = {name: value for name, value in prompt.columns.items() if name != "question"}  # it is in the prompt
        row = ", ".join(f"{name}={visible(repr(value), 200)}" for name, value in columns.items())
        said = visible(with_tools[index], 5000) if with_tools else repr(episode.text)
        told = f"{question}\n  {mark}{said}" + (f"\n  row: {row}" if row else "")
        out.print(told, markup=False, highlight=False)


def _trainer(config: GRPOConfig) -> GRPOTrainer:
    from covey.training.setup import ONLY_HELD_OUT
    from covey.training.trainer import GRPOTrainer

    rows = None if config.data.task or config.data.dataset or config.environment.world else ONLY_HELD_OUT
    return GRPOTrainer(args=config.replace(learners=1), train_dataset=rows)  # it trains nothing

"""What `covey train` and `covey eval` print of a model's answers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from covey.errors import several
from covey.observe.choices import measured
from covey.observe.console import print_table, say, visible
from covey.observe.doctor import constant_answer
from covey.observe.run_folder import RunFolder
from covey.observe.statistics import PairedDifference, paired_difference

if TYPE_CHECKING:
    from covey.training.evaluate import Evaluation
    from covey.training.trainer import GRPOTrainer


PER_KIND = ("eval/accuracy/", "eval/accuracy_low/", "eval/accuracy_high/", "eval/num_completions/")
"""How the names of metrics begin that are of one kind of question."""


def percent(share: Mapping[str, float]) -> str:
    """`41.0 % (34.4 to 47.9)`."""
    return f"{100 * share['share']:.1f} % ({100 * share['low']:.1f} to {100 * share['high']:.1f})"


def difference(found: PairedDifference | Mapping[str, float]) -> str:
    """A paired difference in one line."""
    d = found if isinstance(found, Mapping) else {name: getattr(found, name) for name in found.__slots__}
    return (
        f"{100 * d['difference']:+.1f} points ({100 * d['low']:+.1f} to {100 * d['high']:+.1f}), "
        f"p = {d['p_value']:.2g}, {d['gained']} gained, {d['lost']} lost"
    )


def print_choices(out: Console, report: Mapping[str, Any]) -> None:
    """A multiple-choice report in short."""
    models = [report["model"]] + ([report["baseline"]] if "baseline" in report else [])
    table = Table(several(report["questions"], "question"), *(model["name"] for model in models))
    forms = {"share": percent, "part": "{:.3f}".format, "number": "{:.3f}".format}
    for name, form, values in measured(models):
        table.add_row(name, *("" if value is None else forms[form](value) for value in values))
    letters = ([f"{name} {100 * part:.0f} %" for name, part in m["letters"]["chosen"].items()] for m in models)
    table.add_row("letters chosen", *map("  ".join, letters))
    print_table(out, table)
    for what, key in (("accuracy", "against_baseline"), ("answers with a letter", "answered_against_baseline")):
        if key in report:
            told = f"{what} against {models[1]['name']}: {difference(report[key])}"
            out.print(told, markup=False, highlight=False)


def kind_shares(metrics: Mapping[str, float]) -> list[tuple[str, dict[str, float]]]:
    """Each kind of question of an evaluation with its share of right answers, as `percent` takes it, and `total`."""
    names = [name.removeprefix("eval/accuracy/") for name in metrics if name.startswith("eval/accuracy/")]
    fields = {"share": "accuracy", "low": "accuracy_low", "high": "accuracy_high", "total": "num_completions"}
    return [(name, {key: metrics[f"eval/{field}/{name}"] for key, field in fields.items()}) for name in names]


def print_kinds(out: Console, result: Evaluation) -> None:
    """Accuracy by kind of question, or success by type of task, and by field; nothing where there is a single one."""
    shares = kind_shares(result.metrics)
    if shares:
        table = Table("kind", "answers", "right (95 %)")
        for name, share in shares:
            table.add_row(visible(name, 40), f"{share['total']:.0f}", percent(share))
        print_table(out, table)
    fields = [(name, value) for name, value in result.metrics.items() if name.startswith("eval/fields/")]
    if fields:
        table = Table("field", "right")
        for name, value in fields:
            table.add_row(visible(name.removeprefix("eval/fields/"), 40), f"{100 * value:.1f} %")
        print_table(out, table)


def print_left_out(out: Console, name: str, result: Evaluation) -> None:
    """How many episodes say nothing of the policy, where there are any."""
    from covey.training.evaluate import NOTHING_JUDGED

    failed, total = int((~result.judged).sum()), len(result.judged)
    left_out = f"{name}: the environment failed in {failed} of {several(total, 'episode')}, which accuracy leaves out"
    if failed:
        say(out, left_out if failed < total else f"no accuracy: {NOTHING_JUDGED}; --show 1 shows why")


def print_difference(out: Console, name: str, before: Evaluation, after: Evaluation) -> None:
    """Accuracy of a model against that of `name` on the same problems, of those that both could be judged on."""
    found = paired(before, after)
    told = "no episode was judged for both" if found is None else difference(found)
    out.print(f"accuracy against {name}: {told}", markup=False, highlight=False)


def paired(before: Evaluation, after: Evaluation) -> PairedDifference | None:
    """The paired difference in accuracy on the problems that both could be judged on; None without any."""
    assert before.correct is not None
    assert after.correct is not None
    both = before.judged & after.judged
    if not both.any():
        return None
    return paired_difference(before.correct[both].tolist(), after.correct[both].tolist())


def print_summary(out: Console, trainer: GRPOTrainer, folder: Path) -> None:
    """Held out before and after, and where everything is."""
    evaluations = [record for record in trainer.state.log_history if "eval/reward" in record]
    if len(evaluations) > 1:
        name = "accuracy" if any("eval/accuracy" in record for record in evaluations) else "reward"
        table = Table("held-out", name, "95 % interval", "problems")
        shown = {"before": evaluations[0], "after": evaluations[-1]}
        best = [record for record in evaluations[1:-1] if record["step"] == trainer.state.best_step]
        if trainer.args.evaluation.load_best_model_at_end and best:
            shown["best"] = best[-1]
        for label, record in shown.items():
            value, interval = "-" if name == "accuracy" else f"{record['eval/reward']:.3f}", "-"
            if "eval/accuracy" in record:
                value = f"{100 * record['eval/accuracy']:.1f} %"
                interval = f"{100 * record['eval/accuracy_low']:.1f} to {100 * record['eval/accuracy_high']:.1f} %"
            table.add_row(f"{label} (step {record['step']})", value, interval, f"{record['eval/num_completions']:.0f}")
            for kind, share in kind_shares(record):
                table.add_row(f"  {kind}", *percent(share).rstrip(")").split(" ("), f"{share['total']:.0f}")
        print_table(out, table)
        if told := constant_answer(evaluations[-1]):
            say(out, told)
    minutes, seconds = divmod(round(trainer.state.seconds), 60)
    out.print(f"{several(trainer.state.global_step, 'step')} in {minutes} min {seconds} s of training", highlight=False)
    for name in ("learning_curve.png", "metrics.jsonl", "completions", "adapter"):
        if (folder / name).exists():
            say(out, f"  {folder / name}")
    kept = [event["message"] for event in RunFolder.read(folder).read_events() if event.get("kind") == "adapter"]
    for message in kept[-1:]:
        say(out, str(message))
    name = shlex.quote(str(folder))
    texts = [str(row["question"]) for row in trainer.data.held_out if hasattr(trainer.data.task, "ask")]
    text = shlex.quote(f"{min(texts, key=len, default='your prompt'):.80}")
    tried = f"sample {name} {text}" if trainer.world is None else f"eval {name} --num 1 --show 1"
    tried = f"watch {name}" if any(prompt.has_pictures for prompt in trainer.prompts) else tried
    say(out, f"try it: covey {tried}")
    say(out, f"use it elsewhere: covey export {name}")

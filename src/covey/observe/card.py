"""The model card: a README.md that says what a model was trained from, on, with and to, read from its run folder.

Numbers are those of `metrics.jsonl`; nothing is said that the run does not tell.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from covey.files import explained, write_atomically
from covey.observe.comparison import answers_of
from covey.observe.console import counted
from covey.observe.records import Record
from covey.observe.run_folder import RunFolder

Kind = Literal["model", "adapter", "mlx", "gguf"]
CURVE = "learning_curve.png"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_SETTINGS: dict[str, tuple[str, ...]] = {
    "algorithm": ("loss_type", "adv_estimator", "beta", "scale_rewards", "num_iterations"),
    "sampling": ("num_generations", "max_completion_length", "temperature"),
    "data": ("prompts_per_step",),
    "optim": ("learning_rate", "lr_scheduler_type", "max_grad_norm"),
    "model": ("lora_r", "lora_alpha"),
    "run": ("seed",),
}
"""What is told of them."""
_FROM_HUB = """from {module} import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained("{{name}}")
tokenizer = AutoTokenizer.from_pretrained("{{name}}")"""
_SEEING = """from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{source}")
processor = AutoProcessor.from_pretrained("{{name}}")"""
_ADAPTED = '\n\nfrom peft import PeftModel\n\nmodel = PeftModel.from_pretrained(model, "{name}")'
_LOADING_VISION = {"model": _SEEING.format(source="{name}"), "adapter": _SEEING.format(source="{base}") + _ADAPTED}
_LOADING: dict[Kind, str] = {
    "model": _FROM_HUB.format(module="transformers", auto="AutoModelForCausalLM"),
    "adapter": _FROM_HUB.format(module="peft", auto="AutoPeftModelForCausalLM"),
    "mlx": 'from mlx_lm import load\n\nmodel, tokenizer = load("{base}", adapter_path="{name}")',
    "gguf": 'from llama_cpp import Llama\n\nmodel = Llama("{name}/model.gguf")',
}


def model_card(
    run: RunFolder | None,
    *,
    name: str,
    base_model: str,
    kind: Kind = "model",
    step: int | None = None,
    tags: Sequence[str] = (),
    dataset_name: str | None = None,
    vision: bool = False,
) -> str:
    """The text of a card, of a `vision` model or its adapter, or of one that reads text."""
    with explained(run.config_path if run else name, "read"):
        settings = tomllib.loads(run.config_path.read_text("utf-8")) if run and run.config_path.exists() else {}
    records = run.read_metrics() if run else []
    step = max((record["step"] for record in records), default=0) if step is None else step
    data, shown = dataset_name or _data(settings), _elsewhere(base_model)
    evaluations = [record for record in records if "eval/reward" in record and record["step"] <= step]
    loading = _LOADING_VISION.get(kind, _LOADING[kind]) if vision else _LOADING[kind]
    lora = ["lora"] if kind in ("adapter", "mlx") else []
    header = ModelCardData(
        model_name=name.rstrip("/").split("/")[-1],
        library_name={"model": "transformers", "adapter": "peft", "mlx": "mlx", "gguf": "gguf"}[kind],
        pipeline_tag="image-text-to-text" if vision else "text-generation",
        base_model=base_model if _is_hub_id(base_model) else None,
        datasets=[data] if _is_hub_id(data) else None,
        tags=sorted({"covey", "grpo", "reinforcement-learning", *lora, *tags}),
        eval_results=_results(evaluations[-1:], data),
    )
    lines = [
        f"# {header.model_name}",
        f"`{shown}`, trained with Group Relative Policy Optimization by Covey.",
        "## How to load it",
        f"```python\n{loading.format(name=name, base=base_model)}\n```",
        "## Training",
        _list(
            {"Base model": shown, "Data": data, "Rewards": ", ".join(_rewards(settings, records)) or "see above"}
            | ({"Steps": f"{counted(settings, step)}"} if run else {})
        ),
    ]
    if evaluations:
        lines += ["## Held out", _held_out(run, evaluations, settings)]
    if run and run.curve_path.exists():
        lines.append(f"![reward, held-out results and length over the run]({CURVE})")
    if settings:
        lines += ["## Settings", _list({f"`{key}`": f"{value}" for key, value in _chosen(settings)})]
    if run:
        names = ("covey", "torch", "transformers", "peft", "python")
        versions = [f"{name} {value}" for name, value in run.versions().items() if name in names and value]
        lines += ["## Versions", ", ".join(versions)]
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n"))


def write_card(folder: str | Path, text: str, run: RunFolder | None) -> None:
    """Write README.md into a folder, with the run's learning curve beside it; `RunFolderError` if it cannot."""
    with explained(folder):
        write_atomically(Path(folder) / "README.md", text)
        if run is not None and run.curve_path.exists():
            (Path(folder) / CURVE).write_bytes(run.curve_path.read_bytes())


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.match(name)) and not Path(name).exists()


def _elsewhere(source: str) -> str:
    """What to call a model or data where this machine's paths mean nothing."""
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _data(settings: Mapping[str, Any]) -> str:
    data, world = settings.get("data", {}), settings.get("environment", {}).get("world")
    source = data.get("dataset")
    return _elsewhere(str(world or data.get("task") or source or "rows that were given in Python"))


def _rewards(settings: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """Names under which rewards were logged; without any, those of the settings."""
    logged = [re.fullmatch(r"rewards/(.+)/mean", name) for record in records for name in record]
    names = list(dict.fromkeys(match[1] for match in logged if match))
    return names or [_elsewhere(str(name)) for name in settings.get("rewards", {}).get("functions", ())]


def _chosen(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    lora = settings.get("model", {}).get("use_peft", True) and "adapter" not in settings.get("model", {})
    return [
        (f"{section}.{name}", _shown(settings[section][name]))
        for section, names in _SETTINGS.items()
        for name in names
        if name in settings.get(section, {}) and (lora or section != "model")
    ]


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return _elsewhere(value) if isinstance(value, str) else value


def _list(pairs: Mapping[str, str]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in pairs.items())


def _metric(record: Record) -> str:
    return "accuracy" if record.get("eval/accuracy") is not None else "reward"


def _held_out(run: RunFolder | None, evaluations: Sequence[Record], settings: Mapping[str, Any]) -> str:
    each = settings.get("evaluation", {}).get("num_generations_eval", 1)
    lines = ["| held out | step | | 95 % interval | problems |", "| - | - | - | - | - |"]
    shown = [("before", evaluations[0]), ("after", evaluations[-1])] if len(evaluations) > 1 else [("", evaluations[0])]
    for label, record in shown:
        kind = _metric(record)
        value, low, high = record.get(f"eval/{kind}"), record.get(f"eval/{kind}_low"), record.get(f"eval/{kind}_high")
        if run is not None and (kind == "reward" or each > 1):
            low, high = _interval(run, record["step"], rewards=kind == "reward")
        percent, unit = (100.0, " %") if kind == "accuracy" else (1.0, "")
        number = "-" if value is None else f"{kind} {percent * value:.4g}{unit}"
        interval = "-" if low is None or high is None else f"{percent * low:.4g} to {percent * high:.4g}{unit}"
        problems = math.ceil((record.get("eval/num_completions") or 0) / each)
        lines.append(f"| {label} | {counted(settings, record['step'])} | {number} | {interval} | {problems} |")
    return "\n".join(lines)


def _interval(run: RunFolder, step: int, *, rewards: bool) -> tuple[float | None, float | None]:
    """Of a mean: 1.96 standard errors over problems, whose completions are averaged first; they are not independent."""
    if step not in run.completion_steps("eval"):
        return None, None
    means = [score for score, _ in answers_of(run.read_completions(step, "eval"), rewards=rewards)["by_uid"].values()]
    if len(means) < 2:
        return None, None
    half = 1.96 * stdev(means) / math.sqrt(len(means))
    low, high = fmean(means) - half, fmean(means) + half
    return (low, high) if rewards else (max(low, 0.0), min(high, 1.0))


def _results(last: Sequence[Record], data: str) -> list[EvalResult] | None:
    """The last evaluation, as the hub's tables want it."""
    about: dict[str, Any] = {"task_type": "text-generation", "dataset_type": data, "dataset_name": f"{data} (held out)"}
    found = []
    for record in last:
        kind = _metric(record)
        if (value := record.get(f"eval/{kind}")) is not None:
            found.append(EvalResult(**about, metric_type=kind, metric_name=f"held-out {kind}", metric_value=value))
    return found or None

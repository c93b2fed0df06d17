"""What a machine is, as far as numbers depend on it, and which machines may work together. Needs neither torch nor Ray.

A node of a cluster is asked by a function that runs there, a rank tells the others itself.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.files import sampled_hash

MIXTURE = ("torch", "numpy")
"""Packages whose versions are part of the numbers alone, and of nothing that processes say to each other."""
LOUDEST_CLOCK = 5.0
"""Seconds that clocks may differ without a word."""
_SMI_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What a machine is."""

    gpus: tuple[str, ...] = ()
    driver: str = ""
    model: str = ""
    model_bytes: int = 0
    model_problem: str = ""
    clock: float = 0.0
    threads: int = 0
    vllm: str = ""
    vllm_problem: str = ""


def facts_here(model: str, vllm_python: str | None = None) -> dict[str, Any]:
    """The fields of this machine's `Facts`, without its clock and threads."""
    gpus, driver = _gpus()
    found: dict[str, Any] = {"gpus": gpus, "driver": driver}
    if vllm_python is not None:
        from covey.distributed.vllm_server import find_vllm

        try:
            found["vllm"] = find_vllm(vllm_python).version
        except ConfigError as error:
            found["vllm_problem"] = str(error)
    try:
        digest, size = model_hash(model)
        return found | {"model": digest, "model_bytes": size}
    except OSError as error:
        return found | {"model_problem": f"{type(error).__name__}: {error!s:.200}"}


def model_hash(model: str) -> tuple[str, int]:
    """`sampled_hash` of a model's config, index and weight files, and the bytes of its weights.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    files = model_files(model)
    total = sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".gguf", ".bin"))
    return (sampled_hash(files) if files else ""), total


def check_models(model: str, own: Facts, others: Mapping[str, Facts]) -> None:
    """Refuse machines that have another model under the same name, or cannot read it.

    Raises:
        ConfigError: naming the machine.
    """
    for name, facts in others.items():
        if facts.model_problem:
            raise ConfigError(
                f"model.model={model!r:.200}: cannot be read on {name} ({facts.model_problem}); give every machine the "
                "same files, under the same path"
            )
        if own.model and facts.model and facts.model != own.model:
            raise ConfigError(
                f"model.model={model!r:.200}: on {name} it is another one than here (its config, index or weights "
                "differ); give every machine the same files"
            )


def mixtures(own: Facts, others: Mapping[str, Facts], *, gpus: bool, name_of_own: str = "this machine") -> list[str]:
    """Differences between machines that make their numbers differ, one sentence each."""
    found = []
    asked = [(name_of_own, own), *others.items()] if own.gpus or not gpus else list(others.items())
    if not asked:
        return []
    first, expected = asked[0]
    for name, facts in asked[1:]:
        if gpus and set(facts.gpus) != set(expected.gpus):
            found.append(f"{name} has {_named(facts.gpus)}, {first} has {_named(expected.gpus)}")
        if gpus and facts.driver != expected.driver:
            found.append(f"{name} has the GPU driver {facts.driver or 'none'}, {first} has {expected.driver or 'none'}")
        if facts.threads != expected.threads:
            found.append(f"{name} has {facts.threads} threads, {first} has {expected.threads}")
    return found


def check_vllm(nodes: Mapping[str, Facts]) -> list[str]:
    """Differences between the vLLMs of machines with samplers, one sentence each.

    Raises:
        ConfigError: one has none that can be used.
    """
    for name, facts in nodes.items():
        if facts.vllm_problem:
            raise ConfigError(f"{name}: {facts.vllm_problem}")
    first = next(iter(nodes), "")
    return [
        f"{name} has vLLM {facts.vllm}, {first} has {nodes[first].vllm}"
        for name, facts in nodes.items()
        if facts.vllm != nodes[first].vllm
    ]


def check_mixture(differences: Sequence[str], *, allowed: bool) -> list[str]:
    """Refuse machines whose numbers differ, unless the run allows it; then what is to be said.

    Raises:
        ConfigError: with all differences.
    """
    if differences and not allowed:
        raise ConfigError(
            f"{'; '.join(differences[:4])}{'; ...' if len(differences) > 4 else ''}: what is computed would depend on "
            "which machine does it; use machines of one kind, or set run.allow_mixture=true"
        )
    return [f"machines differ (run.allow_mixture): {difference}" for difference in differences]


def clock_warnings(others: Mapping[str, Facts]) -> list[str]:
    """What is to be said of clocks that differ."""
    return [
        f"the clock of {name} is {abs(facts.clock):.0f} s {'ahead' if facts.clock > 0 else 'behind'}: logs are out of "
        "order, and tokens may be refused; synchronise it (NTP)"
        for name, facts in others.items()
        if abs(facts.clock) > LOUDEST_CLOCK
    ]


def clock_ahead(theirs: float, asked: float, answered: float) -> float:
    """Seconds that a clock was ahead, at the least, given what it said between two readings of our own."""
    if asked <= theirs <= answered:
        return 0.0
    return theirs - answered if theirs > answered else theirs - asked


def _gpus() -> tuple[tuple[str, ...], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), ""
    lines = [[cell.strip() for cell in line.rpartition(",")[::2]] for line in told.splitlines() if line.strip()]
    return tuple(name for name, _ in lines), ", ".join(sorted({driver for _, driver in lines}))


def _named(gpus: Sequence[str]) -> str:
    return " and ".join(sorted(set(gpus))) or "no GPU"


def model_files(model: str) -> list[Path]:
    """Config, index and weights of a model; none for a hub id that is not in the cache.

    Raises:
        OSError: it is not there.
    """
    if model.startswith("pkg:"):
        name, _, file = model.removeprefix("pkg:").partition("/")
        spec = importlib.util.find_spec(name.replace("-", "_")) if name.replace("-", "_").isidentifier() else None
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise FileNotFoundError(f"no package {name!r} is installed")
        return _checked([Path(places[0]) / file] if file else sorted(Path(places[0]).glob("*.gguf")), model)
    path = Path(model).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _checked(_of_folder(path), model)
    if os.sep in model.strip(os.sep).partition(os.sep)[2] or path.is_absolute() or path.suffix == ".gguf":
        raise FileNotFoundError(f"{model}: there is no such file or folder")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise FileNotFoundError(f"{model}: there is no such file or folder") from error
    return _of_folder(Path(cached).parent) if isinstance(cached, str) else []


def _of_folder(path: Path) -> list[Path]:
    kinds = ("config.json", "*.index.json", "*.safetensors", "*.gguf", "*.bin")
    return sorted(found for kind in kinds for found in path.glob(kind) if not found.name.startswith("adapter_"))


def _checked(files: list[Path], model: str) -> list[Path]:
    if not files:
        raise FileNotFoundError(f"{model}: holds no model")
    return files

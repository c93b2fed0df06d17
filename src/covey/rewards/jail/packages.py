"""Where installed distributions lie, so that a jail can offer them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from .errors import JailError


def modules_of(packages: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Modules to import, folders to find them in, and paths that must be readable, for installed distributions.

    Raises:
        JailError: one is not installed, or is no folder of Python modules.
    """
    modules: list[str] = []
    folders: set[str] = set()
    readable: set[str] = set()
    for name in packages:
        try:
            distribution = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError):
            raise JailError(f"packages={name!r}: it is not installed; pip install it, or leave it out") from None
        place = Path(str(distribution.locate_file(""))).resolve()
        tops = {Path(str(file)).parts[0] for file in distribution.files or ()} - {".."}
        found = sorted(top for top in tops if (place / top / "__init__.py").exists())
        if not found:
            raise JailError(f"packages={name!r}: it holds no package of Python modules that could be offered")
        modules += found
        folders.add(str(place))
        readable |= {str(place / top) for top in tops if (place / top).is_dir() and not top.endswith(".dist-info")}
    return modules, sorted(folders), sorted(readable)

"""Names that were once Covey's: each answers with one line that names what to use now."""

from __future__ import annotations

from typing import Any

COMMANDS: dict[str, str] = {
    "compare": "covey report RUN RUN",
    "completions": "covey report RUN --step last",
    "curve": "covey report RUN -o FILE.png",
    "questions": "covey report RUN",
    "plan": "covey doctor RECIPE",
    "replay": "covey doctor RUN --step N",
    "imitate": "covey play RECIPE --imitate",
}
"""Command -> what to type instead, such as `covey doctor RECIPE`."""

SETTINGS: dict[str, tuple[Any, str]] = {
    "backend": ("pytorch", "recipes train with PyTorch; in JAX train with covey.jax.GRPOTrainer (docs/jax.md)"),
    "mesh": (None, "recipes train with PyTorch; covey.jax.GRPOTrainer takes a mesh (docs/jax.md)"),
}
"""Field -> the default that it had, and what to write instead.

A recipe or a run folder of an earlier version may hold the default, which is dropped without a word. Any other value is
an error that says what to write.
"""


def gone_command(name: str) -> str | None:
    """The line for a command that went, or None."""
    return f"covey {name}: is no command any more; use `{COMMANDS[name]}`" if name in COMMANDS else None


def gone_setting(path: str, field: str, value: Any) -> str | None:
    """The line for a setting that went and is given another value than its default, or None."""
    default, instead = SETTINGS[field]
    return None if value == default else f"{path}={value!r:.200}: is no setting any more; {instead}"

"""Names that were once Covey's: each answers with one line that names what to use now."""

from __future__ import annotations

from typing import Any

COMMANDS: dict[str, str] = {
    "compare": "covey report RUN RUN",
    "completions": "covey report RUN --step last",
    "curve": "covey report RUN -o FILE.png",
    "questions": "covey report RUN",
}
"""Command -> what to type instead, such as `covey doctor RECIPE`."""

_SERVERS = (
    "vLLM samples in this process (sampling.engine=vllm) or behind URLs (server.inference_server_url, one or several)"
)
SETTINGS: dict[str, tuple[Any, str]] = {
    "sampler_kind": ("covey", _SERVERS),
    "vllm_python": (None, _SERVERS),
    "vllm_arguments": ([], _SERVERS),
    "world_workers": (
        0,
        "leave it out: environment.parallel_episodes play on this machine, or let the world call a server",
    ),
    "keep_units": (True, "leave it out: a run that was killed samples its last step again, with the same numbers"),
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

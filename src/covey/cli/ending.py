"""How a command that takes long ends when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from covey.overseer import overseen
from covey.signals import EndedError, ended_by_signals

err = Console(stderr=True)


@contextmanager
def said_by_signals() -> Iterator[None]:
    """A signal that ends the command inside is said, and has its own exit status: typer gives all of them the same."""
    try:
        with ended_by_signals(), overseen():
            yield
    except EndedError as end:
        err.print(f"covey: {end}", style="red")
        raise typer.Exit(end.exit_status) from end

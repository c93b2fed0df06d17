"""What runs leave behind, to be compared."""

from __future__ import annotations

import json
from pathlib import Path

from covey.observe.run_folder import RunFolder

VOLATILE = ("time/", "memory/", "step_time", "eval/seconds")
COUNTED = ("samplers/restarts", "samplers/reissued_units")


def learned(folder: str | Path, *, without: tuple[str, ...] = (), weights: str = "") -> tuple[list[str], bytes]:
    """The metrics of a run, byte for byte but for times, and its final adapter."""
    records = RunFolder.read(folder).read_metrics()
    lines = [
        json.dumps({name: value for name, value in record.items() if not name.startswith(VOLATILE + without)})
        for record in records
    ]
    return lines, (Path(folder) / "adapter" / (weights or "adapter_model.safetensors")).read_bytes()


def events(folder: str | Path, kind: str) -> list[str]:
    return [str(event["message"]) for event in RunFolder.read(folder).read_events() if event["kind"] == kind]

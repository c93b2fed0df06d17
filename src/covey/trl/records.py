"""The files of metrics and state that transformers' trainer writes on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from covey.files import write_atomically, writing
from covey.trl.arguments import GRPOConfig


class Records:
    """`log_metrics`, `save_metrics` and `save_state` of a trainer, whose settings and state they read."""

    args: GRPOConfig
    state: TrainerState

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, one a line."""
        print(f"***** {split} metrics *****")
        for name in sorted(metrics):
            value = metrics[name]
            print(f"  {name} = {value:.4f}" if isinstance(value, float) else f"  {name} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `output_dir/SPLIT_results.json`, and into `all_results.json`."""
        folder = Path(self.args.output_dir or "")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{split}_results.json", json.dumps(dict(metrics), indent=4, sort_keys=True))
        if combined:
            path = folder / "all_results.json"
            known = json.loads(path.read_text()) if path.exists() else {}
            write_atomically(path, json.dumps(known | dict(metrics), indent=4, sort_keys=True))

    def save_state(self) -> None:
        """Write `trainer_state.json` to `output_dir`."""
        folder = Path(self.args.output_dir or "")
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / "trainer_state.json") as aside:
            self.state.save_to_json(str(aside))

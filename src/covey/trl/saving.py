"""Checkpoints in transformers' layout, `output_dir/checkpoint-N`: written whole or not at all, and found again."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from transformers import TrainerState

from covey.errors import CheckpointError
from covey.files import folder_problem, publishing, remove_folder, remove_leftovers
from covey.training.checkpoint import list_checkpoints
from covey.trl.arguments import GRPOConfig

log = logging.getLogger("covey.trl")

RUN_FOLDER = "covey"
"""Covey's run folder, below `output_dir`."""
POINTER = "covey.json"
"""In a checkpoint of transformers' layout: which of Covey's checkpoints it was written with."""


class Saving:
    """What a trainer needs to save to `output_dir` and to take up what it finds there."""

    args: GRPOConfig
    state: TrainerState
    run: Any

    @property
    def _root(self) -> Path:
        return Path(self.args.output_dir or "")

    @property
    def _checkpoints(self) -> Path:
        """Covey's own."""
        return self._root / RUN_FOLDER / "checkpoints"

    def _save_checkpoint(self) -> None:
        """Write `checkpoint-N`: weights, tokenizer, state, and the name of Covey's checkpoint that it goes with."""
        remove_leftovers(self._root)  # of a killed run; this one holds the run folder's lock
        folder = self._root / f"checkpoint-{self.state.global_step}"
        newest = list_checkpoints(self._checkpoints)[-1]
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        with publishing(folder) as aside:
            self.run.save_model(aside)
            self.state.save_to_json(str(aside / "trainer_state.json"))
            (aside / POINTER).write_text(json.dumps({"checkpoint": newest.name, "hashed": True}) + "\n")
        if self.args.save_total_limit:
            whole = [path for path in reversed(self._listed()) if not self._problem(path, hashes=False)]
            doomed = [path for path in whole if str(path) != self.state.best_model_checkpoint]
            for old in doomed[: -self.args.save_total_limit]:
                remove_folder(old)

    def _listed(self) -> list[Path]:
        """All in `output_dir` that is named as a checkpoint, newest first, whole or not."""
        found = [path for path in self._root.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        return sorted(found, key=lambda path: -int(path.name[11:]))

    def _problem(self, folder: Path, *, hashes: bool = True) -> str:
        """Why nothing can be resumed from it, or with `hashes` from Covey's that it goes with; "" = it can be."""
        if folder.is_dir() and not (folder / POINTER).is_file():
            return "is no checkpoint of covey.trl, or was not written to the end"
        try:  # in earlier checkpoints the pointer came last, and there are no hashes
            hashed = "hashed" in json.loads((folder / POINTER).read_text())
        except (OSError, ValueError, TypeError):
            hashed = True  # missing or cut off: the hashes tell what is wrong
        problem = folder_problem(folder, hashes=hashes, others=True) if hashed else ""  # callbacks may add files
        if problem or not hashes:
            return problem
        try:
            TrainerState.load_from_json(str(folder / "trainer_state.json"))
            inner = self._inner_checkpoint(folder)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            return f"its trainer_state.json or {POINTER} cannot be read ({type(error).__name__}: {error!s:.200})"
        problem = folder_problem(inner)
        return f"{inner}, which it goes with: {problem}" if problem else ""

    def _checkpoint(self, wanted: str | bool) -> Path:
        """The folder to resume from: the one that is named, or for True the newest that is whole.

        Raises:
            CheckpointError: there is none.
        """
        problems: dict[Path, str] = {}
        for folder in self._listed() if wanted is True else [Path(str(wanted))]:
            problem = self._problem(folder)
            if not problem:
                for other, known in problems.items():
                    log.warning("%s is passed over: %s; resuming from %s", other, known, folder.name)
                return folder
            problems[folder] = problem
        if not problems:
            raise CheckpointError(
                f"resume_from_checkpoint=True: there is no checkpoint-N in {self._root}; train without it first"
            )
        path, problem = next(iter(problems.items()))
        every = f"none of the {len(problems)} checkpoints in {self._root} is whole (the newest, {path.name}: {problem})"
        raise CheckpointError(
            f"resume_from_checkpoint=True: {every}; train without it to begin again"
            if wanted is True
            else f"{path}: {problem}; give a whole checkpoint-N that this trainer wrote, or True for the newest"
        )

    def _inner_checkpoint(self, folder: Path) -> Path:
        name = json.loads((folder / POINTER).read_text())["checkpoint"]
        return folder.absolute().parent / RUN_FOLDER / "checkpoints" / Path(str(name)).name

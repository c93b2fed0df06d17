"""What lies in `output_dir`: checkpoints in transformers' layout (`checkpoint-N`), written whole or not at all and
found again; files of metrics and state; the trained model, its card, and their way to the hub.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state

from covey.errors import CheckpointError
from covey.files import folder_problem, publishing, remove_folder, remove_leftovers
from covey.hub import prepare_upload, upload_folder
from covey.observe.card import model_card, write_card
from covey.observe.run_folder import RunFolder
from covey.training.checkpoint import list_checkpoints
from covey.trl.arguments import GRPOConfig

log = logging.getLogger("covey.trl")

RUN_FOLDER = "covey"  # Covey's, below `output_dir`
POINTER = "covey.json"  # in a checkpoint of transformers' layout: which of Covey's checkpoints it was written with


class Saving:
    """What a trainer needs to save to `output_dir`, to take up what it finds there, and to upload it.

    Only the model, its tokenizer, its card and learning curve are uploaded, and not while training: `hub_strategy` does
    not matter.
    """

    args: GRPOConfig
    state: TrainerState
    run: Any
    hub_model_id: str | None = None

    @property
    def _root(self) -> Path:
        return Path(self.args.output_dir or "")

    @property
    def _checkpoints(self) -> Path:
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
            (aside / POINTER).write_text(json.dumps({"checkpoint": newest.name}) + "\n")
        if self.args.save_total_limit:
            whole = [path for path in reversed(self._listed()) if not self._problem(path, hashes=False)]
            doomed = [path for path in whole[:-1] if str(path) != self.state.best_model_checkpoint]
            for old in doomed[: max(len(whole) - self.args.save_total_limit, 0)]:  # the two others count too, and stay
                remove_folder(old)

    def _listed(self) -> list[Path]:
        """All in `output_dir` that is named as a checkpoint, newest first, whole or not."""
        found = [path for path in self._root.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        return sorted(found, key=lambda path: -int(path.name[11:]))

    def _problem(self, folder: Path, *, hashes: bool = True) -> str:
        """Why nothing can be resumed from it, or with `hashes` from Covey's that it goes with; "" = it can be."""
        if folder.is_dir() and not (folder / POINTER).is_file():
            return "is no checkpoint of covey.trl, or was not written to the end"
        problem = folder_problem(folder, hashes=hashes, others=True)  # callbacks may add files
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
        """The folder to resume from: the one that is named, or for True the newest that is whole; else an error."""
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
                f"resume_from_checkpoint=True: no checkpoint-N in {self._root}; train without it first"
            )
        path, problem = next(iter(problems.items()))
        if wanted is not True:
            raise CheckpointError(
                f"{path}: {problem}; give a whole checkpoint-N of this trainer, or True for the newest"
            )
        every = f"none of the checkpoints in {self._root} is whole (the newest, {path.name}: {problem})"
        raise CheckpointError(f"resume_from_checkpoint=True: {every}; train without it to begin again")

    def _inner_checkpoint(self, folder: Path) -> Path:
        name = json.loads((folder / POINTER).read_text())["checkpoint"]
        return folder.absolute().parent / RUN_FOLDER / "checkpoints" / Path(str(name)).name

    # of transformers' Trainer: metrics are printed, one a line, and go to files in `output_dir`, as the state does
    log_metrics, save_metrics, save_state = log_metrics, save_metrics, save_state

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Save the adapter (PEFT format) or the whole model, with the tokenizer; default: to `args.output_dir`.

        With `args.push_to_hub`, `output_dir` is uploaded then, as in transformers.
        """
        self.run.save_model(output_dir or self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository `hub_model_id` (default: of `output_dir`'s name), if it is not there.

        Raises `HubError`: it cannot be made, or the token may not write there.
        """
        args = self.args
        wanted = args.hub_model_id or Path(args.output_dir or "").absolute().name
        self.hub_model_id = prepare_upload(wanted, token=token or args.hub_token, private=args.hub_private_repo)

    def create_model_card(
        self,
        model_name: str | Mapping[str, Any] | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write `output_dir/README.md`, filled in from the run so far."""
        if isinstance(model_name, Mapping):  # many scripts pass their keywords so
            return self.create_model_card(**model_name)
        inner = Path(self.run.args.run.output_dir)
        run = RunFolder.read(inner) if RunFolder.is_run(inner) else None
        text = model_card(
            run,
            name=model_name or self.hub_model_id or self.args.hub_model_id or self._root.absolute().name,
            base_model=self.run.args.model.model,
            kind="adapter" if self.run.policy.uses_peft else "model",
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
            dataset_name=dataset_name,
            vision=getattr(self.run.policy, "album", None) is not None,
        )
        self._root.mkdir(parents=True, exist_ok=True)
        write_card(self._root, text, run)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> str:
        """Save the model to `output_dir`, write its card, and upload both.

        Raises `HubError`: the hub refuses or cannot be reached; the model is in `output_dir` all the same.
        """
        self.save_model(_internal_call=True)
        if self.hub_model_id is None:
            self.init_hf_repo(token)
        assert self.hub_model_id is not None
        self.create_model_card(**card)
        return upload_folder(
            str(self.args.output_dir),
            self.hub_model_id,
            message=commit_message or "End of training",
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
        )

"""The hub, as transformers' trainer knows it: `push_to_hub`, `create_model_card`, and the settings `hub_*`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.hub import prepare_upload, upload_folder
from covey.observe.card import model_card, write_card
from covey.observe.run_folder import RunFolder
from covey.trl.arguments import GRPOConfig


class Publishing:
    """What a trainer needs to upload `output_dir`: the model, its tokenizer, its card and learning curve.

    Checkpoints and Covey's run folder stay here. `hub_strategy` does not matter: there are no uploads while training.
    """

    args: GRPOConfig
    run: Any
    hub_model_id: str | None = None

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Save the adapter (PEFT format) or the whole model, with the tokenizer; default: to `args.output_dir`.

        With `args.push_to_hub`, `output_dir` is uploaded then, as in transformers.
        """
        self.run.save_model(output_dir or self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository `hub_model_id` (default: of `output_dir`'s name), if it is not there.

        Raises:
            HubError: it cannot be made, or the token may not write there.
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
        folder, inner = Path(self.args.output_dir or ""), Path(self.run.args.run.output_dir)
        run = RunFolder.read(inner) if RunFolder.is_run(inner) else None
        text = model_card(
            run,
            name=model_name or self.hub_model_id or self.args.hub_model_id or folder.absolute().name,
            base_model=self.run.args.model.model,
            kind="adapter" if self.run.policy.uses_peft else "model",
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
            dataset_name=dataset_name,
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_card(folder, text, run)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> str:
        """Save the model to `output_dir`, write its card, and upload both.

        Raises:
            HubError: the hub refuses or cannot be reached; the model is in `output_dir` all the same.
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

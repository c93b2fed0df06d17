"""`covey export`: what a run has trained, for other programs and for the hub."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from covey.cli.weights import out
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.observe.console import say


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    output: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Folder to write, empty or new; default: RUN/export.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best evaluation's weights; default: the final ones.")
    ] = False,
    checkpoint: Annotated[int | None, typer.Option(min=0, help="The weights of checkpoints/step_N.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter, in PEFT's format.")] = False,
    mlx: Annotated[bool, typer.Option("--mlx", help="Only the adapter, in mlx-lm's format.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="One file for llama.cpp, Ollama, LM Studio.")] = False,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Number format of a whole model; default: float32, with --gguf float16."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base model to name in the adapter, such as a hub id.")] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload it, with the token of `hf auth login`.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-to-hub: only you can see it.")] = False,
) -> None:
    """Write a run's model as a Hugging Face folder, with a model card: the adapter merged into its base.

    covey export runs/demo my-model --push-to-hub me/my-model
    """
    from covey.hub import prepare_upload, upload_folder
    from covey.observe.card import Kind
    from covey.observe.run_folder import RunFolder
    from covey.training.export import checkpoint_weights, export_run, kept_weights, require_empty

    if adapter + mlx + gguf > 1:
        raise ConfigError("--adapter, --mlx and --gguf: each is another form; give one of them")
    if best and checkpoint is not None:
        raise ConfigError("--best and --checkpoint: each names other weights; give one of them")
    if private and push_to_hub is None:
        raise ConfigError("--private: goes with --push-to-hub OWNER/NAME; add it, or leave --private out")
    if dtype is not None and (adapter or mlx):
        raise ConfigError(f"--dtype={dtype}: of a whole model; an adapter keeps its own; leave --dtype out")
    folder = RunFolder.read(run)
    config = GRPOConfig.from_toml(folder.whole_config()).replace(upload_adapters_to_server=False)
    target = require_empty(run / "export" if output is None else output)
    repository = None if push_to_hub is None else prepare_upload(push_to_hub, private=private or None)
    with (
        nullcontext(kept_weights(folder, config, best=best, instead="name a checkpoint with --checkpoint"))
        if checkpoint is None
        else checkpoint_weights(folder, config, checkpoint)
    ) as weights:
        say(out, f"weights: {weights.said}")
        kind: Kind = "adapter" if adapter else "mlx" if mlx else "gguf" if gguf else "model"
        export_run(folder, config, weights, target, kind=kind, dtype=dtype, base=base, repository=repository)
    say(out, f"wrote {target}")
    if config.model.quantization != "none":
        where = f"goes onto {base or config.model.model}" if adapter or mlx else "was merged into the model"
        say(
            out,
            f"the adapter was trained on the model in {config.model.quantization} and {where} as it is in its files: "
            "what was exported is not quite the policy that was trained; compare covey eval of both",
        )
    if repository is not None:
        say(out, f"uploaded to {upload_folder(target, repository)}")

"""Which weights `covey eval` and `covey sample` look at."""

from __future__ import annotations

from rich.console import Console

from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.files import folder_problem

err = Console(stderr=True)


def config_for(model: str, adapter: str | None, overrides: list[str] | None) -> GRPOConfig:
    """Settings for looking at a model: a run's own with its weights, of which it is said which, or the defaults.

    Raises:
        ConfigError: the run has no weights yet, or they are gone or damaged.
    """
    from covey.observe.run_folder import RunFolder

    if not RunFolder.is_run(model):
        config = GRPOConfig.from_overrides(overrides or [])
        return config.replace(model=model) if adapter is None else config.replace(model=model, adapter=adapter)
    folder = RunFolder.read(model)
    config = GRPOConfig.from_toml(folder.whole_config(), overrides=overrides or [])
    config = config.replace(upload_adapters_to_server=False)  # looking does not need the server that trained it
    if adapter is not None:
        return config.replace(adapter=adapter)
    again = f"`covey resume {model}` writes a finished run's adapter anew"
    if folder.is_finished() and not folder.adapter.is_dir():
        raise ConfigError(f"{model}: the run is finished, and its adapter/ is gone; {again}")
    kept = next((path for path in (folder.adapter, folder.best) if path.is_dir()), None)
    if kept is None:
        fix = "give --adapter" if config.model.use_peft else f"name the model itself, {config.model.model}"
        raise ConfigError(f"{model}: the run has no adapter yet; {fix}, or wait for its first evaluation or its end")
    problem = folder_problem(kept)
    if problem:
        raise ConfigError(f"{kept}: {problem}; {again}")
    err.print(f"weights: {folder.describe_weights(kept)}", markup=False, highlight=False, soft_wrap=True)
    return config.replace(adapter=str(kept)) if config.model.use_peft else config.replace(model=str(kept))

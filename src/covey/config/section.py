"""What the sections are made of: frozen models, in which the text below a field is its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from covey.errors import ConfigError, shown

PathText = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
Texts = Annotated[
    tuple[str, ...], Field(strict=False), BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
_OR_EMPTY = BeforeValidator(lambda value: {} if value is None else value)
Options = Annotated[dict[str, bool | int | float | str], _OR_EMPTY]
Tables = Annotated[dict[str, bool | int | float | str | dict[str, int]], _OR_EMPTY]


class Section(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True):
    """Settings that are checked together."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    def problems(self) -> Iterator[str]:
        """What does not fit together, each a sentence that begins with the values at fault."""
        yield from ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{name}={shown(value)}: settings are frozen; make a copy with config.replace({name}=...). To change "
            "temperature, beta, num_generations or learning_rate during a run, use schedule.phases"
        )

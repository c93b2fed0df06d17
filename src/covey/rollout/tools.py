"""Calls of tools: what the model asks for, how it is carried out, and what it is told.

Functions run in this process: synchronous ones in the caller's thread, or with a time limit in one of their own, one
after the other; asynchronous ones together on one event loop.
"""

from __future__ import annotations

import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.actions import Call
from covey.errors import ConfigError, GenerationError
from covey.functions import later
from covey.rollout.calls import AsyncRunner, Failure, call_with_timeout, message_of, shorten
from covey.types import Message, Prompt

(pictures,) = later("covey.tasks", "pictures")
log = logging.getLogger(__name__)

Tool = Callable[..., Any]  # with type hints and a docstring in Google's style, sync or async
INDEX = "_completion_idx"
"""An argument that gets the number of the completion that calls, and is not shown to the model."""
_MOST_HANGING = 3
EMPTY: Message = {"role": "user", "content": ""}  # what is asked where the environment's `reset` says it all


@dataclass(frozen=True, slots=True)
class Order:
    """A call of completion `number`, which has these tools by name; None = one that is not called here."""

    number: int
    call: Call
    tools: Mapping[str, Tool | None]

    @property
    def elsewhere(self) -> bool:
        """The call is not carried out in this process."""
        return not self.call.problem and self.tools.get(self.call.name, self) is None


@dataclass(frozen=True, slots=True)
class Result:
    """What the model is told, pictures before text; `failed` where no tool came to its end."""

    text: str
    failed: bool
    pictures: tuple[Any, ...] = ()


class _RefusedError(Exception):
    """The model's mistake, not the tool's."""


def tool_name(tool: Tool) -> str:
    return str(getattr(tool, "__name__", type(tool).__name__))


def takes_index(tool: Tool) -> bool:
    return INDEX in inspect.signature(tool).parameters


class Calls:
    """Carries calls of functions out, each for `seconds` at most. `blind` says why no pictures are read, or ""."""

    def __init__(self, runner: AsyncRunner, seconds: float | None = None, blind: str = "the model reads none") -> None:
        self._runner, self._seconds, self._blind, self._told = runner, seconds, blind, set[str]()

    def run(self, orders: Sequence[Order]) -> list[Result]:
        """A result for each call, in order. The model is told what went wrong; the console of a tool's first error.

        Raises `GenerationError`: several calls of a tool were given up and still run.
        """
        outcomes = [self._begin(order) for order in orders]
        waiting = [place for place, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
        names = [f"tool {orders[place].call.name!r}" for place in waiting]
        answers = self._runner.run([outcomes[place] for place in waiting], self._seconds, names)
        for place, answer in zip(waiting, answers, strict=True):
            outcomes[place] = answer
        return [self._result(order, outcome) for order, outcome in zip(orders, outcomes, strict=True)]

    def _begin(self, order: Order) -> Any:
        call, tool = order.call, order.tools.get(order.call.name)
        if call.problem:
            return Failure(_RefusedError(call.problem))
        if tool is None:
            return Failure(_RefusedError(f"There is no tool {call.name}. There are: {', '.join(order.tools)}."))
        arguments = {**call.arguments, **({INDEX: order.number} if takes_index(tool) else {})}
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return Failure(_RefusedError(f"{call.name}: {error}"))
        name = f"tool {call.name!r}"
        if sum(thread.name == name for thread in threading.enumerate()) >= _MOST_HANGING:
            said = f"{name}: {_MOST_HANGING} calls that took longer than environment.step_seconds still run"
            raise GenerationError(f"{said}, in threads that cannot be ended; bound what it does and resume the run")
        return call_with_timeout(lambda: self._read(tool(**arguments)), self._seconds, name)

    def _result(self, order: Order, outcome: Any) -> Result:
        failed = isinstance(outcome, Failure)
        if failed:
            error = outcome.error or TimeoutError(f"{order.call.name} took longer than {self._seconds:g} s")
            if isinstance(error, ConfigError):
                raise ConfigError(f"the tool {order.call.name} {error}")
            if not isinstance(error, _RefusedError):
                self._tell(order.call.name, error)
            outcome = Result(str({"error": message_of(error, 100_000)}), failed)
        text = outcome.text.encode("utf-8", "replace").decode()  # lone surrogates are no text
        return Result(text, failed, outcome.pictures)

    def _read(self, value: Any) -> Any:
        """The `Result`, or what awaits it. It is made where the tool runs, because it is the tool's code too."""
        if inspect.isgenerator(value) or inspect.isasyncgen(value):
            raise TypeError("it returned a generator; return a value")
        if inspect.isawaitable(value):
            return self._awaited(value)
        parts = [_part(each) for each in (value if isinstance(value, list | tuple) else (value,))]
        shown = [part for kind, part in parts if kind == "image"]
        if not shown:
            return Result(str(value), False)
        if self._blind:
            raise ConfigError(f"returned a picture: {self._blind}; use a vision model (docs/pictures.md), or texts")
        text = "\n".join(str(part) for kind, part in parts if kind == "text")
        return Result(text, False, pictures.read_shown(shown, "it"))

    async def _awaited(self, value: Awaitable[Any]) -> Any:
        return self._read(await value)

    def _tell(self, name: str, error: BaseException) -> None:
        if name in self._told:
            return
        self._told.add(name)
        said = (
            f"the tool {name} raised {type(error).__name__}: {message_of(error)}. The model is given the message as "
            "the tool's result; more errors of this tool are only counted, in tools/failure_frequency. The traceback:"
        )
        log.warning("%s\n%s", said, shorten("".join(traceback.format_exception(error)).rstrip(), 10_000))


def _part(value: Any) -> tuple[str, Any]:
    """The type and the content of a part `{"type": "image", "image": ...}`, `{"type": "text", ...}`, or of a value."""
    if isinstance(value, Mapping) and (kind := value.get("type")) in ("image", "text"):
        return kind, value.get(kind)
    return "image" if type(value).__module__.startswith("PIL.") else "text", value


@dataclass(slots=True, eq=False)
class Scene:
    """What one episode is played with."""

    prompt: Prompt
    tools: Mapping[str, Tool | None]
    schemas: Sequence[Mapping[str, Any]]

"""Tools of an agent: what the model is told of them, and how its calls are carried out.

They are the user's own functions and run in this process: synchronous ones in the caller's thread, one after the other,
asynchronous ones together on one event loop.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from covey.errors import ConfigError
from covey.rollout.calls import AsyncRunner, Failure, call_with_timeout, shorten

log = logging.getLogger(__name__)

Tool = Callable[..., Any]
"""A function with type hints and a docstring in Google's style, sync or async."""

INDEX = "_completion_idx"
"""An argument of this name gets the number of the completion that calls, and is not shown to the model."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the model asks for."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """A call of completion `number`, which has these tools by name."""

    number: int
    call: Call
    tools: Mapping[str, Tool]


@dataclass(frozen=True, slots=True)
class Result:
    """What the model is told; `failed` where no tool came to its end."""

    text: str
    failed: bool


class _RefusedError(Exception):
    """The model's mistake, not the tool's."""


def tool_name(tool: Tool) -> str:
    """What the model calls it."""
    return str(getattr(tool, "__name__", type(tool).__name__))


def takes_index(tool: Tool) -> bool:
    """Whether the tool wants to know which completion calls."""
    return INDEX in inspect.signature(tool).parameters


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates show it: name, description, JSON schema of its arguments.

    Raises:
        ConfigError: it cannot be called, or its arguments lack type hints or a description.
    """
    if not callable(tool):
        raise ConfigError(f"tools: {tool!r:.200} is a {type(tool).__name__}; give functions")
    try:
        return dict(get_json_schema(_without_index(tool) if takes_index(tool) else tool))
    except Exception as error:  # several kinds, none of them public
        raise ConfigError(
            f"tools: {tool_name(tool)} cannot be described to the model ({error!s:.300}); give each "
            "argument a type hint and a line below 'Args:' of its docstring"
        ) from error


def _without_index(tool: Tool) -> Tool:
    """Something with the tool's name, docstring and arguments, but `_completion_idx`."""

    def shown() -> None: ...

    signature = inspect.signature(tool)
    shown.__name__, shown.__doc__ = tool_name(tool), inspect.getdoc(tool)
    shown.__annotations__ = {name: hint for name, hint in get_type_hints(tool).items() if name != INDEX}
    kept = [parameter for name, parameter in signature.parameters.items() if name != INDEX]
    vars(shown)["__signature__"] = signature.replace(parameters=kept)
    return shown


class Calls:
    """Carries calls out."""

    def __init__(self, runner: AsyncRunner) -> None:
        self._runner = runner
        self._told: set[str] = set()

    def run(self, orders: Sequence[Order]) -> list[Result]:
        """A result for each call, in order. Tools raise nothing: the model is told what went wrong.

        The first error of each tool is on the console, with its traceback.
        """
        outcomes = [self._begin(order) for order in orders]
        waiting = [place for place, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
        answers = self._runner.run([outcomes[place] for place in waiting], None)
        for place, answer in zip(waiting, answers, strict=True):
            outcomes[place] = answer
        return [self._result(order, outcome) for order, outcome in zip(orders, outcomes, strict=True)]

    @staticmethod
    def _begin(order: Order) -> Any:
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
        return call_with_timeout(lambda: tool(**arguments), None, f"tool {call.name!r}")

    def _result(self, order: Order, outcome: Any) -> Result:
        failed = isinstance(outcome, Failure)
        if failed and not isinstance(outcome.error, _RefusedError):
            self._tell(order.call.name, outcome.error)
        text = str({"error": str(outcome.error)} if failed else outcome)
        return Result(text.encode("utf-8", "replace").decode(), failed)  # lone surrogates are no text

    def _tell(self, name: str, error: BaseException | None) -> None:
        if name in self._told or error is None:
            return
        self._told.add(name)
        log.warning(
            "the tool %s raised %s: %s. The model is given the message as the tool's result; further errors of this "
            "tool are only counted, in tools/failure_frequency. The traceback:\n%s",
            name,
            type(error).__name__,
            shorten(str(error)),
            "".join(traceback.format_exception(error)).rstrip(),
        )

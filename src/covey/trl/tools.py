"""Tools of an agent, and environments whose public methods are tools: what the model is told, how calls are made.

They are the user's own and run in this process: synchronous ones in the caller's thread, one after the other,
asynchronous ones together on one event loop. Environments are made once and reset for every episode.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from covey.errors import ConfigError, DataError, EpisodeError, raised_at
from covey.rollout.calls import AsyncRunner, Failure, call_with_timeout, is_async, shorten
from covey.types import Message, Prompt

log = logging.getLogger(__name__)

Tool = Callable[..., Any]  # with type hints and a docstring in Google's style, sync or async
INDEX = "_completion_idx"
"""An argument that gets the number of the completion that calls, and is not shown to the model."""
EMPTY: Message = {"role": "user", "content": ""}  # what is asked where the environment's `reset` says it all
_OWN = ("reset", "get_reward")  # methods that the model cannot call


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
    return str(getattr(tool, "__name__", type(tool).__name__))


def takes_index(tool: Tool) -> bool:
    return INDEX in inspect.signature(tool).parameters


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates show it: name, description, JSON schema of its arguments."""
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
        self._runner, self._told = runner, set[str]()

    def run(self, orders: Sequence[Order]) -> list[Result]:
        """A result for each call, in order. The model is told what went wrong; the console of a tool's first error."""
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
        said = (
            f"the tool {name} raised {type(error).__name__}: {shorten(str(error))}. The model is given the message as "
            "the tool's result; more errors of this tool are only counted, in tools/failure_frequency. The traceback:"
        )
        log.warning("%s\n%s", said, "".join(traceback.format_exception(error)).rstrip())


@dataclass(slots=True, eq=False)
class Scene:
    """What one episode is played with."""

    prompt: Prompt
    environment: Any
    tools: Mapping[str, Tool]
    schemas: Sequence[Mapping[str, Any]]


class Toolset:
    """The tools of a run: functions, and the methods of environments, of which a pool is kept."""

    def __init__(self, functions: Sequence[Tool], factory: Any = None) -> None:
        self._functions = list(functions)
        self._by_name = isinstance(factory, Mapping)
        alone = {} if factory is None else {None: factory}
        self._factories: dict[Any, Callable[[], Any]] = dict(factory) if self._by_name else alone
        self.pools: dict[Any, list[Any]] = {name: [_made(make)] for name, make in self._factories.items()}
        shown = [tool_schema(tool) for tool in self._functions]
        self._schemas = {name: [*shown, *map(tool_schema, methods(pool[0]))] for name, pool in self.pools.items()}
        self._schemas.setdefault(None, shown)
        own = [method for pool in self.pools.values() for method in methods(pool[0])]
        self.tools: list[Tool] = self._functions + own
        self.accepts_index = {tool_name(tool): takes_index(tool) for tool in self.tools}
        self.environments: list[Any] = []
        self.has_environments = bool(self._factories)

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class of environments that has `get_reward`."""
        kinds = dict.fromkeys(type(pool[0]) for pool in self.pools.values())
        return [_own_reward(kind) for kind in kinds if callable(getattr(kind, "get_reward", None))]

    def scenes(self, prompts: Sequence[Prompt]) -> list[Scene]:
        """Begin an episode of each prompt; an error if an environment raises, or a row has no prompt for one."""
        used: dict[Any, int] = {}
        scenes = [self._scene(prompt, used) for prompt in prompts]
        self.environments = [scene.environment for scene in scenes] if self.has_environments else []
        return scenes

    def _scene(self, prompt: Prompt, used: dict[Any, int]) -> Scene:
        if isinstance(prompt.content, str):
            raise DataError(
                f"row {prompt.uid}: the prompt is plain text, and tools are called in conversations; make it "
                '[{"role": "user", "content": "..."}]'
            )
        if not self.has_environments:
            return Scene(prompt, None, {tool_name(tool): tool for tool in self._functions}, self._schemas[None])
        name = self._name(prompt)
        pool, number = self.pools[name], used.get(name, 0)
        if number == len(pool):
            pool.append(_made(self._factories[name]))
        used[name], environment = number + 1, pool[number]
        tools = {tool_name(tool): tool for tool in (*self._functions, *methods(environment))}
        content = self._reset(environment, prompt)
        columns = {**prompt.columns, "environments": environment}
        begun = replace(prompt, content=content, columns=columns)
        return Scene(begun, environment, tools, self._schemas[name])

    def _name(self, prompt: Prompt) -> Any:
        if not self._by_name:
            return None
        name = prompt.columns.get("environment")
        if name not in self._factories:
            raise DataError(
                f"row {prompt.uid}: environment={name!r:.100} is none of those that there are, not among the "
                f"environments of environment_factory; use one of {', '.join(map(str, self._factories))}"
            )
        return name

    def _reset(self, environment: Any, prompt: Prompt) -> list[Message]:
        messages = [dict(message) for message in prompt.content if isinstance(message, dict)]
        left_out = {"environments", "environment"} if self._by_name else {"environments"}
        row = {name: value for name, value in prompt.columns.items() if name not in left_out}
        parameters = inspect.signature(environment.reset).parameters.values()
        if messages != [EMPTY] or any(p.name == "prompt" or p.kind is p.VAR_KEYWORD for p in parameters):
            row = {"prompt": [dict(message) for message in messages], **row}
        try:
            said = environment.reset(**row)
        except Exception as error:
            raise EpisodeError(
                f"row {prompt.uid}: {type(environment).__name__}.reset raised {type(error).__name__}: "
                f"{error!s:.300}{raised_at(error)}; no episode can begin"
            ) from error
        if said is not None and not isinstance(said, str):
            raise EpisodeError(
                f"row {prompt.uid}: {type(environment).__name__}.reset returned a {type(said).__name__}; return a "
                "string, which is put after the last message, or None"
            )
        messages[-1]["content"] += said or ""
        return messages


def _made(factory: Callable[[], Any]) -> Any:
    if not callable(factory):
        raise ConfigError(
            f"environment_factory: {factory!r:.200} cannot be called; give a class, a function, or a dict of such"
        )
    environment = factory()
    if not callable(getattr(environment, "reset", None)):
        raise ConfigError(f"environment_factory: {type(environment).__name__} has no method reset; give it one")
    return environment


def methods(environment: Any) -> list[Tool]:
    """What the model can call, in alphabetical order. Properties are not looked at."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _OWN and not name.startswith("_")]


def _own_reward(kind: Any) -> Callable[..., Any]:
    """What environments of this very class say that their episode earned; None for others."""

    async def one(environment: Any) -> Any:
        return await environment.get_reward() if type(environment) is kind else None

    async def later(environments: Sequence[Any], **_: Any) -> list[Any]:
        return await asyncio.gather(*map(one, environments))

    def now(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    function: Callable[..., Any] = later if is_async(kind.get_reward) else now
    function.__name__ = kind.__name__
    return function

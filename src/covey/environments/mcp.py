"""Tools of MCP servers (Model Context Protocol), called from processes that can be killed.

    place, a process of `EnvironmentPool`  --JSON lines over stdin and stdout, or HTTP-->  server

Each place has servers of its own, started anew for an episode that follows one in which they were called. They are
killed with their place, and get six environment variables and no others (`mcp.client.stdio.get_default_environment`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

from covey.environments.base import Environment, Returned, TaskInstance
from covey.environments.pool import EnvironmentPool
from covey.errors import ConfigError, EpisodeError

Asked = Mapping[int, Sequence[tuple[str, Mapping[str, Any]]]]
"""Place -> name and arguments of its calls."""
_LONGEST_LINE = 8 << 20
"""Bytes of a message of a server; a longer one ends it."""
_LONGEST = 100_000
"""Characters of the results of a turn. What the model reads is cut further, by tokens."""


class McpTools:
    """The tools of some servers, by place.

    Args:
        servers: commands or URLs; `python` is the interpreter of this process.
        places: number of episodes at the same time.
        seconds: time limit of the calls of a turn; starting the servers may take three times as long.

    Attributes:
        schemas: the tools as chat templates show them; the parameters are the servers' own JSON schemas,
            without their title.

    Raises `ConfigError`: mcp is not installed, or a server does not start.
    """

    def __init__(self, servers: Sequence[str], places: int, seconds: float) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(f"environment.tools='mcp:{servers[0]}' needs mcp; pip install 'covey[mcp]'")
        world: Any = _Servers(tuple(servers))
        self._pool = EnvironmentPool(world, places, reset_seconds=3 * seconds, step_seconds=seconds)
        self._starting = {0}
        self._pool.reset(0, {}, 0)
        ((_, found),) = self._pool.wait()
        self._starting.clear()
        if isinstance(found, EpisodeError):
            self.close()
            raise ConfigError(f"environment.tools: {found}")
        self.schemas: list[dict[str, Any]] = json.loads(found.text)  # type: ignore[union-attr]

    def begin(self, place: int) -> None:
        """An episode begins: its servers are as new, or will be soon. Returns at once."""
        if place not in self._starting:
            self._starting.add(place)
            self._pool.reset(place, {}, 0)

    def call(self, asked: Asked) -> dict[int, Any]:
        """Place -> (text, failed) of each of its calls, or an `EpisodeError`. Places do not wait for one another."""
        found: dict[int, Any] = {}
        for place in asked.keys() - self._starting:
            self._pool.step(place, json.dumps(asked[place]))
        while len(found) < len(asked):
            for place, answer in self._pool.wait():
                if place not in self._starting:
                    lost = isinstance(answer, EpisodeError)
                    found[place] = answer if lost else json.loads(answer.observation.text)  # type: ignore[union-attr]
                else:  # a server that has not started is asked too: it is tried again
                    self._starting.remove(place)
                    if place in asked:
                        self._pool.step(place, json.dumps(asked[place]))
        return found

    def close(self) -> None:
        """End all servers; what is needed again starts anew."""
        self._starting.clear()
        self._pool.close()


class _Servers:
    """What the pool makes places of."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = servers

    def prepare(self) -> None:
        import mcp  # noqa: F401  # for all places

    def make(self) -> Environment:
        return _Clients(self._servers)


class _Clients(Environment):
    """The servers of a place. A reset answers with all schemas, a step with the results of calls; all are JSON."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers, self._loop = servers, asyncio.new_event_loop()
        self._life: asyncio.Task[None] | None = None
        self._used = False

    def reset(self, task: TaskInstance, seed: int) -> str:
        if self._used:
            self.close()
        return self._run(self._open())

    def step(self, action: str) -> Returned:
        self._used = True
        return self._run(self._call(json.loads(action))), 0.0, False, {}

    def close(self) -> None:
        if self._life is not None:
            self._ended.set()
            with suppress(Exception):
                self._loop.run_until_complete(self._life)
        self._life, self._used = None, False

    def _run(self, work: Coroutine[Any, Any, Any]) -> str:
        try:
            return json.dumps(self._loop.run_until_complete(work))
        except EpisodeError as error:
            raise EpisodeError(str(error)) from None  # where the event loop stands helps nobody

    async def _open(self) -> list[Any]:
        if self._life is None:
            self._ended, opened = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(opened))
            self._schemas: list[Any] = await opened
        return self._schemas

    async def _live(self, opened: asyncio.Future[Any]) -> None:
        """Connections are opened and closed by one task, as anyio wants it."""
        from mcp import Client

        schemas, self._of = [], dict[str, tuple[str, Any]]()
        self._errors = {server: cast(Any, tempfile.TemporaryFile()) for server in self._servers}  # noqa: SIM115
        try:
            async with AsyncExitStack() as stack:
                for server in self._servers:
                    remote = server.startswith(("http://", "https://"))
                    client = Client(server if remote else _process(server, self._errors[server]))
                    await stack.enter_async_context(client)
                    for tool in (await client.list_tools()).tools:
                        self._of[tool.name] = server, client
                        about: dict[str, Any] = {"name": tool.name, "description": tool.description or tool.name}
                        # a title such as "priceArguments" is taken for the tool's name by small models
                        about["parameters"] = {key: of for key, of in tool.input_schema.items() if key != "title"}
                        schemas.append({"type": "function", "function": about})
                opened.set_result(schemas)
                await self._ended.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(self._failure(server, "did not start", error))

    async def _call(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, bool]]:
        await self._open()
        results = []
        for name, arguments in calls:
            server, client = self._of[name]
            try:
                found = await client.call_tool(name, arguments)
            except Exception as error:
                raise self._failure(server, f"did not answer {name}", error) from error
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in found.content)
            results.append((text[: _LONGEST // len(calls)], bool(found.is_error)))
        return results

    def _failure(self, server: str, what: str, error: BaseException) -> EpisodeError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        file = self._errors[server]
        file.seek(max(file.seek(0, 2) - 300, 0))
        said = " ".join(file.read(300).decode(errors="replace").split()) or f"{type(error).__name__}: {error}"
        return EpisodeError(f"the MCP server {server!r:.100} {what}: {said}")


@asynccontextmanager
async def _process(command: str, errors: Any) -> AsyncIterator[Any]:
    """A transport of mcp: a process of this process's group, which the pool kills as a whole, and lines of bounded
    length. mcp's own one starts a session, which outlives a place that is killed, and reads lines of any length.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter
    from pydantic import ValidationError

    words, pipes = shlex.split(command), {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    words[0] = sys.executable if words[0] == "python" else words[0]
    how: dict[str, Any] = {**pipes, "stderr": errors, "env": get_default_environment(), "limit": _LONGEST_LINE}
    process: Any = await asyncio.create_subprocess_exec(*words, **how)
    heard, read = anyio.create_memory_object_stream[Any](0)
    write, told = anyio.create_memory_object_stream[Any](0)

    async def hear() -> None:
        async with heard:
            try:
                while line := await process.stdout.readline():
                    with suppress(ValidationError):  # what the server prints is no message
                        await heard.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))
            except ValueError:
                errors.write(b" a message of more than 8 MiB")

    async def tell() -> None:
        with suppress(ConnectionError):
            async for message in told:
                process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        tasks.start_soon(tell)
        try:
            yield read, write
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            tasks.cancel_scope.cancel()
    await process.wait()

"""Tools of MCP servers (Model Context Protocol), called on one event loop in a thread.

    place, an episode under way  --JSON lines over stdin and stdout, or HTTP-->  its servers

Each place has servers of its own, started anew for an episode that follows one in which they were called. They get six
environment variables (`mcp.client.stdio.get_default_environment`) and a mark, by which all that they start is killed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TextIO

from covey.errors import ConfigError, DataError, EpisodeError
from covey.functions import later
from covey.processes import kill_marked
from covey.rollout.calls import AsyncRunner, Failure
from covey.rollout.tools import Result

(pictures,) = later("covey.tasks", "pictures")

Asked = Mapping[int, Sequence[tuple[str, Mapping[str, Any]]]]
"""Place -> name and arguments of its calls."""
_LONGEST = 100_000
"""Characters of the results of a turn. What the model reads is cut further, by tokens."""
_MOST_PAGES, _MOST_TOOLS = 100, 1_000
_STARTS_AT_ONCE, _END_SECONDS = 8, 10.0
"""Places whose servers start at the same time, while the others wait; how long is waited for their end."""


class McpTools:
    """The tools of some servers, by place.

    Args:
        servers: commands or URLs; `python` is the interpreter of this process.
        seconds: time limit of the calls of a turn; starting the servers may take three times as long.
        sees: pictures are read; else each is the text `[image]`.

    Attributes:
        schemas: the tools as chat templates show them; the parameters are the servers' own JSON schemas,
            without their title.

    Raises `ConfigError`: mcp is not installed, or a server does not start, or has tools that cannot be shown.
    """

    def __init__(self, servers: Sequence[str], seconds: float, *, sees: bool = False) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ConfigError(f"environment.tools='mcp:{servers[0]}' needs mcp; pip install 'covey[mcp]'") from None
        self._servers, self.seconds, self._sees = tuple(servers), seconds, sees
        self._runner = AsyncRunner()
        self._forget()
        self.begin(0)
        (found,) = self._runner.run([self._places[0].opened], None)
        if isinstance(found, Failure):
            self.close()
            raise ConfigError(f"environment.tools: {found.error}")
        self.schemas: list[dict[str, Any]] = found

    def begin(self, place: int) -> None:
        """An episode begins: its servers are as new, or will be soon. Returns at once."""
        self._runner.run([self._begun(place)], None)

    def call(self, asked: Asked) -> dict[int, Any]:
        """Place -> the `Result` of each of its calls, or an `EpisodeError`. Places do not wait for one another."""
        found = self._runner.run([self._called(place, calls) for place, calls in asked.items()], None)
        return dict(zip(asked, found, strict=True))

    def close(self) -> None:
        """End all servers; what is needed again starts anew."""
        self._runner.run([self._end()], None)
        self._runner.close()
        self._forget()

    def _forget(self) -> None:
        self._places: dict[int, _Clients] = {}
        self._lives = set[asyncio.Task[None]]()  # of servers that have not ended
        self._starting = asyncio.Semaphore(_STARTS_AT_ONCE)

    async def _end(self) -> None:
        for clients in self._places.values():
            clients.end()
        if self._lives:
            await asyncio.wait(self._lives, timeout=_END_SECONDS)

    async def _begun(self, place: int) -> None:
        if place in self._places and self._places[place].over:
            self._places.pop(place).end()
        self._at(place)

    async def _called(self, place: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Any:
        try:
            return await self._at(place).call(calls, self.seconds, self._sees)
        except (EpisodeError, OSError) as error:  # no file can be opened
            return EpisodeError(str(error))

    def _at(self, place: int) -> _Clients:
        if place not in self._places:
            found = self._places[place] = _Clients(self._servers, self._starting, 3 * self.seconds)
            self._lives.add(found.life)
            found.life.add_done_callback(self._lives.discard)
        return self._places[place]


class _Clients:
    """The servers of a place, from their start to their end. It lives on the event loop."""

    def __init__(self, servers: Sequence[str], starting: asyncio.Semaphore, seconds: float) -> None:
        self._servers, self._of = servers, dict[str, tuple[str, Any]]()
        self._errors = {server: tempfile.TemporaryFile("w+", errors="replace") for server in servers}  # noqa: SIM115
        self._used, self._ended, self._mark = False, asyncio.Event(), secrets.token_hex(16)
        self.opened: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self.life = asyncio.create_task(self._live(starting, seconds))

    @property
    def over(self) -> bool:
        """An episode that begins needs others: they have been called, or have ended."""
        return self._used or self.life.done()

    async def call(self, calls: Sequence[tuple[str, Mapping[str, Any]]], seconds: float, sees: bool) -> list[Result]:
        """The results, in order. Raises `EpisodeError`: there are none in time; the servers are killed."""
        self._used = True
        await self.opened
        results = []
        try:
            async with asyncio.timeout(seconds):
                for name, arguments in calls:
                    found = await self._of[name][1].call_tool(name, arguments)
                    results.append(await asyncio.to_thread(_result, found, _LONGEST // len(calls), sees))
        except Exception as error:
            name = calls[len(results)][0]
            self._ended.set()
            raise self._failure(self._of[name][0], f"did not answer {name}", error, seconds) from error
        return results

    def end(self) -> None:
        """Let them end, whatever they are doing; those that do not are killed after some seconds."""
        self._ended.set()
        if not self.opened.done():
            self.life.cancel()

    async def _live(self, starting: asyncio.Semaphore, seconds: float) -> None:
        """Connections are opened and closed by one task, as anyio wants it."""
        from mcp import Client

        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)  # what a server prints is no message
        schemas, server = list[dict[str, Any]](), self._servers[0]
        try:
            async with AsyncExitStack() as stack:
                async with starting, asyncio.timeout(seconds):
                    for server in self._servers:
                        client = Client(_transport(server, self._errors[server], self._mark))
                        await stack.enter_async_context(client)
                        tools = await _listed(client)
                        self._of |= {tool.name: (server, client) for tool in tools}
                        schemas += map(_schema, tools)
                self.opened.set_result(schemas)
                await self._ended.wait()
        except BaseException as error:
            if not self.opened.done():
                self.opened.set_exception(self._failure(server, "did not start", error, seconds))
        finally:
            kill_marked(self._mark)
            for file in self._errors.values():
                file.close()

    def _failure(self, server: str, what: str, error: BaseException, seconds: float) -> EpisodeError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConfigError):
            return EpisodeError(f"the MCP server {server!r:.100} {error}")
        late = f" within {seconds:g} s (see environment.step_seconds)" if isinstance(error, TimeoutError) else ""
        file = self._errors[server]
        file.seek(max(file.seek(0, 2) - 300, 0))
        said = " ".join(file.read(300).split()) or f"{type(error).__name__} {error}".strip()
        return EpisodeError(f"the MCP server {server!r:.100} {what}{late}: {said}")


def _result(found: Any, most: int, sees: bool) -> Result:
    """What a server answered, of its text `most` characters; in a thread, since pictures take their time."""
    parts = [(sees and part.type == "image", part) for part in found.content]
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for seen, part in parts if not seen)
    try:
        shown = pictures.read_shown([f"data:image/png;base64,{part.data}" for seen, part in parts if seen], "it")
    except DataError as error:
        return Result(str({"error": str(error)}), True)
    return Result(text[:most], bool(found.is_error), shown)


async def _listed(client: Any) -> list[Any]:
    """The tools of all pages. Raises `ConfigError`, which says what is wrong with them."""
    tools, cursor, pages = list[Any](), None, 0
    while pages == 0 or cursor is not None:
        page = await client.list_tools(cursor=cursor)
        tools, cursor, pages = tools + page.tools, page.next_cursor, pages + 1
        if len(tools) > _MOST_TOOLS or pages > _MOST_PAGES:
            raise ConfigError(f"lists more than {_MOST_TOOLS} tools or {_MOST_PAGES} pages; let it offer fewer")
    if not tools:
        raise ConfigError("has no tools; remove it, or correct what starts it")
    if wrong := [tool.name for tool in tools if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tool.name)]:
        raise ConfigError(f"has a tool {wrong[0]!r:.100}; a name is 1 to 64 of A-Z, a-z, 0-9, '_', '-' and '.'")
    return tools


def _schema(tool: Any) -> dict[str, Any]:
    # a title such as "priceArguments" is taken for the tool's name by small models
    parameters = {key: of for key, of in tool.input_schema.items() if key != "title"}
    about = {"name": tool.name, "description": tool.description or tool.name, "parameters": parameters}
    return {"type": "function", "function": about}


def _transport(server: str, errors: TextIO, mark: str) -> Any:
    """A URL as it is; of a command a process that writes its errors there."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    if server.startswith(("http://", "https://")):
        return server
    command, *args = shlex.split(server)
    command = sys.executable if command == "python" else command
    return stdio_client(StdioServerParameters(command=command, args=args, env={"COVEY_SERVER": mark}), errors)

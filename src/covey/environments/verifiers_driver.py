"""Plays episodes of a taskset of verifiers. A trainer runs it with the Python that has verifiers.

    trainer  {"sets": {"train": {"taskset": {...}, "agent": {...}, "timeout": {...}}}, "most": 1000}
    driver   {"tasks": {"train": ["9f2c...", ...]}}                    of each task a hash of what it contains
    trainer  {"id": 7, "set": "train", "task": 0, "key": "9f2c...", "context_length": 1024,
              "tokenizer": "/tmp/x", "renderer": {"name": "default"}, "sampling": {"temperature": 1.0, ...}}
    driver   {"ask": 12, "body": {"token_ids": [5, 6], ...}}           a request of verifiers' client
    trainer  {"answer": 12, "status": 200, "body": {"choices": [...], ...}}
    driver   {"id": 7, "ok": true, "reward": 1.0, "branches": [[[5, 6, 7], [0, 0, 1]]], ...}

One JSON value a line, from standard input to standard output; what anything else prints goes to standard error. Each
episode is a task of one event loop. The end of the input ends the driver. It imports verifiers and the standard library
alone.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TextIO

try:
    import httpx
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.clients import base
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow
    from verifiers.v1.runtimes import ProgramResult
except ModuleNotFoundError as error:
    sys.exit(f"{error}; {sys.executable} -m pip install verifiers==0.4.0 uv")

_GRACE_SECONDS, _POLICY = 4.0, "http://policy"
_MOST_CHARACTERS = 500  # of an error


class Chat(NullHarness):  # type: ignore[misc]
    """Verifiers' null harness. A segment without tools is one request, which needs no process of its own."""

    async def setup(self, runtime: Any) -> None:
        """Nothing: `launch` prepares a process if it needs one."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **more: Any
    ) -> ProgramResult:
        if mcp_urls:
            if ctx.client.renderer.name == "default" and ctx.client.renderer.tool_parser is None:
                raise ValueError("the taskset has tools: add tool_parser=, such as qwen3, or another renderer=")
            return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more)
        system, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        messages = [vf.SystemMessage(content=system), *messages] if system else messages
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=list(map(message_to_wire, messages)))
            except APIStatusError as error:
                if not is_context_overflow(error):
                    return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Pipe(httpx.AsyncBaseTransport):
    """Takes what is asked of the policy to the trainer, in place of a network."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self.say, self.context_length = say, 0
        self._numbers, self._waiting = itertools.count(), dict[int, asyncio.Future[dict[str, Any]]]()
        base.build_async_httpx = lambda config: httpx.AsyncClient(
            timeout=config.timeout.model_dump(), limits=base.DEFAULT_LIMITS, mounts={_POLICY: self}
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "policy", "max_model_len": self.context_length}]})
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self.say({"ask": number, "body": json.loads(await request.aread())})
        try:
            told = await answer
        finally:
            del self._waiting[number]
        return httpx.Response(told["status"], json=told["body"])

    def heard(self, told: dict[str, Any]) -> None:
        """The trainer has answered, unless the program that asked has ended."""
        if (answer := self._waiting.get(told["answer"])) and not answer.done():
            answer.set_result(told)


class Played:
    """A taskset with the environment that plays it; what its episodes share is started for the first of them."""

    def __init__(self, config: dict[str, Any], most: int, servers: AsyncExitStack, pipe: Pipe) -> None:
        plain = vf.resolve_env_config({"taskset": config["taskset"]})
        seats = [name for name, value in plain if hasattr(value, "harness") and hasattr(value, "runtime")]
        if len(seats) != 1:
            raise ValueError(f"its environment has the agents {', '.join(seats)}; exactly one can be trained")
        seat = {seats[0]: config["agent"]}
        self.env = vf.load_environment(vf.resolve_env_config({k: config[k] for k in ("taskset", "timeout")} | seat))
        self.tasks = list(self.env.taskset.take(most))
        self._servers, self._serving, self._lock, self._pipe = servers, False, asyncio.Lock(), pipe

    async def play(self, asked: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            if not self._serving:
                await self._servers.enter_async_context(self.env.serving())
                self._serving = True
        task = self.tasks[asked["task"]]
        if identity(task) != asked["key"]:
            raise ValueError(f"task {asked['task']} is another one than before; load() must give the same tasks")
        self._pipe.context_length = asked["context_length"]
        how = {"renderer": asked["renderer"], "renderer_model_name": asked["tokenizer"]}
        client = vf.TrainClientConfig(base_url=f"{_POLICY}/v1", **how)
        context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig(**asked["sampling"]))
        episode = await self.env.run_episode(task, context)
        if len(episode.traces) != 1:
            played = f"{len(episode.traces)} agents have played, not one"
            return {"ok": False, "errors": [*map(text_of, episode.errors), played]}
        (trace,) = episode.traces
        return {
            "ok": bool(episode.ok and trace.ok),
            "trainable": bool(trace.agent.trainable),
            "reward": float(trace.reward),
            "stop": trace.stop_condition,
            "errors": [text_of(error) for error in (*episode.errors, *trace.errors)],
            "branches": [
                [branch.token_ids, list(map(int, branch.sampled_mask))] for branch in trace.branches if branch.trainable
            ],
        }


def identity(task: Any) -> str:
    """A hash of what a task contains, whatever its place. Verifiers' own key has the place in it."""
    content = task.data.model_dump(mode="json", exclude={"idx"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def text_of(error: Any) -> str:
    """Its beginning and its end, where a program's traceback has the cause."""
    text = f"{error.type}: {error.message}"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:100]} [...] {text[-_MOST_CHARACTERS:]}"


def told_of(error: Exception) -> str:
    """What was raised, and the innermost line of the taskset's own code, neither a library's nor this file's."""
    others = ("site-packages", os.path.dirname(os.__file__), __file__, "<frozen")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not any(o in one.filename for o in others)]
    place = "".join(f" at {one.filename}:{one.lineno}" for one in frames[-1:])
    return f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS] + place


async def main(out: TextIO) -> None:
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[Any]()
    threading.Thread(target=read, args=(loop, lines), daemon=True).start()

    def say(what: dict[str, Any]) -> None:
        out.write(json.dumps(what) + "\n")

    async def answer(asked: dict[str, Any]) -> None:
        own = {"id": asked["id"]}  # stands first, see Driver
        try:
            say(own | await sets[asked["set"]].play(asked))
        except Exception as error:
            say(own | {"ok": False, "errors": [told_of(error)]})

    asked = await lines.get()
    if asked is None:
        return
    pipe = Pipe(say)
    async with AsyncExitStack() as servers, asyncio.TaskGroup() as group:
        try:
            sets = {name: Played(config, asked["most"], servers, pipe) for name, config in asked["sets"].items()}
        except Exception as error:
            return say({"error": told_of(error)})
        say({"tasks": {name: list(map(identity, played.tasks)) for name, played in sets.items()}})
        episodes = []
        while (asked := await lines.get()) is not None:
            if "answer" in asked:
                pipe.heard(asked)
                continue
            episodes.append(group.create_task(answer(asked)))
            episodes = [episode for episode in episodes if not episode.done()]
        for episode in episodes:  # which end the programs that they have started
            episode.cancel()


def read(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[Any]) -> None:
    """Hand on the lines of the input. At its end the process has a while to clean up, whatever its loop is doing."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(lines.put_nowait, None)
    time.sleep(_GRACE_SECONDS)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


__all__ = ["Chat"]

if __name__ == "__main__":
    sys.modules["covey_chat"] = sys.modules["__main__"]  # the harness's name
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    atexit.register(shutil.rmtree, sys.argv[1], True)  # the trainer may have been killed
    asyncio.run(main(told))

"""Inference servers: one in the engine's place, or several as members of a fleet."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from covey.config.whole import GRPOConfig
from covey.distributed.members import Held, Member, MemberError, in_thread
from covey.errors import ServingError
from covey.serving.client import InferenceClient, RefusedError
from covey.serving.dialects import find_dialect
from covey.serving.remote import RemoteEngine
from covey.types import Completion, Progress, Request, SamplingSettings

_GOODBYE_SECONDS = 5.0


def connect(
    config: GRPOConfig, url: str, vocabulary: int, number: int | None = None, *, again: bool = False
) -> RemoteEngine:
    """A server, for this run folder: a resumed run is the same trainer."""
    chosen, timeout = config.server, config.server.server_timeout
    if number is not None:
        timeout = min(timeout, config.distributed.timeout_seconds)
    client = InferenceClient(url, chosen.server_token, timeout=timeout, retry_seconds=chosen.server_retry_seconds)
    if again:
        client.health(retry=True)
    folder = Path(config.run.output_dir).resolve()
    trainer = f"{socket.gethostname()}:{folder}"[-200:]  # as much as a server takes for a name
    adapters = Path(chosen.adapter_folder or f"{folder}-adapters")
    own = adapters if number is None else adapters / f"server-{number + 1}"
    dialect = find_dialect(chosen.inference_server_kind)
    return RemoteEngine(client, trainer=trainer, dialect=dialect, folder=own, vocabulary=vocabulary)


def make_member(config: GRPOConfig, vocabulary: int, number: int, again: bool) -> Future[Member]:
    """One of several servers, see `covey.distributed.fleet.Maker`."""
    return in_thread(lambda: RemoteMember(connect(config, config.server.urls[number], vocabulary, number, again=again)))


class RemoteMember:
    """An inference server. It may batch as it likes, so numbers repeat as far as the server's do."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine, self.context_length = engine, engine.context_length
        self.name = engine.dialect.client.url

    def load(self, held: Held) -> Future[str]:
        """Upload; the dialect compares hashes itself where its server tells one."""

        def publish() -> str:
            try:
                self.engine.publish(held.weights)
            except ServingError as error:
                if isinstance(error, RefusedError):
                    raise
                raise MemberError(str(error)) from error
            return held.sha256

        return in_thread(publish)

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        def ask() -> list[Completion]:
            try:
                self.engine.dialect.per_request = len(requests)
                return self.engine(requests, settings, policy_version=version, progress=progress)
            except ServingError as error:
                raise MemberError(str(error)) from error

        return in_thread(ask)

    def watch(self) -> None:
        """A request tells nothing before its answer."""

    def stop(self, *, failed: bool) -> None:
        """Another trainer may have the server; one that failed is asked nothing more."""
        if not failed:
            wait([in_thread(self.engine.close)], timeout=_GOODBYE_SECONDS)

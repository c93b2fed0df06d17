"""Who samples for a fleet: here an engine in this process; servers are in `servers`, Ray's actors in `ray_members`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from covey.adapters import Adapter, fingerprint
from covey.rollout.learning import Sampler, Weights
from covey.types import Completion, Progress, Request, SamplingSettings

T = TypeVar("T")
START_SECONDS = 120.0
"""A start may take so long at the least: it loads a model and tells nothing meanwhile."""


class MemberError(Exception):
    """A member has died, does not answer, or answers nonsense: somebody else can do what it was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Weights on their way to members."""

    weights: Weights
    sha256: str


class Member(Protocol):
    """Samples one unit at a time. No method waits; a member that was given up is not asked again."""

    name: str
    context_length: int

    def load(self, held: Held) -> Future[str]:
        """Take weights; the result is `weights_hash` of what is in use then.

        The future raises MemberError if the member failed, and CoveyError for what no other member could do either.
        """

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        """Sample the requests in one call, alone; errors are those of `load`."""

    def watch(self) -> None:
        """Called now and then while it works: the moment to ask how far it is."""

    def stop(self, *, failed: bool) -> None:
        """End it, whatever it is doing; one that `failed` may be dead already."""


def done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin `work` in a thread that ends with the process, so that nothing hangs on what hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="covey-member", daemon=True).start()
    return future


def weights_hash(weights: Weights) -> str:
    """SHA-256 of names, shapes and values in float32: of the adapter of any kind, or else of all weights."""
    return weights.sha256 if weights.adapter is None else adapter_hash(weights.adapter)


def adapter_hash(adapter: Adapter) -> str:
    """The same of an adapter; unlike `Adapter.sha256` also of one that is more than plain LoRA."""
    return fingerprint((f"{name} {array.shape}", [array]) for name, array in sorted(adapter.tensors.items()))


def frozen(weights: Weights) -> Weights:
    """A copy of what is published, which the next update does not change: a member may be replaced after it."""
    adapter = weights.adapter
    if adapter is not None:
        copied = Adapter({name: np.array(array) for name, array in adapter.tensors.items()}, dict(adapter.config))
        return Weights(weights.version, weights.tensors, lambda: copied)
    held: Mapping[str, Any] = weights.tensors()
    tensors = {n: x.detach().cpu().clone() if hasattr(x, "detach") else np.array(x) for n, x in held.items()}
    return Weights(weights.version, lambda: tensors)


class LocalMember:
    """The engine of this process. It samples when it is asked, in the caller's thread."""

    name = "this process"
    stays = True

    def __init__(self, engine: Sampler) -> None:
        self.engine, self.context_length = engine, engine.context_length

    def load(self, held: Held) -> Future[str]:
        self.engine.publish(held.weights)
        return done(held.sha256)

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        return done(self.engine(requests, settings, policy_version=version, progress=progress))

    def watch(self) -> None:
        """There is nothing to ask."""

    def stop(self, *, failed: bool) -> None:
        """The engine stays ready: it needs no process of its own."""
        self.engine.close()

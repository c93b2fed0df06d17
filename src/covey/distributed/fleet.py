"""A sampler over several members: units of work for a pool of them, with the weights that they must hold.

    requests -> units -> journal, or else `covey.distributed.pool` -> completions in the order of the requests

The result does not depend on how many members there are, which one has which unit, or how often one has to be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from covey.distributed.conversations import FleetDevice
from covey.distributed.journal import Journal
from covey.distributed.members import Held, LocalMember, Member, frozen, weights_hash
from covey.distributed.pool import Maker, Place, Pool
from covey.distributed.units import Job, make_units, unit_key
from covey.errors import GenerationError
from covey.rollout.learning import NO_VERSION, Weights, version_in_words
from covey.rollout.turns import Session
from covey.types import Completion, Progress, Request, SamplingSettings


class Fleet(Pool):
    """Members that sample as one; a `covey.rollout.learning.Sampler`.

    Raises:
        CoveyError: a member cannot be started; none is left running.
    """

    runner = "fleet"
    noun: ClassVar[str] = "sampler"
    work: ClassVar[str] = "sampling"
    needs: ClassVar[str] = "weights"

    def __init__(
        self, makers: Sequence[Maker], *, unit_size: int, keeps: bool = False, salt: str = "", **options: Any
    ) -> None:
        self._unit_size, self.keeps, self._salt = unit_size, keeps, salt
        self._held: Held | None = None
        self._version = NO_VERSION
        self.journal: Journal | None = None
        super().__init__(makers, **options)
        members: list[Member] = [place.member for place in self._places]
        self.context_length = min(member.context_length for member in members)
        self._local = members[0].engine if isinstance(members[0], LocalMember) else None

    @property
    def policy_version(self) -> int:
        """Version of the weights published last; -1 after `release` where this process samples."""
        return self._version

    def publish(self, weights: Weights) -> None:
        """Give weights to all members, and return when those that live have them.

        Raises:
            GenerationError: a member applied other numbers than were sent, or none is left.
            CoveyError: what no member can take.
        """
        held = weights if self._local is not None else frozen(weights)
        needed = self.keeps or self._local is None
        self._held, self._version = Held(held, weights_hash(held) if needed else ""), NO_VERSION
        try:
            self._until(self._all_hold)
        except BaseException:
            self.close()
            raise
        self._version = weights.version

    def release(self) -> None:
        """Give back this process's memory for sampling until the next `publish`; other members keep theirs."""
        if self._local is not None:
            self._version, self._places[0].held, self._held = NO_VERSION, None, None
            self._local.release()

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`.

        Raises:
            GenerationError: other weights were published, three members failed at the same unit, or none is left.
            CoveyError: as the members raise it.
        """
        self._check(policy_version)
        units = make_units(requests, self._unit_size)
        jobs = [Job(unit.requests, settings, policy_version, self._key(unit.requests, settings)) for unit in units]
        for job in jobs:
            job.result = self._from_journal(job)
        known = (
            0
            if self.journal is None
            else sum(job.result is not None and self.journal.is_earlier(job.key, job.version) for job in jobs)
        )
        if known:
            self._news.append(f"{known} of {len(jobs)} units were sampled before the run was stopped: they are used")
        order = sorted(range(len(jobs)), key=lambda number: (-units[number].longest_prompt, number))
        waiting = [jobs[number] for number in order if jobs[number].result is None]

        def tell() -> None:
            if progress is not None:
                over = sum(job.finished if job.result is None else len(job.requests) for job in jobs)
                progress(over, len(requests))

        self.do(waiting, lambda: all(job.result is not None for job in waiting), tell)
        return [completion for job in jobs for completion in job.result or ()]

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> Session[Any]:
        """Conversations of several turns: in this process its engine's own, elsewhere a request for each turn with all
        that was said before, to the conversation's own member as long as that lives.

        Raises:
            GenerationError: other weights were published.
        """
        self._check(policy_version)
        if self._local is not None:
            how: dict[str, Any] = {"rows": rows, "own_tokens": own_tokens, "prompt_lengths": prompt_lengths}
            return self._local.session(settings, policy_version=policy_version, **how)
        device = FleetDevice(self, policy_version, self.context_length, own_tokens, len(self._places))
        return Session(device, settings, policy_version=policy_version)

    def members(self) -> list[dict[str, Any]]:
        """Of each sampler its `name`, the `version` of its weights (None = it has none now), how many `units` it has
        sampled and how often it `failed` since the run was begun or resumed, and `left`: nobody samples in its place.
        """
        return [
            {
                "name": place.title,
                "version": None if place.held is None else place.held.weights.version,
                "units": place.pieces,
                "failed": place.failed,
                "left": place.given_up,
            }
            for place in self._places
        ]

    # ------------------------------------------------------------------ what the pool asks

    def _prepare(self, place: Place) -> Future[Any] | None:
        if self._held is None or place.held is self._held:
            return None
        place.taking = self._held
        loading: Future[str] = place.member.load(self._held)
        return loading

    def _may_work(self, place: Place) -> bool:
        return place.held is not None

    def _prepared(self, place: Place, found: str) -> None:
        if found != place.taking.sha256:
            raise GenerationError(
                f"{place.title} applied weights with the hash {found[:12]}..., {place.taking.sha256[:12]}... was "
                "sent; it does not hold the trainer's model: give all machines the same files and versions"
            )
        place.held = place.taking

    def _ask(self, member: Member, piece: Job, progress: Progress) -> Future[list[Completion]]:
        return member.begin(piece.requests, piece.settings, piece.version, progress)

    def _fault(self, piece: Job, found: list[Completion]) -> str:
        if len(found) == len(piece.requests) and all(one.policy_version == piece.version for one in found):
            return ""
        versions = sorted({one.policy_version for one in found})
        return f"{len(found)} completions of the versions {versions}, not {len(piece.requests)} of {piece.version}"

    def _over(self, piece: Job) -> None:
        if self.journal is not None and piece.key and piece.result is not None:
            self.journal.put(piece.key, piece.version, piece.result)

    def _named(self, piece: Job) -> str:
        streams = sorted({tuple(request.stream[:-1]) for request in piece.requests})
        return f"while they sampled the same unit, of the prompts with the random streams {streams}"

    # ------------------------------------------------------------------ small things

    def _check(self, policy_version: int) -> None:
        if policy_version != self._version:
            held = version_in_words(self._version)
            raise GenerationError(f"policy_version={policy_version}: the samplers hold {held}")

    def _all_hold(self) -> bool:
        """Every member that lives has the weights, and one lives; those that are being replaced take them later."""
        there = [place for place in self._places if place.member is not None]
        return bool(there) and all(place.held is self._held for place in there)

    def _key(self, requests: Sequence[Request], settings: SamplingSettings) -> str:
        if self.journal is None or self._held is None:
            return ""
        return unit_key(requests, settings, f"{self._held.sha256} {self._version} {self._salt}")

    def _from_journal(self, job: Job) -> list[Completion] | None:
        if self.journal is None or not job.key:
            return None
        return self.journal.get(job.key, job.version, len(job.requests))

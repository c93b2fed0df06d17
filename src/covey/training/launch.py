"""Start this process's part of a run on several ranks: rank 0 trains, the others follow."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import util
from pathlib import Path
from typing import Any

import torch

from covey import signals
from covey.backend import adamw_options
from covey.config.whole import GRPOConfig
from covey.distributed.in_turns import LeadingSampler, RankSampler
from covey.distributed.ranks import NoMemoryError, RankLostError, Ranks, TornError, check_ranks
from covey.distributed.replicated import LeadingLearner, SharedPacks, follow
from covey.distributed.sharded import LeadingPolicy
from covey.distributed.sharded_learner import (
    LeadingShardedLearner,
    MemoryNote,
    ShardedLearner,
    ShardedPacks,
    ShardedRankSampler,
    check_sharded,
    parts,
    training_bytes,
)
from covey.distributed.sliced import SlicedPolicy, read_in_slices
from covey.distributed.start import needing_ray
from covey.errors import ClusterLostError, ConfigError, CoveyError, ModelError, several
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import PyTorchBackend
from covey.pytorch.engine import Engine
from covey.pytorch.learner import Learner
from covey.pytorch.models.slices import NotSlicedError
from covey.pytorch.policy import Policy
from covey.training import setup
from covey.training.trainer import GRPOTrainer
from covey.types import Prompt

log = logging.getLogger(__name__)

_REFUSED = "COVEY_REFUSED"
"""Environment variable: the file in which a rank says why it was refused."""
_TELL_SECONDS = 2.0
_TORCHRUN = """
import ctypes, runpy, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with the process that has started it
except AttributeError:
    pass
sys.argv[0] = "torchrun"
try:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except (ChildFailedError, SignalException):  # which rank failed is said above, and why by the rank
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the ranks have ended, and so does the parent
        sys.exit(1)
except KeyboardInterrupt:
    sys.exit(130)
"""


class RanksBackend:
    """See `covey.backend.Backend`: PyTorch on several ranks, which sample and train in turns; rank 0 has the run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own = PyTorchBackend(SharedPacks(ranks))

    def check(self, config: GRPOConfig) -> None:
        """Refuse what several ranks cannot train."""
        others = config.server.upload_adapters_to_server or config.distributed.samplers
        if config.schedule.max_staleness > 0 and not others:
            raise ConfigError(
                f"schedule.max_staleness={config.schedule.max_staleness}: learners sample and train in turns, nothing "
                "is sampled ahead; set it to 0, or let servers or actors sample"
            )
        if config.distributed.learner_kind == "sharded":
            check_sharded(config)
        self._own.check(config)

    def make_policy(
        self, config: GRPOConfig, model: Any = None, tokenizer: Any = None, peft_config: Any = None
    ) -> Policy | LeadingPolicy:
        """The policy. Where it is to be sharded, each rank reads its part; of a model that must be read whole,
        `make_learner` shards it, after samplers were built from it.
        """
        obstacle = "it was given as an object"
        if model is None and peft_config is None:
            try:
                sliced = read_in_slices(config, self._ranks, self._own)
                if sliced is not None:
                    gc.collect()  # the first layers, which FSDP2 and their modules hold in a circle
                    return LeadingPolicy(sliced, self._ranks)
                obstacle = ""
            except NotSlicedError as error:
                obstacle = str(error)
        policy = self._own.make_policy(config, model, tokenizer, peft_config)
        if not obstacle:
            return policy
        needed = training_bytes(policy.model, keeps_copy=not policy.reference.is_base_model)
        over = parts(config, needed, policy.device, self._ranks)
        if over == 1:
            return policy
        check_sharded(config)
        if self._ranks.rank == 0:
            log.warning("%s: each learner reads the whole model before it is sharded: %s", policy.source, obstacle)
        return LeadingPolicy(policy, self._ranks, over)

    def make_sampler(self, config: GRPOConfig, policy: Any) -> LeadingSampler:
        """All ranks' engines."""
        size = config.distributed.groups_per_unit * config.sampling.num_generations
        return LeadingSampler(self.make_own(config, policy), self._ranks, size)

    def make_own(self, config: GRPOConfig, policy: Any) -> RankSampler:
        """The engine of this rank."""
        own = policy.own if isinstance(policy, LeadingPolicy) else policy
        how = {"runner": own.runner, "device": own.device} if isinstance(own, SlicedPolicy) else {}
        engine = self._own.make_sampler(config, policy, **how)
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"sampling.engine={config.sampling.engine!r}: ranks that train together sample with Covey's engine; "
                "set it to covey, or let vLLM sample behind a URL (server.inference_server_url)"
            )
        return (ShardedRankSampler if own is not policy else RankSampler)(engine, policy, self._ranks)

    def make_learner(self, config: GRPOConfig, policy: Any) -> LeadingLearner:
        """The learner that all ranks' learners go with."""
        own = self._own_learner(config, policy)
        if isinstance(own, ShardedLearner):
            return LeadingShardedLearner(own, self._ranks, MemoryNote(config.run.output_dir))
        return LeadingLearner(own, self._ranks)

    def _own_learner(self, config: GRPOConfig, policy: Any) -> Learner:
        if not isinstance(policy, LeadingPolicy):
            return self._own.make_learner(config, policy)
        own, note = policy.shard(), MemoryNote(config.run.output_dir)
        return ShardedLearner(own, note=note, share=ShardedPacks(self._ranks), **adamw_options(config))

    def expect(self, config: GRPOConfig, sampler: Any, learner: Any, prompts: Sequence[Prompt]) -> None:
        """Nothing is compiled for shapes."""

    def follow(self, config: GRPOConfig) -> None:
        """Another rank than 0: build the same parts, and do what rank 0 does until the run ends."""
        self.check(config)
        policy = self.make_policy(config)
        samples = not config.server.upload_adapters_to_server and not config.distributed.samplers
        sampler = self.make_own(config, policy) if samples else None
        learner = self._own_learner(config, policy)
        self._ranks.await_ready()
        signals.note()  # rank 0, which has them too, may need this one for a checkpoint, and lets it go
        follow(self._ranks, learner, sampler, learner.policy)


def run(config: GRPOConfig, *, resume: bool = False) -> GRPOTrainer | None:
    """Train in this process, or as one of those that torchrun or Ray has started."""
    ranks = Ranks.of_torchrun(config.distributed.timeout_seconds)
    if ranks is None:
        return _train(config, resume)
    if config.distributed.learners not in (1, ranks.world):
        raise ConfigError(
            f"distributed.learners={config.distributed.learners}: torchrun has started {ranks.world}; leave it out"
        )
    try:
        if config.model.device in ("auto", "cuda") and torch.cuda.is_available():  # of several devices each has one
            local = int(os.environ.get("LOCAL_RANK", 0))
            config = config.replace(device=f"cuda:{local % torch.cuda.device_count()}")
        for sentence in check_ranks(ranks, config):
            log.warning("%s", sentence)
        backend = RanksBackend(ranks)
        if ranks.rank > 0:
            backend.follow(config)
            return None
        return _train(config, resume or _goes_on(config), backend)
    except CoveyError as error:
        ranks.leave()
        mended = isinstance(error, RankLostError | TornError) and not isinstance(error, NoMemoryError)
        if mended and signals.noted():  # the run was ended, and rank 0 says so
            raise SystemExit(128 + signals.noted()) from error
        if mended and _is_refused():  # the others have ended because of it
            raise SystemExit(1) from error
        if _REFUSED not in os.environ or mended:  # by another start
            raise
        Path(os.environ[_REFUSED]).write_text(str(error), "utf-8")  # who has started the ranks shows it, once
        raise SystemExit(error.exit_status) from error
    except KeyboardInterrupt as error:
        ranks.leave()
        if _REFUSED not in os.environ:
            raise
        raise SystemExit(signals.ended(error).exit_status) from error
    finally:
        ranks.close()


def _is_refused() -> bool:
    """Whether another rank of this machine says, now or in a moment, that the run is refused."""
    file, until = os.environ.get(_REFUSED), time.monotonic() + _TELL_SECONDS
    while file is not None and not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.1)
    return file is not None and Path(file).exists()


def start_ranks(config: GRPOConfig, arguments: Sequence[str], say: Callable[[str], None] = log.info) -> bool:
    """Where the settings ask for several learners and nobody has started them: start them, and wait.

    On a Ray cluster, if `distributed.ray_address` names one or this machine is part of one, else with torchrun on this
    machine. When one dies, all are started again, `max_restarts` times at most, and go on with the run that is in the
    folder.

    Raises:
        CoveyError: as a rank raised it.
        ConfigError: there is no room for them.
        ClusterLostError: the cluster is gone.
        ModelError: ranks have died too often.
    """
    chosen = config.distributed
    if chosen.learners == 1 or ("WORLD_SIZE" in os.environ and "RANK" in os.environ):
        return False
    RanksBackend(Ranks()).check(config)
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // chosen.learners, 1))}
    with tempfile.TemporaryDirectory(prefix="covey-ranks-") as folder, _launcher(config, arguments, say) as start:
        refused = Path(folder) / "refused"
        environment = threads | os.environ | {_REFUSED: str(refused)}
        for attempt, why in enumerate(MemoryNote(config.run.output_dir).starts(chosen.max_restarts)):
            if why:
                log.warning("%s", why)
            status = start(attempt, environment)
            if status == 0:
                return True
            if refused.exists():
                lost = status == ClusterLostError.exit_status
                raise (ClusterLostError if lost else CoveyError)(refused.read_text("utf-8"))
    raise ModelError(
        f"distributed.learners={chosen.learners}: ranks have died {several(chosen.max_restarts + 1, 'time')}; see what "
        f"they printed, and continue with covey resume {shlex.quote(config.run.output_dir)}"
    )


@contextmanager
def _launcher(
    config: GRPOConfig, arguments: Sequence[str], say: Callable[[str], None]
) -> Iterator[Callable[[int, Mapping[str, str]], int]]:
    """What starts all ranks, given attempt and environment; returns rank 0's status, or not 0 if any rank died."""
    cluster = _cluster(config, arguments, say)
    if cluster is not None:
        with closing(cluster):
            yield cluster.start
        return
    command = ["--standalone", "--nproc-per-node", str(config.distributed.learners), "-m", "covey", *arguments]

    def torchrun(attempt: int, environment: Mapping[str, str]) -> int:
        # In a session of its own: the terminal's Ctrl-C comes here, and the ranks are told once.
        words = [sys.executable, "-c", _TORCHRUN, *command]
        with subprocess.Popen(words, env=environment, start_new_session=True) as launcher:
            try:
                return launcher.wait()
            except KeyboardInterrupt as end:
                launcher.send_signal(signals.ended(end).number)
                launcher.wait()  # it waits 30 s for the ranks at the most
                raise

    say(f"layout: {config.distributed.learners} learners on this machine, started by torchrun")
    yield torchrun


def _cluster(config: GRPOConfig, arguments: Sequence[str], say: Callable[[str], None]) -> Any:
    """The Ray cluster that starts the ranks, None where there is none."""
    address = config.distributed.ray_address
    if address == "local" or (address == "auto" and util.find_spec("ray") is None):
        return None
    with needing_ray(f"distributed.ray_address={address!r:.200}", "auto"):
        from covey.distributed.ray_cluster import join
        from covey.distributed.ray_launch import RayRanks
    return RayRanks(config, arguments, run, say) if join(address) else None


def _train(config: GRPOConfig, resume: bool, backend: RanksBackend | None = None) -> GRPOTrainer:
    if not resume:
        RunFolder.check_new(config.run.output_dir, overwrite=config.run.overwrite)
    elif said := MemoryNote(config.run.output_dir).tell():
        log.warning("%s", said)
    trainer = GRPOTrainer(args=config, backend=backend)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def _goes_on(config: GRPOConfig) -> bool:
    """True when the run folder holds this run, with these settings."""
    folder = Path(config.run.output_dir)
    if not RunFolder.is_run(folder):
        return False
    saved = RunFolder.read(folder).config_path
    wanted = setup.with_defaults(config, setup.load_world(config) or setup.load_task(config))
    return saved.exists() and GRPOConfig.from_toml(saved) == wanted

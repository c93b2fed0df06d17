"""Samplers and rewards in Ray actors: a run learns what one process learns."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'covey[ray]'")

import ray
from runs import COUNTED, RAY, await_checkpoint, data, ended_well, events, learned
from runs import covey as command
from tiny_models import tiny_model, tiny_tokenizer

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.distributed import fleet as fleet_module
from covey.distributed import ray_cluster
from covey.distributed.ray_members import RayMember
from covey.errors import ConfigError, GenerationError, RewardError

pytestmark = RAY
Make = Callable[..., GRPOTrainer]


@pytest.fixture
def on_ray(by_units: dict[str, Any], cluster: Any) -> Make:
    """Makes trainers whose run folders are beside each other."""

    def make(name: str, samplers: int | None = None, given: Any = None, **changes: Any) -> GRPOTrainer:
        where = {"output_dir": f"{by_units['output_dir']}-{name}", "ray_address": cluster.address}
        args = GRPOConfig(**(by_units | where | {"samplers": samplers} | changes))
        return GRPOTrainer(args=args, **(data() if given is None else given))

    return make


def trained(trainer: GRPOTrainer, *, without: tuple[str, ...] = (), weights: str = "") -> tuple[list[str], bytes]:
    trainer.train()
    assert not ray.is_initialized()  # nothing outlives the run
    return learned(trainer.args.run.output_dir, without=without, weights=weights)


def test_one_two_and_three_samplers_are_one_process(on_ray: Make) -> None:
    alone = trained(on_ray("alone", 0))
    for samplers in (1, 2, 3):
        assert trained(on_ray(f"with-{samplers}", samplers)) == alone


@pytest.mark.parametrize("changes", [{"use_peft": False}, {"max_staleness": 1}], ids=str)
def test_all_weights_and_samples_ahead(on_ray: Make, changes: dict[str, Any]) -> None:
    weights = "model.safetensors" if "use_peft" in changes else ""
    found = [trained(on_ray(f"with-{n}", n, max_steps=3, **changes), weights=weights) for n in (0, 2)]
    assert found[0] == found[1]


def test_kills_and_a_hang_change_nothing(on_ray: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill -9` of an actor in a unit and in a sync, and one that stops without a word."""
    alone = trained(on_ray("alone", 0), without=COUNTED)
    begin, load = RayMember.begin, RayMember.load
    units, syncs = itertools.count(1), itertools.count(1)

    def kill_soon(member: RayMember) -> None:
        os.kill(member.pid, signal.SIGSTOP)  # it cannot answer before it dies
        threading.Timer(0.3, os.kill, (member.pid, signal.SIGKILL)).start()

    def begin_(member: RayMember, *arguments: Any) -> Any:
        number = next(units)
        if number == 3:
            kill_soon(member)
        if number == 12:
            os.kill(member.pid, signal.SIGSTOP)  # and stays so
        return begin(member, *arguments)

    def load_(member: RayMember, *arguments: Any) -> Any:
        if next(syncs) == 5:
            kill_soon(member)
        return load(member, *arguments)

    monkeypatch.setattr(RayMember, "begin", begin_)
    monkeypatch.setattr(RayMember, "load", load_)
    trainer = on_ray("killed", 2, timeout_seconds=6.0)
    assert trained(trainer, without=COUNTED) == alone
    told = events(trainer.args.run.output_dir, "sampler")
    assert sum("failed while sampling" in sentence for sentence in told) >= 2
    assert any("failed while taking weights" in sentence for sentence in told)
    assert any("silent for 6 s" in sentence for sentence in told)
    steps = [record for record in trainer.state.log_history if "loss" in record]
    assert sum(record["samplers/restarts"] for record in steps) == len(told)
    assert sum(record["samplers/reissued_units"] for record in steps) >= 2


def test_a_node_that_is_lost(on_ray: Make, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained(on_ray("alone", 0), without=COUNTED)
    begin, calls, lost = RayMember.begin, itertools.count(1), list[Any]()
    worker = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)

    def begin_(member: RayMember, *arguments: Any) -> Any:
        if next(calls) == 4:
            lost.append(worker)
            cluster.remove_node(worker, allow_graceful=False)
        return begin(member, *arguments)

    monkeypatch.setattr(RayMember, "begin", begin_)
    try:
        trainer = on_ray("lost", 3)
        assert (trained(trainer, without=COUNTED), len(events(trainer.args.run.output_dir, "sampler"))) == (alone, 1)
    finally:
        for _ in lost:
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


def test_a_driver_that_is_killed_leaves_nothing_and_resumes_anywhere(recipe_folder: Path, tmp_path: Path) -> None:
    """A Ray of its own on this machine; resumed without Ray."""
    settings = ("distributed.groups_per_unit=1", "schedule.max_steps=60", "evaluation.eval_steps=0")
    where = f"run.output_dir={tmp_path / 'whole'}"
    ended_well(command("train", recipe_folder, where, "distributed.samplers=0", *settings))
    folder = tmp_path / "run"
    where = (f"run.output_dir={folder}", "distributed.samplers=2", "distributed.ray_address=local")
    words = [sys.executable, "-m", "covey", "train", str(recipe_folder), *where, *settings]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    family: set[int] = set()
    try:
        await_checkpoint(process, folder, 2)
        # Ray's two agents notice the end at once and wait a minute for an answer from what is not there any more
        family = {pid for pid in descendants(process.pid) if not name_of(pid).endswith("Agent")}
        assert sum("EngineHost" in name_of(pid) for pid in family) == 2
        assert len(family) >= 4  # with Ray's own
    finally:
        process.kill()
        process.wait(timeout=30)
    assert_ended(family, seconds=15)
    ended_well(command("resume", folder, "distributed.samplers=0", *settings))
    assert learned(folder, without=COUNTED) == learned(tmp_path / "whole", without=COUNTED)


def descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(rest[1]), []).append(int(path.parent.name))
    found, open_ = set(), [pid]
    while open_:
        children = parents.get(open_.pop(), [])
        found.update(children)
        open_ += children
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(family: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in family if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_workers_score_as_this_process(on_ray: Make) -> None:
    """Functions of a file, and those that only this program knows: a closure that nothing can import."""
    bonus = 0.25

    def here(completions: list[Any], trainer_state: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("seen", float(len(completions) > 0))
        return [bonus * trainer_state.global_step + len(str(c)) % 3 for c in completions]

    mine = data() | {"reward_funcs": [here, data()["reward_funcs"]]}
    there = on_ray("there", given=mine, reward_workers=2)
    assert trained(there) == trained(on_ray("alone", given=mine))
    steps = [record for record in there.state.log_history if "loss" in record]
    assert all(record["seen"] == 1.0 for record in steps)


def test_reward_workers_and_rewards_by_name(on_ray: Make, recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the user's file themselves."""
    monkeypatch.chdir(recipe_folder)
    named = {"functions": ("rewards.py:few_vowels",), "dataset": str(recipe_folder / "train.jsonl"), "max_steps": 2}
    there = on_ray("there", 1, {}, reward_workers=2, **named)
    assert trained(there, without=("samplers/",)) == trained(on_ray("alone", 0, {}, **named), without=("samplers/",))


def test_a_kill_and_a_hang_of_workers_change_nothing(on_ray: Make, tmp_path: Path) -> None:
    def score(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        for step, number in ((1, signal.SIGKILL), (3, signal.SIGSTOP)):
            path = tmp_path / f"{step}"
            if trainer_state.global_step == step and not path.exists():
                path.touch()
                os.kill(os.getpid(), number)
        return [len(str(c)) % 3 + trainer_state.global_step for c in completions]

    over, mine = [tmp_path / "1", tmp_path / "3"], data() | {"reward_funcs": score}
    for path in over:
        path.touch()
    alone = trained(on_ray("alone", given=mine))
    for path in over:
        path.unlink()
    assert trained(on_ray("there", given=mine, reward_workers=2, timeout_seconds=8.0, reward_timeout=2.0)) == alone
    assert all(path.exists() for path in over)


def test_rows_that_three_workers_end_at(on_ray: Make) -> None:
    def deadly(completions: list[Any], **columns: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return [0.0 for _ in completions]

    with pytest.raises(RewardError, match=r"3 reward workers failed one after another while they scored .*of the rows"):
        on_ray("deadly", given=data() | {"reward_funcs": deadly}, reward_workers=2).train()
    assert not ray.is_initialized()


def refused(make: Callable[[], Any], message: str, kind: type[Exception] = ConfigError) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=message):
        make()
    assert time.monotonic() - began < 60  # 30 on a quiet machine, the model's own start included
    assert not ray.is_initialized()


def test_bad_clusters_are_one_error(on_ray: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: on_ray("gpu", 1, gpus_per_sampler=0.5), "has room for 0")
    refused(lambda: on_ray("none", 1, ray_address="127.0.0.1:9"), "ray_address='127.0.0.1:9': no cluster answers there")
    refused(lambda: on_ray("client", 1, ray_address="ray://somewhere:10001"), "ray job submit")
    own = ray_cluster.installed()
    monkeypatch.setattr(ray_cluster, "installed", lambda: own | {"peft": "0.1"})
    refused(lambda: on_ray("mixed", 1), r"Ray node \w+ has peft [\d.]+, this process has 0.1")
    monkeypatch.setattr(ray_cluster, "installed", lambda: own | {"nothing": "1"})
    refused(lambda: on_ray("missing", 1), r"Ray node \w+ lacks nothing, this process has 1")


def test_workers_that_cannot_be(on_ray: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locked(completions: list[Any]) -> list[float]:
        with lock:
            return [0.0 for _ in completions]

    refused(
        lambda: on_ray("locked", given=data() | {"reward_funcs": locked}, reward_workers=1),
        r"the reward function .*locked.* cannot be sent to another process .*name it in rewards.functions",
    )
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 1.0)
    refused(lambda: on_ray("many", reward_workers=5), r"distributed.reward_workers=5: needs 5 CPU, 3 are free")


def test_what_nodes_are_is_looked_at(on_ray: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here, own, made = ray_cluster.facts_here, ray_cluster.installed(), ray_cluster._make_probe
    monkeypatch.setattr(ray_cluster, "facts_here", lambda *asked: here(*asked) | {"model": "0" * 64})
    refused(lambda: on_ray("files", 1), r"on Ray node \w+ it is another one than here")
    monkeypatch.setattr(ray_cluster, "facts_here", lambda *asked: here(*asked) | {"model_bytes": 10**15})
    refused(lambda: on_ray("memory", 1), r"samplers=1: each takes 1000000\.\d GB .*room for 0")
    monkeypatch.setattr(ray_cluster, "facts_here", here)

    def without_covey() -> Any:
        def probe(names: list[str], model: str) -> tuple[dict[str, str], str]:
            return own, "ImportError: no"

        return probe

    monkeypatch.setattr(ray_cluster, "_make_probe", without_covey)
    refused(lambda: on_ray("package", 1), r"Ray node \w+ cannot import Covey \(ImportError: no\)")
    monkeypatch.setattr(ray_cluster, "_make_probe", made)
    monkeypatch.setattr(ray_cluster, "installed", lambda: own | {"torch": "2.0"})
    refused(lambda: on_ray("mixture", 1), r"has torch 2\.1\d[\d.+cpu]*, this process has 2\.0.*run\.allow_mixture")


def test_the_doctor_looks_at_a_cluster(recipe_folder: Path, cluster: Any, covey: Command) -> None:
    arguments = ("doctor", "--cluster", recipe_folder, f"distributed.ray_address={cluster.address}")
    samplers, learners = "distributed.samplers=2", "distributed.learners=2"
    for settings, expected, words in [
        ([samplers], 0, f"Ray cluster {cluster.address}: 3 nodes, room for {samplers}"),
        (["distributed.samplers=4"], 2, "has room for 3"),
        ([learners], 0, f"3 nodes, room for {learners}, each 1 CPU and 0 GPU;"),
        ([learners, samplers], 2, f"{learners} and samplers=2: 4 CPUs and 0 GPUs are needed"),
    ]:
        status, shown, told = covey(*arguments, *settings)
        assert status == expected
        assert words in (told if status else shown)
        assert status or shown.count("1 CPUs, 0 GPUs") == 3
    assert covey(*arguments)[0] == 2  # nothing is placed
    assert not ray.is_initialized()


_WITH_TOKEN = """
import os, sys
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="right" * 8)
from ray.cluster_utils import Cluster
head = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
made = Cluster(initialize_head=True, head_node_args=head)
print(made.address, flush=True)
sys.stdin.read()
made.shutdown()
"""


def test_a_cluster_that_asks_for_another_token(recipe_folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    pipe, code = subprocess.PIPE, [sys.executable, "-c", _WITH_TOKEN]
    head = subprocess.Popen(code, env=environment, stdin=pipe, stdout=pipe, text=True)
    assert head.stdin is not None
    assert head.stdout is not None
    try:
        address = next(line.strip() for line in head.stdout if line[:1].isdigit())
        command = [sys.executable, "-m", "covey", "doctor", "--cluster", str(recipe_folder), "distributed.samplers=1"]
        found = subprocess.run(
            [*command, f"distributed.ray_address={address}"],
            env=environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8, "COLUMNS": "500"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert found.returncode == 2
        told = " ".join(found.stderr.split())
        assert all(words in told for words in ("Ray does not connect", "is that RAY_AUTH_TOKEN the cluster's?"))
        assert "Traceback" not in told
    finally:
        head.stdin.close()
        head.wait(timeout=120)
        head.stdout.close()


def test_other_weights_there(on_ray: Make, by_units: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was changed in memory is not the one that actors load; and what is applied is compared."""
    args = on_ray("named", 0).args.replace(samplers=1)
    changed = tiny_model("llama", seed=5)
    changed.name_or_path = changed.config._name_or_path = by_units["model"]
    there: dict[str, Any] = {"args": args, "processing_class": tiny_tokenizer(), **data()}
    refused(lambda: GRPOTrainer(changed, **there), "it has other weights than in this process")
    monkeypatch.setattr(fleet_module, "weights_hash", lambda weights: "0" * 64)
    refused(lambda: on_ray("other", 1), "sampler 1 .* applied weights with the hash", GenerationError)

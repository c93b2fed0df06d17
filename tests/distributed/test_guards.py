"""Which machines may work together, what is refused before anything is asked of a cluster, and a head that is lost."""

import json
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from covey import GRPOConfig
from covey.distributed import guards
from covey.distributed.guards import Facts, Head, Node
from covey.distributed.ranks import Ranks, await_all, check_ranks, whereabouts
from covey.errors import ClusterLostError, ConfigError, ModelError
from fakes import raises

H100 = Facts(gpus=("H100",) * 8, driver="560", model="a")


def test_a_model_is_known_by_its_config_index_and_weights(model_folder: Path, tmp_path: Path) -> None:
    digest, size = guards.model_hash(str(model_folder))
    assert size == sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))
    copy = Path(shutil.copytree(model_folder, tmp_path / "elsewhere"))
    (copy / "README.md").write_text("Not of the model.")
    assert guards.model_hash(str(copy)) == (digest, size)
    config, weights = (copy / "config.json").read_bytes(), (copy / "model.safetensors").read_bytes()
    for name, before, changed, total in [
        ("config.json", config, json.dumps(json.loads(config) | {"rope_theta": 7.0}).encode(), size),
        ("model.safetensors", weights, weights[:-1] + bytes([weights[-1] ^ 1]), size),
        ("model.safetensors", weights, weights[:-4], size - 4),
    ]:
        (copy / name).write_bytes(changed)
        other, found = guards.model_hash(str(copy))
        assert (other != digest, found) == (True, total)
        (copy / name).write_bytes(before)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "none"), "pkg:no_such_package", str(tmp_path / "x.gguf"), str(tmp_path / "empty")):
        raises(ModelError, r"there is no such|no package|holds neither config", guards.model_hash, name)
        assert guards.facts_here(name)["model_problem"].startswith("ModelError")
    assert guards.model_hash("somebody/that-nobody-has") == ("", 0)  # the hub is not asked


def test_mixtures_are_refused_unless_the_run_allows_them() -> None:
    assert guards.mixtures(H100, {"b": H100}, gpus=True) == []
    assert guards.mixtures(Facts(), {"b": H100, "c": H100}, gpus=True) == []  # this machine only trains, or only leads
    assert guards.mixtures(H100, {"b": Facts()}, gpus=False) == []
    found = guards.mixtures(H100, {"b": replace(H100, gpus=("A100",), driver="550", threads=2)}, gpus=True)
    more = ("A100, this machine has H100", "the GPU driver 550, this machine has 560", "2 threads, this machine has 0")
    assert found == [f"b has {each}" for each in more]
    with pytest.raises(ConfigError, match=r"b has A100, this machine has H100; .*run\.allow_mixture=true"):
        guards.check_mixture(found, allowed=False)
    assert (len(guards.check_mixture(found, allowed=True)), guards.check_mixture([], allowed=False)) == (3, [])


def test_gpus_are_those_that_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 560.35'\necho 'NVIDIA H100 80GB HBM3, 560.35'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    there = {"gpus": ("NVIDIA H100 80GB HBM3",) * 2, "driver": "560.35"}
    assert guards.facts_here("somebody/model") == there | {"model": "", "model_bytes": 0}
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(guards, "_SMI_SECONDS", 0.3)
    began = time.monotonic()
    assert guards.facts_here("somebody/model")["gpus"] == ()
    assert time.monotonic() - began < 30


def test_ranks_that_do_not_come_are_named() -> None:
    began, failed = time.monotonic(), together([0, 2], 4, 1.0)
    words = r"rank 1, 3 of 4 did not come; rank 0 on .*, rank 2 on .* did"
    assert [type(error) for error in failed] == [RuntimeError] * 2
    assert re.search(words, str(failed[0]))
    assert time.monotonic() - began < 30
    assert together([0, 1, 2], 3, 60.0) == []


def together(ranks: list[int], world: int, seconds: float) -> list[BaseException]:
    """What those ranks raise that come."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(ranks)) as pool:
        coming = [pool.submit(await_all, store, rank, world, seconds) for rank in ranks]
        return [error for each in coming if (error := each.exception(60)) is not None]


def test_where_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert whereabouts().endswith("(127.0.0.1)")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert whereabouts()


class Two(Ranks):
    def __init__(self, versions: dict[str, str], facts: dict[str, Any], *, lost: int = 0) -> None:
        super().__init__()
        self.world, self._other, self._lost = 2, (versions, facts), lost

    def gather(self, own: Any) -> list[Any]:
        versions, facts, where = own
        return [own, (versions | self._other[0], facts | self._other[1], f"other-{where}")]

    def add(self, total: torch.Tensor) -> None:
        total += 2 - self._lost


def test_ranks_that_differ_are_refused(settings: Any) -> None:
    for versions, facts, message in (
        ({"covey": "0.0.1"}, {}, r"rank 1 on other-.* has covey 0\.0\.1, rank 0 has .*: install the same versions"),
        ({"transformers": ""}, {}, "lacks transformers, rank 0 has"),
        ({"torch": "2.12.0"}, {}, r"has torch 2\.12\.0, rank 0 has 2.*run\.allow_mixture=true"),
        ({}, {"threads": 7}, "rank 1 on other-.* has 7 threads, rank 0 has 1.*allow_mixture"),
        ({}, {"model": "0" * 64}, "on rank 1 on .* it is another one than here"),
    ):
        config = GRPOConfig(**settings)
        raises(ConfigError, message, check_ranks, Two(versions, facts), config)
        if "allow_mixture" in message:
            assert len(check_ranks(Two(versions, facts), config.replace(allow_mixture=True))) == 1


def test_ranks_that_are_alike_add_up(settings: dict[str, Any]) -> None:
    assert check_ranks(Two({}, {}), GRPOConfig(**settings)) == []
    raises(ModelError, "sum of 1 MB is wrong on", check_ranks, Two({}, {}, lost=1), GRPOConfig(**settings))
    found = guards.installed(["torch", "no-such-package"])
    assert (found["no-such-package"], found["torch"][:2], found["python"][:2]) == ("", "2.", "3.")


def node(name: str, cpus: float, gpus: float, memory: float = float("inf")) -> Node:
    return Node(name, cpus, gpus, 1e9, memory)


NODES = [node("a", 8, 2), node("b", 1, 8), node("c", 3.5, 0)]  # in all 12.5 CPUs and 10 GPUs, 3 of both on a node
SMALL = [node("a", 8, 0, 10e9), node("b", 1, 0, 100e9)]
OWN = {"python": "3.11.9", "torch": "2.13.0"}


def test_what_will_do() -> None:
    for samplers, cpus, gpus in ((3, 1, 1), (12, 1, 0), (4, 1, 0.25 * 2)):
        guards.check_room(NODES, "samplers", samplers, cpus, gpus)
    guards.check_memory(SMALL, 4, 1, int(3e9))  # three on a, one on b, which has one CPU
    guards.check_memory(SMALL, 9, 1, 0)
    guards.check_store(NODES, 250_000_000)
    guards.check_models("m", H100, {"node b": H100, "node c": replace(H100, model="")})
    assert guards.check_versions("node a", OWN, OWN, "this process") == []
    found = guards.check_versions("node b", OWN | {"torch": "2.12.1"}, OWN, "this process")
    assert found == ["node b has torch 2.12.1, this process has 2.13.0"]


def test_what_does_not_do_is_refused() -> None:
    for check, arguments, words in (
        ("room", (NODES, "learners", 4, 1, 1), r"learners=4: each takes 1 CPU and 1 GPU.* room for 3: a \(8 CPUs, 2"),
        ("room", ([], "samplers", 1, 1, 0), "has room for 0"),
        ("memory", (SMALL, 5, 1, int(3e9)), r"samplers=5: each takes 3.0 GB .* have 110.0 GB, room for 4"),
        ("store", (NODES, 251_000_000), r"node a: its object store has 1000 MB, and 4 versions .* have 1004 MB"),
        ("models", ("m", H100, {"b": replace(H100, model="b")}), "on b it is another one than here"),
        ("models", ("m", H100, {"b": replace(H100, model_problem="OSError: no")}), r"read on b \(OSError: no\)"),
        ("versions", ("b", OWN | {"python": "3.12.1"}, OWN, "this"), r"b has python 3\.12\.1, this has .*: install"),
        ("versions", ("b", {"python": "3.11.9"}, OWN, "this"), "b lacks torch"),
    ):
        with pytest.raises(ConfigError, match=words):
            getattr(guards, f"check_{check}")(*arguments)


def test_gpus_are_used_where_there_are_any() -> None:
    assert guards.gpus_of_learner(GRPOConfig(), NODES) == 1
    assert guards.gpus_of_learner(GRPOConfig(device="cpu"), NODES) == 0
    assert guards.gpus_of_learner(GRPOConfig(), SMALL) == 0
    assert guards.gpus_of_sampler(GRPOConfig(samplers=1, gpus_per_sampler=0.5), NODES) == 0.5
    assert guards.gpus_of_sampler(GRPOConfig(samplers=1), NODES) == 1


def test_a_head_is_lost_when_it_has_been_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"t": 100.0}
    monkeypatch.setattr(guards.time, "monotonic", lambda: now["t"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head = Head(address)
        for _ in range(20):
            now["t"] += 3.0
            head.check()
            server.accept()[0].close()
    now["t"] += 1000.0
    head.check()  # nobody has asked meanwhile: it may come back
    now["t"] += 19.0
    head.check()
    assert not head.lost
    now["t"] += 2.0
    with pytest.raises(ClusterLostError, match=f"{address}, has not answered for 20 s.*start again") as caught:
        head.check()
    assert caught.value.exit_status == 75
    assert head.lost
    raises(ClusterLostError, None, head.check)

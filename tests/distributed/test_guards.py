"""Which machines may work together, what is refused before anything is asked of a cluster, and a head that is lost."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from covey import GRPOConfig
from covey.distributed import guards
from covey.distributed.guards import (
    Facts,
    Head,
    Node,
    check_learners,
    check_memory,
    check_mixture,
    check_models,
    check_room,
    check_store,
    check_versions,
    facts_here,
    gpus_of_learner,
    gpus_of_sampler,
    installed,
    mixtures,
    model_hash,
)
from covey.distributed.ranks import Ranks, await_all, check_ranks, whereabouts
from covey.errors import ClusterLostError, ConfigError, ModelError

H100 = Facts(gpus=("H100",) * 8, driver="560", model="a")


def test_a_model_is_known_by_its_config_index_and_weights(model_folder: Path, tmp_path: Path) -> None:
    digest, size = model_hash(str(model_folder))
    assert size == sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in model_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_hash(str(copy)) == (digest, size)
    told = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(told | {"rope_theta": 7.0}))
    assert model_hash(str(copy))[0] != digest
    (copy / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    (copy / "README.md").write_text("Not of the model.")
    assert model_hash(str(copy)) == (digest, size)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_hash(str(copy))[0] != digest
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-4])
    assert model_hash(str(copy))[1] == size - 4


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "none"), "pkg:no_such_package", str(tmp_path / "x.gguf"), str(tmp_path / "empty")):
        with pytest.raises(OSError, match=r"there is no such|no package|holds no model"):
            model_hash(name)
        assert facts_here(name)["model_problem"].startswith("FileNotFoundError")
    assert model_hash("somebody/that-nobody-has") == ("", 0)  # the hub is not asked


def test_models_are_compared() -> None:
    check_models("m", H100, {"node b": H100, "node c": replace(H100, model="")})
    with pytest.raises(ConfigError, match="on node b it is another one than here"):
        check_models("m", H100, {"node b": replace(H100, model="b")})
    with pytest.raises(ConfigError, match=r"cannot be read on node b \(PermissionError: no\)"):
        check_models("m", H100, {"node b": replace(H100, model_problem="PermissionError: no")})


def test_mixtures_are_refused_unless_the_run_allows_them() -> None:
    assert mixtures(H100, {"b": H100}, gpus=True) == []
    assert mixtures(Facts(), {"b": H100, "c": H100}, gpus=True) == []  # this machine only trains, or only leads
    assert mixtures(H100, {"b": Facts()}, gpus=False) == []
    found = mixtures(H100, {"b": replace(H100, gpus=("A100",), driver="550", threads=2)}, gpus=True)
    assert found == [
        "b has A100, this machine has H100",
        "b has the GPU driver 550, this machine has 560",
        "b has 2 threads, this machine has 0",
    ]
    with pytest.raises(ConfigError, match=r"b has A100, this machine has H100; .*run\.allow_mixture=true"):
        check_mixture(found, allowed=False)
    assert len(check_mixture(found, allowed=True)) == 3
    assert check_mixture([], allowed=False) == []


def test_gpus_are_those_that_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 560.35'\necho 'NVIDIA H100 80GB HBM3, 560.35'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert facts_here("somebody/model") == {
        "gpus": ("NVIDIA H100 80GB HBM3",) * 2,
        "driver": "560.35",
        "model": "",
        "model_bytes": 0,
    }
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(guards, "_SMI_SECONDS", 0.3)
    began = time.monotonic()
    assert facts_here("somebody/model")["gpus"] == ()
    assert time.monotonic() - began < 30


def test_each_sampler_has_memory_for_the_model() -> None:
    nodes = [Node("a", 8, 0, 1e9, memory=10e9), Node("b", 1, 0, 1e9, memory=100e9)]
    check_memory(nodes, 4, 1, int(3e9))  # three on a, one on b, which has one CPU
    with pytest.raises(ConfigError, match=r"samplers=5: each takes 3.0 GB .* have 110.0 GB, room for 4"):
        check_memory(nodes, 5, 1, int(3e9))
    check_memory(nodes, 9, 1, 0)


# ---------------------------------------------------------------------- ranks


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1, 3 of 4 did not come; rank 0 on .*, rank 2 on .* did"):
        together(store, [0, 2], 4, 1.0)
    assert time.monotonic() - began < 30
    together(dist.HashStore(), [0, 1, 2], 3, 60.0)


def together(store: Any, ranks: list[int], world: int, seconds: float) -> None:
    failed: list[BaseException] = []

    def come(rank: int) -> None:
        try:
            await_all(store, rank, world, seconds)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        assert len(failed) == len(ranks)
        raise failed[0]


def test_where_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "(127.0.0.1, lo" in whereabouts()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert whereabouts().endswith("(127.0.0.1, ib0)")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert whereabouts()


class Two(Ranks):
    """Two ranks, the other one as told."""

    def __init__(self, versions: dict[str, str], facts: dict[str, Any], *, lost: int = 0) -> None:
        super().__init__()
        self.world = 2
        self._other, self._lost = (versions, facts), lost

    def gather(self, own: Any) -> list[Any]:
        versions, facts, where = own
        return [own, (versions | self._other[0], facts | self._other[1], f"other-{where}")]

    def add(self, total: torch.Tensor) -> None:
        total += 2 - self._lost


@pytest.mark.parametrize(
    ("versions", "facts", "message"),
    [
        ({"covey": "0.0.1"}, {}, r"rank 1 on other-.* has covey 0\.0\.1, rank 0 has .*: install the same versions"),
        ({"transformers": ""}, {}, "lacks transformers, rank 0 has"),
        ({"torch": "2.12.0"}, {}, r"has torch 2\.12\.0, rank 0 has 2.*run\.allow_mixture=true"),
        ({}, {"threads": 7}, "rank 1 on other-.* has 7 threads, rank 0 has 1.*allow_mixture"),
        ({}, {"model": "0" * 64}, "on rank 1 on .* it is another one than here"),
    ],
)
def test_ranks_that_differ_are_refused(
    settings: dict[str, Any], versions: dict[str, str], facts: dict[str, Any], message: str
) -> None:
    config = GRPOConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        check_ranks(Two(versions, facts), config)
    if "allow_mixture" in message:
        said = check_ranks(Two(versions, facts), config.replace(allow_mixture=True))
        assert len(said) == 1


def test_ranks_that_are_alike_add_up(settings: dict[str, Any]) -> None:
    assert check_ranks(Two({}, {}), GRPOConfig(**settings)) == []
    with pytest.raises(ModelError, match="sum of 1 MB is wrong on"):
        check_ranks(Two({}, {}, lost=1), GRPOConfig(**settings))
    assert installed()["covey"]


# ---------------------------------------------------------------------- room, and versions


OWN = {"python": "3.11.9", "torch": "2.13.0"}


def node(name: str = "a", cpus: float = 8, gpus: float = 2, **others: object) -> Node:
    return Node(name, cpus, gpus, 1e9, **others)  # type: ignore[arg-type]


def test_room_is_counted_node_by_node() -> None:
    nodes = [node("a", 8, 2), node("b", 1, 8), node("c", 3.5, 0)]
    check_room(nodes, 3, 1, 1)
    check_room(nodes, 12, 1, 0)
    check_room(nodes, 4, 1, 0.25 * 2)
    with pytest.raises(
        ConfigError, match=r"samplers=4: each takes 1 CPU and 1 GPU.* has room for 3: a \(8 CPUs, 2 GPUs\)"
    ):
        check_room(nodes, 4, 1, 1)
    with pytest.raises(ConfigError, match="has room for 0"):
        check_room([], 1, 1, 0)


def test_learners_and_samplers_need_room_together() -> None:
    nodes = [node("a", 8, 2), node("b", 1, 8), node("c", 3.5, 0)]  # in all 12.5 CPUs and 10 GPUs, 3 of both on a node
    check_learners(nodes, "a", (3, 1, 1), (9, 1, 0.5))
    check_learners(nodes, "c", (12, 1, 0), (0, 1, 0))
    with pytest.raises(ConfigError, match=r"learners=4: 4 CPUs and 4 GPUs are needed, .* room for 3 learners: a \(8 "):
        check_learners(nodes, "a", (4, 1, 1), (0, 1, 1))
    with pytest.raises(ConfigError, match=r"learners=3 and samplers=10: 13 CPUs and 3 GPUs are needed.* has 12.5 CPUs"):
        check_learners(nodes, "a", (3, 1, 1), (10, 1, 0))
    with pytest.raises(ConfigError, match=r"the first learner runs where the command does, .*: c \(3.5 CPUs, 0 GPUs\)"):
        check_learners(nodes, "c", (2, 1, 1), (0, 1, 0))
    with pytest.raises(ConfigError, match="nowhere"):
        check_learners(nodes, "nowhere", (2, 1, 0), (0, 1, 0))


def test_gpus_are_used_where_there_are_any() -> None:
    nodes = [node("a", 8, 0), node("b", 8, 2)]
    assert gpus_of_learner(GRPOConfig(), nodes) == 1
    assert gpus_of_learner(GRPOConfig(device="cpu"), nodes) == gpus_of_learner(GRPOConfig(), nodes[:1]) == 0
    assert gpus_of_sampler(GRPOConfig(samplers=1, gpus_per_sampler=0.5), nodes) == 0.5
    assert gpus_of_sampler(GRPOConfig(samplers=1), nodes) == 1


def test_versions_are_compared() -> None:
    assert check_versions("node a", OWN, OWN, "this process") == []
    found = check_versions("node b", OWN | {"torch": "2.12.1"}, OWN, "this process")
    assert found == ["node b has torch 2.12.1, this process has 2.13.0"]
    with pytest.raises(ConfigError, match=r"node b has python 3\.12\.1, this process has 3\.11\.9: install the same"):
        check_versions("node b", OWN | {"python": "3.12.1"}, OWN, "this process")  # nor would they be understood
    with pytest.raises(ConfigError, match="node b lacks torch"):
        check_versions("node b", {"python": "3.11.9"}, OWN, "this process")


def test_weights_fit_the_store_four_times() -> None:
    check_store([node()], 250_000_000)
    with pytest.raises(ConfigError, match=r"node a: its object store has 1000 MB, and 4 versions .* have 1004 MB"):
        check_store([node()], 251_000_000)


def test_what_is_installed_here() -> None:
    found = installed(["torch", "no-such-package"])
    assert found["torch"].startswith("2.")
    assert found["no-such-package"] == ""
    assert found["python"].startswith("3.")


# ---------------------------------------------------------------------- the head


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
    with pytest.raises(ClusterLostError):
        head.check()

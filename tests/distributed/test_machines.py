"""Which machines may work together, and what ranks say when one of them is missing or different."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from covey import GRPOConfig
from covey.distributed import machines, roll_call
from covey.distributed.machines import (
    Facts,
    check_mixture,
    check_models,
    check_vllm,
    clock_ahead,
    clock_warnings,
    facts_here,
    mixtures,
    model_hash,
)
from covey.distributed.preflight import Node, check_memory, installed
from covey.distributed.ranks import Ranks
from covey.distributed.whereabouts import await_all, whereabouts
from covey.errors import ConfigError, ModelError

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


def test_vllm_is_the_same_where_samplers_are() -> None:
    assert check_vllm({}) == []
    assert check_vllm({"a": Facts(vllm="0.32.0"), "b": Facts(vllm="0.32.0")}) == []
    assert check_vllm({"a": Facts(vllm="0.32.0"), "b": Facts(vllm="0.31.1")}) == ["b has vLLM 0.31.1, a has 0.32.0"]
    there_is_none = facts_here("somebody/model", "/nowhere/python")
    with pytest.raises(ConfigError, match=r"node b: distributed\.vllm_python='/nowhere/python': it does not start"):
        check_vllm({"node a": Facts(vllm="0.32.0"), "node b": Facts(**there_is_none)})


@given(st.floats(-1e6, 1e6), st.floats(0, 100), st.floats(0, 1))
def test_clocks_are_compared_up_to_the_time_that_asking_takes(ahead: float, took: float, when: float) -> None:
    """Whatever part of the time the way there took, a clock is never said to differ by more than it does."""
    theirs = took * when + ahead
    found = clock_ahead(theirs, 0.0, took)
    assert abs(found) <= abs(ahead) + 1e-6
    assert abs(found) >= abs(ahead) - took - 1e-6


def test_clocks_that_differ_are_told() -> None:
    told = clock_warnings({"a": Facts(clock=4.0), "b": Facts(clock=-61.0)})
    assert len(told) == 1
    assert "clock of b is 61 s behind" in told[0]


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
    monkeypatch.setattr(machines, "_SMI_SECONDS", 0.3)
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
        ({"transformers": ""}, {}, "has transformers none"),
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
        roll_call.check_ranks(Two(versions, facts), config)
    if "allow_mixture" in message:
        said = roll_call.check_ranks(Two(versions, facts), config.replace(allow_mixture=True))
        assert len(said) == 1


def test_ranks_that_are_alike_add_up(settings: dict[str, Any]) -> None:
    assert roll_call.check_ranks(Two({}, {}), GRPOConfig(**settings)) == []
    with pytest.raises(ModelError, match="sum of 1 MB is wrong on"):
        roll_call.check_ranks(Two({}, {}, lost=1), GRPOConfig(**settings))
    assert installed()["covey"]

"""What is refused before anything is asked of a cluster."""

from __future__ import annotations

import pytest

from covey import GRPOConfig
from covey.distributed.preflight import (
    Node,
    check_alike,
    check_learners,
    check_room,
    check_store,
    gpus_of_learner,
    gpus_of_sampler,
    installed,
)
from covey.errors import ConfigError

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


def test_versions_are_compared_where_samplers_may_be() -> None:
    right, wrong = node(versions=OWN), node("b", versions=OWN | {"torch": "2.12.1"})
    check_alike([right, node("c")], OWN, 1, 1)
    with pytest.raises(ConfigError, match=r"node b has torch 2.12.1, this process has 2.13.0.*allow_mixture"):
        check_alike([right, wrong], OWN, 1, 1)
    assert "torch 2.12.1" in check_alike([right, wrong], OWN, 1, 1, allow_mixture=True)[0]
    other = node("b", versions=OWN | {"python": "3.12.1"})  # what processes say to each other would not be understood
    with pytest.raises(ConfigError, match=r"node b has python 3\.12\.1"):
        check_alike([right, other], OWN, 1, 1, allow_mixture=True)
    check_alike([right, node("b", gpus=0, versions=OWN | {"torch": "2.12.1"})], OWN, 1, 1)  # none fits there
    with pytest.raises(ConfigError, match="node b lacks torch"):
        check_alike([node("b", versions={"python": "3.11.9"})], OWN, 1, 1)


def test_gpus_are_of_one_kind() -> None:
    nodes = [node(kinds=frozenset({"H100"})), node("b", kinds=frozenset({"A100"}))]
    with pytest.raises(ConfigError, match="several kinds \\(A100, H100\\)"):
        check_alike(nodes, OWN, 1, 1)
    check_alike(nodes, OWN, 1, 0)
    assert len(check_alike(nodes, OWN, 1, 1, allow_mixture=True)) == 1


def test_weights_fit_the_store_four_times() -> None:
    check_store([node()], 250_000_000)
    with pytest.raises(ConfigError, match=r"node a: its object store has 1000 MB, and 4 versions .* have 1004 MB"):
        check_store([node()], 251_000_000)


def test_what_is_installed_here() -> None:
    found = installed(["torch", "no-such-package"])
    assert found["torch"].startswith("2.")
    assert found["no-such-package"] == ""
    assert found["python"].startswith("3.")

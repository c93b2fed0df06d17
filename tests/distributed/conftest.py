"""Runs with several units in each step, and a Ray cluster."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "serving"), str(TESTS / "pytorch")]
SMALL_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture
def by_units(settings: dict[str, Any]) -> dict[str, Any]:
    """Four units in each step."""
    steps = {"prompts_per_step": 4, "groups_per_unit": 1, "max_steps": 4, "eval_steps": 2, "save_steps": 2}
    return settings | steps | {"temperature": 1.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three simulated nodes of one CPU. They take half a minute to start on a busy machine; a module has one."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={**SMALL_NODE, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(**SMALL_NODE)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()

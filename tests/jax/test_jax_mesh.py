"""Prompts spread over four devices give the loss and the step of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import covey

SCRIPT = """
import jax, numpy as np, optax, pytest
from jax.sharding import Mesh
from jax_cases import even_share, make_trainer
from covey.errors import ConfigError
from covey.jax import jax_reward

jax.config.update("jax_disable_most_optimizations", True)
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("data",))
batch = {"prompts": [[2, 3], [4], [5, 6, 2], [3, 3, 3]]}

@jax_reward
def traced(responses, mask):
    return ((responses % 2 == 0) & mask).sum(-1) / mask.sum(-1)

for reward in (even_share, traced):
    found = []
    for where in (None, mesh):
        trainer, state = make_trainer(reward=reward, mesh=where, optimizer=optax.sgd(0.5))
        ready = trainer.prepare_batch(state, batch)
        if where is not None:
            assert len(ready["prompts"].sharding.device_set) == 4
            assert not ready["prompts"].sharding.is_fully_replicated
        state, metrics = trainer.train_step(state, batch)
        found.append((float(metrics["loss"]), np.asarray(state.params["params"]["table"])))
    (one, table), (four, spread) = found
    assert abs(one - four) < 1e-6 and abs(one) > 1e-3, (one, four)
    np.testing.assert_allclose(table, spread, atol=1e-6)
with pytest.raises(ConfigError, match="prompts=3: 4 devices of the mesh.*pass a multiple of 4 prompts"):
    trainer.train_step(state, {"prompts": [[2], [3], [4]]})
print("same")
"""


def test_a_mesh_changes_nothing_but_where_it_runs() -> None:
    paths = [str(Path(covey.__file__).parent.parent), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
        },
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]

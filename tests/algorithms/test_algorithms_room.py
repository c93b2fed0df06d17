"""What the room exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import covey.algorithms

DOCUMENTED = {
    "compute_grpo_outcome_advantage",
    "compute_naive_grpo_outcome_advantage",
    "compute_off_policy_mask",
    "compute_unbiased_kl",
    "create_sampling_mask",
}


def test_importing_the_room_imports_neither_torch_nor_jax() -> None:
    code = "import sys, covey.algorithms; print(sorted({'torch', 'jax'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_exports_are_sorted_documented_and_present() -> None:
    names = covey.algorithms.__all__
    assert set(names) >= DOCUMENTED
    assert len(names) == len(set(names))
    for name in names:
        exported = getattr(covey.algorithms, name)
        if callable(exported):
            assert exported.__doc__, name

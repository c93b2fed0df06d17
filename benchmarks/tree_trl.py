"""Counts what TRL's `TreeRow` would forward for the rows of `tree_rows`; runs in an environment with TRL, prints JSON.

"whole": all rows of the step in one `TreeRow`. "packed": through the planner that TRL trains with, in
the rows' order, at several token budgets; it leaves out rows that are longer than its budget.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import trl
from tree_rows import Row, budgets, make
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher
from trl.experimental.async_grpo.packing import TreeRow


def sample(row: Row) -> dict[str, Any]:
    """A row as TRL's rollout worker hands it over."""
    return {
        "input_ids": np.array(row.token_ids),
        "completion_mask": np.array(row.sampled, np.int64),
        "old_log_probs": np.zeros(len(row.sampled), np.float32),
        "advantage": 1.0,
        "group_id": row.group,
    }


def packed(rows: Sequence[Row], budget: int) -> int:
    """Tokens in all packs of TRL's planner."""
    # it gives a pack away when a sample does not fit: the last one is there to push the others out
    pushes = sample(Row([-1] * budget, [False] * budget, -1))
    packs = [pack for (pack,) in TokenBudgetBatcher([*map(sample, rows), pushes], 1, budget, defaultdict(list))]
    assert sum(len(pack.samples) for pack in packs) == len(rows)
    return sum(len(pack.pack()["input_ids"]) for pack in packs)


def main() -> None:
    """Arguments: small or full, names of workloads."""
    size, *names = sys.argv[1:]
    found: dict[str, Any] = {}
    for name in names:
        rows = make(name, small=size == "small").rows
        whole = TreeRow()
        for row in rows:
            whole.add(sample(row))
        each = {budget: packed(rows, tokens) for budget, tokens in budgets(rows).items()}
        found[name] = {"whole": len(whole.tokens), "packed": each}
    sys.stdout.write(json.dumps({"version": trl.__version__, "workloads": found}) + "\n")


if __name__ == "__main__":
    main()

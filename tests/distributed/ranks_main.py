"""Cases on the ranks that torchrun starts, one after the other; rank 0 writes what came out of each.

torchrun --standalone --nproc-per-node 2 ranks_main.py FOLDER KIND:CASE ...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import rank_cases
import sharded_cases
import slice_cases
import torch

from covey.distributed.ranks import STOP, Ranks

KINDS = {
    "replicated": rank_cases.compare,
    "sharded": sharded_cases.compare,
    "wrongly": sharded_cases.wrapped_wrongly,
    "move": sharded_cases.move,
    "fail": sharded_cases.fail_on,
    "slices": slice_cases.compare,
    "made": slice_cases.made,
}


def main() -> None:
    torch.set_num_threads(1)
    if "MACHINE" in os.environ:  # as if so many ranks were on one machine
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["MACHINE"]
    ranks = Ranks.of_torchrun(300)
    assert ranks is not None
    folder, found = Path(sys.argv[1]), {}
    for each in sys.argv[2:]:
        kind, _, case = each.partition(":")
        found[each] = KINDS[kind](case, ranks, folder)
    if ranks.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    else:
        assert ranks.hear() == STOP
    ranks.close()


if __name__ == "__main__":
    main()

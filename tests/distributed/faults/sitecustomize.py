"""Faults in ranks of the real command; Python imports this at its start where the folder is on its path.

FAULT="memory RANK TOKENS"    passes over more tokens run out of memory
FAULT="kill RANK MOMENT FILE" the rank dies by SIGKILL at that moment of the second checkpoint, unless the file is there
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def run_out_of_memory(tokens: int) -> None:
    import torch

    from covey.distributed.sharded import ShardedPolicy

    score = ShardedPolicy.score

    def limited(self: Any, pack: Any, **settings: Any) -> Any:
        if pack.num_tokens > tokens:
            raise torch.OutOfMemoryError(f"injected: {pack.num_tokens} tokens")
        return score(self, pack, **settings)

    ShardedPolicy.score = limited


def die(moment: str, marker: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter as Writer

    import covey.files

    seen = {"saves": 0}

    def kill() -> None:
        if seen["saves"] >= 2 and not marker.exists():
            marker.write_text(moment)
            os.kill(os.getpid(), signal.SIGKILL)

    write_data, publish, rename = Writer.write_data, covey.files.publish_folder, os.rename

    def counted(self: Any, *args: Any) -> Any:
        seen["saves"] += 1
        if moment == "in its part":
            (Path(str(self.path)) / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"torn")
        if moment in ("before its part", "in its part"):
            kill()
        found = write_data(self, *args)
        if moment == "after its part":
            kill()
        return found

    def published(aside: Any, final: Any) -> Any:
        if moment == "before the hashes":
            kill()
        return publish(aside, final)

    def renamed(source: Any, target: Any) -> None:
        if moment == "before the name" and "checkpoints" in str(target):
            kill()
        rename(source, target)

    Writer.write_data, covey.files.publish_folder, os.rename = counted, published, renamed


kind, _, told = os.environ.get("FAULT", "").partition(" ")
if kind and os.environ.get("RANK") == told.split()[0]:
    _, rest = told.split(" ", 1)
    if kind == "memory":
        run_out_of_memory(int(rest))
    else:
        moment, _, marker = rest.rpartition(" ")
        die(moment, Path(marker))

"""Faults in ranks of the real command; Python imports this at its start where the folder is on its path.

FAULT="memory RANK TOKENS"        passes over more tokens run out of memory
FAULT="kill FOLDER RANK MOMENT,RANK MOMENT,..."
                                  a rank dies by SIGKILL at that moment of the second checkpoint, one moment in each
                                  start of all ranks; files in the folder say which ones are over
FAULT="kill in call N"            the process dies in that call of its engine
"""

import itertools
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


def die(folder: Path, moments: list[str]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter as Writer

    import covey.files

    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    seen = {"saves": min(start, 1)}  # the first checkpoint is there when ranks are started again
    write_data, publish, rename = Writer.write_data, covey.files.publish_folder, os.rename

    def next_is(moment: str) -> bool:
        return seen["saves"] >= 2 and moments[start : start + 1] == [f"{os.environ['RANK']} {moment}"]

    def kill_if(moment: str) -> None:
        if next_is(moment):
            (folder / f"killed {os.environ['RANK']} {moment}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: Any, *args: Any) -> Any:
        seen["saves"] += 1
        kill_if("before its part")
        if next_is("in its part"):
            (Path(str(self.path)) / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"torn")
            kill_if("in its part")
        found = write_data(self, *args)
        kill_if("after its part")
        return found

    def published(aside: Any, final: Any) -> Any:
        kill_if("before the hashes")
        return publish(aside, final)

    def renamed(source: Any, target: Any) -> None:
        if "checkpoints" in str(target):
            kill_if("before the name")
        rename(source, target)

    Writer.write_data, covey.files.publish_folder, os.rename = counted, published, renamed


def die_in_call(number: int) -> None:
    from covey.pytorch.engine import engine

    call, calls = engine.Engine.__call__, itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    engine.Engine.__call__ = counted


kind, _, told = os.environ.get("FAULT", "").partition(" ")
if kind == "memory" and os.environ.get("RANK") == told.split()[0]:
    run_out_of_memory(int(told.split()[1]))
elif told.startswith("in call "):
    die_in_call(int(told.split()[-1]))
elif kind == "kill" and "RANK" in os.environ:
    folder, _, rest = told.partition(" ")
    die(Path(folder), rest.split(","))

"""What `kill -9` costs a run on several processes and simulated nodes, and that it changes nothing.

    python benchmarks/kills.py [--kills 20] [--seed 0] [SETTING ...]

A run with two ranks that train and two actors on simulated Ray nodes is killed at random moments: an actor, rank 0,
rank 1, the raylet of a node with an actor (another node joins), or everything that belongs to the run (it is started
again with `covey resume`, after 15 seconds in which nothing of it may be left), each as often, in random order. Every
kill is followed by a finished step before the next one. Written down are, for each kill, the seconds until the next
finished step less those of a step, and at the end whether metrics (without times) and the adapter equal those of the
same run, unbroken, in one process. Needs covey[ray] and psutil.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

UNMEASURED = ("time/", "memory/", "step_time", "eval/seconds", "samplers/")
TARGETS = ("actor", "rank 0", "rank 1", "raylet", "everything")
DEADLINE = 300.0
"""Seconds within which a step has to be finished after a kill."""
MARK = "COVEY_KILLS"


class Nodes:
    """A head with room for rank 0, and two nodes with room for two actors each."""

    def __init__(self) -> None:
        """Start them."""
        self._small = {"num_cpus": 2, "object_store_memory": 80 << 20}
        head = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._cluster.add_node(**self._small) for _ in range(2)]
        self.address = self._cluster.address

    def actors(self, kind: str = "") -> list[psutil.Process]:
        """Processes of Covey's actors on any node: samplers (EngineHost), ranks (RankHost), or all."""
        kinds = tuple(f"ray::{name}" for name in ((kind,) if kind else ("EngineHost", "RankHost")))
        found = []
        for process in psutil.process_iter():
            try:
                mine = any(self.address in word for parent in process.parents() for word in parent.cmdline())
                if mine and process.cmdline()[:1] and process.cmdline()[0].startswith(kinds):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_raylet(self, chosen: random.Random) -> None:
        """A node is gone at once, and another one joins."""
        node = self._nodes.pop(chosen.randrange(len(self._nodes)))
        node.all_processes["raylet"][0].process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._cluster.add_node(**self._small))

    def close(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


class Command:
    """The run's command, and all processes that descend from it."""

    def __init__(self, words: list[str], log: Path) -> None:
        """Start it; its output is appended to `log`."""
        self._mark = uuid.uuid4().hex
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", MARK: self._mark}
        with log.open("a") as output:
            command = [sys.executable, "-m", "covey", *words]
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def processes(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """Those alive, with their environment."""
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, environment
            except psutil.Error:
                continue

    def rank_0(self) -> psutil.Process | None:
        """The process that trains and has the run folder."""
        return next((process for process, environment in self.processes() if environment.get("RANK") == "0"), None)


def main() -> None:
    """Run it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="as for covey train")
    parser.add_argument("--recipe", default="recipes/arithmetic")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kills.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="covey-kills-") as folder:
        result = _measure(arguments, Path(folder))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not (result["same_metrics"] and result["same_adapter"] and not result["left_alive"]))


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    chosen = random.Random(arguments.seed)
    steps = 2 * arguments.kills + 3
    targets = list(TARGETS) * -(-arguments.kills // len(TARGETS))
    chosen.shuffle(targets)
    train = ["train", arguments.recipe, f"schedule.max_steps={steps}", "run.save_steps=2"]
    train += ["evaluation.eval_on_start=false", "evaluation.eval_steps=0", "evaluation.eval_at_end=false"]
    train += ["distributed.timeout_seconds=30", "distributed.max_restarts=1000", *arguments.settings]
    alone, broken = folder / "alone", folder / "broken"
    log = folder / "log.txt"
    Command([*train, f"run.output_dir={alone}", "distributed.samplers=0"], log).process.wait()
    step_seconds = statistics.median(line["step_time"] for line in _steps(alone))
    nodes = Nodes()
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    try:
        layout = ["distributed.samplers=2", "distributed.learners=2", f"distributed.ray_address={nodes.address}"]
        command = Command([*train, f"run.output_dir={broken}", *layout], log)
        _await_step(broken, 0, command, log)
        while len(rows) < arguments.kills:
            time.sleep(chosen.uniform(0, 1.5 * step_seconds))
            target, before = targets[len(rows)], len(_steps(broken))
            if before >= steps:
                raise RuntimeError(f"the run was over after {len(rows)} kills")
            begun = time.monotonic()
            if not _kill(target, command, nodes, chosen):
                continue  # it is being started just now
            if target == "everything":
                left += _left(command, nodes)
                begun += 15
                command = Command(["resume", str(broken)], log)
            _await_step(broken, before, command, log)
            seconds = time.monotonic() - begun - step_seconds
            rows.append({"killed": target, "after_step": before, "seconds": round(max(seconds, 0.0), 1)})
            print(rows[-1], flush=True)
        status = command.process.wait(10 * DEADLINE)
        left += _left(command, nodes)
    except BaseException:
        print(log.read_text()[-6000:])
        raise
    finally:
        nodes.close()
    costs = {t: [row["seconds"] for row in rows if row["killed"] == t] for t in TARGETS}
    return {
        "recipe": arguments.recipe,
        "settings": arguments.settings,
        "seed": arguments.seed,
        "step_seconds": round(step_seconds, 2),
        "kills": rows,
        "median_seconds": {t: round(statistics.median(found), 1) for t, found in costs.items() if found},
        "exit_status": status,
        "left_alive": left,
        "same_metrics": _metrics(broken) == _metrics(alone),
        "same_adapter": _adapter(broken) == _adapter(alone),
    }


def _kill(target: str, command: Command, nodes: Nodes, chosen: random.Random) -> bool:
    if target == "raylet":
        nodes.kill_raylet(chosen)
        return True
    if target == "everything":
        for process, _ in list(command.processes()):
            process.kill()
        command.process.wait()
        return True
    if target == "rank 0":
        victim = command.rank_0()
    else:
        actors = nodes.actors("EngineHost" if target == "actor" else "RankHost")
        victim = chosen.choice(actors) if actors else None
    if victim is None:
        return False
    victim.kill()
    return True


def _left(command: Command, nodes: Nodes) -> list[str]:
    """What is alive 15 seconds after the end."""
    time.sleep(15)
    alive = [process for process, _ in command.processes()] + nodes.actors()
    return [" ".join(process.cmdline())[:200] for process in alive]


def _await_step(folder: Path, before: int, command: Command, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while len(_steps(folder)) <= before:
        if command.process.poll() is not None and len(_steps(folder)) <= before:
            raise RuntimeError(f"the run has ended with status {command.process.returncode}; see {log}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step within {DEADLINE:g} s")
        time.sleep(0.1)


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(folder) if "time/update" in line]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in line if not name.startswith(UNMEASURED)} for line in _lines(folder)]


def _adapter(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main()

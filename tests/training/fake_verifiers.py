"""Stands in for the Python that has verifiers: it speaks the driver's lines, and asks as verifiers' client does.

What it does in an episode is the name of its taskset, from the episode of `AFTER` on; the first ones are played well.
"""

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

AFTER = 3
out = sys.stdout
answers: dict[int, queue.SimpleQueue[Any]] = {}
numbers = itertools.count()


def say(**what: Any) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def ask(asked: dict[str, Any], ids: list[int], **more: Any) -> list[int]:
    """One turn."""
    sampling = asked["sampling"] | {"stop_token_ids": [1], "logprobs": 1, "skip_special_tokens": False} | more
    number = next(numbers)
    answers[number] = own = queue.SimpleQueue()
    say(ask=number, body={"model": "policy", "token_ids": ids, "sampling_params": sampling})
    answer = own.get(timeout=60)
    if answer["status"] != 200:
        raise ValueError(answer["body"]["error"]["message"])
    (choice,) = answer["body"]["choices"]
    assert [f"token_id:{token}" for token in choice["token_ids"]] == [c["token"] for c in choice["logprobs"]["content"]]
    return list(choice["token_ids"])


def play(asked: dict[str, Any], does: str) -> dict[str, Any]:
    first = [5, 6, 7 + asked["task"]]
    if does == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(os.environ["PYTHONPATH"], "child").write_text(str(child.pid))
        time.sleep(600)
    if does == "dies":
        os._exit(3)
    if does == "asks otherwise":
        ask(asked, first, temperature=0.5)
    if does == "too long":
        ask(asked, [5] * 10_000)
    said = ask(asked, first)
    second = [*first, *said, 9, 10]
    answer = ask(asked, second)
    ids, mask = [*second, *answer], [0] * 3 + [1] * len(said) + [0] * 2 + [1] * len(answer)
    told: dict[str, Any] = {"ok": True, "reward": float(sum(answer) % 2), "stop": "agent_completed"}
    told["branches"] = [[ids, mask]]
    if does == "other tokens":
        ids[4] += 1
    if does == "two branches":  # a rewritten history: it begins as the other does, and its end was sampled too
        other = [*first, *said, 11]
        more = ask(asked, other)
        told["branches"].append([[*other, *more], [0] * 3 + [1] * len(said) + [0] + [1] * len(more)])
    if does == "not ok":
        told |= {"ok": False, "reward": 0.0, "errors": ["TaskError: setup: ValueError: no dice"]}
    if does == "no number":
        told["reward"] = [float("nan"), float("inf"), 1.0, 1.0][asked["id"] % 4]
    if does == "huge ids" and asked["id"] in (4, 5):
        ids[4] = 1 << 63 if asked["id"] == 4 else -1
    if does == "broken lines" and asked["id"] in (4, 5):
        out.write(f'{{"id": {asked["id"]}, "ok": tru\n' if asked["id"] == 4 else "a line of somebody else\n")
        told["stop"] = "\ud800"
    if does == "untrainable":
        told["trainable"] = False
    if does == "tells its variables":
        told |= {"ok": False, "errors": [" ".join(os.environ)]}
    return told


def run(asked: dict[str, Any], does: str) -> None:
    try:
        told = play(asked, does if asked["id"] >= AFTER else "plays")
    except ValueError as error:
        told = {"ok": False, "errors": [str(error)]}
    say(id=asked["id"], **told)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    does, agent = asked["sets"]["train"]["taskset"]["id"], asked["sets"]["train"]["agent"]
    assert (agent["harness"]["id"], agent["runtime"]) == ("covey_chat", {"type": "subprocess"})  # nothing is rented
    assert all(agent["timeout"].values())
    if does == "cannot be loaded":
        say(error="ValueError: no such file")
    if does == "never loads":
        time.sleep(600)
    if does == "ends":
        sys.exit("no verifiers here")
    say(tasks={name: [f"{n:08x}{name}" for n in range(8, 13)] for name in asked["sets"]})  # 10 is held out
    for line in sys.stdin:
        if "answer" in (asked := json.loads(line)):
            answers[asked["answer"]].put(asked)
        else:
            threading.Thread(target=run, args=(asked, does), daemon=True).start()

"""ALFWorld games: ours against TextWorld's own environment, the same random plays side by side.

    python benchmarks/alfworld_games.py ../shared/data/alfworld

Every sentence and every list of commands must be equal. Each environment runs in a process of its own, since ours lets
TextWorld remember what it parses.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

_STEPS = 25


def play_theirs(tasks: list[dict]) -> list[dict]:
    """Plays with TextWorld's environment."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from textworld.envs.pddl import PddlEnv

    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True)))
    played = []
    for task in tasks:
        began = time.perf_counter()
        goal = grammar.replace("UNKNOWN GOAL", task["goal"])
        env.load({"pddl_domain": domain, "grammar": goal, "pddl_problem": task["problem"]})
        state = env.reset()
        reset = time.perf_counter()
        seen = [
            [state.feedback.removeprefix("-= Welcome to TextWorld, ALFRED! =-").strip(), state["admissible_commands"]]
        ]
        draw = random.Random(task["uid"])
        for _ in range(_STEPS):
            state, _, _ = env.step(draw.choice(state["admissible_commands"]))
            seen.append([state.feedback, state["admissible_commands"]])
        played.append({"reset": reset - began, "steps": time.perf_counter() - reset, "seen": seen})
    return played


def play_ours(tasks: list[dict]) -> list[dict]:
    """Plays with `covey.environments.alfworld`."""
    from fast_downward import load_lib

    from covey.environments.alfworld_game import Game, game_logic

    game_logic()
    library = load_lib()
    played = []
    for task in tasks:
        began = time.perf_counter()
        game = Game.begin(library, task["problem"], task["goal"])
        seen = [[game.introduction(), list(game.commands)]]
        reset = time.perf_counter()
        draw = random.Random(task["uid"])
        for _ in range(_STEPS):
            said = game.do(draw.choice(list(game.commands)))
            seen.append([said, list(game.commands)])
        played.append({"reset": reset - began, "steps": time.perf_counter() - reset, "seen": seen})
    return played


def main() -> None:
    """Two games of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with the games")
    parser.add_argument("--games", type=int, default=12)
    parser.add_argument("--as", dest="player", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.player:
        play = play_ours if arguments.player == "ours" else play_theirs
        json.dump(play(json.load(sys.stdin)), sys.stdout)
        return
    tasks = _tasks(arguments.data, arguments.games)
    ours: list[dict] = []
    theirs: list[dict] = []
    for task in tasks:  # alternating
        for player, played in (("ours", ours), ("theirs", theirs)):
            command = [sys.executable, __file__, arguments.data, "--as", player]
            done = subprocess.run(command, input=json.dumps([task]), capture_output=True, text=True, check=True)
            played += json.loads(done.stdout)
    equal = sum(a["seen"] == b["seen"] for a, b in zip(ours, theirs, strict=True))
    sys.stdout.write(f"{equal} of {len(tasks)} plays of {_STEPS} steps are equal in every word\n")
    for what in ("reset", "steps"):
        a, b = ([each[what] for each in played] for played in (ours, theirs))
        ratios = sorted(y / x for x, y in zip(a, b, strict=True))
        seconds = f"{statistics.median(a):.3f} s, TextWorld's {statistics.median(b):.3f} s"
        sys.stdout.write(
            f"{what}: {seconds}; {statistics.median(ratios):.1f} times ({ratios[0]:.1f}-{ratios[-1]:.1f})\n"
        )


def _tasks(data: str, count: int) -> list[dict]:
    import base64
    import zlib

    from covey.environments import get_world

    found = get_world("alfworld", data=data).eval_tasks()
    random.Random(0).shuffle(found)
    kinds = sorted({task["type"] for task in found})
    chosen = [task for place in range(-(-count // len(kinds))) for kind in kinds for task in _nth(found, kind, place)]
    return [{**task, "problem": zlib.decompress(base64.b64decode(task["problem"])).decode()} for task in chosen[:count]]


def _nth(tasks: list[dict], kind: str, place: int) -> list[dict]:
    return [task for task in tasks if task["type"] == kind][place : place + 1]


if __name__ == "__main__":
    main()

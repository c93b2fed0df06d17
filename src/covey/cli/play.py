"""`covey play`: an episode in the terminal."""

from __future__ import annotations

from rich.console import Console

from covey.environments import EnvironmentPool, Observation, Outcome, TaskInstance, World, parse_action
from covey.errors import EpisodeError
from covey.observe.console import visible


def play_in_terminal(
    out: Console, world: World, task: TaskInstance, *, seed: int, expert: bool, max_turns: int
) -> None:
    """Show observations, read actions from the keyboard (or take the expert's), until the episode ends.

    Raises:
        EpisodeError: the environment failed, or has no expert.
    """
    with EnvironmentPool(world, places=1) as pool:
        pool.reset(0, task, seed)
        seen = _answer(pool)
        assert isinstance(seen, Observation)
        total = 0.0
        if world.system_prompt:
            out.print(world.system_prompt, style="dim", markup=False, highlight=False)
        for turn in range(1, max_turns + 1):
            _show(out, seen)
            action = pool.expert_action(0) if expert else _read(out, seen)
            if action is None:
                if expert:
                    raise EpisodeError("this world has no expert; play yourself, without --expert")
                out.print("stopped", highlight=False)
                return
            if expert:
                out.print(f"> {visible(action, 200)}", markup=False, highlight=False)
            pool.step(0, action)
            outcome = _answer(pool)
            assert isinstance(outcome, Outcome)
            seen, total = outcome.observation, total + outcome.reward
            if not outcome.valid:
                out.print("(no valid action)", style="dim", highlight=False)
            if outcome.done:
                _show(out, seen)
                ending = "solved" if outcome.success else "over"
                out.print(f"{ending} after {turn} actions, reward {total:g}", style="bold", highlight=False)
                return
        out.print(f"no actions left after {max_turns}, reward {total:g}", style="bold", highlight=False)


def _answer(pool: EnvironmentPool) -> Observation | Outcome:
    ((_, found),) = pool.wait()
    if isinstance(found, EpisodeError):
        raise found
    return found


def _show(out: Console, seen: Observation) -> None:
    out.print(visible(seen.text, 5000), markup=False, highlight=False)
    if seen.actions:
        out.print("Actions: " + visible("; ".join(seen.actions), 2000), style="dim", markup=False, highlight=False)


def _read(out: Console, seen: Observation) -> str | None:
    """An action from the keyboard; None at the end of the input."""
    while True:
        try:
            said = out.input("> ", markup=False)
        except EOFError:
            return None
        action = parse_action(said, "text", seen.actions)
        if action is not None:
            return action
        if said.strip():
            return said.strip()

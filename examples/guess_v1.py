"""Guess a number in four turns: a taskset of verifiers 0.4 with an environment that answers the model."""

import re

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    """A number that is to be guessed, and the largest that it may be."""

    number: int


class GuessTask(vf.Task[GuessData]):
    """One game."""


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """The numbers up to 9, 12 and 20."""

    def load(self):
        """Yield the tasks, always in this order."""
        for most in (9, 12, 20):
            for number in range(1, most + 1):
                prompt = f"I think of a number from 1 to {most}. Guess it. Answer with one number."
                yield GuessTask(GuessData(prompt=prompt, number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    """One agent plays."""

    agent: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """Says whether the number is higher or lower, for four guesses. The reward is 1, less 0.2 for each wrong guess."""

    async def run(self, task, agents):
        """Play one game."""
        earned = 0.0
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for wrong in range(4):
                found = re.findall(r"\d+", segment.last_reply)
                guess = int(found[-1]) if found else 0
                if guess == task.data.number:
                    earned = 1 - 0.2 * wrong
                if earned or segment.terminated or wrong == 3:
                    break
                segment = await talk.turn("Higher." if guess < task.data.number else "Lower.")
        talk.trace.record_reward("won", earned)


__all__ = ["GuessEnv", "GuessTaskset"]

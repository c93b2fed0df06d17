"""Sums and differences of two small numbers: a single-turn taskset of verifiers 0.4.

vf-eval addsub_v1 ...                                            docs/use.md
covey train recipes/verifiers                                    recipes/verifiers/README.md
"""

import re

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A question with its answer."""

    answer: int


class SumTask(vf.Task[SumData]):
    """One question. The last number of the reply counts."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 for the right number."""
        found = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(found) and found[-1] == str(self.data.answer))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """All sums, and all differences that are not negative, of two numbers from 0 to 19."""

    def load(self):
        """Yield the tasks, always in this order."""
        for a in range(20):
            for b in range(20):
                for sign, answer in (("+", a + b), ("-", a - b)):
                    if answer >= 0:
                        prompt = f"What is {a} {sign} {b}? Answer with one number."
                        yield SumTask(SumData(prompt=prompt, answer=answer), self.config.task)


__all__ = ["SumTaskset"]

r"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), answers marked `#### n`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError
from covey.rewards.extract import final_number, parse_number
from covey.rewards.text import numeric_match
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import FileTask, as_prompt
from covey.tasks.dataset import Row, load_rows


def reference_answer(solution: str) -> str | None:
    """The number after the last `####` of a reference solution, as text without dollar sign and commas.

    None if there is no `####`, or what follows is not one number.
    """
    _, marker, answer = solution.rpartition("####")
    if not marker or parse_number(answer) is None:
        return None
    return answer.strip().replace("$", "").replace(",", "")


def is_correct_answer(text: str, answer: str) -> bool:
    r"""Is the final number (after `####`, in `\boxed{}`, after "answer is", or the last) the answer?"""
    expected = parse_number(answer)
    return expected is not None and final_number(text) == expected


class GSM8K(FileTask):
    """Word problems: `{"prompt": [...], "answer": "72", "question": "...", "uid": ...}`.

    Args:
        path: a source for `load_rows`, with the columns `question` and `answer` (a solution that ends in `#### n`).
        eval_path: held-out problems (split `test` on the hub). None = hold out `num_eval` problems of `path`, those
            with the lowest hash of the question.
        num_train: number of training problems, drawn with the seed; None = all.
        num_eval: number of held-out problems; with `eval_path`, the most to use.
        system_prompt: put before each problem; None = none.

    Raises `ConfigError`: a number out of range.
    """

    name: ClassVar[str] = "gsm8k"

    def __init__(
        self,
        path: Any = "openai/gsm8k:main",
        eval_path: Any = None,
        num_train: int | None = None,
        num_eval: int = 200,
        system_prompt: str | None = "Solve the problem step by step. End with #### and the final number.",
    ) -> None:
        if num_eval < 1 or (num_train is not None and num_train < 1):
            raise ConfigError(f"num_train={num_train}, num_eval={num_eval}: both must be 1 or more")
        self.path, self.eval_path, self.num_train, self.num_eval = path, eval_path, num_train, num_eval
        self.system_prompt = system_prompt
        self._reward = numeric_match("answer")

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Reward 1.0 for the exact number, else 0.0."""
        return [self._reward]

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the final number is the answer."""
        return is_correct_answer(text, row["answer"])

    def read(self, source: Any, split: str) -> list[Row]:
        """The rows of a GSM8K file, with answers as numbers."""
        where = source if isinstance(source, str) else "dataset"
        problems = []
        for index, row in enumerate(load_rows(source, split=split)):
            for column in ("question", "answer"):
                if not isinstance(row.get(column), str):
                    raise DataError(
                        f"{where}: row {index} has no text in the column {column!r} (columns: {', '.join(row)}); "
                        "GSM8K rows have question and answer"
                    )
            question, answer = row["question"], reference_answer(row["answer"])
            if answer is None:
                raise DataError(
                    f"{where}: row {index}: the answer {row['answer'][-60:]!r} does not end in #### and a "
                    "number; correct or remove the row"
                )
            uid = f"gsm8k-{split}-{index}"
            problems.append({"prompt": as_prompt(question), "answer": answer, "question": question, "uid": uid})
        return problems

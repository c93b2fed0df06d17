r"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), answers marked `#### n`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError
from covey.rewards.extract import after_marker, completion_text, final_number, parse_number
from covey.rewards.text import numeric_match
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import FileTask, as_prompt
from covey.tasks.dataset import Row, load_rows

EXAMPLES = (
    (
        "A baker makes 24 rolls in the morning and a third as many in the afternoon. How many rolls does he make?",
        "In the afternoon he makes 24 / 3 = 8 rolls.\nAltogether he makes 24 + 8 = 32 rolls.\n#### 32",
    ),
    (
        "Lena has $90. She buys 3 books for $14 each and 2 pens for $4 each. How much money does she have left?",
        "The books cost 3 * 14 = 42 dollars.\nThe pens cost 2 * 4 = 8 dollars.\n"
        "She has 90 - 42 - 8 = 40 dollars left.\n#### 40",
    ),
)
"""Worked problems, made for this file: none of them is in the benchmark."""


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


def marked_number(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Reward 1.0 where the number after the last `####` is the answer, else 0.0; GSM8K's strict reading."""
    found = [after_marker(completion_text(completion), "####") for completion in completions]
    return [float(x is not None and x == parse_number(a)) for x, a in zip(found, answer, strict=True)]


class GSM8K(FileTask):
    """Word problems: `{"prompt": [...], "answer": "72", "question": "...", "uid": ...}`.

    Args:
        path: a source for `load_rows`, with the columns `question` and `answer` (a solution that ends in `#### n`).
        eval_path: held-out problems (split `test` on the hub). None = hold out `num_eval` problems of `path`, those
            with the lowest hash of the question.
        num_train: number of training problems, drawn with the seed; None = all.
        num_eval: number of held-out problems; with `eval_path`, the most to use.
        system_prompt: put before each problem; None = none.
        examples: number of worked problems (0 to 2, of `EXAMPLES`) that are turns of the conversation before each
            problem. They show a model how long an answer is and where the number stands.
        strict: add a second reward for the number after `####` alone, GSM8K's own reading; accuracy stays the first.

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
        examples: int = 0,
        strict: bool = False,
    ) -> None:
        if num_eval < 1 or (num_train is not None and num_train < 1):
            raise ConfigError(f"num_train={num_train}, num_eval={num_eval}: both must be 1 or more")
        if not 0 <= examples <= len(EXAMPLES):
            raise ConfigError(f"examples={examples}: from 0 to {len(EXAMPLES)}")
        self.path, self.eval_path, self.num_train, self.num_eval = path, eval_path, num_train, num_eval
        self.system_prompt = system_prompt
        self._rewards: list[RewardFunction] = [numeric_match("answer"), *([marked_number] if strict else [])]
        roles = ("user", "assistant")
        texts = [text for example in EXAMPLES[:examples] for text in example]
        self._shown = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Reward 1.0 for the exact number, else 0.0; with `strict`, 1.0 more where it stands after `####`."""
        return list(self._rewards)

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
            prompt = [*self._shown, *as_prompt(question)]
            problems.append({"prompt": prompt, "answer": answer, "question": question, "uid": uid})
        return problems

r"""Symbolic equality of mathematical answers, by `math-verify`: `\frac{1}{2}`, `0.5` and `1/2` are one answer.

`math-verify` reads LaTeX and compares with SymPy, which can run for minutes on hostile expressions, and its own time
limits are signals, which do not work outside the main thread. So it runs in processes that are killed at the limit.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.extract import boxes, completion_text, number_text, parse_number
from covey.rewards.parallel import ItemTimeout, WorkerPool
from covey.rewards.text import column_of, found_word, say
from covey.types import Message

log = logging.getLogger(__name__)

_MAX_TEXT = 20_000
_NEAR = 17  # characters from box to box: math-verify takes nearer ones as one answer
_MATHS = re.compile(r"(?<!\\)(?:\$\$([^$]+)\$\$|\$([^$]+)\$(?!\d)|\\[(\[]((?:[^\\]|\\[^()\[\]])+)\\[)\]])")
_WORD = re.compile(r"(?<![^\W\d_])[^\W\d_]{2,}(?![^\W\d_({])")
_MOST_WORDS = 12  # of an expression without LaTeX
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_GROUP = re.compile(r"(?<=[0-9])(?:\\[,!: ;]|\{,\}|~|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")


class MathReward:
    r"""1.0 where a completion's final answer equals its row's `column`, else 0.0.

    Raises `ConfigError`: `math-verify` is not installed.

    A reference is a number (int, float, Decimal, Fraction, NumPy) or text with one answer (`\frac{1}{2}`, `1, 2, 3`,
    `x = 5`, `Monday`). It may also be a solution with the answer in its last `\boxed{}`, after `####` or in its only
    `$...$`. A row with None is not scored. A completion's answer is its last `\boxed{}`, also if it cannot be
    read; without a box it is what math-verify finds.

    Args:
        column: dataset column with the reference.
        workers: number of processes.
        time_limit: time limit for one completion, in seconds; a longer one scores 0.
    """

    __name__ = "math"
    _as_trl = False

    def __init__(self, column: str = "answer", *, workers: int = 2, time_limit: float = 5.0) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ConfigError("math answers are compared by math-verify; pip install 'covey[math]'") from None
        self.required_columns = (column,)
        self._column = column
        # what takes seconds is imported in a worker before an answer's time begins
        first = partial(compared, "1", "1")
        self._pool = WorkerPool(compared, workers=workers, time_limit=time_limit, prepare=first)
        self.timeouts = 0
        self._told = False

    def __call__(self, completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        """Score as a reward function does; `RewardError` names the `sample`: no column, or no answer in a reference."""
        references = self._read(column_of(columns, self._column, "answers are compared with", function="math"))
        texts = [completion_text(completion)[-_MAX_TEXT:] for completion in completions]
        pairs = zip(references, texts, strict=True)
        found = iter(self._pool.map([(right, text, self._as_trl) for right, text in pairs if right is not None]))
        results = [None if reference is None else self._score(next(found), i) for i, reference in enumerate(references)]
        say(columns, self.__name__, [None if result is None else result[1] for result in results])
        return [None if result is None else result[0] for result in results]

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises `RewardError` for the first row whose reference cannot be one; before a run begins."""
        self._read([row.get(self._column) for row in rows])

    def close(self) -> None:
        """End the processes; the next call starts them again."""
        self._pool.close()

    def _read(self, references: Sequence[Any]) -> list[str | None]:
        read: list[str | None] = []
        for index, reference in enumerate(references):
            what = f"{self._column}={reference!r:.80}"
            try:
                read.append(None if reference is None else expression_of(reference))
            except ValueError as error:
                advice = "correct it, or use None where nothing is to be scored"
                raise RewardError(f"{what}: {error}; {advice}", function="math", sample=index) from None
            text = read[-1] or ""
            if not self._told and "\\" not in text and re.search(r"\d", text) and len("".join(_WORD.findall(text))) > 5:
                self._told = True
                log.warning("%s: a completion must repeat these words; put an answer among them in \\boxed{}", what)
        return read

    def _score(self, found: Any, index: int) -> tuple[float, str]:
        if isinstance(found, ItemTimeout):
            self.timeouts += 1
            return 0.0, "took too long to compare"
        if isinstance(found, Exception):
            raise RewardError(str(found), function="math", sample=index)
        return float(found[0]), str(found[1])


def expression_of(reference: Any) -> str:
    """The one expression of a reference, as `MathReward` describes it. Linear in its length.

    Raises `ValueError`: it is neither a finite number nor text, holds no answer, or does not say which.
    """
    if (number := number_text(reference)) is not None:
        return number
    if not isinstance(reference, str):
        raise ValueError(f"a {type(reference).__name__} is not a reference, a finite number or text is")
    text, boxed, marked = reference.strip(), answer_in(reference), reference.rpartition("####")[2].strip()
    if boxed is not None:
        text = boxed
    elif marked != text and "\n" not in marked:
        text = marked
    elif maths := [next(filter(None, found.groups())) for found in _MATHS.finditer(text)]:
        if len(maths) > 1 and re.search(r"\w", re.sub(r"\b(?:and|or)\b", "", _MATHS.sub(" ", text))):
            raise ValueError("a text with several expressions, which does not put its answer in \\boxed{}")
        text = ", ".join(maths)
    if not re.search(r"[\w∞∅]", text):
        raise ValueError("it holds no answer")
    return _plain(text)


def is_words(text: str) -> bool:
    """Whether it is to be compared as text: words alone, or too many of them for an expression, and no LaTeX."""
    words = "" if "\\" in text else _WORD.findall(text)
    return len(words) > _MOST_WORDS or (
        bool(words) and max(map(len, words)) > 3 and not re.search(r"[^\w\s.,'’-]|\d", text)
    )


def answer_in(text: str) -> str | None:
    r"""What is in the last box of a text, and in those right before it; "" if it does not end, None without a box."""
    found, start = boxes(text), -1
    contents: list[str] = []
    while found and (start < 0 or 0 <= found[-1][1] < start < found[-1][1] + _NEAR):
        start, end = found.pop()
        content = _plain(text[start : max(start, end)])
        contents += [content] * (content not in contents[-1:])
    return ", ".join(reversed(contents)) if contents else None


def _plain(text: str) -> str:
    r"""An expression as one line, without dollar signs, groups of digits and `\text`; a mixed number in LaTeX."""
    text = " ".join(text.replace("\\$", "").replace("$", "").split()).removesuffix(".")
    text = whole[1] if (whole := _TEXT.fullmatch(text)) else text
    text = re.sub(r"^([-−]?[0-9]+) ([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", _GROUP.sub("", text))
    return number_text(text) or text


def _bare(text: str) -> str:
    r"""An expression in which units and names are as in plain text: `10 \text{ m/s}`, `n \log n`."""
    return " ".join(re.sub(r"(?<!\\)\\(?=[A-Za-z])", "", _TEXT.sub(r" \1 ", text)).split())


def compared(reference: str, text: str, as_trl: bool = False) -> tuple[float, str]:
    """Runs in a worker. 1.0 if the answer in `text` equals the reference, and what was found in it.

    `as_trl`: without a box, only LaTeX that is said to be the answer counts. Raises `ValueError`: the reference holds
    no answer.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    # their time limits are off, which they warn of: they need the main thread's signals; this process is killed instead
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed, latex = answer_in(text), [LatexExtractionConfig()]
    if is_words(reference) or (boxed is not None and _bare(boxed) == _bare(reference)):
        said = _plain(text) if boxed is None else boxed
        return float(_bare(said).casefold() == _bare(reference).casefold()), found_word(boxed)
    expected = parse(f"${reference}$", latex, parsing_timeout=None)
    if not expected:
        raise ValueError(f"the reference {reference!r:.80} holds no answer that math-verify can read")
    try:
        if boxed is not None:
            answer = parse(f"${boxed}$", latex, parsing_timeout=None)
        elif as_trl:
            latex = [LatexExtractionConfig(try_extract_without_anchor=False)]
            answer = parse(text, latex, extraction_mode="first_match", parsing_timeout=None)
        else:
            answer = parse(text, parsing_timeout=None)
        # the last one is the text that was read; an expression may take for ever to be written out
        texts = [each for each in answer if isinstance(each, str)] or ["an answer"]
        word = found_word(texts[-1] if answer else None)
        # it rounds to places after the point: a small reference needs more of them
        places = max(6, 3 - math.floor(math.log10(abs(parse_number(reference) or 1))))
        return float(bool(answer) and verify(expected, answer, float_rounding=places, timeout_seconds=None)), word
    except Exception:  # text that breaks the parser is no answer
        return 0.0, found_word(None)

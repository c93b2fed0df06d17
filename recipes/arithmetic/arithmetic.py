"""Procedural arithmetic with exact answers: no data to fetch, as much of it as wanted, several difficulties.

A question belongs to the held-out set when the hash of its content says so (one in `HELD_OUT_ONE_IN`): of its numbers,
sorted, or of the word whose letters are counted. So no numbers stand on both sides, in whatever order and under
whatever question, for every seed and size.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from covey.errors import ConfigError
from covey.rewards.extract import (
    MAX_TAIL,
    Marker,
    completion_text,
    final_number,
    parse_number,
)
from covey.rewards.text import found_word, say
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import Task, as_prompt, question_hash, sorted_numbers
from covey.tasks.dataset import Row
from covey.types import Message

HELD_OUT_ONE_IN = 5
_EVAL_SEED = 20_240_229
_MARKERS: tuple[Marker, ...] = ("####", "boxed", "answer", "=")
# So many draws in a row without a new question: the space is used up.
_PATIENCE = 2_000

# fmt: off
_WORDS = (
    "apple", "arrow", "banana", "beetle", "bottle", "butter", "candle", "carrot", "cheese", "cherry",
    "coffee", "cotton", "dinner", "engine", "falcon", "feather", "flower", "forest", "garden", "ginger",
    "goose", "guitar", "hammer", "hollow", "island", "jacket", "kettle", "ladder", "lemon", "letter",
    "lesson", "mirror", "monkey", "needle", "onion", "orange", "paper", "parrot", "pepper", "pillow",
    "planet", "potato", "puzzle", "rabbit", "ribbon", "river", "rocket", "saddle", "sandal", "season",
    "shadow", "silver", "spoon", "street", "summer", "tennis", "ticket", "tomato", "tunnel", "valley",
    "velvet", "window", "winter", "yellow",
)
# fmt: on


def _operand(rng: random.Random, digits: int) -> int:
    """A number with `digits` digits; zero counts as a one-digit number."""
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _sum(rng: random.Random, digits: int) -> tuple[str, int]:
    a, b = _operand(rng, digits), _operand(rng, digits)
    return f"What is {a} + {b}?", a + b


def _difference(rng: random.Random, digits: int) -> tuple[str, int]:
    low, high = sorted((_operand(rng, digits), _operand(rng, digits)))
    return f"What is {high} - {low}?", high - low


def _chain(rng: random.Random, digits: int) -> tuple[str, int]:
    total = _operand(rng, digits)
    text = str(total)
    for _ in range(2):
        sign, term = rng.choice((1, -1)), _operand(rng, digits)
        text += f" {'+' if sign > 0 else '-'} {term}"
        total += sign * term
    return f"What is {text}?", total


def _product(rng: random.Random, digits: int) -> tuple[str, int]:
    a, b = _operand(rng, digits), _operand(rng, digits)
    return f"What is {a} times {b}?", a * b


def _gcd(rng: random.Random, digits: int) -> tuple[str, int]:
    top = max(12, 10**digits - 1)
    a, b = rng.randint(2, top), rng.randint(2, top)
    return f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)


def _larger(rng: random.Random, digits: int) -> tuple[str, int]:
    a = b = _operand(rng, digits)
    while a == b:
        b = _operand(rng, digits)
    return f"Which number is larger, {a} or {b}?", max(a, b)


def _smaller(rng: random.Random, digits: int) -> tuple[str, int]:
    question, larger = _larger(rng, digits)
    return question.replace("larger", "smaller"), sum(map(int, re.findall(r"\d+", question))) - larger


def _count_letters(rng: random.Random, digits: int) -> tuple[str, int]:
    word = rng.choice(_WORDS)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    return f'How many times does the letter "{letter}" appear in the word "{word}"?', word.count(letter)


def _minimum(rng: random.Random, digits: int) -> tuple[str, int]:
    numbers = [_operand(rng, digits) for _ in range(4)]
    return f"What is the smallest of the numbers {', '.join(map(str, numbers))}?", min(numbers)


def _next_in_sequence(rng: random.Random, digits: int) -> tuple[str, int]:
    start, step = _operand(rng, digits), rng.randint(1, 9)
    terms = [start + step * index for index in range(4)]
    return f"What is the next number in the sequence {', '.join(map(str, terms))}?", start + 4 * step


KINDS: Mapping[str, Callable[[random.Random, int], tuple[str, int]]] = {
    "sum": _sum,
    "difference": _difference,
    "chain": _chain,
    "product": _product,
    "gcd": _gcd,
    "larger": _larger,
    "smaller": _smaller,
    "count_letters": _count_letters,
    "minimum": _minimum,
    "next_in_sequence": _next_in_sequence,
}
"""Kind of question -> (random numbers, digits) -> (question, answer)."""

COMPARE = "compare"
"""Two numbers in both orders, asked for the larger and for the smaller one: four questions, one after another.

In this order (`data.prompt_order = "given"`) each step has as many answers that come first as answers that come
second, so that noise teaches no preference for a place; and no preference for a size, since both are asked for.
"""


def _compare(rng: random.Random, digits: int) -> list[tuple[str, str, int]]:
    question, larger = _larger(rng, digits)
    a, b = map(int, re.findall(r"\d+", question))
    return [
        (kind, f"Which number is {kind}, {first} or {second}?", answer)
        for first, second in ((a, b), (b, a))
        for kind, answer in (("larger", larger), ("smaller", a + b - larger))
    ]


CHOICES: Mapping[str, str] = {"compare": "large", "larger": "large", "smaller": "small", "minimum": "small"}
"""Kinds whose answer is one of the numbers in the question, and whether it is the large or the small one."""

_NUMBER = r"(?<![\d.−-])[0-9]{1,12}(?!\.?\d)"
_WORD = (
    r"(?:(?P<large{0}>larger|largest|greater|greatest|bigger|biggest|higher|highest|maximum)"
    r"|(?P<small{0}>smaller|smallest|lower|lowest|lesser|less|least|minimum))\b"
)
_CLAIM = re.compile(
    rf"(?P<before>{_NUMBER}) is (?P<how>(?:[a-z]{{1,12}} ){{0,3}}?){_WORD.format(1)}"
    rf"(?: number)?(?: than (?:the number )?(?P<other>{_NUMBER}))?"
    rf"|\b{_WORD.format(2)}[^.\d]{{0,40}}?(?: is| would be|:) (?P<after>{_NUMBER})",
    re.ASCII | re.IGNORECASE,
)
_WORD_OR_NOT = re.compile(rf"\b(?:{_WORD.format('')}|not\b)|n't\b", re.ASCII | re.IGNORECASE)


def read_answer(text: str, kind: str) -> Fraction | None:
    """The number that a completion gives as its answer, None if it gives none.

    Where the answer is one of the question's own numbers (`CHOICES`), a sentence must say which: "87 is larger than
    40", "the larger number is 87". The last such sentence must be about what was asked, and no other may contradict it
    or be false by itself ("40 is larger than 87"). Without such a sentence only one number may occur, and no word that
    compares. Simpler rules pay for something else and get it: the last number for "40 is larger than 87", the first
    for repeating the question, the only one for "40 is the larger number" where the smaller one was asked for.

    Otherwise it is the number after `####`, in a box, after "answer", after "=", or else the last one: "3 + 4 = 7".
    """
    if kind not in CHOICES:
        return final_number(text, markers=_MARKERS)
    return _chosen_number(text[:MAX_TAIL], CHOICES[kind])


def _chosen_number(text: str, asked: str) -> Fraction | None:
    claims = []
    for found in _CLAIM.finditer(text):
        word = "large" if found["large1"] or found["large2"] else "small"
        number, other = int(found["before"] or found["after"]), found["other"]
        true = other is None or (number > int(other) if word == "large" else number < int(other))
        if not true or "not" in (found["how"] or "").lower().split():
            return None
        claims.append((word, number))
    if claims:
        said = dict(claims)
        agree = len(set(claims)) == len(said) == len(set(said.values()))
        return Fraction(number) if agree and word == asked else None
    named = set(re.findall(r"[-−]?[0-9]+(?:[.,][0-9]+)*", text))
    return parse_number(named.pop()) if len(named) == 1 and not _WORD_OR_NOT.search(text) else None


def _content(question: str) -> str:
    """What a question is about: its numbers, sorted, or the word whose letters are counted."""
    return sorted_numbers(question) or question.rpartition(" word ")[2]


class Arithmetic(Task):
    """Questions with one integer as the answer: `{"prompt": [...], "answer": "7", "kind": "sum", "uid":
    ...}`.

    Args:
        kinds: one of `KINDS` or several, as a list or joined by "+"; they alternate. `compare` asks for the `larger`
            and the `smaller` of the same two numbers, see `COMPARE`.
        digits: digits of the operands, 1 to 12. `gcd` takes numbers from 2 to 12 for 1 digit; `count_letters`
            has a fixed list of words.
        num_train: training rows. All are different questions, so a small space gives fewer.
        num_eval: held-out rows, the same holds.
        strict: True rewards only a completion that is the number and nothing else; False reads the answer out of
            the text: see `read_answer`.
        system_prompt: put before each question; None = none.

    Raises `ConfigError`: an unknown kind or a number out of range.
    """

    name: ClassVar[str] = "arithmetic"

    def __init__(
        self,
        kinds: str | Sequence[str] = "chain",
        digits: int = 1,
        num_train: int = 2_000,
        num_eval: int = 200,
        strict: bool = False,
        system_prompt: str | None = "Answer with the number only.",
    ) -> None:
        self.kinds = tuple(kinds.split("+") if isinstance(kinds, str) else kinds)
        for kind in self.kinds or ("",):
            if kind not in (*KINDS, COMPARE):
                raise ConfigError(f"kinds={kind!r}: no such kind of question; use {', '.join([*KINDS, COMPARE])}")
        if not 1 <= digits <= 12:
            raise ConfigError(f"digits={digits}: operands have 1 to 12 digits; choose a number in between")
        if min(num_train, num_eval) < 1:
            raise ConfigError(f"num_train={num_train}, num_eval={num_eval}: both must be 1 or more")
        self.digits = digits
        self.num_train = num_train
        self.num_eval = num_eval
        self.strict = strict
        self.system_prompt = system_prompt
        self.max_completion_length = 32

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """1.0 for the exact number, else 0.0."""

        def correct_number(
            completions: Sequence[str | list[Message]], answer: Sequence[str], kind: Sequence[str], **columns: Any
        ) -> list[float]:
            found = [self._number(completion_text(text), own) for text, own in zip(completions, kind, strict=True)]
            say(columns, "correct_number", [found_word(number) for number in found])
            return [float(number == int(right)) for number, right in zip(found, answer, strict=True)]

        return [correct_number]

    def train_rows(self, seed: int) -> list[Row]:
        """Up to `num_train` different questions, none of them held out."""
        return self._draw(random.Random(f"train-{seed}"), self.num_train, held_out=False)

    def eval_rows(self) -> list[Row]:
        """Up to `num_eval` different held-out questions."""
        return self._draw(random.Random(f"eval-{_EVAL_SEED}"), self.num_eval, held_out=True)

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True where the reward is 1."""
        return self._is_right(text, row["answer"], row["kind"])

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True where a number can be read."""
        return re.search("[0-9]", text) is not None

    def _is_right(self, text: str, answer: str, kind: str) -> bool:
        return self._number(text, kind) == int(answer)

    def _number(self, text: str, kind: str) -> Fraction | None:
        return parse_number(text) if self.strict else read_answer(text, kind)

    def _draw(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        rows: dict[str, Row] = {}
        misses = 0
        while len(rows) < count and misses < _PATIENCE:
            # By draws, not by rows: a kind with few questions does not hold up the others.
            kind = self.kinds[(len(rows) + misses) % len(self.kinds)]
            drawn = _compare(rng, self.digits) if kind == COMPARE else [(kind, *KINDS[kind](rng, self.digits))]
            if held_out:  # the four of a pair are not independent, and an evaluation's interval takes them to be
                drawn = [rng.choice(drawn)]
            new = [one for one in drawn if one[1] not in rows]
            if not new or (question_hash(_content(new[0][1])) % HELD_OUT_ONE_IN == 0) != held_out:
                misses += 1
                continue
            misses = 0
            for own, question, answer in new[: count - len(rows)]:
                uid = f"{own}-{question_hash(question):016x}"
                rows[question] = {"prompt": as_prompt(question), "answer": str(answer), "kind": own, "uid": uid}
        return list(rows.values())

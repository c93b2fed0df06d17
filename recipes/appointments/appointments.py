"""A sentence about an appointment -> strict JSON that a calendar can take.

    "Lunch with Ana on Tuesday at half past twelve."
    {"what": "lunch", "who": "Ana", "day": "Tuesday", "time": "12:30 pm"}

Held-out sentences are about people and things, and in wordings, that no training sentence has.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from covey.rewards.extract import completion_text
from covey.tasks import Row, Task
from covey.tasks.base import as_prompt

FIELDS = ("what", "who", "day", "time")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# fmt: off
WHAT = (
    "lunch", "dinner", "breakfast", "coffee", "a meeting", "a call", "tennis", "chess", "an interview", "a walk",
    "yoga", "a rehearsal", "a picnic", "supper", "an exam", "golf", "a haircut", "a swim", "cards", "a tour",
)
NEW_WHAT = ("tea", "a game", "football", "a lesson", "drinks", "a concert", "an appointment", "rugby")
WHO = (
    "Ana", "Ben", "Chloe", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Karim", "Lena", "Mia", "Noah",
    "Ada", "Boris", "Carla", "Dan", "Eva", "Finn", "Gina", "Hana", "Ivan", "Joy", "Kim", "Leo", "Max", "Nora", "Otto",
    "Petra", "Raul", "Sofia", "Tom", "Uma", "Viktor", "Wanda", "Yusuf", "Zara", "Mr Lee", "Mrs Brown", "Dr Novak",
)
NEW_WHO = ("Olga", "Paul", "Quinn", "Rosa", "Sam", "Tara", "Umar", "Vera", "Mr Hill", "Dr Costa")
WORDINGS = (
    "{What} with {who} on {day} at {time}.", "{What} with {who}, {day}, {time}.",
    "On {day} at {time}: {what} with {who}.", "I have {what} with {who} on {day} at {time}.",
    "Please add {what} with {who} for {day} at {time}.", "{who} wants {what} on {day} at {time}.",
    "Remind me of {what} with {who} on {day}, {time}.", "{day}, {time}, {what} with {who}.",
    "Can you put {what} with {who} on {day} at {time} into my calendar?",
    "At {time} on {day} I am meeting {who} for {what}.", "{who} and I planned {what} for {day}, {time}.",
    "{What} is on {day} at {time}, and {who} comes too.", "{who} called: {what} on {day} at {time}.",
    "We said {day} at {time} for {what}, {who} and I.", "Next {day} {who} and I have {what} at {time}.",
    "It is {who} that I see for {what} at {time} on {day}.", "{day} at {time} would suit {who} for {what}.",
)
NEW_WORDINGS = (
    "{who} and I will have {what} on {day} at {time}.", "Let us do {what} on {day} at {time}, {who} said.",
    "Don't let me forget {what} with {who} at {time} on {day}.", "My {day}: {what} with {who} at {time}.",
)
_HOURS = ("twelve", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
# fmt: on
ASK = """Turn the sentence into JSON with the keys "what", "who", "day" and "time". Answer with the JSON only.

Sentence: A ride with Zoe on Saturday at 7 am.
JSON: {{"what": "a ride", "who": "Zoe", "day": "Saturday", "time": "7:00 am"}}

Sentence: Yuri wants a debate on Monday at half past two in the afternoon.
JSON: {{"what": "a debate", "who": "Yuri", "day": "Monday", "time": "2:30 pm"}}

Sentence: On Thursday at a quarter past nine in the morning: a class with Wim.
JSON: {{"what": "a class", "who": "Wim", "day": "Thursday", "time": "9:15 am"}}

Sentence: Skating with Xenia on Sunday, eight in the evening.
JSON: {{"what": "skating", "who": "Xenia", "day": "Sunday", "time": "8:00 pm"}}

Sentence: Theo called: a party on Friday at a quarter to five in the afternoon.
JSON: {{"what": "a party", "who": "Theo", "day": "Friday", "time": "4:45 pm"}}

Sentence: {sentence}
JSON:"""


def written(hour: int, minute: int) -> str:
    """As it is to stand in the entry: 18:45 is "6:45 pm"."""
    return f"{hour % 12 or 12}:{minute:02d} {'am' if hour < 12 else 'pm'}"


def spoken(hour: int, minute: int, draw: random.Random) -> str:
    """One of the ways to say a time between 7:00 and 21:45."""
    half, short, word = ("am" if hour < 12 else "pm"), hour % 12 or 12, _HOURS[hour % 12]
    part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    ways = [f"{short}:{minute:02d} {half}", f"{short}:{minute:02d} {part}"]
    if minute == 0:
        ways += [f"{short} {half}", f"{short} {part}", f"{word} {part}"]
        ways += ["noon"] if hour == 12 else []
    if minute == 30:
        ways += [f"half past {word} {part}", f"half past {short} {part}"] * 2
    if minute == 15:
        ways += [f"a quarter past {word} {part}"] * 3
    if minute == 45:
        ways += [f"a quarter to {_HOURS[(hour + 1) % 12]} {part}"] * 3 if hour not in {11, 17} else []
    return draw.choice(ways)


def read(text: str) -> dict[str, str] | None:
    """The entry that a completion consists of; None if it is anything but one object of texts with the four keys."""
    text = text.strip()
    if len(text) > 400 or not text.startswith("{"):
        return None
    try:
        found = json.loads(text, object_pairs_hook=list)  # a key that comes twice is not overlooked
    except (ValueError, RecursionError):
        return None
    try:
        fits = sorted(key for key, _ in found) == sorted(FIELDS) and all(isinstance(value, str) for _, value in found)
    except (TypeError, ValueError):  # not a list of pairs
        return None
    return dict(found) if fits else None


def share_right(text: str, wanted: Mapping[str, str]) -> float:
    """0 for what is no entry, else a fifth, and a fifth for each field that is right; see `time_right`."""
    found = read(text)
    if found is None:
        return 0.0
    fields = sum(found[field] == wanted[field] for field in FIELDS[:-1])
    return round((1 + fields + time_right(found["time"], wanted["time"])) / 5, 2)


def time_right(said: str, right: str) -> float:
    """A fifth for the form of "6:45 pm", three tenths for the hour, three for the minutes, and a fifth for the half."""
    told, wanted = (re.fullmatch(r"(1[0-2]|[1-9]):([0-5]\d) ([ap]m)", text, re.ASCII) for text in (said, right))
    if told is None or wanted is None:
        return 0.0
    hour, minutes, half = (told[part] == wanted[part] for part in (1, 2, 3))
    return 0.2 + 0.3 * hour + 0.3 * minutes + 0.2 * half


class Appointments(Task):
    """Sentences with the entry that they mean: `{"prompt": [...], "answer": '{"what": ...}', "uid": ...}`.

    Args:
        num_train: training sentences.
        num_eval: held-out sentences.
    """

    name: ClassVar[str] = "appointments"

    def __init__(self, num_train: int = 2_000, num_eval: int = 200) -> None:
        self.num_train, self.num_eval = num_train, num_eval
        self.max_completion_length = 56

    @property
    def reward_funcs(self) -> list[Any]:
        """`share_right`."""

        def entry(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
            texts = [completion_text(completion) for completion in completions]
            return [share_right(text, json.loads(right)) for text, right in zip(texts, answer, strict=True)]

        return [entry]

    def train_rows(self, seed: int) -> list[Row]:
        """Different sentences of known wordings, people and things."""
        return self._draw(random.Random(f"train-{seed}"), self.num_train, WORDINGS, WHAT, WHO)

    def eval_rows(self) -> list[Row]:
        """Sentences all of whose wordings, people and things are new."""
        return self._draw(random.Random("eval"), self.num_eval, NEW_WORDINGS, NEW_WHAT, NEW_WHO)

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """All four fields are exactly right, and there is nothing else."""
        return share_right(text, json.loads(row["answer"])) == 1.0

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """It is an entry, right or wrong."""
        return read(text) is not None

    @staticmethod
    def _draw(
        draw: random.Random, count: int, wordings: Sequence[str], whats: Sequence[str], whos: Sequence[str]
    ) -> list[Row]:
        rows: dict[str, Row] = {}
        for _ in range(50 * count):
            if len(rows) == count:
                break
            what, who, day = draw.choice(whats), draw.choice(whos), draw.choice(DAYS)
            hour, minute = draw.randint(7, 21), draw.choice((0, 15, 30, 45))
            time = spoken(hour, minute, draw)
            words = draw.choice(wordings)
            sentence = words.format(what=what, What=what[0].upper() + what[1:], who=who, day=day, time=time)
            answer = {"what": what, "who": who, "day": day, "time": written(hour, minute)}
            prompt = as_prompt(ASK.format(sentence=sentence))
            rows.setdefault(sentence, {"prompt": prompt, "answer": json.dumps(answer), "uid": sentence})
        return list(rows.values())

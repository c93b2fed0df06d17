"""The task of `recipes/appointments`: what is an entry, and what a partly right one is worth."""

import json
from pathlib import Path

import pytest

from covey.tasks import get_task

ROOT = Path(__file__).resolve().parents[2]
TASK = get_task(f"{ROOT}/recipes/appointments/appointments.py:Appointments")
WANTED = {"what": "tea", "who": "Quinn", "day": "Friday", "time": "5:45 pm"}


def reward(text: str) -> float:
    (score,) = (function(completions=[text], answer=[json.dumps(WANTED)]) for function in TASK.reward_funcs)
    return float(score[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0),
        ({"who": "Paul"}, 0.8),
        ({"time": "5:15 pm"}, 0.94),
        ({"time": "4:45 pm"}, 0.94),
        ({"time": "5:45 am"}, 0.96),
        ({"time": "6:15 am"}, 0.84),
        ({"time": "5:45"}, 0.8),
        ({"time": "17:45"}, 0.8),
        ({"time": "05:45 pm"}, 0.8),
        ({"time": "13:45 pm"}, 0.8),
        ({"time": "5:45 pm "}, 0.8),
        ({"what": "", "who": "", "day": "", "time": ""}, 0.2),
    ],
)
def test_a_field_is_a_fifth_and_a_time_has_parts(changes: dict[str, str], expected: float) -> None:
    assert reward(json.dumps(WANTED | changes)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tea with Quinn",
        json.dumps([WANTED]),
        json.dumps(WANTED) + " That is it.",
        json.dumps(WANTED | {"more": "x"}),
        json.dumps({"what": "tea"}),
        json.dumps(WANTED | {"time": 1745}),
        '{"what": "tea", ' + json.dumps(WANTED)[1:],  # a key twice
        "{" * 300,
        '{"what": {"a": "b"}, "who": "Quinn", "day": "Friday", "time": "5:45 pm"}',
    ],
)
def test_what_is_no_entry_earns_nothing(text: str) -> None:
    assert reward(text) == 0.0


def test_every_row_has_an_answer_that_is_right_and_nothing_held_out_was_seen() -> None:
    train, held_out = TASK.train_rows(42), TASK.eval_rows()
    assert (len(train), len(held_out)) == (2_000, 200)
    for row in train[:200] + held_out:
        assert TASK.is_correct(row["answer"], row)
        clock, half = json.loads(row["answer"])["time"].split(" ")
        hour, minute = map(int, clock.split(":"))
        assert 7 <= hour % 12 + 12 * (half == "pm") <= 21
        assert minute in {0, 15, 30, 45}
    for field in ("what", "who"):
        seen, asked = ({json.loads(row["answer"])[field] for row in rows} for rows in (train, held_out))
        assert not seen & asked

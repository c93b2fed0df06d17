"""A table as a task: types of fields, prompts, rewards, what is held out, and tables that cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError, DataError
from covey.tasks import Fields, get_task
from covey.tasks.fields import fields, right_fields
from fakes import raises

KINDS = ("delivery", "billing", "other")
MAILS = [
    {
        "mail": f" My {word} parcel, {'urgent' if n % 2 else 'no hurry'}, {KINDS[n % 3]}. ",
        "category": KINDS[n % 3],
        "urgent": ("Yes", "no")[n % 2],
        "order": "" if n % 5 == 0 else f"00{n}",
        "price": f"{n}.5",
    }
    for n, word in enumerate(f"{a}{b}" for a in "abcdefgh" for b in "aeiou")
]


@pytest.mark.parametrize(
    ("cells", "wanted", "values"),
    [
        (["yes", "No", "TRUE", "false"], "boolean", [True, False, True, False]),
        ([True, False, None, "no"], "boolean or null", [True, False, None, False]),
        (["yes", "no", "maybe"], "string", ["yes", "no", "maybe"]),
        (["7311", "-2", "0", "1.25"], "number", [7311, -2, 0, 1.25]),
        ([3, 4.5, "5"], "number", [3, 4.5, 5]),
        (["7311", "  ", "2"], "number or null", [7311, None, 2]),
        (["0042", "7311"], "string", ["0042", "7311"]),
        (["+49", "7311"], "string", ["+49", "7311"]),
        (["12.50", "3"], "string", ["12.50", "3"]),
        (["1234567890123456", "3"], "string", ["1234567890123456", "3"]),
        (["nan", "1e5"], "string", ["nan", "1e5"]),
        ([" Ana ", None, "Bo"], "string or null", ["Ana", None, "Bo"]),
        (["Ana", [1], "Bo"], "string or null", ["Ana", None, "Bo"]),
    ],
)
def test_types_come_from_all_values(cells: list[Any], wanted: str, values: list[Any]) -> None:
    rows = [{"text": f"text {letter}", "field": cell} for letter, cell in zip("abcdefghi", cells, strict=False)]
    task = Fields(rows, rows, examples=0)
    kind = task.schema()["properties"]["field"]["type"]
    assert (kind if isinstance(kind, str) else " or ".join(kind)) == wanted
    assert [json.loads(row["answer"])["field"] for row in task.eval_rows()] == values


def test_the_user_may_set_a_type() -> None:
    cells = (("a", "1.50", "1"), ("b", "02", "2"), ("c", "3", "3"))
    rows = [{"text": letter, "price": price, "n": n} for letter, price, n in cells]
    task = get_task("json:fields=price:number n:string,examples=0", path=rows, eval_path=rows)
    assert json.loads(task.eval_rows()[0]["answer"]) == {"price": 1.5, "n": "1"}
    raises(DataError, "n='x' is no number", Fields([*rows, {"text": "d", "n": "x"}], fields="n:number").train_rows, 0)


def test_the_schema_lists_classes() -> None:
    schema = Fields(MAILS, text="mail").schema()
    assert schema["properties"] == {
        "category": {"type": "string", "enum": ["billing", "delivery", "other"]},
        "urgent": {"type": "boolean"},
        "order": {"type": ["string", "null"]},
        "price": {"type": "number"},
    }
    assert (schema["required"], schema["additionalProperties"]) == ([*schema["properties"]], False)
    assert "enum" not in Fields(MAILS[:14], text="mail").schema()["properties"]["category"]  # not 5 of each


def test_prompts_and_the_split(tmp_path: Path) -> None:
    task = Fields(MAILS, text="mail", fields="urgent order")
    train, held_out = task.train_rows(0), task.eval_rows()
    assert (len(train), len(held_out)) == (31, 7)  # a fifth of 38; two are examples
    first, second = "My ae parcel, no hurry, other.", "My aa parcel, no hurry, delivery."
    (message,) = task.ask(" A text. ")
    assert message["content"].startswith('Turn the mail into JSON with the keys "urgent" and "order". Answer with the')
    examples = [part.split("\nJSON: ") for part in message["content"].split("\n\n")[1:-1]]
    answers = [json.loads(answer) for _, answer in examples]
    assert ({a["urgent"] for a in answers}, None in {a["order"] for a in answers}) == ({True, False}, True)
    assert message["content"].endswith("\n\nMail: A text.\nJSON:")
    shown = {text.removeprefix("Mail: ") for text, _ in examples}
    sides = [shown, {row["question"] for row in train}, {row["question"] for row in held_out}]
    assert len(set.union(*sides)) == sum(map(len, sides)) == len(MAILS), (first, second)
    assert all(row["prompt"] == task.ask(row["question"]) for row in train + held_out)
    assert Fields(MAILS[::-1], text="mail", fields="urgent, order").ask("A") == task.ask("A")  # of any order of rows
    file = tmp_path / "mails.jsonl"
    file.write_text("".join(map("{}\n".format, map(json.dumps, MAILS))))
    assert get_task("json:text=mail,fields=urgent order", path=str(file)).train_rows(0) == train
    one = get_task("json:text=mail,fields=price,examples=0,instruction=Find the price.", path=MAILS).ask("A")
    assert one[0]["content"] == "Find the price.\n\nMail: A\nJSON:"
    assert 'with the key "price".' in Fields(MAILS, fields="price").ask("A")[0]["content"]


def test_equal_texts_and_families_stay_on_one_side() -> None:
    families = [row | {"family": row["mail"][3:5], "mail": f"{n} {row['mail']}"} for n, row in enumerate(MAILS)]
    for rows in (MAILS * 2, families):
        task = Fields(rows, text="mail", num_eval=10)
        name = "family" if "family" in rows[0] else "question"
        sides = [{row[name] for row in part} for part in (task.train_rows(0), task.eval_rows())]
        assert not sides[0] & sides[1]
        assert len(task.eval_rows()) == 10


def test_a_held_out_file_has_the_types_of_the_training_file() -> None:
    other = [{"mail": "Another", "urgent": "YES", "category": "new", "price": "2.50", "uid": "m7"}]
    task = Fields(MAILS, other, text="mail")
    (row,) = task.eval_rows()
    assert json.loads(row["answer"]) == {"category": "new", "urgent": True, "order": None, "price": 2.5}
    assert (row["uid"], len(task.train_rows(0))) == ("m7", 38)
    raises(DataError, "urgent='maybe' is no boolean", Fields(MAILS, [other[0] | {"urgent": "maybe"}]).eval_rows)
    raises(DataError, "is the question of", Fields(MAILS, MAILS[5:9], text="mail").train_rows, 0)


ANSWER = '{"name": "Ana", "urgent": true, "n": 12, "order": null}'


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (ANSWER, 1.0),
        (' {"order":null,"n":12.0,"urgent":true,"name":"Ana"}\n', 1.0),
        ('{"name": " Ana", "urgent": true, "n": 12, "order": null}', 0.8),
        ('{"name": "Ana", "urgent": 1, "n": "12", "order": ""}', 0.4),
        ('{"name": null, "urgent": false, "n": true, "order": "x"}', 0.2),
        ('{"name": "Ana", "urgent": true, "n": 12}', 0.0),
        (ANSWER[:-1] + ', "more": 1}', 0.0),
        (f"[{ANSWER}]", 0.0),
        (f"```json\n{ANSWER}\n```", 0.0),
        (ANSWER + ANSWER, 0.0),
        (ANSWER[:-1], 0.0),
        ("null", 0.0),
        ("", 0.0),
        ('{"name": ' * 5000, 0.0),
    ],
)
def test_the_reward_and_what_is_right(text: str, reward: float) -> None:
    row, task = {"answer": ANSWER}, Fields(MAILS)
    said: dict[str, float] = {}
    chat = [[{"role": "assistant", "content": text}]]
    assert task.reward_funcs == [fields]
    assert fields(chat, [ANSWER], log_metric=said.__setitem__) == pytest.approx([reward], abs=1e-12)
    assert (task.is_correct(text, row), task.has_answer(text, row)) == (reward == 1.0, reward > 0)
    assert {name: bool(share) for name, share in said.items()} == {
        f"fields/{name}": right_fields(text, ANSWER).get(name, False) for name in json.loads(ANSWER)
    }


def test_completions_are_as_long_as_answers_need() -> None:
    for letter, tokens in (("D", 34), ("é", 74)):
        rows = [{"text": word, "name": word} for word in ("Ana", "Bo", "Cy", letter * 40)]
        assert Fields(rows, text="text", examples=0).max_completion_length == tokens


def test_tables_that_cannot_work(tmp_path: Path) -> None:
    semicolons = tmp_path / "excel.csv"
    semicolons.write_text("mail;name\nhello;Ana\n")
    for task, message in (
        (Fields(), "no table; set data.dataset"),
        (Fields(str(semicolons)), "columns are separated by ';'; save it with commas"),
        (Fields(MAILS, text="mails"), r"no column 'mails' with text or numbers \(columns: mail, category, urgent"),
        (Fields(MAILS, fields="name"), "no column 'name'"),
        (Fields(MAILS, text="mail", fields="mail urgent"), "'mail' is the text and a field"),
        (Fields([{"id": 1, "mail": "a"}, {"id": 2, "mail": "b"}]), r"no fields \(columns: id, mail\)"),
        (Fields([row | {"shop": "Oslo"} for row in MAILS]), "shop has one value in all rows, so there is nothing to"),
        (Fields([*MAILS, MAILS[0] | {"mail": "  "}]), "row 40 has no text in 'mail'; write it, or remove the row"),
        (Fields(MAILS[:3]), "examples=2: 1 of 3 rows are left; lower it, or give more rows"),
        (Fields(MAILS[:5], num_eval=3), "all 3 questions are held out; lower num_eval=3"),
    ):
        raises(DataError, message, task.train_rows, 0)
    raises(ConfigError, "num_eval=0", Fields, MAILS, num_eval=0)
    raises(ConfigError, "examples=-1", get_task, "json:examples=-1")

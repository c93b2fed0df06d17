"""A table as a task: text goes in, and JSON with the values of the other columns, its fields, comes out.

A field's type is found from all its values in the training file, where an empty one is null: boolean (yes, no, true,
false), number (written as JSON writes it: not 0042, +1 or 12.50), else string.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError
from covey.rewards.extract import completion_text, read_json
from covey.tasks.base import FileTask, as_prompt, problems_of, question_hash
from covey.tasks.dataset import Row, load_rows

log = logging.getLogger(__name__)
_TYPES = ("boolean", "number", "string")
_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def field_value(cell: str, kind: str, given: bool = False) -> Any:
    """A cell as a value of a type, or None: it is not of this type. `given`: 12.50 and 0042 are numbers too."""
    if kind != "number":
        return cell if kind == "string" else _WORDS.get(cell.lower())
    found = re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,9})?", cell)
    number = None if found is None else float(cell) if found[1] else int(cell)
    return number if given or json.dumps(number) == cell else None


def right_fields(text: str, answer: str) -> dict[str, bool]:
    """Which fields of an answer a completion has right; empty where it is no JSON object with exactly these keys."""
    try:
        found, wanted = read_json(text), json.loads(answer)
    except ValueError:
        return {}
    if not isinstance(found, dict) or set(found) != set(wanted):
        return {}
    return {k: found[k] == wanted[k] and isinstance(found[k], bool) == isinstance(wanted[k], bool) for k in wanted}


def fields(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """0 for what is no JSON object with exactly the keys of the answer, else 0.2 + 0.8 x the share of right fields.

    A string must equal that of the file without the white space around it; numbers are compared by value. The metric
    `fields/NAME` is the share of completions that have this field right.
    """
    found = [right_fields(completion_text(c), a) for c, a in zip(completions, answer, strict=True)]
    for name in json.loads(answer[0]) if answer and "log_metric" in columns else ():
        columns["log_metric"](f"fields/{name}", sum(right.get(name, False) for right in found) / len(found))
    return [0.2 + 0.8 * (sum(right.values()) / len(right)) if right else 0.0 for right in found]


@dataclass(eq=False, repr=False)
class Fields(FileTask):
    """Text to JSON: `{"prompt": [...], "question": "Hi, ...", "answer": '{"name": "Ana"}', "uid": ...}`.

    Args:
        path: a source for `load_rows`. Rows with the same `family`, if there is such a column, are on one side.
        eval_path: held-out rows; None = hold out `num_eval` rows of `path`, those with the lowest hash of the text.
        num_eval: number of held-out rows; None = all of `eval_path`, or 50 (a fifth of less than 250) of `path`.
        text: column with the text; None = the first one that is no field.
        fields: columns, separated by blanks or commas; `order:string` sets the type. None = all but uid, id, family.
        examples: number of rows that each prompt shows; they are neither trained on nor held out.
        instruction: what begins the prompt; None = `Turn the {text} into JSON with the keys ...`.

    Raises `ConfigError`: a number out of range.
    """

    name: ClassVar[str] = "json"
    reward_funcs = [fields]  # noqa: RUF012
    path: Any = None
    eval_path: Any = None
    num_eval: int | None = None
    text: str | None = None
    fields: str | None = None
    examples: int = 2
    instruction: str | None = None

    def __post_init__(self) -> None:
        if (self.num_eval is not None and self.num_eval < 1) or self.examples < 0:
            raise ConfigError(f"num_eval={self.num_eval}, examples={self.examples}: at least 1, at least 0")

    @property
    def max_completion_length(self) -> int:  # type: ignore[override]
        """8 tokens, and one for two characters of the longest answer, or for one byte where they are not ASCII."""
        return max(len(a) // 2 + len(a.encode()) - len(a) + 8 for a in (row["answer"] for row in self._problems))

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if all fields are right."""
        return all((right_fields(text, row["answer"]) or {"": False}).values())

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True for a JSON object with exactly these keys."""
        return bool(right_fields(text, row["answer"]))

    def eval_rows(self) -> list[Row]:
        """The held-out rows: in the order of their own file, else those of a family apart from each other."""
        rows = super().eval_rows()
        for name, kind in self._columns[1].items():
            held = Counter(json.loads(row["answer"])[name] for row in rows)
            classes = kind.get("enum") or [True, False] * ("boolean" in kind["type"])
            if classes:
                counts = ", ".join(f"{json.dumps(each, ensure_ascii=False)} {held[each]}" for each in classes)
                log.info("held-out rows by %s: %s", name, counts)
        return rows if self.eval_path is not None else sorted(rows, key=lambda row: question_hash(row["question"]))

    def ask(self, text: str) -> list[dict[str, str]]:
        """The prompt for a text: instruction, examples, the text."""
        label, keys = self._columns[0].replace("_", " "), [f'"{name}"' for name in self._columns[1]]
        listed = f"keys {', '.join(keys[:-1])} and {keys[-1]}" if keys[1:] else f"key {keys[0]}"
        told = self.instruction or f"Turn the {label} into JSON with the {listed}. Answer with the JSON only."
        pairs = [*self._shown.items(), (text.strip(), "")]
        return as_prompt("\n\n".join([told, *(f"{label.capitalize()}: {q}\nJSON: {a}".strip() for q, a in pairs)]))

    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer. A string of at most 12 values with 5 rows each is one of them."""
        kinds = self._columns[1]
        return {"type": "object", "properties": kinds, "required": [*kinds], "additionalProperties": False}

    def read(self, source: Any, split: str) -> list[Row]:
        """The rows of a source without those that are the examples' problems, with the training file's types."""
        text, kinds = self._columns
        rows: list[Row] = []
        for index, cells in enumerate(self._table if split == "train" else _cells(source, split)):
            if text not in cells:
                raise DataError(f"data.task='json': row {index} has no text in {text!r}; write it, or remove the row")
            rows.append({"question": cells[text], "answer": self._answer(cells)})
            rows[-1]["uid"] = cells.get("uid", cells.get("id", f"row {index}"))
            rows[-1] |= {"family": cells["family"]} if "family" in cells and "family" not in kinds else {}
        named = list(zip(problems_of(rows), rows, strict=True))
        shown = {problem for problem, row in named if row["question"] in self._shown}
        rows = [row for problem, row in named if problem not in shown]
        if len(named) - len(rows) > len(shown):
            log.info("left out: %d rows that are alike to the examples", len(named) - len(rows))
        if split == "train" and len(rows) < 2:
            left = f"examples={self.examples}: {len(rows)} of {len(named)} rows are left; lower it, or give more rows"
            raise DataError(f"data.task='json': {left}")
        if self.num_eval is None and self.eval_path is None:
            self.num_eval = max(1, min(50, len(rows) // 5))
        return [row | {"prompt": self.ask(row["question"])} for row in rows]

    def _answer(self, cells: Mapping[str, str]) -> str:
        values = {}
        for name, kind in self._columns[1].items():
            cell, wanted = cells.get(name), next(iter(t for t in _TYPES if t in kind["type"]))
            values[name] = None if cell is None else field_value(cell, wanted, given=True)
            if cell is not None and values[name] is None:
                raise DataError(
                    f"data.task='json': {name}={cell!r:.80} is no {wanted} as the other values are; correct it"
                )
        return json.dumps(values, ensure_ascii=False)

    @cached_property
    def _table(self) -> list[dict[str, str]]:
        if self.path is None:
            raise DataError("data.task='json': no table; set data.dataset to a CSV or JSONL file, in Python path=ROWS")
        return _cells(self.path, "train")

    @cached_property
    def _columns(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """The column of the text, and the JSON schema of each field."""
        columns = list(dict.fromkeys(name for cells in self._table for name in cells))
        given, named = dict[str, str](), str(self.fields or "")
        for word in filter(None, map(str.strip, named.split("," if "," in named else None))):
            name, _, kind = word.rpartition(":")
            given |= {name: kind} if kind in _TYPES and word not in columns else {word: ""}
        others = [name for name in columns if name not in {"uid", "id", "family", *given}]
        text = str(self.text or next(iter(others), "text"))
        given = given or {name: "" for name in others if name != text}
        problems = [f"no column {name!r} with text or numbers" for name in (text, *given) if name not in columns]
        problems += [f"{text!r} is the text and a field"] * (text in given) + ["no fields"] * (not given)
        kinds = {} if problems else {name: self._kind(name, kind) for name, kind in given.items()}
        same = [name for name, kind in kinds.items() if not kind]
        problems += [f"{name} has one value in all rows, so there is nothing to learn: leave it out" for name in same]
        if problems:
            told = f"(columns: {', '.join(columns) or 'none'}); name the columns in text=... and fields=..."
            raise DataError(f"data.task='json': {problems[0]} {told}")
        log.info("%s -> %s", text, json.dumps(kinds, ensure_ascii=False))
        return text, kinds

    def _kind(self, name: str, given: str) -> dict[str, Any]:
        """The JSON schema of a field; empty where all its values are the same."""
        held, null = (
            [cells[name] for cells in self._table if name in cells],
            [None] * any(name not in c for c in self._table),
        )
        fits = (kind for kind in _TYPES if all(field_value(cell, kind) is not None for cell in held))
        kind = given or next(fits)
        rows = Counter(field_value(cell, kind, given=True) for cell in held)
        few = kind == "string" and not given and len(rows) <= 12 and min(rows.values()) >= 5
        schema = {"type": [kind, "null"] if null else kind} | ({"enum": [*sorted(rows), *null]} if few else {})
        return schema if len(rows) + len(null) > 1 else {}

    @cached_property
    def _shown(self) -> dict[str, str]:
        """Text and answer of the examples: in turn the most new values, where nulls count most; then the shortest."""
        text = self._columns[0]
        answers = {cells[text]: self._answer(cells) for cells in self._table if text in cells}
        values = {text: set(json.loads(answer).items()) for text, answer in answers.items()}
        counts = Counter(pair for pairs in values.values() for pair in pairs)
        left, chosen, seen = sorted(answers, key=lambda text: (len(text), text)), list[str](), set[Any]()
        while left and len(chosen) < self.examples:
            new = {text: sum(1 + (counts[p] > 1) + (p[1] is None) for p in values[text] - seen) for text in left}
            chosen.append(max(left, key=new.__getitem__))
            left.remove(chosen[-1])
            seen |= values[chosen[-1]]
        chosen.sort(key=lambda text: sum(value is None for _, value in values[text]))  # what stands last is copied most
        return {text: answers[text] for text in chosen}


def _cells(source: Any, split: str) -> list[dict[str, str]]:
    """Rows as text without white space around it; without cells that are empty, lists or objects."""
    left_out = (type(None), list, dict)
    rows = [
        {n: str(v).strip() for n, v in row.items() if not isinstance(v, left_out)}
        for row in load_rows(source, split=split)
    ]
    return [{name: cell for name, cell in row.items() if cell} for row in rows]

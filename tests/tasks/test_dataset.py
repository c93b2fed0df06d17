"""Datasets of every shape, and everything that can be wrong with one."""

import csv
import gzip
import json
import math
import sys
import tempfile
import types
from collections import UserList
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tiny_models import tiny_tokenizer

from covey.errors import DataError
from covey.tasks import DataOrder, build_prompts, load_rows
from covey.tasks.dataset import split_rows
from fakes import FakeTokenizer, raises

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
CHAT = [{"role": "user", "content": "hi"}]


class FakeDataset(UserList):
    """What matters of a Hugging Face `Dataset`: a length, and rows when iterated over."""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_objects() -> None:
    assert load_rows(ROWS) == load_rows(FakeDataset(ROWS)) == ROWS
    splits = {"train": FakeDataset(ROWS), "test": ROWS[:1]}
    assert (load_rows(splits), load_rows(splits, split="test")) == (ROWS, ROWS[:1])
    assert load_rows(ROWS)[0] is not ROWS[0]  # the user's rows stay the user's


def test_files(tmp_path: Path) -> None:
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    assert load_rows(write(tmp_path / "a.jsonl", lines)) == ROWS
    assert load_rows(str(write(tmp_path / "bom.jsonl", "\ufeff" + lines))) == ROWS
    assert load_rows(write(tmp_path / "a.json", json.dumps(ROWS, indent=1))) == ROWS
    assert load_rows(write(tmp_path / "lines.json", lines)) == ROWS
    assert load_rows(write(tmp_path / "a.csv", "prompt,answer\r\n1+1=,2\r\n2+3=,5\r\n")) == ROWS
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert load_rows(tmp_path / "a.jsonl.gz") == ROWS
    for rows in (ROWS, [{"prompt": CHAT}]):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        assert load_rows(tmp_path / "a.parquet") == rows


class FakeFrame:
    """What matters of a DataFrame of pandas, where a missing value is NaN and iteration gives column names."""

    iloc = columns = property(list)

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def astype(self, kind: type) -> "FakeFrame":
        assert kind is object
        return self

    def notna(self) -> list[dict[str, bool]]:
        return [{name: value == value for name, value in row.items()} for row in self.rows]

    def where(self, keep: list[dict[str, bool]], other: None) -> "FakeFrame":
        pairs = zip(self.rows, keep, strict=True)
        return FakeFrame([{name: value if kept[name] else other for name, value in row.items()} for row, kept in pairs])

    def to_dict(self, orient: str) -> Any:
        assert orient == "records"
        return self.rows


def test_tables_in_memory() -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": None}]
    assert load_rows(FakeFrame([rows[0], rows[1] | {"answer": math.nan}])) == rows
    assert load_rows({"train": FakeFrame(rows)}) == load_rows(pyarrow.Table.from_pylist(rows)) == rows


@given(st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=30), st.floats(0.01, 0.6), st.randoms())
def test_what_is_held_out_depends_on_the_prompts_alone(texts: list[str], fraction: float, random: Any) -> None:
    distinct = len(set(texts))
    assume(max(round(fraction * distinct), 1) < distinct)
    rows = [{"prompt": [{"role": "user", "content": text}], "id": n} for n, text in enumerate(texts)]
    train, held = split_rows(rows, fraction, "prompt")
    assert len({str(row["prompt"]) for row in held}) == max(round(fraction * distinct), 1)
    assert sorted([*train, *held], key=itemgetter("id")) == rows
    assert [row["id"] for row in train] == sorted(row["id"] for row in train)  # in their order
    again = split_rows(random.sample(rows, len(rows)), fraction, "prompt")
    for before, after in zip((train, held), again, strict=True):  # no prompt is in both parts, whatever the order
        assert {row["id"] for row in after} == {row["id"] for row in before}


def test_a_split_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"data\.eval_fraction=0\.9: 2 of 2 distinct prompts would be held out"):
        split_rows(ROWS, 0.9, "prompt")
    raises(DataError, "has no column 'mail'", split_rows, ROWS, 0.1, "mail")


def test_sources_that_are_none() -> None:
    for source, message in (
        ([], "dataset: no rows"),
        (FakeDataset([]), "FakeDataset: no rows"),
        ([{"prompt": "a"}, "b"], "row 1 is 'b', not an object"),
        ([{"prompt": "a"}, {"prompt": "b", 0: "c"}], "row 1 has a column 0; rename it"),
        (FakeFrame([["prompt", "answer", "prompt"]]), "has the column 'prompt' twice"),
        ([["a"]], "row 0 is \\['a'\\], not an object"),
        (None, "a NoneType is not a list of rows"),
        (3, "a int is not a list of rows"),
        (iter(ROWS), "is not a list of rows.*of a stream, a finite part"),
        ({"prompt": ["a"]}, "keys 'prompt' has no split 'train'"),
        ("no such/thing at all", "no such file, and no dataset id"),
    ):
        raises(DataError, message, load_rows, source)


SEMICOLONS = "a.csv: its columns are separated by ';'; save it with commas"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.jsonl", b"", "a.jsonl: no rows"),
        ("a.json", b" \n", "a.json: no rows"),
        ("a.json", b"[]", "a.json: no rows"),
        ("a.csv", b"prompt,answer\n", "a.csv: no rows"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": }\n', "line 3: not valid JSON .*'{\"prompt\": }'"),
        ("a.jsonl", b'{"prompt": "a"}\n[1]\n', "row 1 is \\[1\\], not an object"),
        ("a.json", b'[{"prompt": "a"', "a.json: not valid JSON"),
        ("a.jsonl", b'{"prompt": "\xff"}', "not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "line 1: nested too deeply|not valid JSON"),
        ("a.jsonl", b'{"prompt": ' + b"9" * 5_000 + b"}", "line 1: not valid JSON"),
        ("a.jsonl.gz", b"this is no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}' * 100, mtime=0)[:-20], "cannot be read"),
        ("a.csv", b"prompt,answer\n1,2,3\n", "line 2: not as many fields"),
        ("a.csv", b"prompt,answer\n1\n", "line 2: not as many fields"),
        ("a.csv", b"prompt;answer\nHello, you;1\n", SEMICOLONS),
        ("a.csv", b"prompt\tanswer\n1\t2\n", r"separated by '.t'"),
        ("a.csv", b'\xef\xbb\xbf"prompt";"n"\n"Count 1:";"1"\n', SEMICOLONS),
        ("a.csv", b'prompt,answer\n1,2\n"1,2\n3,4\n', "line 2: a quote in the row after this one is never closed"),
        ("a.parquet", b"this is no parquet", "not a readable parquet file"),
        ("a.txt", b"text", "no known format"),
    ):
        (tmp_path / name).write_bytes(content)
        raises(DataError, message, load_rows, tmp_path / name)


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"):
        raises(DataError, "no such file; check the path", load_rows, tmp_path / name)
    (tmp_path / "a.jsonl").mkdir()
    for path in (tmp_path, tmp_path / "a.jsonl"):
        raises(DataError, "a folder; give a file", load_rows, path)


def test_a_hub_id_with_and_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, configuration: str | None, split: str) -> FakeDataset:
        if name == "owner/gone":
            raise ConnectionError("offline")
        return FakeDataset([{"prompt": f"{name} {configuration} {split}"}])

    monkeypatch.setitem(sys.modules, "datasets", None)
    raises(DataError, "pip install 'covey\\[datasets\\]'", load_rows, "owner/name")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_rows("owner/name:main", split="test") == [{"prompt": "owner/name main test"}]
    assert load_rows("squad") == [{"prompt": "squad None train"}]
    raises(DataError, "'train' cannot be loaded \\(ConnectionError: offline\\)", load_rows, "owner/gone")


ENDS_NO_ROW = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e"
FIELDS = st.text(alphabet=ENDS_NO_ROW + "\r\n,\";'\t ab\ufeff\u00e9", max_size=8)


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=4))
def test_what_csv_and_json_write_is_read_back_equal(fields: list[tuple[str, str]]) -> None:
    rows = [{"prompt": one, "answer": other} for one, other in fields]
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "a.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("prompt", "answer"), *fields])
        write(Path(folder) / "a.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write(Path(folder) / "a.json", json.dumps(rows, ensure_ascii=False))
        for name in ("a.csv", "a.jsonl", "a.json"):
            assert load_rows(Path(folder) / name) == rows


def test_only_what_ends_a_line_ends_a_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b\u0085c"}]
    assert load_rows(write(tmp_path / "a.jsonl", json.dumps(rows[0], ensure_ascii=False) + "\r\n")) == rows
    for character in ENDS_NO_ROW:
        path = write(tmp_path / "a.csv", f"prompt\r\nthe top{character}the rest\r\n")
        assert load_rows(path) == [{"prompt": f"the top{character}the rest"}]
    path = write(tmp_path / "a.csv", "prompt,answer\r1,2\r3,4\r")
    assert load_rows(path) == [{"prompt": "1", "answer": "2"}, {"prompt": "3", "answer": "4"}]
    long = "a" * 200_000
    assert load_rows(write(tmp_path / "a.csv", f"prompt,answer\n{long},1\n")) == [{"prompt": long, "answer": "1"}]


def texts_of(rows: list[dict[str, Any]], tokenizer: Any = None, **settings: Any) -> list[str]:
    tokenizer = tokenizer or FakeTokenizer()
    return [tokenizer.decode(prompt.token_ids) for prompt in build_prompts(rows, tokenizer, **settings)]


def refused(words: str, rows: list[dict[str, Any]], tokenizer: Any = None, **settings: Any) -> str:
    with pytest.raises(DataError, match=words) as caught:
        build_prompts(rows, tokenizer or FakeTokenizer(), **settings)
    return str(caught.value)


def test_plain_prompts_are_tokenised_as_they_are() -> None:
    assert texts_of(ROWS) == ["1+1=", "2+3="]
    prompts = build_prompts(ROWS, FakeTokenizer())
    assert [(prompt.content, prompt.uid) for prompt in prompts] == [("1+1=", "0"), ("2+3=", "1")]
    assert (prompts[1].columns, prompts[0].token_ids.dtype) == ({"answer": "5"}, np.int64)
    for ids, uids in (((7, 9), ["7", "9"]), ((7, 7), ["0", "1"])):  # names of rows
        rows = [{"prompt": "a", "id": number} for number in ids]
        assert [prompt.uid for prompt in build_prompts(rows, FakeTokenizer())] == uids


def test_conversations_go_through_the_template() -> None:
    for returns in ("encoding", "list", "batch"):
        assert texts_of([{"prompt": CHAT}], FakeTokenizer(returns=returns)) == ["<user>hi<assistant>"]
    thinking = texts_of([{"prompt": CHAT}], chat_template_kwargs={"enable_thinking": True})
    assert thinking == ["<user>hi<assistant><think>"]
    (prompt,) = build_prompts([{"prompt": CHAT}], FakeTokenizer())
    assert prompt.content == CHAT
    words = "row 0: the prompt is a conversation, but this tokenizer has no chat"
    refused(words, [{"prompt": CHAT}], FakeTokenizer(has_template=False))


def test_system_prompt() -> None:
    rows = [{"prompt": CHAT}, {"prompt": [{"role": "system", "content": "mine"}, *CHAT]}, {"prompt": "hi"}]
    said = [f"<system>{whose}<user>hi<assistant>" for whose in ("yours", "mine", "yours")]
    assert texts_of(rows, system_prompt="yours") == said
    prompts = build_prompts(rows, FakeTokenizer(), system_prompt="yours")
    assert prompts[2].content == [{"role": "system", "content": "yours"}, *CHAT]
    assert CHAT == [{"role": "user", "content": "hi"}]
    words = "row 0: system_prompt is set, but this tokenizer has no chat template"
    refused(words, ROWS, FakeTokenizer(has_template=False), system_prompt="yours")


def test_a_real_tokenizer() -> None:
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts_of([{"prompt": "hi there"}, {"prompt": CHAT}], tiny_tokenizer()) == ["hi there", chat]


def test_prompts_that_are_none() -> None:
    for rows, message in (
        ([{"prompts": "a"}], "row 0 has no column 'prompt' .*columns: prompts.*prompt_column='prompts'"),
        ([{"question": "a", "answer": "b"}], "columns: question, answer.*prompt_column='question'"),
        ([{"prompt": "a"}, {"text": "b"}], "row 1 has no column 'prompt'"),
        ([{"zzz": 1}], "columns: zzz\\); set data.prompt_column"),
        ([{}], "columns: none"),
        ([{"prompt": 3}], "row 0: the prompt is 3; it must be text"),
        ([{"prompt": None}], "the prompt is None"),
        ([{"prompt": []}], "the prompt is \\[\\]"),
        ([{"prompt": {"role": "user", "content": "a"}}], "it must be text, or a list"),
        ([{"prompt": ["hi"]}], "message 0 of the prompt is 'hi'"),
        ([{"prompt": [{"role": "user"}]}], "message 0 of the prompt is {'role': 'user'}"),
        ([{"prompt": [*CHAT, {"role": 1, "content": "a"}]}], "message 1 of the prompt has role=1"),
        ([{"prompt": [{"role": "user", "content": None}]}], "content=None; it must be text"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            "places for 1 pictures, column .images. holds 0",
        ),
        *(([{"prompt": blank}], "row 0: the prompt is empty") for blank in ("", " \n")),
        ([{"prompt": "x" * 500, "a": 1}, {"prompt": 5}], "row 1: the prompt is 5"),
    ):
        refused(message, rows)


def test_what_the_tokenizer_refuses_is_named() -> None:
    class Refuses(FakeTokenizer):
        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            text.encode()
            return super().__call__(text)

    words = r"row 1: the prompt .* cannot be tokenised \(UnicodeEncodeError"
    refused(words, [{"prompt": "fine"}, {"prompt": "\ud800"}], Refuses())


def test_a_prompt_is_never_cut() -> None:
    rows = [{"prompt": "x" * length} for length in (3, 9, 5, 7)]
    said = refused(r"row 1: the prompt has 9 tokens, more than data.max_prompt_length=6", rows, max_prompt_length=6)
    assert "2 of 4 rows are too long, the longest has 9" in said
    refused(r"context of 10 less 3 for the completion .*1 of 4 rows", rows, context_length=10, max_completion_length=3)
    refused("row 0 \\(id q\\): the prompt has 4 tokens", [{"prompt": "abcd", "uid": "q"}], max_prompt_length=3)
    assert len(texts_of(rows, max_prompt_length=9)) == len(texts_of(rows, context_length=10)) == 4


def test_without_shuffling_rows_come_in_order_for_ever() -> None:
    order = DataOrder(3, seed=0, shuffle=False)
    assert (order.take(0, 7), order.take(5, 2), order.take(4, 0)) == ([0, 1, 2, 0, 1, 2, 0], [2, 0], [])
    raises(DataError, "n=0", DataOrder, 0, seed=0)
    raises(ValueError, "position=-1", DataOrder(1, seed=0).take, -1, 1)


@given(st.integers(1, 30), st.integers(-(2**70), 2**70), st.integers(0, 1_000), st.integers(0, 70))
def test_the_order_is_a_pure_function_of_seed_and_position(n: int, seed: int, position: int, k: int) -> None:
    at_once = DataOrder(n, seed).take(0, position + k)
    assert DataOrder(n, seed).take(position, k) == at_once[position:]
    for epoch in range((position + k) // n):
        assert sorted(at_once[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_differ_and_each_row_is_equally_likely_to_come_first() -> None:
    first = DataOrder(50, seed=1)
    assert first.take(0, 50) not in (first.take(50, 50), DataOrder(50, seed=2).take(0, 50), list(range(50)))
    # Pinned: another order after an upgrade would silently change what a resumed run trains on.
    assert DataOrder(8, seed=42).take(0, 16) == [7, 1, 6, 4, 3, 5, 0, 2, 4, 5, 3, 0, 2, 7, 1, 6]
    firsts = [DataOrder(4, seed).take(0, 1)[0] for seed in range(2_000)]
    assert np.bincount(firsts, minlength=4).min() > 430  # 500 expected, standard deviation 19


class Jinja(FakeTokenizer):
    """Renders a template as transformers does, one token for each character."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.chat_template = template

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **kwargs: Any) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        text = environment.from_string(self.chat_template).render(messages=messages, **kwargs)
        return [ord(character) for character in text] if tokenize else text


EACH = "{{% for m in messages %}}<{{{{ m.role }}}}>{}{{% endfor %}}<assistant>"
HOW = ("", " | trim", " | tojson", " | e", " | upper", " | wordwrap(8)", " | replace('<b>', '')")
KEEPS = ["{{ m.content" + how + " }}" for how in HOW]
KEEPS += ["{{ m['content'].split() | join(' ') }}", "> {{ m.content | replace('\n', '\n> ') }}"]
SYSTEM_ALONE = "{% if m.role == 'system' %}{{ m.content }}{% endif %}"
DROPS = ["", "{{ m.text }}", "{{ m.content[:5] }}", "{{ m.content[-7:] }}", SYSTEM_ALONE, "a"]
TALK = [{"role": "system", "content": "Be\n brief."}, {"role": "user", "content": "a <b>\n\tis \u00e9 & 'c'  "}]


@pytest.mark.parametrize("inner", KEEPS)
def test_a_template_that_renders_what_is_said_is_taken(inner: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": " parts"}]}]
    more = [*TALK, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "a"}]
    for talk in (TALK, TALK[1:], more, parts):
        build_prompts([{"prompt": talk}], Jinja(EACH.format(inner)))
    assert not caplog.records


@pytest.mark.parametrize("inner", DROPS)
@pytest.mark.parametrize("text", ["What is 2 + 3?", "a"])
def test_a_template_that_drops_the_users_text_is_refused(inner: str, text: str) -> None:
    template = EACH.format(inner)
    if inner == "{{ m.content[:5] }}" and text == "a":
        template = EACH.format("{{ m.content[:0] }}")
    words = r"row 0: the chat template .* leaves out what the user says"
    said = refused(words, [{"prompt": [{"role": "user", "content": text}]}], Jinja(template))
    assert all(words in said for words in (template[:40], "data.chat_template_kwargs"))


def test_the_row_whose_text_is_dropped_is_named(caplog: pytest.LogCaptureFixture) -> None:
    talk = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "hm"}, *CHAT]
    last = Jinja("{{ messages[-1].content }}<assistant>")
    refused("row 1: the chat template", [{"prompt": CHAT}, {"prompt": talk}], last)
    # the system message's is told once
    template = EACH.format("{% if m.role == 'user' %}{{ m.content }}{% endif %}")
    build_prompts([{"prompt": TALK}, {"prompt": TALK[1:]}, {"prompt": TALK}], Jinja(template))
    (told,) = caplog.messages
    assert told.startswith("row 0 (and 1 more): the chat template leaves out the system message")


def test_many_rows_are_rendered_again_a_thousand_times_at_most() -> None:
    class Counts(FakeTokenizer):
        again = 0

        def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
            self.again += not kwargs["tokenize"]
            return super().apply_chat_template(messages, **kwargs)

    tokenizer = Counts()
    build_prompts([{"prompt": CHAT}] * 2500, tokenizer)
    assert tokenizer.again == 834  # every third


def test_a_prompt_knows_how_it_ends() -> None:
    thinks = Jinja(EACH.format("{{ m.content }}") + "{{ '<think>\n' }}")
    opened, plain = build_prompts([{"prompt": CHAT}, {"prompt": "2+3=<think>"}], thinks)
    assert (opened.end[-8:], plain.end[-7:]) == ("<think>\n", "<think>")

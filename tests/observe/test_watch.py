"""`covey watch`: what the page is told of a run, while it grows, when it is damaged, and when it is hostile."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from browser.browsing import READER, TOKEN, serving
from command import Command
from covey.observe.run_folder import RunFolder
from covey.watch import export, tables
from covey.watch import run as watching
from covey.watch.run import WatchedRun, follow

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202egnp\ud800"
PAGE = Path(tables.__file__).parent / "page"


class Page:
    """A server that is asked as the page asks it."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def get(self, path: str, token: str | None = TOKEN, **query: Any) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return self.client.get(path, params=query, headers=headers)

    def ask(self, path: str, **query: Any) -> Any:
        answer = self.get(f"/api/{path}", **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refuses(self, path: str, status: int, words: str = "", **query: Any) -> bool:
        answer = self.get(path, **query)
        return answer.status_code == status and words in answer.text


@pytest.fixture
def open_page() -> Iterator[Callable[..., Page]]:
    with ExitStack() as opened:

        def page(*folders: Path) -> Page:
            address = opened.enter_context(serving(*folders))
            return Page(opened.enter_context(httpx.Client(base_url=address, timeout=20)))

        yield page


@pytest.fixture
def finished(trained: list[Path]) -> Path:
    return trained[0]


def test_a_real_run_is_told_as_it_was_recorded_and_its_ledger_adds_up(finished: Path, open_page: Any) -> None:
    page, run = open_page(finished), RunFolder.read(finished)
    (about,) = page.ask("runs")
    assert (about["label"], about["max_steps"], about["versions"]["run_id"]) == ("a", 4, run.run_id)
    found, recorded = page.ask("0/metrics"), run.read_metrics()
    lines = [dict(zip(found["names"], row, strict=True)) for row in found["rows"]]
    assert [line["step"] for line in lines] == [line["step"] for line in recorded]
    rewards = [line["reward"] for line in recorded if "reward" in line]
    assert [line["reward"] for line in lines if line["reward"] is not None] == rewards
    assert found["end"] == run.metrics_path.stat().st_size
    assert page.ask("0/metrics", start=found["end"], mark=found["mark"])["rows"] == []
    assert page.ask("0/questions")["lines"] == [[line["step"], line["answers"]] for line in run.read_answers()]
    assert next(kind for _, kind, _ in page.ask("0/events")["lines"]) == "run"
    there = page.ask("0/tables")
    mark = there.pop("mark")
    samplers: dict[str, Any] = {"samplers": [], "samplers_step": None, "samplers_left": 0}
    assert there == {"step": [1, 2, 3, 4], "eval": [0, 4], "ledger": [2, 4], **samplers}
    assert page.ask("0/tables", mark=mark) == {"mark": mark}
    rows, told = run.read_completions(3), page.ask("0/completions", step=3)
    assert told["completions"] == 8
    flat = [row for group in told["groups"] for row in group["rows"]]
    for name in ("completion", "advantage"):
        assert [row[name] for row in flat] == [row[name] for row in rows]
    assert flat[0]["parts"] == {name: rows[0][f"rewards/{name}"] for name in ("few_letters", "has_a")}
    for group in told["groups"]:
        rewards = [row["reward"] for row in group["rows"]]
        assert group["mean"] == pytest.approx(sum(rewards) / 4)
        assert group["tied"] == (len(set(rewards)) == 1)
        assert group["prompt"][-1]["role"] == "user"

    assert page.ask("0/prompts", step=3) == {group["uid"]: group["prompt"][-1]["content"] for group in told["groups"]}
    pairs = page.ask("0/compare", before=0, after=4, shown="all")
    assert len(pairs["pairs"]) == sum(pairs["counts"].values()) == 4
    assert page.ask("describe", name="reward")["reward"][1].startswith("weighted sum of rewards")
    assert page.ask("0/doctor") == {"said": [], "more": False}  # too few steps for it to say anything
    # and its ledger, token by token, adds up
    completions = page.ask("0/ledger", step=4)["completions"]
    loss = next(line["loss"] for line in recorded if line["step"] == 4 and "loss" in line)
    assert sum(each["loss"] for each in completions) == pytest.approx(loss, abs=1e-6)
    one = completions[0]
    tokens = page.ask(f"0/ledger/{one['row']}", step=4)["tokens"]
    assert (len(tokens), sum(token["loss"] for token in tokens)) == (one["tokens"], pytest.approx(one["loss"]))
    assert "".join(token["token"] for token in tokens).startswith(run.read_completions(4)[one["row"]]["completion"])
    assert page.refuses("/api/0/ledger/999", 404, step=4)


def test_search_and_filters_choose_completions(written: Any, open_page: Any) -> None:
    rows = [
        {"group": 0, "sample": 0, "uid": "a", "prompt": "2+2?", "completion": "Four", "reward": 1.0, "correct": True},
        {"group": 0, "sample": 1, "uid": "a", "prompt": "2+2?", "completion": "five", "reward": 0.0, "correct": False,
         "masked_by": "validity_mask", "finish_reason": "length"},
        {"group": 1, "sample": 0, "uid": "b", "prompt": "3+3?", "completion": "four", "reward": 0.5, "correct": False},
        {"group": 1, "sample": 1, "uid": "b", "prompt": "3+3?", "completion": "eight", "reward": 0.5, "correct": False},
    ]  # fmt: skip
    talk = {"group": 0, "uid": "a", "prompt": [{"role": "user", "content": 'Où "est"\nla gare?'}], "completion": "ici"}
    page = open_page(written(rows, [talk | {"reward": 1.0, "length": 3}]).path)

    def chosen(**query: Any) -> list[str]:
        groups = page.ask("0/completions", step=1, **query)["groups"]
        return [row["completion"] for group in groups for row in group["rows"]]

    assert [chosen(search=text) for text in ("FOUR", "3+3")] == [["Four", "four"], ["four", "eight"]]
    assert (chosen(shown="right"), chosen(shown="wrong", uid="a")) == (["Four"], ["five"])
    assert chosen(shown="masked") == chosen(shown="truncated") == ["five"]
    assert (chosen(shown="tied"), chosen(shown="mixed")) == (["four", "eight"], ["Four", "five"])
    assert page.ask("0/completions", step=1, offset=1)["groups"][0]["uid"] == "b"
    # What a conversation says, not the JSON that it is stored as, in which letters have other names.
    (hit,) = page.ask("0/search", search='OÙ "EST"\nla', reward_from=1, reward_to=1, length_to=3)["hits"]
    assert hit["excerpt"] == 'Où "est"\nla gare?'
    for query in ({"search": "content"}, {"reward_from": 1.1}, {"length_to": 2}):
        assert page.ask("0/search", **query)["hits"] == []


def test_evaluations_are_compared_question_by_question(written: Any, open_page: Any) -> None:
    def rows(*correct: bool | None) -> list[dict[str, Any]]:
        rest = {"sample": 0, "prompt": "?"}
        return [rest | {"group": n, "uid": f"q{n}", "completion": str(r), "correct": r} for n, r in enumerate(correct)]

    before, after = rows(False, True, True, False, None, True), rows(True, False, True, False, None)[::-1]
    page = open_page(written(at_0=before, at_5=after).path)
    found = page.ask("0/compare", before=0, after=5)
    assert found["counts"] == {"gained": 1, "lost": 1, "both": 1, "neither": 1, "unjudged": 1}
    assert {(pair["uid"], pair["what"]) for pair in found["pairs"]} == {("q0", "gained"), ("q1", "lost")}
    gained = page.ask("0/compare", before=0, after=5, shown="gained")["pairs"]
    assert [(pair["before"]["completion"], pair["after"]["completion"]) for pair in gained] == [("False", "True")]


def test_it_follows_a_run_that_grows_and_one_that_resumes(tmp_path: Path, open_page: Any) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        run.append_metrics(1, {"reward": 0.25})
        page = open_page(run.path)
        first = page.ask("0/metrics")
        assert first["rows"] == [[1, 0.25]]
        run.append_metrics(2, {"reward": 0.5})
        with run.metrics_path.open("ab") as file:
            file.write(b'{"step": 3, "rew')  # half a line
        second = page.ask("0/metrics", start=first["end"], mark=first["mark"])
        assert (second["rows"], second["restarted"], second["damaged"]) == ([[2, 0.5]], False, 0)
        with run.metrics_path.open("ab") as file:
            file.write(b'ard": 0.75}\n')
        third = page.ask("0/metrics", start=second["end"], mark=second["mark"])
        assert third["rows"] == [[3, 0.75]]
        run.truncate_after(1)  # a resume repeats steps 2 and 3, and gets further than before
        for step in (2, 3, 4):
            run.append_metrics(step, {"reward": 1.0})
        again = page.ask("0/metrics", start=third["end"], mark=third["mark"])
        assert again["restarted"]
        assert again["rows"] == [[1, 0.25], [2, 1.0], [3, 1.0], [4, 1.0]]


def test_the_doctor_says_since_when_and_whether_it_still_holds(tmp_path: Path, open_page: Any) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        page = open_page(run.path)
        for step in range(1, 9):
            run.append_metrics(step, {"reward": 0.0, "reward_std": 0.0})
        (said,) = page.ask("0/doctor")["said"]
        assert (said["code"], said["step"], said["now"]) == ("reward_never_nonzero", 5, True)
        assert "completions/" in said["fix"]
        for step in range(9, 25):
            run.append_metrics(step, {"reward": 0.1 + 0.01 * step, "reward_std": 0.3, "grad_norm": 1.0})
        (said,) = page.ask("0/doctor")["said"]
        assert not said["now"]


def test_damaged_lines_and_tables_are_left_out_and_said(written: Any, open_page: Any) -> None:
    run = written([{"group": 0, "completion": "x", "reward": 1.0}])
    bad = [b"not json", b"[1]", b'{"step": -1}', b'{"step": 2, "loss": "high"}', b"[" * 10_000, b"\xff\xfe"]
    bad += [b"1" * 5000, b'{"step": 6, "reward": 0.5, "n": ' + b"9" * 400 + b"}"]
    run.metrics_path.write_bytes(b"\n".join([*bad, b'{"step": 7, "loss": null, "reward": 0.5}']) + b"\n")
    run.questions_path.write_bytes(b'{"step": 1, "answers": {"a": [3, 2]}}\n{"step": 1, "answers": {"a": [1, 2]}}\n')
    (run.completions / "step_000002.parquet").write_bytes(b"PAR1 no PAR1")
    (run.completions / "step_x.parquet").write_bytes(b"")
    os.mkfifo(run.completions / "step_000003.parquet")
    page = open_page(run.path)
    found = page.ask("0/metrics")
    assert found["damaged"] == len(bad)
    assert [dict(zip(found["names"], row, strict=True)) for row in found["rows"]] == [{"step": 7, "reward": 0.5}]
    assert (page.ask("0/questions")["lines"], page.ask("0/tables")["step"]) == ([[1, {"a": [1, 2]}]], [1, 2, 3])
    for step, words in ((2, "not a readable Parquet"), (3, "not a regular file"), (9, "step_000009")):
        assert page.refuses("/api/0/completions", 404, words, step=step)
    for query in ({"step": "x"}, {"step": -1}, {"step": 1, "kind": "../../x"}, {"step": 10**30}):
        assert page.refuses("/api/0/completions", 422, **query)
    nowhere = ("/page/../app.py", "/page/..%2fapp.py", "/page/%2fetc%2fpasswd")
    assert all(page.refuses(path, 404) for path in ("/api/1/metrics", "/api/-1/metrics", *nowhere))


def test_settings_and_numbers_that_no_run_writes(tmp_path: Path, open_page: Any) -> None:
    """Settings are shown as text; the doctor bears numbers that no run measures."""
    runs = {
        "x = " + "9" * 5000: "1e299",
        "[model]\nmodel = 0x" + "f" * 9000: "1" + "0" * 400,
        "a." * 20_000 + "b = 1": "-1e308",
        "[schedule]\nmax_steps = nan": "1e308",
    }
    names = ("reward", "kl", "grad_norm", "entropy", "mask_ratio", "frac_reward_zero_std")
    for index, (config, number) in enumerate(runs.items()):
        with RunFolder.create(tmp_path / str(index)) as run:
            run.config_path.write_text(config)
            lines = [f'{{"step": {n}, ' + ", ".join(f'"{name}": {number}' for name in names) + "}\n" for n in range(60)]
            run.metrics_path.write_text("".join(lines))
    page = open_page(*(tmp_path / str(index) for index in range(4)))
    told = [(about["config"], about["model"], about["max_steps"]) for about in page.ask("runs")]
    assert told == [(config, "", None) for config in runs]
    said = [[one["code"] for one in page.ask(f"{index}/doctor")["said"]] for index in range(4)]
    assert said == [["not_finite"], [], ["not_finite"], ["not_finite"]]  # a line of the second is none of a run


def test_a_long_file_comes_in_pieces_and_an_endless_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PIECE", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(300)) + "x" * 5000 + '\n{"step": 300}\n')
    pieces = [follow(path)]
    while pieces[-1].more:
        pieces.append(follow(path, pieces[-1].end, pieces[-1].mark))
    assert [record["step"] for piece in pieces for record in piece.records] == list(range(301))
    ends = [0, *(piece.end for piece in pieces)]
    assert max(end - begin for begin, end in pairwise(ends)) <= 1000
    assert sum(piece.damaged for piece in pieces) > 0
    assert ends[-1] == path.stat().st_size


def test_hostile_completions_are_text_and_long_ones_are_cut(written: Any, open_page: Any) -> None:
    row = {"group": 0, "uid": HOSTILE, "prompt": json.dumps([{"role": "<b>", "content": HOSTILE}])}
    row |= {"completion": HOSTILE + "x" * 2_000_000, "reward": float("nan"), HOSTILE[:-1]: [HOSTILE]}
    run = written([row | {f"rewards/{HOSTILE[:-1]}": 1.0}])
    with RunFolder.open(run.path) as writer:
        writer.append_event("diagnosis", HOSTILE)
    page = open_page(run.path)
    answer = page.get("/api/0/completions", step=1)
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.content) < 30_000
    (told,) = answer.json()["groups"][0]["rows"]
    assert told["completion"].startswith("</script><script>alert(1)</script>")
    assert told["characters"] > 2_000_000 > 4_000 == len(told["completion"])
    assert told["reward"] is None
    assert len(page.ask("0/completion", step=1, row=0)["completion"]) == 500_000
    policy = page.get("/").headers["content-security-policy"]
    assert [words in policy for words in ("default-src 'none'", "script-src 'self';", "unsafe")] == [True, True, False]


def test_the_page_makes_no_html_from_text_and_asks_nobody_else() -> None:
    """What runs in the browser has no way from text to markup, and names no other machine."""
    own = [path for path in PAGE.iterdir() if path.suffix in (".js", ".html", ".css") and "uPlot" not in path.name]
    assert len(own) > 8
    for path in own:
        text = path.read_text()
        markup = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not markup, path
        assert not re.search(r"https?://|(src|href)=\"//", text), path
    index = (PAGE / "index.html").read_text()
    assert all("src=" in script for script in re.findall(r"<script[^>]*>", index))
    assert not re.search(r"\son\w+=|style=", index)
    assert (PAGE / "uPlot.iife.min.js").stat().st_size < 100_000
    assert "MIT License" in (PAGE / "uPlot.LICENSE.txt").read_text()


def test_data_needs_the_token_and_the_page_does_not(finished: Path, open_page: Any) -> None:
    page = open_page(finished)
    for token in (None, "wrong", TOKEN + "x"):
        for path in ("runs", "0/metrics", "0/completions?step=1", "nothing"):
            assert page.refuses(f"/api/{path}", 401, "covey watch", token=token)
    for path in ("/", "/page/main.js", "/page/uPlot.iife.min.js", "/page/style.css"):
        answer = page.get(path, token=None)
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
    assert page.client.post("/api/0/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 405


def test_several_runs_and_a_copy_that_is_deleted(finished: Path, tmp_path: Path, open_page: Any) -> None:
    copy = tmp_path / finished.name
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("checkpoints", "adapter", "best", "run.lock"))
    before = sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*"))
    page = open_page(finished, copy)
    tails = [f"{folder.parent.name}/{folder.name}" for folder in (finished, copy)]
    assert ([each["label"] for each in page.ask("runs")], page.ask("0/metrics")) == (tails, page.ask("1/metrics"))
    page.ask("1/completions", step=1)
    page.ask("1/doctor")
    assert sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*")) == before  # it only reads
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("[run]", '[run]\nrun_name = "named"'))  # a run that began meanwhile
    assert [each["label"] for each in page.ask("runs")] == [finished.name, "named"]
    shutil.rmtree(copy)
    assert [bool(each["versions"]) for each in page.ask("runs")] == [True, False]  # and the other run stays


def test_who_samples_is_told(tmp_path: Path, open_page: Any) -> None:
    sampler = '{"name": "a", "version": 2, "units": 4, "failed": 0, "left": false}'
    cases: dict[str, list[tuple[int, ...]]] = {
        f'{{"step": 3, "samplers": [{sampler}]}}': [(2, 4)],
        '{"samplers": [{"name": {}, "version": null, "units": 1e400}, 5, {"version": true, "units": "9"}]}': [(), ()],
        '{"samplers": 5}': [],
        "[[[[": [],
        "[" * 100_000: [],
    }
    folders = [tmp_path / str(index) for index in range(len(cases))]
    for folder, content in zip(folders, cases, strict=True):
        RunFolder.create(folder).close()
        (folder / "samplers.json").write_text(content)
    page = open_page(*folders)
    for index, told in enumerate(cases.values()):
        found = page.ask(f"{index}/tables")["samplers"]
        assert [tuple(one[name] for name in ("version", "units") if name in one) for one in found] == told


def test_the_command_says_what_is_wrong(covey: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, printed, _ = covey("watch", "--help")
    assert (status, "live during training" in printed) == (0, True)
    (tmp_path / "empty").mkdir()
    for words in ("holds no run", "pip install 'covey[serve]'"):
        status, _, said = covey("watch", tmp_path / "empty", "--no-browser")
        assert (status, words in said) == (2, True)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_the_command_serves_until_it_is_told_to_stop(finished: Path) -> None:
    command = [sys.executable, "-m", "covey", "watch", str(finished), "--port", "0", "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[2]), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address, token = process.stdout.readline().split()[0].split("/#token=")
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{address}/api/runs", headers=headers, timeout=20).json()[0]["path"] == str(finished)
        assert httpx.get(f"{address}/api/runs", timeout=20).status_code == 401
        assert len(token) > 20
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130, -signal.SIGINT)


def test_a_small_file_that_unfolds_to_gigabytes_costs_a_process(written: Any, open_page: Any) -> None:
    run = written([{"group": 0, "completion": "x", "reward": 1.0}])
    bomb = run.completions / "step_000002.parquet"
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array(["a" * 8_000_000]))
    pq.write_table(pa.table({"completion": values, "group": pa.array([0] * 4000)}), bomb, compression="zstd")
    assert bomb.stat().st_size < 100_000
    page = open_page(run.path)
    assert page.refuses("/api/0/completions", 404, "look at it with pyarrow", step=2)
    assert page.ask("0/completions", step=1)["completions"] == 1  # the next one is read as ever
    found = page.ask("0/search", search="x")  # the newest first: it is passed over, and said to be
    assert (found["looked"], found["unread"], found["before"]) == (1, 1, 2)
    assert [hit["step"] for hit in page.ask("0/search", search="x", before=2)["hits"]] == [1]


def test_all_steps_are_searched_the_newest_first(written: Any, open_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"group": 0, "uid": "q", "prompt": "count", "finish_reason": "stop", "correct": None}
    run = written(*(
        [said | {"completion": f"{'so ' * 60}step {step} has {word}!", "reward": reward, "length": step}
         for word, reward in (("Apples", 1.0), ("pears", 0.25 * step))]
        for step in range(1, 8)
    ))  # fmt: skip
    (run.completions / "step_000004.parquet").write_bytes(b"damaged")
    page = open_page(run.path)
    found = page.ask("0/search", search="HAS apples")
    assert (found["looked"], found["left"], found["unread"]) == (7, 0, 1)
    assert found["hits"][0]["excerpt"].startswith("…")
    assert found["hits"][0]["excerpt"].endswith("step 7 has Apples!")
    queries: list[tuple[dict[str, Any], list[int]]] = [
        ({"search": "HAS apples"}, [7, 6, 5, 3, 2, 1]),
        ({"search": "pears", "first": 2, "last": 3}, [3, 2]),
        ({"before": 3}, [2, 2, 1, 1]),
        ({"reward_from": 0.3, "reward_to": 0.8, "length_to": 3}, [3, 2]),
        ({"shown": "tied"}, []),
        ({"ended": "length"}, []),
    ]
    for query, steps in queries:
        assert [hit["step"] for hit in page.ask("0/search", **query)["hits"]] == steps
    assert page.refuses("/api/0/search", 422, reward_from="nan")
    # without time to look on, each portion is one table; together they find the same
    monkeypatch.setattr(tables, "SEARCH_SECONDS", 0.0)
    watched, found_in, before = WatchedRun(run.path), [], None
    monkeypatch.setattr(watched._reader, "ask", lambda what, path, *rest: tables.ANSWERS[what](path, *rest))
    while (part := watched.search("step", {"search": "apples"}, 0, 99, before))["looked"]:
        assert part["looked"] == 1
        found_in += [hit["step"] for hit in part["hits"]]
        before = part["before"]
    assert found_in == [7, 6, 5, 3, 2, 1]


def test_a_long_run_is_told_in_outline_first(tmp_path: Path, open_page: Any) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        lines = [{"step": n, "reward": n / 5000, "step_time": 2.0} for n in range(5000)]
        lines[777] |= {"eval/reward": 1.0}
        run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = open_page(run.path).ask("0/overview")
    rows = [dict(zip(found["names"], row, strict=True)) for row in found["rows"]]
    assert 300 < len(rows) < 1000
    assert any(row["step"] == 777 for row in rows)
    assert all(row["reward"] == row["step"] / 5000 for row in rows)
    assert max(row["step"] for row in rows) > 4950
    short = WatchedRun(run.path).thinned()
    assert all(row[short["names"].index("_seconds")] == 2.0 * (row[0] + 1) for row in short["rows"])


def test_a_sent_file_is_whole(finished: Path, covey: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sent.html"
    status, printed, _ = covey("report", finished, "--html", path)
    assert (status, "MB" in printed) == (0, True)
    text = path.read_text()
    assert "default-src 'none'; script-src 'sha256-" in text
    assert "unsafe" not in text.split("<body>")[0]
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    found = json.loads(_archive(text))["answers"]
    assert str(finished.parent) not in found["runs"][0]["path"]
    told = [row["completion"] for group in found["0/completions kind=step step=4"]["groups"] for row in group["rows"]]
    assert told == [row["completion"] for row in RunFolder.read(finished).read_completions(4)]
    assert found["0/tables"]["ledger"] == [2, 4]
    monkeypatch.setattr(export, "MOST_BYTES", 30_000)
    left_out = export.export_runs([WatchedRun(finished, READER)], path)
    assert any("tables of completions" in sentence for sentence in left_out)
    assert len(_archive(path.read_text())) < 60_000
    for name, words in (("sent.pdf", "ends in .html"), ("no/such/folder.html", "does not exist")):
        status, _, said = covey("report", finished, "--html", tmp_path / name)
        assert (status, words in said) == (2, True)


def _archive(text: str) -> str:
    (found,) = re.findall(r'<script type="application/json" id="archive">(.*?)</script>', text)
    return str(found)


def test_the_modules_of_the_page_become_one_script() -> None:
    text = export.bundled("main")
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    assert "</script" not in text
    names = re.findall(r"^modules\.(\w+) = ", text, re.MULTILINE)
    assert sorted(names) == sorted(path.stem for path in PAGE.glob("*.js") if "uPlot" not in path.name)
    for place, name in enumerate(names):  # each comes after what it takes from
        module = text.split(f"\nmodules.{name} = ")[1].split("\nmodules.")[0]
        assert set(re.findall(r"= modules\.(\w+);", module)) <= set(names[:place])
    assert (export.spread(list(range(100)), 4), export.spread([1, 2], 4)) == ([0, 33, 66, 99], [1, 2])

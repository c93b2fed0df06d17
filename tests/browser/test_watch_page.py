"""`covey watch` in a real browser: every view, live, large, hostile, by keyboard, for screen readers, on a phone.

Skipped where there is no Chromium or no Playwright. `COVEY_SCREENSHOTS=docs/images` writes the pictures of the docs.
"""

import io
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from browser.browsing import FLAGS, TOKEN, VIEWS, WAIT, Visit, chromium, serving
from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.metric_names import METRICS
from covey.observe.run_folder import RunFolder
from covey.rewards.text import say
from covey.watch.export import export_runs
from covey.watch.run import WatchedRun

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here")

SCREENSHOTS = os.environ.get("COVEY_SCREENSHOTS")
WORDS = ("one", "two", "three", "seven", "six", "ten", "eight", "forty")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202egnp\ud800"


def few_letters(completions: list[Any], **columns: Any) -> list[float]:
    return [1 - abs(len(set(messages[0]["content"])) - 8) / 12 for messages in completions]


def has_a(completions: list[Any], **columns: Any) -> list[float]:
    found = ["a" in messages[0]["content"] for messages in completions]
    say(columns, "has_a", ["found the letter a" if each else "found no a" for each in found])
    return [float(each) for each in found]


def train(folder: Path, model_folder: Path, data: dict[str, Any], **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "model": str(model_folder), "output_dir": str(folder), "num_generations": 4, "prompts_per_step": 2,
        "max_steps": 24, "lora_r": 4, "max_completion_length": 24, "learning_rate": 1e-2, "progress": False,
        "eval_steps": 6, "ledger": "sampled:2,all:6", "beta": 0.01, "save_steps": 0, "samplers": 0,
    }  # fmt: skip
    GRPOTrainer(args=GRPOConfig(**(settings | changes)), **data).train()
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    asked = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in WORDS]
    rows = [row | {"kind": "long" if len(word) > 3 else "short"} for row, word in zip(asked, WORDS, strict=True)]
    data = {"reward_funcs": [few_letters, has_a], "train_dataset": rows[:4], "eval_dataset": rows[4:]}
    return train(tmp_path_factory.mktemp("browser") / "letters", model_folder, data, correctness="has_a")


def learning_run(folder: Path, model_folder: Path) -> Path:
    """A longer run, whose held-out accuracy rises beyond its interval: for the picture of a run that learns."""
    names = [f"{one} {other}" for one in WORDS for other in WORDS]
    rows = [{"prompt": [{"role": "user", "content": f"say {name}"}]} for name in names]
    data = {"reward_funcs": [few_letters, has_a], "train_dataset": rows[:24], "eval_dataset": rows[24:]}
    longer = {"learning_rate": 4e-3, "max_steps": 40, "eval_steps": 5, "num_generations": 8, "prompts_per_step": 4}
    return train(folder, model_folder, data, correctness="has_a", ledger="off", **longer)


@pytest.fixture(scope="module")
def agents_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return train(
        tmp_path_factory.mktemp("browser") / "house", model_folder, {}, world="house:rooms=2,num_train=6,num_eval=3",
        max_conversation_tokens=600, invalid_action_penalty=0.1, action_format="choice", max_completion_length=16,
        max_steps=4, eval_steps=4, ledger="sampled:2,all:2", adv_estimator="gigpo", adv_parameters={"discount": 0.9},
    )  # fmt: skip


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Opens runs, or an address; at the end no page may have complained, or asked another machine."""
    visits: list[Visit] = []
    with ExitStack() as servers:

        def open_at(*shown: Any, first: str = "", **options: Any) -> Visit:
            address = shown[0]
            if isinstance(address, Path):
                address = f"{servers.enter_context(serving(*shown))}#token={TOKEN}"
            visits.append(Visit(browser, address, **options))
            if first:
                visits[-1].first(first)
            return visits[-1]

        yield open_at
        for each in visits:
            each.context.close()
            assert each.complaints == []
            assert all(re.match(r"http://127\.0\.0\.1:|file:|data:|blob:", url) for url in each.asked)


_WITHOUT_PATHS = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(/\\/tmp\\/[^"]*\\//g, "runs/");
}"""


def picture(visit: Visit, name: str) -> None:
    if SCREENSHOTS:
        from PIL import Image

        visit.page.mouse.move(0, 0)
        visit.settle()
        visit.page.evaluate(_WITHOUT_PATHS)
        visit.page.wait_for_timeout(500)
        image = Image.open(io.BytesIO(visit.page.screenshot()))
        path = Path(SCREENSHOTS) / f"watch-{name}.png"
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def test_every_view_shows_a_run(short_run: Path, model_folder: Path, visit: Any) -> None:
    page = visit(short_run, first="text=finished")
    page.page.locator(".card canvas").nth(3).wait_for()
    titles = page.page.locator(".card h2").all_inner_texts()
    assert titles[:3] == ["Held-out accuracy", "Held-out accuracy by kind of question", "Training reward"]
    page.until("document.querySelectorAll('nav button:not([hidden])').length === 7")
    assert page.shown() == [view for view in VIEWS if view != "Agents"]
    summary = page.page.get_by_role("region", name="Summary of letters").inner_text()
    rows = RunFolder.read(short_run).read_metrics()
    first, last = (row for row in rows if row.get("eval/accuracy") is not None and row["step"] in (0, 24))
    assert f"{100 * first['eval/accuracy']:g} % → {100 * last['eval/accuracy']:g} %" in summary
    assert f"95 % interval {_short(last['eval/accuracy_low'])} to {_short(last['eval/accuracy_high'])} %" in summary
    assert "step 24 of 24" in summary
    if SCREENSHOTS:
        learning = visit(learning_run(short_run.parent / "names", model_folder), first="text=finished")
        learning.page.locator(".card canvas").nth(3).wait_for()
        picture(learning, "curves")

    page.go("Completions", ".one")
    assert (page.count(".group"), page.count(".one")) == (2, 8)
    page.sees("found ")  # what the reward says of a completion
    picture(page, "completions")
    page.choose("from", "compare")
    page.sees("right in both")
    page.choose("show", "all")
    page.until("document.querySelectorAll('.group').length === 4")
    page.go("Tokens")
    page.choose("colour", "gradient")
    page.page.locator(".tokens span").first.hover()
    page.page.locator("main td", has_text="share of the gradient").wait_for()
    told = page.page.locator("main .note").inner_text()
    numbers = re.search(r"add up to (\S+); the loss of step 24 is (\S+?)[,.]? in phase", told)
    assert numbers, told
    assert float(numbers[1]) == pytest.approx(float(numbers[2].rstrip(",")), abs=2e-4)
    page.choose("colour", "advantage")
    page.settle()
    _is_coloured_by_what_is_reinforced(page)
    page.page.get_by_label("completion", exact=True).select_option(index=0)
    picture(page, "tokens")
    page.go("Questions", "text=over the run")
    page.choose("sort by", "weight")
    weights = [float(text) for text in page.page.locator("tbody td:nth-child(6)").all_inner_texts()]
    assert (len(weights), weights) == (4, sorted(weights, reverse=True))
    page.until("[...document.querySelectorAll('.asked')].every(cell => cell.textContent.startsWith('say '))")
    picture(page, "questions")
    page.first("tbody button").click()
    page.first(".one")
    assert page.count(".group") == 1
    page.go("Machine", "text=Samplers and servers")
    assert page.page.locator("tr", has_text="sampler 1 (this process)").locator("td").nth(1).inner_text() == "25"
    picture(page, "machine")
    for view, text in (("Doctor", "Events"), ("Settings", "num_generations = 4")):
        page.go(view, f"text={text}")
        picture(page, view.lower())


_RECORD_TEXTS = """window.texts = {};
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const card = this.canvas.closest("section")?.getAttribute("aria-label");
  (window.texts[card] ??= {})[text] = [x, y, this.textAlign === "right" ? x - this.measureText(text).width : x];
  draw.call(this, text, x, y);
};"""


def _made_up(folder: Path, config: str, **metrics: float) -> Path:
    with RunFolder.create(folder) as run:
        run.write_config(config)
        if "eval/accuracy" in metrics:
            run.append_metrics(0, {"eval/accuracy": 0.1, "eval/accuracy_low": 0.05, "eval/accuracy_high": 0.2})
        for step in range(1, 9):
            same = {"step_time": 90.0, "kl": 0.0, "reward": 0.0, "reward_std": 0.0, "completions/clipped_ratio": 1.0}
            same |= {"entropy": 10.789856 + step * 1e-6}
            run.append_metrics(step, same | {"epoch": step / 4} | (metrics if step == 8 else {}))
        run.append_event("run", "started")
    return folder


def test_two_runs_side_by_side(visit: Any, tmp_path: Path) -> None:
    """One without an evaluation, whose metrics come first; lists in settings; zeros; marks at the same step."""
    lists = '[run]\nrun_name = "baseline"\n\n[sampling]\nstop_strings = [\n    "x]",\n    "y",\n]\n'
    plain = _made_up(tmp_path / "a", lists)
    judged = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6, "eval/seconds": 80.0}
    epochs = "[sampling]\nstop_strings = []\n\n[schedule]\nmax_steps = -1\nnum_train_epochs = 3.0\n"
    page = visit(plain, _made_up(tmp_path / "b", epochs, **judged), first=".card canvas")
    page.context.add_init_script(_RECORD_TEXTS)
    waiting: list[Any] = []
    page.page.route("**/api/1/metrics**", lambda route: waiting.append(route), times=1)
    page.page.reload()
    page.page.get_by_role("region", name="Training reward").locator("canvas").wait_for()
    assert "Held-out accuracy" not in page.page.locator(".card h2").all_inner_texts()
    waiting[0].continue_()
    page.page.get_by_role("region", name="Held-out accuracy").locator("canvas").wait_for()
    assert page.page.locator(".card h2").first.inner_text() == "Held-out accuracy"
    page.until("document.querySelector('#strip').textContent.split('The reward was 0').length === 3")
    first, second = page.page.locator(".strip").all_inner_texts()
    assert all(words in first for words in ("baseline", "no held-out evaluation"))
    for words in ("10 % → 50 %", "improved", "95 % interval 40 to 60 %", "step 8 of 12", "about 7 min"):
        assert words in second
    assert page.shown() == ["Curves", "Machine", "Doctor", "Settings"]
    page.page.wait_for_timeout(300)
    texts = page.page.evaluate("window.texts")
    assert {"0", "1"} <= set(texts["KL from the reference model"])
    assert "100" not in texts["KL from the reference model"]
    assert any(len(text) > 8 for text in texts["Entropy of the policy"])
    assert all(left >= 0 for card in texts.values() for _, _, left in card.values())  # no text is cut off
    assert {"100 %", "120 %", "150 %", "200 %"} & set(texts["Completions cut off at the length limit"]) == {"100 %"}
    assert len({tuple(texts["Held-out accuracy"][str(mark)]) for mark in range(1, 5)}) == 4
    page.go("Settings")
    row = page.page.locator("tr", has_text="sampling.stop_strings").locator("td").all_inner_texts()
    assert row == ["sampling.stop_strings", '["x]", "y"]', "[]"]


def _short(share: float) -> str:
    """As the page writes a share in percent."""
    return f"{100 * share:.3g}"


def _is_coloured_by_what_is_reinforced(page: Visit) -> None:
    """Green is what the step made more likely, by advantage as well as by loss."""
    colours = "[...document.querySelectorAll('.card.tokens span')].map(each => each.style.background)"
    green, red = "rgb(43, 154, 93)", "rgb(208, 54, 76)"
    choices = page.page.get_by_label("completion", exact=True).locator("option").count()
    seen = set()
    for place in range(choices):
        page.page.get_by_label("completion", exact=True).select_option(index=place)
        page.settle()
        value = float(page.page.locator("main tr", has_text="advantage").locator("td").nth(1).inner_text())
        by_advantage = page.page.evaluate(colours)[0]
        assert (green in by_advantage, red in by_advantage) == (value >= 0, value < 0)
        seen.add(value > 0)
    assert seen == {True, False}


@pytest.mark.slow
def test_agents_episodes_are_compared_turn_by_turn(agents_run: Path, visit: Any) -> None:
    rows = RunFolder.read(agents_run).read_completions(4)
    page = visit(agents_run, first="text=finished")
    page.go("Agents", ".episodes tbody td")
    plays = [json.loads(row["play"]) for row in rows if row["group"] == rows[0]["group"]]
    assert page.count(".episodes thead th") == 1 + len(plays)
    assert page.count(".episodes tbody tr") == max(map(len, plays))
    told = page.first(".episodes tbody td").inner_text()
    assert all(words in told for words in (plays[0][0]["said"].strip(), plays[0][0]["seen"].split("\n")[0]))
    assert re.search(r"advantage \S+ = episode \S+, turn \S+", told)
    if SCREENSHOTS:  # a group that did not do the same
        before = RunFolder.read(agents_run).read_completions(2)
        mixed = next((r for r in before if any(turn["advantage"] for turn in json.loads(r["play"]))), rows[0])
        page.choose("step", "2")
        page.choose("task", str(mixed["group"]))
        page.settle()
    picture(page, "agents")
    page.choose("step", "4")
    page.settle()
    page.page.locator(".episodes tbody button", has_text="tokens").first.click()
    page.first(".tokens span")
    assert plays[0][0]["said"].strip()[:4] in "".join(page.page.locator(".tokens span").all_inner_texts())
    page.go("Completions")
    page.page.get_by_role("button", name="turn by turn").first.click()
    page.page.locator(".episodes").wait_for()


def test_a_late_answer_does_not_take_the_place_of_another_view(short_run: Path, visit: Any) -> None:
    page = visit(short_run, first="text=finished")
    waiting: list[Any] = []
    page.page.route("**/api/0/ledger**", lambda route: waiting.append(route), times=1)
    page.go("Tokens")
    page.page.wait_for_timeout(300)
    page.go("Completions", ".one")
    assert len(waiting) == 1
    with page.page.expect_response("**/api/0/ledger/**"):  # the view goes on to ask for a completion's tokens
        waiting[0].continue_()
    page.page.wait_for_timeout(500)
    assert page.count(".one") == 8


@pytest.mark.slow
def test_curves_can_be_turned_every_way(short_run: Path, agents_run: Path, visit: Any, tmp_path: Path) -> None:
    page = visit(short_run, agents_run, first=".card canvas")
    turns = (("x axis", "minutes"), ("x axis", "tokens"), ("smoothing", "2"), ("scale", "y"), ("scale", "both"))
    for label, value in turns:
        page.choose(label, value)
    page.page.get_by_label("Add a metric").select_option("learning_rate")
    card = page.page.get_by_role("region", name="Learning rate")
    card.locator("canvas").wait_for()
    for kind, beginning in (("CSV", b"run,step,tokens,minutes,value\n"), ("PNG", b"\x89PNG")):
        with page.page.expect_download() as download:
            card.get_by_role("button", name=kind).click()
        assert Path(download.value.path()).read_bytes().startswith(beginning)
    page.page.get_by_role("button", name="Remove Learning rate").click()
    assert card.count() == 0
    page.page.get_by_role("checkbox", name="house").uncheck()
    page.go("Settings")
    assert page.page.get_by_text("house: config.toml").count() == 0


@pytest.mark.slow
def test_the_page_follows_a_run_that_trains(recipe_folder: Path, visit: Any, tmp_path: Path) -> None:
    changes = (f"run.output_dir={tmp_path}/live", "schedule.max_steps=2000", "evaluation.eval_steps=0")
    command = [sys.executable, "-m", "covey", "train", str(recipe_folder / "recipe.toml"), *changes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until, metrics = time.monotonic() + WAIT / 1000, tmp_path / "live" / "metrics.jsonl"
            while not (metrics.exists() and b'"loss"' in metrics.read_bytes()) and time.monotonic() < until:
                assert process.poll() is None
                time.sleep(0.1)
            page = visit(tmp_path / "live", first=".progress b")
            said = "document.querySelector('.progress b').textContent"
            step = f"Number(/step ([\\d,]+)/.exec({said})?.[1].replaceAll(',', ''))"
            page.until(f"{step} > 0")
            seen = page.page.evaluate(step)
            page.go("Completions", ".one")
            shown = "Number(document.querySelector('input[type=number][aria-label=Step]').value)"
            earlier = page.page.evaluate(shown)
            page.until(f"{step} > {seen}")
            page.until(f"{shown} > {earlier}")  # who looks at the newest step stays with it
            assert process.poll() is None
        finally:
            process.kill()


_NAMES = [name for name in METRICS if "<" not in name][:40]


def make_large_run(folder: Path, steps: int = 10_000) -> Path:
    """A run as large as a long one, made without training; all tables but the last 20 are one file."""
    draw = random.Random(0)
    with RunFolder.create(folder) as run:
        run.append_metrics(0, {"eval/reward": 0.1, "eval/accuracy": 0.1})
        run.write_config('[model]\nmodel = "made-up"\n\n[schedule]\nmax_steps = 10000\n')
        run.append_event("run", "started")
        for step in range(steps - 20, steps + 1):
            run.write_completions(step, [_completion(draw, step, row) for row in range(64)])
    for step in range(1, steps - 20):
        run.table(step).hardlink_to(run.table(steps - 20))
    with run.metrics_path.open("a") as lines, run.questions_path.open("a") as answers:
        for step in range(1, steps + 1):
            share = 1 - math.exp(-step / 3000)
            record = {name: draw.random() for name in _NAMES} | {"num_tokens": step * 5000, "phase": int(step > 4000)}
            record |= {"step": step, "reward": share + draw.gauss(0, 0.05), "step_time": 1 + draw.random()}
            lines.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                interval = {"eval/accuracy_low": share - 0.04, "eval/accuracy_high": share + 0.04}
                lines.write(json.dumps({"step": step, "eval/reward": share, "eval/accuracy": share} | interval) + "\n")
            asked = {f"question-{draw.randrange(1000)}": [draw.randint(0, 8), 8] for _ in range(8)}
            answers.write(json.dumps({"step": step, "answers": asked}) + "\n")
    return folder


def _completion(draw: random.Random, step: int, row: int) -> dict[str, object]:
    words = " ".join(draw.choice(("so", "the", "answer", "is", "two", "four", "then")) for _ in range(120))
    reward = float(draw.random() < 0.5)
    return {
        "group": row // 8, "sample": row % 8, "uid": f"question-{row // 8}", "prompt": f"Question {row // 8}?",
        "completion": f"{words} (completion {row} of step {step})", "reward": reward, "correct": reward == 1.0,
        "advantage": reward - 0.5, "length": 240, "finish_reason": "stop", "policy_version": step,
    }  # fmt: skip


@pytest.mark.slow
def test_a_long_run_opens_quickly_and_can_be_searched(visit: Any, tmp_path: Path) -> None:
    page = visit(make_large_run(tmp_path / "long"))
    page.until(
        "[...document.querySelectorAll('.card canvas')].some(c => c.width && "
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v))"
    )
    opened = page.page.evaluate("performance.now()") / 1000
    page.until("document.querySelector('#strip').textContent.includes('10,000')")
    page.until("performance.getEntriesByType('resource').some(e => e.name.includes('/questions'))")
    page.go("Questions", "text=over the run")
    page.until("document.querySelectorAll('.visits i').length > 2000")  # all of 80,000 answers are there
    heap = page.heap()
    print(f"first chart after {opened:.2f} s; heap {heap:.0f} MB")
    assert opened < 20  # 0.7 s on an idle machine
    assert heap < 250
    page.go("Completions", ".one")
    page.page.get_by_label("Search").fill("completion 7 of step 9993)")
    page.page.get_by_label("Search").press("Enter")
    page.page.get_by_label("in all steps").check()
    page.first("tbody button")
    assert page.count("tbody tr") == 1
    page.first("tbody button").click()
    page.until("document.querySelector('input[aria-label=Step]').value === '9993'")


def hostile_run(folder: Path) -> Path:
    rows = [
        {"group": 0, "uid": HOSTILE, "prompt": json.dumps([{"role": "<b>", "content": HOSTILE}]), "completion": text,
         "reward": float("nan"), "masked_by": HOSTILE, "verdict/<i>": HOSTILE, HOSTILE[:-1]: HOSTILE,
         "play": json.dumps([{"seen": text, "said": HOSTILE, "action": HOSTILE, "reward": 1e308, "valid": 1}]),
         "turns": 1, "no_actions": 0, "ended": HOSTILE[:20]}
        for text in [HOSTILE, "x" * 1_000_000, "\u202e" * 50 + "right to left", "\t\r\x07\x08" * 20, "", HOSTILE * 200]
    ]  # fmt: skip
    with RunFolder.create(folder) as run:
        run.write_completions(1, rows)
        run.write_completions(1, rows, "eval")
        odd = {"rewards/<img src=x>/mean": 1.0, "loss": 1e308, "step_time": 1, "agent/x": 1}
        run.append_metrics(1, {"reward": 0.5} | odd)
        run.append_answers(1, {HOSTILE[:-1]: [1, 2]})
        run.append_event("diagnosis", HOSTILE)
        run.append_event(HOSTILE, HOSTILE)
        token = {"row": 0, "group": 0, "pass": 0, "token": HOSTILE, "masked_by": HOSTILE, "loss": 1e300, "logp": -1.0}
        token |= {"gradient": -1e300, "sampler_logp": 0.0}
        run.write_completions(1, [token | {"position": n, "token_id": n} for n in range(3)], "ledger")
        run.write_config('[run]\nname = "<script>alert(3)</script>"\n')
    return folder


def test_hostile_text_stays_text(visit: Any, tmp_path: Path) -> None:
    _walk_hostile(visit(hostile_run(tmp_path / "<script>alert(4)<")))


def _walk_hostile(page: Visit) -> None:
    page.first(".card canvas")
    for view in page.views():
        assert page.page.evaluate("document.querySelectorAll('main img, main script, main b b').length") == 0
        assert page.page.evaluate("document.querySelectorAll('script').length") <= 4
        assert not page.overflows(), view
        assert not set("\x00\x07\x1b\u202e") & set(page.page.evaluate("document.querySelector('main').textContent"))
    page.go("Completions", ".one")
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>??[31m?gnp" in page.first(".one pre").inner_text()
    page.go("Tokens")
    assert "<script>" in page.first(".tokens span").inner_text()


@pytest.mark.slow
def test_a_file_to_send_needs_nobody(short_run: Path, agents_run: Path, visit: Any, tmp_path: Path) -> None:
    path = tmp_path / "sent.html"
    export_runs([WatchedRun(short_run), WatchedRun(agents_run)], path)
    assert path.stat().st_size < 5 << 20
    page = visit(path.as_uri(), first="text=finished")
    page.first(".card canvas")
    for view in page.views():
        assert page.count("main .failed") == 0, view
    page.go("Completions", ".one")
    whole, judged = page.count(".one"), 0
    for which in ("right", "wrong"):
        page.choose("show", which)
        page.settle()
        judged += page.count(".one")
    assert judged == whole > 0
    page.choose("from", "compare")
    page.sees("right in both")
    page.go("Questions", "text=say ")
    page.go("Tokens", ".tokens span")
    assert page.asked[0] == path.as_uri()
    assert all(url.startswith(("data:", "blob:")) for url in page.asked[1:])
    hostile = tmp_path / "hostile.html"
    export_runs([WatchedRun(hostile_run(tmp_path / "hostile"))], hostile)
    _walk_hostile(visit(hostile.as_uri()))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_screen_readers_find_their_way(short_run: Path, agents_run: Path, visit: Any, scheme: str) -> None:
    page = visit(short_run, agents_run, first=".card canvas", color_scheme=scheme, bypass_csp=True)  # for axe
    for view in VIEWS:
        page.go(view)
        if view == "Agents":
            page.choose("run", "1")
        page.settle()
        assert page.violations(["color-contrast"] if scheme == "dark" else None) == [], view


def test_the_keyboard_is_enough(short_run: Path, visit: Any) -> None:
    page, focused = visit(short_run, first=".card canvas"), "document.activeElement.textContent"
    page.until("[...document.querySelectorAll('nav button:not([hidden])')].some(tab => tab.textContent === 'Tokens')")
    page.settle()
    for _ in range(12):
        page.page.keyboard.press("Tab")
        if page.page.evaluate(focused) == "Tokens":
            break
    page.page.keyboard.press("Enter")
    page.page.locator(".tokens span").nth(1).wait_for()
    for _ in range(20):
        page.page.keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.closest('.tokens') !== null"):
            break
    first = page.page.locator("main table").inner_text()
    assert page.count(".tokens span") > 1
    assert page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.page.keyboard.press("ArrowRight")
    assert page.page.locator("main table").inner_text() != first


def test_a_narrow_screen_needs_no_sideways_scrolling(short_run: Path, agents_run: Path, visit: Any) -> None:
    page = visit(short_run, agents_run, viewport={"width": 360, "height": 740}, first=".card canvas")
    for view in page.views():
        assert not page.overflows(), view


def test_an_address_without_its_token_says_so(short_run: Path, browser: Any) -> None:
    with serving(short_run) as address:
        page = Visit(browser, address)
        page.sees("The access token is missing")
        page.context.close()

"""`covey watch` in a real browser: every view, live, large, hostile, by keyboard, for screen readers, on a phone.

Skipped where there is no Chromium or no Playwright. `COVEY_SCREENSHOTS=docs/images` writes the pictures of the docs.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browsing import FLAGS, TOKEN, WAIT, Visit, chromium, serving
from large_run import make_large_run

from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.observe.run_folder import RunFolder
from covey.rewards.text import say
from covey.watch.export import export_runs
from covey.watch.run import WatchedRun

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here")

VIEWS = ("Curves", "Completions", "Agents", "Tokens", "Questions", "Machine", "Doctor", "Settings")
SCREENSHOTS = os.environ.get("COVEY_SCREENSHOTS")
WORDS = ("one", "two", "three", "seven", "six", "ten", "eight", "forty")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202egnp\ud800"


def few_letters(completions: list[Any], **columns: Any) -> list[float]:
    return [1 - abs(len(set(messages[0]["content"])) - 8) / 12 for messages in completions]


def has_a(completions: list[Any], **columns: Any) -> list[float]:
    found = ["a" in messages[0]["content"] for messages in completions]
    say(columns, "has_a", ["found the letter a" if each else "found no a" for each in found])
    return [float(each) for each in found]


def train(folder: Path, model_folder: Path, **changes: Any) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"say {word}"}], "kind": kind}
        for word, kind in [(word, "long" if len(word) > 3 else "short") for word in WORDS]
    ]
    settings: dict[str, Any] = {
        "model": str(model_folder), "output_dir": str(folder), "num_generations": 4, "prompts_per_step": 2,
        "max_steps": 24, "lora_r": 4, "max_completion_length": 24, "learning_rate": 1e-2, "progress": False,
        "eval_steps": 6, "ledger_steps": 6, "beta": 0.01, "save_steps": 0, "correctness": "has_a",
        "samplers": 0,
    }  # fmt: skip
    data: dict[str, Any] = {"reward_funcs": [few_letters, has_a], "train_dataset": rows[:4], "eval_dataset": rows[4:]}
    if "world" in changes:
        data = {}
        del settings["correctness"]
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
    return train(tmp_path_factory.mktemp("browser") / "letters", model_folder)


@pytest.fixture(scope="module")
def agents_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return train(
        tmp_path_factory.mktemp("browser") / "house", model_folder, world="house:rooms=2,num_train=6,num_eval=3",
        max_conversation_tokens=600, invalid_action_penalty=0.1, action_format="choice", max_completion_length=16,
        max_steps=4, eval_steps=4, ledger_steps=2, adv_estimator="gigpo", discount=0.9,
    )  # fmt: skip


@pytest.fixture
def serve() -> Iterator[Any]:
    """Shows runs at an address until the test is over."""
    with ExitStack() as servers:
        yield lambda *folders: servers.enter_context(serving(*folders))


@pytest.fixture
def visit(browser: Any, serve: Any) -> Iterator[Any]:
    """Opens pages; at the end none of them may have complained, or asked another machine."""
    visits: list[Visit] = []

    def open_at(address: str, **options: Any) -> Visit:
        visits.append(Visit(browser, address, **options))
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
        visit.page.evaluate(_WITHOUT_PATHS)
        visit.page.wait_for_timeout(500)
        image = Image.open(io.BytesIO(visit.page.screenshot()))
        path = Path(SCREENSHOTS) / f"watch-{name}.png"
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def test_every_view_shows_a_run(short_run: Path, visit: Any, serve: Any) -> None:
    address = serve(short_run)
    page = visit(f"{address}#token={TOKEN}")
    page.sees("finished")
    page.page.locator(".card canvas").nth(3).wait_for()
    assert page.page.get_by_role("region", name="eval/accuracy by kind").count() == 1
    picture(page, "curves")

    page.go("Completions")
    page.page.locator(".one").first.wait_for()
    assert page.page.locator(".group").count() == 2
    assert page.page.locator(".one").count() == 8
    page.sees("found ")  # what the reward says of a completion
    picture(page, "completions")
    page.page.get_by_label("of", exact=True).select_option("compare")
    page.sees("right in both")
    page.page.get_by_label("show", exact=True).select_option("all")
    page.until("document.querySelectorAll('.group').length === 4")

    page.go("Tokens")
    page.page.get_by_label("colour", exact=True).select_option("gradient")
    page.page.locator(".tokens span").first.hover()
    page.page.locator("main td", has_text="share of the gradient").wait_for()
    told = page.page.locator("main .note").inner_text()
    numbers = re.search(r"add up to (\S+); the step's loss is (\S+?)[,.]? in phase", told)
    assert numbers, told
    assert float(numbers[1]) == pytest.approx(float(numbers[2].rstrip(",")), abs=2e-4)
    picture(page, "tokens")

    page.go("Questions")
    page.sees("over the run")
    page.page.get_by_label("first", exact=True).select_option("weight")
    weights = [float(text) for text in page.page.locator("tbody td:nth-child(6)").all_inner_texts()]
    assert len(weights) == 4
    assert weights == sorted(weights, reverse=True)
    picture(page, "questions")
    page.page.locator("tbody button").first.click()
    page.page.locator(".one").first.wait_for()
    assert page.page.locator(".group").count() == 1

    page.go("Machine")
    page.sees("Samplers and servers")
    assert page.page.locator("tr", has_text="sampler 1 (this process)").locator("td").nth(1).inner_text() == "25"
    picture(page, "machine")
    page.go("Doctor")
    page.sees("Events")
    picture(page, "doctor")
    page.go("Settings")
    page.sees("num_generations = 4")
    picture(page, "settings")


@pytest.mark.slow
def test_agents_episodes_are_compared_turn_by_turn(agents_run: Path, visit: Any, serve: Any) -> None:
    rows = RunFolder.read(agents_run).read_completions(4)
    address = serve(agents_run)
    page = visit(f"{address}#token={TOKEN}")
    page.sees("finished")
    page.go("Agents")
    page.page.locator(".episodes tbody td").first.wait_for()
    first = [row for row in rows if row["group"] == rows[0]["group"]]
    plays = [json.loads(row["play"]) for row in first]
    assert page.page.locator(".episodes thead th").count() == 1 + len(first)
    assert page.page.locator(".episodes tbody tr").count() == max(len(play) for play in plays)
    told = page.page.locator(".episodes tbody td").first.inner_text()
    assert plays[0][0]["said"].strip() in told
    assert plays[0][0]["seen"].split("\n")[0] in told
    assert re.search(r"credit \S+ = episode \S+, turn \S+", told)
    if SCREENSHOTS:  # a group that did not do the same
        mixed = next((r for r in RunFolder.read(agents_run).read_completions(2) if abs(_credit(r)) > 0), rows[0])
        page.page.get_by_label("step", exact=True).select_option("2")
        page.page.get_by_label("task", exact=True).select_option(str(mixed["group"]))
        page.settle()
    picture(page, "agents")
    page.page.get_by_label("step", exact=True).select_option("4")
    page.settle()
    page.page.locator(".episodes tbody button", has_text="tokens").first.click()
    page.page.locator(".tokens span").first.wait_for()
    written = "".join(page.page.locator(".tokens span").all_inner_texts())
    assert plays[0][0]["said"].strip()[:4] in written
    page.go("Completions")
    page.page.get_by_role("button", name="turn by turn").first.click()
    page.page.locator(".episodes").wait_for()


def test_a_late_answer_does_not_take_the_place_of_another_view(short_run: Path, visit: Any, serve: Any) -> None:
    page = visit(f"{serve(short_run)}#token={TOKEN}")
    page.sees("finished")
    waiting: list[Any] = []
    page.page.route("**/api/0/ledger**", lambda route: waiting.append(route), times=1)
    page.go("Tokens")
    page.page.wait_for_timeout(300)
    page.go("Completions")
    page.page.locator(".one").first.wait_for()
    assert len(waiting) == 1
    with page.page.expect_response("**/api/0/ledger/**"):  # the view goes on to ask for a completion's tokens
        waiting[0].continue_()
    page.page.wait_for_timeout(500)
    assert page.page.locator(".one").count() == 8


def _credit(row: dict[str, Any]) -> float:
    return sum(abs(turn["advantage"]) for turn in json.loads(row["play"]))


@pytest.mark.slow
def test_curves_can_be_turned_every_way(
    short_run: Path, agents_run: Path, visit: Any, serve: Any, tmp_path: Path
) -> None:
    address = serve(short_run, agents_run)
    page = visit(f"{address}#token={TOKEN}")
    page.page.locator(".card canvas").first.wait_for()
    for label, value in (
        ("over", "minutes"),
        ("over", "tokens"),
        ("smoothing", "2"),
        ("axes", "y"),
        ("axes", "both"),
    ):
        page.page.get_by_label(label, exact=True).select_option(value)
    page.page.get_by_label("Add a metric").select_option("learning_rate")
    card = page.page.get_by_role("region", name="learning_rate")
    card.locator("canvas").wait_for()
    for kind, beginning in (("CSV", b"run,step,tokens,minutes,value\n"), ("PNG", b"\x89PNG")):
        with page.page.expect_download() as download:
            card.get_by_role("button", name=kind).click()
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(beginning)
    page.page.get_by_role("button", name="Remove learning_rate").click()
    assert card.count() == 0
    page.page.get_by_label("house").uncheck()
    page.go("Settings")
    assert page.page.get_by_text("house: config.toml").count() == 0


@pytest.mark.slow
def test_the_page_follows_a_run_that_trains(recipe_folder: Path, visit: Any, serve: Any, tmp_path: Path) -> None:
    changes = (f"run.output_dir={tmp_path}/live", "schedule.max_steps=2000", "evaluation.eval_steps=0")
    command = [sys.executable, "-m", "covey", "train", str(recipe_folder / "recipe.toml"), *changes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + WAIT / 1000
            metrics = tmp_path / "live" / "metrics.jsonl"
            while not (metrics.exists() and b'"loss"' in metrics.read_bytes()) and time.monotonic() < until:
                assert process.poll() is None
                time.sleep(0.1)
            address = serve(tmp_path / "live")
            page = visit(f"{address}#token={TOKEN}")
            said = "document.querySelector('#state').textContent"
            step = f"Number(/step ([\\d,]+)/.exec({said})?.[1].replaceAll(',', ''))"
            page.until(f"{step} > 0")
            seen = page.page.evaluate(step)
            page.go("Completions")
            page.page.locator(".one").first.wait_for()
            shown = "Number(document.querySelector('input[type=number][aria-label=Step]').value)"
            earlier = page.page.evaluate(shown)
            page.until(f"{step} > {seen}")
            page.until(f"{shown} > {earlier}")  # who looks at the newest step stays with it
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.slow
def test_a_long_run_opens_quickly_and_can_be_searched(visit: Any, serve: Any, tmp_path: Path) -> None:
    run = make_large_run(tmp_path / "long")
    address = serve(run.path)
    page = visit(f"{address}#token={TOKEN}")
    page.until(
        "[...document.querySelectorAll('.card canvas')].some(c => c.width && "
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v))"
    )
    opened = page.page.evaluate("performance.now()") / 1000
    page.until("document.querySelector('#state').textContent.includes('10,000')")
    page.until("performance.getEntriesByType('resource').some(e => e.name.includes('/questions'))")
    page.go("Questions")
    page.sees("over the run")
    page.until("document.querySelectorAll('.visits i').length > 2000")  # all of 80,000 answers are there
    heap = page.heap()
    print(f"first chart after {opened:.2f} s; heap {heap:.0f} MB")
    assert opened < 20  # 0.7 s on an idle machine
    assert heap < 250
    page.go("Completions")
    page.page.locator(".one").first.wait_for()
    page.page.get_by_label("Search").fill("completion 7 of step 9993)")
    page.page.get_by_label("Search").press("Enter")
    page.page.get_by_label("in all steps").check()
    page.page.locator("tbody tr").first.wait_for()
    assert page.page.locator("tbody tr").count() == 1
    page.page.locator("tbody button").first.click()
    page.until("document.querySelector('input[aria-label=Step]').value === '9993'")


def hostile_run(folder: Path) -> Path:
    texts = [HOSTILE, "x" * 1_000_000, "\u202e" * 50 + "right to left", "\t\r\x07\x08" * 20, "", HOSTILE * 200]
    rows = [
        {"group": 0, "uid": HOSTILE, "prompt": json.dumps([{"role": "<b>", "content": HOSTILE}]), "completion": text,
         "reward": float("nan"), "masked_by": HOSTILE, "verdict/<i>": HOSTILE, HOSTILE[:-1]: HOSTILE,
         "play": json.dumps([{"seen": text, "said": HOSTILE, "action": HOSTILE, "reward": 1e308, "valid": 1}]),
         "turns": 1, "no_actions": 0, "ended": HOSTILE[:20]}
        for text in texts
    ]  # fmt: skip
    with RunFolder.create(folder) as run:
        run.write_completions(1, rows)
        run.write_evaluation(1, rows)
        run.append_metrics(1, {"reward": 0.5, "rewards/<img src=x>/mean": 1.0, "loss": 1e308})
        run.append_answers(1, {HOSTILE[:-1]: [1, 2]})
        run.append_event("diagnosis", HOSTILE)
        run.append_event(HOSTILE, HOSTILE)
        token = {"row": 0, "group": 0, "pass": 0, "token": HOSTILE, "masked_by": HOSTILE, "loss": 1e300, "logp": -1.0}
        token |= {"gradient": -1e300, "sampler_logp": 0.0}
        run.write_ledger(1, [token | {"position": n, "token_id": n} for n in range(3)])
        run.write_config('[run]\nname = "<script>alert(3)</script>"\n')
    return folder


def test_hostile_text_stays_text(visit: Any, serve: Any, tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "<script>alert(4)<")
    address = serve(folder)
    page = visit(f"{address}#token={TOKEN}")
    _walk_hostile(page)


def _walk_hostile(page: Visit) -> None:
    page.page.locator(".card canvas").first.wait_for()
    for view in VIEWS:
        page.go(view)
        page.settle()
        assert page.page.evaluate("document.querySelectorAll('main img, main script, main b b').length") == 0
        assert page.page.evaluate("document.querySelectorAll('script').length") <= 4
        assert not page.overflows(), view
    page.go("Completions")
    page.page.locator(".one").first.wait_for()
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in page.page.locator(".one pre").first.inner_text()
    page.go("Tokens")
    page.page.locator(".tokens span").first.wait_for()
    assert "<script>" in page.page.locator(".tokens span").first.inner_text()


@pytest.mark.slow
def test_a_file_to_send_needs_nobody(short_run: Path, agents_run: Path, visit: Any, tmp_path: Path) -> None:
    path = tmp_path / "sent.html"
    export_runs([WatchedRun(short_run), WatchedRun(agents_run)], path)
    assert path.stat().st_size < 5 << 20
    page = visit(path.as_uri())
    page.sees("finished")
    page.page.locator(".card canvas").first.wait_for()
    for view in VIEWS:
        page.go(view)
        page.page.locator("main > *").first.wait_for()
        page.settle()
        assert page.page.locator("main .failed").count() == 0, view
    page.go("Completions")
    page.page.locator(".one").first.wait_for()
    whole = page.page.locator(".one").count()
    judged = 0
    for which in ("right", "wrong"):
        page.page.get_by_label("show", exact=True).select_option(which)
        page.settle()
        judged += page.page.locator(".one").count()
    assert judged == whole > 0
    page.page.get_by_label("of", exact=True).select_option("compare")
    page.sees("right in both")
    page.go("Tokens")
    page.page.locator(".tokens span").first.wait_for()
    assert page.asked[0] == path.as_uri()
    assert all(url.startswith(("data:", "blob:")) for url in page.asked[1:])

    hostile = tmp_path / "hostile.html"
    export_runs([WatchedRun(hostile_run(tmp_path / "hostile"))], hostile)
    _walk_hostile(visit(hostile.as_uri()))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_screen_readers_find_their_way(short_run: Path, agents_run: Path, visit: Any, serve: Any, scheme: str) -> None:
    address = serve(short_run, agents_run)
    page = visit(f"{address}#token={TOKEN}", color_scheme=scheme, bypass_csp=True)  # axe is put into the page
    page.page.locator(".card canvas").first.wait_for()
    for view in VIEWS:
        page.go(view)
        if view == "Agents":
            page.page.get_by_label("run", exact=True).select_option("1")
        page.settle()
        assert page.violations(["color-contrast"] if scheme == "dark" else None) == [], view


def test_the_keyboard_is_enough(short_run: Path, visit: Any, serve: Any) -> None:
    address = serve(short_run)
    page = visit(f"{address}#token={TOKEN}")
    page.page.locator(".card canvas").first.wait_for()
    focused = "document.activeElement.textContent"
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
    assert page.page.locator(".tokens span").count() > 1
    assert page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.page.keyboard.press("ArrowRight")
    assert page.page.locator("main table").inner_text() != first


def test_a_narrow_screen_needs_no_sideways_scrolling(short_run: Path, agents_run: Path, visit: Any, serve: Any) -> None:
    address = serve(short_run, agents_run)
    page = visit(f"{address}#token={TOKEN}", viewport={"width": 360, "height": 740})
    page.page.locator(".card canvas").first.wait_for()
    for view in VIEWS:
        page.go(view)
        page.settle()
        assert not page.overflows(), view


def test_an_address_without_its_token_says_so(short_run: Path, browser: Any, serve: Any) -> None:
    address = serve(short_run)
    page = Visit(browser, address)
    page.sees("this page wants its token")
    page.context.close()

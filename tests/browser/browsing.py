"""A browser that looks at `covey watch`, and what it is shown."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.serving.connections import ConnectionLimits, listen, uvicorn_server
from covey.watch.app import create_app
from covey.watch.run import WatchedRun
from covey.watch.tables import TableReader

TOKEN = "page-token"
VIEWS = ("Curves", "Completions", "Agents", "Tokens", "Questions", "Machine", "Doctor", "Settings")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
_AXE = Path(__file__).parent / "axe" / "axe.min.js"
READER = TableReader()
"""Its processes start once for all tests of a file."""
WAIT = 240_000
"""Milliseconds that anything may take on a busy machine."""


def chromium() -> str | None:
    """Where the browser is: named by COVEY_CHROMIUM, or found."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("COVEY_CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def serving(*folders: Path) -> Iterator[str]:
    listening = listen("127.0.0.1", 0)
    listening.listen(16)
    server = uvicorn_server(create_app([WatchedRun(each, READER) for each in folders], TOKEN), ConnectionLimits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Visit:
    """A page in the browser (`page`, Playwright's), addresses of all its requests (`asked`), and what it complained of:
    errors and warnings of the console, exceptions, and refused or failed requests.
    """

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.complaints, self.asked = list[str](), list[str]()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.goto(address)

    def go(self, view: str, shown: str = "") -> None:
        """Choose a view, and wait until nothing is under way and it shows an element of this kind."""
        self.page.get_by_role("navigation").get_by_role("button", name=view, exact=True).click()
        self.until(f"document.querySelector('nav [aria-current]')?.textContent === '{view}'")
        if shown:
            self.first(shown)

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression holds; the page's own policy forbids Playwright's `wait_for_function`."""
        end = time.monotonic() + WAIT / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"not within {WAIT / 1000:g} s: {expression}"
            time.sleep(0.02)

    def shown(self) -> list[str]:
        return [str(name) for name in self.page.locator("nav button:visible").all_inner_texts()]

    def views(self) -> Iterator[str]:
        """Go through all views, each with something to show."""
        self.until(f"document.querySelectorAll('nav button:not([hidden])').length === {len(VIEWS)}")
        for view in VIEWS:
            self.go(view)
            self.settle()
            yield view

    def first(self, selector: str) -> Any:
        found = self.page.locator(selector).first
        found.wait_for()
        return found

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def choose(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).select_option(value)

    def sees(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def settle(self) -> None:
        """Wait until the view has something to show, and a moment more."""
        self.until("document.querySelector('main > div')?.childElementCount > 0")
        self.until("!document.querySelector('main .loading') && !document.body.classList.contains('busy')")
        self.page.wait_for_timeout(150)

    def heap(self) -> float:
        """Memory of the page's JavaScript, in MB."""
        session = self.context.new_cdp_session(self.page)
        session.send("Performance.enable")
        found = session.send("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in found if each["name"] == "JSHeapUsedSize") / 1e6

    def violations(self, rules: list[str] | None = None) -> list[str]:
        """What axe-core finds wrong with the page as it is, by these rules or all."""
        self.page.evaluate(_AXE.read_text())
        options = {"resultTypes": ["violations"]} | ({} if rules is None else {"runOnly": rules})
        return [
            f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for each in self.page.evaluate("options => axe.run(document, options)", options)["violations"]
            for node in each["nodes"][:3]
        ]

    def overflows(self) -> bool:
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
        return bool(self.page.evaluate(wide))

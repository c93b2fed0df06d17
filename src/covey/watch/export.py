"""The page with what it shows as one file to send: opened from the disk, offline, it asks nobody for anything.

    export_runs([WatchedRun("runs/first")], Path("first.html"))

The modules become one script, and the server's answers a block of JSON. Both sizes are bounded: of a long run the file
has some steps, and says so.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.errors import DataError, RunFolderError
from covey.files import write_atomically
from covey.observe.records import Record
from covey.tasks.pictures import read_picture, rgb
from covey.watch.run import WatchedRun, describe, labels

MOST_BYTES = 20 << 20
"""Of all answers together."""
STEPS, EVALUATIONS, LEDGERS = 12, 4, 3
"""Tables of a run, from its first to its last."""
_PAGE = Path(__file__).parent / "page"
_IMPORT = re.compile(r'^import (?:\* as (\w+)|(\{[^}]*\})) from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def export_runs(runs: Sequence[WatchedRun], path: Path) -> list[str]:
    """Write the file, and return sentences on what is not in it; a file that is there is replaced.

    Raises `RunFolderError`: a run cannot be read, or the file not written.
    """
    held = _Held()
    for number, run in enumerate(runs):
        _hold(held, number, run)
    # the path on this machine is nobody else's business
    about = zip(runs, labels(runs, full=False), strict=True)
    held.answers["runs"] = [run.about() | {"label": label, "path": run.folder.path.name} for run, label in about]
    names = {name for key, found in held.answers.items() if key.endswith("/metrics") for name in found["names"]}
    held.answers["describe"] = describe(sorted(names))
    note = "static report" + "".join(f"; {each}" for each in held.left_out)
    write_atomically(path, page_with({"answers": held.answers, "note": note}).encode())
    return held.left_out


class _Held:
    """Answers by question, as `archive.js` asks; what does not fit is left out."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._left = MOST_BYTES

    def take(self, key: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        """The answer if it is held from now on: it could be had, and there is room."""
        try:
            found = ask(*arguments)
        except (RunFolderError, DataError):
            return None
        if (size := len(json.dumps(found))) > self._left:
            return None
        self._left -= size
        self.answers[key] = found
        return found


def _hold(held: _Held, number: int, run: WatchedRun) -> None:
    for name, ask, *arguments in (
        ("metrics", run.thinned),
        ("questions", _whole, run.questions),
        ("events", _whole, run.events),
    ):
        if held.take(f"{number}/{name}", ask, *arguments) is None:
            empty = {"names": [], "rows": [], "lines": [], "end": 0, "mark": "", "restarted": False, "damaged": 0}
            held.answers[f"{number}/{name}"] = empty | {"more": False}
            held.left_out.append(f"{name} of {run.folder.path.name} are too large and left out")
    while (report := run.doctor())["more"]:
        pass
    held.take(f"{number}/doctor", lambda: report)
    tables = run.tables()
    kept: dict[str, list[int]] = {"step": [], "eval": [], "ledger": []}
    for kind, most in (("eval", EVALUATIONS), ("step", STEPS)):
        for step in spread(tables[kind], most):
            key = f"{number}/completions kind={kind} step={step}"
            if held.take(key, run.ask, "completions", kind, step, {}, 0):
                kept[kind].append(step)
                _show(held, number, run, held.answers[key])
                first = held.take(f"{number}/episodes kind={kind} step={step}", run.ask, "episodes", kind, step, None)
                for group in [each["group"] for each in first["groups"][:20]] if first else ():
                    key = f"{number}/episodes group={group} kind={kind} step={step}"
                    _show(held, number, run, held.take(key, run.ask, "episodes", kind, step, group) or {"groups": ()})
    for before, after in itertools.product(kept["eval"], repeat=2):
        held.take(f"{number}/compare after={after} before={before}", run.compare, before, after, "all")
    for step in spread([step for step in tables["ledger"] if step in kept["step"]] or tables["ledger"], LEDGERS):
        if _hold_ledger(held, number, run, step):
            kept["ledger"].append(step)
    held.answers[f"{number}/tables"] = {**tables, **kept, "mark": "held"}
    whole = sum(len(tables[kind]) for kind in kept)
    if (here := sum(map(len, kept.values()))) < whole:
        held.left_out.append(f"{run.folder.path.name}: {here} of {whole} tables of completions and tokens are included")


def _show(held: _Held, number: int, run: WatchedRun, found: Record) -> None:
    """Hold the pictures of prompts, or of what was seen in turns."""
    shown = [message for group in found["groups"] for message in group.get("prompt", ())]
    shown += [turn for row in found.get("rows", ()) for turn in row["play"]]
    for sha256 in dict.fromkeys(one for each in shown for one in each.get("pictures", ())):
        if (key := f"{number}/picture/{sha256}") not in held.answers:
            held.take(key, _thumbnail, run, sha256)


def _thumbnail(run: WatchedRun, sha256: str) -> str:
    """A picture of the run as a `data:` URL, at most 256 pixels wide and high."""
    picture = read_picture(run.folder.read_picture(sha256)[0], sha256)
    image, file = rgb(picture.open()), io.BytesIO()
    image.thumbnail((256, 256))
    image.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _hold_ledger(held: _Held, number: int, run: WatchedRun, step: int) -> bool:
    found = held.take(f"{number}/ledger step={step}", run.ask, "ledger", "ledger", step)
    if found is None:
        return False
    kept = []
    for each in found["completions"][:64]:
        row, turn = each["row"], each["pass"]
        if held.take(f"{number}/ledger/{row} step={step} turn={turn}", run.ask, "ledger_of", "ledger", step, row, turn):
            kept.append(each)
    found["completions"] = kept
    return bool(kept)


def _whole(ask: Callable[[int, str], Record]) -> Record:
    """All pieces of a file of lines, the newest ones of a long one."""
    found = ask(0, "")
    lines, damaged = found["lines"], found["damaged"]
    while found["more"]:
        found = ask(found["end"], found["mark"])
        lines, damaged = (lines + found["lines"])[-20_000:], damaged + found["damaged"]
    return found | {"lines": lines, "damaged": damaged, "restarted": False}


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly spaced, the first and the last included."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def page_with(archive: Record) -> str:
    """The whole page in one text, which lets no other script run and asks nobody."""
    scripts = [(_PAGE / "uPlot.iife.min.js").read_text("utf-8"), bundled("main")]
    styles = [(_PAGE / name).read_text("utf-8") for name in ("uPlot.min.css", "style.css")]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(archive, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # ends no element
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += "".join(f"<style>{style}</style>\n" for style in styles)
    tail = f'<script type="application/json" id="archive">{data}</script>\n'
    tail += "".join(f"<script>{script}</script>\n" for script in scripts)
    index = (_PAGE / "index.html").read_text("utf-8")
    index = re.sub(r"<(?:link rel=\"stylesheet\"|script)[^>]*>(?:</script>)?\n", "", index)
    return index.replace("<title>", head + "<title>", 1).replace("</body>", tail + "</body>", 1)


def _hashes(texts: Sequence[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def bundled(main: str) -> str:
    """A module of the page and all that it imports as one classic script: each a function that returns its exports.

    Knows the forms of import and export that the page's own modules have.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (_PAGE / f"{name}.js").read_text("utf-8")
        for match in _IMPORT.finditer(text):
            if match[3] not in parts:
                add(match[3])
        body = _IMPORT.sub(lambda m: f"const {m[1] or m[2]} = modules.{m[3]};\n", text)
        exported = ", ".join(_EXPORT.findall(body))
        body = _EXPORT.sub("", body)
        kind = "async () =>" if re.search(r"^  await ", body, re.MULTILINE) and name == main else "() =>"
        parts[name] = f"modules.{name} = ({kind} {{\n{body}return {{ {exported} }};\n}})();\n"

    add(main)
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(parts.values()) + "})();\n"

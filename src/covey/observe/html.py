"""Pages of HTML from small pieces. Text is escaped wherever it goes in; what these functions return is HTML already.

    page("A run", tag("h2", "Accuracy"), table(["model", "share"], [["<base>", bar(0.4)]]))

A page is one file: its style and pictures are inside it, and no request leaves the reader's machine.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape
from matplotlib.figure import Figure

_STYLE = Markup("""
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
vertical-align: top; border-bottom: 1px solid #ddd; }
img { max-width: 100%; } details { border-bottom: 1px solid #ddd; padding: .4rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .6rem; } .note { color: #666; }
.bar { display: inline-block; width: 6rem; height: .6em; margin-right: .5rem; background: #eee; }
.bar span { display: block; height: 100%; background: #1f5fa8; } .right { color: #2b7a3d; } .wrong { color: #b03a48; }
""")
_PAGE = Markup(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>'
    "<body>\n<h1>{title}</h1>\n{body}\n</body></html>\n"
)


def page(title: str, *parts: str) -> str:
    """A whole page: its title, then the parts."""
    return str(_PAGE.format(title=title, style=_STYLE, body=Markup("\n").join(parts)))


def tag(name: str, *content: object, kind: str = "") -> Markup:
    """An element, such as `tag("p", "some text")`; `kind` is its class: "note", "right" or "wrong"."""
    start = Markup('<{} class="{}">').format(name, kind) if kind else Markup("<{}>").format(name)
    return start + Markup("").join(map(escape, content)) + Markup("</{}>").format(name)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A table; each cell is text or what another function here returned."""
    lines = [tag("tr", *(tag("th", cell) for cell in header))]
    lines += [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("table", Markup("\n").join(lines))


def bar(share: float) -> Markup:
    """A horizontal bar that is filled to a share in [0, 1]."""
    return Markup('<span class="bar"><span style="width:{:.1f}%"></span></span>').format(100 * share)


def folded(summary: str, *content: str) -> Markup:
    """Content that is shown when the reader clicks on its summary."""
    return tag("details", tag("summary", summary), *content)


def picture(figure: Figure, description: str) -> Markup:
    """A figure of Matplotlib's as a picture inside the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(description, data)

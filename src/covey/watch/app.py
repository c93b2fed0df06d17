"""The page's server: files of the page, and what the run folders hold, as JSON. It only reads.

Who has the token may ask. The page itself holds nothing and is given to anybody; it takes the token from the part of
its address after `#`, which browsers keep to themselves.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import Field

from covey.errors import RunFolderError
from covey.watch.run import WatchedRun, describe, labels

_PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Place = Annotated[int, Field(ge=0, le=1 << 53)]
Step = Annotated[int, Field(ge=0, le=10**12)]
Short = Annotated[str, Query(max_length=300)]
Kind = Literal["step", "eval"]
What = Literal["metrics", "questions", "events", "doctor", "overview"]
Bound = Annotated[float | None, Query(allow_inf_nan=False)]


@dataclass
class _Wanted:
    """Which completions are asked for; see `covey.observe.completions.Wanted`."""

    search: Short = ""
    shown: Short = "all"
    uid: Short = ""
    ended: Short = ""
    reward_from: Bound = None
    reward_to: Bound = None
    length_from: Bound = None
    length_to: Bound = None


def create_app(runs: Sequence[WatchedRun], token: str) -> FastAPI:
    """The application; every request for data must carry the token, as `Authorization: Bearer TOKEN`."""
    app = FastAPI(title="covey watch", docs_url=None, redoc_url=None, openapi_url=None)
    files = {path.name: path for path in _PAGE.iterdir() if path.suffix in _KINDS}

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if request.url.path.startswith("/api/") and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            response = _json({"error": "The access token is missing: open the address that `covey watch` printed"}, 401)
        else:
            response = await answer(request)
        for name, value in _HEADERS.items():
            response.headers[name] = value
        return response

    def run(number: int) -> WatchedRun:
        if not 0 <= number < len(runs):
            raise RunFolderError(f"run {number}: there are {len(runs)}")
        return runs[number]

    # Plain functions: each is run in a thread, and may wait for the disk.
    @app.get("/")
    def index() -> Response:
        return _file(files["index.html"])

    @app.get("/page/{name}")
    def page(name: str) -> Response:
        return _file(files[name]) if name in files else _json({"error": "no such file"}, 404)

    @app.get("/api/runs")
    def about() -> Response:
        return _json([run.about() | {"label": label} for run, label in zip(runs, labels(runs), strict=True)])

    @app.get("/api/{number}/tables")
    def tables(number: int, mark: Short = "") -> Response:
        found = run(number).tables()
        return _json({"mark": mark} if found["mark"] == mark else found)

    @app.get("/api/{number}/completions")
    def completions(
        number: int, step: Step, wanted: Annotated[_Wanted, Depends()], kind: Kind = "step", offset: Place = 0
    ) -> Response:
        return _json(run(number).ask("completions", kind, step, vars(wanted), offset))

    @app.get("/api/{number}/prompts")
    def prompts(number: int, step: Step) -> Response:
        return _json(run(number).ask("prompts", "step", step, None))

    @app.get("/api/{number}/episodes")
    def episodes(number: int, step: Step, kind: Kind = "step", group: Place | None = None) -> Response:
        return _json(run(number).ask("episodes", kind, step, group))

    @app.get("/api/{number}/search")
    def search(
        number: int,
        wanted: Annotated[_Wanted, Depends()],
        kind: Kind = "step",
        first: Step = 0,
        last: Step = 10**12,
        before: Step | None = None,
    ) -> Response:
        return _json(run(number).search(kind, vars(wanted), first, last, before))

    @app.get("/api/{number}/completion")
    def completion(number: int, step: Step, row: Place, kind: Kind = "step") -> Response:
        return _json(run(number).ask("completion", kind, step, row))

    @app.get("/api/{number}/compare")
    def compare(number: int, before: Step, after: Step, shown: Short = "changed", offset: Place = 0) -> Response:
        return _json(run(number).compare(before, after, shown, offset))

    @app.get("/api/{number}/picture/{sha256}")
    def picture(number: int, sha256: Annotated[str, PathParameter(max_length=64)]) -> Response:
        content, ending = run(number).folder.read_picture(sha256)
        return Response(content, media_type=f"image/{ending.replace('jpg', 'jpeg')}")

    @app.get("/api/{number}/ledger")
    def ledger(number: int, step: Step) -> Response:
        return _json(run(number).ask("ledger", "ledger", step))

    @app.get("/api/{number}/ledger/{row}")
    def ledger_of(number: int, row: Place, step: Step, turn: Place = 0) -> Response:
        return _json(run(number).ask("ledger_of", "ledger", step, row, turn))

    @app.get("/api/{number}/{what}")
    def plain(number: int, what: What, start: Place = 0, mark: Short = "") -> Response:
        lines = () if what in ("doctor", "overview") else (start, mark)
        return _json(getattr(run(number), what)(*lines))

    @app.get("/api/describe")
    def meanings(name: Annotated[list[str], Query(max_length=500)]) -> Response:
        return _json(describe(name))

    @app.exception_handler(RunFolderError)
    async def unreadable(_: Request, error: RunFolderError) -> Response:
        return _json({"error": str(error)}, 404)

    @app.exception_handler(RequestValidationError)
    async def misasked(_: Request, error: RequestValidationError) -> Response:
        return _json({"error": "; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in error.errors())}, 422)

    return app


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: half a character does no harm
    return Response(text, status_code=status, media_type="application/json")


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=_KINDS[path.suffix])

"""The page at /, its files, and /hierspec/state: plain files of this package that load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from hierspec.plot import COLOURS, DARK_COLOURS
from hierspec.serve.http.errors import ApiError
from hierspec.serve.page.activity import Activity, Observers
from hierspec.serve.page.state import State

router = APIRouter(tags=["page"])

_UNDERLINES = ("solid", "dashed", "dotted", "double", "wavy")  # a second sign beside the colour
# Nothing from other origins and nothing inline; no string ever becomes markup, whatever a model writes.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # cache, but revalidate
}


class _File(NamedTuple):
    content: bytes
    kind: str
    tag: str


@router.get("/", response_class=Response, include_in_schema=False)
def index(request: Request) -> Response:
    return _sent(request, "index.html")


@router.get("/page/{name}", response_class=Response, include_in_schema=False)
def file(name: str, request: Request) -> Response:
    return _sent(request, name)


@router.get("/hierspec/state", summary="The model, its plans, the load, and how fast plain decoding would be")
async def state(request: Request) -> dict[str, Any]:
    looked_at: State = request.app.state.page_state
    return await looked_at.document()


def watch(app: FastAPI) -> None:
    """Lets the page observe the application's model, beside any observer it already has."""
    activity, worker = Activity(), app.state.model.worker
    worker.observer = activity if worker.observer is None else Observers(worker.observer, activity)
    app.state.page_state = State(app.state.model, app.state.settings.plan, activity)


def _sent(request: Request, name: str) -> Response:
    if name not in _files():
        raise ApiError(404, "The page has no such file.")
    found = _files()[name]
    headers = {**_HEADERS, "ETag": found.tag}
    if found.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """The page's files by name: no path is ever built from a client's input."""
    folder = resources.files("hierspec.serve.page").joinpath("files")
    contents = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    contents["colours.css"] = _colours().encode()
    return {name: _File(content, _kind(name), _tag(content)) for name, content in contents.items()}


def _kind(name: str) -> str:
    kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _colours() -> str:
    """The project's colours, one class per source, as in charts and bench pages."""
    rules = [
        f"--s{index}: light-dark({light}, {dark});"
        for index, (light, dark) in enumerate(zip(COLOURS, DARK_COLOURS, strict=True))
    ]
    lines = [":root {", *rules, "}"]
    for index in range(len(COLOURS) * len(_UNDERLINES)):
        colour, kind = index % len(COLOURS), _UNDERLINES[(index + index // len(COLOURS)) % len(_UNDERLINES)]
        lines.append(f".g{index} {{ --own: var(--s{colour}); text-decoration-style: {kind}; }}")
    return "\n".join([*lines, ""])

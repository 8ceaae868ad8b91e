"""A server with the page and scripted answers: what a model would rarely write, when a test wants it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from hierspec.serve.listening import listen
from hierspec.serve.page import routes as page

EVIL = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>" + "w" * 300
_TARGET = {"name": "target", "layers": 30, "stores": ["copy"], "block": 1}
_DRAFTER = {"name": "drafter", "layers": None, "stores": [], "block": 4}
STATE = {
    "model": {"name": "scripted", "layers": 30, "context": 100, "vocabulary": 10, "weights": "float32"},
    "default_plan": "two",
    "plans": [
        {"name": "two", "refused": None, "tiers": [_TARGET, _DRAFTER]},
        {"name": "plain", "refused": None, "tiers": [{**_TARGET, "stores": []}]},
        {"name": "rest", "refused": "It needs a corpus.", "tiers": []},
    ],
    "load": {"running": 1, "waiting": 0},
    "plain_tokens_per_second": 20.0,
}


def piece(text: str, source: str = "target", depth: int = 0) -> dict[str, Any]:
    return {"text": text, "source": source, "depth": depth}


def rejected(text: str, at: int, parent: int = -1, source: str = "drafter") -> dict[str, Any]:
    return {"text": text, "source": source, "at": at, "parent": parent}


def step(*pieces: dict[str, Any], erased: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    drafted = sum(each["depth"] > 0 for each in pieces) + len(erased)
    return {"pieces": pieces, "rejected": erased, "tokens": len(pieces), "rows": 1 + drafted, "seconds": 0.05}


FABLE = [
    step(piece("The")),
    step(piece(" fox", "drafter", 1), piece(" ran", "drafter", 2), piece(" away"), erased=(rejected(" home", 2),)),
    step(piece(" and"), erased=(rejected(".", 0, source="copy"), rejected(" The", 0, 0))),
    step(piece(" hid", "copy", 1), piece(".\n")),
    step(piece("```py\nx = 1\n```\n", "copy", 1), piece("End")),
]
HOSTILE = [step(piece(EVIL, EVIL, 1), piece(EVIL), erased=(rejected(EVIL, 0, source=EVIL),))]


class Scripted:
    """Answers by the last message: `hostile`, `slow`, `refused`, `broken`, `different`, else a fable."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.vanished = threading.Event()  # the client of a slow answer has gone
        self.key = ""  # that must be sent, where there is one
        self.url = ""

    async def document(self) -> dict[str, Any]:
        return STATE

    async def answer(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        asked = body["messages"][-1]["content"]
        steps = HOSTILE if asked == "hostile" else FABLE
        if asked == "different" and body["plan"] == "plain":
            steps = [*FABLE[:-1], step(piece("Fin"))]
        for each in steps:
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": None}], "hierspec": each})
        if asked == "slow":
            try:
                await asyncio.Event().wait()
            finally:
                self.vanished.set()
        if asked != "broken":
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield b"data: [DONE]\n\n"


def _event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@contextmanager
def scripted_server() -> Iterator[Scripted]:
    scripted, app = Scripted(), FastAPI()
    app.include_router(page.router)
    app.state.page_state = scripted

    @app.middleware("http")
    async def key_check(request: Request, call_next: Any) -> Any:
        wanted = f"Bearer {scripted.key}" if scripted.key and request.url.path == "/hierspec/state" else None
        if wanted and request.headers.get("authorization") != wanted:
            return JSONResponse({"error": {"message": "This server needs an API key."}}, 401)
        return await call_next(request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        scripted.bodies.append(body)
        if body["messages"][-1]["content"] == "refused":
            return JSONResponse({"error": {"message": "The prompt is too <b>long</b>."}}, 400)
        return StreamingResponse(scripted.answer(body), media_type="text/event-stream")

    with serving(app) as scripted.url:
        yield scripted


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The application at an address of its own, in a thread."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()

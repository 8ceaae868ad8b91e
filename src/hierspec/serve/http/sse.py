"""Server-sent events: answers that are sent while they are generated, to clients that may vanish or stop reading."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from hierspec.serve.http.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment, which clients skip; proxies close idle connections
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not buffer
]
_GONE = 499  # nginx's status for a client that left; nobody reads this response

_log = logging.getLogger("hierspec.serve")
_Result = TypeVar("_Result")


def event(data: Any, name: str = "") -> bytes:
    """One event; protocols other than OpenAI's give it a name."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


async def unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """Returns the result of the work, or cancels it if the client disconnects first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(_GONE, "The client closed its connection.")
        return working.result()
    finally:
        await _end(working, gone)


async def event_stream(request: Request, events: AsyncGenerator[bytes, None], send_seconds: float) -> Response:
    """A response that sends these events. A failure before the first event becomes an error with its own status."""
    try:
        first = await unless_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(first, events, send_seconds)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], send_seconds: float) -> None:
        super().__init__()
        self._first, self._events, self._send_seconds = first, events, send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send, scope["path"]))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except _DoesNotRead:  # the response has no end, so the server closes the connection
            _log.warning("A client read nothing for %g s; its request was cancelled.", self._send_seconds)
        finally:
            await _end(sending, gone)
            await self._events.aclose()

    async def _send_all(self, send: Send, path: str) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*self._other_headers(), *_HEADERS]})
        await self._send(send, self._first)
        try:
            async for data in self._events:
                await self._send(send, data)
        except ApiError as error:  # the status is already sent, so the error is the last event
            await self._send(send, event(error_body(error, path)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        """Waits while the connection's buffers are full; gives up on a client that reads nothing for long."""
        try:
            async with asyncio.timeout(self._send_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise _DoesNotRead from None

    def _other_headers(self) -> list[tuple[bytes, bytes]]:
        ours = {name for name, _ in _HEADERS} | {b"content-length"}
        return [(name, value) for name, value in self.raw_headers if name not in ours]


class _DoesNotRead(Exception):
    """The client does not read from its connection."""


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Limits that apply before a request runs: size and speed of its body, and how many answers run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hierspec.serve.http.errors import ApiError, error_response
from hierspec.serve.settings import Limits

_LINGER_SECONDS, _LINGER_SHARE = 5.0, 4  # limits for discarding a rejected body, so that its sender reads the error


class Gate:
    """Counts the answers that are running or waiting."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.closed = False  # the server is stopping

    @contextmanager
    def running(self, answers: int) -> Iterator[None]:
        if self.closed:
            raise ApiError(503, "The server is stopping; send the request again later.", headers={"Retry-After": "5"})
        if self.count + answers > self.most:
            sentence = f"The server already writes {self.count} answers and takes at most {self.most}; try again soon."
            raise ApiError(429, sentence, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.count += answers
        try:
            yield
        finally:
            self.count -= answers


class BodyLimit:
    """Middleware that rejects a body that is too long or too slow, without reading more of it than the limit."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            await self._throw_away(receive)
            await error_response(self._too_large(), scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        read, whole = 0, False
        loop = asyncio.get_running_loop()
        end = loop.time() + self._limits.body_seconds

        async def limited() -> Message:
            nonlocal read, whole
            if whole:  # the next message is the client's disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                seconds = self._limits.body_seconds
                raise ApiError(408, f"The request had not come in after {seconds:g} s; send it faster.") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self._limits.body_bytes:
                await self._throw_away(receive)
                raise self._too_large()
            return message

        return limited

    async def _throw_away(self, receive: Receive) -> None:
        thrown = 0
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                more: Any = True
                while more and thrown < _LINGER_SHARE * self._limits.body_bytes:
                    message = await receive()
                    thrown += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            return

    def _too_large(self) -> ApiError:
        sentence = (
            f"The request is longer than {self._limits.body_bytes:,} bytes, the limit of this server; shorten it."
        )
        return ApiError(413, sentence, code="request_too_large", headers={"Connection": "close"})

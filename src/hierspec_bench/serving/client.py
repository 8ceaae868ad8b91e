"""A small streaming client of OpenAI's chat completions, which records when every piece of text arrives.

It uses only asyncio: 64 clients of a large library would take much of the processor that the server needs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hierspec.core.errors import HierspecError

_LONGEST_LINE = 1 << 24


@dataclass
class Reply:
    """The result of a call, and its times."""

    text: str = ""
    ended: str = ""  # finish_reason; "": it did not finish
    tokens: int = 0  # as the server counts them
    prompt_tokens: int = 0
    error: str = ""
    began: float = 0.0
    pieces: list[float] = field(default_factory=list)  # arrival times
    finished: float = 0.0

    @property
    def first_seconds(self) -> float:
        return (self.pieces[0] if self.pieces else self.finished) - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    url: str
    key: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise HierspecError(f"{self.url} is no address of a server here; give one such as http://127.0.0.1:8000.")

    async def chat(self, body: dict[str, Any], stop_after: int | None = None, reply: Reply | None = None) -> Reply:
        """One streamed answer. Closes the connection after `stop_after` pieces, like a client that vanishes.

        A given `reply` is filled piece by piece, so the caller has what arrived even if the call is cancelled.
        """
        reply = reply or Reply()
        reply.began = time.perf_counter()
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with aclosing(self._events("/v1/chat/completions", wanted)) as events:
                async for chunk in events:
                    _add(reply, chunk)
                    if stop_after is not None and len(reply.pieces) >= stop_after:
                        break
        except (OSError, EOFError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.finished = time.perf_counter()
        return reply

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a page."""
        reader, writer = await self._request("GET", path, b"")
        try:
            status, chunked = await _head(reader)
            return status, b"".join([part async for part in _body(reader, chunked)])
        finally:
            writer.close()

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        reader, writer = await self._request("POST", path, json.dumps(body).encode())
        try:
            status, chunked = await _head(reader)
            if status != 200:
                told = b"".join([part async for part in _body(reader, chunked)])
                raise ValueError(f"status {status}: {told[:300].decode('utf-8', 'replace')}")
            rest = b""
            async for part in _body(reader, chunked):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[5:])
        finally:
            writer.close()

    async def _request(self, method: str, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        assert parts.hostname
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=_LONGEST_LINE)
        heads = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        heads += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        heads += [f"Authorization: Bearer {self.key}"] if self.key else []
        writer.write("\r\n".join([*heads, "", ""]).encode() + body)
        await writer.drain()
        return reader, writer


def _add(reply: Reply, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise ValueError(str(chunk["error"])[:300])
    if chunk.get("usage"):
        reply.tokens = int(chunk["usage"]["completion_tokens"])
        reply.prompt_tokens = int(chunk["usage"].get("prompt_tokens", 0))
    for choice in chunk.get("choices", ()):
        if piece := (choice.get("delta") or {}).get("content"):
            reply.text += piece
            reply.pieces.append(time.perf_counter())
        reply.ended = choice.get("finish_reason") or reply.ended


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the body is chunked."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    return int(lines[0].split()[1]), any(line.replace(" ", "") == "transfer-encoding:chunked" for line in lines)


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while part := await reader.read(1 << 16):
            yield part
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()

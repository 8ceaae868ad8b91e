"""API keys: who may use the server, and which texts belong to whom."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hierspec.serve.http.errors import ApiError, error_response
from hierspec.serve.settings import Key

# Open to everybody: health, documentation, and the page, which asks its reader for a key.
OPEN_PATHS = {"/", "/health", "/ready", "/version", "/docs", "/openapi.json", "/favicon.ico"}
OPEN_PREFIXES = ("/page/",)


class KeyCheck:
    """Middleware that rejects requests without a key, before their bodies are read."""

    def __init__(self, app: ASGIApp, keys: tuple[Key, ...]) -> None:
        self._app = app
        self._keys = [(key, _digest(key.secret.encode())) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys:
            scope.setdefault("state", {})["key"] = key = self._key(scope)
            preflight = scope["method"] == "OPTIONS"  # a browser asks whether it may call; it sends no key yet
            if key is None and not preflight and not _is_open(scope["path"]):
                await error_response(_refusal(bool(_secret(scope))), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> Key | None:
        """The matching key; compares digests with all keys in constant time, so that timing reveals nothing about a
        key."""
        given = _digest(_secret(scope))
        matching = [key for key, digest in self._keys if hmac.compare_digest(digest, given)]
        return matching[0] if matching else None


def namespace_of(request: Request, asked: str | None) -> str:
    """The namespace of a request's text: the key's namespace, and within it the one that the client asks for."""
    key: Key | None = getattr(request.state, "key", None)
    if key is None:
        return asked or ""
    return f"{key.name}/{asked}" if asked else f"{key.name}/"


def _secret(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def _refusal(gave_one: bool) -> ApiError:
    sentence = "This server needs an API key; send it as Authorization: Bearer KEY, or as x-api-key."
    if gave_one:
        sentence = "The API key is not one of this server's keys; check it, or ask who runs the server for one."
    return ApiError(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

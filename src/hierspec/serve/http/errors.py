"""Errors for clients: in OpenAI's format, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from hierspec.core.errors import Busy, HierspecError, OutOfMemory, out_of_memory

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_DEFECT = "The server failed; its log says why."


class ApiError(HTTPException):
    """A sentence for a client, and its status. (While FastAPI reads a body, it passes on only HTTPExceptions.)"""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")


Shape = Callable[[ApiError], dict[str, Any]]


def openai_shape(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


SHAPES: dict[str, Shape] = {}  # of paths with another protocol, by prefix


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The error in the format of this path's protocol."""
    shape = next((shape for prefix, shape in SHAPES.items() if path.startswith(prefix)), openai_shape)
    return shape(error)


def error_response(error: ApiError, path: str) -> JSONResponse:
    return JSONResponse(error_body(error, path), error.status_code, error.headers)


def refusal(error: HierspecError, param: str | None = None) -> ApiError:
    """A rejection: what the library says about something that a client sent."""
    return ApiError(400, str(error), param=param)


def failure(error: HierspecError) -> ApiError:
    """A failure while an answer was generated, which is not the client's fault."""
    if isinstance(error, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "1"})
    return ApiError(500, str(error))


def unavailable(error: HierspecError) -> ApiError:
    """The model accepts no more prompts now: too many are waiting, or it is closing."""
    status = 429 if isinstance(error, Busy) else 503
    return ApiError(status, str(error), headers={"Retry-After": "1"})


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _wrong_body)
    app.add_exception_handler(HierspecError, _refused)
    app.add_exception_handler(MemoryError, _no_memory)
    app.add_exception_handler(Exception, _defect)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, ApiError):  # the framework's own errors: no such path, no such method
        assert isinstance(error, StarletteHTTPException)
        sentence = {
            404: f"There is no {request.url.path} here; /docs lists what there is.",
            405: f"{request.url.path} does not take {request.method}; /docs says what it takes.",
        }.get(error.status_code, f"{str(error.detail).rstrip('.')}.")
        error = ApiError(error.status_code, sentence, headers=error.headers)
    return error_response(error, request.url.path)


def _wrong_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    what = str(first["msg"]).rstrip(".")
    sentence = (
        f"{place}: {what[:1].lower()}{what[1:]}." if place else f"The body is wrong: {what[:1].lower()}{what[1:]}."
    )
    return error_response(ApiError(400, sentence, param=place or None), request.url.path)


def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HierspecError)
    return error_response(refusal(error), request.url.path)


def _no_memory(request: Request, error: Exception) -> JSONResponse:
    return error_response(failure(out_of_memory()), request.url.path)


def _defect(request: Request, error: Exception) -> JSONResponse:
    return error_response(ApiError(500, _DEFECT), request.url.path)

"""Reads request bodies: strict JSON with a limit on nesting."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from hierspec.serve.http.errors import ApiError


class StrictRoute(APIRoute):
    """A route that reads its body with `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        return read_json(body, self.app.state.settings.limits.nesting)


def read_json(body: bytes, nesting: int) -> Any:
    """The JSON value of a body, or an ApiError. Python also parses NaN and Infinity, which are not JSON."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8 (at byte {error.start}); send JSON in UTF-8.") from None
    except json.JSONDecodeError as error:
        raise ApiError(
            400, f"The body is not valid JSON (at character {error.pos}); check quotes and commas."
        ) from None
    except ValueError:  # an integer with thousands of digits
        raise ApiError(400, "The body holds a number that cannot be read; send JSON with ordinary numbers.") from None
    except RecursionError:
        raise _too_deep(nesting) from None
    _check_nesting(value, nesting)
    return value


def _no_number(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; leave the field out.")


def _check_nesting(value: Any, nesting: int) -> None:
    level = [value]
    for _ in range(nesting + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep(nesting)


def _too_deep(nesting: int) -> ApiError:
    return ApiError(400, f"The body nests lists and objects more than {nesting} deep; send a flatter one.")

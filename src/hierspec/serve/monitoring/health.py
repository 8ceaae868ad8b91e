"""Whether the server is running, whether it accepts requests, and which version it is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import hierspec

router = APIRouter(tags=["server"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """It takes requests: the model is loaded, and the server is not stopping."""
    if request.app.state.gate.closed:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": hierspec.__version__}

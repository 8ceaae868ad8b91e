"""/v1/models: the one served model, under all its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hierspec.serve.answering.fields import check_model
from hierspec.serve.settings import Settings

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    settings: Settings = request.app.state.settings
    return {"object": "list", "data": [_card(request, name) for name in (settings.model_name, *settings.aliases)]}


@router.get("/v1/models/{name:path}")
async def one_model(name: str, request: Request) -> dict[str, Any]:
    return _card(request, check_model(request.app.state.settings, name))


def _card(request: Request, name: str) -> dict[str, Any]:
    state = request.app.state
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "hierspec",
        "root": state.settings.model_name,
        "max_model_len": state.model.model.config.context,
    }

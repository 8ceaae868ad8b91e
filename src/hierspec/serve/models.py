"""/v1/models: the one model that is served, under its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hierspec.serve.errors import ApiError
from hierspec.serve.settings import Settings

router = APIRouter(tags=["models"])


def check_model(settings: Settings, name: str | None) -> str:
    """The name under which a request asks for the model; one left out is the model's own."""
    if name is None:
        return settings.model_name
    if name != settings.model_name and name not in settings.aliases:
        sentence = f"There is no model of that name here; this server has {settings.model_name}."
        raise ApiError(404, sentence, param="model", code="model_not_found")
    return name


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

"""The server as one application: its routes and middleware."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import hierspec
from hierspec.async_language_model import AsyncLanguageModel
from hierspec.serve.anthropic import messages
from hierspec.serve.http.errors import add_handlers
from hierspec.serve.http.keys import KeyCheck
from hierspec.serve.http.limits import BodyLimit, Gate
from hierspec.serve.http.schemas import Error
from hierspec.serve.monitoring import health, metrics
from hierspec.serve.openai import chat, completions, models, tokens
from hierspec.serve.page import routes as page
from hierspec.serve.responses import routes as responses
from hierspec.serve.responses.store import StoredResponses
from hierspec.serve.settings import Settings

_ABOUT = "Language models write faster without changing what they write. OpenAI's API; errors have OpenAI's shape."
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "What is wrong with the request, in one sentence."},
    "5XX": {"model": Error, "description": "The server failed."},
}


def create_app(model: AsyncLanguageModel, settings: Settings) -> FastAPI:
    """An application that serves this model. The caller closes the model."""
    app = FastAPI(title="hierspec", version=hierspec.__version__, description=_ABOUT, redoc_url=None, responses=_ERRORS)
    app.state.model, app.state.settings = model, settings
    app.state.gate = Gate(settings.limits.running_answers)
    app.state.metrics = model.worker.observer = metrics.Metrics(settings.model_name, model.model)
    app.state.started = time.time()
    app.state.responses = StoredResponses()
    page.watch(app)
    add_handlers(app)
    for routes in (chat, completions, responses, messages, models, tokens, health, metrics, page):
        app.include_router(routes.router)
    # Middleware that is added last runs first.
    app.add_middleware(BodyLimit, limits=settings.limits)
    app.add_middleware(KeyCheck, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app

"""Fields that every protocol has: the model, and the length limit of an answer."""

from __future__ import annotations

from hierspec.serve.http.errors import ApiError
from hierspec.serve.settings import Settings


def check_model(settings: Settings, name: str | None) -> str:
    """The name by which a request asks for the model; the default is the model's own name."""
    if name is None:
        return settings.model_name
    if name != settings.model_name and name not in settings.aliases:
        sentence = f"There is no model of that name here; this server has {settings.model_name}."
        raise ApiError(404, sentence, param="model", code="model_not_found")
    return name


def most_tokens(asked: int | None, default: int | None, settings: Settings, least: int = 1) -> int:
    """The length limit of an answer. The model's context limits it in any case."""
    limit = settings.limits.max_tokens
    if asked is not None and asked < least:
        raise ApiError(400, f"max_tokens must be at least {least}.", param="max_tokens")
    if asked is not None and limit is not None and asked > limit:
        raise ApiError(400, f"max_tokens may be at most {limit} on this server.", param="max_tokens")
    longest = (1 << 31) - 1 if limit is None else limit
    wanted = asked if asked is not None else default
    return longest if wanted is None else min(wanted, longest)

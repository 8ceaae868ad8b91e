"""What bodies of every protocol have in common. Types are strict: "1" is no number. Fields that a body does not name
are ignored, as compatible servers do."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

EVENT: dict[str, Any] = {  # one of a stream of server-sent events
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """What every refusal and failure looks like."""

    error: ErrorDetails

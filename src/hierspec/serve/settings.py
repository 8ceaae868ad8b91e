"""Settings of a server: where it listens, who may use it, and how much."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hierspec.core.errors import HierspecError
from hierspec.options import PlanLike


@dataclass(frozen=True)
class Key:
    """An API key and its owner. What is learnt from one key's texts is never used for another."""

    name: str
    secret: str

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise HierspecError(f"The name of an API key must be a text without slashes, not {self.name!r}.")
        if not self.secret or not self.secret.isascii() or any(letter.isspace() for letter in self.secret):
            raise HierspecError(f"The API key {self.name} must be ASCII letters, digits and signs, without spaces.")


@dataclass(frozen=True)
class Limits:
    """Limits on what clients may ask for."""

    body_bytes: int = 8 << 20  # of a request; rejected before more than that is read
    body_seconds: float = 60.0  # for the whole body to arrive
    nesting: int = 100  # of lists and objects
    prompt_tokens: int | None = None  # None: the model's context
    max_tokens: int | None = None  # per answer; None: the model's context
    call_answers: int = 128  # answers per call: prompts times n
    running_answers: int = 256  # of all calls at once; further calls get status 429
    answer_seconds: float = 600.0  # from the call to its last token
    send_seconds: float = 30.0  # for a client to read what was sent, before its request is cancelled
    drain_seconds: float = 30.0  # for running answers to finish when the server is told to stop

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise HierspecError(f"The limit {name} must be above 0, not {value}.")


@dataclass(frozen=True)
class Settings:
    """Settings; by default loopback without keys, so that nobody else can reach the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "hierspec"  # by which clients ask for it
    aliases: tuple[str, ...] = ()  # other names of the model
    api_keys: tuple[Key, ...] = ()  # empty: everybody may use it
    plan: PlanLike = "auto"  # for requests that name none
    temperature: float = 1.0  # for requests that set none, as in OpenAI's API
    cors_origins: tuple[str, ...] = ()  # origins of other pages that may call this server from a browser
    log_prompts: bool = False
    most_running: int = 64  # answers that share forward passes; others wait
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise HierspecError("Two API keys have the same name; give each a name of its own.")
        if not 0 <= self.temperature < math.inf:
            raise HierspecError(f"The temperature must be a finite number from 0 up, not {self.temperature}.")

"""What a server is told when it starts: where it listens, who may use it, and how much."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hierspec.core.errors import HierspecError
from hierspec.options import PlanLike


@dataclass(frozen=True)
class Key:
    """An API key, and whose it is. What is learnt from the texts of one key never serves another."""

    name: str
    secret: str

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise HierspecError(f"The name of an API key must be a text without slashes, not {self.name!r}.")
        if not self.secret or not self.secret.isascii() or any(letter.isspace() for letter in self.secret):
            raise HierspecError(f"The API key {self.name} must be ASCII letters, digits and signs, without spaces.")


@dataclass(frozen=True)
class Limits:
    """How much clients may ask for."""

    body_bytes: int = 8 << 20  # of a request; it is refused before more than that is read
    body_seconds: float = 60.0  # in which all of it must have come
    nesting: int = 100  # lists and objects inside each other
    prompt_tokens: int | None = None  # None: what the model's context holds
    max_tokens: int | None = None  # of an answer; None: what the model's context holds
    call_answers: int = 128  # answers of one call: prompts times n
    running_answers: int = 256  # of all calls at once; who comes then is told to come back later (429)
    answer_seconds: float = 600.0  # from the call to its last token
    send_seconds: float = 30.0  # that a client may take to read what was sent, before its request is cancelled
    drain_seconds: float = 30.0  # that running answers have when the server is told to stop

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise HierspecError(f"The limit {name} must be above 0, not {value}.")


@dataclass(frozen=True)
class Settings:
    """Loopback and no keys by default: nobody else can reach it."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "hierspec"  # under which clients ask for it
    aliases: tuple[str, ...] = ()  # other names for it
    api_keys: tuple[Key, ...] = ()  # none: everybody may use it
    plan: PlanLike = "auto"  # where a request names none
    temperature: float = 1.0  # where a request names none, as OpenAI's API has it
    cors_origins: tuple[str, ...] = ()  # pages of other servers that may call this one from a browser
    log_prompts: bool = False
    most_running: int = 64  # answers that share forward passes; further ones wait
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise HierspecError("Two API keys have the same name; give each a name of its own.")
        if not 0 <= self.temperature < math.inf:
            raise HierspecError(f"The temperature must be a finite number from 0 up, not {self.temperature}.")

"""Where a Redis server is, as a URL says it. Needs no package of Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from hierspec.core.errors import HierspecError

_PORT = 6379
_ENCRYPTED = {"redis": False, "rediss": True}  # by scheme
_FORM = "redis://HOST:PORT/NUMBER"


def is_url(name: str) -> bool:
    """Whether a history of this name is on a server; else it is a file."""
    return "://" in name


@dataclass(frozen=True)
class RedisAddress:
    """A database of a Redis server. Its text is the URL without user and password: it may be shown and logged."""

    host: str = "127.0.0.1"
    port: int = _PORT
    number: int = 0
    encrypted: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str) -> RedisAddress:
        """Reads redis://USER:PASSWORD@HOST:PORT/NUMBER, of which all but the scheme may be left out."""
        try:
            parts = urlsplit(url)
            port, number = parts.port or _PORT, parts.path.strip("/") or "0"
        except ValueError:
            raise HierspecError(f"The history's URL names no port that there can be; write {_FORM}.") from None
        if parts.scheme not in _ENCRYPTED:
            raise HierspecError(
                f"A history cannot be kept in {parts.scheme}://; name a file or {_FORM} (rediss:// for TLS)."
            )
        if parts.query or parts.fragment or not number.isascii() or not number.isdigit():
            raise HierspecError(f"After the port the history's URL may have a database's number alone; write {_FORM}.")
        return cls(
            parts.hostname or cls.host,
            port,
            int(number),
            _ENCRYPTED[parts.scheme],
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.encrypted else ''}://{host}:{self.port}/{self.number}"

"""Token documents on a Redis server, by namespace, within a limit of bytes. Needs the package redis.

A namespace is a stream of documents. Writes are scripts (`redis_scripts.py`), so each batch is written whole or not at
all. What the server has confirmed is there, whichever client dies next.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hierspec.core.errors import HierspecError
from hierspec.stores.archive import ACTIVE, LEAST_LIMIT, Usage, document_checksum
from hierspec.stores.redis_address import RedisAddress
from hierspec.stores.redis_scripts import DOCUMENT_BYTES, DROP, NAMESPACE_BYTES, SAME, WRITE

if TYPE_CHECKING:
    from redis import Redis

FORMAT = 1
_OLDEST_VERSION = (6, 2)  # of Redis: the first that trims streams by id
_CONNECT_SECONDS, _ANSWER_SECONDS = 2.0, 2.0
_LARGEST_BATCH = SAME // 2  # documents
_CHUNK = 1 << 20  # bytes of documents that are read at once, roughly
_MOST_AT_ONCE = 512  # documents


@dataclass
class News:
    """What a namespace has that its reader does not know yet."""

    birth: bytes  # of the namespace; empty: there is none
    whole: bool  # these are all documents: the reader had none, or those it had were dropped
    documents: list[bytes] = field(default_factory=list)  # oldest first
    last: bytes = b""  # id of the newest entry


class RedisDatabase:
    """The documents of one model on a Redis server. The limit is for all its namespaces, as charged (`file_bytes`).

    The namespace `protected` is not evicted while it takes less than half. Threads may share it.
    """

    def __init__(
        self, address: RedisAddress, limit: int, origin: tuple[str, str] = ("", ""), protected: bytes = b""
    ) -> None:
        """`origin` is the model's name and the hash of its vocabulary: each has documents of its own."""
        if limit < LEAST_LIMIT:
            raise HierspecError(f"{address} cannot be limited to {limit} bytes: allow at least {LEAST_LIMIT}.")
        self.address, self.limit = address, limit
        self._protected = protected
        self._writer = os.urandom(8)
        # Braces: a cluster keeps all keys with the same text between them on one node.
        digest = hashlib.sha256("\0".join(origin).encode()).hexdigest()[:24]
        self._prefix = f"hierspec:{FORMAT}:{{{digest}}}:".encode()
        self._redis = _connected(address)
        self._run_write, self._run_drop = (self._redis.register_script(script) for script in (WRITE, DROP))

    def is_durable(self) -> bool:
        """Whether the server writes to disk what it answers to (its append-only file)."""
        with self._readable_errors():
            return bool(self._redis.info("persistence").get("aof_enabled"))

    def write(self, documents: Sequence[tuple[bytes, bytes]]) -> None:
        """Adds all of these (namespace, tokens) or, on any error, none; evicts the oldest where space is missing.

        Leaves out what is among the newest documents of its namespace already.
        """
        if not documents:
            return
        values: list[Any] = [self._writer, os.urandom(16), self.limit, ACTIVE, self._protected]
        for namespace, tokens in documents:
            values += [namespace, tokens, document_checksum(namespace, tokens)]
        with self._readable_errors():
            self._run_write([self._prefix], values)

    def batch_size(self, documents: Sequence[tuple[bytes, bytes]]) -> int:
        count = min(len(documents), _LARGEST_BATCH)
        while count > 1 and sum(len(tokens) for _, tokens in documents[:count]) > min(_CHUNK, self.limit // 16):
            count //= 2
        return count

    def holds(self, namespace: bytes, tokens: bytes) -> bool:
        """Always False: `write` itself skips documents of an earlier write whose answer was lost."""
        return False

    def read(self, namespace: bytes, max_bytes: int | None = None) -> Iterator[bytes]:
        """The documents of one namespace, oldest first; only about the newest `max_bytes` where that is given."""
        return iter(self.news(namespace, max_bytes=max_bytes).documents)

    def news(self, namespace: bytes, birth: bytes = b"", last: bytes = b"", max_bytes: int | None = None) -> News:
        """What was added to a namespace after the entry `last`, if its birth is still the same.

        Entries that this object wrote are left out, unless the whole namespace is read.
        """
        with self._readable_errors():
            now, entries = self._after(namespace, last)
            if now != birth:
                return self._whole(namespace, now, max_bytes)
            news = News(now, False, last=last)
            while entries:
                news.last = entries[-1][0]
                news.documents += _valid(namespace, (values for _, values in entries if values[b"w"] != self._writer))
                now, entries = self._after(namespace, news.last)
                if now != birth:
                    return self._whole(namespace, now, max_bytes)
            return news

    def usage(self, namespace: bytes | None = None) -> Usage:
        with self._readable_errors(), self._redis.pipeline() as ask:
            if namespace is None:
                ask.hmget(self._key("totals"), ["bytes", "documents", "names"])
                ask.hlen(self._key("births"))
                (charged, documents, names), namespaces = ask.execute()
            else:
                ask.zscore(self._key("sizes"), namespace)
                ask.xlen(self._stream(namespace))
                charged, documents = ask.execute()
                namespaces, names = int(charged is not None), len(namespace)
        documents = int(documents or 0)
        charged = int(charged or 0) - documents * DOCUMENT_BYTES - namespaces * NAMESPACE_BYTES - 4 * int(names or 0)
        return Usage(documents, max(0, charged), namespaces)

    def file_bytes(self) -> int:
        """What all namespaces are charged together: tokens, names and an upper bound of Redis's own structures."""
        with self._readable_errors():
            return int(self._redis.hget(self._key("totals"), "bytes") or 0)

    def drop(self, namespace: bytes | None = None) -> None:
        """Deletes one namespace, or all, and has the server rewrite its append-only file, which still holds them."""
        with self._readable_errors():
            names = [namespace] if namespace is not None else self._redis.hkeys(self._key("births"))
            for start in range(0, len(names), _MOST_AT_ONCE):
                self._run_drop([self._prefix], names[start : start + _MOST_AT_ONCE])
            import redis

            with suppress(redis.ResponseError):  # it is being written just now, or this user may not
                self._redis.bgrewriteaof()

    def close(self) -> None:
        self._redis.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _stream(self, namespace: bytes) -> bytes:
        return self._key("documents:") + namespace

    def _after(self, namespace: bytes, last: bytes) -> tuple[bytes, list[Any]]:
        """The namespace's birth and its next entries, as of one moment."""
        with self._redis.pipeline(transaction=True) as ask:
            ask.hget(self._key("births"), namespace)
            ask.xrange(self._stream(namespace), b"(" + last if last else b"-", b"+", count=_MOST_AT_ONCE if last else 1)
            birth, entries = ask.execute()
        return birth or b"", entries

    def _whole(self, namespace: bytes, birth: bytes, max_bytes: int | None) -> News:
        """The newest documents of a namespace, read from its end."""
        usage, news, size, before = self.usage(namespace), News(birth, True), 0, b"+"
        at_once = max(1, min(_MOST_AT_ONCE, _CHUNK * max(1, usage.documents) // max(1, usage.bytes)))
        newest_first: list[bytes] = []
        while birth and (max_bytes is None or size < max_bytes):
            entries: Any = self._redis.xrevrange(self._stream(namespace), before, b"-", count=at_once)
            if not entries:
                break
            news.last = news.last or entries[0][0]
            newest_first += _valid(namespace, (values for _, values in entries))
            size += sum(len(values.get(b"t", b"")) for _, values in entries)
            before = b"(" + entries[-1][0]
        news.documents = newest_first[::-1]
        return news

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        with _readable_errors(self.address):
            yield


def check_redis(address: RedisAddress) -> None:
    """Refuses an address where no Redis server answers, in one sentence."""
    _connected(address).close()


def _connected(address: RedisAddress) -> Redis:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise HierspecError(
            f"A history in {address} needs the package redis; install it with: pip install 'hierspec[redis]'"
        ) from error
    client = redis.Redis(
        host=address.host,
        port=address.port,
        db=address.number,
        username=address.user,
        password=address.password,
        ssl=address.encrypted,
        protocol=2,
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_ANSWER_SECONDS,
        # Retry once if an idle connection was closed; a slow server is not asked twice.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )
    try:
        with _readable_errors(address):
            version = str(client.info("server").get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST_VERSION:
            raise HierspecError(f"{address} is Redis {version}; a history needs 6.2 or newer.")
    except BaseException:
        client.close()
        raise
    return client


@contextmanager
def _readable_errors(address: RedisAddress) -> Iterator[None]:
    """Errors of the client as one sentence that repeats neither a password nor a document."""
    import redis

    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise HierspecError(
            f"{address} refuses this user or password; name them as redis://USER:PASSWORD@…."
        ) from error
    except (redis.TimeoutError, TimeoutError) as error:
        raise HierspecError(f"{address} does not answer in time; look whether the server is overloaded.") from error
    except (redis.ConnectionError, OSError) as error:
        raise HierspecError(f"No Redis server answers at {address}; start one there or name another.") from error
    except redis.RedisError as error:
        reason = " ".join(str(error).split()[:12])
        raise HierspecError(f"{address} refuses what a history needs ({reason}); look at its settings.") from error


def _valid(namespace: bytes, entries: Iterator[dict[bytes, bytes]]) -> list[bytes]:
    """Their tokens, without entries that are not what was written into this namespace."""
    valid = []
    for values in entries:
        tokens = values.get(b"t", b"")
        if values.get(b"c") == b"%d" % document_checksum(namespace, tokens) and len(tokens) % 4 == 0:
            valid.append(tokens)
    return valid

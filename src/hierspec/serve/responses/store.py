"""Responses that are kept in memory, so that later ones can continue them. Each key sees only its own."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from hierspec.serve.http.errors import ApiError

_MOST_RESPONSES, _MOST_BYTES = 4096, 64 << 20


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]
    items: list[dict[str, Any]]  # the input of this response alone
    history: list[dict[str, Any]]  # all items before and in this response's input, and its output
    bytes: int


class StoredResponses:
    """Stored responses; the oldest are dropped if there are too many."""

    def __init__(self, most: int = _MOST_RESPONSES, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes = 0

    def add(self, owner: str, response: dict[str, Any], items: list[dict[str, Any]], before: list[Any]) -> None:
        history = [*before, *items, *response["output"]]
        size = len(json.dumps([response, history]))
        self._stored[owner, response["id"]] = StoredResponse(response, items, history, size)
        self._bytes += size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.bytes

    def get(self, owner: str, response_id: str) -> StoredResponse:
        stored = self._stored.get((owner, response_id))
        if stored is None:
            sentence = "There is no stored response of that id; it was deleted, or made room for newer ones."
            raise ApiError(404, sentence, param="response_id")
        return stored

    def delete(self, owner: str, response_id: str) -> None:
        self._bytes -= self.get(owner, response_id).bytes
        del self._stored[owner, response_id]

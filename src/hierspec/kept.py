"""What was measured once on this machine and is read from the cache from then on.

file = KeptFile.here("costs", model_name, VERSION)
seconds = file.read_or_measure(from_json=float_list, measure=lambda: measure(model), to_json=as_dictionary)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hierspec.core.errors import HierspecError
from hierspec.in_use import mark_used
from hierspec.machine import machine
from hierspec.paths import cache_folder, whole_file

_T = TypeVar("_T")
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, HierspecError)


@dataclass(frozen=True)
class KeptFile:
    """A file of the cache whose name is a hash of everything that its content depends on."""

    path: Path
    identity: Sequence[Any]

    @classmethod
    def here(cls, folder: str, *about: Any, name: str = "{key}.json") -> KeptFile:
        """A file for this machine and number of threads.

        `about` is what else the content depends on, with a version to increase when it should be measured again.
        """
        return cls.of(folder, [machine(), torch.get_num_threads(), *about], name)

    @classmethod
    def of(cls, folder: str, identity: Sequence[Any], name: str = "{key}.json", digits: int = 20) -> KeptFile:
        content = json.dumps(identity, sort_keys=True, default=str)
        key = hashlib.sha256(content.encode()).hexdigest()[:digits]
        return cls(cache_folder() / folder / name.format(key=key), identity)

    def read(self, parse: Callable[[str], _T]) -> _T | None:
        """The content; None if there is none or `parse` refuses it: a damaged file counts as none."""
        try:
            content = parse(self.path.read_text(encoding="utf-8"))
        except _DAMAGED:
            return None
        mark_used(self.path)
        return content

    def read_json(self, from_json: Callable[[Any], _T]) -> _T | None:
        return self.read(lambda text: from_json(json.loads(text)))

    def write(self, text: str) -> None:
        """Write the whole file or nothing; HierspecError if that is impossible."""
        with whole_file(self.path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_json(self, document: Mapping[str, Any]) -> None:
        """As `write`, but a full disk stops nobody: the next process measures again."""
        with suppress(HierspecError):
            self.write(json.dumps(document, indent=2, default=str) + "\n")

    def read_or_measure(
        self, from_json: Callable[[Any], _T], measure: Callable[[], _T], to_json: Callable[[_T], Mapping[str, Any]]
    ) -> _T:
        """What the file says, or else what `measure` returns, which is saved for the next time."""
        result = self.read_json(from_json)
        if result is None:
            result = measure()
            self.write_json({**to_json(result), "about": self.identity})
        return result

"""What a model's paces have learnt, kept between runs: how often which drafts were accepted, never what was written.

A new process begins with what the last one knew about this model on this machine, or else with the prior that ships
with the model's pack. Either way it is a prior: a few answers of another kind outweigh it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hierspec.kept import KeptFile

_VERSION = 1  # increase when the meaning of the kept counts changes
_MOST_PARTS = 32  # parts kept for one model: the most recently used
_MOST_CHARACTERS = 1_000_000  # of the file
_OFF = "HIERSPEC_LEARNT"  # set to "off" in the environment: nothing is read or kept


class Learnt:
    """The file of one model on this machine. `about` identifies the model."""

    def __init__(self, about: Sequence[str], prior: Mapping[str, Any] | None = None, kept: bool = True) -> None:
        self.prior = dict(prior or {})
        self._file = KeptFile.here("learnt", list(about), _VERSION)
        self._kept = kept and os.environ.get(_OFF) != "off"

    def parts(self) -> dict[str, Any]:
        """What each learning part begins with, by its name."""
        return {**self.prior, **self._read()}

    def keep(self, parts: Mapping[str, Any]) -> None:
        """Save what was learnt. Parts that this run did not use stay as they were."""
        if not self._kept or not parts:
            return
        others = {name: part for name, part in self._read().items() if name not in parts}
        latest = dict([*others.items(), *parts.items()][-_MOST_PARTS:])
        document = {"parts": _rounded(latest), "about": self._file.identity}
        if len(json.dumps(document)) <= _MOST_CHARACTERS:
            self._file.write_json(document)

    def forget(self) -> None:
        """Delete the file."""
        self._file.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        if not self._kept:
            return {}
        return self._file.read_json(lambda document: dict(document["parts"])) or {}


def _rounded(value: Any) -> Any:
    """Rounded to the digits that matter, so that people can read the file."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value

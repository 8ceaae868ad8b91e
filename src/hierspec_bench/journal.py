"""A file of what a run has finished, line by line, so that the same command can resume it after a stop.

The first line has the settings, part by part as hashes; every other line is something finished. Every line is flushed;
a torn last line (power failure, full disk) is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import why
from hierspec.paths import make_folder

_KIND = "hierspec bench journal 5"


def journal_path(output: Path) -> Path:
    return output.with_suffix(".partial.jsonl")


def fingerprint(part: Any) -> str:
    """A hash of anything that JSON can write."""
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()


class Journal:
    """Opens the journal of a stopped run with these settings, or starts one. `entries` are those of the stopped run."""

    def __init__(self, path: Path, setting: Mapping[str, Any], restart: bool = False) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        hashes = {name: fingerprint(part) for name, part in setting.items()}
        make_folder(path.parent)
        if restart:
            path.unlink(missing_ok=True)
        lines = _whole_lines(path)
        if lines:
            self._check(lines[0], hashes)
            self.entries = lines[1:]
        self._file: TextIO = path.open("a", encoding="utf-8")
        if not lines:
            self.write({"journal": _KIND, "setting": hashes})

    def write(self, entry: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise HierspecError(
                f"{self.path} cannot be written: make room and run the same command again, which resumes it."
            ) from error

    def close(self, finished: bool = False) -> None:
        self._file.close()
        if finished:
            self.path.unlink(missing_ok=True)

    def _check(self, header: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
        if header.get("journal") != _KIND:
            raise HierspecError(
                f"{self.path} is not what a stopped bench leaves; move it, or start over with --restart."
            )
        written = header["setting"]
        others = [name for name in {**written, **hashes} if written.get(name) != hashes.get(name)]
        if others:
            raise HierspecError(
                f"{self.path} holds part of a run with another setting ({', '.join(others)}): repeat that command to "
                "finish it, choose another --output, or start over with --restart."
            )


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the file; a torn end is cut off, so that appended text starts a new line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HierspecError(f"{path} cannot be read ({why(error)}); start over with --restart.") from error
    lines: list[dict[str, Any]] = []
    whole = 0
    for line in content.splitlines(keepends=True):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            break
        lines.append(entry)
        whole += len(line)
    if whole < len(content):
        if content[whole:].count(b"\n") > 1 or (content and not lines and b"\n" in content):
            raise HierspecError(f"{path} is damaged in the middle; start over with --restart.")
        os.truncate(path, whole)
    return lines

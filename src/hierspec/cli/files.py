"""Files that options name. All are checked before a command starts, so that a typing error costs no minutes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hierspec.cli.parser import name
from hierspec.core.errors import HierspecError


class _NamedPath(type(Path())):  # type: ignore[misc]
    """A path from the command line."""

    def __new__(cls, *parts: str) -> _NamedPath:
        for part in parts:
            if isinstance(part, str):
                name(part)
                if not part:
                    raise argparse.ArgumentTypeError("needs a name")
        path: _NamedPath = super().__new__(cls, *parts)
        return path


class InputFile(_NamedPath):
    """A file that a command reads."""

    def check(self) -> None:
        if self.is_dir():
            raise HierspecError(f"{self} is a folder; name a file.")
        if not self.exists():
            raise HierspecError(f"{self} cannot be read: there is no such file.")
        if not os.access(self, os.R_OK):
            raise HierspecError(f"{self} cannot be read: you are not permitted to; change its permissions.")


class OutputFile(_NamedPath):
    """A file that a command writes, in a folder that is made if need be."""

    def check(self) -> None:
        if self.is_dir():
            raise HierspecError(f"{self} is a folder; name a file to write.")
        _check_writable(self)


class Folder(_NamedPath):
    """A folder that a command looks into, if it is there."""

    def check(self) -> None:
        if self.exists() and not self.is_dir():
            raise HierspecError(f"{self} is a file; name a folder.")


class OutputFolder(Folder):
    """A folder that a command writes to, and makes if need be."""

    def check(self) -> None:
        super().check()
        if self.name in ("", ".."):  # files beside it are named after it
            raise HierspecError(f"{self} has no name of its own; name a folder below it.")
        _check_writable(self / "a file")


def check_files(arguments: argparse.Namespace) -> None:
    """HierspecError for the first file that cannot be used as the command would."""
    for value in vars(arguments).values():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, InputFile | OutputFile | Folder):
                path.check()


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise HierspecError(f"{path} cannot be written: {folder} is a file, not a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HierspecError(f"{path} cannot be written: {folder} is not yours to write to; choose another folder.")

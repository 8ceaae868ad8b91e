"""The algorithm is numpy alone: `core` imports nothing of ours outside itself, `pacing` nothing but `core`."""

import ast
import sys
from pathlib import Path

import pytest

import hierspec

SOURCE = Path(hierspec.__file__).parent


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module))
    return names


@pytest.mark.parametrize(("folder", "ours"), [("core", ("core",)), ("pacing", ("core", "pacing"))])
def test_only_numpy_and_what_is_below(folder: str, ours: tuple[str, ...]) -> None:
    files = list((SOURCE / folder).glob("*.py"))
    assert files
    allowed = tuple(f"hierspec.{name}." for name in ours)
    for path in files:
        for name in imported(path):
            standard = name.split(".")[0] in sys.stdlib_module_names or name == "numpy"
            assert standard or name.startswith(allowed), f"{path.name} imports {name}"

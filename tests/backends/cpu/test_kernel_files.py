"""Compiled code is cached by a checksum of sources: a file that is missing from it would leave old code in use."""

import ast
from pathlib import Path

import pytest

from hierspec.backends.cpu import compiled

FOLDER = Path(compiled.__file__).parent
PACKAGE = "hierspec.backends.cpu"


def imported(name: str) -> set[str]:
    """Files of the folder that this one imports."""
    modules = set()
    for node in ast.walk(ast.parse((FOLDER / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            rest = node.module.removeprefix(PACKAGE).removeprefix(".")
            modules |= {rest} if rest else {alias.name for alias in node.names}
    return {f"{module}.py" for module in modules}


def behind(*names: str) -> set[str]:
    """These files and all that they import, directly or not."""
    known: set[str] = set()
    new = {*names}
    while new:
        known |= new
        new = set().union(*map(imported, new)) - known
    return known


@pytest.mark.parametrize(
    ("compiled_files", "listed"),
    [
        (["layers.py", "attention.py", "amx_attention.py"], [*compiled._KERNEL_FILES]),
        (["filters.py", "pick.py", "head_passes.py"], [*compiled._KERNEL_FILES, *compiled._FILTER_FILES]),
    ],
)
def test_every_file_that_compiled_code_comes_from_is_in_its_checksum(compiled_files, listed):
    assert behind(*compiled_files) <= {*listed}
    assert all((FOLDER / name).is_file() for name in listed)

"""Arrows point one way: which folder may import which, and no circles. Read off the code's own imports."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
# From the ground up: a room may import rooms of lower floors and its own. Rooms of one floor do not know each other.
FLOORS = [
    ["hierspec.core", "hierspec.fair_queue", "hierspec.progress", "hierspec.plot", "hierspec.coloured_html"],
    [
        "hierspec.paths",
        "hierspec.compiling",
        "hierspec.in_use",
        "hierspec.sizes",
        "hierspec.machine",
        "hierspec.pacing",
        "hierspec.prompts",
        "hierspec.progress_bar",
    ],
    [
        "hierspec.cache",
        "hierspec.compiled",
        "hierspec.kept",
        "hierspec.sqlite_file",
        "hierspec.text",
        "hierspec.prompt_sets",
    ],
    ["hierspec.stores", "hierspec.checkpoints", "hierspec.grammars"],
    ["hierspec.backends.base", "hierspec.backends.arena"],
    ["hierspec.backends.torch"],
    ["hierspec.backends.cpu", "hierspec.backends.cuda"],
    ["hierspec.scorers"],
    ["hierspec.testing"],
    ["hierspec.assembly"],
    ["hierspec.hosts"],
    ["hierspec.generation", "hierspec.options", "hierspec.turns"],
    ["hierspec.prompt_ids", "hierspec.streams"],
    ["hierspec.generating"],
    ["hierspec.language_model"],
    ["hierspec"],
    ["hierspec.chat", "hierspec.equality", "hierspec.worker"],
    ["hierspec.async_language_model"],
    ["hierspec.fill_history", "hierspec.train"],
    ["hierspec.planner"],
    ["hierspec.serve.settings"],
    ["hierspec.serve.http"],
    ["hierspec.serve.answering", "hierspec.serve.monitoring", "hierspec.serve.page"],
    ["hierspec.serve.openai"],
    ["hierspec.serve.responses", "hierspec.serve.anthropic"],
    ["hierspec.serve"],
    ["hierspec.cli"],
    ["hierspec_bench"],
    ["hierspec.__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
NUMPY_ONLY = ("hierspec.core", "hierspec.pacing")


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imports(path: Path) -> set[str]:
    """Modules that a file names in its imports, wherever they stand."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else node.module)
    return names


OURS = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    return max((known for known in FLOOR if module == known or module.startswith(f"{known}.")), key=len, default="")


def test_every_file_has_a_room():
    # The package's own __init__ only names what users import; that of backends has no code.
    roomless = {name for name in MODULES if room(name) in ("", "hierspec")}
    assert roomless == {"hierspec", "hierspec.backends"}


def test_no_arrow_points_upward():
    upward = [
        f"{name} imports {other}"
        for name, others in OURS.items()
        for other in others
        if room(name) != room(other) and FLOOR[room(other)] >= FLOOR[room(name)] and name != "hierspec"
    ]
    assert upward == []


def test_there_is_no_circle():
    try:
        TopologicalSorter(OURS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_core_and_pacing_need_numpy_alone():
    for name, path in MODULES.items():
        if name.startswith(NUMPY_ONLY):
            others = {other.split(".")[0] for other in imports(path)} - {"hierspec"}
            assert not others & {"torch", "numba", "safetensors", "tokenizers", "jinja2", "gguf", "rich"}, name


def test_core_imports_nothing_of_ours_outside_itself():
    outside = {name: others for name, others in OURS.items() if name.startswith("hierspec.core")}
    assert not {other for others in outside.values() for other in others if not other.startswith("hierspec.core")}

"""The documents are right: commands parse, Python runs, links and files exist, figures are those of records."""

import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import hierspec
from hierspec.cli import main as command_line
from hierspec.core.plan import NAMED
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec_bench.cli import main as bench_command_line

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
LOG = ROOT / "docs" / "log.md"  # tells what was, in the words and commands of its day
DOCUMENTS = [
    path
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
    if path != LOG and path.name != "CHANGELOG.md"
]


def text_of(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(path: str | Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)


def by_name(path: Path) -> str:
    return path.name


# Python and plans


@pytest.fixture
def _tiny_default(tmp_path, monkeypatch):
    """`hierspec.load()` gives a tiny model instead of the default one."""
    model = hierspec.load(tiny_checkpoint(tmp_path / "tiny", "llama"))
    monkeypatch.setattr(hierspec, "load", lambda *a, **k: model, raising=False)


@pytest.mark.usefixtures("_tiny_default")
@pytest.mark.parametrize("path", ["README.md", "docs/api.md"])
def test_python_blocks_run(path, capsys):
    names: dict[str, object] = {}
    for block in blocks(path, "python"):
        exec(compile(block, path, "exec"), names)
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_python_blocks_compile_and_import(path):
    for block in blocks(path, "python"):
        compile(block, path.name, "exec")
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert all(hasattr(import_module(node.module), alias.name) for alias in node.names), block


def test_every_named_plan_is_documented():
    table = text_of("docs/plans.md").partition("## Named plans")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == ["auto", *NAMED]


def test_plans_parse():
    plans = blocks("docs/plans.md", "toml")
    assert plans
    for block in plans:
        plan = hierspec.Plan.from_toml(block)
        assert hierspec.Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.usefixtures("_tiny_default")
def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "custom_store.py"), run_name="__main__")
    assert "identical to plain: True" in capsys.readouterr().out


# Commands


def command_lines(path: Path) -> Iterator[list[str]]:
    """Lines of code blocks that call hierspec, without the explanation that two spaces or a # set off."""
    indented = re.findall(r"^    (?=\S)(.*)$", text_of(path), re.MULTILINE)
    for line in "\n".join([*blocks(path, "(?:sh)?"), *indented]).splitlines():
        for command in re.split(r"  +|\s[#>]\s", line.removeprefix("$ "))[0].split(" && "):
            program, _, arguments = command.strip().partition(" ")
            if Path(program).name == "hierspec":
                yield shlex.split(arguments)


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_commands_parse(path, monkeypatch):
    for module in (command_line, bench_command_line):
        monkeypatch.setattr(module, "run_chosen", lambda arguments: 0)
    for arguments in command_lines(path):
        shown = shlex.join(["hierspec", *arguments])
        try:
            if arguments[0] == "bench":
                assert arguments[1:2] == [] or arguments[1] in bench_command_line.COMMANDS, f"an old spelling: {shown}"
                assert bench_command_line.main(arguments[1:]) == 0
            else:
                assert command_line.main(arguments) == 0
        except SystemExit:
            pytest.fail(f"{path.name}: {shown}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_commands_named_in_sentences_exist(path):
    for first, second in re.findall(r"`hierspec ([a-z]+)(?: ([a-z]+)\b)?", text_of(path)):
        assert first in (*command_line.COMMANDS, "bench"), first
        assert first != "bench" or second in ("", *bench_command_line.COMMANDS), second


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_scripts_and_modules_named_exist(path):
    for script in re.findall(r"\b(?:python )?((?:experiments|examples)/[a-z_]+\.(?:py|toml|txt))", text_of(path)):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"python -m (hierspec[\w.]+)", text_of(path)):
        import_module(module)


# Links and files


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*DOCUMENTS, LOG, ROOT / "CHANGELOG.md"], ids=by_name)
def test_links_in_the_documents_exist(path):
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_every_document_is_in_the_index():
    index = text_of("docs/README.md")
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index] == ["README.md"]


def tree_of(text: str) -> set[str]:
    """Paths in a tree of two spaces a level: one file a line, then what it is; folders end in a slash."""
    folders: list[str] = []
    paths = set()
    for line in text.splitlines():
        level, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        del folders[level:]
        if name.endswith("/"):
            folders.append(name)
        else:
            paths.add("".join(folders) + name)
    return paths


def test_the_tree_names_every_file():
    [tree] = blocks("CONTRIBUTING.md", "text")
    named = tree_of(tree)
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src/hierspec", "src/hierspec_bench", "experiments", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    missing = [name for name in files if not name.endswith("__init__.py") and not any(fnmatch(name, n) for n in named)]
    superfluous = [name for name in named if not any(fnmatch(file, name) for file in files)]
    assert (sorted(missing), sorted(superfluous)) == ([], [])


# Figures and messages


def speedups(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Of every plan at every temperature of a bench record, over all prompts and by task."""
    for plans in (record["plans"], *(other["plans"] for other in record.get("other_temperatures", ()))):
        for name, figures in plans.items():
            yield name, figures["speedup"]
            for task in figures.get("tasks", {}).values():
                yield name, task["speedup"] if isinstance(task, dict) else task


@pytest.mark.parametrize("path", ["README.md", "docs/which-plan.md"])
def test_speedups_in_tables_are_those_of_the_records_named(path):
    rows = [row for row in text_of(path).splitlines() if row.startswith("| ") and ".json" in row]
    assert rows
    for row in rows:
        figures = set()
        for name in re.findall(r"[\w.-]+\.json", row):
            record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
            # A record of a GPU has several runs; one of HiSpec's tables has its plans under "named".
            for run in (record, *record.get("runs", ()), {"plans": record.get("named")}):
                if isinstance(run.get("plans"), dict):
                    figures |= {(plan, f"{figure:.2f}x") for plan, figure in speedups(run)}
        for plan, figure in re.findall(r"`([^`]+)` (\d\.\d\dx)(?! and)", row):
            assert (plan, figure) in figures, row


def test_every_record_is_in_the_index():
    listed = re.findall(r"\]\(results/([^)]+)\)", text_of("docs/results.md"))
    assert sorted(listed) == sorted(path.name for path in RESULTS.iterdir())


def test_the_headline_and_its_chart_are_what_make_demo_measured(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "experiments"), *sys.path])
    drawing = import_module("hero").drawing
    record = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    assert record["identical"]
    assert f"speed-up {record['speedup']:.2f}x; identical to plain" in text_of("README.md")
    assert text_of("docs/pictures/hero.svg") == drawing(record), "draw it again: experiments/hero.py"


def messages_of_the_code() -> list[str]:
    """All texts in the sources, cut where values are put in."""
    texts = [text_of("Makefile")]
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_in_troubleshooting_are_those_of_the_code():
    messages = re.findall(r"^\| `([^`]{20,})` \|", text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert messages
    texts = messages_of_the_code()
    for message in messages:
        for part in message.split("…"):
            words = part.strip(" ();:,.")
            assert len(words) < 6 or any(words in text for text in texts), f"{message}: {words!r}"

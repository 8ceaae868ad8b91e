"""The documents are right: every Python block runs, every plan parses, the example runs, links work."""

import re
import runpy
from pathlib import Path

import pytest

import hierspec
from hierspec.core.plan import NAMED
from hierspec.testing.checkpoints import tiny_checkpoint

ROOT = Path(__file__).parent.parent


def blocks(path: str, language: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    matches = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert matches
    return matches


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


def test_every_named_plan_is_documented():
    table = (ROOT / "docs/plans.md").read_text(encoding="utf-8").partition("## Named plans")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == ["auto", *NAMED]


def test_plans_parse():
    for block in blocks("docs/plans.md", "toml"):
        plan = hierspec.Plan.from_toml(block)
        assert hierspec.Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.usefixtures("_tiny_default")
def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "custom_store.py"), run_name="__main__")
    assert "identical to plain: True" in capsys.readouterr().out


def test_links_in_the_documents_exist():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert link.startswith("http") or (path.parent / link).exists(), f"{path.name}: {link}"

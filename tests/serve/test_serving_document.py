"""The examples of docs/serving.md run against a real server, by the clients they are for."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from serving import running

from hierspec.serve.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
PYTHON = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
CURL = [block for block in re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE) if "curl" in block]


@pytest.fixture(scope="module")
def served(tiny_model):
    with running(tiny_model, Settings(model_name="hierspec")) as each:
        yield each


def package(block: str) -> str:
    found = re.search(r"^(?:from|import) (\w+)", block, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("block", PYTHON, ids=[f"{number} {package(block)}" for number, block in enumerate(PYTHON)])
def test_python_examples_run(block, served, capsys):
    if find_spec(package(block)) is None:
        pytest.skip(f"{package(block)} is not installed")
    if "structured_outputs" in block and find_spec("llguidance") is None:
        pytest.skip("grammars need llguidance")
    assert ADDRESS in block
    exec(compile(block.replace(ADDRESS, served.url), "docs/serving.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.strip()
    if "# 1" in block:
        assert printed == "1\n"
    if "structured_outputs" in block:
        assert printed.strip() in ("yes", "no")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_example_runs(served):
    [block] = CURL
    command = block.replace(ADDRESS, served.url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("data: {")
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_every_route_is_in_the_table(served):
    table = DOCUMENT.partition("## Routes")[2].partition("\n## ")[0]
    routes = {route.path for route in served.server.config.app.routes if isinstance(route, APIRoute)}
    named = set(re.findall(r"`(/[^`]*)`", table))
    # Of a stored response and of the page there is more than one address.
    assert {route for route in routes if "{" not in route and route not in ("/", "/hierspec/state")} <= named


def test_every_metric_named_exists(served):
    rendered = served.server.config.app.state.metrics.render().decode()
    families = set(re.findall(r"^# TYPE (\S+) ", rendered, re.MULTILINE))
    for name in re.findall(r"`((?:vllm|hierspec):\w+)`", DOCUMENT):
        assert {name, f"{name}_total"} & families, name

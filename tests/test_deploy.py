"""What deploy/ holds is right as far as can be seen without docker: it parses, and names what exists."""

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import hierspec
from hierspec.cli import main as command_line
from hierspec.serve.monitoring.metrics import Metrics
from hierspec.testing.checkpoints import tiny_checkpoint

DEPLOY = Path(__file__).parents[1] / "deploy"
ROOT = DEPLOY.parent


def read(path: str) -> str:
    return (DEPLOY / path).read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: each instruction and what it is given, lines joined."""
    lines = [line for line in read("Dockerfile").splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


def the_last(name: str) -> str:
    return [given for instruction, given in instructions() if instruction == name][-1]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(read("systemd/hierspec.service"))
    return parser


def compose() -> dict:
    return yaml.safe_load(read("compose.yaml"))


def parses(arguments: list[str], monkeypatch) -> None:
    monkeypatch.setattr(command_line, "run_chosen", lambda chosen: 0)
    assert command_line.main(arguments) == 0


# Command lines


def test_command_lines_are_ours(monkeypatch):
    program, *image = json.loads(the_last("ENTRYPOINT"))
    assert program == "hierspec"
    parses(image, monkeypatch)
    parses([*image, *compose()["services"]["hierspec"]["command"]], monkeypatch)
    started, *service = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(started).name == "hierspec"
    parses(service, monkeypatch)


def test_a_container_without_a_key_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("HIERSPEC_API_KEY", raising=False)
    _, *image = json.loads(the_last("ENTRYPOINT"))
    assert command_line.main(image) == 2
    assert "--api-key" in capsys.readouterr().err


# The image


def test_the_image_is_slim_pinned_and_without_root():
    [base] = [given for name, given in instructions() if name == "FROM"]
    assert "slim" in base
    assert re.search(r":\d", base), "a version, not latest"
    assert the_last("USER") not in ("root", "0")
    order = [name for name, _ in instructions()]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert "/ready" in the_last("HEALTHCHECK")
    assert the_last("VOLUME") == "/cache"
    assert "ADD" not in order
    assert all("sudo" not in given and "apt-get" not in given for name, given in instructions() if name == "RUN")


def test_torch_comes_from_the_index_of_cpu_wheels():
    first = next(given for name, given in instructions() if name == "RUN")
    assert "whl/cpu" in first
    assert "torch" in first


def test_what_the_image_copies_exists_and_is_let_in():
    let_in = {line[1:] for line in read("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    for name, given in instructions():
        if name == "COPY":
            for source in given.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in let_in


def test_the_image_installs_extras_that_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [wanted] = re.findall(r"/build\[([^]]+)\]", read("Dockerfile"))
    assert set(wanted.split(",")) <= extras.keys()


# Compose, Prometheus, Grafana


def test_only_this_machine_reaches_the_services():
    for service in compose()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_images_are_pinned_and_secrets_are_asked_for():
    for name, service in compose()["services"].items():
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
    for variable in re.findall(r"\$\{(\w+)([^}]*)\}", read("compose.yaml")):
        assert variable[1].startswith(":?"), variable


def test_mounted_files_and_named_volumes_exist():
    described = compose()
    for service in described["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in described["volumes"], volume


def test_prometheus_asks_the_server():
    [job] = yaml.safe_load(read("prometheus/prometheus.yml"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["hierspec:8000"]}]
    assert job["authorization"]["credentials_file"] in read("compose.yaml")
    for path in (DEPLOY / "grafana" / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["apiVersion"] == 1


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[str, set[str]]:
    """Labels of every sample that /metrics has after an answer under two tiers."""
    import asyncio

    from hierspec import AsyncLanguageModel, Plan, TierPlan

    model = hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama"))
    metrics = Metrics("tiny", model)

    async def answer() -> None:
        async with AsyncLanguageModel(model, observer=metrics) as shared:
            plan = Plan(stores=("context",), merge=True, tiers=(TierPlan(exit_layer=3, gather=3),))
            await shared.generate("abcabcabc", plan=plan, max_tokens=30, seed=1)

    asyncio.run(answer())
    labels: dict[str, set[str]] = {}
    for name, listed in re.findall(r"^([\w:]+)(?:{(.*)})? ", metrics.render().decode(), re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", listed))
    return labels


def test_every_metric_of_the_dashboard_exists(samples):
    dashboard = json.loads(read("grafana/hierspec.json"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    [variable] = dashboard["templating"]["list"]
    assert re.search(r"\((.+), ", variable["query"])[1] in samples
    for expression in expressions:
        named = re.findall(r"((?:vllm|hierspec):\w+|process_\w+)(?:{([^}]*)})?", expression)
        assert named, expression
        for name, filters in named:
            assert name in samples, name
            assert set(re.findall(r"(\w+)=", filters)) <= samples[name], name
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert {each.strip() for each in grouped.split(",")} <= set().union(*(samples[name] for name, _ in named))
        assert expression.count("(") == expression.count(")")


def test_panels_have_places_of_their_own():
    panels = json.loads(read("grafana/hierspec.json"))["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


# The service


def test_the_service_has_a_user_of_its_own_and_time_to_drain():
    service = unit()["Service"]
    assert service["DynamicUser"] == "yes"
    assert service["NoNewPrivileges"] == "yes"
    drain = int(re.search(r"--drain-seconds (\d+)", service["ExecStart"])[1])
    assert int(service["TimeoutStopSec"]) > drain
    assert unit()["Install"]["WantedBy"] == "multi-user.target"

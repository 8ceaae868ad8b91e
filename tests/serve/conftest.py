"""A tiny model behind real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from scripted_worker import ScriptedWorker
from serving import Running, running, until

import hierspec
from hierspec.language_model import LanguageModel
from hierspec.serve.settings import Limits, Settings
from hierspec.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> LanguageModel:
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny", "llama"))


@pytest.fixture(scope="module")
def server(tiny_model) -> Iterator[Running]:
    with running(tiny_model) as each:
        yield each


@pytest.fixture
def start(tiny_model) -> Iterator[Callable[..., Running]]:
    """Starts servers with other settings; they end with the test."""
    with ExitStack() as servers:

        def started(limits: Limits | None = None, **settings: object) -> Running:
            chosen = Settings(model_name="tiny", limits=limits or Limits(), **settings)  # type: ignore[arg-type]
            return servers.enter_context(running(tiny_model, chosen))

        yield started


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory) -> LanguageModel:
    """With room for descriptions of tools."""
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("roomy") / "tiny", "llama", context=8192))


@pytest.fixture(scope="module")
def roomy(roomy_model) -> Iterator[Running]:
    with running(roomy_model) as each:
        yield each


@pytest.fixture(scope="module")
def scripted(roomy_model) -> Iterator[Running]:
    """A server whose model says what it is told to: its worker is a `ScriptedWorker`."""
    with running(roomy_model) as each:
        each.model.worker.close()
        each.model.worker = ScriptedWorker(each.language_model.tokenizer)  # type: ignore[assignment]
        yield each


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    return until

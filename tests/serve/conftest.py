"""A tiny model behind real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

import hierspec
from hierspec.async_language_model import AsyncLanguageModel
from hierspec.language_model import LanguageModel
from hierspec.serve.app import create_app
from hierspec.serve.listening import Server, listen, make_server
from hierspec.serve.settings import Limits, Settings
from hierspec.testing.checkpoints import tiny_checkpoint


@dataclass(frozen=True)
class Running:
    """A server that listens, and what it serves."""

    url: str
    port: int
    model: AsyncLanguageModel
    server: Server

    @property
    def language_model(self) -> LanguageModel:
        return self.model.model


@contextmanager
def running(model: LanguageModel, settings: Settings | None = None) -> Iterator[Running]:
    """A real server in a thread, on a free port."""
    settings = settings or Settings(model_name="tiny")
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    asynchronous = AsyncLanguageModel(model)
    server = make_server(create_app(asynchronous, settings), settings)
    started = threading.Event()

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    started.wait()
    try:
        yield Running(f"http://127.0.0.1:{port}", port, asynchronous, server)
    finally:
        server.should_exit = True
        thread.join()
        asynchronous.worker.close(finish=False)


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

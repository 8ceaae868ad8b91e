"""Real servers in threads, for tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.language_model import LanguageModel
from hierspec.serve.app import create_app
from hierspec.serve.listening import Server, listen, make_server
from hierspec.serve.settings import Settings


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does; it fails where that never comes, not where it is slow."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


@dataclass(frozen=True)
class Running:
    """A server that listens, and what it serves."""

    url: str
    port: int
    model: AsyncLanguageModel
    server: Server
    settings: Settings

    @property
    def answers(self) -> int:
        """That are being written, or wait."""
        count: int = self.server.config.app.state.gate.count  # type: ignore[union-attr]
        return count

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
        yield Running(f"http://127.0.0.1:{port}", port, asynchronous, server, settings)
    finally:
        server.should_exit = True
        thread.join()
        asynchronous.worker.close(finish=False)

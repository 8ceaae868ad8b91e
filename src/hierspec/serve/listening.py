"""Runs the server on a socket until a graceful stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.core.errors import HierspecError
from hierspec.language_model import LanguageModel
from hierspec.serve.app import create_app
from hierspec.serve.settings import Settings

_BACKLOG = 2048  # connections that wait to be accepted


def serve(model: LanguageModel, settings: Settings, say: Callable[[str], None]) -> None:
    """Serves until SIGTERM or Ctrl-C. Running answers are finished first, as long as the settings allow."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = listen(settings.host, settings.port)
    running = AsyncLanguageModel(model, most_running=settings.most_running)
    server = make_server(create_app(running, settings), settings)
    before = {number: signal.signal(number, _already_handled) for number in (signal.SIGTERM, signal.SIGINT)}
    gc.collect()
    gc.freeze()  # what is loaded stays loaded: each look through it would stop all streams for some 0.2 s
    try:
        say(f"Serving {settings.model_name} at {_address(listener)}. Ctrl-C stops.")
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()
        for number, handler in before.items():
            signal.signal(number, handler)
        running.worker.close(finish=False)
        say("Stopped.")


def make_server(app: FastAPI, settings: Settings) -> Server:
    config = uvicorn.Config(
        app,
        http="h11",  # the same parsing of malformed requests on every machine
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(settings.limits.drain_seconds)),
    )
    return Server(config)


class Server(uvicorn.Server):
    """Uvicorn's server, except that it accepts no new requests once it is told to stop."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.drain()
        super().handle_exit(sig, frame)

    def drain(self) -> None:
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.gate.closed = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.drain()
        await super().shutdown(sockets)
        await asyncio.sleep(0)  # let cancelled requests finish their cleanup


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address, or an error in one sentence."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # before the address is announced, so that early clients wait
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is no address"
        raise HierspecError(
            f"The server cannot listen at {host}, port {port} ({why}); choose another --port or --host."
        ) from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _already_handled(number: int, frame: FrameType | None) -> None:
    """Ignores a signal that the server has already stopped for and raises again; the process ends by itself."""

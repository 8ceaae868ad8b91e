"""Servers of other engines, started on the file that ours serves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hierspec.checkpoints.default import default_model
from hierspec.core.errors import HierspecError
from hierspec_bench.peers import ENVIRONMENTS, python_of
from hierspec_bench.peers.process import SERVE
from hierspec_bench.serving.process import ServerProcess, server_process

_SLOTS = 64  # texts that are generated at once


@contextmanager
def start_other(name: str, source: str | None) -> Iterator[ServerProcess]:
    """llama.cpp's server on a GGUF file, in its own environment (`hierspec bench peers --install llama.cpp`)."""
    if name != "llama.cpp":
        raise HierspecError(
            f"The server of {name!r} cannot be started from here; start it and give --others {name}=URL."
        )
    file = Path(source) if source else default_model()
    if file.suffix != ".gguf" or not file.is_file():
        raise HierspecError(f"llama.cpp reads GGUF files, and {file} is none; serve one, or leave out --baselines.")
    python, script = python_of(ENVIRONMENTS[name]), Path(SERVE).with_name("llama_server.py")
    threads = str(os.cpu_count() or 1)
    with server_process(
        [str(python), str(script), "{port}", str(file), str(_SLOTS), threads], isolated=True
    ) as started:
        yield started

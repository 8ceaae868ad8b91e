"""Other engines beside ours on the same device: those that this Python can import, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.families import to_huggingface
from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.language_model import LanguageModel
from hierspec_bench.gpu.timing import Deadline
from hierspec_bench.peers.catalogue import PeerKind
from hierspec_bench.peers.opening import PeerAnswer, WorkerPeer
from hierspec_bench.peers.process import SERVE, Worker

_CONTEXT = 4096  # tokens that there is room for
_SHORT, _LONG = 8, 72  # tokens written: what the longer answer takes more is theirs alone
_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would compile for minutes
_LEAST_SECONDS = 20.0  # to open an engine: with less none is begun


def gpu_engines(device: torch.device, dtype: str) -> dict[str, PeerKind]:
    """Engines that can be imported here, with the setting that is their fastest on a GPU."""
    settings: dict[str, dict[str, Any]] = {
        "transformers": {"dtype": dtype, "device": str(device), "cache": "static"},
        "vllm": {"dtype": dtype, "gpu_memory": 0.3},
    }
    return {
        name: PeerKind(name, name, f"with_{name}", (setting,), "folder", reopens=False)
        for name, setting in settings.items()
        if importlib.util.find_spec(name) is not None and (name != "vllm" or device.type == "cuda")
    }


class GpuEngine(WorkerPeer):
    """An engine that gives up when time is."""

    def __init__(self, kind: PeerKind, model: LanguageModel, deadline: Deadline) -> None:
        super().__init__(kind, model, _command(kind), None, _CONTEXT)
        self._deadline = deadline

    def open(self) -> None:
        self.open_with(self.kind.settings[0], _seconds(self._deadline))

    def generate(self, prompt: list[int], sampling: Sampling, limit: float | None = None) -> PeerAnswer:
        return super().generate(prompt, sampling, min(limit or self._deadline.left, _seconds(self._deadline)))


def open_engines(
    kinds: Mapping[str, PeerKind], model: LanguageModel, deadline: Deadline
) -> tuple[list[GpuEngine], dict[str, str]]:
    """Those that run, and why others do not."""
    ready, absent = [], {}
    for name, kind in kinds.items():
        engine = GpuEngine(kind, model, deadline)
        try:
            if deadline.left < _LEAST_SECONDS:
                raise HierspecError("There was no time left.")
            engine.open()
            ready.append(engine)
        except HierspecError as error:
            engine.close()
            absent[name] = str(error)
    return ready, absent


def token_times(
    kinds: Mapping[str, PeerKind], config: DecoderConfig, contexts: Sequence[int], deadline: Deadline
) -> Iterator[dict[str, Any]]:
    """Milliseconds a token of a model of this configuration with random weights, by engine and context."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_huggingface(config)), encoding="utf-8")
        for name, kind in kinds.items():
            if deadline.left < _LEAST_SECONDS:
                return
            worker = Worker(name, _command(kind), _ENVIRONMENT)
            try:
                yield from _token_times(worker, kind, folder, config.vocabulary, contexts, deadline)
            except HierspecError as error:
                yield {"engine": name, "error": str(error)}
            finally:
                worker.close()


def _token_times(
    worker: Worker, kind: PeerKind, folder: str, vocabulary: int, contexts: Sequence[int], deadline: Deadline
) -> Iterator[dict[str, Any]]:
    setting = {"context": min(_CONTEXT, max(contexts) + _LONG), **kind.settings[0], "random": True}
    facts = worker.ask({"do": "open", "model": folder, "setting": setting}, _seconds(deadline))
    random = np.random.default_rng(0)

    def seconds(context: int, tokens: int) -> float:
        request = {
            "do": "generate",
            "prompt": random.integers(10, vocabulary, context).tolist(),
            "max_tokens": tokens,
            "temperature": 0.0,
            "seed": 0,
            "stop_ids": [],
            "fresh": True,
        }
        answer = worker.ask(request, _seconds(deadline))
        if len(answer["tokens"]) != tokens:
            raise HierspecError(f"The engine {worker.name} wrote {len(answer['tokens'])} tokens of {tokens}.")
        return float(answer["seconds"])

    for context in contexts:
        seconds(context, _LONG)  # compiles
        short, long = (min(seconds(context, tokens) for _ in range(3)) for tokens in (_SHORT, _LONG))
        each = 1e3 * (long - short) / (_LONG - _SHORT)
        yield {"engine": worker.name, "about": facts, "context": context, "token_ms": round(each, 3)}


def _command(kind: PeerKind) -> list[str | Path]:
    return [sys.executable, SERVE, kind.worker]


def _seconds(deadline: Deadline) -> float:
    return max(1.0, deadline.left)

"""Other engines on the same device, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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

ENGINES = ("vllm", "vllm-exact", "transformers")
USUAL_ENGINES = ("vllm", "transformers")
_CONTEXT = 4096  # most tokens of a conversation
_SHORT, _LONG = 8, 72  # tokens written: the difference in time is that of the additional tokens
_LEAST_SECONDS = 20.0  # to open an engine: with less left, none is started
_IMPORT_SECONDS = 60.0


@dataclass(frozen=True)
class GpuEngine:
    """How to start an engine."""

    kind: PeerKind
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    batches: bool = False  # can answer several prompts at once

    @property
    def command(self) -> list[str | Path]:
        return [self.python, SERVE, self.kind.worker]


def gpu_engines(names: Sequence[str], device: torch.device, dtype: str, python: str = "") -> dict[str, GpuEngine]:
    """The engines among these that this Python, or the given one, can import."""
    python = python or sys.executable
    vllm = {"dtype": dtype, "gpu_memory": 0.3, "together": 64}
    settings: dict[str, dict[str, Any]] = {
        "vllm": vllm,
        "vllm-exact": vllm,
        "transformers": {"dtype": dtype, "device": str(device), "cache": "static"},
    }
    engines = {}
    for name in names:
        if name not in ENGINES:
            raise HierspecError(f"There is no engine {name!r} for a GPU; choose some of {', '.join(ENGINES)}.")
        package = name.split("-")[0]
        if not _imports(python, package) or (package == "vllm" and device.type != "cuda"):
            continue
        environment = {}
        if package == "vllm":
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it would compile for minutes
        if name == "vllm-exact":
            environment["VLLM_BATCH_INVARIANT"] = "1"
        kind = PeerKind(name, package, f"with_{package}", (settings[name],), "folder", reopens=False)
        engines[name] = GpuEngine(kind, python, environment, batches=package == "vllm")
    return engines


def _imports(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], timeout=_IMPORT_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HierspecError(f"{python} cannot be run to look for {package} ({type(error).__name__}).") from error


class GpuPeer(WorkerPeer):
    """An engine that answers prompts beside ours until the deadline."""

    def __init__(self, engine: GpuEngine, model: LanguageModel, deadline: Deadline) -> None:
        super().__init__(engine.kind, model, engine.command, None, _CONTEXT)
        self._environment, self._deadline = engine.environment, deadline

    def open(self) -> None:
        self._worker = Worker(self.name, self._command, self._environment)
        asked, folder, bits = self._resolved(self.kind.settings[0])
        facts = self._worker.ask({"do": "open", "model": str(folder), "setting": asked}, _seconds(self._deadline))
        self.about = {"weights": bits, **facts, "setting": dict(self.kind.settings[0])}

    def generate(self, prompt: list[int], sampling: Sampling, limit: float | None = None) -> PeerAnswer:
        return super().generate(prompt, sampling, min(limit or self._deadline.left, _seconds(self._deadline)))

    def together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Throughput with these prompts at once, after one untimed run."""
        assert self._worker is not None
        stops = sorted(self._model.stop_ids)
        return {"engine": self.name, **_together(self._worker, prompts, max_tokens, stops, self._deadline)}


def open_peers(
    engines: Mapping[str, GpuEngine], model: LanguageModel, deadline: Deadline
) -> tuple[list[GpuPeer], dict[str, str]]:
    """The engines that run, and why others do not."""
    ready, absent = [], {}
    for name, engine in engines.items():
        peer = GpuPeer(engine, model, deadline)
        try:
            if deadline.left < _LEAST_SECONDS:
                raise HierspecError("There was no time left.")
            peer.open()
            ready.append(peer)
        except HierspecError as error:
            peer.close()
            absent[name] = str(error)
    return ready, absent


def token_times(
    engines: Mapping[str, GpuEngine],
    config: DecoderConfig,
    contexts: Sequence[int],
    batches: Sequence[int],
    deadline: Deadline,
) -> Iterator[dict[str, Any]]:
    """Milliseconds per token by engine and context, and tokens per second by batch size, with random weights in this
    configuration."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_huggingface(config)), encoding="utf-8")
        for name, engine in engines.items():
            if deadline.left < _LEAST_SECONDS:
                return
            try:
                with closing(Worker(name, engine.command, engine.environment)) as worker:
                    setting = {"context": min(_CONTEXT, max(contexts) + _LONG), **engine.kind.settings[0]}
                    request = {"do": "open", "model": folder, "setting": {**setting, "random": True}}
                    about = {"engine": name, "about": worker.ask(request, _seconds(deadline))}
                    for row in _rows(worker, config, contexts, batches if engine.batches else (), deadline):
                        yield about | row
            except HierspecError as error:
                yield {"engine": name, "error": str(error)}


def _rows(
    worker: Worker, config: DecoderConfig, contexts: Sequence[int], batches: Sequence[int], deadline: Deadline
) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)

    def prompt(context: int) -> list[int]:
        ids: list[int] = random.integers(10, config.vocabulary, context).tolist()
        return ids

    def seconds(context: int, tokens: int) -> float:
        request = _request(tokens, []) | {"prompt": prompt(context)}
        answer = worker.ask(request, _seconds(deadline))
        if len(answer["tokens"]) != tokens:
            raise HierspecError(f"The engine {worker.name} wrote {len(answer['tokens'])} tokens of {tokens}.")
        return float(answer["seconds"])

    for context in contexts:
        seconds(context, _LONG)  # compiles
        short, long = (min(seconds(context, tokens) for _ in range(3)) for tokens in (_SHORT, _LONG))
        yield {"context": context, "token_ms": round(1e3 * (long - short) / (_LONG - _SHORT), 3)}
    for size in batches:
        yield _together(worker, [prompt(min(contexts)) for _ in range(size)], _LONG, [], deadline)


def _together(
    worker: Worker, prompts: Sequence[Sequence[int]], tokens: int, stops: list[int], deadline: Deadline
) -> dict[str, Any]:
    request = _request(tokens, stops) | {"prompts": [[int(token) for token in prompt] for prompt in prompts]}
    worker.ask(request, _seconds(deadline))
    answer = worker.ask(request, _seconds(deadline))
    return {"batch": len(prompts), "tokens_per_second": round(sum(answer["counts"]) / answer["seconds"], 1)}


def _request(tokens: int, stops: list[int]) -> dict[str, Any]:
    return {"do": "generate", "max_tokens": tokens, "temperature": 0.0, "seed": 0, "stop_ids": stops, "fresh": True}


def _seconds(deadline: Deadline) -> float:
    return max(1.0, deadline.left)

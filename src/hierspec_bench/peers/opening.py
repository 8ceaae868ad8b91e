"""Opens other engines: installed and loaded with their best setting, or absent with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.language_model import LanguageModel
from hierspec.progress import Progress, silent
from hierspec_bench.peers import files
from hierspec_bench.peers.catalogue import FILE, PeerKind, Setting, chosen_kinds
from hierspec_bench.peers.install import ENVIRONMENTS, python_of
from hierspec_bench.peers.process import SERVE, PeerError, Worker
from hierspec_bench.peers.search import PROMPTS, Allowance, Searched, kept_search, search

_OPEN_SECONDS, _GENERATE_SECONDS = 900.0, 900.0  # a shared machine may pause for minutes
_CONTEXT = 4096  # tokens that an engine makes room for, if no prompt needs more
_HANDED_ON = ("max_tokens", "temperature", "seed", "stop_ids")


@dataclass(frozen=True)
class PeerAnswer:
    tokens: list[int]
    seconds: float
    first_seconds: float | None = None  # until the first tokens; None: the engine does not report it
    first_tokens: int = 0


class Peer(Protocol):
    name: str
    about: dict[str, Any]
    samples: bool  # it samples from the model's distribution
    learns: bool  # earlier answers make it faster

    def generate(self, prompt: list[int], sampling: Sampling) -> PeerAnswer:
        """Its answer to the prompt, and how long it took."""

    def forget(self) -> None:
        """Starts a new conversation: nothing computed so far may shorten the prefill of the next prompt."""

    def renew(self) -> None:
        """Starts over as if it had never written anything."""

    def close(self) -> None: ...


def not_handed_on(sampling: Sampling) -> list[str]:
    """Options of this sampling that other engines do not get, so that a comparison would be unfair."""
    usual = Sampling()
    return [name for name, value in vars(sampling).items() if name not in _HANDED_ON and value != getattr(usual, name)]


class WorkerPeer:
    """An engine in its own process, with room for `context` tokens at least."""

    def __init__(
        self,
        kind: PeerKind,
        model: LanguageModel,
        command: Sequence[str | Path],
        source: Path | None,
        context: int = 0,
    ) -> None:
        self.name, self.kind, self.samples, self.learns = kind.name, kind, kind.samples, kind.learns
        self._context = min(model.config.context, max(_CONTEXT, context))
        self._fresh = True
        self.about: dict[str, Any] = {"note": kind.note} if kind.note else {}
        self._model, self._command, self._source = model, list(command), source
        self._worker: Worker | None = None

    def open_with(self, setting: Setting, limit: float | None = None) -> None:
        """Loads the model with this setting, in a new worker if the old one has ended or cannot reopen.

        Raises PeerError if that takes longer than `limit` seconds.
        """
        if self._worker is not None and (not self.kind.reopens or self._worker.ended):
            self.close()
        asked, model, bits = self._resolved(setting)
        if self._worker is None:
            self._worker = Worker(self.name, self._command)
        try:
            facts = self._worker.ask({"do": "open", "model": str(model), "setting": asked}, limit or _OPEN_SECONDS)
        except HierspecError:
            self.close()  # a failure may leave half a model behind
            raise
        notes = dict.fromkeys(note for note in (self.kind.note, facts.pop("note", "")) if note)
        self.about = {"weights": bits, **facts, "setting": dict(setting)}
        if notes:
            self.about["note"] = "; ".join(notes)

    def _resolved(self, setting: Setting) -> tuple[dict[str, Any], Path, str]:
        asked = {"threads": torch.get_num_threads(), "context": self._context, **setting}
        weights = asked.pop("weights", FILE)
        if self.kind.assistant == "folder":
            asked["assistant"] = str(files.small_folder(self._model))
        if self.kind.reads == "folder":
            return asked, files.float_folder(self._model), f"the model's own, as {asked.get('dtype', 'float32')}"
        source = files.gguf_of(self._model, self._source)
        if self.kind.assistant == "gguf":
            asked["assistant"] = str(files.small_gguf(self._model, source))
        path = files.with_weights(source, weights)
        return asked, path, files.bits_of(path) + ("" if weights == FILE else ", made from the file's")

    def generate(self, prompt: list[int], sampling: Sampling, limit: float | None = None) -> PeerAnswer:
        """As in `Peer`; PeerError if it takes longer than `limit` seconds."""
        if sampling.temperature > 0 and not self.kind.samples:
            raise PeerError(f"The engine {self.name} does not sample soundly; compare it at temperature 0.")
        if wrong := not_handed_on(sampling):
            raise PeerError(f"The engine {self.name} gets temperature and seed, not {', '.join(wrong)}.")
        if self._worker is None:
            raise PeerError(f"The engine {self.name} is closed.")
        stops = sorted({*self._model.stop_ids, *sampling.stop_ids})
        request = {
            "do": "generate",
            "prompt": [int(token) for token in prompt],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed or 0,
            "stop_ids": stops,
            "fresh": self._fresh,
        }
        self._fresh = False
        answer = self._worker.ask(request, limit or _GENERATE_SECONDS)
        try:
            return self._counted(answer, stops, sampling.max_tokens)
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"The engine {self.name} gave an answer without tokens and seconds.") from error

    def _counted(self, answer: Mapping[str, Any], stops: list[int], most: int) -> PeerAnswer:
        """Counts tokens the same way for all engines: up to and including the first stop token, and at most `most`."""
        if "tokens" in answer:
            tokens = [int(token) for token in answer["tokens"]]
        else:
            tokens = self._model.tokenizer.encode(answer["text"], begin=False)
        tokens = tokens[:most]
        ends = [index for index, token in enumerate(tokens) if token in stops]
        if ends:
            tokens = tokens[: ends[0] + 1]
        elif answer.get("stopped") and stops and len(tokens) < most:
            tokens.append(self._usual_stop(stops))  # some engines do not return the stop token
        first = answer.get("first_seconds")
        seconds = float(answer["seconds"])
        return PeerAnswer(tokens, seconds, None if first is None else float(first), int(answer.get("first_tokens", 0)))

    def _usual_stop(self, stops: list[int]) -> int:
        eos_ids = sorted(self._model.config.eos_ids)
        return eos_ids[0] if eos_ids else stops[0]

    def key(self) -> list[str]:
        """What its best setting depends on beside its version and the machine; not our own weights and dtype."""
        model = self._model
        trained = [] if model.pack is None or not self.kind.assistant else list(model.pack.hashes.values())
        settings = json.dumps([dict(setting) for setting in self.kind.settings])
        return [model.name, str(model.folder), str(self._source), *trained, str(torch.get_num_threads()), settings]

    def forget(self) -> None:
        self._fresh = True

    def renew(self) -> None:
        searched = {"searched": self.about["searched"]} if "searched" in self.about else {}
        self.close()
        self.open_with(self.about["setting"])
        self.about |= searched

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def open_peers(
    names: str | list[str],
    model: LanguageModel,
    prompts: Sequence[list[int]] = (),
    progress: Progress = silent,
    *,
    settings: str = "best",
    source: Path | None = None,
    temperature: float = 0.0,
    context: int = 0,
) -> tuple[list[Peer], dict[str, str]]:
    """The engines that can run, each loaded with its best setting, and why the others cannot.

    The best setting is searched on the first few of `prompts` (ids), once per machine, version and model, or again with
    settings="again" (if other programs disturbed the search). With settings="default", or without prompts, it is the
    first setting that runs. `source` is the model's GGUF file, if it is not the default model. Engines that sample
    wrongly are absent at this temperature. `context` is the longest conversation in tokens.
    """
    ready: list[Peer] = []
    absent: dict[str, str] = {}
    kinds = chosen_kinds(names)
    allowance = Allowance(len(kinds))
    for number, kind in enumerate(kinds):
        progress("Opening other engines", number, len(kinds))
        try:
            if temperature > 0 and not kind.samples:
                raise HierspecError(f"The engine {kind.name} does not sample soundly; compare it at temperature 0.")
            environment = ENVIRONMENTS[kind.environment]
            command: list[str | Path] = [python_of(environment), SERVE, kind.worker]
            peer = WorkerPeer(kind, model, command, source, context)
            searching = [] if settings == "default" else list(prompts)
            with allowance.part() as over:
                _settle(peer, environment.wanted, searching, progress, settings == "again", over)
            ready.append(peer)
        except HierspecError as error:
            absent[kind.name] = str(error)
    progress("Opening other engines", len(kinds), len(kinds))
    return ready, absent


def _settle(
    peer: WorkerPeer, version: str, prompts: list[list[int]], progress: Progress, again: bool, over: Callable[[], bool]
) -> None:
    """Opens the engine with its final setting; closes it if there is none."""
    kind, file = peer.kind, kept_search(peer.name, version, peer.key())
    try:
        if not prompts:
            _first_that_runs(peer)
            return
        searched = None if again else file.read_json(Searched.from_json)
        if searched is None or not searched.complete:
            what = f"Searching the best setting of {kind.name}"
            searched = search(
                kind.settings,
                peer.open_with,
                partial(_answer, peer),
                prompts[:PROMPTS],
                lambda count: progress(what, count, len(kind.settings)),
                over,
                searched.tried if searched else (),
            )
            file.write_json(searched.to_json())
        peer.open_with(searched.setting)
        peer.about["searched"] = searched.searched
    except HierspecError:
        peer.close()
        raise


def _answer(peer: WorkerPeer, prompt: list[int], most: int, limit: float | None) -> PeerAnswer:
    peer.forget()
    return peer.generate(prompt, Sampling(max_tokens=most), limit)


def _first_that_runs(peer: WorkerPeer) -> None:
    failure: HierspecError | None = None
    for setting in peer.kind.settings:
        try:
            peer.open_with(setting)
            return
        except HierspecError as error:
            failure = failure or error
    assert failure is not None
    raise failure

"""Traces: what the target wrote, and what every other tier would pick at each position of that text.

As long as its drafts are accepted, a tier drafts from the target's own text. So its picks along that text tell how many
of its drafts are accepted, under any plan. `recording` makes traces; `prediction` simulates plans on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file
from hierspec.scorers.base import StateScorer

VERSION = 2  # increase when the meaning of traces changes

NOT_ASKED = -1  # where no token was picked


@dataclass(frozen=True, eq=False)
class Picks:
    """What one tier picks at every position of an output, if the text before it is the target's.

    A tier that continues from its own states beyond the written text picks differently at different depths:
    `tokens[d, p]` is its pick at position p when the last d tokens before p are not written yet. Others have one depth.
    """

    tokens: np.ndarray  # [depths, positions, candidates] int32: the pick, then runners-up; NOT_ASKED where p < d
    leads: np.ndarray  # [depths, positions] float32: lead of the pick over the next best

    def at(self, depth: int) -> np.ndarray:
        """The picks at this depth, or at the deepest that was asked for. [positions, candidates]"""
        return self.tokens[min(depth, len(self.tokens) - 1)]

    def first(self, depth: int) -> np.ndarray:
        """The same without runners-up. [positions]"""
        return self.at(depth)[:, 0]


@dataclass(frozen=True, eq=False)
class TokenDistributions:
    """One tier's distributions at every position, by depth as in `Picks`: likeliest tokens and the one written."""

    tokens: np.ndarray  # [depths, positions, tokens] int32, rising; NOT_ASKED after the last, and where p < d
    probabilities: np.ndarray  # [depths, positions, tokens] float32


@dataclass(frozen=True, eq=False)
class Trace:
    """One text of the target, and what other tiers pick along it."""

    task: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    tiers: Mapping[str, Picks] = field(default_factory=dict)  # by `scorer_key`, without the target
    temperature: float = 0.0
    seed: int = 0
    limit: int | None = None  # most tokens the request might write; None: as many as it wrote
    stop_ids: tuple[int, ...] = ()
    # By `scorer_key`, with the target's: recorded in place of picks for rules that compare distributions.
    distributions: Mapping[str, TokenDistributions] = field(default_factory=dict)

    @cached_property
    def ladders(self) -> dict[tuple[str, ...], list[Picks]]:
        """Picks that were sampled from the distributions, by rule and tiers."""
        return {}

    @property
    def most(self) -> int:
        """Tokens that a request for this text may write."""
        return self.limit or len(self.output)


def scorer_key(scorer: StateScorer) -> str:
    """Identifies a tier's picks: its name, its head and vocabulary, and its weights."""
    return ", ".join(part for part in (scorer.name, scorer.kind, scorer.decoder.products) if part)


def save_traces(path: Path, traces: Sequence[Trace], about: Mapping[str, Any] | None = None) -> None:
    """One safetensors file: numbers as tensors, the rest and `about` as JSON in its header."""
    tensors: dict[str, np.ndarray] = {}
    listed = []
    for number, trace in enumerate(traces):
        tensors[f"{number}.prompt"] = np.array(trace.prompt, np.int32)
        tensors[f"{number}.output"] = np.array(trace.output, np.int32)
        for index, picks in enumerate(trace.tiers.values()):
            tensors[f"{number}.{index}.tokens"] = np.ascontiguousarray(picks.tokens, np.int32)
            tensors[f"{number}.{index}.leads"] = np.ascontiguousarray(picks.leads, np.float32)
        for index, recorded in enumerate(trace.distributions.values()):
            tensors[f"{number}.distribution {index}.tokens"] = np.ascontiguousarray(recorded.tokens, np.int32)
            probabilities = np.ascontiguousarray(recorded.probabilities, np.float32)
            tensors[f"{number}.distribution {index}.probabilities"] = probabilities
        listed.append(
            {
                "task": trace.task,
                "tiers": list(trace.tiers),
                "temperature": trace.temperature,
                "seed": trace.seed,
                "limit": trace.limit,
                "stop_ids": list(trace.stop_ids),
                "distributions": list(trace.distributions),
            }
        )
    header = {"version": VERSION, "traces": listed, "about": dict(about or {})}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata={"hierspec.traces": json.dumps(header)})


def load_traces(path: Path, about: Mapping[str, Any] | None = None) -> list[Trace]:
    """The traces of a file, which must have been saved with this `about` if one is given."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["hierspec.traces"])
            if header["version"] != VERSION:
                raise HierspecError(f"{path} holds traces of another version; remove it and record again.")
            if about is not None and header["about"] != json.loads(json.dumps(about)):
                raise HierspecError(f"{path} holds traces of something else; remove it and record again.")
            return [_read(file, number, item) for number, item in enumerate(header["traces"])]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HierspecError(f"{path} is not a file of traces; remove it and record again.") from error


def _read(file: Any, number: int, item: Mapping[str, Any]) -> Trace:
    prompt, output = (file.get_tensor(f"{number}.{name}") for name in ("prompt", "output"))
    if prompt.ndim != 1 or output.ndim != 1 or not len(prompt) or np.concatenate((prompt, output)).min() < 0:
        raise ValueError(f"trace {number} has no text")
    tiers = {}
    for index, key in enumerate(item["tiers"]):
        tokens, leads = (file.get_tensor(f"{number}.{index}.{name}") for name in ("tokens", "leads"))
        if tokens.ndim != 3 or tokens.shape[:2] != leads.shape or tokens.shape[1] != len(output):
            raise ValueError(f"trace {number} does not fit its text")
        tiers[str(key)] = Picks(tokens.astype(np.int32), leads.astype(np.float32))
    distributions = {}
    for index, key in enumerate(item["distributions"]):
        names = ("tokens", "probabilities")
        tokens, probabilities = (file.get_tensor(f"{number}.distribution {index}.{name}") for name in names)
        if tokens.ndim != 3 or tokens.shape != probabilities.shape or tokens.shape[1] != len(output):
            raise ValueError(f"trace {number} does not fit its text")
        distributions[str(key)] = TokenDistributions(tokens.astype(np.int32), probabilities.astype(np.float32))
    limit = None if item["limit"] is None else int(item["limit"])
    return Trace(
        str(item["task"]),
        tuple(prompt.tolist()),
        tuple(output.tolist()),
        tiers,
        float(item["temperature"]),
        int(item["seed"]),
        limit,
        tuple(int(token) for token in item["stop_ids"]),
        distributions,
    )


def tiers_of(traces: Iterable[Trace]) -> list[str]:
    """The tiers whose picks all of these traces have, in their order."""
    common: list[str] | None = None
    for trace in traces:
        common = list(trace.tiers) if common is None else [key for key in common if key in trace.tiers]
    return common or []

"""A host without a model, in vLLM's manner: texts that are written as a script says, in a batch whose rows move."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from hierspec.assembly.assembler import Assembler
from hierspec.assembly.drafts import LoadOptions
from hierspec.core.plan import Plan
from hierspec.hosts import vllm
from hierspec.hosts.guest import Guest
from hierspec.hosts.host_pace import HostPace
from hierspec.stores.registry import Home

VOCABULARY = 1 << 20  # wide: every text has tokens of its own
CONTEXT = 512
_CLASH = 1 << 9  # tokens of one text


def proposer(
    plan: Plan,
    most: int = 4,
    clock: Callable[[], float] = time.perf_counter,
    patience: int = 1,
    namespace: str = "",
    beside: vllm.Proposer | None = None,
    context: int = CONTEXT,
) -> vllm.Proposer:
    """vLLM's, without a vLLM and without a model's files. `beside` another one it shares that one's stores."""
    vocabulary = SimpleNamespace(model="made-up", size=VOCABULARY, home=_no_home)
    assembler = Assembler(vocabulary, LoadOptions()) if beside is None else beside._guest._assembler
    pace = HostPace(most, plan.adapt, clock)
    return vllm.Proposer.over(Guest(assembler, plan, pace, context, namespace), context, patience)


def _no_home(folder: object, history: object) -> Home:
    """Of stores of which none is built."""
    return Home(Path("none"), "")


@dataclass
class Text:
    """A request: what the host will have written in the end, known from the start."""

    tokens: list[int]
    prompt: int
    length: int = 0  # so far

    def __post_init__(self) -> None:
        self.length = self.prompt


@dataclass
class Host:
    """Steps as vLLM's runner makes them: verifies the last drafts, appends what was sampled, asks for new drafts."""

    proposer: vllm.Proposer
    rows: int = 8
    batch: list[Text] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by the identity of a text
    accepted: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.token_ids = np.zeros((self.rows + 3, CONTEXT), np.int32)

    def step(self, prefilling: frozenset[int] = frozenset(), verified: int = 1 << 30) -> dict[int, list[int]]:
        """One step of the whole batch; `prefilling` texts sample nothing, and of drafts at most `verified` tokens are
        looked at. Returns the new drafts."""
        self.steps += 1
        sampled = []
        for text in self.batch:
            if id(text) in prefilling:
                sampled.append([])
                continue
            draft, right = self.drafts.pop(id(text), [])[:verified], 0
            following = text.tokens[text.length : text.length + len(draft) + 1]
            while right < len(draft) and right < len(following) - 1 and draft[right] == following[right]:
                right += 1
            self.accepted += right
            text.length += right + 1
            sampled.append(following[: right + 1])
        self.token_ids[:] = -7  # what an earlier batch left there means nothing
        counts = np.full(self.rows + 3, 99, np.int32)
        for row, text in enumerate(self.batch):
            self.token_ids[row, : text.length] = text.tokens[: text.length]
            counts[row] = text.length
        drafts = self.proposer.propose(sampled, counts, self.token_ids, slot_mappings=None)
        assert len(drafts) == len(self.batch)
        self.drafts = {id(text): draft for text, draft in zip(self.batch, drafts, strict=True)}
        return self.drafts


def own_text(number: int, rng: random.Random, length: int = 200) -> Text:
    """A text that repeats itself, of tokens that no other text has."""
    first = 1 + number * _CLASH % (VOCABULARY - 2 * _CLASH)
    phrases = [[first + rng.randrange(_CLASH - 1) for _ in range(6)] for _ in range(5)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases)
    return Text(tokens[:length], prompt=rng.randrange(1, length // 2))


def owner(token: int) -> int:
    """The number of the text, modulo those there can be, that a token belongs to."""
    return (token - 1) // _CLASH

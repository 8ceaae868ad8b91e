"""Fakes for tests of everything that runs hierarchies: a scorer and a store in numpy, with no model behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hierspec.core.interfaces import Answer, Ask, RequestView, Store
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import adjust, distribution, picks

Logits = Callable[[np.ndarray], np.ndarray]  # text -> logits of the token after it
Draft = Callable[[np.ndarray, int], Proposal]  # context, budget -> proposal


def markov_logits(
    vocabulary: int, seed: int = 0, order: int = 2, sharpness: float = 2.0, noise: float = 0.0, noise_seed: int = 1
) -> Logits:
    """Random logits that depend on the last `order` tokens alone.

    Two with the same `seed` are related: `noise` 0 is the same model, 0.5 a good draft of it, 5 a bad one.
    """
    cache: dict[tuple[int, ...], np.ndarray] = {}

    def logits(text: np.ndarray) -> np.ndarray:
        tail = tuple(text[-order:].tolist()) if order else ()
        if tail not in cache:
            shared = np.random.default_rng([seed, 0, *tail]).standard_normal(vocabulary)
            added = np.random.default_rng([seed, noise_seed + 1, *tail]).standard_normal(vocabulary)
            cache[tail] = sharpness * (shared + noise * added)
        return cache[tail]

    return logits


class FakeScorer:
    """A deterministic scorer with the reference distribution and picks of `core.sampling`, row by row.

    `packed` has the number of asks of every call, so a test can see what was batched; `released` has the requests that
    ended.
    """

    def __init__(
        self,
        name: str = "fake",
        vocabulary: int = 16,
        logits: Logits | None = None,
        *,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 2.0,
        noise: float = 0.0,
        noise_seed: int = 1,
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.logits = logits or markov_logits(vocabulary, seed, order, sharpness, noise, noise_seed)
        self.packed: list[int] = []
        self.released: list[RequestView] = []

    @property
    def calls(self) -> int:
        return len(self.packed)

    @property
    def asks(self) -> int:
        return sum(self.packed)

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        self.packed.append(len(asks))
        return [self._answer(ask) for ask in asks]

    def release(self, request: RequestView) -> None:
        self.released.append(request)

    def adjusted(self, text: np.ndarray, request: RequestView, allowed: np.ndarray | None = None) -> np.ndarray:
        """Logits of the token after `text` under the request's sampling settings. [vocabulary] float64."""
        return adjust(self.logits(text), text, len(request.prompt), request.sampling, allowed)

    def _answer(self, ask: Ask) -> Answer:
        sampling, seed = ask.request.sampling, ask.request.seed
        allowed: list[np.ndarray | None] = [None] * (1 + len(ask.proposal))
        if ask.request.constraint is not None:
            allowed = ask.request.constraint.allowed(ask.context[len(ask.request.prompt) :], ask.proposal)
        rows = [self.adjusted(text, ask.request, bits) for text, bits in zip(texts(ask), allowed, strict=True)]
        raw = np.array([self.logits(text) for text in texts(ask)]) if ask.logits else None
        if ask.distributions:
            return Answer(distributions=np.array([distribution(row, sampling) for row in rows]), logits=raw)
        start = len(ask.context)
        depths = [0, *(depth + 1 for depth in ask.proposal.depths())]
        picked = [picks(z, sampling, seed, start + d, ask.candidates) for z, d in zip(rows, depths, strict=True)]
        return Answer(picks=np.array(picked, np.int32), logits=raw)


def texts(ask: Ask) -> list[np.ndarray]:
    """The text before each row of an answer: the context, then the context with the path to every node."""
    nodes = range(-1, len(ask.proposal))
    return [np.concatenate((ask.context, np.array(ask.proposal.path(node), np.int32))) for node in nodes]


class FakeStore(Store):
    """A store that proposes what `draft` returns. `learnt` has what it was taught, one entry per step.

    With `fresh`, every request gets its own store (listed in `begun`); otherwise all share this one.
    """

    def __init__(self, name: str, draft: Draft, fresh: bool = False) -> None:
        self.name = name
        self.draft = draft
        self.fresh = fresh
        self.prompts: list[np.ndarray] = []
        self.learnt: list[tuple[int, ...]] = []
        self.begun: list[FakeStore] = []

    def begin(self, prompt: np.ndarray, namespace: str = "") -> FakeStore:
        store = self
        if self.fresh:
            store = FakeStore(self.name, self.draft)
            self.begun.append(store)
        store.prompts.append(prompt)
        return store

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        proposal = self.draft(context, budget).first(budget)
        return Proposal(proposal.tokens, proposal.parents, (self.name,) * len(proposal), proposal.distributions)

    def learn(self, tokens: Sequence[int]) -> None:
        self.learnt.append(tuple(tokens))


def random_trees(vocabulary: int, seed: int = 0, silence: float = 0.2) -> Draft:
    """Trees of any shape and size, equal siblings among them, nothing with probability `silence`.

    The tree depends on the context alone, so a second run sees the same drafts.
    """

    def draft(context: np.ndarray, budget: int) -> Proposal:
        generator = np.random.default_rng([seed, *context.tolist()])
        size = 0 if generator.random() < silence else int(generator.integers(1, budget + 1))
        tokens = tuple(generator.integers(0, vocabulary, size).tolist())
        return Proposal(tokens, tuple(int(generator.integers(-1, node)) for node in range(size)))

    return draft


def scripted(text: Sequence[int], wrong_every: int = 0) -> Draft:
    """A chain copied from `text`, whatever the context says; every `wrong_every`-th token is off by one."""
    script = [max(0, t - 1) if wrong_every and i % wrong_every == 0 else t for i, t in enumerate(text)]

    def draft(context: np.ndarray, budget: int) -> Proposal:
        return Proposal.chain(script[len(context) : len(context) + budget])

    return draft

"""Fakes for tests of everything that runs hierarchies: a scorer and a store in numpy, with no model behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hierspec.core.hierarchy import Ask, RequestView, Store
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import adjust, distribution, picks
from hierspec.core.verify import Answer

Logits = Callable[[np.ndarray], np.ndarray]  # text -> logits of the token after it
Guess = Callable[[np.ndarray, int], Proposal]  # context, budget -> proposal


def markov_logits(
    vocabulary: int, seed: int = 0, order: int = 2, sharpness: float = 2.0, noise: float = 0.0, noise_seed: int = 1
) -> Logits:
    """Random logits that depend on the last `order` tokens alone.

    Two of the same `seed` are related: `noise` 0 is the same model, 0.5 a good draft of it, 5 a bad one.
    """
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(text: np.ndarray) -> np.ndarray:
        tail = tuple(text[-order:].tolist()) if order else ()
        if tail not in known:
            own = np.random.default_rng([seed, 0, *tail]).standard_normal(vocabulary)
            strange = np.random.default_rng([seed, noise_seed + 1, *tail]).standard_normal(vocabulary)
            known[tail] = sharpness * (own + noise * strange)
        return known[tail]

    return logits


class FakeScorer:
    """A deterministic scorer. It answers with the reference law and picks of `core.sampling`, row by row.

    `packed` holds the number of asks of every call, so a test can see what was batched; `released` the requests
    that ended.
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

    def adjusted(self, text: np.ndarray, request: RequestView) -> np.ndarray:
        """Logits of the token after `text` as the request's sampling has them. [vocabulary] float64."""
        return adjust(self.logits(text), text, len(request.prompt), request.sampling)

    def _answer(self, ask: Ask) -> Answer:
        sampling, seed = ask.request.sampling, ask.request.seed
        rows = [self.adjusted(text, ask.request) for text in texts(ask)]
        if ask.distributions:
            return Answer(distributions=np.array([distribution(row, sampling) for row in rows]))
        start = len(ask.context)
        depths = [0, *(depth + 1 for depth in ask.proposal.depths())]
        found = [picks(z, sampling, seed, start + d, ask.candidates) for z, d in zip(rows, depths, strict=True)]
        return Answer(picks=np.array(found, np.int32))


def texts(ask: Ask) -> list[np.ndarray]:
    """The text before each row of an answer: the context, then the context with the path to every node."""
    nodes = range(-1, len(ask.proposal))
    return [np.concatenate((ask.context, np.array(ask.proposal.path(node), np.int32))) for node in nodes]


class FakeStore(Store):
    """A store that guesses what `guess` says. `learnt` holds what it was taught, one entry a step.

    With `fresh`, every request gets a store of its own (kept in `begun`); else all share this one.
    """

    def __init__(self, name: str, guess: Guess, fresh: bool = False) -> None:
        self.name = name
        self.guess = guess
        self.fresh = fresh
        self.prompts: list[np.ndarray] = []
        self.learnt: list[tuple[int, ...]] = []
        self.begun: list[FakeStore] = []

    def begin(self, prompt: np.ndarray, namespace: str = "") -> FakeStore:
        if not self.fresh:
            self.prompts.append(prompt)
            return self
        own = FakeStore(self.name, self.guess)
        own.prompts.append(prompt)
        self.begun.append(own)
        return own

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        found = self.guess(context, budget).first(budget)
        return Proposal(found.tokens, found.parents, (self.name,) * len(found), found.distributions)

    def learn(self, tokens: Sequence[int]) -> None:
        self.learnt.append(tuple(tokens))


def random_trees(vocabulary: int, seed: int = 0, silence: float = 0.2) -> Guess:
    """Trees of any shape and size, equal siblings among them, nothing with probability `silence`.

    The tree depends on the context alone, so a second run sees the same guesses.
    """

    def guess(context: np.ndarray, budget: int) -> Proposal:
        generator = np.random.default_rng([seed, *context.tolist()])
        size = 0 if generator.random() < silence else int(generator.integers(1, budget + 1))
        tokens = tuple(generator.integers(0, vocabulary, size).tolist())
        return Proposal(tokens, tuple(int(generator.integers(-1, node)) for node in range(size)))

    return guess


def scripted(text: Sequence[int], wrong_every: int = 0) -> Guess:
    """A chain copied from `text`, whatever the context says; every `wrong_every`-th token is off by one."""
    script = [max(0, t - 1) if wrong_every and i % wrong_every == 0 else t for i, t in enumerate(text)]

    def guess(context: np.ndarray, budget: int) -> Proposal:
        return Proposal.chain(script[len(context) : len(context) + budget])

    return guess

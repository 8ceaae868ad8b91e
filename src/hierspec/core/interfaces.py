"""What everything else implements (scorers, stores, paces), and what passes between them and the recursion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from hierspec.core.logprobs import TokenLogprobs
from hierspec.core.proposal import NOTHING, Candidate, Proposal
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.stats import Stats, TierStats


class RequestView(Protocol):
    """What the recursion, scorers and paces see of a request. The engine's is `Request`."""

    prompt: np.ndarray
    output: list[int]  # what the target has written so far
    ended: str | None  # None while it runs; then stop, length, cancelled or error
    sampling: Sampling
    seed: int
    dice: Dice
    stop_ids: frozenset[int]
    stats: Stats
    stores: dict[str, Store]  # by name, as this request sees them
    running_requests: int  # including this one
    last_pass: PassTime | None  # its last pass, where this request is to learn what it cost
    spent: float  # seconds of all passes of its engine up to its last one, including the time between passes
    pass_seconds: float  # per pass of its last call: one that wrote n tokens ahead counts as n + 1 passes
    prefilled: bool  # whether its last pass also prefilled or did one-off work, so that its time says little
    constraint: Constraint | None  # what its grammar allows; None: everything
    ready: list[Answer]  # the target's answers to asks that are still to come, the next one last
    clock: Callable[[], float]  # times its stores: what they cost decides which are asked
    to_learn: Callable[[], None] | None  # what its pace still has to learn from its last round

    def catch_up(self) -> None:
        """Learn what is left to learn. A scorer calls this while it waits for its device; else it is done after."""


class PassTime(NamedTuple):
    """How long a forward pass took."""

    rows: int  # of all its requests: one for the context and one for each draft node
    seconds: float  # including the time that its requests took to ask for it
    context: float = 0.0  # tokens before these rows, on average
    requests: int = 1  # that shared it


@dataclass(frozen=True, eq=False, slots=True)
class Ask:
    """Score this proposal after this context: what a request's coroutine yields and the engine answers."""

    scorer: Scorer
    context: np.ndarray  # [length] int32, all of it, the prompt included
    proposal: Proposal
    request: RequestView
    candidates: int
    distributions: bool  # the rule needs whole distributions, not picks
    stats: TierStats
    leads: bool = False  # also answer how far ahead each pick was: the tier above learns from it
    logits: bool = False  # also answer the raw logits, for log-probabilities
    # [n, lead classes] bool: the scorer may go on from its own picks, for at most n more tokens. Row i says after which
    # classes of the least lead so far it goes on after token i.
    ahead: np.ndarray | None = None
    # Whether the next ask will most likely be one like this, so that a device may begin with it at once: after a whole
    # round (`Tier.rounds`), or after all tokens that this one may write ahead.
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One row for what follows the context (row 0), and one for what follows each node (row node + 1).

    Rows are picks [rows, candidates or more] or distributions [rows, vocabulary]. If the logits of a row are not
    numbers, its pick is `NO_TOKEN` and its distribution NaN: that matters only if the row's token would be written.
    """

    picks: np.ndarray | None = None
    distributions: np.ndarray | None = None
    leads: np.ndarray | None = None  # [rows]: how far each pick's score is ahead of the next best, where asked for
    logits: np.ndarray | None = None  # [rows, vocabulary]: as the model computed them, where asked for
    ahead: tuple[Answer, ...] = ()  # answers to the next asks, where each context is longer by the pick before it
    # Of an answer with one row: for the first runners-up, the tokens that the scorer would write after each, and how
    # far each of those is ahead of the next best.
    branches: tuple[tuple[tuple[int, float], ...], ...] = ()
    # Of a fused round: what was drafted, which the rows are about, and what of it the drafter calls its best tokens.
    draft: Proposal = NOTHING
    chain: tuple[Written, ...] = ()


class Scorer(Protocol):
    """Can verify drafts: a model, an exit of a model, a draft model."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        """One forward pass for all asks. Caches of earlier passes may speed it up, never change it."""

    def release(self, request: RequestView) -> None:
        """The request has ended; what is cached for it may go."""
        return


class RoundScorer(Scorer, Protocol):
    """A scorer and the drafter below it, in one call: drafts after the context, and scores that draft."""

    @property
    def depth(self) -> int:
        """Tokens that it may draft in a row."""

    def takes(self, request: RequestView, position: int) -> bool:
        """Whether it can draft and verify after this position with the request's sampling options."""

    def begun(self, request: RequestView, position: int) -> bool:
        """Whether it is at work already on this request's round after its token at this position."""


class Store(Protocol):
    """Can only draft: a token database."""

    name: str

    def begin(self, prompt: np.ndarray, namespace: str = "") -> Store:
        """The store as one request sees it: itself, or a new one for what belongs to this request alone.

        What one namespace (a user, a tenant) wrote is never served to another.
        """
        return self

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        """At most `budget` nodes to follow `context`; an empty proposal where it has none."""

    def learn(self, tokens: Sequence[int]) -> None:
        """The request has written these tokens, in one step or in several. Called before the store is asked again."""

    def observe(self, proposal: Proposal, picks: np.ndarray) -> None:
        """What the scorer would itself write after the context (picks[0]) and after each node (picks[node + 1])."""
        return

    def end(self) -> None:
        """The request has ended; what it wrote may now be learnt for others."""
        return

    def flush(self) -> None:
        """Write to disk what is not there yet, where the store has files."""
        return


class Constraint(Protocol):
    """Which tokens a request's grammar allows after what it has written.

    Answers depend on the tokens alone: earlier questions and rejected drafts leave no trace. `written` is the text
    after the prompt, [length] int32: the request's output, and maybe a draft after it.
    """

    def wrote(self, tokens: Sequence[int]) -> None:
        """The request has written these tokens: no later question is about a shorter text."""

    def allowed(self, written: np.ndarray, proposal: Proposal) -> list[np.ndarray | None]:
        """The tokens that may follow `written` (row 0) and each node (row node + 1), as bit masks.

        A mask is [vocabulary / 8, rounded up] uint8, the lowest bit first; None where the path to a node is forbidden.
        """

    def pruned(self, written: np.ndarray, proposal: Proposal) -> Proposal:
        """The proposal without fixed tokens that the grammar forbids, and what follows them. Sampled ones stay."""

    def forced(self, written: np.ndarray, most: int) -> Proposal:
        """A chain of at most `most` tokens that the grammar forces: these tokens, or at least their characters."""


UNDRAFTED, ACCEPTED, CORRECTED, RUNNER_UP = range(4)  # how a token came to be written, or handed up beside one


def evidence(how: int, lead: int) -> int:
    """A class for how a token came about and how far it was ahead of all others (the class of its lead)."""
    return how + 4 * lead


class Written(NamedTuple):
    """A position that a tier has written: its token and runners-up, who drafted it first, and how it came about."""

    candidates: list[Candidate]
    source: str
    how: int
    lead: int = 0  # class of how far the token was ahead of all others, from 0 (hardly) up
    logprobs: TokenLogprobs | None = None  # where the request wants them, of what the target writes
    # For the first runners-up, the tokens that should follow each, with the evidence for them.
    branches: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def token(self) -> int:
        return self.candidates[0][0]

    @property
    def evidence(self) -> int:
        """The class by which the tier above learns how often such a token is accepted."""
        return evidence(self.how, self.lead)


@dataclass(slots=True)
class Block:
    """What a tier writes before it hands up: one step of the target, or a draft for a tier above."""

    skipped: int = 0  # tiers between this one and the one that it drafts for
    gather: int = 1  # draft length: it is handed up at this many tokens in any case
    least: int = 1  # it is not handed up before it has this many tokens
    written: list[Written] = field(default_factory=list)
    seconds: float = 0.0  # expected time of its passes, those of lower tiers included
    draft: Proposal = NOTHING  # what its last pass verified
    accepted: Sequence[int] = ()  # nodes of `draft` that were accepted and written, in order


@dataclass(slots=True)
class Round:
    """One pass of a tier with its drafts and its result: what the tier's pace decides by and learns from."""

    level: int
    context: np.ndarray
    room: int  # tokens that a draft may have
    budget: int  # nodes that may be verified
    request: RequestView
    block: Block  # that the tier is writing
    began: float = 0.0  # the request's `spent` when the round began
    may_draft: bool = True  # the pace's decision when the round begins
    attempt: object = None  # the pace's own note about that decision
    proposals: list[Proposal] = field(default_factory=list)  # the lower tier's, then the grammar's, then the stores'
    asked: list[tuple[str, Proposal, float]] = field(default_factory=list)  # store, its draft, and the seconds it took
    drafted: Block | None = None  # by a tier below
    forced: Proposal = NOTHING  # of the grammar, among the proposals
    appraised: Proposal | None = None  # the best tree of the stores' proposals, where `route` needed it
    draft: Proposal = NOTHING  # what is verified
    tokens: list[int] = field(default_factory=list)  # what was written
    # Whether the lower tier's draft is made and verified by one call: at first whether it can be, then what `route`
    # decides, and what was done.
    fused: bool = False
    missed: int = 0  # tokens that the lower tier had to read first in that call
    seconds: float = 0.0  # expected time of this pass and of the lower tiers' passes
    ended: float = 0.0  # the request's `spent` when the round ended


class Pace(Protocol):
    """Decides for one tier what is worth its time, never what is written.

    Sampled tokens are always verified, and a block ends before the next token is sampled, so no distribution changes.
    """

    def drafts(self, round: Round) -> bool:
        """Whether the round that begins may draft. If not, no store or lower tier is asked."""

    def rests(self, round: Round) -> int:
        """For how many rounds, this one included, nothing will be drafted, whatever is written.

        Called only in rounds that do not draft.
        """

    def asks(self, round: Round, store: str) -> bool:
        """Whether to ask this store as well. The first store is always asked."""

    def route(self, round: Round) -> Block | None:
        """Who drafts: the block that a tier below should write; None: nobody."""

    def goes_on(self, round: Round) -> bool:
        """Whether the next round will most likely be drafted in one call, if this one is (`Round.fused`).

        Such a draft has a fixed shape, and nothing else is verified beside it.
        """

    def choose(self, round: Round) -> Proposal:
        """Which drafts are verified: one tree of the round's proposals. Sampled tokens must stay."""

    def learn(self, round: Round) -> None:
        """The round is over. Adds the expected time of its pass to the round and the tier's counters."""

    def hands_up(self, round: Round) -> bool:
        """Whether the round's block ends here. Decided before the next token is sampled."""

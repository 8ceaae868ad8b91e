"""The hierarchy: ordered tiers and the one recursion that runs every plan."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.forced import after, ask_grammar, write_certain, written_in
from hierspec.core.foresight import SUREST, Foresight, lead_class
from hierspec.core.fused_rounds import can_be_fused, fused_ask, take_fused
from hierspec.core.interfaces import (
    ACCEPTED,
    CORRECTED,
    RUNNER_UP,
    UNDRAFTED,
    Answer,
    Ask,
    Block,
    Pace,
    RequestView,
    Round,
    RoundScorer,
    Scorer,
    Store,
    Written,
    evidence,
)
from hierspec.core.logprobs import TokenLogprobs, token_logprobs
from hierspec.core.proposal import NOTHING, Candidate, Distribution, Proposal
from hierspec.core.request_store import RequestStore
from hierspec.core.sampling import NO_TOKEN
from hierspec.core.stats import Stats, TierStats
from hierspec.core.verify import BY_DISTRIBUTION, RULES

Extension = Generator[Ask, Answer, Block]

# Tokens that the target may decode ahead in one call while nothing is drafted, on backends with multi-step decoding.
_TARGET_AHEAD = 7
_WHATEVER_LEADS = np.ones((_TARGET_AHEAD, SUREST + 1), bool)


class FixedPace:
    """The pace of a fixed plan, which knows no costs.

    The next tier always drafts, all drafts within the budget are verified, and blocks end by count.
    """

    def drafts(self, round: Round) -> bool:
        return True

    def rests(self, round: Round) -> int:
        return 0

    def asks(self, round: Round, store: str) -> bool:
        """Ask further stores while the draft has room for more nodes."""
        sizes = [len(proposal) for proposal in round.proposals]
        if sum(sizes) < round.budget:  # the cheap test first: merging takes microseconds
            return True
        return max(sizes) < round.budget and len(FixedPace.choose(self, round)) < round.budget

    def route(self, round: Round) -> Block | None:
        return Block()

    def goes_on(self, round: Round) -> bool:
        return False

    def choose(self, round: Round) -> Proposal:
        merged = NOTHING
        for proposal in round.proposals:
            merged = merged.merge(proposal, round.budget)
        return merged

    def learn(self, round: Round) -> None:
        return

    def hands_up(self, round: Round) -> bool:
        return len(round.block.written) >= round.block.gather


FIXED = FixedPace()


@dataclass(frozen=True)
class Tier:
    """A scorer, the stores it may ask, and what it hands up."""

    scorer: Scorer
    gather: int = 1  # draft length: a block of this many tokens is handed up; the target hands up after every pass
    stores: tuple[Store, ...] = ()
    budget: int = 7  # draft nodes that one pass of the scorer may verify
    merge: bool = False  # also ask further stores and lower tiers, instead of stopping at the first draft
    candidates: int = 1  # tokens handed up per position: the one written, then runners-up
    pace: Pace = FIXED  # decides what is worth its time
    foresight: Foresight = field(default_factory=Foresight, compare=False)  # how far it may write ahead
    rounds: RoundScorer | None = None  # the scorer and the next tier in one call, where a device can do that


@dataclass(frozen=True)
class Hierarchy:
    tiers: tuple[Tier, ...]  # tier 0 is the target
    rule: str = "coupled"

    def __post_init__(self) -> None:
        by_name: dict[str, Store] = {}
        for tier in self.tiers:
            for store in tier.stores:
                if by_name.setdefault(store.name, store) is not store:
                    raise HierspecError(f"Two stores of one hierarchy are named {store.name!r}; give them two names.")

        if getattr(self.tiers[0].scorer, "synthetic", False):
            raise HierspecError("The target cannot be synthetic: what it writes is the text.")

    @property
    def synthetic(self) -> bool:
        """Whether the agreement of some tier is simulated."""
        return any(getattr(tier.scorer, "synthetic", False) for tier in self.tiers)

    def new_stats(self) -> Stats:
        return Stats([TierStats(tier.scorer.name) for tier in self.tiers])

    def extend(self, level: int, context: np.ndarray, room: int, block: Block, request: RequestView) -> Extension:
        """Fill the block with tokens that this tier would itself have written after `context`, at most `room`.

        The block ends where the tier's pace hands it up, or at a stop id. Its last round may take it beyond `gather`.
        """
        tier, stats = self.tiers[level], request.stats.tiers[level]
        pace, written = tier.pace, block.written
        logits = level == 0 and request.sampling.logprobs is not None
        # Without drafts a scorer may go on from its own picks, and so answer the next asks in the same call.
        by_picks = not (self.rule in BY_DISTRIBUTION or logits or request.constraint is not None)
        bottom = by_picks and level + 1 == len(self.tiers) and not tier.stores
        # What the target's rounds teach is learnt while a device computes the next pass, if the host has to wait then.
        waits = not level and getattr(tier.scorer, "asynchronous", False)
        # The target hands up after every pass, so answers computed ahead are kept with the request.
        answers: list[Answer] = [] if level else request.ready
        while True:
            if level and write_certain(context, room, block, request):
                return block
            here = after(context, written)
            # A pass writes one token beyond the accepted draft, so the draft must leave room for it.
            round = Round(level, here, room - len(written) - 1, tier.budget, request, block, request.spent)
            lower, fused, round.may_draft = None, None, pace.drafts(round)
            if answers and round.may_draft:
                # The target computed them before the pace changed its mind, or before other requests came.
                round.may_draft, round.attempt = False, None
            if round.may_draft:
                if request.constraint is not None and (level or tier.stores or len(self.tiers) > 1):
                    ask_grammar(request.constraint, round)
                _ask_stores(tier, round)
                if tier.rounds is not None and by_picks:
                    round.fused = can_be_fused(tier.rounds, round)
                lower = self._route(round)
                if tier.rounds is not None and by_picks:
                    fused = fused_ask(tier.rounds, pace, round, lower, stats)
            if fused is not None:
                answer = take_fused((yield fused), lower or Block(), round, request.stats.tiers[level + 1])
            else:
                if lower is not None:
                    drafted = yield from self.extend(level + 1 + lower.skipped, here, round.room, lower, request)
                    self._add_draft(drafted, round)
                round.draft = pace.choose(round) if round.may_draft else NOTHING
                if answers:
                    request.spent += request.pass_seconds
                else:
                    first = yield self._ask(round, bottom, by_picks, logits, stats)
                    answers += [*reversed(first.ahead), first]
                answer = answers.pop()
            simple = not (level or round.draft or logits or answer.picks is None)
            stopped = self._write_own(round, answer) if simple else self._write(round, answer)
            foresight = tier.foresight if level and bottom else None
            ends = _end_round(pace, round, stopped, foresight, waits and round.may_draft)
            while level and answers and not ends:  # tokens that the scorer wrote ahead need no draft and no ask
                request.spent += request.pass_seconds
                round.context, round.room, round.seconds = after(context, written), round.room - 1, 0.0
                stopped = self._write_own(round, answers.pop())
                ends = _end_round(pace, round, stopped, tier.foresight)
            if ends:
                if level and not stopped:
                    write_certain(context, room, block, request)
                return block

    def _ask(self, round: Round, bottom: bool, by_picks: bool, logits: bool, stats: TierStats) -> Ask:
        """The ask that verifies the round's draft. Without one the scorer may write further tokens by itself.

        Only for a single request: several share passes only while each takes one step at a time. And not for the first
        token of a text: somebody waits for it.
        """
        level, request, tier = round.level, round.request, self.tiers[round.level]
        ahead, plain = None, 0  # tokens that the target will certainly write without drafts
        if request.running_requests == 1 and (level or request.output):
            if bottom and level:
                ahead = _ahead(tier, round.block)
            elif bottom:
                plain = max(round.room, 0)
                ahead = _WHATEVER_LEADS[:plain]
            elif by_picks and not level and not round.may_draft:
                request.catch_up()  # the last round may end the break
                plain = max(min(tier.pace.rests(round) - 1, round.room), 0)
                ahead = _WHATEVER_LEADS[:plain]
        distributions = self.rule in BY_DISTRIBUTION
        leads = level > 0 and not distributions
        return Ask(
            tier.scorer,
            round.context,
            round.draft,
            request,
            tier.candidates,
            distributions,
            stats,
            leads,
            logits,
            ahead,
            goes_on=plain > 2 * _TARGET_AHEAD,
        )

    def _route(self, round: Round) -> Block | None:
        """The block that a tier below should draft; None where no tier does."""
        tier, lower = self.tiers[round.level], self.tiers[round.level + 1 :]
        drafts = len(round.proposals) - bool(round.forced.tokens)  # forced tokens are few: a lower tier still drafts
        if round.room < 1 or not lower or (drafts and not tier.merge):
            return None
        block = tier.pace.route(round)
        if block is not None:
            block.gather = min(lower[block.skipped].gather, round.room)
        return block

    def _add_draft(self, block: Block, round: Round) -> None:
        """Make a lower tier's block the round's first proposal: sampled tokens must come first."""
        scorer = self.tiers[round.level + 1 + block.skipped].scorer
        draft = _proposal(block.written, scorer.name).first(round.budget)
        if round.request.constraint is not None:  # the grammar may forbid runners-up
            draft = round.request.constraint.pruned(written_in(round), draft)
        round.proposals.insert(0, draft)
        round.drafted, round.seconds = block, block.seconds

    def _write_own(self, round: Round, answer: Answer) -> bool:
        """`_write` for one row of picks without a draft, but faster: it runs for every token of plain decoding, and for
        those that a tier writes ahead."""
        tier, request, picks = self.tiers[round.level], round.request, answer.picks
        assert picks is not None
        candidates: list[Candidate] = [(token, None) for token in picks[0][: tier.candidates].tolist()]
        token = candidates[0][0]
        if token == NO_TOKEN or token in request.stop_ids:
            return self._write(round, answer)
        _tell_stores(tier, round, answer)
        round.tokens = [token]
        lead = 0 if answer.leads is None else lead_class(float(answer.leads[0]))
        branches = tuple(
            tuple((token, evidence(UNDRAFTED, lead_class(lead))) for token, lead in branch)
            for branch in answer.branches
        )
        round.block.written.append(Written(candidates, tier.scorer.name, UNDRAFTED, lead, None, branches))
        request.stats.tiers[round.level].count(NOTHING, [], 1)
        return False

    def _write(self, round: Round, answer: Answer) -> bool:
        """Add the accepted tokens and the scorer's own next token to the block.

        Returns whether the block must end: at a stop id, or before a row whose logits are not numbers.
        """
        tier, request, draft = self.tiers[round.level], round.request, round.draft
        verdict = RULES[self.rule](draft, answer, request.dice, tier.candidates)
        _tell_stores(tier, round, answer)
        round.tokens = tokens = [candidates[0][0] for candidates in verdict.written]
        stopped = not request.stop_ids.isdisjoint(tokens)
        if stopped:
            del tokens[1 + next(at for at, token in enumerate(tokens) if token in request.stop_ids) :]
        if tokens[-1] == NO_TOKEN:
            tokens.pop()
            if not tokens and not round.level:
                raise _no_token(round)
            stopped = True  # a draft ends here; the target writes the tokens before it, and its next round raises
        accepted = verdict.accepted[: len(tokens)]
        round.block.draft, round.block.accepted = draft, accepted
        row = 0  # row of the answer that the token comes from
        for depth, candidates in enumerate(verdict.written[: len(tokens)]):
            lead = _lead_class(answer, row, candidates[0]) if round.level else 0
            logprobs = None if round.level else _logprobs(tier, request, answer, row, tokens[depth])
            if depth < len(accepted):
                position = Written(candidates, draft.sources[accepted[depth]], ACCEPTED, lead, logprobs)
                row = accepted[depth] + 1
            else:  # the scorer's own token
                how = CORRECTED if row - 1 in draft.parents else UNDRAFTED
                position = Written(candidates, tier.scorer.name, how, lead, logprobs)
            round.block.written.append(position)
        request.stats.tiers[round.level].count(draft, accepted, len(tokens))
        return stopped


def _end_round(pace: Pace, round: Round, stopped: bool, foresight: Foresight | None, later: bool = False) -> bool:
    """Learn from a finished round, now or later, and return whether its block ends.

    That is decided from what is written, before the next token is sampled, so no distribution changes. `foresight` is
    given for tiers that may write ahead.
    """
    round.ended = round.request.spent
    if later:
        round.request.to_learn = partial(pace.learn, round)
    else:
        pace.learn(round)
    block = round.block
    block.seconds += round.seconds
    if stopped:
        return True
    ends = pace.hands_up(round)
    if foresight is not None and len(block.written) < block.gather:
        foresight.learn(len(block.written), _least_lead(block), not ends)
    return ends


def _ahead(tier: Tier, block: Block) -> np.ndarray | None:
    """`Ask.ahead` for this block: where the scorer may go on from its own picks.

    It does wherever the pace will for certain: before the least tokens of a block.
    """
    count = len(block.written)
    most, certain = block.gather - count, block.least - count - 1
    if most <= 1:
        return None
    ahead = tier.foresight.ahead(count, _least_lead(block), most)
    ahead[: max(certain, 0)] = True
    return ahead


def _least_lead(block: Block) -> int:
    return min((position.lead for position in block.written), default=SUREST)


def _ask_stores(tier: Tier, round: Round) -> None:
    """Add the stores' proposals to the round: the first one, or with `merge` those of all stores that the pace asks.

    Stores propose what follows the tokens that the grammar forces.
    """
    room = round.room - len(round.forced)
    if room < 1 or not tier.stores or not round.request.stop_ids.isdisjoint(round.forced.tokens):
        return
    clock, forced = round.request.clock, round.forced
    began = clock()
    context = np.concatenate((round.context, np.array(forced.tokens, np.int32))) if forced.tokens else round.context
    for number, store in enumerate(tier.stores):
        if number and not tier.pace.asks(round, store.name):
            continue
        asked = clock()
        proposal = round.request.stores[store.name].propose(context, tier.budget).cut(room)
        round.asked.append((store.name, proposal, clock() - asked))
        if not proposal.tokens:
            continue
        if not 0 <= min(proposal.tokens) <= max(proposal.tokens) < tier.scorer.vocabulary:
            raise HierspecError(f"The store {store.name!r} drafted a token id outside the model's vocabulary.")
        if round.request.constraint is not None:
            proposal = round.request.constraint.pruned(written_in(round), forced.followed_by(proposal))
            if len(proposal) == len(forced):
                continue
        round.proposals.append(proposal)
        if not tier.merge:
            break
    round.request.stats.tiers[round.level].store_seconds += clock() - began


def _tell_stores(tier: Tier, round: Round, answer: Answer) -> None:
    """Let stores that want it observe what the scorer would write after the context and after each node."""
    for store in tier.stores:
        observer = round.request.stores[store.name]
        if isinstance(observer, RequestStore) and not observer.observes:
            continue  # most do not observe: skip the argmax over distributions
        if answer.picks is not None:
            if answer.picks[:, 0].min() != NO_TOKEN:
                observer.observe(round.draft, answer.picks[:, 0])
        elif answer.distributions is not None and not np.isnan(answer.distributions[:, 0]).any():
            observer.observe(round.draft, np.argmax(answer.distributions, axis=1))


def _no_token(round: Round) -> HierspecError:
    position = len(round.context)
    if round.request.constraint is not None:
        return HierspecError(
            f"The grammar allows no token at position {position} that the model can write: its vocabulary lacks what "
            "must come there, logit_bias forbids it, or its logits are not numbers; change the grammar or logit_bias."
        )
    return HierspecError(
        f"The model's logits are not numbers at position {position}; its weights may be damaged, its dtype too narrow "
        "(try --dtype float32), or logit_bias leaves it no token to write."
    )


def _lead_class(answer: Answer, row: int, written: Candidate) -> int:
    """The class of the written token's lead over all others, from 0 (hardly any) up."""
    if answer.leads is not None:
        return lead_class(float(answer.leads[row]))
    token, distribution = written
    if distribution is None:
        return 0
    probability = min(float(distribution[token]), 1 - 1e-9)
    return lead_class(math.log(max(probability, 1e-9) / (1 - probability)))


def _logprobs(tier: Tier, request: RequestView, answer: Answer, row: int, token: int) -> TokenLogprobs | None:
    """A written token's log-probabilities, where the request wants them, from the row that the token comes from."""
    count = request.sampling.logprobs
    if count is None:
        return None
    if answer.logits is None:
        raise HierspecError(f"The scorer {tier.scorer.name} gives no logits, so there are no logprobs; leave them out.")
    return token_logprobs(answer.logits[row], token, count)


def _proposal(written: list[Written], tier: str) -> Proposal:
    """What a tier wrote, as a proposal to the tier above: a spine, with the tier's runners-up beside it, and last what
    it would write after those.

    A token's evidence is how it came to be written and how far ahead it was: the tier above learns how often such
    tokens are accepted.
    """
    nodes: list[tuple[int, int, str, Distribution | None, int]] = []
    branches: list[tuple[int, tuple[tuple[int, int], ...]]] = []  # node of a runner-up, and what follows it
    spine = -1
    for position in written:
        parent, spine = spine, len(nodes)
        (token, distribution), *others = position.candidates
        nodes.append((token, parent, position.source, distribution, position.evidence))
        if others:
            branches += enumerate(position.branches, len(nodes))
            beside = position._replace(how=RUNNER_UP).evidence
            nodes += [(token, parent, tier, distribution, beside) for token, distribution in others]
    for node, branch in branches:
        for token, reason in branch:
            nodes.append((token, node, tier, None, reason))
            node = len(nodes) - 1
    return Proposal(*zip(*nodes, strict=True))

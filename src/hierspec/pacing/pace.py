"""The pace of a tier that decides by cost: it combines appraisal, routing and the ends of blocks."""

from __future__ import annotations

from collections.abc import Mapping

from hierspec.core.hierarchy import FixedPace
from hierspec.core.interfaces import Block, Round
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.asking import StoreChoice, promise
from hierspec.pacing.blocks import BlockPolicy, ByCount
from hierspec.pacing.costs import FREE, Costs, Load
from hierspec.pacing.fused_rounds import FusedRounds
from hierspec.pacing.lengths import Lengths
from hierspec.pacing.routing import Router
from hierspec.pacing.stages import Prefilled, StagedAttempt, Stages, Switches

_MISSED = 16  # tokens that a drafter may have missed before a round in one call: so few take no time


class AdaptivePace(FixedPace):
    """Decides by measured costs and by what was learnt. A part that is not given works as in a fixed plan."""

    def __init__(
        self,
        costs: Costs = FREE,  # of the tier's passes over drafts of the next tier
        appraiser: Appraiser | None = None,  # chooses what is verified; None: as much as the budget holds
        router: Router | None = None,  # chooses who drafts; None: the next tier, always
        ends: Mapping[int, BlockPolicy] | None = None,  # when its blocks end, by the tiers skipped; None: by count
        lengths: Lengths | None = None,  # of finished texts
        switches: Switches | None = None,  # whether anything is drafted; None: always
        store_choice: StoreChoice | None = None,  # which stores are asked, where there is an appraiser
        fused_rounds: FusedRounds | None = None,  # when to draft and verify in one call; None: no device can
    ) -> None:
        self.store_choice = store_choice or StoreChoice()
        self.switches = switches
        self.lengths = lengths or Lengths()
        self.costs, self.appraiser, self.router = costs, appraiser, router
        self.fused_rounds = fused_rounds
        self.ends = ends or {0: ByCount()}

    def drafts(self, round: Round) -> bool:
        stages = self._stages(round)
        if stages is None:
            return True
        if not round.request.output and round.request.running_requests == 1:
            stages.new_text()
            if self.fused_rounds is not None:
                self.fused_rounds.new_text()
        round.attempt = attempt = stages.begin(round.request.running_requests)
        return attempt.drafts

    def rests(self, round: Round) -> int:
        stages = self._stages(round)
        return 0 if stages is None else stages.rests()

    def asks(self, round: Round, store: str) -> bool:
        if self.appraiser is None:
            return super().asks(round, store)
        drafts = promise(self.appraiser.acceptance, (proposal for _, proposal, _ in round.asked))
        return self.store_choice.asks(store, drafts, _speed(self.appraiser, round))

    def route(self, round: Round) -> Block | None:
        if self.router is None:
            return Block()
        attempt, load, gain = round.attempt, _load(round), 0.0
        if self._drafts_after_this(round, load):
            return None
        lacking = to_prefill(self.router, round)
        if isinstance(attempt, StagedAttempt):
            plain = self.costs.measured_plain(load)
            prefill = self.router.prefill(lacking, load) / plain if plain else 0.0
            if not attempt.stages.tiers_draft(attempt, prefill):
                self._decline(round, self.router)
                return None
            attempt.prefilled = _prefilled(round)
        if round.proposals and self.appraiser is not None:
            speed = _speed(self.appraiser, round)
            gain, round.appraised = self.appraiser.appraise(round.proposals, round.budget, speed, load)
        room = min(round.room, self.lengths.rest(len(round.request.output)))
        if round.fused and self.fused_rounds is not None:
            # What its passes cost one by one says little. Whether such rounds pay is timed by the switch.
            policy = self.router.routes[0].policy
            if self.fused_rounds.better(gain) and not policy.too_late(load, lacking[0], room):
                return Block(least=policy.begin(load))
            round.fused = False
            if self.fused_rounds.seconds:
                self._decline(round, self.router)
                return None
        skipped = self.router.choose(gain, load, lacking, room)
        if skipped is None and isinstance(attempt, StagedAttempt) and attempt.stages.may_explore():
            skipped = self.router.explore(load, lacking, room)
            if skipped is not None:
                attempt.stages.explores()
        if skipped is None:
            self._decline(round, self.router)
            return None
        return Block(skipped, least=self.router.routes[skipped].policy.begin(load))

    def _drafts_after_this(self, round: Round, load: Load) -> bool:
        """Whether the prompt's own pass should not wait for a draft: the round after it drafts in one call."""
        timed = self.fused_rounds is not None and self.fused_rounds.seconds > 0
        return timed and load.requests == 1 and not round.request.output

    def _decline(self, round: Round, router: Router) -> None:
        """No lower tier drafts in this round. Other requests of a batch may still draft, so only one alone rests."""
        attempt = round.attempt
        if isinstance(attempt, StagedAttempt) and not round.proposals and round.request.running_requests == 1:
            router.idle(attempt.stages.decline(attempt))

    def _stages(self, round: Round) -> Stages | None:
        """The stages that time drafting against plain decoding. None with a grammar: what it forces always pays."""
        request = round.request
        if self.switches is None or request.constraint is not None:
            return None
        return self.switches.of(request.running_requests)

    def goes_on(self, round: Round) -> bool:
        attempt = round.attempt
        return round.fused and (not isinstance(attempt, StagedAttempt) or attempt.stages.goes_on())

    def choose(self, round: Round) -> Proposal:
        if self.appraiser is None:
            return super().choose(round)
        if not round.proposals:
            return NOTHING
        load = _load(round)
        if round.drafted is None and round.appraised is not None:
            chosen = round.appraised
        else:
            speed = _speed(self.appraiser, round)
            chosen = self.appraiser.choose(round.proposals, round.budget, speed, load)
        return chosen if chosen.tokens else self.appraiser.probe(round.proposals[0], load)

    def learn(self, round: Round) -> None:
        if not round.may_draft:
            self._learn_plain(round)
            return
        load, tokens, drafted = _load(round), round.tokens, round.drafted
        costs = self.costs
        if drafted is not None and self.router is not None:
            costs = self.router.routes[drafted.skipped].costs
        self._learn_pass(round, costs, load)
        if drafted is not None and self.router is not None and round.fused:
            own = self.router.routes[drafted.skipped].policy.own
            round.seconds += len(drafted.written) * own.under(load).seconds(1)
        self._learn_drafts(round, load)
        plain = self.costs.measured_plain(load)
        if plain and isinstance(attempt := round.attempt, StagedAttempt) and not attempt.declined:
            prefill = self._prefill_seconds(round, attempt, load)
            if not round.request.prefilled:
                self._learn_fused_rounds(round, round.ended - round.began - prefill)
                seconds = (round.ended - round.began) / plain
                attempt.stages.learn(attempt, len(tokens), seconds, load.requests, prefill / plain)
            elif drafted is not None and len(round.context) == len(round.request.prompt):
                # First round: the target's prefill gives one token and is no cost of drafts. The rest is theirs.
                spent = sum(stats.seconds for stats in round.request.stats.tiers[round.level + 1 :])
                attempt.stages.charge(len(tokens) - 1, spent / plain, load.requests, prefill / plain)

    def _learn_fused_rounds(self, round: Round, seconds: float) -> None:
        """Of a single request. Rounds of tiers in turn serve no comparison, nor do those without a draft."""
        if self.fused_rounds is None or round.request.running_requests > 1:
            return
        if round.fused or (round.drafted is None and round.draft.tokens):
            self.fused_rounds.learn(round.fused, len(round.tokens), seconds)

    def _prefill_seconds(self, round: Round, attempt: StagedAttempt, load: Load) -> float:
        """How much longer this round took because lower tiers prefilled."""
        if round.drafted is None or self.router is None:
            return 0.0
        if round.fused:
            usual = 0.0 if self.fused_rounds is None else self.fused_rounds.seconds
            reads = usual and round.missed > _MISSED
            return max(round.ended - round.began - usual, 0.0) if reads else 0.0
        now, before = _prefilled(round), attempt.prefilled
        own = self.router.routes[round.drafted.skipped].policy.own.under(load).seconds(1)
        return max(now.seconds - before.seconds - own * (now.written - before.written), 0.0)

    def _learn_plain(self, round: Round) -> None:
        """Learn from a round without drafts. All requests of a pass took the same time, so the pass counts once."""
        request, attempt = round.request, round.attempt
        if not isinstance(attempt, StagedAttempt) or request.prefilled:
            self._learn_pass(round, self.costs, _load(round))
            return
        stages, this_pass = attempt.stages, (request.spent, request.running_requests)
        if request.last_pass is None and stages.last_plain_pass == this_pass:
            self._count_pass(round, stages.last_plain_share)
            return
        load = _load(round)
        self._learn_pass(round, self.costs, load)
        stages.last_plain_pass, stages.last_plain_share = this_pass, round.seconds
        if plain := self.costs.measured_plain(load):
            stages.learn(attempt, len(round.tokens), (round.ended - round.began) / plain)

    def _learn_pass(self, round: Round, costs: Costs, load: Load) -> None:
        """Learn from the expected and the actual time of a pass."""
        request, rows = round.request, 1 + len(round.draft)
        seconds = costs.plain_share(load) if rows == 1 else costs.under(load).seconds(rows)
        if request.last_pass is not None:
            costs.observe(*request.last_pass)
            request.last_pass = None  # observe it once: tokens that were written ahead share its time
        self._count_pass(round, seconds)

    def _count_pass(self, round: Round, seconds: float) -> None:
        """Count the expected time of a pass, and the length of a finished text."""
        request, tokens = round.request, round.tokens
        request.stats.tiers[round.level].expected_seconds += seconds
        round.seconds += seconds
        if round.level == 0 and (len(tokens) > round.room or tokens[-1] in request.stop_ids):
            self.lengths.learn(len(round.context) - len(request.prompt) + len(tokens))

    def _learn_drafts(self, round: Round, load: Load) -> None:
        """Learn what drafts are worth."""
        tokens, drafted = round.tokens, round.drafted
        if self.appraiser is not None:
            self._learn_stores(self.appraiser, round, load)
            self.appraiser.learn(round.proposals, tokens, len(round.draft), load)
        if self.router is not None:
            taken, block = (None, []) if drafted is None else (drafted.skipped, drafted.written)
            self.router.learn(taken, block, tokens, round.seconds, len(round.proposals) > 1, load)
        self.ends[round.block.skipped].learn_round(len(tokens), round.seconds, load)

    def _learn_stores(self, appraiser: Appraiser, round: Round, load: Load) -> None:
        """Learn what each store after the first added: an accepted node counts for the source that drafted it first."""
        sources, before = round.draft.sources, [proposal for _, proposal, _ in round.asked[:1]]
        for store, proposal, seconds in round.asked[1:]:
            drafts, gained = promise(appraiser.acceptance, before), 0.0
            before.append(proposal)
            if proposal.tokens and (nodes := sources.count(proposal.sources[0])):
                share, rows = self.costs.under(load), 1 + len(sources)
                gained = sum(sources[node] == proposal.sources[0] for node in round.block.accepted)
                gained -= _speed(appraiser, round) * (share.seconds(rows) - share.seconds(rows - nodes))
            self.store_choice.learn(store, drafts, gained, seconds)

    def hands_up(self, round: Round) -> bool:
        block = round.block
        if len(block.written) >= block.gather:
            return True
        if len(block.written) < block.least:
            return False
        return not self.ends[block.skipped].go_on(block.written, _load(round))


def _load(round: Round) -> Load:
    return Load(round.request.running_requests, len(round.context))


def _prefilled(round: Round) -> Prefilled:
    """What lower tiers have prefilled so far."""
    below = round.request.stats.tiers[round.level + 1 :]
    return Prefilled(sum(stats.prefill_seconds for stats in below), sum(stats.prefill_written for stats in below))


def to_prefill(router: Router, round: Round) -> list[int]:
    """Tokens that each route's tier has to prefill first. A tier that has run before lacks little: 0."""
    lacking = []
    for route, stats in zip(router.routes, round.request.stats.tiers[round.level + 1 :], strict=False):
        if stats.known is None:
            stats.known = 0 if stats.calls else route.known(round.context)
        lacking.append(0 if stats.calls else len(round.context) - stats.known)
    return lacking


def _speed(appraiser: Appraiser, round: Round) -> float:
    stats = round.request.stats.tiers[round.level]
    return appraiser.speed(stats.written, stats.expected_seconds, _load(round))

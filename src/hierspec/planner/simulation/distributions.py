"""Recorded distributions of tiers along the target's text, and what the rules residual and block make of them.

The rule residual couples the token x of a draft with the token z of its verifier as closely as two distributions q and
p allow: they are equal with probability 1 - TV(p, q), the sum of min(p, q). Read backwards: given that the verifier
wrote z, the draft was z with probability min(1, q(z) / p(z)), and otherwise a token sampled from max(q - p, 0). So the
picks of a whole hierarchy can be sampled from the target's recorded text downwards. The coupled rule, which compares
picks, then accepts what the rule residual would have accepted, as often and as far.

The rule block accepts a prefix of a block jointly. Given the target's text, the first i drafts are accepted with
probability equal to the least of the products of q / p over the first 0, 1, … i positions (arXiv 2403.10444). That is
never less than the product of the single min(1, q / p), by which residual accepts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hierspec.planner.simulation.traces import NOT_ASKED, Picks, TokenDistributions, Trace

BLOCK_DEPTHS = 16  # positions of a block that are accepted jointly; later ones are treated as the last
_SUREST = 1e-9  # a probability this near to 0 or 1 counts as that for a lead


@dataclass(frozen=True)
class Row:
    """One distribution: its likeliest tokens, by number, and their probabilities."""

    tokens: np.ndarray  # rising
    probabilities: np.ndarray

    def of(self, token: int) -> float:
        index = int(np.searchsorted(self.tokens, token))
        found = index < len(self.tokens) and self.tokens[index] == token
        return float(self.probabilities[index]) if found else 0.0

    def shared(self, other: Row) -> np.ndarray:
        """The other's probabilities of this one's tokens."""
        places = np.minimum(np.searchsorted(other.tokens, self.tokens), len(other.tokens) - 1)
        return np.where(other.tokens[places] == self.tokens, other.probabilities[places], 0.0)


def row(recorded: TokenDistributions, depth: int, position: int) -> Row:
    """The distribution there; drafts deeper than recorded get that of the deepest recorded."""
    depth = min(depth, len(recorded.tokens) - 1)
    tokens, probabilities = recorded.tokens[depth, position], recorded.probabilities[depth, position]
    return Row(tokens[tokens != NOT_ASKED], probabilities[tokens != NOT_ASKED].astype(np.float64))


def overlap(one: Row, other: Row) -> float:
    """1 - TV: how often a token of one is accepted by the other. What neither recorded counts as different."""
    return float(np.minimum(one.probabilities, one.shared(other)).sum())


def ratios(trace: Trace, drafter: str, verifier: str, depth: int) -> np.ndarray:
    """The draft's probability of the text's token over the verifier's, at every position. [positions]"""
    drafts, verifies = trace.distributions[drafter], trace.distributions[verifier]
    values = np.zeros(len(trace.output))
    for position in range(depth, len(trace.output)):
        token = trace.output[position]
        least = row(verifies, depth, position).of(token)
        values[position] = row(drafts, depth, position).of(token) / least if least > 0 else 0.0
    return values


def jointly_accepted(ratio_by_depth: Sequence[np.ndarray]) -> np.ndarray:
    """[depths + 1, positions]: probability that the first drafts of a block that begins here are all accepted."""
    positions, depths = len(ratio_by_depth[0]), len(ratio_by_depth)
    accepted = np.ones((depths + 1, positions))
    product = np.ones(positions)
    for depth, values in enumerate(ratio_by_depth):
        ahead = np.zeros(positions)
        ahead[: max(positions - depth, 0)] = values[depth:]
        product = product * ahead
        accepted[depth + 1] = np.minimum(accepted[depth], product)
    return accepted


def ladder_picks(trace: Trace, keys: Sequence[str], target: str, rule: str) -> list[Picks]:
    """What the tiers of a hierarchy, nearest to the target first, draft along the text under this rule."""
    above, picked_above = target, np.array(trace.output, np.int32)[None]
    ladder = []
    for level, key in enumerate(keys):
        joint = rule == "block" and level == 0
        picks = _picks_below(trace, key, above, picked_above, joint, level)
        ladder.append(picks)
        above, picked_above = key, picks.tokens[:, :, 0]
    return ladder


def _picks_below(trace: Trace, key: str, above: str, picked_above: np.ndarray, joint: bool, level: int) -> Picks:
    recorded, verifies = trace.distributions[key], trace.distributions[above]
    positions = len(trace.output)
    depths = max(len(recorded.tokens), len(picked_above), BLOCK_DEPTHS if joint else 1)
    seed = [zlib.crc32(np.array(trace.prompt + trace.output, np.int32).tobytes()), trace.seed & 0xFFFFFFFF, level]
    coins = np.random.default_rng(seed).random((2, positions))  # a pair per position: each is drafted on the text once
    tokens = np.full((depths, positions, 1), NOT_ASKED, np.int32)
    leads = np.zeros((depths, positions), np.float32)
    accepted = jointly_accepted([ratios(trace, key, above, depth) for depth in range(depths)]) if joint else None
    for depth in range(depths):
        for position in range(depth if depths > 1 else 0, positions):
            drafts, verified = row(recorded, depth, position), row(verifies, depth, position)
            token = int(picked_above[min(depth, len(picked_above) - 1), position])
            if accepted is None:
                probability = verified.of(token)
                equal = drafts.of(token) / probability if probability > 0 else 0.0
            else:
                before, after = accepted[depth : depth + 2, position - depth]
                equal = after / before if before > 0 else 0.0
            if coins[0, position] >= equal:
                token = _other(drafts, verified, token, coins[1, position])
            tokens[depth, position, 0] = token
            leads[depth, position] = _lead(drafts.of(token))
    return Picks(tokens, leads)


def _other(drafts: Row, verified: Row, token: int, coin: float) -> int:
    """A token other than `token`, sampled from max(q - p, 0) of the draft's q and the verifier's p."""
    more = np.maximum(drafts.probabilities - drafts.shared(verified), 0.0)
    more[drafts.tokens == token] = 0.0
    total = more.cumsum()
    if total[-1] <= 0:  # nothing is left: any other token stands for what was not recorded
        others = drafts.tokens[drafts.tokens != token]
        return int(others[0]) if len(others) else NOT_ASKED
    return int(drafts.tokens[min(int(np.searchsorted(total, coin * total[-1], side="right")), len(total) - 1)])


def _lead(probability: float) -> float:
    bounded = min(max(probability, _SUREST), 1 - _SUREST)
    return float(np.log(bounded / (1 - bounded)))

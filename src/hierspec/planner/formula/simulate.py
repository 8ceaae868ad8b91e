"""The recursion played with coins: an independent check of the latency formula, and nothing else.

It follows `core/hierarchy.py` token by token. Whether a token stands above is one coin, by how the token came about and
its place in the block; a store's guess is one draw. Nothing here knows the formula of `latency.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hierspec.core.interfaces import ACCEPTED as STOOD
from hierspec.core.interfaces import CORRECTED
from hierspec.core.interfaces import UNDRAFTED as OWN
from hierspec.planner.formula.figures import Figures, Ladder


@dataclass(frozen=True)
class Played:
    """Seconds a token over so many passes of the target, with its standard error."""

    seconds: float
    error: float
    tokens_per_pass: float
    passes: int


def play(figures: Figures, ladder: Ladder, passes: int = 10_000, seed: int = 0) -> Played:
    table = _Table(figures, ladder, random.Random(seed))
    tokens: list[int] = []
    seconds: list[float] = []
    for _ in range(passes):
        before = table.clock
        tokens.append(len(table.round(0)))
        seconds.append(table.clock - before)
    mean = sum(tokens) / passes
    ratio = sum(seconds) / sum(tokens)
    # Of a ratio of two means, which go together: the spread of what is left of the seconds.
    spread = math.sqrt(sum((taken - ratio * wrote) ** 2 for taken, wrote in zip(seconds, tokens, strict=True)) / passes)
    return Played(ratio, spread / mean / math.sqrt(passes), mean, passes)


class _Table:
    """One request: its clock runs as passes are made."""

    def __init__(self, figures: Figures, ladder: Ladder, coins: random.Random) -> None:
        self.figures, self.ladder, self.coins = figures, ladder, coins
        self.clock = 0.0

    def block(self, level: int) -> list[int]:
        """How each token came about that this tier hands up."""
        rung = self.ladder[level]
        written: list[int] = []
        while len(written) < rung.gather:
            written += self.round(level)
            if rung.until == "correction" and written[-1] == CORRECTED:
                break
        return written

    def round(self, level: int) -> list[int]:
        rung, tier = self.ladder[level], self.figures.tier(self.ladder[level].tier)
        if rung.store is not None:
            store = self.figures.store(rung.tier, rung.store)
            self.clock += store.seconds
            drawn = self.coins.random()
            for stood, chance in enumerate(store.stands):
                drawn -= chance
                if drawn < 0:
                    self.clock += tier.seconds(1 + store.rows)
                    return [STOOD] * stood + [OWN if stood == store.rows else CORRECTED]
        if level + 1 == len(self.ladder):
            self.clock += tier.seconds(1)
            return [OWN]
        lower = self.ladder[level + 1]
        handed = self.block(level + 1)[: rung.budget]
        self.clock += tier.seconds(1 + len(handed) * lower.candidates, lower.tier)
        beneath = self.ladder[level + 2].tier if level + 2 < len(self.ladder) else None
        survival = self.figures.survival(rung.tier, lower.tier, beneath)
        for place, how in enumerate(handed):
            if self.coins.random() >= survival.chances(how, place + 1)[place]:
                if self.coins.random() < survival.runner_up(lower.candidates):
                    return [STOOD] * (place + 1) + [OWN]
                return [STOOD] * place + [CORRECTED]
        return [STOOD] * len(handed) + [OWN]

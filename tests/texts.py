"""Texts in a decoder's memory, without a pool: what tests of decoders need of staircases."""

from hierspec.backends.base import Decoder
from hierspec.scorers.staircase import Pages, Staircase


class Texts:
    """Staircases that share one memory of a decoder."""

    def __init__(self, decoder: Decoder, taps=(), most_bytes: int = 1 << 27) -> None:
        self._pages = Pages(decoder.memory((*taps, decoder.config.layers), most_bytes))

    def new(self, entries: int = 400) -> Staircase:
        staircase = Staircase(self._pages)
        staircase.reserve(entries)
        return staircase


def states(staircase: Staircase, start: int, stop: int, tap: int = -1):
    """The states of these entries after a tap, by default the last layer."""
    return staircase.memory.states[tap][staircase.slots[start:stop]]

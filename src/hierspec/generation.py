"""From steps of tokens to text: what a stream hands out and what a finished generation holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hierspec.coloured_html import coloured
from hierspec.core.errors import HierspecError
from hierspec.core.logprobs import TokenLogprobs
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request import Request, Step
from hierspec.core.stats import Stats
from hierspec.text.stream import Detokeniser, StopStrings
from hierspec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token completed, and who drafted that token first."""

    text: str
    source: str
    depth: int = field(default=0, compare=False)  # of the token in the draft that was verified; 0: the target's own


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one pass of the target wrote. Pieces may lag behind tokens: no character is ever split."""

    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    seconds: float
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, where asked for
    draft: Proposal = NOTHING  # what the pass verified
    accepted: tuple[int, ...] = ()  # nodes of `draft` that were written, in order: they are the first tokens

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished text. `ended` is stop, length or cancelled."""

    text: str
    tokens: tuple[int, ...]
    sources: tuple[str, ...]  # who drafted each token first
    pieces: tuple[Piece, ...]
    ended: str
    seed: int
    prompt_tokens: int
    stats: Stats
    first_seconds: float  # until the first step: prefill and one pass
    first_tokens: int  # tokens of that step
    seconds: float
    synthetic: bool = False  # some tier only simulated its agreement: the text is the model's, the speed is not
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, where asked for

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all the time taken, prefill included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens after the first step, over the time after it."""
        seconds = self.seconds - self.first_seconds
        return (len(self.tokens) - self.first_tokens) / seconds if seconds > 0 else 0.0

    def __repr__(self) -> str:
        return f"Generation({shortened(self.text)}, {len(self.tokens)} tokens, ended by {self.ended})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the text, coloured by who drafted it."""
        return coloured([(piece.text, piece.source) for piece in self.pieces], self.sources)


@dataclass(frozen=True, repr=False)
class Failure:
    """What a batch has in place of an answer that could not be finished."""

    error: HierspecError
    partial: Generation | None = None  # what was written before, if anything was begun

    def __repr__(self) -> str:
        return f"Failure({str(self.error)!r})"


class SomeFailed(HierspecError):
    """Some answers of several failed. `results` has an answer or a `Failure` for each, in order."""

    def __init__(self, results: Sequence[Generation | Failure]) -> None:
        self.results = list(results)
        failures = [(number, result) for number, result in enumerate(results) if isinstance(result, Failure)]
        number, first = failures[0]
        super().__init__(
            f"{len(failures)} of {len(results)} answers failed, the first of them number {number}: {first.error} "
            "What was written is in .results of this error."
        )


def shortened(text: str) -> str:
    """A text for a repr."""
    return repr(text) if len(text) <= 40 else repr(text[:37] + "…")


@dataclass
class Writer:
    """The text of one request as it grows, up to a stop string or the request's end."""

    request: Request
    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_tokens: int = 0

    def __post_init__(self) -> None:
        self._detokeniser = Detokeniser(self.tokenizer)
        self._stops = StopStrings(self.request.sampling.stop)
        self._waiting: list[Piece] = []  # text that may still become a stop string
        self._met_stop = False

    def add(self, step: Step) -> TextStep:
        """The text of one step. A stop string ends the request at the token that completes it."""
        tokens: list[int] = []
        safe = 0
        for token, source in zip(step.tokens, step.sources, strict=True):
            tokens.append(token)
            depth = len(tokens) if len(tokens) <= len(step.accepted) else 0
            text = self._detokeniser.add([token])
            self._waiting.append(Piece(text, source, depth))
            shown, self._met_stop = self._stops.add(text)
            safe += len(shown)
            if self._met_stop:
                self.request.cancel()
                break
        if self.request.ended is not None and not self._met_stop:
            text = self._detokeniser.finish()
            self._waiting.append(Piece(text, step.sources[-1], depth))
            shown, self._met_stop = self._stops.add(text)
            safe += len(shown) + len("" if self._met_stop else self._stops.finish())
        pieces = self._shown(safe)
        if not self.seconds:
            self.first_tokens = len(tokens)
        self.tokens += tokens
        self.sources += step.sources[: len(tokens)]
        self.pieces += pieces
        self.seconds.append(step.seconds)
        logprobs = step.logprobs[: len(tokens)]
        self.logprobs += logprobs
        accepted = step.accepted[: len(tokens)]
        return TextStep(tuple(tokens), tuple(pieces), step.seconds, logprobs, step.draft, accepted)

    def finish(self) -> Generation:
        """The whole text. Raises the error of a request that failed."""
        if self.request.error is not None:
            raise self.request.error
        return self.so_far()

    def result(self) -> Generation | Failure:
        """The same, but returns a failure instead of raising it."""
        error = self.request.error
        return self.so_far() if error is None else Failure(error, self.so_far())

    def so_far(self) -> Generation:
        request = self.request
        return Generation(
            text="".join(piece.text for piece in self.pieces),
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            pieces=tuple(self.pieces),
            ended="stop" if self._met_stop else request.ended or "cancelled",
            seed=request.seed,
            prompt_tokens=len(request.prompt),
            stats=request.stats,
            first_seconds=self.seconds[0] if self.seconds else 0.0,
            first_tokens=self.first_tokens,
            seconds=sum(self.seconds),
            synthetic=request.hierarchy.synthetic,
            logprobs=tuple(self.logprobs),
        )

    def _shown(self, length: int) -> list[Piece]:
        """The next `length` waiting characters, with their sources."""
        shown = []
        while length and self._waiting:
            piece = self._waiting.pop(0)
            if len(piece.text) > length:
                self._waiting.insert(0, replace(piece, text=piece.text[length:]))
                piece = replace(piece, text=piece.text[:length])
            length -= len(piece.text)
            if piece.text:
                shown.append(piece)
        return shown

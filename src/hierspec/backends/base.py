"""The contract of a backend: how layers run on one device.

Above it nothing knows a device. Tokens and slots go down, picks come up; keys, values, states and logits stay where
they are. A backend makes decoders; a decoder runs layers over a batch and keeps what they compute in a memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.interfaces import Answer, Ask
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The rows of one forward pass. Rows of one text are neighbours.

    A row attends to the first `lengths[row]` tokens of its text, then to the slots of its path: tree attention
    without a mask. All arrays are int64.
    """

    positions: np.ndarray  # [rows]: of the row's token in its text
    slots: np.ndarray  # [rows]: of the memory, where the row's keys, values and states go
    text_starts: np.ndarray  # [texts + 1]: the rows of text i are text_starts[i] .. text_starts[i + 1]
    tables: np.ndarray  # [texts, pages]: the memory's pages that hold a text's tokens, in order
    lengths: np.ndarray  # [rows]
    path_starts: np.ndarray  # [rows + 1]: the path of a row is paths[path_starts[row] : path_starts[row + 1]]
    paths: np.ndarray  # slots of proposed tokens, from the context down to the row itself
    drafted: np.ndarray  # [rows]: 1 for proposed tokens, or empty where there are none


class Memory(Protocol):
    """An arena: keys, values and states by slot, in pages that texts may share. It knows slots, not texts."""

    page: int  # slots of a page
    pages: int  # that it has room for
    bytes_per_page: int
    taps: tuple[int, ...]  # layers after which states are kept, the last layer included
    states: Tensor  # [taps, slots, hidden], on the device

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Slot to[i] becomes what slot source[i] was, all at once: keys, values and states."""


class Rows(Protocol):
    """A table [vocabulary, hidden]: a tensor, or what makes the rows that are asked for."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole table."""

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """Some rows."""


class Decoder(Protocol):
    """The layers of a checkpoint, or a few more beside one. It holds weights and nothing of any text."""

    backend: Backend
    config: DecoderConfig
    norm: Tensor  # the last one
    dtype: torch.dtype  # of states
    products: str  # how weights are stored and multiplied, for people and for keys of what was measured
    weight_bytes: int  # that a pass over one token reads
    layer_rows: int  # rows times layers run so far: what reuse saves shows here

    @property
    def embedding(self) -> Rows:
        """In the dtype of the weights."""

    @property
    def head_weight(self) -> Rows:
        """The head's, likewise."""

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> Memory:
        """A memory as this decoder reads it, of at most so many bytes."""

    def embed(self, tokens: np.ndarray) -> Tensor:
        """[tokens, hidden]"""

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Layers start..stop over the rows [rows, hidden], which it may overwrite; the states after `stop` come back.

        Keys and values go to the memory on the way, and the states after every tap behind `start`, up to `stop`.
        """

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        """[rows, vocabulary] in float32, of states after any layer, through the last norm or another."""


class Shortlist(Protocol):
    """Some rows of a head: logits of frequent tokens, and of a few that a request adds."""

    tokens: np.ndarray  # [count] int32, rising: scored for every request
    bytes: int

    def gather(self, tokens: np.ndarray) -> ExtraRows:
        """The rows of other tokens."""

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]) -> Tensor:
        """[rows, vocabulary], minus infinity where nothing is scored. The rows come in runs of `counts`, each with
        its extra tokens. Good until the next call."""


@dataclass(frozen=True, eq=False)
class ExtraRows:
    """Tokens beside the frequent ones, and their rows of the head as a backend multiplies with them."""

    tokens: np.ndarray  # [count]
    rows: Tensor | np.ndarray


class Join(Protocol):
    """A matrix on the embeddings of tokens and, beside them, one or several features."""

    bytes: int

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        """[tokens, hidden]. Features are states[tap, slot] at each of the taps, each through its own of `norms`
        [taps, hidden], or as they are; slot -1 is zeros."""


@dataclass(frozen=True, eq=False, slots=True)
class DraftRows:
    """The last tokens of a text, which a drafter has not seen, and room for what it writes after them."""

    memory: Memory  # of the drafter's layers
    table: np.ndarray  # [pages]: as in `Batch`
    first: int  # position of the first of the tokens
    tokens: np.ndarray  # [rows]
    slots: np.ndarray  # [rows + room]: for the tokens, then for those that are written
    own: bool  # the one token follows a state of the drafter's own; else all follow states of the checkpoint
    features: Memory  # the memory of those states,
    taps: tuple[int, ...]  # which of them,
    feature_slots: np.ndarray  # [rows]: and where; -1 is zeros


class DraftWriter(Protocol):
    """A drafter's next tokens in one call: join, layers, head and picks, the same as one after the other."""

    most_rows: int  # that it may begin with
    at_once: int  # tokens of a call that take little more time than one: a block should have as many

    def read(self, memory: Memory, batch: Batch, hidden: Tensor) -> None:
        """Keys and values of all layers for the rows of one text [rows, hidden], which it may overwrite, and no
        states."""

    def write(self, ask: Ask, rows: DraftRows, extra: ExtraRows) -> Answer:
        """What follows the tokens, for an ask that proposes nothing. Where the ask allows it, also what follows each
        pick, while there is room. Of the tokens but the last keys and values are kept, and no states."""


@dataclass(frozen=True, eq=False, slots=True)
class PassRows:
    """The rows of a pass that ends with picks, each of them asked about."""

    memory: Memory
    batch: Batch
    tokens: np.ndarray  # [rows]
    start: int  # layers start..stop; where `start` is no bottom, states after it are in the memory
    stop: int
    norm: Tensor | None  # before the head, where it is not the decoder's
    room: np.ndarray  # slots for tokens that are written after the last row, where it may go on by itself


class PassWriter(Protocol):
    """Passes of a decoder in one call: tokens in, layers, head, picks out, the same as one part after the other."""

    instead_of_small_heads: bool  # whether such a call takes less time than parts with a head of frequent tokens

    def takes(self, asks: Sequence[Ask], rows: int) -> bool:
        """Whether it can answer these, with so many rows."""

    def answers(self, asks: Sequence[Ask], rows: PassRows) -> list[Answer] | None:
        """Answers to asks that it takes; None where the rows are too much for one pass. To one that allows it, also
        what follows each pick, while there is room: the states of those tokens are kept too."""


class Backend(Protocol):
    """One way to run layers on one device."""

    name: str
    device: torch.device
    exact: bool  # the bits of a row do not depend on the pass that it is in
    formats: tuple[str, ...]  # of weights

    @property
    def preparing(self) -> float:
        """Seconds so far in which kernels were compiled and graphs recorded, which later passes find ready."""

    def refuses(self, config: DecoderConfig, format: str) -> str:
        """Why it cannot run a checkpoint with weights in this format; nothing where it can."""

    def decoder(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        format: str,
        origin: Checkpoint | None = None,
        progress: Progress = silent,
    ) -> Decoder:
        """A decoder of weights by their canonical names. Where these are a whole checkpoint's, `origin` tells which: a
        backend may keep its own layout of them in the cache."""

    def layers(self, config: DecoderConfig, weights: Mapping[str, Tensor], format: str) -> Decoder:
        """A decoder of layers beside a checkpoint's: it embeds nothing and has no head."""

    def shortlist(self, decoder: Decoder, tokens: np.ndarray, format: str) -> Shortlist:
        """The rows of a decoder's head for these tokens."""

    def join(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, format: str) -> Join:
        """A matrix on a decoder's embeddings and states."""

    def draft_writer(
        self,
        decoder: Decoder,
        layers: Decoder,
        joins: tuple[Join, Tensor | None, Join, Tensor | None],
        head: tuple[Shortlist, Tensor | None],
    ) -> DraftWriter | None:
        """For a drafter of these layers beside a decoder. `joins`: with states of the checkpoint, their norms; with its
        own, their norms. `head`: the shortlist, its norm. None where it has nothing better than one part after the
        other."""

    def pass_writer(self, decoder: Decoder) -> PassWriter | None:
        """For passes of this decoder; None where it has nothing better than one part after the other."""

    def pick(self, asks: Sequence[Ask], logits: Tensor) -> list[Answer]:
        """Answers to all asks of a pass, from logits [rows, vocabulary]: 1 + nodes rows for each ask, in order. The
        logits stay as they are: log-probabilities are of what the model computed."""

    def bytes_per_weight(self, format: str) -> float:
        """Of a weight in memory, with its share of scales."""

    def synchronize(self) -> None:
        """Wait until all work is done, so that it can be timed."""

"""The contract of a backend: how layers run on one device.

Nothing above this interface knows a device. Tokens and slots go down, picks come up; the KV cache, hidden states and
logits stay on the device. A backend makes decoders. A decoder runs layers over a batch and stores keys, values and
states in a memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.draft_tree import DraftTree
from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The rows of one forward pass; rows of the same text are adjacent.

    A row attends to the first `lengths[row]` tokens of its text, then to the slots of its path: tree attention
    without a mask. All arrays are int64.
    """

    positions: np.ndarray  # [rows]: position of the row's token in its text
    slots: np.ndarray  # [rows]: slot of the memory that receives the row's keys, values and states
    text_starts: np.ndarray  # [texts + 1]: the rows of text i are text_starts[i] .. text_starts[i + 1]
    tables: np.ndarray  # [texts, pages]: the memory's pages that hold a text's tokens, in order
    lengths: np.ndarray  # [rows]: how many tokens of its text a row attends to, before its path
    path_starts: np.ndarray  # [rows + 1]: the path of a row is paths[path_starts[row] : path_starts[row + 1]]
    paths: np.ndarray  # slots of proposed tokens, from the first after the context down to the row itself
    drafted: np.ndarray  # [rows]: 1 for proposed tokens; empty if the batch has none


class Memory(Protocol):
    """An arena of keys, values and states by slot, in pages that texts may share. It knows slots, not texts."""

    page: int  # slots per page
    pages: int  # number of pages
    bytes_per_page: int
    taps: tuple[int, ...]  # layers after which states are kept, the last layer included
    states: Tensor  # [taps, slots, hidden], on the device

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copies keys, values and states of slot source[i] to slot to[i], as if all reads came before all writes."""


class Rows(Protocol):
    """A table [vocabulary, hidden]: a tensor, or an object that computes rows on demand."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole table."""

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """The rows with these indices."""


class Decoder(Protocol):
    """The layers of a checkpoint, or a drafter's layers beside one. It holds weights and no state of any text."""

    backend: Backend
    config: DecoderConfig
    norm: Tensor  # weight of the final norm
    dtype: torch.dtype  # of hidden states
    products: str  # how weights are stored and multiplied: shown to people, and part of the key of stored measurements
    weight_bytes: int  # bytes of weights that a pass over one token reads
    layer_rows: int  # rows times layers run so far; reuse of cached states keeps it low

    @property
    def embedding(self) -> Rows:
        """The embedding table, in the dtype of the weights."""

    @property
    def head_weight(self) -> Rows:
        """The weight of the output head, in the dtype of the weights."""

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> Memory:
        """A memory in this decoder's layout, of at most `most_bytes` bytes."""

    def embed(self, tokens: np.ndarray) -> Tensor:
        """Embeddings [tokens, hidden]."""

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Runs layers start..stop over hidden [rows, hidden], which may be overwritten; returns the states after
        `stop`.

        Stores keys and values in the memory, and the states after every tap in start + 1 .. stop.
        """

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] in float32 of states after any layer, through the final norm or another one."""


class Shortlist(Protocol):
    """Some rows of a head: logits for frequent tokens, and for a few more that a request adds."""

    tokens: np.ndarray  # [count] int32, ascending: scored for every request
    bytes: int

    def gather(self, tokens: np.ndarray) -> ExtraRows:
        """The head's rows of tokens that are not in the shortlist."""

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]) -> Tensor:
        """Logits [rows, vocabulary], minus infinity for tokens that are not scored; valid until the next call.

        The rows come in runs of `counts` rows; each run has its own extra tokens.
        """


@dataclass(frozen=True, eq=False)
class ExtraRows:
    """Tokens outside the shortlist, and their rows of the head in the layout that the backend multiplies with."""

    tokens: np.ndarray  # [count]
    rows: Tensor | np.ndarray


class Join(Protocol):
    """A matrix product over the embeddings of tokens, concatenated with one or more features each."""

    bytes: int

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        """Returns [tokens, hidden]. A token's features are states[tap, slot] for each tap; slot -1 means zeros.

        `norms` [taps, hidden] has a norm weight for each tap; None applies no norm.
        """


@dataclass(frozen=True, eq=False, slots=True)
class DraftRows:
    """The last tokens of a text, which a drafter has not processed yet, and slots for the tokens that it drafts."""

    memory: Memory  # memory of the drafter's layers
    table: np.ndarray  # [pages]: as in `Batch`
    first: int  # position of the first token
    tokens: np.ndarray  # [rows]
    slots: np.ndarray  # [rows + room]: slots of the tokens, then of the drafted tokens
    own: bool  # one token, whose feature is a state of the drafter; else features are states of the checkpoint
    features: Memory  # memory that holds the features
    taps: tuple[int, ...]  # taps of that memory to use as features
    feature_slots: np.ndarray  # [rows]: slots of the features; -1 means zeros


class DraftWriter(Protocol):
    """Drafts the next tokens in one call: join, layers, head and picks, with the results of separate calls."""

    most_rows: int  # most tokens that a call may start with
    at_once: int  # tokens per call that cost little more time than one: a good draft length

    def read(self, memory: Memory, batch: Batch, hidden: Tensor) -> None:
        """Stores keys and values of all layers for the rows of one text; `hidden` [rows, hidden] may be overwritten.

        No states are stored.
        """

    def write(self, ask: Ask, rows: DraftRows, extra: ExtraRows) -> Answer:
        """Picks what follows the tokens, for an ask with an empty proposal.

        If the ask allows it, also picks what follows each pick, while there is room. Keys and values of all tokens but
        the last are stored for later calls; their states are not.
        """


@dataclass(frozen=True, eq=False, slots=True)
class PassRows:
    """The rows of a forward pass that ends with picks; every row gets one."""

    memory: Memory
    batch: Batch
    tokens: np.ndarray  # [rows]
    start: int  # runs layers start..stop; if `start` is not the bottom, the memory holds the states after it
    stop: int
    norm: Tensor | None  # norm before the head, if not the decoder's own
    room: np.ndarray  # slots for tokens written after the last row, if the call may continue by itself


class PassWriter(Protocol):
    """Forward passes in one call: embedding, layers, head and picks, with the results of separate calls."""

    instead_of_small_heads: bool  # whether this call is faster than separate calls with a shortlist as head

    @property
    def room_needed(self) -> int:
        """Slots after a text for a call and one that is begun before it is asked for; 0 if none ever is."""

    def takes(self, asks: Sequence[Ask], rows: int) -> bool:
        """Whether `answers` supports these asks with this number of rows."""

    def answers(self, asks: Sequence[Ask], rows: PassRows) -> list[Answer] | None:
        """Answers to asks that `takes` accepted; None if the rows do not fit in one pass.

        For an ask that allows it, also picks what follows each pick, while there is room, and stores those tokens'
        states.
        """


@dataclass(frozen=True, eq=False, slots=True)
class RoundRows:
    """A text for a round of drafting and verifying. Every token but the last is computed in both memories."""

    memory: Memory  # of the checkpoint
    table: np.ndarray  # [pages]: as in `Batch`
    slots: np.ndarray  # by position, with room for what further rounds write
    taps: tuple[int, ...]  # taps of that memory to use as features
    drafts: Memory  # of the drafter's layers
    draft_table: np.ndarray
    draft_slots: np.ndarray  # by entry, with the same room
    skipped: int  # positions before the drafter's first entry
    norm: Tensor | None  # before the checkpoint's head, if not its own


@dataclass(frozen=True, eq=False, slots=True)
class DraftedRound:
    """What a round drafted and verified."""

    drafts: np.ndarray  # [nodes]: the drafted tokens, in the order of the tree
    leads: np.ndarray  # [nodes]: how far the best pick at this node's place was ahead of the next
    picks: np.ndarray  # [1 + nodes]: the checkpoint's picks after the text and after each node
    accepted: tuple[int, ...]  # nodes


class RoundWriter(Protocol):
    """Drafts, verifies and moves what is accepted behind the text, in one call. Only for requests that run alone."""

    tree: DraftTree
    reread: int  # last tokens of a text that the drafter reads again in each round

    def takes(self, request: RequestView, position: int) -> bool:
        """Whether it supports the request's sampling options, and a round after this last position fits in passes."""

    def begun(self, request: RequestView, position: int) -> bool:
        """Whether the device is at work already on the request's round after this position."""

    def write(self, ask: Ask, rows: RoundRows, extra: ExtraRows) -> DraftedRound:
        """One round after the ask's context. If the ask goes on, the device may begin the next one at once.

        What it drafts then is lost if something else is asked.
        """


class Backend(Protocol):
    """One way to run layers on one device."""

    name: str
    device: torch.device
    exact: bool  # the bits of a row do not depend on the other rows of its pass
    asynchronous: bool  # its device computes while the host goes on, until the host waits for the results
    formats: tuple[str, ...]  # formats of weights that it supports

    @property
    def preparing(self) -> float:
        """Seconds spent so far on compiling kernels and recording graphs; later passes do not pay this again."""

    def refuses(self, config: DecoderConfig, format: str) -> str:
        """Why it cannot run a checkpoint with weights in this format; "" if it can."""

    def decoder(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        format: str,
        origin: Checkpoint | None = None,
        progress: Progress = silent,
    ) -> Decoder:
        """A decoder with these weights, by canonical name.

        `origin` names the checkpoint if these are all of its weights: the backend may then cache its own layout of
        them.
        """

    def layers(self, config: DecoderConfig, weights: Mapping[str, Tensor], format: str) -> Decoder:
        """A decoder of extra layers beside a checkpoint, with no embedding and no head."""

    def shortlist(self, decoder: Decoder, tokens: np.ndarray, format: str) -> Shortlist:
        """A shortlist with the rows of the decoder's head for these tokens."""

    def join(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, format: str) -> Join:
        """A join over a decoder's embeddings and states."""

    def draft_writer(
        self,
        decoder: Decoder,
        layers: Decoder,
        joins: tuple[Join, Tensor | None, Join, Tensor | None],
        head: tuple[Shortlist, Tensor | None],
    ) -> DraftWriter | None:
        """A writer for a drafter with these layers; None if the backend has no fused call.

        `joins`: the join for features of the checkpoint and its norms, then the join for the drafter's own states and
        its norms. `head`: the shortlist and the norm before it.
        """

    def pass_writer(self, decoder: Decoder) -> PassWriter | None:
        """A writer for passes of this decoder; None if the backend has no fused call."""

    def round_writer(self, drafts: DraftWriter, passes: PassWriter, tree: DraftTree) -> RoundWriter | None:
        """A writer of fused rounds with these two; None if the backend has no such call."""

    def pick(self, asks: Sequence[Ask], logits: Tensor) -> list[Answer]:
        """Answers to all asks of a pass, from logits [rows, vocabulary]: 1 + nodes rows for each ask, in order.

        The logits are not modified, so log-probabilities come from what the model computed.
        """

    def bytes_per_weight(self, format: str) -> float:
        """Bytes in memory per weight, scales included."""

    def synchronize(self) -> None:
        """Waits until all queued work is done, so that it can be timed."""

"""Rounds that draft, verify and begin the next one on the device, without asking the host in between.

Python between the passes of a round takes as long as a pass of a small model. Here a round is one graph: the drafter's
passes, the pass over their tree, the walk down that tree, and the moves of what was accepted. All that follows from the
tokens is worked out on the device; all that follows from positions the host prepares for every position at which the
next round may begin. While the device works on a round, the host learns from the one before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import DraftedRound, ExtraRows, RoundRows
from hierspec.backends.cuda.attention import KEYS
from hierspec.backends.cuda.drafting import CudaDraftWriter
from hierspec.backends.cuda.filters import sampling_changes_logits
from hierspec.backends.cuda.fused import gather_rows
from hierspec.backends.cuda.graphs import Inbox
from hierspec.backends.cuda.heads import room_for
from hierspec.backends.cuda.memory import CudaMemory
from hierspec.backends.cuda.moves import COUNTS, move_rows
from hierspec.backends.cuda.passes import CudaPassWriter
from hierspec.backends.cuda.pick import parameters_of_steps, unpacked
from hierspec.backends.cuda.pick_kernels import PARAMETERS, launch_picks
from hierspec.backends.cuda.round_kernels import KEPT, launch_begin, launch_draft, launch_verify
from hierspec.backends.cuda.round_numbers import RoundLayout, layout_at, put_round, shape_of
from hierspec.backends.cuda.scratch import places_at
from hierspec.backends.cuda.work import bucket, width_for
from hierspec.core.draft_tree import DraftTree
from hierspec.core.interfaces import Ask, RequestView

_PICKS = 4  # of the drafter after each token
_IN_FLIGHT = 4  # rounds whose results the host may not have read yet; two are in flight at most
_MOST_NUMBERS = 1 << 16  # of a round
_HEADER = 2  # of a round's results: where it began, and how many drafts were accepted


@dataclass(eq=False)
class _Flight:
    """A round that the device has begun."""

    request: weakref.ref[RequestView]
    position: int | None  # where it begins, once that is known
    pages: tuple[bytes, bytes]  # on which it relies
    turn: int  # its place among the results


class CudaRoundWriter:
    def __init__(self, drafts: CudaDraftWriter, passes: CudaPassWriter, tree: DraftTree) -> None:
        self.tree, self.reread = tree, tree.depth + 1
        self._drafts, self._passes = drafts, passes
        self._shape = shape_of(tree, self.reread)
        self._layers, self._decoder = drafts.layers, passes.decoder
        device, nodes = self._decoder.device, len(tree.parents)
        width = width_for(1 + nodes)
        self._row_numbers = self._shape.drafting_rows * (_PICKS + 1)
        on_gpu = device.type == "cuda"

        def numbers(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self._position = Inbox(1 + KEPT, torch.int32, device)  # the text's last position, and its last tokens
        self._texts = self._position.buffer[1:]
        # By layout, since graphs hold the addresses: numbers of rounds by position, on the device and as copied to it.
        self._rings: dict[RoundLayout, tuple[Tensor, Tensor]] = {}
        self._given = torch.zeros(_MOST_NUMBERS, dtype=torch.int32, device=device)
        self._first_tokens = torch.zeros(width_for(self.reread), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(width, dtype=torch.int32, device=device)
        self._moves = torch.zeros(2 * bucket(tree.depth, COUNTS), dtype=torch.int32, device=device)
        self._answered = torch.zeros(_HEADER + self._row_numbers + 2 * width, dtype=torch.int64, device=device)
        self._results = [
            torch.zeros(len(self._answered), dtype=torch.int64, pin_memory=on_gpu) for _ in range(_IN_FLIGHT)
        ]
        self._done = [torch.cuda.Event() for _ in range(_IN_FLIGHT)] if on_gpu else []
        places = self._shape.places
        self._token_index = numbers(places[:, 0] * (_PICKS + 1) + places[:, 1])
        self._sources = [self._token_index[torch.from_numpy(nodes).to(device)] for nodes in self._shape.sources]
        self._parents, self._last = numbers(tree.parents), numbers([self.reread - 1])
        self._in_tree = any(place != node for node, place in enumerate(tree.depths))
        # Which token after the text each pick is for: of the drafter's rows, then of those that verify.
        drafted = [1 + depth for depth, nodes in enumerate(self._shape.sources) for _ in nodes]
        self._steps = np.array([0, *drafted, 0, *(1 + depth for depth in tree.depths)])
        self._turn = 0
        self._flights: list[_Flight] = []  # begun and not asked for yet: one at most
        self._layout: RoundLayout | None = None
        self._layouts: dict[tuple[int, int], RoundLayout | None] = {}  # by the blocks of keys that it ends in
        self._kept: set[int] = set()  # positions whose numbers are in the ring
        self._kept_for: weakref.ref[RequestView] | None = None
        self._kept_pages = b"", b""  # when their numbers were made

    def takes(self, request: RequestView, position: int) -> bool:
        if sampling_changes_logits(request.sampling) or position < self.reread:
            return False
        return self._layout_at(position + self.tree.depth + 1, 0) is not None

    def begun(self, request: RequestView, position: int) -> bool:
        return any(flight.request() is request and flight.position == position for flight in self._flights)

    def write(self, ask: Ask, rows: RoundRows, extra: ExtraRows) -> DraftedRound:
        position, most = len(ask.context) - 1, self.tree.depth + 1
        flight = self._taken(ask, rows, position)
        self._drafts.use_extras(extra)
        if flight is None:
            self._begin(ask, rows, position)
            flight = self._launch(ask, rows, extra, position)
        if ask.goes_on and self._goes_on(rows, position):
            self._prepare(ask, rows, range(position + 1, position + most + 1))
            self._flights.append(self._launch(ask, rows, extra, None))
        ask.request.catch_up()  # while the device computes
        if self._done:
            self._done[flight.turn].synchronize()
        return self._read(self._results[flight.turn].numpy(), position)

    def _taken(self, ask: Ask, rows: RoundRows, position: int) -> _Flight | None:
        """The round in flight, if it is the one that is asked for."""
        flight = self._flights.pop() if self._flights else None
        if flight is None:
            return None
        right = flight.request() is ask.request and flight.position == position
        if right and _same_pages(flight.pages, rows):
            return flight
        if self._done:  # what it copies in must not be overwritten before
            self._done[flight.turn].synchronize()
        return None

    def _goes_on(self, rows: RoundRows, position: int) -> bool:
        """Whether the next round has the same layout wherever it begins: its graph is launched before that is known."""
        here, there = (
            self._layout_at(at + self.tree.depth + 1, rows.skipped) for at in (position, position + self.tree.depth + 1)
        )
        return here is not None and here == there

    def _layout_at(self, position: int, skipped: int) -> RoundLayout | None:
        blocks = position // KEYS, (position - skipped) // KEYS
        if blocks not in self._layouts:
            layout = layout_at(self._shape, self._layers.config, self._decoder.config, position, skipped)
            fits = layout is not None and layout.size <= _MOST_NUMBERS
            self._layouts[blocks] = layout if fits else None
        return self._layouts[blocks]

    def _begin(self, ask: Ask, rows: RoundRows, position: int) -> None:
        """The text and its last position, and the numbers of a round there."""
        layout = self._layout_at(position + self.tree.depth + 1, rows.skipped)
        assert layout is not None
        if self._kept_for is None or self._kept_for() is not ask.request or not _same_pages(self._kept_pages, rows):
            self._kept.clear()
        self._kept_for, self._kept_pages = weakref.ref(ask.request), _pages(rows)
        if layout != self._layout:
            self._layout = layout
            self._kept.clear()
        if layout not in self._rings:
            size = layout.size + layout.size % 2  # 64-bit numbers of the next row stay aligned
            ring = torch.zeros((KEPT, size), dtype=torch.int32, device=self._given.device)
            self._rings[layout] = ring, torch.zeros((KEPT, size), dtype=torch.int32, pin_memory=bool(self._done))
        numbers = np.zeros(1 + KEPT, np.int32)
        numbers[0] = position
        last = np.arange(max(position + 1 - KEPT, 0), position + 1)
        numbers[1 + last % KEPT] = ask.context[last]
        self._position.put(numbers)
        self._prepare(ask, rows, range(position, position + 1))

    def _prepare(self, ask: Ask, rows: RoundRows, positions: range) -> None:
        """Copies the numbers of rounds at these positions to the device, where they are not there already."""
        layout, shape = self._layout, self._shape
        assert layout is not None
        assert isinstance(rows.memory, CudaMemory)
        assert isinstance(rows.drafts, CudaMemory)
        configs, spares = (self._layers.config, self._decoder.config), (rows.drafts.spare, rows.memory.spare)
        ring, source = self._rings[layout]
        prepared: np.ndarray = source.numpy()
        for decoder in (self._layers, self._decoder):
            decoder.have_positions(positions[-1] + self.tree.depth + 2)
        self._kept = {each for each in self._kept if each > positions[-1] - KEPT}
        for position in positions:
            if position in self._kept:
                continue
            numbers = prepared[position % KEPT]
            keys = parameters_of_steps(ask, position + 1, self.tree.depth + 1)
            rows_of_keys = numbers[: layout.first_features].view(np.int64).reshape(-1, PARAMETERS)
            rows_of_keys[: len(self._steps)] = keys[self._steps]
            rows_of_keys[len(self._steps) :] = 0  # padding rows
            put_round(numbers, shape, layout, rows, configs, spares, position)
            ring[position % KEPT].copy_(source[position % KEPT], non_blocking=True)
            self._kept.add(position)

    def _launch(self, ask: Ask, rows: RoundRows, extra: ExtraRows, position: int | None) -> _Flight:
        layers, decoder, layout = self._layers, self._decoder, self._layout
        assert isinstance(rows.memory, CudaMemory)
        assert isinstance(rows.drafts, CudaMemory)
        most = room_for(len(extra.tokens), len(self._drafts.shortlist.table)) if len(extra.tokens) else 0
        memories = layers.number_of(rows.drafts), decoder.number_of(rows.memory)
        gain = decoder.gain(rows.norm)
        key = ("round", id(self), memories, rows.taps, layout, most, gain.data_ptr())
        decoder.graphs.run(key, lambda: self._launch_all(rows, most, gain))
        turn = self._turn
        self._turn = (turn + 1) % _IN_FLIGHT
        self._results[turn].copy_(self._answered, non_blocking=True)
        if self._done:
            self._done[turn].record()
        layers.layer_rows += (self._shape.drafting_rows - 1 + self.reread) * layers.config.layers
        decoder.layer_rows += (1 + len(self.tree.parents)) * decoder.config.layers
        return _Flight(weakref.ref(ask.request), position, _pages(rows), turn)

    def _launch_all(self, rows: RoundRows, most: int, gain: Tensor) -> None:
        """Everything between two positions of the text."""
        given, layout = self._given, self._layout
        assert layout is not None
        ring, _ = self._rings[layout]
        launch_begin(self._position.buffer, ring, given, self._texts, self._first_tokens, self.reread)
        picks = self._answered[_HEADER:]
        self._launch_drafts(rows, layout, picks, most)
        launch_draft(self._position.buffer, self._texts, picks, self._token_index, self._tokens)
        self._launch_verifying(rows, layout, picks[self._row_numbers :], gain)

    def _launch_drafts(self, rows: RoundRows, layout: RoundLayout, picks: Tensor, most: int) -> None:
        layers, drafts, given, memory = self._layers, self._drafts, self._given, rows.drafts
        assert isinstance(memory, CudaMemory)
        assert isinstance(rows.memory, CudaMemory)
        hidden, passes = layers.scratch.hidden, layout.drafting
        keys = given[: layout.verified_keys].view(torch.int64)
        join, norms = drafts.first
        features = given[layout.first_features : layout.later_features]
        taps, gains, width = join.taps(rows.taps), join.floats(norms), passes.widths[0]
        join.launch(self._first_tokens, rows.memory.all_states, taps, features, gains, hidden, width)
        at = layout.works
        places, _ = places_at(given, at, width, passes.pieces[0])
        layers.launch(memory, passes.work(0), 0, layers.config.layers, places)
        gather_rows(self._last, hidden, drafts.state, 1)
        drafts.launch_head(drafts.state, 1, most)
        launch_picks(drafts.logits, keys, drafts.scratch.arrays, picks, 1, _PICKS)
        join, norms = drafts.then
        taps, gains, row, feature = join.taps((0,)), join.floats(norms), 1, layout.later_features
        for number, index in enumerate(self._sources, 1):
            here, width = passes.rows[number], passes.widths[number]
            at += passes.sizes[number - 1]
            features = given[feature : feature + here]
            join.launch(picks, memory.all_states, taps, features, gains, hidden, here, index)
            places, _ = places_at(given, at, width, passes.pieces[number])
            layers.launch(memory, passes.work(number), 0, layers.config.layers, places)
            drafts.launch_head(hidden[:here], here, most)
            out = picks[row * (_PICKS + 1) :]
            launch_picks(drafts.logits, keys[row * PARAMETERS :], drafts.scratch.arrays, out, here, _PICKS)
            row, feature = row + here, feature + here

    def _launch_verifying(self, rows: RoundRows, layout: RoundLayout, picks: Tensor, gain: Tensor) -> None:
        decoder, given, memory, passes = self._decoder, self._given, rows.memory, layout.verifying
        assert isinstance(memory, CudaMemory)
        width = passes.widths[0]
        gather_rows(self._tokens, decoder.embedding, decoder.scratch.hidden, width)
        places, _ = places_at(given, layout.verified_work, width, passes.pieces[0])
        decoder.launch(memory, passes.work(0), 0, decoder.config.layers, places, gain)
        keys = given[layout.verified_keys : layout.first_features].view(torch.int64)
        self._passes.launch_picks(width, keys, picks, 1)
        launch_verify(
            self._position.buffer,
            self._texts,
            self._tokens,
            self._parents,
            picks,
            2,
            places.slots,
            self._moves,
            self._answered,
            memory.spare,
            self.tree.depth,
        )
        if self._in_tree:
            for each in (memory.keys, memory.values, memory.all_states):
                move_rows(each, self._moves, len(self._moves) // 2)

    def _read(self, results: np.ndarray, position: int) -> DraftedRound:
        began, accepted = int(results[0]), int(results[1])
        assert began == position, "a round on the device began elsewhere"
        nodes, places = len(self.tree.parents), self._shape.places
        results = results[_HEADER:]
        drafted, leads = unpacked(results[: self._row_numbers].reshape(-1, _PICKS + 1))
        picks = results[self._row_numbers :].reshape(-1, 2)[: 1 + nodes, 0].copy()
        drafts = np.maximum(drafted[places[:, 0], places[:, 1]], 0)
        node, path = -1, list[int]()
        for child, parent in enumerate(self.tree.parents):
            if parent == node and drafts[child] == picks[1 + node]:
                node = child
                path.append(child)
        assert len(path) == accepted, "host and device differ in what is accepted"
        for flight in self._flights:
            flight.position = position + 1 + accepted
        return DraftedRound(drafts, leads[places[:, 0]], picks, tuple(path))


def _pages(rows: RoundRows) -> tuple[bytes, bytes]:
    """The pages of a text. They change where a shared one is copied, and where the text is computed again."""
    return rows.table.tobytes(), rows.draft_table.tobytes()


def _same_pages(pages: tuple[bytes, bytes], rows: RoundRows) -> bool:
    """Whether the text still has these pages, and maybe more."""
    return all(now.startswith(then) for then, now in zip(pages, _pages(rows), strict=True))

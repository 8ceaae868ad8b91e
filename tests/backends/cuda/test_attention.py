"""Attention in Triton: near torch's, and the same bits for chains and trees, any company, pages in any order."""

import numpy as np
import pytest
import torch

from hierspec.backends.base import Batch
from hierspec.backends.cuda import work as planning
from hierspec.backends.cuda.attention import KEYS, AttentionScratch, attend
from hierspec.backends.cuda.memory import PAGE
from hierspec.backends.cuda.scratch import places_at
from hierspec.backends.cuda.work import in_passes, work_of

HEADS, KV_HEADS, SIZE, PAGES = 6, 2, 32, 16
GROUP = HEADS // KV_HEADS


class Text:
    """A text of so many tokens with keys and values by position, kept on pages in some order."""

    def __init__(self, length: int, table: list[int], seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys, self.values = (torch.randn(KV_HEADS, length, SIZE, generator=generator).bfloat16() for _ in "kv")
        self.queries = torch.randn(length, HEADS, SIZE, generator=generator).bfloat16()
        self.table, self.length = table, length

    def slot(self, position: int) -> int:
        return self.table[position // PAGE] * PAGE + position % PAGE


def cache_of(texts, moved=()):
    """Keys and values in slots. `moved`: (text, position, slot) of tokens that are elsewhere, as nodes of a tree."""
    cache = [torch.full((KV_HEADS, PAGES * PAGE, SIZE), torch.nan).bfloat16() for _ in "kv"]
    places = [(text, position, text.slot(position)) for text in texts for position in range(text.length)]
    for text, position, slot in [*places, *moved]:
        cache[0][:, slot], cache[1][:, slot] = text.keys[:, position], text.values[:, position]
    return cache


def batch_of(rows) -> Batch:
    """`rows`: of each text (text, [(position, length, path)])."""
    flat = [(text, *row) for text, own in rows for row in own]
    paths = [slot for *_, path in flat for slot in path]
    ends = np.cumsum([0, *(len(path) for *_, path in flat)])
    tables = np.zeros((len(rows), 12), np.int64)
    for number, (text, _) in enumerate(rows):
        tables[number, : len(text.table)] = text.table
    return Batch(
        positions=np.array([position for _, position, _, _ in flat]),
        slots=np.zeros(len(flat), np.int64),
        text_starts=np.cumsum([0, *(len(own) for _, own in rows)]),
        tables=tables,
        lengths=np.array([length for _, _, length, _ in flat]),
        path_starts=ends,
        paths=np.array(paths, np.int64),
        drafted=np.zeros(0, np.int64),
    )


def attended(batch: Batch, queries, cache, device, window=0) -> torch.Tensor:
    work = work_of(batch, GROUP, window, 0)
    numbers = torch.from_numpy(np.append(work.numbers, [0]).astype(np.int32)).to(device)
    places, _ = places_at(numbers, 0, work.width, work.pieces)

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    scratch = AttentionScratch(
        zeros(work.pieces, KV_HEADS, work.tile, SIZE),
        zeros(work.pieces, KV_HEADS, work.tile, 2),
        zeros(work.pieces, KV_HEADS, dtype=torch.int32),
    )
    q, out = (zeros(work.width, HEADS, SIZE, dtype=torch.bfloat16) for _ in "qo")
    q[: work.rows] = queries.to(device)
    placed = tuple(part.to(device) for part in cache)
    attend(q, placed, places, work.pieces, scratch, out, HEADS, window, work.tree, work.tile)
    assert not scratch.counters.any()
    return out[: work.rows].cpu()


def chain(text: Text, positions) -> tuple[Text, list]:
    return text, [(position, position + 1, ()) for position in positions]


def expected(text: Text, position: int, window=0) -> torch.Tensor:
    seen = slice(max(position - window + 1, 0) if window else 0, position + 1)
    k, v = (part[:, seen].float().repeat_interleave(GROUP, 0) for part in (text.keys, text.values))
    return torch.nn.functional.scaled_dot_product_attention(text.queries[position, :, None].float(), k, v)[:, 0]


@pytest.mark.parametrize("window", [0, 20, 300])
def test_it_is_torchs_attention(device, window):
    text = Text(KEYS + 70, [3, 0, 7, 5, 2, 9])
    positions = [0, 63, 64, KEYS - 1, KEYS, KEYS + 69]
    found = attended(batch_of([chain(text, positions)]), text.queries[positions], cache_of([text]), device, window)
    for row, position in zip(found, positions, strict=True):
        assert (row.float() - expected(text, position, window)).abs().max() < 0.03


def test_other_rows_other_texts_and_other_pages_change_no_bit(device):
    positions = [5, KEYS - 2, KEYS - 1, KEYS, KEYS + 1, KEYS + 2, KEYS + 9]
    text, other = Text(KEYS + 10, [3, 0, 7, 5, 2]), Text(30, [11], seed=2)
    together = attended(batch_of([chain(text, positions)]), text.queries[positions], cache_of([text]), device)
    moved = Text(KEYS + 10, [1, 8, 4, 6, 14])
    batch = batch_of([chain(other, [3, 29]), chain(moved, positions)])
    queries = torch.cat((other.queries[[3, 29]], text.queries[positions]))
    assert torch.equal(attended(batch, queries, cache_of([moved, other]), device)[2:], together)
    for number in (0, 2, 3, 6):
        position = positions[number]
        alone = attended(batch_of([chain(text, [position])]), text.queries[[position]], cache_of([text]), device)
        assert torch.equal(alone[0], together[number])


def test_wide_tiles_have_the_bits_of_narrow_ones(device, monkeypatch):
    text, positions = Text(KEYS + 40, [3, 0, 7, 5, 2]), [*range(20), *range(KEYS - 2, KEYS + 4)]
    batch = batch_of([chain(text, positions)])
    narrow = attended(batch, text.queries[positions], cache_of([text]), device)
    monkeypatch.setattr(planning, "WIDE_ROWS", 32)
    monkeypatch.setattr(planning, "WIDE_FROM", KEYS)
    assert work_of(batch, GROUP, 0, 0).tile == 32
    assert torch.equal(attended(batch, text.queries[positions], cache_of([text]), device), narrow)


@pytest.mark.parametrize("length", [40, KEYS - 2, KEYS + 3])
def test_a_token_has_the_same_bits_in_a_tree_and_in_the_text(device, length):
    """Nodes 0, 2, 3 of a tree are the text's next tokens; nodes between them are something else."""
    text = Text(length + 3, [3, 0, 7, 5, 2])
    nodes = [11 * PAGE + node for node in range(5)]  # slots of nodes, anywhere
    wrong = Text(length + 3, text.table, seed=3)
    moved = [(text, length, nodes[0]), (text, length + 1, nodes[2]), (text, length + 2, nodes[3])]
    moved += [(wrong, 0, nodes[1]), (wrong, 1, nodes[4])]
    rows = [
        (length - 1, length, ()),
        (length, length, (nodes[0],)),
        (length, length, (nodes[1],)),
        (length + 1, length, (nodes[0], nodes[2])),
        (length + 2, length, (nodes[0], nodes[2], nodes[3])),
        (length + 1, length, (nodes[1], nodes[4])),
    ]
    short = Text(length, text.table)
    short.keys, short.values = text.keys[:, :length], text.values[:, :length]
    order = [length - 1, length, length, length + 1, length + 2, length + 1]
    found = attended(batch_of([(short, rows)]), text.queries[order], cache_of([short], moved), device)
    positions = [length - 1, length, length + 1, length + 2]
    plain = attended(batch_of([chain(text, positions)]), text.queries[positions], cache_of([text]), device)
    assert torch.equal(found[[0, 1, 3, 4]], plain)


def test_long_batches_are_cut_into_passes_of_the_same_rows():
    text = Text(700, list(range(11)))
    batch = batch_of([chain(text, range(100, 700)), chain(text, [5])])
    parts = list(in_passes(batch, GROUP))
    assert len(parts) > 1
    assert np.array_equal(np.concatenate([part.positions for _, part in parts]), batch.positions)
    for rows, part in parts:
        assert part.text_starts[-1] == len(part.positions) == rows.stop - rows.start
        work = work_of(part, GROUP, 0, 0)
        assert work.rows == len(part.positions)

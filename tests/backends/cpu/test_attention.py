"""Attention: what a row takes from its text is the same bits at every width, in chains and trees, on any threads.

In all three ways, in float32, in float16 and in tiles of bfloat16, which vector code emulates where there is no AMX.
Weights are float32 in each case, so that nothing but attention is rounded.
"""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llvmlite import ir
from texts import Texts, states
from x86_assembly import x86_assembly

from hierspec.backends.base import Batch, Decoder
from hierspec.backends.cpu import amx, amx_attention_kernels
from hierspec.backends.cpu import backend as cpu_backend
from hierspec.backends.cpu.amx import TileRegisters
from hierspec.backends.cpu.amx_softmax import SEGMENT, softmax
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.cpu.decoder import CpuDecoder
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import KINDS, PackedWeights, pack_in_memory
from hierspec.backends.cpu.product import FORM_OF_KIND
from hierspec.backends.torch.backend import TorchBackend
from hierspec.core.proposal import Proposal
from hierspec.scorers.climb import advance
from hierspec.testing.checkpoints import random_weights, tiny_config

LONGEST = 620  # more than two segments
STORED = ("float32", "float16", "bfloat16")  # how keys and values are; the last one in tiles
VOCABULARY = 320


@cache
def backend(threads: int) -> CpuBackend:
    return CpuBackend(threads)


@cache
def model(kv_heads: int, group: int, head_size: int, window: int, sharpness: int = 5):
    config = tiny_config(
        "llama", layers=2, heads=kv_heads * group, kv_heads=kv_heads, head_size=head_size, windows=(window, 0)
    )
    weights = random_weights(config, seed=head_size)
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] = sharpness * weights[name]  # scores grow with its square
    return config, weights


@cache
def decoder(stored: str, threads: int, *shape: int) -> CpuDecoder:
    config, weights = model(*shape)
    packed = pack_in_memory(config, weights, KINDS["float32"])
    return CpuDecoder(backend(threads), backend(threads).team, config, weights, packed, stored)


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def states_in_steps(of: Decoder, text: np.ndarray, steps: list[int]) -> np.ndarray:
    """The last states of all tokens, read so many at a time."""
    staircase, at = Texts(of).new(len(text)), 0
    with torch.inference_mode():
        for step in steps:
            at += step
            staircase.align(text[:at], Proposal())
            advance(of, [staircase], of.config.layers)
        return states(staircase, 0, at).numpy().copy()


@cache
def one_by_one(stored: str, *shape: int) -> np.ndarray:
    """Of a text that all examples are beginnings of, one row a pass on one thread."""
    return states_in_steps(decoder(stored, 1, *shape), tokens(0, LONGEST), [1] * LONGEST)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


shapes = st.sampled_from(
    [
        (1, 1, 16, 0),
        (2, 3, 64, 0),
        (2, 3, 32, 50),
        (1, 7, 48, 3),
        (2, 2, 96, 0),
        (3, 2, 128, 0),
        (1, 20, 16, 270),
        (2, 4, 80, 300),
    ]
)


def a_tree_along(text: np.ndarray, depth: int, rng: random.Random) -> tuple[Proposal, list[int]]:
    """The text as the spine of a tree, with other tokens beside it and between it."""
    nodes: list[int] = []
    parents: list[int] = []
    spine: list[int] = []
    for place in range(depth):
        for _ in range(rng.choice([0, 0, 1, 2])):
            nodes.append(rng.randrange(VOCABULARY))
            parents.append(rng.randrange(-1, len(nodes) - 1))
        nodes.append(int(text[place]))
        parents.append(spine[-1] if spine else -1)
        spine.append(len(nodes) - 1)
    return Proposal(tuple(nodes), tuple(parents)), spine


@pytest.mark.parametrize("stored", STORED)
@settings(max_examples=25, deadline=None)
@given(
    shape=shapes,
    threads=st.sampled_from([1, 2, 5]),
    context=st.integers(1, 300) | st.integers(500, 540),
    width=st.integers(0, 70),
    beside=st.integers(0, 2),
    seed=st.integers(0, 10_000),
)
@example(shape=(1, 7, 48, 3), threads=1, context=1, width=36, beside=0, seed=0)  # a path that outgrows the window
def test_a_row_has_the_same_bits_whatever_its_pass_holds(stored, shape, threads, context, width, beside, seed):
    of, expected, rng = decoder(stored, threads, *shape), one_by_one(stored, *shape), random.Random(seed)
    text = tokens(0, LONGEST)
    texts = Texts(of)
    mine, others = texts.new(LONGEST), [texts.new(100) for _ in range(beside)]
    with torch.inference_mode():
        done = 0
        while done < context:
            done = min(context, done + rng.choice([1, 2, 15, 40, 300]))
            mine.align(text[:done], Proposal())
            for other in others:
                other.align(tokens(rng.randrange(99), rng.randrange(1, 90)), Proposal())
            advance(of, [*others, mine] if rng.random() < 0.5 else [mine, *others], of.config.layers)
        assert same_bits(states(mine, 0, context).numpy(), expected[:context])
        tree, spine = a_tree_along(text[context:], width // 2, rng)
        mine.align(text[:context], tree)
        advance(of, [mine], of.config.layers)
        found = states(mine, context, mine.used).numpy()[spine]
        assert same_bits(found, expected[context : context + len(spine)])
        # And the accepted nodes, which move to where a chain has them, are seen as the chain's.
        after = context + len(spine) + 1 + width - width // 2
        mine.align(text[:after], Proposal())
        advance(of, [mine], of.config.layers)
        assert same_bits(states(mine, 0, after).numpy(), expected[:after])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_end_of_a_long_path_may_see_no_token_of_the_text(stored, threads):
    """Its last rows are a group of their own, and their window begins in a later segment than the text ends in."""
    shape, context, depth = (1, 7, 48, 3), 250, 120
    of, text = decoder(stored, threads, *shape), tokens(0, LONGEST)
    staircase = Texts(of).new(LONGEST)
    # Another first token makes it a tree: the nodes of a chain are seen as tokens of the text.
    path = Proposal((7, *text[context : context + depth].tolist()), (-1, -1, *range(1, depth)))
    with torch.inference_mode():
        for drafted in (Proposal(), path):
            staircase.align(text[:context], drafted)
            advance(of, [staircase], of.config.layers)
    found = states(staircase, context + 1, context + 1 + depth).numpy()
    assert same_bits(found, one_by_one(stored, *shape)[context : context + depth])


@pytest.mark.parametrize("stored", STORED)
@settings(max_examples=10, deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_states_are_the_reference_ones(stored, shape, seed):
    """Beside float64: to the rounding of float32, or of keys, values and probabilities to 8 bits."""
    shape = (*shape, 1)  # the larger scores, the more rounding them changes
    config, weights = model(*shape)
    text = tokens(seed, 290)
    exact = TorchBackend("cpu").decoder(config, {name: w.double() for name, w in weights.items()}, "float64")
    right = states_in_steps(exact, text, [len(text)])
    found = states_in_steps(decoder(stored, 2, *shape), text, [200, 90])
    embedded = weights["model.embed_tokens.weight"][torch.from_numpy(text)].numpy()
    error = np.linalg.norm(found - right) / np.linalg.norm(right - embedded)
    assert error < {"float32": 1e-5, "float16": 1e-3, "bfloat16": 0.015}[stored]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("window", [0, 300])
def test_whole_groups_give_what_segments_give(stored, window):
    """One thread takes whole groups of rows, two take segments of few rows."""
    text, shape = tokens(0, LONGEST), (2, 3, 64, window)
    of_segments = states_in_steps(decoder(stored, 2, *shape), text[:400], [3] * 133 + [1])
    for steps in ([400], [1, 16, 256, 127], [5, 395]):
        assert same_bits(states_in_steps(decoder(stored, 1, *shape), text[:400], steps), of_segments)


def test_probabilities_are_powers_rounded_to_bfloat16():
    """Of random scores, a row with nothing to see, and one that sees a single position."""
    chunks, rng = 8, np.random.default_rng(0)
    memory = np.zeros(2 * LANES * SEGMENT + LANES, np.float32)
    memory = memory[-memory.ctypes.data % 64 // 4 :][: 2 * LANES * SEGMENT]
    scores = memory.reshape(2, 2 * chunks, LANES, LANES)  # [tile, block, row, 16]
    scores[:] = 40 * rng.standard_normal(scores.shape)
    scores[0, :, 5], scores[1, 3:, 2], scores[1, :3, 2], scores[1, 3, 2, 0] = -np.inf, -np.inf, -np.inf, 7
    given = scores.astype(np.float64)
    result, factor = np.zeros((2, 2 * LANES), np.float32), np.array([0.125], np.float32)
    softmax.from_python(memory.ctypes.data, 30, chunks, factor.ctypes.data, result.ctypes.data, result.strides[0])
    words = scores[:, ::2].view(np.uint32).copy()  # a tile of probabilities is where the first of two of scores was
    halves = np.stack([words << 16, words & 0xFFFF0000], axis=2).view(np.float32).reshape(scores.shape)
    for tile, row in [(number // LANES, number % LANES) for number in range(30)]:
        found, exact = halves[tile, :, row], given[tile, :, row]
        largest = exact.max()
        assert result[tile, row] == largest
        assert np.isclose(result[tile, LANES + row], found.astype(np.float64).sum(), rtol=1e-6)
        if largest == -np.inf:
            assert not found.any()
            continue
        right = 2.0 ** (0.125 * (exact - largest))
        assert found[exact == largest].tolist() == [1.0] * (exact == largest).sum()
        assert (abs(found - right) <= (2**-8 + 1e-4) * right + 2.0**-126).all()
        assert not found[exact == -np.inf].any()


@pytest.mark.parametrize("stored", STORED)
def test_texts_may_outgrow_the_scratch_memory(stored):
    """Which is for 2,048 positions at first, and then for twice what was needed."""
    text, shape = tokens(1, 4700), (2, 3, 64, 0)
    config, weights = model(*shape)
    packed = pack_in_memory(config, weights, KINDS["float32"])
    new = CpuDecoder(backend(2), backend(2).team, config, weights, packed, stored)
    in_pieces = states_in_steps(new, text, [2040, 5, 20, 2630, 1, 4])
    assert same_bits(states_in_steps(decoder(stored, 1, *shape), text, [4700]), in_pieces)


def test_a_batch_may_have_no_rows():
    of = decoder("float32", 2, 2, 3, 64, 0)
    none, starts = np.empty(0, np.int64), np.zeros(2, np.int64)
    firsts, texts = of.groups(Batch(none, none, starts, none[None], none, starts[:1], none, none))
    assert (len(firsts), len(texts)) == (1, 0)


@pytest.mark.parametrize("stored", STORED)
def test_slots_that_nobody_sees_may_hold_anything(stored):
    """What is not a number in slots behind the text's end must not reach it."""
    of = decoder(stored, 1, 2, 3, 64, 0)
    staircase = Texts(of).new(100)
    staircase.align(tokens(0, 40), Proposal())
    memory = staircase.memory
    memory._keys[:], memory._values[:] = -1, -1  # the bits of a number that is none
    with torch.inference_mode():
        advance(of, [staircase], of.config.layers)
    assert same_bits(states(staircase, 0, 40).numpy(), one_by_one(stored, 2, 3, 64, 0)[:40])


def test_keys_and_values_of_16_bits_take_half_the_memory():
    wide, *narrow = (decoder(stored, 1, 2, 3, 64, 0).memory((), 0).bytes_per_page for stored in STORED)
    assert [2 * size for size in narrow] == [wide, wide]


def test_a_memory_of_another_layout_is_refused():
    of = decoder("bfloat16", 1, 2, 3, 64, 0)
    nothing = np.empty(0, np.int64)
    batch = Batch(
        nothing, nothing, np.zeros(1, np.int64), nothing[None], nothing, np.zeros(1, np.int64), nothing, nothing
    )
    with pytest.raises(AssertionError):
        of.run(decoder("float32", 1, 2, 3, 64, 0).memory((), 0), batch, torch.empty(0, 64), 0, 1)


@pytest.mark.parametrize("matrix_units", [True, False])
@pytest.mark.parametrize(("with_amx", "arm"), [(True, False), (False, False), (False, True)])
def test_keys_are_rounded_where_weights_are(monkeypatch, with_amx, arm, matrix_units):
    """With matrix units to bfloat16, without them to float16."""
    config, weights = model(2, 3, 64, 0)
    monkeypatch.setattr(amx, "available", lambda: with_amx)
    monkeypatch.setattr(cpu_backend, "is_arm", lambda: arm)
    monkeypatch.setattr(cpu_backend, "CpuDecoder", lambda *arguments: arguments[-1])
    of = CpuBackend(1, matrix_units)

    def stored(*kinds: int) -> str:
        nothing = np.empty(0)
        return of.with_weights(config, weights, PackedWeights("", kinds, nothing, nothing, kinds[0], 0, 0, None))

    assert stored(KINDS["bfloat16-matrix"]) == "bfloat16"
    assert stored(KINDS["float32"]) == stored(KINDS["bfloat16"]) == "float32"
    rounded = "bfloat16" if with_amx and matrix_units else "float32" if arm else "float16"
    assert stored(KINDS["int8"]) == stored(KINDS["int4"]) == rounded
    assert stored(KINDS["float32"], next(iter(FORM_OF_KIND))) == rounded


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("scores", (2 + 4, 2 + 4)),
        ("scores_of_two", (4, 4)),
        ("weighted_sums", (1 + 2 + 3 + 4,) * 2),
        ("weighted_sums_of_two", (2 + 4, 2 + 4)),
    ],
)
def test_llvm_emits_the_instructions(monkeypatch, name, counts):
    """For CPUs with AMX, whatever CPU this is."""
    monkeypatch.setattr(amx_attention_kernels, "registers", TileRegisters)
    module = ir.Module()
    getattr(amx_attention_kernels, name).define(module, name)
    text, _ = x86_assembly(module)
    products, stores = counts
    assert len(re.findall(r"\btdpbf16ps\b", text)) == products
    assert len(re.findall(r"\btilestored\b", text)) == stores

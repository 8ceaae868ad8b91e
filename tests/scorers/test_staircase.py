"""The pool of staircases: a memo within a budget. Whatever it forgets or shares, nothing changes but time."""

import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import states

from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.torch.backend import TorchBackend
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.scorers.climb import advance
from hierspec.scorers.pool import StaircasePool
from hierspec.scorers.staircase import Pages, Staircase
from hierspec.testing.checkpoints import random_weights, tiny_config

PAGE = 64
LAYERS = 4


class Nobody:
    name, vocabulary = "nobody", 320

    def score(self, asks):
        return []

    def release(self, request):
        pass


def a_request() -> Request:
    return Request([1, 2, 3], Sampling(), Hierarchy((Tier(Nobody()),)))


def a_decoder(backend=None):
    config = tiny_config("llama")
    return (backend or TorchBackend()).decoder(config, random_weights(config), "float32")


def a_pool(pages: int, decoder=None) -> StaircasePool:
    decoder = decoder or a_decoder()
    return StaircasePool(decoder, budget=pages * decoder.memory((LAYERS,), 0).bytes_per_page)


def prepare(pool: StaircasePool, *asked: tuple[Request, int], first: int = 0) -> list[Staircase]:
    texts = [(request, np.arange(first, first + length, dtype=np.int32) % 320) for request, length in asked]
    return pool.prepare([(request, text, Proposal()) for request, text in texts])


def test_memory_grows_with_use_and_stays_within_the_budget():
    pool, requests = a_pool(30), [a_request() for _ in range(12)]
    for round_ in range(20):
        for number, request in enumerate(requests):
            prepare(pool, (request, 10 + 20 * round_ + number))
            assert pool.bytes_held() <= pool.budget
    assert pool.bytes_held() > 0


def test_memory_is_reserved_once_and_never_moves():
    pool = a_pool(30)
    prepare(pool, (a_request(), 10))
    memory = pool.pages.memory
    address = memory.states.data_ptr()
    for length in (200, 900, 1500):
        prepare(pool, (a_request(), length))
    pool.clear()
    prepare(pool, (a_request(), 300))
    assert pool.pages.memory is memory
    assert memory.states.data_ptr() == address


def test_the_least_recently_used_goes_first():
    pool, first, second, third = a_pool(10), a_request(), a_request(), a_request()
    [old] = prepare(pool, (first, 100))
    [newer] = prepare(pool, (second, 100))
    newer.heights[:100] = LAYERS
    prepare(pool, (third, 500), first=7)
    [again] = prepare(pool, (second, 100))
    assert again is newer
    assert (again.heights[:100] == LAYERS).all()
    [new] = prepare(pool, (first, 100))
    assert new is not old


def test_a_pass_that_cannot_fit_is_told():
    with pytest.raises(HierspecError, match="--kv-memory"):
        prepare(a_pool(15), (a_request(), 15 * PAGE + 1))
    with pytest.raises(HierspecError, match="--kv-memory"):
        prepare(a_pool(15), (a_request(), 600), (a_request(), 600))
    with pytest.raises(HierspecError, match="--kv-memory"):
        prepare(a_pool(0), (a_request(), 1))


def test_what_an_ended_request_leaves_serves_a_prompt_with_a_common_prefix():
    pool, first = a_pool(80), a_request()
    [old] = prepare(pool, (first, 100))
    old.heights[:100] = LAYERS
    pool.release(first)
    [taken] = prepare(pool, (a_request(), 150))
    assert taken is old
    assert taken.heights[:150].tolist() == [LAYERS] * 100 + [0] * 50


def test_clearing_forgets_everything():
    pool, request = a_pool(80), a_request()
    prepare(pool, (request, 100))
    pool.clear()
    assert pool.bytes_held() == 0
    pool.release(request)  # of a staircase that is gone
    [new] = prepare(pool, (request, 100))
    assert (new.heights[:100] == 0).all()


# Running requests share a common prefix.


def test_a_running_request_shares_its_prefix_and_both_go_on_by_themselves():
    pool, first, second = a_pool(80), a_request(), a_request()
    [one] = prepare(pool, (first, 300))
    one.heights[:300] = LAYERS
    before = pool.bytes_held()
    text = np.arange(300, dtype=np.int32)
    text[200:] += 7
    [two] = pool.prepare([(second, text, Proposal())])
    assert two is not one
    assert two.heights[:300].tolist() == [LAYERS] * 200 + [0] * 100
    assert two.table[:3].tolist() == one.table[:3].tolist()  # three whole pages of 64
    assert not set(two.table[3:].tolist()) & set(one.table[3:].tolist())
    assert pool.bytes_held() == before + 2 * pool.pages.memory.bytes_per_page  # not five
    [again] = prepare(pool, (first, 300))
    assert again is one
    assert (one.heights[:300] == LAYERS).all()


def test_only_finished_tokens_are_shared():
    pool, first = a_pool(80), a_request()
    [one] = prepare(pool, (first, 300))
    one.heights[:100], one.heights[100:300] = LAYERS, 2
    [two] = prepare(pool, (a_request(), 300))
    assert two.heights[:300].tolist() == [LAYERS] * 100 + [0] * 200


def test_pages_go_when_the_last_holder_does():
    pool, requests = a_pool(80), [a_request() for _ in range(3)]
    [one] = prepare(pool, (requests[0], 200))
    one.heights[:200] = LAYERS
    for request in requests[1:]:
        prepare(pool, (request, 200))
    for staircase in pool.staircases():
        pool._forget(staircase)
    assert pool.bytes_held() == 0
    assert pool.pages.free == 80


class Interrupted(BaseException):
    """Ctrl-C, at a place that the test chooses."""


def interrupt_at(line: int, action) -> bool:
    """Run the action; Ctrl-C comes before the n-th line of the scorers' files that it runs. Whether it came."""
    left = [line]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(("staircase.py", "pool.py", "climb.py")):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("backend", [TorchBackend(), CpuBackend(2)], ids=["torch", "cpu"])
def test_an_interrupted_pass_leaves_nothing_that_is_half_moved(backend):
    """Ctrl-C anywhere while texts are aligned, shared and computed: the next passes have the logits of their texts."""
    rng, decoder = random.Random(1), a_decoder(backend)
    text = [rng.randrange(320) for _ in range(150)]
    tree, accepted = Proposal((5, 6, 7, 8), (-1, 0, 0, 2)), [*text[:140], 5, 7, 9]
    passes = ((text[:140], tree), (accepted, Proposal()), (text, tree))
    pool, interruptions = a_pool(12, decoder), 0

    def write(requests):
        for request in (*requests, requests[0]):
            for context, proposal in passes:
                advance(decoder, pool.prepare([(request, np.array(context, np.int32), proposal)]), LAYERS)

    def expected(context, proposal) -> torch.Tensor:
        alone = Staircase(Pages(decoder.memory((LAYERS,), 1 << 26)))
        alone.reserve(200)
        alone.align(np.array(context, np.int32), proposal)
        advance(decoder, [alone], LAYERS)
        return logits(decoder, alone, context, proposal)

    with torch.inference_mode():
        right = expected(accepted, tree)
        for line in range(1, 2000, 23):
            requests = [a_request(), a_request()]
            interruptions += interrupt_at(line, lambda: write(requests))  # noqa: B023
            for request in requests:
                [staircase] = pool.prepare([(request, np.array(accepted, np.int32), tree)])
                advance(decoder, [staircase], LAYERS)
                difference = (logits(decoder, staircase, accepted, tree) - right).abs().max()
                assert difference == 0 if backend.exact else difference < 1e-4
            for request in requests:
                pool.release(request)
            held = {int(page) for staircase in pool.staircases() for page in staircase.table}
            assert pool.pages.in_use == len(held)
    assert interruptions > 20


def logits(decoder, staircase: Staircase, context, proposal) -> torch.Tensor:
    return decoder.logits(states(staircase, len(context) - 1, staircase.used))


@pytest.mark.parametrize("backend", [TorchBackend(), CpuBackend(2)], ids=["torch", "cpu"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_sharing_changes_no_logits(backend, seed):
    """Requests that begin alike, part, go back, propose trees and end in any order, in a memory that is too small for
    all: each has the logits of its own text alone, to the bit where the backend is exact."""
    rng, decoder = random.Random(seed), a_decoder(backend)
    pool, texts, requests = a_pool(12, decoder), {}, {}
    alone = Pages(decoder.memory((LAYERS,), 1 << 26))
    prefix = [rng.randrange(320) for _ in range(150)]
    with torch.inference_mode():
        for _ in range(25):
            number = rng.randrange(4)
            if number not in requests or rng.random() < 0.15:
                if number in requests:
                    pool.release(requests[number])
                requests[number], texts[number] = a_request(), prefix[: rng.randrange(1, 150)]
            text = texts[number]
            if rng.random() < 0.2:
                del text[rng.randrange(1, len(text) + 1) :]
            text += [rng.randrange(320) for _ in range(rng.randrange(1, 40))]
            nodes = rng.randrange(5)
            proposal = Proposal(
                tuple(rng.randrange(320) for _ in range(nodes)), tuple(rng.randrange(-1, node) for node in range(nodes))
            )
            context = np.array(text, np.int32)
            [staircase] = pool.prepare([(requests[number], context, proposal)])
            advance(decoder, [staircase], LAYERS)
            found = logits(decoder, staircase, context, proposal)
            single = Staircase(alone)
            single.reserve(len(context) + nodes)
            single.align(context, proposal)
            advance(decoder, [single], LAYERS)
            expected = logits(decoder, single, context, proposal)
            single.release()
            if backend.exact:
                assert torch.equal(found, expected)
            else:
                assert (found - expected).abs().max() < 1e-4
            if nodes and rng.random() < 0.7:
                text += proposal.path(rng.randrange(nodes))


@settings(max_examples=50, deadline=None)
@given(context=st.integers(1, 70), choices=st.lists(st.integers(0, 100), max_size=20), start=st.integers(0, 60))
def test_what_an_entry_sees_is_the_context_and_its_ancestors(context, choices, start):
    """And where those stand in a line, as in a proposed chain, there is no path."""
    parents = tuple(choice % (node + 1) - 1 for node, choice in enumerate(choices))
    staircase = Staircase(Pages(a_decoder().memory((LAYERS,), 1 << 20)))
    staircase.reserve(context + len(choices))
    staircase.align(np.arange(context, dtype=np.int32), Proposal(tuple(range(100, 100 + len(choices))), parents))
    entries = np.arange(min(start, context - 1), staircase.used)
    lengths, starts, paths = staircase.seen(entries)
    for row, entry in enumerate(entries.tolist()):
        ancestors, node = [], entry - context
        while node >= 0:
            ancestors.append(context + node)
            node = parents[node]
        expected = [*range(min(entry + 1, context)), *reversed(ancestors)]
        seen = [*staircase.slots[: lengths[row]], *paths[starts[row] : starts[row + 1]]]
        assert seen == staircase.slots[expected].tolist()
        assert (starts[row] == starts[row + 1]) == (expected == list(range(entry + 1)))

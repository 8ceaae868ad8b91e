"""Prompt lookup as published, against the published function written out."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.proposal import Proposal
from hierspec.stores.pld import PromptLookupStore


def published(context: list[int], longest: int, length: int) -> list[int]:
    for size in range(longest, 0, -1):
        for start in range(len(context) - size + 1):
            if context[start : start + size] != context[-size:]:
                continue
            begin, end = start + size, start + size + length
            if end <= len(context) and begin < len(context) - size:
                return context[begin:end]
    return []


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(4, 10), st.integers(1, 12))
def test_it_copies_what_the_published_function_copies(context, longest, length, budget):
    expected = published(context, min(longest, len(context)), length)[:budget]
    draft = PromptLookupStore(longest, length).propose(np.array(context, np.int32), budget)
    assert draft == Proposal.chain(expected, "pld")

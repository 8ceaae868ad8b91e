"""A whole decoder in Triton: near torch's, and a token's bits are its own text's alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from texts import Texts, states

from hierspec.backends.cuda.backend import CudaBackend
from hierspec.backends.torch.backend import TorchBackend
from hierspec.core.proposal import Proposal
from hierspec.scorers.climb import advance
from hierspec.testing.checkpoints import random_weights, tiny_config

SIZES = {"heads": 4, "kv_heads": 2, "hidden": 64, "head_size": 32, "intermediate": 80, "vocabulary": 96, "layers": 2}
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"windows": (9, 9)}}  # biases, norms of heads, windows


@pytest.fixture(
    scope="module",
    params=[
        *((family, "bfloat16", False) for family in FAMILIES),
        ("llama", "int8", False),
        ("qwen3", "bfloat16", True),
        ("llama", "int8", True),
    ],
)
def both(request, device):
    """A decoder, with the norms of small or of large states, and torch's in float32."""
    family, format, large = request.param
    config = tiny_config(family, **{**SIZES, **FAMILIES[family]})
    weights = random_weights(config)
    backend = CudaBackend(device)
    assert backend.refuses(config, format) == ""
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr("hierspec.backends.cuda.decoder.SMALL", 0)
        decoder = backend.decoder(config, weights, format)
    assert (decoder.norm_left is None) == large
    return decoder, TorchBackend().decoder(config, weights, "float32")


def logits_of(decoder, wanted, taps=(), stops=(2,)):
    texts = Texts(decoder, taps, most_bytes=1 << 20)
    staircases = [texts.new(len(context) + len(tree)) for context, tree in wanted]
    with torch.inference_mode():
        for staircase, (context, tree) in zip(staircases, wanted, strict=True):
            staircase.align(context, tree)
        for stop in stops:
            advance(decoder, staircases, stop)
        return [decoder.logits(states(staircase, 0, staircase.used)).cpu().clone() for staircase in staircases]


def a_text(seed: int, length: int) -> np.ndarray:
    rng = random.Random(seed)
    return np.array([rng.randrange(96) for _ in range(length)], np.int32)


def test_logits_are_near_torchs(both):
    decoder, reference = both
    wanted = [(a_text(1, 20), Proposal((5, 6, 7, 8), (-1, 0, 0, -1))), (a_text(2, 3), Proposal())]
    for found, right in zip(logits_of(decoder, wanted), logits_of(reference, wanted), strict=True):
        assert (found - right).norm() / right.norm() < 0.1


def test_trees_company_and_layer_ranges_change_no_bit(both):
    decoder, _ = both
    text = a_text(3, 24)
    [plain] = logits_of(decoder, [(text, Proposal())])
    # The last four tokens as the spine of a tree, with others beside them.
    tokens = [int(token) for token in text[20:]]
    tree = Proposal((tokens[0], 1, tokens[1], 2, tokens[2], tokens[3]), (-1, -1, 0, 1, 2, 4))
    beside = (a_text(4, 7), Proposal())
    [_, found] = logits_of(decoder, [beside, (text[:20], tree)], taps=(1,), stops=(1, 2))
    assert torch.equal(found[[*range(20), 20, 22, 24, 25]], plain)


def test_token_by_token_is_the_same_as_at_once(both):
    decoder, _ = both
    text = a_text(5, 6)
    [plain] = logits_of(decoder, [(text, Proposal())])
    staircase = Texts(decoder, (), 1 << 20).new()
    with torch.inference_mode():
        for length in (2, 3, 6):
            staircase.align(text[:length], Proposal())
            advance(decoder, [staircase], 2)
            assert torch.equal(decoder.logits(states(staircase, length - 1, length)).cpu()[0], plain[length - 1])


def test_a_bad_draft_spoils_only_itself(both):
    """Its state is not a number; rows that do not see it stay what they were."""
    decoder, _ = both
    text = a_text(6, 5)
    [plain] = logits_of(decoder, [(text, Proposal())])
    bad = int(next(token for token in range(96) if token not in text))
    kept = decoder.embedding[bad].clone()
    decoder.embedding[bad] = torch.nan
    try:
        [found] = logits_of(decoder, [(text, Proposal((bad, 3), (-1, -1)))])
    finally:
        decoder.embedding[bad] = kept
    assert torch.equal(found[:5, :bad], plain[:, :bad])  # with tied embeddings its logit is not a number either
    assert found[5].isnan().all()


def test_it_says_what_it_cannot_run(device):
    backend, config = CudaBackend(device), tiny_config("llama", **SIZES)
    assert backend.refuses(config, "float16") == "its weights must be bfloat16 or int8"
    assert "heads have 24 numbers" in backend.refuses(replace(config, head_size=24), "bfloat16")
    assert "share one" in backend.refuses(replace(config, heads=64, kv_heads=2), "bfloat16")

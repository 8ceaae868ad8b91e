"""The decoder against the reference implementation in transformers, on tiny random checkpoints of every family."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from texts import Texts, states

from hierspec.backends.base import Decoder
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import Rotary
from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.proposal import Proposal
from hierspec.scorers.climb import advance
from hierspec.scorers.staircase import Staircase
from hierspec.testing.checkpoints import tiny_checkpoint

NOTHING = Proposal()
CASES = {
    **{name: {"family": name} for name in FAMILIES},
    "llama-tied": {"family": "llama", "tied": True},
    "llama-bias": {"family": "llama", "attention_bias": True, "output_bias": True, "mlp_bias": True},
    "llama-llama3": {
        "family": "llama",
        "rotary": Rotary(10_000.0, "llama3", factor=8.0, original_context=64),
    },
    "llama-yarn": {
        "family": "llama",
        "rotary": Rotary(10_000.0, "yarn", factor=4.0, original_context=64, attention_factor=1.14),
    },
    "qwen2-window": {"family": "qwen2", "windows": (0, 0, 16, 16)},
    "seed_oss-bias": {"family": "seed_oss", "output_bias": True, "mlp_bias": True},
}


@pytest.fixture(scope="module", params=CASES)
def folder_and_reference(request, tmp_path_factory):
    """A tiny folder and transformers' model of it."""
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / request.param, seed=3, **CASES[request.param])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return folder, reference.eval()


@pytest.fixture(scope="module", params=["torch", "compiled"])
def pair(request, folder_and_reference):
    """One of our decoders, and transformers' model, on one folder."""
    folder, reference = folder_and_reference
    checkpoint = load_checkpoint(folder)
    backend = TorchBackend() if request.param == "torch" else CpuBackend(threads=2)
    if why := backend.refuses(checkpoint.config, "float32"):
        pytest.skip(f"the compiled decoder does not take this one: {why}")
    return backend.decoder(checkpoint.config, checkpoint.weights, "float32"), reference


def expected_logits(reference, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


def expected_last_logits(reference, texts: list[list[int]]) -> list[torch.Tensor]:
    """After each text, in one pass of transformers: what is put behind the shorter ones is seen by none of them."""
    longest = max(map(len, texts))
    with torch.inference_mode():
        logits = reference(torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])).logits.float()
    return [row[len(text) - 1] for row, text in zip(logits, texts, strict=True)]


def new_staircase(decoder: Decoder, taps=()) -> Staircase:
    return Texts(decoder, taps).new(200)


def our_logits(decoder: Decoder, staircase: Staircase, context, proposal=NOTHING) -> torch.Tensor:
    """Logits of all slots of context and proposal; only what the staircase lacks is computed."""
    with torch.inference_mode():
        staircase.align(np.array(context, np.int32), proposal)
        advance(decoder, [staircase], decoder.config.layers)
        return decoder.logits(states(staircase, 0, staircase.used))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(320), k=count)


def test_prefill_equals_transformers(pair):
    decoder, reference = pair
    tokens = random_tokens(100)
    found = our_logits(decoder, new_staircase(decoder), tokens)
    assert (found - expected_logits(reference, tokens)).abs().max() < 1e-4


def test_steps_equal_transformers(pair):
    decoder, reference = pair
    tokens, staircase = random_tokens(60, 1), new_staircase(decoder, taps=(1, 3))
    expected = expected_logits(reference, tokens)
    for length in [20, *range(21, 61)]:
        found = our_logits(decoder, staircase, tokens[:length])
        assert (found[length - 1] - expected[length - 1]).abs().max() < 1e-4


def random_tree(rng: random.Random, nodes: int) -> Proposal:
    parents = tuple(rng.randrange(-1, node) for node in range(nodes))
    return Proposal(tuple(rng.randrange(320) for _ in range(nodes)), parents)


def test_trees_equal_transformers(pair):
    decoder, reference = pair
    rng = random.Random(5)
    staircase, context = new_staircase(decoder), random_tokens(40, 2)
    for _ in range(4):
        tree = random_tree(rng, 7)
        found = our_logits(decoder, staircase, context, tree)
        expected_after = expected_last_logits(reference, [context + tree.path(node) for node in range(7)])
        for node, expected in enumerate(expected_after):
            assert (found[len(context) + node] - expected).abs().max() < 1e-4
        context = context + tree.path(rng.randrange(7)) + [rng.randrange(320)]  # keep a path, go on elsewhere


def test_an_accepted_path_is_not_computed_again(pair):
    decoder, _ = pair
    staircase, context = new_staircase(decoder), random_tokens(30)
    tree = Proposal((5, 6, 7, 8, 9), (-1, 0, 0, 2, 1))  # paths 5 6 9 and 5 7 8
    our_logits(decoder, staircase, context, tree)
    staircase.align(np.array([*context, 5, 7, 8, 11], np.int32), Proposal.chain([1, 2]))
    assert (staircase.heights[: staircase.used] > 0).tolist() == [True] * 33 + [False] * 3


@pytest.mark.parametrize("family", ["llama", "mistral", "smollm3"])
def test_layer_ranges_and_random_forgetting_change_nothing(family, tmp_path: Path):
    """Climbing in steps, in any order, with caches cut or dropped at random, gives the same logits."""
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, family, seed=4))
    decoder = TorchBackend().decoder(checkpoint.config, checkpoint.weights, "float32")
    rng = random.Random(1)
    staircase = new_staircase(decoder, taps=(1, 2))
    context = random_tokens(20, 3)
    for _ in range(60):
        tree = random_tree(rng, rng.randrange(6))
        with torch.inference_mode():
            staircase.align(np.array(context, np.int32), tree)
            advance(decoder, [staircase], rng.choice([1, 2, 4]))
            if rng.random() < 0.5:
                found = our_logits(decoder, staircase, context, tree)
                expected = our_logits(decoder, new_staircase(decoder), context, tree)
                assert (found - expected).abs().max() < 1e-4
        if rng.random() < 0.1:
            staircase = new_staircase(decoder, taps=(1, 2))
        cut = rng.choice([0, 0, 0, 1, 5])
        context = context[: len(context) - cut] + (tree.path(rng.randrange(len(tree))) if len(tree) else []) + [1]


def test_packed_sequences_equal_each_alone(pair):
    decoder, _ = pair
    contexts = [random_tokens(count, count) for count in (3, 50, 17)]
    trees = [random_tree(random.Random(seed), seed) for seed in (0, 4, 6)]
    texts = Texts(decoder)
    packed = [texts.new(200) for _ in contexts]
    with torch.inference_mode():
        for staircase, context, tree in zip(packed, contexts, trees, strict=True):
            staircase.align(np.array(context, np.int32), tree)
        advance(decoder, packed, decoder.config.layers)
    for staircase, context, tree in zip(packed, contexts, trees, strict=True):
        found = decoder.logits(states(staircase, 0, staircase.used))
        assert (found - our_logits(decoder, new_staircase(decoder), context, tree)).abs().max() < 1e-4


def test_every_layer_runs_once_for_a_kept_position(tmp_path: Path):
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    decoder = TorchBackend().decoder(checkpoint.config, checkpoint.weights, "float32")
    runs: dict[int, int] = {}
    plain_run = decoder.run

    def counted(memory, batch, hidden, start, stop):
        for layer in range(start, stop):
            runs[layer] = runs.get(layer, 0) + len(batch.positions)
        return plain_run(memory, batch, hidden, start, stop)

    decoder.run = counted  # type: ignore[method-assign]
    staircase, tokens = new_staircase(decoder, taps=(1, 2)), random_tokens(30)
    with torch.inference_mode():
        for length, layers in [(20, 1), (22, 1), (22, 2), (25, 1), (25, 4), (30, 2), (30, 4)]:
            staircase.align(np.array(tokens[:length], np.int32), Proposal())
            advance(decoder, [staircase], layers)
    assert runs == dict.fromkeys(range(4), 30)

"""A token's logits are the same bits whatever else its pass held: other rows, other texts, chain or tree, any cut."""

import random

import numpy as np
import pytest
import torch
from texts import Texts, states

import hierspec
from hierspec.backends.base import Decoder
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.cpu.packing import KINDS, pack_in_memory
from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.proposal import Proposal
from hierspec.scorers.climb import advance
from hierspec.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module", params=[(family, kind) for family in FAMILIES for kind in KINDS])
def tiny(request, tmp_path_factory):
    family, kind = request.param
    # Six (or twelve) heads on two for keys, and sizes that leave threads uneven shares.
    changes = {"heads": 6, "hidden": 96, "intermediate": 176}
    if kind.startswith("int"):
        changes = {"heads": 12, "hidden": 192, "intermediate": 320}
    folder = tiny_checkpoint(tmp_path_factory.mktemp("bits") / family, family, seed=5, **changes)
    checkpoint = load_checkpoint(folder, torch.bfloat16 if kind.startswith("bfloat16") else torch.float32)
    packed = pack_in_memory(checkpoint.config, checkpoint.weights, KINDS[kind])
    return CpuBackend(threads=2).with_weights(checkpoint.config, checkpoint.weights, packed)


def plain_logits(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """Token by token, one row a pass: the logits after every token."""
    staircase, found = Texts(decoder).new(), []
    with torch.inference_mode():
        for length in range(1, len(tokens) + 1):
            staircase.align(np.array(tokens[:length], np.int32), Proposal())
            advance(decoder, [staircase], decoder.config.layers)
            found.append(decoder.logits(states(staircase, length - 1, length)).cpu().numpy()[0])
    return np.array(found)


def check_anything_goes(decoder: Decoder, tokens: list[int], rng: random.Random, rounds: int) -> None:
    """Random widths, splits, trees, layer ranges and neighbours, always against one row a pass."""
    config, size = decoder.config, decoder.config.vocabulary
    expected = plain_logits(decoder, tokens)
    cuts = sorted(rng.sample(range(1, config.layers), min(2, config.layers - 1)))
    boundaries = (*cuts, config.layers)
    texts = Texts(decoder, cuts)
    mine, neighbour = texts.new(), texts.new()
    with torch.inference_mode():
        for _ in range(rounds):
            start = rng.randrange(1, len(tokens))
            depth = rng.randrange(0, min(20, len(tokens) - start) + 1)
            # The true continuation as the spine of a tree, wrong tokens anywhere beside it and between it.
            nodes, parents, spine, at = [], [], [], -1
            for place in range(depth):
                for _ in range(rng.choice([0, 0, 1, 2])):
                    nodes.append(rng.randrange(size))
                    parents.append(rng.randrange(-1, len(nodes) - 1))
                nodes.append(tokens[start + place])
                parents.append(at)
                at = len(nodes) - 1
                spine.append(at)
            other = [rng.randrange(size) for _ in range(rng.randrange(1, 60))]
            if rng.random() < 0.2:
                mine.release()
                mine = texts.new()
            mine.align(np.array(tokens[:start], np.int32), Proposal(tuple(nodes), tuple(parents)))
            neighbour.align(np.array(other, np.int32), Proposal())
            together = rng.choice([[mine], [mine, neighbour], [neighbour, mine]])
            for layer in rng.choice([[config.layers], [*cuts, config.layers], [cuts[0], config.layers]]):
                assert layer in boundaries
                advance(decoder, together, layer)
            found = decoder.logits(states(mine, start - 1, mine.used)).cpu().numpy()
            rows = [found[0], *(found[node + 1] for node in spine)]
            for place, row in enumerate(rows):
                assert (row.view(np.int32) == expected[start - 1 + place].view(np.int32)).all()


def test_tiny_models_of_every_family(tiny):
    rng = random.Random(1)
    tokens = [rng.randrange(tiny.config.vocabulary) for _ in range(70)]
    check_anything_goes(tiny, tokens, rng, rounds=25)


def test_the_number_of_threads_changes_nothing(tmp_path):
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    tokens = [random.Random(2).randrange(320) for _ in range(40)]
    one, three = (CpuBackend(n).decoder(checkpoint.config, checkpoint.weights, "float32") for n in (1, 3))
    assert (plain_logits(one, tokens) == plain_logits(three, tokens)).all()


@pytest.mark.model
def test_the_default_model():
    torch.set_num_threads(2)
    model = hierspec.load()
    if not model.decoder.backend.exact:
        pytest.skip("the default model does not run on the compiled decoder here")
    text = "The lighthouse keeper climbed the narrow stairs. " * 8
    check_anything_goes(model.decoder, model.encode(text)[:90], random.Random(3), rounds=20)

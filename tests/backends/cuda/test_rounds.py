"""Rounds that draft and verify on the device: the same texts, drafts and caches as tier by tier."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hierspec
from hierspec import Sampling
from hierspec.core.draft_tree import likely_tree
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING
from hierspec.core.stats import TierStats
from hierspec.scorers.drafters import Layer
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

GPU = torch.cuda.is_available()
SIZES = {"heads": 2, "kv_heads": 1, "hidden": 64, "head_size": 32, "intermediate": 64, "layers": 2, "eos_ids": ()}
PROMPT = [5, 9, 40, 17, 3, 8, 11]
ROUNDS = 150 if GPU else 3  # on a GPU beyond the first block of keys


@pytest.fixture(scope="module")
def model(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("rounds")
    tiny_checkpoint(folder / "model", "llama", **SIZES)
    tiny_pack(folder / "pack", folder / "model", exits=(1,), taps=(1,))
    return hierspec.load(
        folder / "model", backend="cuda", dtype="bfloat16", device=str(device), pack=folder / "pack", kv_memory=1 << 24
    )


def drafted_apart(reference, other, ask, answer, tree):
    """The tokens that the drafter alone would put at the nodes of a tree."""
    paths, picks, tokens = {-1: []}, {}, []
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if parent not in picks:
            context = np.append(ask.context, paths[parent]).astype(np.int32)
            one = replace(ask, scorer=reference, request=other, context=context, candidates=4, leads=True)
            picks[parent] = reference.score([one])[0].picks[0]
        tokens.append(int(picks[parent][rank]))
        paths[node] = [*paths[parent], answer.draft.tokens[node]]
    return tokens


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=700), Sampling(temperature=0.9, seed=5, max_tokens=700)])
@pytest.mark.parametrize("goes_on", [True, False])
def test_rounds_draft_as_the_drafter_and_write_as_the_model(model, sampling, goes_on):
    catalogue = model.assembler.catalogue
    target, drafter = catalogue.whole(2), catalogue.feature("feature")
    tree = likely_tree(*((31, 5, 4) if GPU else (5, 2, 3)), 0.7)
    rounds = catalogue.rounds(target, drafter, tree, tree)
    pool = StaircasePool(drafter.layer.decoder, drafter.layer.pool.budget)
    reference = replace(drafter, writer=None, layer=Layer(drafter.layer.decoder, pool))
    options = {"temperature": sampling.temperature, "seed": 5, "max_tokens": 6 * ROUNDS}
    plain = model.generate(PROMPT, plan="plain", **options).tokens
    request, other = (model.request(PROMPT, "eagle", sampling) for _ in range(2))  # the other asks the drafter alone
    text = [*PROMPT, plain[0]]
    request.output = other.output = text[len(PROMPT) :]
    target.score([Ask(target, np.array(PROMPT, np.int32), NOTHING, request, 1, False, TierStats(""))])
    for _ in range(ROUNDS):
        ask = Ask(rounds, np.array(text, np.int32), NOTHING, request, 1, False, TierStats(""), goes_on=goes_on)
        if not rounds.takes(request, len(text) - 1):
            [answer] = target.score([replace(ask, scorer=target)])
            assert GPU
        else:
            [answer] = rounds.score([ask])
            assert answer.draft.tokens == tuple(drafted_apart(reference, other, ask, answer, tree))
        node, written = -1, [int(answer.picks[0, 0])]
        for child, (token, parent) in enumerate(zip(answer.draft.tokens, answer.draft.parents, strict=True)):
            if parent == node and token == written[-1]:
                node = child
                written.append(int(answer.picks[1 + child, 0]))
        text += written
        request.output += written
        assert text == [*PROMPT, *plain][: len(text)]
    request.cancel()
    other.cancel()


@pytest.mark.skipif(not GPU, reason="minutes in Triton's interpreter")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plans_draft_in_fused_rounds_and_write_the_plain_text(model, temperature):
    for seed in range(6):
        options = {"max_tokens": 200, "temperature": temperature, "seed": seed}
        prompt = [7 + seed, *PROMPT]
        plain = model.generate(prompt, plan="plain", **options).tokens
        for plan in ("eagle", "auto"):
            assert model.generate(prompt, plan=plan, **options).tokens == plain
    torch.cuda.synchronize()

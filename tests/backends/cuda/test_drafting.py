"""A drafter's tokens in one call, in Triton: picks, leads and caches of one token after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hierspec
from hierspec import Sampling
from hierspec.backends.cuda.drafting import CudaDraftWriter
from hierspec.core.foresight import SUREST
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING
from hierspec.core.stats import TierStats
from hierspec.scorers.drafters import Layer
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

SIZES = {"heads": 2, "kv_heads": 1, "hidden": 64, "head_size": 32, "intermediate": 64, "layers": 2, "eos_ids": ()}


@pytest.fixture(scope="module")
def model(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("drafting")
    tiny_checkpoint(folder / "model", "llama", **SIZES)
    tiny_pack(folder / "pack", folder / "model", exits=(1,), taps=(1,))
    return hierspec.load(
        folder / "model", backend="cuda", dtype="bfloat16", device=str(device), pack=folder / "pack", kv_memory=1 << 24
    )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=5), Sampling(top_k=9, temperature=1)])
def test_several_tokens_are_those_of_one_after_the_other(model, sampling):
    scorer = model.assembler.catalogue.feature("feature")
    assert isinstance(scorer.writer, CudaDraftWriter)
    pool = StaircasePool(scorer.layer.decoder, scorer.layer.pool.budget)
    reference = replace(scorer, writer=None, layer=Layer(scorer.layer.decoder, pool))
    scorer.forget()  # what another sampling has left would be there already
    context = np.array([5, 9, 40, 17], np.int32)
    request = model.request(context.tolist(), "draft", sampling)
    ahead = np.ones((2, SUREST + 1), bool)
    ask = Ask(scorer, context, NOTHING, request, 3, False, TierStats(""), True, False, ahead)
    [answer] = scorer.score([ask])
    answers = [answer, *answer.ahead]
    assert len(answers) == (1 if sampling.top_k else 3)

    def followed(context, token):
        context = np.append(context, token).astype(np.int32)
        return context, reference.score([replace(ask, context=context, ahead=None)])[0]

    for each in answers:
        [right] = reference.score([replace(ask, context=context, ahead=None)])
        assert each.picks.tolist() == right.picks.tolist()
        assert each.leads.tolist() == right.leads.tolist()
        context = np.append(context, each.picks[0, 0]).astype(np.int32)
    for step, each in enumerate(answers):
        after = len(answers) - 1 - step
        assert [len(branch) for branch in each.branches] == ([] if sampling.top_k else [after, after])
        for branch, runner_up in zip(each.branches, each.picks[0, 1:].tolist(), strict=bool(each.branches)):
            text, token = context[: len(context) - len(answers) + step], runner_up
            for follower, lead in branch:
                text, right = followed(text, token)
                assert (follower, lead) == (right.picks[0, 0], right.leads[0])
                token = follower
    reference.score([replace(ask, context=context[:-1], ahead=None)])  # the branches replaced the chain there
    one, other = (s.layer.pool._running[request] for s in (scorer, reference))
    entries = len(context) - 1
    for numbers in ("keys", "values"):
        mine, theirs = (getattr(s.memory, numbers)[:, :, s.slots[:entries]] for s in (one, other))
        assert torch.equal(mine, theirs)


def test_a_plan_with_a_drafter_writes_the_plain_text(model):
    options = {"max_tokens": 6, "temperature": 0.0}
    plain = model.generate([5, 9, 40, 17], plan="plain", **options)
    assert model.generate([5, 9, 40, 17], plan="draft", **options).tokens == plain.tokens

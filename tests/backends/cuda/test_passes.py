"""Passes in one call, in Triton: the picks, leads and caches of layers, head and picks one after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hierspec
from hierspec import Sampling
from hierspec.backends.base import Batch
from hierspec.backends.cuda.passes import CudaPassWriter
from hierspec.backends.cuda.work import Work, steps_of, work_of
from hierspec.core.foresight import SUREST
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.stats import TierStats
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import tiny_checkpoint

SIZES = {"heads": 2, "kv_heads": 1, "hidden": 64, "head_size": 32, "intermediate": 64, "layers": 2, "eos_ids": ()}
TREE = Proposal((3, 4, 5, 6), (-1, 0, 0, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("passes")
    tiny_checkpoint(folder, "llama", **SIZES)
    return hierspec.load(folder, backend="cuda", dtype="bfloat16", device=str(device), kv_memory=1 << 24)


@pytest.fixture
def both(model):
    """The target as it is, and one that runs part by part on memory of its own."""
    scorer = model.assembler.catalogue.whole(2)
    model.assembler.catalogue.whole(1)  # an exit, whose states are kept
    assert isinstance(scorer.writer, CudaPassWriter)
    scorer.forget()
    pool = StaircasePool(scorer.decoder, scorer.pool.budget)
    pool.add_tap(1)
    return scorer, replace(scorer, writer=None, pool=pool)


def asks_of(model, scorer, contexts, proposal, sampling, **more):
    return [
        Ask(scorer, np.array(context, np.int32), proposal, model.request(context[:2], "plain", sampling), 2, False,
            TierStats(""), True, **more)
        for context in contexts
    ]  # fmt: skip


def same(answer, right):
    assert answer.picks.tolist() == right.picks.tolist()
    assert answer.leads.tolist() == right.leads.tolist()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=5)])
@pytest.mark.parametrize("proposal", [NOTHING, Proposal.chain([7, 8, 9]), TREE])
def test_they_are_the_answers_of_one_part_after_the_other(model, both, sampling, proposal):
    scorer, reference = both
    contexts = [[5, 9, 40, 17], [6, 2, 11]]
    for each in both:  # all but the last token of each is computed
        each.score(asks_of(model, each, [context[:-1] for context in contexts], NOTHING, sampling))
    asks, others = (asks_of(model, each, contexts, proposal, sampling) for each in both)
    found = scorer.writer
    for answer, right in zip(scorer.score(asks), reference.score(others), strict=True):
        same(answer, right)
    assert scorer.writer is found


def test_what_an_exit_computed_is_gone_on_with(model, both):
    scorer, reference = both
    exit = model.assembler.catalogue.whole(1)
    [ask] = asks_of(model, scorer, [[5, 9, 40, 17]], Proposal.chain([7, 8]), Sampling())
    scorer.score([replace(ask, context=ask.context[:-1], proposal=NOTHING)])
    before = scorer.decoder.layer_rows
    exit.score([replace(ask, scorer=exit)])
    assert scorer.decoder.layer_rows - before == 3  # rows times layers
    [answer] = scorer.score([ask])
    assert scorer.decoder.layer_rows - before == 6
    same(answer, reference.score(asks_of(model, reference, [[5, 9, 40, 17]], Proposal.chain([7, 8]), Sampling()))[0])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=5)])
def test_several_tokens_are_those_of_one_after_the_other(model, both, sampling):
    scorer, reference = both
    context = [5, 9, 40, 17]
    ahead = np.ones((5, SUREST + 1), bool)
    [ask] = asks_of(model, scorer, [context], NOTHING, sampling, ahead=ahead)
    scorer.score([replace(ask, context=ask.context[:-1], ahead=None)])
    [answer] = scorer.score([ask])
    answers = [answer, *answer.ahead]
    assert len(answers) == 6
    for each in answers:
        [right] = reference.score([replace(ask, context=np.array(context, np.int32), ahead=None)])
        same(each, right)
        context.append(int(each.picks[0, 0]))
    one, other = (each.pool._running[ask.request] for each in both)
    entries = len(context) - 1
    assert one.tokens[:entries].tolist() == context[:-1]
    for numbers in ("keys", "values", "all_states"):
        mine, theirs = (getattr(s.memory, numbers)[..., s.slots[:entries], :] for s in (one, other))
        assert torch.equal(mine, theirs)


def test_it_stops_where_the_text_ends(model, both):
    scorer, _ = both
    [ask] = asks_of(model, scorer, [[5, 9, 40, 17]], NOTHING, Sampling(), ahead=np.ones((4, SUREST + 1), bool))
    scorer.score([replace(ask, context=ask.context[:-1], ahead=None)])
    [answer] = scorer.score([ask])
    ending = int(answer.ahead[1].picks[0, 0])
    first = [int(each.picks[0, 0]) for each in (answer, *answer.ahead)].index(ending)
    scorer.forget()
    ask.request.stop_ids = frozenset({ending})
    scorer.score([replace(ask, context=ask.context[:-1], ahead=None)])
    assert len(scorer.score([ask])[0].ahead) == first


def test_plain_decoding_writes_several_tokens_a_call(model):
    options = {"max_tokens": 11, "temperature": 0.8, "seed": 3}
    plain = model.generate([5, 9, 40, 17], plan="plain", **options)
    together = model.generate_many([[5, 9, 40, 17], [6, 2, 11]], plan="plain", **options)
    assert together[0].tokens == plain.tokens
    assert len(plain.tokens) == 11
    assert plain.stats.passes == 11


@pytest.mark.parametrize("windows", [(0, 0), (300, 300), (0, 300)])
def test_steps_are_the_passes_of_single_rows(windows):
    table, slots = np.arange(20)[::-1].copy(), np.arange(100, 105)
    for position in (0, 254, 700):
        steps = steps_of(position, slots, table, windows)
        for step, numbers in enumerate(steps.numbers):
            at = position + step
            batch = Batch(
                np.array([at]), slots[step : step + 1], np.array([0, 1]), table[None], np.array([at + 1]),
                np.zeros(2, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64),
            )  # fmt: skip
            window = max(windows) if all(windows) else 0
            one: Work = work_of(batch, 2, window, 0)
            assert numbers[:7].tolist() == one.numbers[:7].tolist()
            mine, theirs = (
                {tuple(piece[:11]) for piece in work.reshape(-1, 16).tolist() if piece[1]}
                for work in (numbers[7:], one.numbers[7:])
            )
            if window:  # all steps begin with the block in which the first one's window begins
                assert {piece[2] for piece in mine} >= {piece[2] for piece in theirs}
            else:
                assert mine == theirs


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=5)])
def test_calls_begun_before_they_are_asked_for_give_the_same_tokens(model, both, sampling):
    """Some are taken up; others are lost, since another context, request or proposal is asked for."""
    scorer, reference = both
    first = [5, 9, 40, 17]
    [ask], [other] = (
        asks_of(model, scorer, [first], NOTHING, sampling),
        asks_of(model, reference, [first], NOTHING, sampling),
    )
    context, used = ask.context, 0
    for each in (ask, other):
        each.scorer.score([replace(each, context=each.context[:-1])])
    for number, (proposal, steps) in enumerate([(NOTHING, 7), (NOTHING, 7), (Proposal.chain([7, 8]), 0), (NOTHING, 7),
                                                (NOTHING, 2), (NOTHING, 7), (NOTHING, 7)]):  # fmt: skip
        ahead = np.ones((steps, SUREST + 1), bool) if steps else None
        begun = scorer.writer._begun
        [answer] = scorer.score([replace(ask, context=context, proposal=proposal, ahead=ahead, goes_on=steps == 7)])
        used += begun is not None and number in (1, 4, 6)
        assert len(answer.ahead) == (3 if steps == 7 else steps)
        for each in (answer, *answer.ahead):
            [right] = reference.score([replace(other, context=context, proposal=proposal)])
            same(each, right)
            context = np.append(context, each.picks[0, 0]).astype(np.int32)
        if number == 2:  # another text takes a turn
            [stranger] = asks_of(model, scorer, [[6, 2, 11]], NOTHING, sampling)
            scorer.score([stranger])
    assert used >= 2

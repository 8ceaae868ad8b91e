"""From a plan to a hierarchy that runs: with a target, and without one where a host runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hierspec
from hierspec import HierspecError, Plan, Sampling, TierPlan
from hierspec.assembly.assembler import Assembler
from hierspec.assembly.drafts import LoadOptions
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.interfaces import Block
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore
from hierspec.testing.packs import tiny_eagle
from hierspec.text.tokenizer import Tokenizer

PROMPT = [1, 5, 9, 5, 9, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    # Drafts of one seed: their first weights agree, so that some tokens of the smaller one are accepted.
    tiny_checkpoint(root / "target", "llama", layers=6)
    tiny_checkpoint(root / "draft", "qwen3", layers=2, seed=1)
    tiny_checkpoint(root / "smaller", "qwen3", layers=1, seed=1)
    tiny_checkpoint(root / "foreign", "llama", vocabulary=400)
    return root


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request: pytest.FixtureRequest, folders: Path) -> hierspec.LanguageModel:
    return hierspec.load(folders / "target", backend=request.param)


@pytest.fixture
def host(folders: Path, model: hierspec.LanguageModel, tmp_path: Path) -> Assembler:
    """Of a target whose weights are somewhere else: its tokenizer and the size of its head are enough."""
    tokenizer = Tokenizer.from_folder(folders / "target")
    vocabulary = Vocabulary("the model", tokenizer, model.config.vocabulary)
    return Assembler(vocabulary, LoadOptions(backend=model.backend), stores=tmp_path / "stores")


def block(hierarchy: Hierarchy, request: Request, room: int = 20) -> list[Any]:
    """What tier 1 writes after the request's text."""
    context = np.array([*request.prompt, *request.output], np.int32)
    extension = hierarchy.extend(1, context, room, Block(gather=min(hierarchy.tiers[1].gather, room)), request)
    ask = next(extension)
    while True:
        [answer] = ask.scorer.score([ask])
        try:
            ask = extension.send(answer)
        except StopIteration as finished:
            return list(finished.value.written)


def ladder(folders: Path, rule: str = "coupled") -> Plan:
    return Plan(
        rule=rule,
        stores=("context",),
        merge=True,
        tiers=(
            TierPlan(draft=str(folders / "draft"), gather=4, stores=("context",), candidates=2, merge=True),
            TierPlan(draft=str(folders / "smaller"), gather=2, until="correction"),
        ),
    )


@pytest.mark.parametrize("rule", ["coupled", "residual"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_without_a_target_tier_1_writes_what_it_writes_under_one(
    model: hierspec.LanguageModel, host: Assembler, folders: Path, rule: str, temperature: float
) -> None:
    plan, sampling = ladder(folders, rule), Sampling(max_tokens=40, temperature=temperature, seed=7)
    written = []
    for assembler in (model.assembler, host):
        hierarchy = assembler.hierarchy(plan)
        request = Request(PROMPT, sampling, hierarchy, model.stop_ids, model.config.context)
        blocks, stored = [], []
        for _ in range(4):
            context = np.array([*request.prompt, *request.output], np.int32)
            stored.append(request.stores["context"].propose(context, plan.budget))
            blocks.append(block(hierarchy, request))
            tokens = [position.token for position in blocks[-1]]
            request.output += tokens
            request.stores["context"].learn(tokens)
        request.cancel()
        written.append((blocks, stored))
    (blocks, stored), (host_blocks, host_stored) = written
    assert stored == host_stored
    assert any(proposal.tokens for proposal in stored)
    for real, hosted in zip(blocks, host_blocks, strict=True):
        assert len(real) >= 4
        for one, other in zip(real, hosted, strict=True):
            assert (one.token, one.source, one.how) == (other.token, other.source, other.how)
            for (token, distribution), (other_token, other_distribution) in zip(
                one.candidates, other.candidates, strict=True
            ):
                assert token == other_token
                assert (distribution is None) == (other_distribution is None)
                if distribution is not None:
                    np.testing.assert_array_equal(distribution, other_distribution)
    if temperature:  # tiny random models seldom agree on the likeliest token
        assert len({position.source for real in blocks for position in real}) > 1


def test_a_host_that_verifies_writes_what_plain_decoding_writes(
    model: hierspec.LanguageModel, host: Assembler, folders: Path
) -> None:
    plain = list(model.generate(PROMPT, plan="plain", max_tokens=30).tokens)
    hierarchy = host.hierarchy(ladder(folders))
    request = Request(PROMPT, Sampling(max_tokens=30), hierarchy, model.stop_ids, model.config.context)
    passes = 0
    while len(request.output) < len(plain):
        drafted = [position.token for position in block(hierarchy, request)]
        # The host's greedy tokens here are what plain decoding wrote.
        expected = plain[len(request.output) :]
        accepted = next((i for i, pair in enumerate(zip(drafted, expected, strict=False)) if pair[0] != pair[1]), None)
        count = min(len(drafted), len(expected)) if accepted is None else accepted
        tokens = expected[: count + 1]
        request.output += tokens
        for store in request.stores.values():
            store.learn(tokens)
        passes += 1
    assert request.output == plain
    assert passes <= len(plain)
    request.cancel()


def test_tiers_below_are_those_of_the_hierarchy(model: hierspec.LanguageModel, host: Assembler, folders: Path) -> None:
    plan = ladder(folders)
    for assembler in (model.assembler, host):
        below, tiers = assembler.tiers_below(plan), assembler.hierarchy(plan).tiers
        assert [tier.scorer for tier in below] == [tier.scorer for tier in tiers[1:]]
        assert [tier.gather for tier in below] == [4, 2]
    assert [tier.scorer.name for tier in host.tiers_below(plan)] == ["draft draft", "draft smaller"]
    assert host.tiers_below(Plan(stores=("context",))) == ()


def test_a_host_scores_its_own_target(host: Assembler) -> None:
    hierarchy = host.hierarchy(Plan(stores=("context",)))
    assert hierarchy.tiers[0].scorer.vocabulary == host.vocabulary.size
    with pytest.raises(HierspecError, match="outside the model's vocabulary"):
        Request([host.vocabulary.size], Sampling(), hierarchy)
    request = Request(PROMPT, Sampling(), hierarchy)
    with pytest.raises(HierspecError, match="the host scores its proposals"):
        hierarchy.tiers[0].scorer.score([request.ask(None)])
    with pytest.raises(HierspecError, match="the model runs in a host"):
        _ = host.catalogue


@pytest.mark.parametrize(
    ("tier", "told"),
    [
        ({"exit_layer": 2}, "is an exit of the target .*use a draft model"),
        ({"exit_depth": 0.5}, "is an exit of the target .*use a draft model"),
        ({"skip_layers": (1, 2)}, "has skip_layers .*use a draft model"),
        ({"draft": "feature"}, 'has draft = "feature", a feature drafter.*use a draft model'),
        ({"draft": "EAGLE"}, 'has draft = .*eagle", a feature drafter.*use a draft model'),
        ({"draft": "small"}, 'has draft = "small".*use a draft model'),
        ({"draft": "DRAFT", "vocabulary": "small"}, 'has vocabulary = "small".*leave vocabulary out'),
        ({"draft": "DRAFT", "agrees": 0.5}, "has agrees .*leave agrees out"),
    ],
)
def test_what_needs_the_target_is_refused_with_its_tier(
    host: Assembler, folders: Path, tmp_path: Path, model: hierspec.LanguageModel, tier: dict[str, Any], told: str
) -> None:
    if tier.get("draft") == "EAGLE":
        tier = {"draft": str(tiny_eagle(tmp_path / "eagle", model.config))}
    elif tier.get("draft") == "DRAFT":
        tier = {**tier, "draft": str(folders / "draft")}
    rates = {"agrees": 0.5} if "agrees" in tier else {}
    above = TierPlan(draft=str(folders / "draft"), **rates)
    for tiers, level in (((TierPlan(**tier),), 1), ((above, TierPlan(**tier)), 1 if rates else 2)):
        with pytest.raises(HierspecError, match=f"^Tier {level} {told}") as error:
            host.hierarchy(Plan(tiers=tiers))
        assert "\n" not in str(error.value)
        assert "the model keeps in its host" in str(error.value)


def test_a_host_cannot_weigh_what_it_has_not_measured(host: Assembler, folders: Path) -> None:
    draft = TierPlan(draft=str(folders / "draft"), until="worth")
    for plan, key in ((Plan.named("hd+", 30), "adapt"), (Plan(tiers=(draft,)), 'until = "worth"')):
        with pytest.raises(HierspecError, match=rf"^{key} weighs .*plan\.fixed\(\)\)\.$"):
            host.hierarchy(plan)
        assert host.hierarchy(plan.fixed()).tiers[0].budget == plan.budget


def test_a_draft_of_another_vocabulary_is_refused_for_a_host_too(host: Assembler, folders: Path) -> None:
    with pytest.raises(HierspecError, match="another vocabulary than the model"):
        host.hierarchy(Plan(tiers=(TierPlan(draft=str(folders / "foreign")),)))


def test_a_draft_model_is_opened_once_and_counted(model: hierspec.LanguageModel, folders: Path) -> None:
    source, apart = str(folders / "smaller"), model.apart()
    opened = model.assembler.drafts.catalogue(source)
    assert apart.assembler.drafts.catalogue(source) is opened  # weights are shared, what was learnt is not
    assert model.assembler.drafts.catalogue(source, model.weights) is opened
    model.generate(PROMPT, plan=Plan(tiers=(TierPlan(draft=source),)), max_tokens=8)
    assert opened.pool.bytes_held() > 0
    memory = model.memory()
    assert memory["weights"] >= model.decoder.weight_bytes + opened.decoder.weight_bytes
    assert memory["texts"] >= opened.pool.bytes_held()
    model.forget()
    assert opened.pool.bytes_held() == 0


def test_stores_apart_begin_again_and_added_ones_are_shared(host: Assembler) -> None:
    store = FakeStore("mine", lambda context, budget: Proposal.chain([3]))
    host.stores.add(store)
    assert host.stores.open(("mine", "corpus?", "history")) == (store, host.stores.open(("history",))[0])
    other = host.apart()
    assert other.stores.open(("mine",)) == (store,)
    assert other.stores.open(("history",)) != host.stores.open(("history",))
    assert host.stores.home.folder.name == "stores"

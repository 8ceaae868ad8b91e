"""What is kept between runs: costs as passes have shown them, and how often drafts were accepted; never text."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hierspec
from hierspec.assembly.learnt import Learnt
from hierspec.assembly.measured_costs import CostBook
from hierspec.checkpoints.packs import LEARNT
from hierspec.core.errors import HierspecError
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.blocks import WhileWorthwhile
from hierspec.pacing.costs import Costs
from hierspec.pacing.healing import HealingCosts
from hierspec.pacing.lengths import Lengths
from hierspec.pacing.routing import Route, Router
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack
from hierspec.train.prior import add_prior, learn_prior

COSTS = Costs((1, 32), (1e-3, 4e-3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", "llama", layers=4)
    tiny_pack(root / "pack", root / "target", exits=(2,))
    return root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    monkeypatch.delenv("HIERSPEC_LEARNT", raising=False)
    return tmp_path


def load(folders, **options):
    return hierspec.load(folders / "target", pack=folders / "pack", backend="torch", **options)


def kept(cache) -> list[dict]:
    return [json.loads(path.read_text()) for path in (cache / "learnt").glob("*.json")]


def test_a_new_process_begins_where_the_last_one_ended(folders, cache):
    with load(folders) as first:
        text = first.generate("ab ab ab ab", plan="auto", max_tokens=40).text
    learnt = first.assembler.learnt()
    assert learnt["feature drafter for target"]["blocks"] > 0
    second = load(folders)
    assert second.generate("ab ab ab ab", plan="auto", max_tokens=40).text == text
    again = second.assembler.learnt()["feature drafter for target"]
    assert again["blocks"] >= learnt["feature drafter for target"]["blocks"]


def test_what_is_kept_holds_counts_and_names_and_no_text(folders, cache):
    with load(folders) as model:
        model.generate("a secret that nobody may read", plan="auto", max_tokens=30)
    [document] = kept(cache)

    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from (key, *texts(item))
        elif isinstance(value, list):
            for item in value:
                yield from texts(item)

    keys = {"blocks", "speed", "rounds", "gains", "beside", "drafted", "acceptance", "texts", "tokens"}
    names = {"lengths", "drafts for target", "feature drafter for target"}
    sources = {"target", "feature drafter", "context", "history"}
    assert set(texts(document["parts"])) <= keys | names | sources


@pytest.mark.parametrize("off", ["option", "environment"])
def test_it_can_be_switched_off(folders, cache, monkeypatch, off):
    if off == "environment":
        monkeypatch.setenv("HIERSPEC_LEARNT", "off")
    with load(folders, keep_learnt=off != "option") as model:
        model.generate("ab ab ab", plan="auto", max_tokens=10)
    assert not kept(cache)


def test_it_can_be_deleted_and_a_damaged_file_is_as_good_as_none(folders, cache):
    with load(folders) as model:
        text = model.generate("ab ab ab", plan="auto", max_tokens=10).text
    [path] = (cache / "learnt").glob("*.json")
    for content in ("", "{", '{"parts": 5}', '{"parts": {"lengths": null, "drafts for target": {"speed": "x"}}}'):
        path.write_text(content)
        assert load(folders).generate("ab ab ab", plan="auto", max_tokens=10).text == text
    Learnt(model.about).forget()
    assert not kept(cache)


def test_the_file_stays_small(cache):
    learnt = Learnt(["a model"])
    for number in range(100):
        learnt.keep({f"part {number}": {"acceptance": [["s", 1, 1, 2.0, 1.0]] * 10}})
    assert len(learnt.parts()) == 32
    assert "part 99" in learnt.parts()
    learnt.keep({"huge": {"acceptance": [["s", 1, 1, 2.0, 1.0]] * 100_000}})
    assert "huge" not in learnt.parts()


def test_apart_begins_with_the_prior_alone(folders, cache):
    model = load(folders)
    model.generate("ab ab ab ab", plan="auto", max_tokens=40)
    other = model.apart()
    other.plan("auto")
    assert not other.assembler.learnt().get("drafts for target", {}).get("acceptance")
    other.close()
    assert not kept(cache)


def test_a_pack_ships_a_prior(folders, cache, tmp_path):
    tiny_pack(tmp_path / "pack", folders / "target", exits=(2,))
    model = hierspec.load(folders / "target", pack=tmp_path / "pack", backend="torch")
    prompts = [BenchPrompt(task, ("ab ab ab",)) for task in ("qa", "chat", "qa")]
    learnt = learn_prior(model, prompts, max_tokens=20)
    assert "speed" not in learnt["feature drafter for target"]  # of this machine
    add_prior(model, learnt, tmp_path / "pack")
    fresh = hierspec.load(folders / "target", pack=tmp_path / "pack", backend="torch")
    assert fresh.pack.learnt() == json.loads(json.dumps(learnt))
    fresh.generate("ab", plan="auto", max_tokens=2)
    assert fresh.assembler.learnt()["feature drafter for target"]["blocks"] >= 1
    (tmp_path / "pack" / LEARNT).write_text("{}")
    with pytest.raises(HierspecError, match="damaged"):
        hierspec.load(folders / "target", pack=tmp_path / "pack", backend="torch")


def parts():
    policy = WhileWorthwhile(COSTS)
    return [Lengths(), Appraiser(COSTS), policy, Router([Route(policy, COSTS), Route(WhileWorthwhile(COSTS), COSTS)])]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_document_is_taken_or_refused_by_the_parts(data):
    for part in parts():
        document = {key: data.draw(JSON) for key in part.learnt()}
        try:
            part.begin_with(document)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError):
            continue
        part.learnt()


def test_what_a_part_has_learnt_it_can_begin_with():
    for part, other in zip(parts(), parts(), strict=True):
        other.begin_with(json.loads(json.dumps(part.learnt())))
        assert other.learnt() == part.learnt()


@pytest.mark.measures_costs
def test_healed_costs_are_kept(folders, cache):
    model = load(folders)
    scorer = model.assembler.target
    costs = model.costs.costs(scorer)
    assert isinstance(costs, HealingCosts)
    assert len(costs.spread) == len(costs.rows)
    for _ in range(150):
        costs.observe(1, 5.0)  # seconds: far from what any machine takes
    model.close()
    again = CostBook(*model.costs._about).costs(scorer)
    assert again.seconds(1) == pytest.approx(5.0, rel=0.2)
    [path] = (path for path in (cache / "costs").glob("*.json") if "dtype" not in path.name)
    spoilt = json.loads(path.read_text()) | {"seconds": [0.0] * len(costs.rows)}
    for content in ("{}", json.dumps(spoilt), "[1]"):
        path.write_text(content)
        assert CostBook(*model.costs._about).costs(scorer).seconds(1) < 1.0  # measured again

"""Traces: what is recorded is what tiers really say, and a plan played on traces does what the real one does."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hierspec
from hierspec import HierspecError, Plan, Sampling, TierPlan
from hierspec.core.stats import Stats
from hierspec.planner.simulation import recording
from hierspec.planner.simulation.acceptance import TARGET, Share, acceptance, agreement
from hierspec.planner.simulation.cost_measuring import cost_table, measure_parts
from hierspec.planner.simulation.cost_table import Cell, CostTable, Curve, Parts
from hierspec.planner.simulation.prediction import Overhead, measured_overhead, predict
from hierspec.planner.simulation.priced import PricedScorers
from hierspec.planner.simulation.recording import kept_traces, record_traces, scorers_of
from hierspec.planner.simulation.traces import Picks, Trace, load_traces, save_traces, scorer_key
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

PROMPTS = [("one", [5, 9, 17, 4, 33]), ("two", [40, 41, 40, 41, 40]), ("one", [7] * 30)]
TIERS = [
    TierPlan(exit_layer=3, head="shared", vocabulary="full"),
    TierPlan(exit_layer=2),
    TierPlan(draft="feature", vocabulary="full"),
    TierPlan(draft="small", vocabulary="full"),
    TierPlan(skip_layers=(1,)),
]
TEMPERATURES = [0.0, 0.8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """It writes few different tokens, so that even random drafts are sometimes right."""
    root = tmp_path_factory.mktemp("traces")
    folder = tiny_checkpoint(root / "tiny", "llama")
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = torch.zeros_like(head)
    weights["lm_head.weight"][10:15] = 2 * head[10:15]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return hierspec.load(folder, pack=tiny_pack(root / "pack", folder))


@pytest.fixture(scope="module", params=TEMPERATURES)
def sampling(request):
    """No text ends early: what a draft says off the text is not known, and so not whether it ends there."""
    return Sampling(max_tokens=24, temperature=request.param, seed=11, logit_bias={2: -math.inf})


@pytest.fixture(scope="module")
def traces(model, sampling):
    return record_traces(model, PROMPTS, TIERS, 24, sampling)


@pytest.fixture(scope="module")
def table(model):
    return measure_parts(scorers_of(model, TIERS), contexts=(16, 64), batches=(1, 2), widths=(1, 2, 4))


def test_the_texts_are_the_targets(model, sampling, traces):
    assert [trace.task for trace in traces] == ["one", "two", "one"]
    for trace, (_, prompt) in zip(traces, PROMPTS, strict=True):
        assert trace.output == model.generate(prompt, plan="plain", sampling=sampling).tokens
        assert trace.prompt == tuple(prompt)
        assert len(trace.tiers) == len(TIERS)


def drafted(model, plan, prompt, sampling):
    """(tokens written, what was drafted then) for every pass of the target in a real run."""
    target = model.hierarchy(plan).tiers[0].scorer
    found, score = [], target.score

    def watched(asks):
        found.extend((len(ask.context) - len(prompt), ask.proposal.tokens) for ask in asks)
        return score(asks)

    object.__setattr__(target, "score", watched)
    try:
        model.forget()
        generation = model.generate(prompt, plan=plan, sampling=sampling)
    finally:
        object.__delattr__(target, "score")
    return found, generation


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: str(tier.exit_layer or tier.draft or "skip"))
def test_picks_are_what_the_real_plan_drafts(model, sampling, traces, tier):
    """Up to the first draft that does not stand, and that one too, the real drafts are the recorded picks."""
    key = scorer_key(scorers_of(model, [tier])[1])
    compared = 0
    for trace, (_, prompt) in zip(traces, PROMPTS, strict=True):
        picks = trace.tiers[key]
        for written, tokens in drafted(model, Plan(tiers=(replace(tier, gather=4),)), prompt, sampling)[0]:
            for depth, token in enumerate(tokens):
                assert token == picks.first(depth)[written + depth]
                compared += 1
                if token != trace.output[written + depth]:
                    break
    assert compared > 40


def counters(stats: Stats):
    names = ("name", "calls", "written", "proposed", "accepted", "proposed_at", "accepted_at")
    return [[getattr(tier, name) for name in names] for tier in stats.tiers]


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: str(tier.exit_layer or tier.draft or "skip"))
@pytest.mark.parametrize("gather", [1, 4], ids=str)
def test_a_single_draft_does_exactly_what_was_predicted(model, sampling, traces, table, tier, gather):
    plan = Plan(tiers=(replace(tier, gather=gather),))
    found = predict(model, plan, traces, table)
    real = Stats()
    for _, prompt in PROMPTS:
        model.forget()
        real.add(model.generate(prompt, plan=plan, sampling=sampling).stats)
    assert counters(found.stats) == counters(real)
    assert real.tiers[0].accepted.total() > 3
    assert found.tokens_per_pass == real.tokens_per_pass
    assert sum(found.shares().values()) == pytest.approx(1)


@pytest.mark.parametrize("plan", [Plan(stores=("context",), budget=9), Plan()], ids=["stores", "plain"])
def test_stores_do_exactly_what_was_predicted(model, sampling, traces, table, plan):
    found, real = predict(model, plan, traces, table), Stats()
    for _, prompt in PROMPTS:
        real.add(model.generate(prompt, plan=plan, sampling=sampling).stats)
    assert counters(found.stats) == counters(real)


def test_a_runner_up_beside_the_draft_is_known(model, sampling, traces, table):
    plan = Plan(tiers=(replace(TIERS[0], gather=1, candidates=3),))
    found, real = predict(model, plan, traces, table), Stats()
    for _, prompt in PROMPTS:
        real.add(model.generate(prompt, plan=plan, sampling=sampling).stats)
    assert counters(found.stats) == counters(real)
    assert (
        found.stats.tiers[0].accepted.total()
        > predict(model, Plan(tiers=(replace(TIERS[0], gather=1),)), traces, table).stats.tiers[0].accepted.total()
    )


def test_ladders_policies_and_batches_can_be_predicted(model, traces, table):
    """The text stays the target's whatever the tiers say, and all of it is written."""
    ladder = Plan(tiers=(replace(TIERS[2], gather=4), replace(TIERS[3], gather=2)))
    worth = Plan(
        stores=("context",), merge=True, adapt=True, tiers=(replace(TIERS[2], gather=8, until="worth", candidates=2),)
    )
    written = sum(len(trace.output) for trace in traces)
    for plan in (ladder, worth):
        for batch in (1, 2):
            found = predict(model, plan, traces, table, Overhead(1.5, 1e-4), batch)
            assert found.stats.tiers[0].written == written
            assert 0 < found.tokens < written
            assert found.seconds == pytest.approx(sum(found.by_tier.values()) + found.loop)
            assert set(json.loads(json.dumps(found.to_json()))["tasks"]) == {"one", "two"}


def test_the_loop_is_timed_beside_real_passes(model, traces, table):
    found = measured_overhead(model, traces[0], table)
    assert 1 <= found.factor < 100
    plain = predict(model, Plan(), traces[:1], table, Overhead(0.0, 1.0))
    assert plain.loop == plain.tokens == len(traces[0].output) - 1


def test_what_cannot_be_predicted_is_told(model, traces, table):
    with pytest.raises(HierspecError, match="rule coupled"):
        predict(model, Plan(rule="residual"), traces, table)
    with pytest.raises(HierspecError, match="agrees"):
        predict(model, Plan(tiers=(TierPlan(exit_layer=2, agrees=0.5),)), traces, table)
    with pytest.raises(HierspecError, match="measured"):
        predict(model, Plan(tiers=(TierPlan(exit_layer=1),)), traces, table)
    other = CostTable({**table.scorers, **measure_parts(scorers_of(model, [TierPlan(exit_layer=1)])[1:]).scorers})
    with pytest.raises(HierspecError, match="know nothing of exit 1"):
        predict(model, Plan(tiers=(TierPlan(exit_layer=1),)), traces, other)


def test_traces_survive_the_file_and_damage_is_told(traces, tmp_path):
    path = tmp_path / "t.safetensors"
    save_traces(path, traces, {"of": "tiny"})
    for kept, trace in zip(load_traces(path, {"of": "tiny"}), traces, strict=True):
        for name in ("task", "prompt", "output", "temperature", "seed", "limit", "stop_ids"):
            assert getattr(kept, name) == getattr(trace, name)
        assert list(kept.tiers) == list(trace.tiers)
        for key, picks in trace.tiers.items():
            assert np.array_equal(kept.tiers[key].tokens, picks.tokens)
            assert np.array_equal(kept.tiers[key].leads, picks.leads)
    content = path.read_bytes()
    for damaged in (b"", content[:40], content[: len(content) // 2], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(HierspecError, match="not a file of traces"):
            load_traces(path)
    path.write_bytes(content)
    with pytest.raises(HierspecError, match="of something else"):
        load_traces(path, {"of": "other"})


def test_a_machine_keeps_its_traces(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    told = []
    arguments = (model, PROMPTS[:1], TIERS[:1], 6, Sampling(), lambda *said: told.append(said))
    first = kept_traces(*arguments)
    before = len(told)
    assert told[-1][1] == told[-1][2]
    again = kept_traces(*arguments)
    assert len(told) == before > 0
    assert again[0].output == first[0].output
    [path] = tmp_path.glob("traces/*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert kept_traces(*arguments)[0].output == first[0].output
    assert len(told) == 2 * before
    kept_traces(model, PROMPTS[:1], TIERS[:2], 6, Sampling())
    assert len(list(tmp_path.glob("traces/*.safetensors"))) == 2


def naive(traces, guesser, judge, depth):
    """Trials and successes, position by position."""
    stood = trials = 0
    for trace in traces:

        def says(tier, place, deep, trace=trace):
            return trace.output[place] if tier == TARGET else int(trace.tiers[tier].tokens[deep, place, 0])

        for start in range(len(trace.output) - depth):
            before = range(depth)
            if all(says(tier, start + d, d) == trace.output[start + d] for d in before for tier in (guesser, judge)):
                trials += 1
                stood += says(guesser, start + depth, depth) == says(judge, start + depth, depth)
    return Share(stood, trials)


def test_acceptance_is_what_counting_gives():
    rng = np.random.default_rng(0)
    traces = []
    for number in range(6):
        output = tuple(rng.integers(0, 3, 30).tolist())
        tiers = {}
        for key in ("a", "b"):
            tokens = np.where(
                rng.random((8, 30, 1)) < 0.7, np.array(output)[None, :, None], rng.integers(0, 3, (8, 30, 1))
            )
            tiers[key] = Picks(tokens.astype(np.int32), np.zeros((8, 30), np.float32))
        traces.append(Trace(f"task {number % 2}", (1,), output, tiers))
    found = acceptance(traces)
    for guesser, judge in (("a", TARGET), ("b", "a"), ("a", "b")):
        for depth in range(8):
            assert found.share(guesser, judge, depth) == naive(traces, guesser, judge, depth)
        own = [trace for trace in traces if trace.task == "task 1"]
        assert found.share(guesser, judge, 1, task="task 1") == naive(own, guesser, judge, 1)
        assert found.share(guesser, judge, temperature=0.5) == Share()
    kept = found.dependence["b", "a", TARGET]
    both = kept.stood + kept.corrected
    assert both == found.share("a", TARGET, 0)
    assert kept.stood.trials == found.share("b", "a", 0).stood
    assert kept.stood.rate > kept.corrected.rate  # three tokens: who agrees is likely right
    assert agreement(traces, "b", "a") == found.share("b", "a", 0).rate
    assert len(found.rows()) == 3
    assert len(found.dependence_rows()) == 3
    assert len(json.loads(json.dumps(found.to_json()))["pairs"]) == 8


def test_curves_go_straight_between_what_was_measured():
    cells = [Cell(r, c, b, 1.0 * r + c / 100 + b, 0.1) for b in (1, 4) for c in (100, 200) for r in (4, 8)]
    curve = Curve(tuple(cells))
    assert curve.seconds(6, 150, 1) == pytest.approx(6 + 1.5 + 1)
    assert curve.seconds(16, 400, 2) == pytest.approx(16 + 4 + 2)
    assert curve.seconds(1, 10, 9) == pytest.approx(4 + 1 + 4)  # less than the least, more than the largest batch
    assert curve.seconds(0) == 0
    falling = Curve((Cell(1, 1, 1, 2.0, 0), Cell(2, 1, 1, 1.0, 0)))
    assert falling.seconds(2, 1) == 2.0


def test_a_table_is_measured_once(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    told = []
    scorers = scorers_of(model, TIERS)
    first = cost_table(model, scorers, progress=lambda *said: told.append(said))
    before = len(told)
    again = cost_table(model, scorers, progress=lambda *said: told.append(said))
    assert len(told) == before > 0
    assert again == first == CostTable.from_json(json.loads(json.dumps(first.to_json())))
    assert {name for name, parts in ((p.name, p) for p in first.scorers.values()) if parts.own is None} == {
        *("target", "exit 3", "without 1")
    }
    assert [parts.name for parts in first.scorers.values() if parts.later is not None] == ["feature drafter"]
    assert all(parts.seconds(8, 100, 4) > 0 for parts in first.scorers.values())
    assert len(first.rows()) == 1 + len(scorers)
    next(tmp_path.glob("costs/parts-*.json")).write_text("{")
    cost_table(model, scorers, progress=lambda *said: told.append(said))
    assert len(told) > before


def counted(scorers):
    """A table by which every row through a layer costs one second, and every row of a head a thousandth."""
    found = {}
    for scorer in scorers:
        own = None if not hasattr(scorer, "layer") else scorer.layer.decoder.config.layers

        def line(step):
            return Curve(tuple(Cell(rows, 1, 1, float(step * rows), 0.0) for rows in (1, 1000)))

        skipped = len(TIERS[-1].skip_layers) if scorer.name.startswith("without") else 0
        base = line(scorer.layers - skipped) if own is None or "adapter" in scorer.kind else None
        found[scorer_key(scorer)] = Parts(
            scorer.name, scorer.layers, base, None if own is None else line(own), line(1e-3)
        )
    return CostTable(found)


@pytest.mark.parametrize("place", range(len(TIERS)))
def test_priced_scorers_run_as_many_rows_as_real_ones(model, traces, place, sampling):
    """Layers times rows of a prediction are those of the real run: nothing is computed twice, and what a tier below
    has done is not done again."""
    scorers = scorers_of(model, TIERS)
    plan = Plan(tiers=(replace(TIERS[place], gather=4),))
    found = predict(model, plan, traces, counted(scorers))
    real = 0
    decoders = [scorers[0].decoder]  # which also runs what is left where layers are skipped
    if hasattr(scorers[place + 1], "layer"):
        decoders.append(scorers[place + 1].layer.decoder)
    for _, prompt in PROMPTS:
        model.forget()
        stream = iter(model.stream(prompt, plan=plan, sampling=sampling))
        next(stream)
        before = sum(decoder.layer_rows for decoder in decoders)
        for _ in stream:
            pass
        real += sum(decoder.layer_rows for decoder in decoders) - before
    assert int(sum(found.by_tier.values())) == real


def test_priced_scorers_share_what_real_ones_share(model):
    target, shared, adapter, *_ = scorers_of(model, TIERS)
    prices = PricedScorers(counted([target, shared, adapter]))
    copies = [prices.copy(scorer) for scorer in (target, shared, adapter)]
    assert len({id(copy.pool) for copy in copies}) == 1
    assert prices.copy(target) is copies[0]
    assert recording.DEPTHS == 8

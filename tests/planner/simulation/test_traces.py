"""Traces: what is recorded is what tiers really pick, and a plan simulated on traces does what the real one does."""

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
from hierspec.planner.simulation.acceptance import TARGET, AcceptanceCount, acceptance, agreement
from hierspec.planner.simulation.cost_measuring import cost_table, measure_parts
from hierspec.planner.simulation.cost_table import Cell, CostTable, Curve, Parts
from hierspec.planner.simulation.prediction import Overhead, measured_overhead, predict
from hierspec.planner.simulation.priced import PricedScorers
from hierspec.planner.simulation.recording import cached_traces, record_traces, scorers_of
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
    """It writes few different tokens, so that even random drafts are sometimes accepted."""
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
    """No text ends early: what a draft picks off the text is not recorded, nor whether it would stop there."""
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
    drafts, score = [], target.score

    def watched(asks):
        drafts.extend((len(ask.context) - len(prompt), ask.proposal.tokens) for ask in asks)
        return score(asks)

    object.__setattr__(target, "score", watched)
    try:
        model.forget()
        generation = model.generate(prompt, plan=plan, sampling=sampling)
    finally:
        object.__delattr__(target, "score")
    return drafts, generation


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: str(tier.exit_layer or tier.draft or "skip"))
def test_picks_are_what_the_real_plan_drafts(model, sampling, traces, tier):
    """Up to and including the first rejected draft, the real drafts are the recorded picks."""
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
    predicted = predict(model, plan, traces, table)
    real = Stats()
    for _, prompt in PROMPTS:
        model.forget()
        real.add(model.generate(prompt, plan=plan, sampling=sampling).stats)
    assert counters(predicted.stats) == counters(real)
    assert real.tiers[0].accepted.total() > 3
    assert predicted.tokens_per_pass == real.tokens_per_pass
    assert sum(predicted.shares().values()) == pytest.approx(1)


@pytest.mark.parametrize("plan", [Plan(stores=("context",), budget=9), Plan()], ids=["stores", "plain"])
def test_stores_do_exactly_what_was_predicted(model, sampling, traces, table, plan):
    predicted, real = predict(model, plan, traces, table), Stats()
    for _, prompt in PROMPTS:
        real.add(model.generate(prompt, plan=plan, sampling=sampling).stats)
    assert counters(predicted.stats) == counters(real)


def test_a_runner_up_of_the_draft_is_recorded(model, sampling, traces, table):
    plan = Plan(tiers=(replace(TIERS[0], gather=1, candidates=3),))
    predicted, real = predict(model, plan, traces, table), Stats()
    for _, prompt in PROMPTS:
        real.add(model.generate(prompt, plan=plan, sampling=sampling).stats)
    assert counters(predicted.stats) == counters(real)
    alone = predict(model, Plan(tiers=(replace(TIERS[0], gather=1),)), traces, table)
    assert predicted.stats.tiers[0].accepted.total() > alone.stats.tiers[0].accepted.total()


def test_hierarchies_policies_and_batches_can_be_predicted(model, traces, table):
    """The text stays the target's whatever the tiers pick, and all of it is written."""
    two_drafts = Plan(tiers=(replace(TIERS[2], gather=4), replace(TIERS[3], gather=2)))
    worth = Plan(
        stores=("context",), merge=True, adapt=True, tiers=(replace(TIERS[2], gather=8, until="worth", candidates=2),)
    )
    written = sum(len(trace.output) for trace in traces)
    for plan in (two_drafts, worth):
        for batch in (1, 2):
            predicted = predict(model, plan, traces, table, Overhead(1.5, 1e-4), batch)
            assert predicted.stats.tiers[0].written == written
            assert 0 < predicted.tokens < written
            assert predicted.seconds == pytest.approx(sum(predicted.by_tier.values()) + predicted.loop)
            assert set(json.loads(json.dumps(predicted.to_json()))["tasks"]) == {"one", "two"}


def test_the_loop_is_timed_next_to_real_passes(model, traces, table):
    assert 1 <= measured_overhead(model, traces[0], table).factor < 100
    plain = predict(model, Plan(), traces[:1], table, Overhead(0.0, 1.0))
    assert plain.loop == plain.tokens == len(traces[0].output) - 1


def test_what_cannot_be_predicted_is_refused(model, traces, table):
    with pytest.raises(HierspecError, match="rule coupled"):
        predict(model, Plan(rule="residual", tiers=(TierPlan(exit_layer=2),)), traces, table)
    with pytest.raises(HierspecError, match="agrees"):
        predict(model, Plan(tiers=(TierPlan(exit_layer=2, agrees=0.5),)), traces, table)
    with pytest.raises(HierspecError, match="measured"):
        predict(model, Plan(tiers=(TierPlan(exit_layer=1),)), traces, table)
    other = CostTable({**table.scorers, **measure_parts(scorers_of(model, [TierPlan(exit_layer=1)])[1:]).scorers})
    with pytest.raises(HierspecError, match="do not contain exit 1"):
        predict(model, Plan(tiers=(TierPlan(exit_layer=1),)), traces, other)


def test_traces_survive_the_file_and_damage_is_refused(traces, tmp_path):
    path = tmp_path / "t.safetensors"
    save_traces(path, traces, {"of": "tiny"})
    for loaded, trace in zip(load_traces(path, {"of": "tiny"}), traces, strict=True):
        for name in ("task", "prompt", "output", "temperature", "seed", "limit", "stop_ids"):
            assert getattr(loaded, name) == getattr(trace, name)
        assert list(loaded.tiers) == list(trace.tiers)
        for key, picks in trace.tiers.items():
            assert np.array_equal(loaded.tiers[key].tokens, picks.tokens)
            assert np.array_equal(loaded.tiers[key].leads, picks.leads)
    content = path.read_bytes()
    for damaged in (b"", content[:40], content[: len(content) // 2], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(HierspecError, match="not a file of traces"):
            load_traces(path)
    path.write_bytes(content)
    with pytest.raises(HierspecError, match="of something else"):
        load_traces(path, {"of": "other"})


def test_traces_are_cached(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    reported = []
    arguments = (model, PROMPTS[:1], TIERS[:1], 6, Sampling(), lambda *report: reported.append(report))
    first = cached_traces(*arguments)
    before = len(reported)
    assert reported[-1][1] == reported[-1][2]
    again = cached_traces(*arguments)
    assert len(reported) == before > 0
    assert again[0].output == first[0].output
    [path] = tmp_path.glob("traces/*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert cached_traces(*arguments)[0].output == first[0].output
    assert len(reported) == 2 * before
    cached_traces(model, PROMPTS[:1], TIERS[:2], 6, Sampling())
    assert len(list(tmp_path.glob("traces/*.safetensors"))) == 2


def naive(traces, drafter, verifier, depth):
    """Trials and successes, position by position."""
    accepted = trials = 0
    for trace in traces:

        def pick(tier, position, deep, trace=trace):
            return trace.output[position] if tier == TARGET else int(trace.tiers[tier].tokens[deep, position, 0])

        for start in range(len(trace.output) - depth):
            before = range(depth)
            if all(pick(tier, start + d, d) == trace.output[start + d] for d in before for tier in (drafter, verifier)):
                trials += 1
                accepted += pick(drafter, start + depth, depth) == pick(verifier, start + depth, depth)
    return AcceptanceCount(accepted, trials)


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
    counted = acceptance(traces)
    for drafter, verifier in (("a", TARGET), ("b", "a"), ("a", "b")):
        for depth in range(8):
            assert counted.count(drafter, verifier, depth) == naive(traces, drafter, verifier, depth)
        of_task = [trace for trace in traces if trace.task == "task 1"]
        assert counted.count(drafter, verifier, 1, task="task 1") == naive(of_task, drafter, verifier, 1)
        assert counted.count(drafter, verifier, temperature=0.5) == AcceptanceCount()
    middle = counted.by_middle_tier["b", "a", TARGET]
    both = middle.accepted + middle.corrected
    assert both == counted.count("a", TARGET, 0)
    assert middle.accepted.trials == counted.count("b", "a", 0).accepted
    assert middle.accepted.rate > middle.corrected.rate  # of three tokens: those that agree are likely right
    assert agreement(traces, "b", "a") == counted.count("b", "a", 0).rate
    assert len(counted.rows()) == 3
    assert len(counted.middle_tier_rows()) == 3
    assert len(json.loads(json.dumps(counted.to_json()))["pairs"]) == 8


def test_curves_are_linear_between_measured_cells():
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
    reported = []
    scorers = scorers_of(model, TIERS)
    first = cost_table(model, scorers, progress=lambda *report: reported.append(report))
    before = len(reported)
    again = cost_table(model, scorers, progress=lambda *report: reported.append(report))
    assert len(reported) == before > 0
    assert again == first == CostTable.from_json(json.loads(json.dumps(first.to_json())))
    assert {name for name, parts in ((p.name, p) for p in first.scorers.values()) if parts.own is None} == {
        *("target", "exit 3", "without 1")
    }
    assert [parts.name for parts in first.scorers.values() if parts.later is not None] == ["feature drafter"]
    assert all(parts.seconds(8, 100, 4) > 0 for parts in first.scorers.values())
    assert len(first.rows()) == 1 + len(scorers)
    next(tmp_path.glob("costs/parts-*.json")).write_text("{")
    cost_table(model, scorers, progress=lambda *report: reported.append(report))
    assert len(reported) > before


def unit_costs(scorers):
    """A table by which every row through a layer costs one second, and every row of a head a thousandth."""
    parts = {}
    for scorer in scorers:
        layers = None if not hasattr(scorer, "layer") else scorer.layer.decoder.config.layers

        def line(step):
            return Curve(tuple(Cell(rows, 1, 1, float(step * rows), 0.0) for rows in (1, 1000)))

        skipped = len(TIERS[-1].skip_layers) if scorer.name.startswith("without") else 0
        base = line(scorer.layers - skipped) if layers is None or "adapter" in scorer.kind else None
        added = None if layers is None else line(layers)
        parts[scorer_key(scorer)] = Parts(scorer.name, scorer.layers, base, added, line(1e-3))
    return CostTable(parts)


@pytest.mark.parametrize("index", range(len(TIERS)))
def test_priced_scorers_run_as_many_rows_as_real_ones(model, traces, index, sampling):
    """Layers times rows of a prediction are those of the real run: nothing is computed twice, and what a tier below
    has computed is reused."""
    scorers = scorers_of(model, TIERS)
    plan = Plan(tiers=(replace(TIERS[index], gather=4),))
    predicted = predict(model, plan, traces, unit_costs(scorers))
    real = 0
    decoders = [scorers[0].decoder]  # which also runs what is left where layers are skipped
    if hasattr(scorers[index + 1], "layer"):
        decoders.append(scorers[index + 1].layer.decoder)
    for _, prompt in PROMPTS:
        model.forget()
        stream = iter(model.stream(prompt, plan=plan, sampling=sampling))
        next(stream)
        before = sum(decoder.layer_rows for decoder in decoders)
        for _ in stream:
            pass
        real += sum(decoder.layer_rows for decoder in decoders) - before
    assert int(sum(predicted.by_tier.values())) == real


def test_priced_scorers_share_what_real_ones_share(model):
    target, shared, adapter, *_ = scorers_of(model, TIERS)
    prices = PricedScorers(unit_costs([target, shared, adapter]))
    copies = [prices.copy(scorer) for scorer in (target, shared, adapter)]
    assert len({id(copy.pool) for copy in copies}) == 1
    assert prices.copy(target) is copies[0]
    assert recording.DEPTHS == 8

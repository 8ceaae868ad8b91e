"""Exits over one staircase: what they compute and keep, what synthetic ones agree on, and layers left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import hierspec
from hierspec import HierspecError, Plan, Sampling, TierPlan
from hierspec.backends.cpu.passes import CpuPassWriter
from hierspec.cli.main import main
from hierspec.scorers.base import ModelScorer
from hierspec.scorers.skipping import SkippingDecoder, in_runs
from hierspec.scorers.synthetic import Rates, References, SyntheticScorer
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeScorer

LAYERS = 8
PROMPTS = ["abc abc abc", "the dog ran", "12 12 12 12", "é"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("exits") / "tiny", "llama", layers=LAYERS)


@pytest.fixture
def model(folder):
    return hierspec.load(folder)


def tree(plan: Plan, candidates: int) -> Plan:
    return replace(plan, budget=16, tiers=tuple(replace(tier, candidates=candidates) for tier in plan.tiers))


class Watched:
    """What a model's passes run and hold, and what a naive memo would: a text's tokens by how high they stand, of
    which each ask keeps only what it names."""

    def __init__(self, model, monkeypatch) -> None:
        self.runs: Counter[tuple[int, ...]] = Counter()  # by layer, then the text up to and with a token
        self.expected: Counter[tuple[int, ...]] = Counter()
        self.pruned: Counter[tuple[int, ...]] = Counter()
        self.slots = 0  # with keys and values, of one text, the most
        self._heights: dict[int, dict[tuple[int, ...], int]] = {}  # by request
        plain_run, plain_logits = model.decoder.run, ModelScorer.logits

        def run(memory, batch, hidden, start, stop):
            token_of: dict[int, int] = {}
            for staircase in model.assembler.catalogue.pool.staircases():
                token_of.update(zip(staircase.slots.tolist(), staircase.tokens.tolist(), strict=False))
            for number, table in enumerate(batch.tables):
                slots = (table[:, None] * memory.page + np.arange(memory.page)).ravel()
                for row in range(batch.text_starts[number], batch.text_starts[number + 1]):
                    path = batch.paths[batch.path_starts[row] : batch.path_starts[row + 1]]
                    text = [token_of[slot] for slot in (*slots[: batch.lengths[row]].tolist(), *path.tolist())]
                    self.runs.update((layer, *text) for layer in range(start, stop))
            return plain_run(memory, batch, hidden, start, stop)

        def logits(scorer, asks):
            for ask in asks:
                self._asked(ask, scorer.layers)
            found = plain_logits(scorer, asks)
            self.slots = max(self.slots, *(staircase.used for staircase in model.assembler.catalogue.pool._use))
            return found

        monkeypatch.setattr(model.decoder, "run", run)
        monkeypatch.setattr(ModelScorer, "logits", logits)

    def _asked(self, ask, layers: int) -> None:
        held, context = self._heights.get(id(ask.request), {}), ask.context.tolist()
        texts = [tuple(context[:length]) for length in range(1, len(context) + 1)]
        texts += [(*context, *ask.proposal.path(node)) for node in range(len(ask.proposal))]
        for text in texts:
            self.expected.update((layer, *text) for layer in range(held.get(text, 0), layers))
        for text in held.keys() - set(texts):
            self.pruned.update((layer, *text) for layer in range(held[text]))
        self._heights[id(ask.request)] = {text: max(held.get(text, 0), layers) for text in texts}


@pytest.mark.parametrize("candidates", [1, 2])
@pytest.mark.parametrize("name", ["layerskip", "hispec", "hispec+"])
@pytest.mark.parametrize("batch", [1, 4])
def test_each_layer_runs_once_for_what_is_kept_and_no_more_is_held_than_the_block(
    model, monkeypatch, name, candidates, batch
):
    # Ids, each prompt with a first token of its own: no text begins like another.
    prompts = [[10 + place, *model.encode(prompt)] for place, prompt in enumerate(PROMPTS[:batch])]
    expected = model.generate_many(prompts, plan="plain", max_tokens=24)
    plan = tree(model.plan(name), candidates)
    model.hierarchy(plan)  # measures what passes cost, where the plan asks
    model.forget()
    monkeypatch.setattr(CpuPassWriter, "takes", lambda *given: False)  # what is one call goes past `run`
    watched, before = Watched(model, monkeypatch), model.decoder.layer_rows
    found = model.generate_many(prompts, plan=plan, max_tokens=24)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    texts = [tuple(prompt) + one.tokens for prompt, one in zip(prompts, found, strict=True)]
    # The staircase's figure, to the last row: what is kept once, what is refused as far as it climbed.
    assert watched.runs == watched.expected
    assert model.decoder.layer_rows - before == watched.expected.total()
    # Of what is kept, a layer runs again only where the same token had been refused, and so pruned, before.
    for text in texts:
        for length in range(1, len(text)):  # the last token is written and never read
            counts = [watched.runs[layer, *text[:length]] - watched.pruned[layer, *text[:length]] for layer in range(8)]
            assert counts == [1] * LAYERS
    assert watched.slots <= max(map(len, texts)) - 1 + plan.budget


def test_keys_and_values_take_what_plain_decoding_takes(folder):
    held = {}
    for name in ("plain", "layerskip", "hispec"):
        model = hierspec.load(folder)
        model.generate(PROMPTS[0], plan=name, max_tokens=40)
        [staircase] = model.assembler.catalogue.pool.staircases()
        memory = staircase.memory
        # Besides, a state at every exit.
        assert len(memory.taps) == {"plain": 1, "layerskip": 2, "hispec": 3}[name]
        states = len(memory.taps) * memory.page * model.config.hidden * memory.states.element_size()
        held[name] = len(staircase.table) * (memory.bytes_per_page - states)
    assert len(set(held.values())) == 1


# Synthetic acceptance.


def synthetic(upper: float, corrected: float, lower: float) -> Plan:
    return Plan(
        tiers=(
            TierPlan(exit_layer=4, gather=4, agrees=upper, agrees_corrected=corrected),
            TierPlan(exit_layer=2, gather=2, agrees=lower),
        )
    )


def test_rates_come_out_as_asked():
    """Over many positions: how often the lower agrees with the upper, and each kind of the upper's with the truth."""
    rates = (Rates(0.8, 0.5), Rates(0.6, 0.6))
    upper, lower = (SyntheticScorer(FakeScorer("x", 500), rates, place, References()) for place in (0, 1))
    pairs = [(upper.token(7, position, 3), lower.token(7, position, 3)) for position in range(20_000)]
    same = np.array([one == other for one, other in pairs])
    right = np.array([one == 3 for one, _ in pairs])
    assert same.mean() == pytest.approx(0.6, abs=0.015)
    assert right[same].mean() == pytest.approx(0.8, abs=0.015)
    assert right[~same].mean() == pytest.approx(0.5, abs=0.015)
    assert not any(other == 3 for one, other in pairs if one != other)  # right against the upper would be luck


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("candidates", [1, 2])
def test_synthetic_tiers_change_the_speed_and_never_the_text(model, temperature, candidates):
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=3)
    plain = model.generate_many(PROMPTS[:2], plan="plain", sampling=sampling)
    assert not any(one.synthetic for one in plain)
    passes = []
    for plan in (synthetic(0.0, 0.0, 0.0), synthetic(0.8, 0.5, 0.6), synthetic(1.0, 1.0, 1.0)):
        before = model.decoder.layer_rows
        found = model.generate_many(PROMPTS[:2], plan=tree(plan, candidates), sampling=sampling)
        assert model.decoder.layer_rows > before
        assert all(one.synthetic for one in found)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        passes.append(sum(one.stats.passes for one in found))
        assert {tier.name for tier in found[0].stats.tiers[1:]} == {"exit 4 (synthetic)", "exit 2 (synthetic)"}
    written = sum(len(one.tokens) for one in plain)
    assert passes[0] == written or candidates > 1  # a runner-up may be right
    assert passes[0] > passes[1] > passes[2]
    assert passes[2] <= written / 4


def test_what_wrote_the_reference_does_not_help(model):
    """Neither its time nor its states are the request's own."""
    plan = synthetic(1.0, 1.0, 1.0)
    model.request("abc", plan, Sampling(max_tokens=30, seed=0)).cancel()
    request = model.request("abc", plan, Sampling(max_tokens=30, seed=0))
    assert model.assembler.catalogue.pool.bytes_held() == 0
    request.cancel()


def test_synthetic_results_are_marked(folder, tmp_path, capsys):
    plan, prompts = tmp_path / "played.toml", tmp_path / "p.jsonl"
    plan.write_text(synthetic(0.8, 0.5, 0.6).to_toml())
    prompts.write_text('{"task": "a", "turns": ["abc"]}\n')
    common = ["--max-tokens", "12"]
    assert main(["generate", str(folder), "-p", "abc", "--plan", str(plan), "--check", *common]) == 0
    err = capsys.readouterr().err
    assert "SYNTHETIC" in err.splitlines()[-1]
    assert "identical to plain" in err
    assert main(["generate", str(folder), "-p", "abc", "--plan", str(plan), "--json", *common]) == 0
    assert '"synthetic": true' in capsys.readouterr().out
    arguments = ["bench", str(folder), "--prompts", str(prompts), "--plans", f"hispec,{plan}", *common]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.count('"synthetic": true') == 1
    assert f"synthetic acceptance: {plan}" in err.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("agrees = 0.5", "Unknown key 'agrees' in the plan"),
        ("[[tier]]\nexit_layer = 2\nagrees = 1.5", "agrees must be from 0 to 1"),
        ("[[tier]]\nexit_layer = 2\nagrees_corrected = 0.5", "needs agrees"),
        ("[[tier]]\nexit_layer = 4\n[[tier]]\nexit_layer = 2\nagrees = 1", "every tier above"),
        ("rule = 'residual'\n[[tier]]\nexit_layer = 4\nagrees = 1", "coupled only"),
        ("[[tier]]\nexit_layer = 4\nuntil = 'later'", "until must be one of count, correction, unsure, worth"),
        ("[[tier]]\nskip_layers = [1, 1]", "different whole numbers"),
        ("[[tier]]\nskip_layers = [-1]", "different whole numbers"),
        ("[[tier]]\nskip_layers = ['a']", "a list of whole numbers"),
        ("[[tier]]\nskip_layers = [1]\nexit_layer = 2", "either exit_layer"),
    ],
)
def test_plans_that_cannot_be_are_told(text, told):
    with pytest.raises(HierspecError, match=told) as error:
        Plan.from_toml(text)
    assert "\n" not in str(error.value)


def test_the_target_is_never_synthetic(model):
    target = SyntheticScorer(model.scorer(LAYERS), (Rates(1.0, 1.0),), 0, References())
    with pytest.raises(HierspecError, match="target cannot be synthetic"):
        hierspec.core.hierarchy.Hierarchy((hierspec.core.hierarchy.Tier(target),))


# Layers left out.


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_leaving_layers_out_equals_a_model_without_them(folder, tmp_path, backend):
    from safetensors.torch import load_file, save_file

    from hierspec.checkpoints.families import to_huggingface

    skipped = (2, 3, 6)
    model = hierspec.load(folder, backend=backend)
    smaller = tiny_checkpoint(tmp_path / "smaller", "llama", layers=LAYERS - 3)
    assert to_huggingface(model.config)["num_hidden_layers"] == LAYERS
    weights, kept = {}, [layer for layer in range(LAYERS) if layer not in skipped]
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) in skipped:
                continue
            parts[2] = str(kept.index(int(parts[2])))
        weights[".".join(parts)] = tensor
    save_file(weights, smaller / "model.safetensors")
    other = hierspec.load(smaller, backend=backend)
    plan = Plan(tiers=(TierPlan(skip_layers=skipped, gather=3),))
    drafted = model.generate("abc abc", plan=plan, max_tokens=30)
    plain = model.generate("abc abc", plan="plain", max_tokens=30)
    assert drafted.tokens == plain.tokens
    [_, tier] = model.hierarchy(plan).tiers
    from hierspec.core.engine import Engine
    from hierspec.core.hierarchy import Hierarchy, Tier
    from hierspec.core.request import Request

    alone = Request(model.encode("abc abc"), Sampling(max_tokens=30), Hierarchy((Tier(tier.scorer),)), model.stop_ids)
    for _ in Engine().run([alone]):
        pass
    assert tuple(alone.output) == other.generate("abc abc", plan="plain", max_tokens=30).tokens
    assert tier.scorer.decoder.layer_rows % len(kept) == 0


def test_impossible_layers_are_told(model):
    for skipped, told in (((8,), "layers are 0 to 7"), (range(8), "every layer")):
        with pytest.raises(HierspecError, match=told):
            SkippingDecoder(model.decoder, skipped)
    assert in_runs((7, 3, 5, 6)) == "3,5-7"


def test_the_search_finds_layers_that_do_nothing(tmp_path):
    """In a model of which three layers add nothing, those go first and are not missed."""
    from safetensors.torch import load_file, save_file

    from hierspec.train.skip import agreement, calibration, search

    folder = tiny_checkpoint(tmp_path / "idle", "llama", layers=6)
    weights = load_file(folder / "model.safetensors")
    for layer in (1, 2, 4):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(weights, folder / "model.safetensors")
    model, said = hierspec.load(folder), []
    texts = calibration(model, ["abc abc", "the dog"], max_tokens=20)
    found = search(model, texts, lambda what, done, total: said.append((done, total)))
    by_size = {len(draft.skipped): draft for draft in found}
    assert by_size[3].skipped == (1, 2, 4)
    assert by_size[3].agreement == agreement(model, (1, 2, 4), texts) == 1.0
    assert by_size[4].agreement < 1
    assert [draft.speedup for draft in found] == sorted((draft.speedup for draft in found), reverse=True)
    assert said[-1][0] == said[-1][1]
    plan = by_size[3].plan()
    drafted = model.generate("abc abc", plan=plan, max_tokens=30)
    assert drafted.tokens == model.generate("abc abc", plan="plain", max_tokens=30).tokens
    assert drafted.stats.tiers[0].accepted == drafted.stats.tiers[0].proposed  # everything stands


def test_train_skip_writes_a_plan(folder, tmp_path, capsys):
    output = tmp_path / "skip.toml"
    arguments = ["train", "skip", str(folder), "--max-tokens", "6", "--output", str(output)]
    assert main(arguments) == 0
    plan = Plan.read(output)
    assert plan.model == str(folder)
    assert plan.tiers[0].skip_layers
    assert main(["generate", "-p", "abc", "--plan", str(output), "--max-tokens", "9", "--check"]) == 0
    assert "identical to plain" in capsys.readouterr().err

"""Training: the network with gradients equals the decoder, the model's own chat is really its own, students learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import hierspec
from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import (
    EARLY_EXIT,
    EXITS,
    FEATURE,
    SMALL,
    fingerprint,
    layers_like,
    open_pack,
    write_pack,
)
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.text.tokenizer import Tokenizer
from hierspec.train import examine as examining
from hierspec.train import recipes
from hierspec.train.divergence import Judged
from hierspec.train.examine import charts, examine, students_of
from hierspec.train.loop import Course, Settings, fit
from hierspec.train.material import Material, Wanted, gather_material
from hierspec.train.measure import agreement
from hierspec.train.network import Network
from hierspec.train.students import (
    ExitAdapter,
    FeatureDrafter,
    Frozen,
    SmallModel,
    draft_vocabulary,
    free_running,
)
from hierspec.train.synthesise import Template, greedy_answers, synthesise


def _network(folder: Path, architecture: str = "llama") -> tuple[Network, Tokenizer]:
    checkpoint = load_checkpoint(tiny_checkpoint(folder, architecture))
    return Network(checkpoint.config, checkpoint.weights).frozen("cpu", torch.float32), Tokenizer.from_folder(folder)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_network_equals_the_reference_implementation(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    network, _ = _network(tmp_path, architecture)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    last = network.config.layers
    with torch.no_grad():
        own = functional.linear(network.norm(network(tokens, {last})[last]), network.head)
        torch.testing.assert_close(own, reference(tokens).logits, atol=1e-5, rtol=1e-4)


def test_greedy_answers_are_the_models_own(tmp_path: Path) -> None:
    """Every answer token is what a whole pass over the text before it says, whatever stood beside it."""
    network, tokenizer = _network(tmp_path)
    texts = greedy_answers(network, tokenizer, ["abc", "a longer prompt than the first"], most=20)
    last = network.config.layers
    with torch.no_grad():
        logits = functional.linear(network.norm(network(texts.tokens.long(), {last})[last]), network.head)
    stop = Template.of(tokenizer).to_answer[0]
    others = torch.tensor(sorted(set(network.config.eos_ids) - {stop}), dtype=torch.long)
    logits[..., others] = -torch.inf
    for row in range(2):
        places = texts.answers[row].nonzero()[:, 0]
        assert 0 < len(places) <= 20
        assert torch.equal(logits[row, places - 1].argmax(-1).int(), texts.tokens[row, places])
        prompt = tokenizer.decode(texts.tokens[row, : int(places[0])].tolist(), special=True)
        assert prompt.endswith("assistant\n")


def test_conversations_follow_the_chat_template(tmp_path: Path) -> None:
    network, tokenizer = _network(tmp_path)
    texts = synthesise(network, tokenizer, 9, length=96, prompts=["say hello"], batch=4)
    template = Template.of(tokenizer)
    assert texts.tokens.shape == (9, 96)
    assert texts.answers.any(1).sum() >= 3  # those that began with a whole prompt have been answered at least
    for row in range(9):
        tokens = texts.tokens[row].tolist()
        assert tokens[: len(template.opening)] == list(template.opening)
        first = int(texts.answers[row].nonzero()[0, 0]) if texts.answers[row].any() else None
        if first is not None:
            assert tokens[first - len(template.to_answer) : first] == list(template.to_answer)
    again = synthesise(network, tokenizer, 9, length=96, prompts=["say hello"], batch=4)
    assert torch.equal(texts.tokens, again.tokens)


def test_what_a_drafting_step_sees() -> None:
    """Step 3 at position 5: real keys up to position 3, step 2's at 4, step 3's own at 5."""
    seen = free_running(7, 3, "cpu")[5].view(3, 7)
    assert seen[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert seen[1].nonzero()[:, 0].tolist() == [4]
    assert seen[2].nonzero()[:, 0].tolist() == [5]


@pytest.mark.parametrize(("layers", "taps"), [(1, ()), (2, (1, 3))])
def test_free_running_equals_drafting_one_token_after_the_other(
    tmp_path: Path, layers: int, taps: tuple[int, ...]
) -> None:
    """The parallel computation of training gives what a drafter does step by step at one position."""
    network, _ = _network(tmp_path)
    drafter = FeatureDrafter(network, 3, layers, taps).eval()
    if drafter.first is not None:
        torch.nn.init.normal_(drafter.first.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(2))
    last = network.config.layers
    with torch.no_grad():
        states = network(tokens, {last, *taps})
        feature = network.norm(states[last])
        found = drafter.guesses(network, tokens, states, feature)
        embedded = functional.embedding(tokens, network.embedding)
        plain = [functional.rms_norm(states[tap], (64,), eps=network.config.norm_eps) for tap in taps]
        real = [functional.pad(part[:, :-1], (0, 0, 1, 0)) for part in (feature, *plain)]
        for end in (6, 9):  # the last position whose predecessor's feature is the target's
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            x = (drafter.first or drafter.fc)(torch.cat((embedded, *real), dim=-1))[:, : end + 1]
            rotation = network.rotation(0, end + 1)
            for block in drafter.blocks:
                q, k, v = block.project(x, rotation)
                seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = block.finish(x, seen)
                kept.append((k, v))
            own = drafter.norm(x)[:, -1:]
            torch.testing.assert_close(own[:, 0], found["step 1"][:, end])
            for step in (2, 3):
                place = end + step - 1
                x = drafter.fc(torch.cat((embedded[:, place : place + 1], own), dim=-1))
                for number, block in enumerate(drafter.blocks):
                    q, k, v = block.project(x, network.rotation(place, place + 1))
                    k, v = (torch.cat(pair, dim=2) for pair in zip(kept[number], (k, v), strict=True))
                    x = block.finish(x, functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
                    kept[number] = k, v
                own = drafter.norm(x)
                torch.testing.assert_close(own[:, 0], found[f"step {step}"][:, place], atol=1e-5, rtol=1e-4)


def test_divergence_and_its_gradient_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    head, feature, guess = (torch.randn(rows, 16, generator=generator) for rows in (50, 9, 9))
    guess.requires_grad_()
    judged = Judged(feature, head)
    divergence = judged.divergence(guess)
    distribution = (feature @ head.T).log_softmax(-1)
    expected = (distribution.exp() * (distribution - (guess @ head.T).log_softmax(-1))).sum(-1)
    torch.testing.assert_close(divergence, expected)
    weights = torch.rand(9, generator=generator)
    (own,) = torch.autograd.grad((divergence * weights).sum(), guess, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), guess)
    torch.testing.assert_close(own, wanted)
    assert float(judged.agrees(feature)) == 1.0


def test_students_learn_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    network, tokenizer = _network(tmp_path / "model")
    texts = synthesise(network, tokenizer, 12, length=64, batch=12)
    vocabulary = draft_vocabulary(texts.tokens, 128, network.config)

    def fresh() -> Frozen:
        torch.manual_seed(0)
        return Frozen(network, [ExitAdapter(network, 2)], vocabulary)

    def agreed(objective: Frozen) -> float:
        return agreement(objective, network.head, texts, ["chat"] * len(texts))["all"]["exit 2"]

    whole, parts = fresh(), fresh()
    before = agreed(whole)
    fit(whole, texts, Settings(steps=60, batch=4))
    assert agreed(whole) > before + 0.1
    folder = tmp_path / "state"
    # A run that is killed leaves its checkpoint; the rate follows the step, so the same 60 steps are made.
    stopping = Settings(steps=60, batch=4, checkpoint=folder, every=0.0)
    seen: list[int] = []

    def stop(step: int, loss: float, figures: dict[str, float]) -> None:
        seen.append(step)
        if step == 50 and len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(parts, texts, stopping, report=stop)
    resumed = fresh()
    course = fit(resumed, texts, stopping)
    assert course.steps == 60
    for name, parameter in whole.trained().items():
        torch.testing.assert_close(resumed.trained()[name], parameter, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    source = tiny_checkpoint(folder / "model")
    (folder / "words.txt").write_text("some plain text to read as well. " * 20)
    wanted = Wanted(24, length=128, vocabulary=64, prompts=("hello",), files=(folder / "words.txt",), batch=24)
    first = gather_material(source, folder / "work", wanted, "cpu")
    again = gather_material(source, folder / "work", wanted, "cpu")  # what was written before is read
    assert torch.equal(first.texts.tokens, again.texts.tokens)
    return first


def test_every_recipe_writes_its_part_of_one_pack(material: Material, tmp_path: Path) -> None:
    settings = Settings(steps=4, batch=4)
    folder = tmp_path / "pack"
    recipes.train_exits(material, [1, 2], folder, settings)
    recipes.train_feature(material, folder, settings, steps=2, layers=2, taps=(1, 3))
    recipes.train_small(material, folder, settings, layers=1)
    checkpoint = material.checkpoint
    begin = open_pack(folder, checkpoint.config, checkpoint.weights)
    result = recipes.train_tuned(
        material, [1, 2], folder, settings, rank=2, norms=[3], begin=begin, text=material.held_back.tokens
    )
    assert set(result.figures["all"]) >= {"exit 1", "exit 3", "exit 1 with exit 2", "exit 2 with exit 3"}
    assert set(result.more) == {"perplexity before", "perplexity after"}
    pack = open_pack(folder, checkpoint.config, checkpoint.weights)
    assert pack.exits() == (1, 2)
    feature = pack.feature(checkpoint.config)
    assert (feature.fc.shape, feature.taps, feature.config.layers) == ((64, 128), (1, 3), 2)
    variant = pack.early_exit()
    assert (variant.exits(), variant.exits_with_norm(), pack.exits_with_norm()) == ((1, 2), (3,), ())
    own = variant.exit_norm(3)
    assert own is not None
    assert own.shape == (64,)
    assert variant.exit_norm(1) is None
    assert variant.adapter(1, checkpoint.config).norm is not None
    delta = load_file(folder / "early-exit.safetensors")
    assert delta["layers.0.self_attn.q_proj.weight.a"].shape == (2, 64)
    assert delta["layers.0.self_attn.q_proj.weight.b"].dtype == torch.int8
    assert "small.layers.0.mlp.up_proj.weight" in load_file(folder / "small.safetensors")
    assert "Share of answer tokens" in (folder / "exits.md").read_text()


def test_adapters_go_on_from_a_pack(material: Material, tmp_path: Path) -> None:
    """One step at a rate of next to nothing leaves them where the pack had them; exit 3, which it has not, is new."""
    recipes.train_exits(material, [1, 2], tmp_path / "first", Settings(steps=6, batch=4, rate=1e-2))
    checkpoint = material.checkpoint
    begin = open_pack(tmp_path / "first", checkpoint.config, checkpoint.weights)
    still = Settings(steps=1, batch=2, rate=1e-9)
    recipes.train_exits(material, [1, 3], tmp_path / "second", still, begin)
    recipes.train_tuned(material, [1, 3], tmp_path / "third", still, rank=2, begin=begin)
    had = begin.read(EXITS)
    for folder, file in (("second", EXITS), ("third", EARLY_EXIT)):
        found = open_pack(tmp_path / folder, checkpoint.config, checkpoint.weights).read(file)
        name = "exit.1.layer.mlp.up_proj.weight"
        torch.testing.assert_close(found[name], had[name], atol=2e-3, rtol=0)
        assert not torch.equal(had[name], had["exit.2.layer.mlp.up_proj.weight"])
        assert f"exit.3.{name.removeprefix('exit.1.')}" in found


def test_a_drafter_goes_on_from_one_of_the_same_make(material: Material, tmp_path: Path) -> None:
    trained, still = Settings(steps=6, batch=4, rate=1e-2), Settings(steps=1, batch=2, rate=1e-9)
    recipes.train_feature(material, tmp_path / "first", trained, steps=2, layers=1, taps=[1])
    recipes.train_small(material, tmp_path / "first", trained, layers=1)
    checkpoint = material.checkpoint
    begin = open_pack(tmp_path / "first", checkpoint.config, checkpoint.weights)
    recipes.train_feature(material, tmp_path / "same", still, steps=2, layers=1, taps=[1], begin=begin)
    recipes.train_small(material, tmp_path / "same", still, layers=1, begin=begin)
    recipes.train_feature(material, tmp_path / "other", still, steps=2, layers=1, taps=[2], begin=begin)
    had = begin.read(FEATURE) | begin.read(SMALL)
    same = open_pack(tmp_path / "same", checkpoint.config, checkpoint.weights)
    other = open_pack(tmp_path / "other", checkpoint.config, checkpoint.weights)
    for name, tensor in (same.read(FEATURE) | same.read(SMALL)).items():
        torch.testing.assert_close(tensor, had[name], atol=2e-3, rtol=0)
    name = "feature.layers.0.mlp.up_proj.weight"
    assert (other.read(FEATURE)[name] - had[name]).abs().max() > 5e-3  # other taps: begun anew


def test_an_exit_has_an_adapter_or_a_norm(material: Material, tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match="Exit 2 cannot have both an adapter and a norm only"):
        recipes.train_tuned(material, [1, 2], tmp_path, Settings(steps=1), norms=[2, 3])


def test_a_pack_is_measured_as_it_was_trained(material: Material, tmp_path: Path) -> None:
    """What is read back from a pack guesses what the students did, but for 8 bits; shares are of its answers."""
    folder, target = tmp_path / "pack", material.target
    students = [ExitAdapter(target, 2), FeatureDrafter(target, 2, 2, (1,)), SmallModel(target, 1)]
    config, names = material.checkpoint.config, (EXITS, FEATURE, SMALL)
    write_pack(
        folder, "x", fingerprint(config, material.checkpoint.weights),
        {name: student.tensors() for name, student in zip(names, students, strict=True)},
        hidden=config.hidden, vocabulary=config.vocabulary,
    )  # fmt: skip
    checkpoint = load_checkpoint(material.checkpoint.folder, pack=folder)
    assert checkpoint.pack is not None
    tokens = material.texts.tokens[:1, :32].long()
    every = torch.arange(config.vocabulary)
    with torch.no_grad():
        _, before = Frozen(target, students, every).guesses(tokens)
        _, after = Frozen(target, students_of(target, checkpoint.pack), every).guesses(tokens)
    for name in ("exit 2", "step 1", "step 2", "small"):
        assert float(functional.cosine_similarity(after[name], before[name], dim=-1).min()) > 0.98
    model = hierspec.load(material.checkpoint.folder, pack=folder)
    prompts = [BenchPrompt("a", ("hello there",)), BenchPrompt("b", ("some text",))]
    found = examine(model, checkpoint, prompts, max_tokens=12)
    assert found["tokens"]["all"] == found["tokens"]["a"] + found["tokens"]["b"] > 0
    assert set(found["agreement"]["a"]) >= {"exit 2", "step 1", "top 3 step 4", "small"}
    assert all(0 <= share <= 1 for by_name in found["agreement"].values() for share in by_name.values())
    assert "<svg" in charts(found["agreement"])["steps"].svg()


def test_exits_beyond_the_depth_are_refused(material: Material, tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match="between 1 and 3"):
        recipes.train_exits(material, [2, 4], tmp_path, Settings(steps=1))
    with pytest.raises(HierspecError, match="Taps must be rising layer numbers between 1 and 3, not 3, 1"):
        recipes.train_feature(material, tmp_path, Settings(steps=1), taps=(3, 1))
    with pytest.raises(HierspecError, match="between 1 and 4 layers, as many as its model, not 5"):
        recipes.train_feature(material, tmp_path, Settings(steps=1), layers=5)


@pytest.mark.parametrize(("drift", "rank"), [(0.0, 2), (0.05, 0)])
def test_a_variant_must_be_able_to_move(material: Material, tmp_path: Path, drift: float, rank: int) -> None:
    with pytest.raises(HierspecError, match="drift must be more than 0 and rank at least 1"):
        recipes.train_tuned(material, [1, 2], tmp_path, Settings(steps=1), drift, rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Wanted(conversations=0), "conversations must be at least 2"),
        (lambda: Wanted(length=3), "length must be at least 16"),
        (lambda: Settings(steps=0), "at least 1"),
        (lambda: Settings(rate=0.0), "more than 0"),
        (lambda: Settings(minutes=-1.0), "more than 0"),
    ],
)
def test_wrong_numbers_are_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(HierspecError, match=message):
        make()


def test_an_adapter_runs_as_it_was_trained_where_layers_do_not_rotate(tmp_path: Path) -> None:
    """SmolLM3 leaves every fourth layer without rotary: what is made from such a layer has none either."""
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "smollm3"))
    network = Network(checkpoint.config, checkpoint.weights).frozen("cpu", torch.float32)
    assert not checkpoint.config.rotary_layers[3]
    for layer in (2, 3):
        assert layers_like(checkpoint.config, [layer]).rotary_layers == (ExitAdapter(network, layer).block.rotates,)


def test_the_command_line_gives_every_draft_its_own_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[object, ...]] = []

    def noted(material: object, folder: Path, settings: Settings, *rest: object, **_: object) -> recipes.Result:
        seen.append(rest)
        return recipes.Result(folder, Course(1, 0.0, []), {"all": {"step 1": 0.5}})

    monkeypatch.setattr("hierspec.train.material.gather_material", lambda *_: SimpleNamespace(checkpoint=None))
    for name in ("train_feature", "train_small"):
        monkeypatch.setattr(recipes, name, noted)
    monkeypatch.setattr(hierspec, "load", lambda *given, **options: None)
    monkeypatch.setattr(examining, "step_costs", lambda model, kind: {"draft step ms": 1.0, "target pass ms": 2.0})
    common = ["train", "draft", "--output", str(tmp_path / "pack")]
    assert main(common) == main([*common, "--depth", "2", "--taps", "8,16"]) == main([*common, "--kind", "small"]) == 0
    assert seen == [(4, 1, []), (4, 2, [8, 16]), (4,)]
    capsys.readouterr()
    assert main([*common, "--taps", "8,x"]) != 0
    assert "--taps takes layer numbers separated by commas, not '8,x'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["feature", "small"])
def test_training_a_draft_ends_with_its_agreement_and_its_cost(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_checkpoint(tmp_path / "model"))
    (tmp_path / "ask.jsonl").write_text('{"task": "a", "turns": ["hello there"]}\n', encoding="utf-8")
    sizes = ["--steps", "2", "--conversations", "8", "--length", "64", "--vocabulary", "64", "--batch", "4"]
    sizes += ["--measure", str(tmp_path / "ask.jsonl")]
    options = ["--kind", kind, "--depth", "1", "--device", "cpu", "--output", str(tmp_path / "pack")]
    assert main(["train", "draft", model, *sizes, *options]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ("step 4" if kind == "feature" else "small") in last["agreement"]["all"]
    assert last["draft step ms"] > 0
    assert last["target pass ms"] > 0

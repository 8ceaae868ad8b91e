"""Recipes: each writes its part of one pack, continues from another and is measured as trained; their commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import hierspec
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import (
    EARLY_EXIT,
    EXITS,
    FEATURE,
    SMALL,
    fingerprint,
    open_pack,
    write_pack,
)
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.train import examine as examining
from hierspec.train import recipes
from hierspec.train.examine import charts, examine, students_of
from hierspec.train.loop import Settings, TrainingRun
from hierspec.train.material import Material, MaterialSettings, gather_material
from hierspec.train.students import (
    ExitAdapter,
    FeatureDrafter,
    FrozenTargetObjective,
    SmallModel,
)
from hierspec.train.tuned import Exit, LowRank


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    source = tiny_checkpoint(folder / "model")
    (folder / "words.txt").write_text("some plain text to read as well. " * 20)
    settings = MaterialSettings(
        24, length=128, vocabulary=64, prompts=("hello",), files=(folder / "words.txt",), batch=24
    )
    first = gather_material(source, folder / "work", settings, "cpu")
    again = gather_material(source, folder / "work", settings, "cpu")  # from the cache
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
        material,
        [Exit(1), Exit(2, depth=2)],
        folder,
        settings,
        ranks=(2, 2, 1),
        norms=[3],
        begin=begin,
        text=material.held_back.tokens,
    )
    assert set(result.figures["all"]) >= {"exit 1", "exit 3", "exit 1 with exit 2", "exit 2 with exit 3"}
    assert set(result.more) == {"perplexity before", "perplexity after"}
    pack = open_pack(folder, checkpoint.config, checkpoint.weights)
    assert pack.exits() == (1, 2)
    feature = pack.feature(checkpoint.config)
    assert (feature.fc.shape, feature.taps, feature.config.layers) == ((64, 128), (1, 3), 2)
    variant = pack.early_exit()
    assert (variant.exits(), variant.exits_with_norm(), pack.exits_with_norm()) == ((1, 2), (3,), ())
    norm = variant.exit_norm(3)
    assert norm is not None
    assert norm.shape == (64,)
    assert variant.exit_norm(1) is None
    assert variant.adapter(1, checkpoint.config).norm is not None
    delta = load_file(folder / "early-exit.safetensors")
    assert delta["layers.0.self_attn.q_proj.weight.a"].shape == (2, 64)
    assert delta["layers.0.self_attn.q_proj.weight.b"].dtype == torch.int8
    assert "small.layers.0.mlp.up_proj.weight" in load_file(folder / "small.safetensors")
    assert "Share of answer tokens" in (folder / "exits.md").read_text()


def test_adapters_continue_from_a_pack(material: Material, tmp_path: Path) -> None:
    """One step at a tiny learning rate leaves them as in the pack; exit 3, which it does not have, is new."""
    recipes.train_exits(material, [1, 2], tmp_path / "first", Settings(steps=6, batch=4, rate=1e-2))
    checkpoint = material.checkpoint
    begin = open_pack(tmp_path / "first", checkpoint.config, checkpoint.weights)
    still = Settings(steps=1, batch=2, rate=1e-9)
    recipes.train_exits(material, [1, 3], tmp_path / "second", still, begin)
    recipes.train_tuned(material, [Exit(1), Exit(3)], tmp_path / "third", still, ranks=(2, 2, 2), begin=begin)
    initial = begin.read(EXITS)
    for folder, file in (("second", EXITS), ("third", EARLY_EXIT)):
        trained = open_pack(tmp_path / folder, checkpoint.config, checkpoint.weights).read(file)
        name = "exit.1.layer.mlp.up_proj.weight"
        torch.testing.assert_close(trained[name], initial[name], atol=2e-3, rtol=0)
        assert not torch.equal(initial[name], initial["exit.2.layer.mlp.up_proj.weight"])
        assert f"exit.3.{name.removeprefix('exit.1.')}" in trained


def test_a_drafter_continues_from_one_of_the_same_shape(material: Material, tmp_path: Path) -> None:
    trained, still = Settings(steps=6, batch=4, rate=1e-2), Settings(steps=1, batch=2, rate=1e-9)
    recipes.train_feature(material, tmp_path / "first", trained, steps=2, layers=1, taps=[1])
    recipes.train_small(material, tmp_path / "first", trained, layers=1)
    checkpoint = material.checkpoint
    begin = open_pack(tmp_path / "first", checkpoint.config, checkpoint.weights)
    recipes.train_feature(material, tmp_path / "same", still, steps=2, layers=1, taps=[1], begin=begin)
    recipes.train_small(material, tmp_path / "same", still, layers=1, begin=begin)
    recipes.train_feature(material, tmp_path / "other", still, steps=2, layers=1, taps=[2], begin=begin)
    initial = begin.read(FEATURE) | begin.read(SMALL)
    same = open_pack(tmp_path / "same", checkpoint.config, checkpoint.weights)
    other = open_pack(tmp_path / "other", checkpoint.config, checkpoint.weights)
    for name, tensor in (same.read(FEATURE) | same.read(SMALL)).items():
        torch.testing.assert_close(tensor, initial[name], atol=2e-3, rtol=0)
    name = "feature.layers.0.mlp.up_proj.weight"
    assert (other.read(FEATURE)[name] - initial[name]).abs().max() > 5e-3  # other taps: starts from the target


def test_an_exit_has_an_adapter_or_a_norm(material: Material, tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match="Exit 2 cannot have both an adapter and a norm only"):
        recipes.train_tuned(material, [Exit(1), Exit(2)], tmp_path, Settings(steps=1), norms=[2, 3])


def test_a_pack_is_measured_as_it_was_trained(material: Material, tmp_path: Path) -> None:
    """What is read back from a pack drafts what the students did, up to 8-bit rounding; shares are of its answers."""
    folder, target = tmp_path / "pack", material.target
    students = [ExitAdapter(target, 2), FeatureDrafter(target, 2, 2, (1,)), SmallModel(target, 1)]
    config, names = material.checkpoint.config, (EXITS, FEATURE, SMALL)
    write_pack(
        folder,
        "x",
        fingerprint(config, material.checkpoint.weights),
        {name: student.tensors() for name, student in zip(names, students, strict=True)},
        hidden=config.hidden,
        vocabulary=config.vocabulary,
    )
    checkpoint = load_checkpoint(material.checkpoint.folder, pack=folder)
    assert checkpoint.pack is not None
    tokens = material.texts.tokens[:1, :32].long()
    every = torch.arange(config.vocabulary)
    with torch.no_grad():
        _, before = FrozenTargetObjective(target, students, every).draft_features(tokens)
        _, after = FrozenTargetObjective(target, students_of(target, checkpoint.pack), every).draft_features(tokens)
    for name in ("exit 2", "step 1", "step 2", "small"):
        assert float(functional.cosine_similarity(after[name], before[name], dim=-1).min()) > 0.98
    model = hierspec.load(material.checkpoint.folder, pack=folder)
    prompts = [BenchPrompt("a", ("hello there",)), BenchPrompt("b", ("some text",))]
    document = examine(model, checkpoint, prompts, max_tokens=12)
    assert document["tokens"]["all"] == document["tokens"]["a"] + document["tokens"]["b"] > 0
    assert set(document["agreement"]["a"]) >= {"exit 2", "step 1", "top 3 step 4", "small"}
    assert all(0 <= share <= 1 for by_name in document["agreement"].values() for share in by_name.values())
    assert "<svg" in charts(document["agreement"])["steps"].svg()


def test_exits_beyond_the_depth_are_refused(material: Material, tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match="between 1 and 3"):
        recipes.train_exits(material, [2, 4], tmp_path, Settings(steps=1))
    with pytest.raises(HierspecError, match="Taps must be rising layer numbers between 1 and 3, not 3, 1"):
        recipes.train_feature(material, tmp_path, Settings(steps=1), taps=(3, 1))
    with pytest.raises(HierspecError, match="between 1 and 4 layers, as many as its model, not 5"):
        recipes.train_feature(material, tmp_path, Settings(steps=1), layers=5)


@pytest.mark.parametrize(("drift", "rank"), [(0.0, 2), (0.05, 0)])
def test_a_variant_must_be_able_to_move(material: Material, tmp_path: Path, drift: float, rank: int) -> None:
    with pytest.raises(HierspecError, match="drift must be more than 0 and ranks at least 1"):
        recipes.train_tuned(material, [Exit(1), Exit(2)], tmp_path, Settings(steps=1), drift, (rank, 2, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaterialSettings(conversations=0), "conversations must be at least 2"),
        (lambda: MaterialSettings(length=3), "length must be at least 16"),
        (lambda: Settings(steps=0), "at least 1"),
        (lambda: Settings(rate=0.0), "more than 0"),
        (lambda: Settings(minutes=-1.0), "more than 0"),
    ],
)
def test_wrong_numbers_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(HierspecError, match=message):
        make()


def test_the_command_line_gives_every_draft_its_own_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[object, ...]] = []

    def record_call(material: object, folder: Path, settings: Settings, *rest: object, **_: object) -> recipes.Result:
        calls.append(rest)
        return recipes.Result(folder, TrainingRun(1, 0.0, []), {"all": {"step 1": 0.5}})

    monkeypatch.setattr("hierspec.train.material.gather_material", lambda *_: SimpleNamespace(checkpoint=None))
    for name in ("train_feature", "train_small"):
        monkeypatch.setattr(recipes, name, record_call)
    monkeypatch.setattr(hierspec, "load", lambda *given, **options: None)
    monkeypatch.setattr(examining, "step_costs", lambda model, kind: {"draft step ms": 1.0, "target pass ms": 2.0})
    common = ["train", "draft", "--output", str(tmp_path / "pack")]
    assert main(common) == main([*common, "--depth", "2", "--taps", "8,16"]) == main([*common, "--kind", "small"]) == 0
    assert calls == [(4, 1, []), (4, 2, [8, 16]), (4,)]
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


def test_a_variant_continues_from_one_with_shallower_exits_and_other_ranks(material: Material, tmp_path: Path) -> None:
    """A second layer adds nothing at first, a higher rank changes nothing, a lower one as little as it can."""
    trained = Settings(steps=6, batch=4, rate=1e-2)
    recipes.train_tuned(material, [Exit(1), Exit(2)], tmp_path / "first", trained, 1.0, (4, 4, 4), norms=[3])
    config, weights = material.checkpoint.config, material.checkpoint.weights
    begin = open_pack(tmp_path / "first", config, weights)
    tokens = material.texts.tokens[:2, :32].long()

    def drafted(exits: list[Exit], ranks: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        objective = recipes.tuned_objective(material, exits, 1.0, ranks, [3], begin)
        with torch.no_grad():
            feature, drafts = objective.draft_features(tokens)
        return {"last": feature, **drafts}

    same = drafted([Exit(1), Exit(2)], (4, 4, 4))
    deeper = drafted([Exit(1), Exit(2, depth=2)], (4, 6, 4))
    for name, feature in same.items():
        torch.testing.assert_close(deeper[name], feature, atol=1e-4, rtol=1e-4)
    cut = drafted([Exit(1), Exit(2)], (3, 3, 3))
    new = recipes.tuned_objective(material, [Exit(1), Exit(2)], 1.0, (3, 3, 3), [3], None)
    with torch.no_grad():
        untrained, _ = new.draft_features(tokens)
    assert (cut["last"] - same["last"]).norm() < 0.7 * (untrained - same["last"]).norm()


def test_a_lower_rank_keeps_the_main_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 20, generator=generator), torch.randn(30, 6, generator=generator)
    change = LowRank(torch.nn.Linear(20, 30, bias=False), 4)
    change.begin(a, b)
    u, values, v = torch.linalg.svd(b @ a)
    torch.testing.assert_close(change.b @ change.a, (u[:, :4] * values[:4]) @ v[:4], atol=1e-4, rtol=1e-4)


def test_a_run_that_pauses_goes_on_where_it_was(material: Material, tmp_path: Path) -> None:
    now = Settings(steps=4, batch=4, checkpoint=tmp_path / "work", pause_at=0.0)
    exits = [Exit(1, depth=0), Exit(2, weight=2.0, pull=0.0)]
    paused = recipes.train_tuned(material, exits, tmp_path / "pack", now, norms=[3])
    assert not paused.run.finished
    assert not (tmp_path / "pack").exists()
    result = recipes.train_tuned(material, exits, tmp_path / "pack", replace(now, pause_at=None), norms=[3])
    assert (result.run.finished, result.run.steps) == (True, 4)
    variant = open_pack(tmp_path / "pack", material.checkpoint.config, material.checkpoint.weights).early_exit()
    assert (variant.exits(), variant.exits_with_norm()) == ((2,), (1, 3))
    both, agree = (result.figures["all"][f"exit 1 {word} exit 2"] for word in ("and", "with"))
    assert both <= min(agree, result.figures["all"]["exit 1"])


def test_the_command_line_describes_each_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[object, ...]] = []

    def record_call(material: object, exits: object, folder: Path, settings: object, *rest: object, **_: object):
        calls.append((exits, *rest))
        return recipes.Result(folder, TrainingRun(1, 0.0, []), {"all": {"exit 4": 0.5}})

    monkeypatch.setattr(recipes, "train_tuned", record_call)
    common = ["train", "exits", "--recipe", "tuned", "--layers", "4,8", "--output", str(tmp_path / "pack")]
    monkeypatch.setattr(
        "hierspec.train.material.gather_material",
        lambda *_: SimpleNamespace(checkpoint=SimpleNamespace(config=SimpleNamespace(layers=30))),
    )
    assert main(common) == 0
    described = ["--depths", "0,2", "--exit-weights", "0.5,1.5", "--pulls", "0,0.5", "--rank", "32,48,8"]
    assert main([*common, *described]) == 0
    assert calls == [
        ([Exit(4), Exit(8)], 0.075, (128, 64, 8), []),
        ([Exit(4, 0, 0.5, 0.0), Exit(8, 2, 1.5, 0.5)], 0.075, (32, 48, 8), []),
    ]
    for wrong, message in (
        (["--depths", "1,2,3"], "There are 2 exits, and a depth of 3"),
        (["--rank", "1,2"], "--rank takes one rank or three"),
        (["--pulls", "a"], "--pulls takes numbers separated by commas, not 'a'"),
    ):
        capsys.readouterr()
        assert main([*common, *wrong]) != 0
        assert message in capsys.readouterr().err

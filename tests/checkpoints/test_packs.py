"""Packs: identified by hash and fingerprint, opened without being named, refused with one sentence; the variant."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

import hierspec
from hierspec import HierspecError
from hierspec.checkpoints import load as loading
from hierspec.checkpoints import packs
from hierspec.checkpoints.eight_bits import from_eight_bits, in_eight_bits
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import EARLY_EXIT, EXITS, FEATURE, SMALL, VOCABULARY, fingerprint, write_pack
from hierspec.scorers.base import ModelScorer
from hierspec.scorers.drafters import AdapterScorer
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", "llama")
    tiny_checkpoint(root / "other", "llama", seed=1)
    tiny_checkpoint(root / "wider", "llama", hidden=128)
    tiny_checkpoint(root / "foreign", "llama", vocabulary=400)
    tiny_pack(root / "packs" / "tiny", root / "target", exits=(1, 2))
    return root


@pytest.fixture
def copied(folders, tmp_path):
    return shutil.copytree(folders / "packs" / "tiny", tmp_path / "tiny")


def test_a_fingerprint_survives_another_dtype_and_tells_models_apart(folders):
    fingerprints = {}
    for name in ("target", "other", "wider", "foreign"):
        checkpoints = [load_checkpoint(folders / name, dtype, pack="none") for dtype in (torch.float32, torch.bfloat16)]
        of_both = {fingerprint(checkpoint.config, checkpoint.weights) for checkpoint in checkpoints}
        assert len(of_both) == 1
        fingerprints[name] = of_both.pop()
    assert len(set(fingerprints.values())) == 4


def test_a_shipped_pack_is_found_by_the_model_it_belongs_to(folders, monkeypatch):
    monkeypatch.setattr(packs, "SHIPPED", folders / "packs")
    assert load_checkpoint(folders / "target").pack.folder.name == "tiny"
    assert load_checkpoint(folders / "target", pack="none").pack is None
    assert load_checkpoint(folders / "other").pack is None
    monkeypatch.setattr(packs, "SHIPPED", folders / "nowhere")
    assert load_checkpoint(folders / "target").pack is None


def test_a_pack_keeps_its_other_files_when_one_is_written_again(folders, copied):
    checkpoint = load_checkpoint(folders / "target", pack=copied)
    pack = checkpoint.pack
    tokens = {"tokens": torch.arange(16, dtype=torch.int32)}
    about = {"hidden": pack.hidden, "vocabulary": pack.vocabulary}
    write_pack(copied, pack.model, pack.target, {VOCABULARY: tokens}, texts={"README.md": "how it was made"}, **about)
    again = load_checkpoint(folders / "target", pack=copied).pack
    assert again.draft_vocabulary().tolist() == list(range(16))
    assert again.exits() == (1, 2)
    assert again.hashes[FEATURE] == pack.hashes[FEATURE]
    assert (copied / "README.md").read_text() == "how it was made"
    write_pack(copied, "another", "0" * 64, {VOCABULARY: tokens}, **about)  # of another model: nothing stays
    assert sorted(path.name for path in copied.iterdir()) == ["pack.json", VOCABULARY]


def damaged(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def changed(folder, **changes):
    path = folder / "pack.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("other", lambda f: None, "made for another model"),
        ("wider", lambda f: None, "hidden size 64, and this one has 128"),
        ("foreign", lambda f: None, "vocabulary 320, and this one has 400"),
        ("target", lambda f: changed(f, format=2), "has format 2"),
        ("target", lambda f: changed(f, files={"../x": {"sha256": ""}}), "not a file beside it"),
        ("target", lambda f: changed(f, hidden="64"), "must hold model, target"),
        ("target", lambda f: (f / "pack.json").write_text("{"), "cannot be read: it is not JSON"),
        ("target", lambda f: (f / "pack.json").unlink(), "is not a pack"),
    ],
)
def test_a_pack_that_does_not_belong_is_refused_at_once(folders, copied, model, change, message):
    change(copied)
    with pytest.raises(HierspecError, match=message) as error:
        hierspec.load(folders / model, pack=copied)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "plan", "message"),
    [
        (lambda f: damaged(f, EXITS), {"exit_layer": 1}, "its hash is not the one"),
        (lambda f: damaged(f, FEATURE), {"draft": "feature"}, "its hash is not the one"),
        (lambda f: (f / FEATURE).unlink(), {"draft": "feature"}, "cannot be read"),
        (lambda f: damaged(f, SMALL), {"draft": "small"}, "its hash is not the one"),
        (lambda f: (f / SMALL).write_bytes(b""), {"draft": "small"}, "its hash is not the one"),
        (lambda f: damaged(f, VOCABULARY), {"exit_layer": 1}, "its hash is not the one"),
    ],
)
def test_a_damaged_file_is_reported_when_it_is_needed(folders, copied, change, plan, message):
    change(copied)
    model = hierspec.load(folders / "target", backend="torch", pack=copied)
    assert model.generate("x", plan="plain", max_tokens=2).tokens
    with pytest.raises(HierspecError, match=message) as error:
        model.generate("x", plan=hierspec.Plan(tiers=(hierspec.TierPlan(**plan),)))
    assert "\n" not in str(error.value)
    assert "--pack none" in str(error.value)


def test_a_foreign_vocabulary_and_a_wrong_shape_are_reported(folders, copied):
    pack = load_checkpoint(folders / "target", pack=copied).pack
    about = {"hidden": pack.hidden, "vocabulary": pack.vocabulary}
    feature = load_file(copied / FEATURE) | {"feature.fc.weight": torch.zeros(64, 64)}
    small = load_file(copied / SMALL) | {"small.norm.weight": torch.zeros(128)}
    files = {VOCABULARY: {"tokens": torch.tensor([1, 320], dtype=torch.int32)}, FEATURE: feature, SMALL: small}
    write_pack(copied, pack.model, pack.target, files, **about)
    again = load_checkpoint(folders / "target", pack=copied)
    with pytest.raises(HierspecError, match="outside the model's vocabulary"):
        again.pack.draft_vocabulary()
    with pytest.raises(HierspecError, match=r"fc.weight should be \[64, 128\] and is \[64, 64\]"):
        again.pack.feature(again.config)
    with pytest.raises(HierspecError, match=r"small.norm.weight should be \[64\] and is \[128\]"):
        again.pack.small(again.config)


@pytest.mark.parametrize(
    ("taps", "changes", "message"),
    [
        ((3, 1), {}, "taps should be rising layer numbers between 1 and 3, not 3, 1;"),
        ((1, 4), {}, "between 1 and 3"),
        ((0, 2), {}, "between 1 and 3"),
        ((1,), {}, r"first.weight should be \[64, 192\] and is \[64, 256\]"),
        ((1, 3), {"feature.layers.4.norm": torch.zeros(1)}, "it has 5 layers, and the model 4"),
        (
            (1, 3),
            {"feature.layers.2.norm": torch.zeros(1)},
            r"feature.layers.2.input_layernorm.weight \[64\] is missing",
        ),
    ],
)
def test_a_feature_drafter_that_does_not_fit_is_reported(folders, copied, taps, changes, message):
    pack = load_checkpoint(folders / "target", pack=copied).pack
    feature = load_file(copied / FEATURE) | {"feature.taps": torch.tensor(taps, dtype=torch.int32)} | changes
    about = {"hidden": pack.hidden, "vocabulary": pack.vocabulary}
    write_pack(copied, pack.model, pack.target, {FEATURE: feature}, **about)
    again = load_checkpoint(folders / "target", pack=copied)
    with pytest.raises(HierspecError, match=message) as error:
        again.pack.feature(again.config)
    assert "\n" not in str(error.value)


def test_layers_of_a_drafter_are_like_the_targets_last(tmp_path):
    """Windows and positions that only some layers have: SmolLM3 leaves them out in every fourth."""
    folder = tiny_checkpoint(tmp_path / "model", "smollm3", layers=6)
    tiny_pack(tmp_path / "pack", folder)
    checkpoint = load_checkpoint(folder, pack=tmp_path / "pack")
    config = checkpoint.pack.feature(checkpoint.config).config
    assert config.rotary_layers == checkpoint.config.rotary_layers[-2:]
    assert checkpoint.pack.small(checkpoint.config).config.rotary_layers == checkpoint.config.rotary_layers[:2]


_NUMBERS = st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False).map(lambda x: x if abs(x) > 1e-30 else 0.0)


@given(
    st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(_NUMBERS, min_size=width, max_size=width), min_size=1))
)
@example([[0.0, 0.0], [1.0, -3.0], [1e-20, 127.0]])
def test_eight_bits_are_near_and_a_second_time_the_same(rows):
    """At most half a step from what was given, where a row's largest number is 127 steps; vectors stay."""
    matrix = torch.tensor(rows)
    vector, whole = matrix[0].to(torch.bfloat16), torch.tensor([[3, 1]], dtype=torch.int32)
    stored = in_eight_bits({"w": matrix, "norm.scale": vector, "taps": whole})
    assert (stored["w"].dtype, stored["w.scale"].shape) == (torch.int8, (len(rows),))
    read = from_eight_bits(Path("pack"), stored, "fetch it again")
    assert list(read) == ["w", "norm.scale", "taps"]
    assert torch.equal(read["norm.scale"], vector)
    assert torch.equal(read["taps"], whole)
    step = matrix.double().abs().amax(dim=1, keepdim=True) / 127
    assert ((read["w"] - matrix.double()).abs() <= step * (0.5 + 1e-4)).all()
    again = in_eight_bits(read)
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    assert in_eight_bits(stored).keys() == stored.keys()  # what is stored already is left


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_the_early_exit_variant_is_the_model_with_the_delta(folders, monkeypatch, backend):
    monkeypatch.setattr(packs, "SHIPPED", folders / "packs")
    monkeypatch.setattr(loading, "_locate", lambda *_: ("Tiny", folders / "target"))
    default, variant = (hierspec.load(name, backend=backend) for name in ("default", "default-ee"))
    delta = load_checkpoint(folders / "target", pack=folders / "packs" / "tiny").pack.read(EARLY_EXIT)
    weights = dict(load_checkpoint("default").weights)
    for name in [part.removesuffix(".a") for part in delta if part.endswith(".a")]:
        weights[f"model.{name}"] = weights[f"model.{name}"] + delta[f"{name}.b"] @ delta[f"{name}.a"]
    merged = replace(load_checkpoint("default"), weights=weights)
    monkeypatch.setattr("hierspec.language_model.load_checkpoint", lambda *_, **__: merged)
    expected = hierspec.load(backend=backend)
    texts = [model.generate("abc", plan="plain", max_tokens=20).tokens for model in (default, variant, expected)]
    assert texts[1] == texts[2] != texts[0]
    assert variant.name == "Tiny-ee"
    assert variant.encode("abc") == default.encode("abc")
    assert variant.home.folder != default.home.folder  # their histories are separate
    # Adapters were trained on the states of the default model; the variant has others, or only a norm.
    assert variant.pack.exits() == (2,)
    adapter = variant.pack.adapter(2, variant.config).layer["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(adapter, delta["exit.2.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(adapter, default.pack.adapter(2, default.config).layer["model.layers.0.mlp.up_proj.weight"])
    assert type(variant.assembler.catalogue.exit(2)) is AdapterScorer
    with pytest.raises(HierspecError, match="has adapters for exits 2, not for exit_layer 1"):
        variant.assembler.catalogue.exit(1, "adapter")
    scorer = variant.hierarchy(variant.plan("layerskip")).tiers[1].scorer
    assert type(scorer) is ModelScorer
    np.testing.assert_allclose(scorer.head.norm.float(), delta["exit.1.norm.weight"], rtol=1e-6)
    for plan in ("layerskip", "hispec"):
        assert variant.generate("abc", plan=plan, max_tokens=20).tokens == texts[1]
    with pytest.raises(HierspecError, match="no feature drafter"):
        variant.generate("abc", plan="eagle")


def test_without_a_delta_there_is_no_early_exit_variant(folders, copied, monkeypatch):
    monkeypatch.setattr(loading, "_locate", lambda *_: ("Tiny", folders / "target"))
    monkeypatch.setattr(packs, "SHIPPED", folders / "nowhere")
    with pytest.raises(HierspecError, match="there is no pack for the default model"):
        hierspec.load("default-ee")
    files = json.loads((copied / "pack.json").read_text())["files"]
    changed(copied, files={name: about for name, about in files.items() if name != EARLY_EXIT})
    with pytest.raises(HierspecError, match=f"has no {EARLY_EXIT}"):
        hierspec.load("default-ee", pack=copied)


def test_a_layerskip_checkpoint_says_where_it_exits(folders, tmp_path):
    folder = tiny_checkpoint(tmp_path / "skip", "llama", early_exit=3)
    assert hierspec.load(folder, backend="torch").plan("layerskip").tiers[0].exit_layer == 3
    described = json.loads((folder / "config.json").read_text())
    described.pop("assistant_early_exit")
    (folder / "config.json").write_text(json.dumps(described))
    assert hierspec.load(folder, backend="torch").plan("layerskip").tiers[0].exit_layer == 1
    (folder / "generation_config.json").write_text(json.dumps({"assistant_early_exit": 2}))
    assert hierspec.load(folder, backend="torch").plan("layerskip").tiers[0].exit_layer == 2


MATRIX = torch.zeros(4, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("file", "tensors", "message"),
    [
        (VOCABULARY, {"x": torch.arange(5)}, "tokens should be a list of whole numbers"),
        (VOCABULARY, {"tokens": torch.arange(5) + 0.5}, "tokens should be a list of whole numbers"),
        (VOCABULARY, {"tokens": torch.arange(5).bfloat16()}, "tokens should be a list of whole numbers"),
        (VOCABULARY, {"tokens": torch.arange(4).reshape(2, 2)}, "tokens should be a list of whole numbers"),
        (VOCABULARY, {"tokens": torch.tensor([2**40])}, "outside the model's vocabulary"),
        (VOCABULARY, {"tokens": torch.arange(0)}, "outside the model's vocabulary"),
        (EXITS, {"exit.2.layer.a": MATRIX, "exit.2.layer.a.scale": torch.zeros(3)}, r"should be \[3, 4\]"),
        (EXITS, {"exit.2.layer.a": MATRIX, "exit.2.layer.a.scale": torch.tensor(1.0)}, "does not fit the model"),
        (EXITS, {"exit.2.layer.a": MATRIX[0], "exit.2.layer.a.scale": torch.zeros(4)}, "does not fit the model"),
        (EXITS, {"exit.2.layer.a": MATRIX, "exit.2.layer.a.scale": torch.zeros(4, dtype=torch.bool)}, "hold floats"),
        (EXITS, {"exit." + "9" * 5000 + ".layer.a": torch.zeros(4)}, "has no adapters of exits"),
        (EXITS, {"exit.\u00b2.layer.a": torch.zeros(4)}, "has no adapters of exits"),
        (FEATURE, {"feature.layers.\u00b2.a": torch.zeros(4)}, "input_layernorm.weight .* is missing"),
        (FEATURE, {"feature.taps": torch.tensor([2.5])}, "feature.taps should be a list of whole numbers"),
        (FEATURE, {"feature.fc.weight": torch.zeros(64, 128, dtype=torch.int32)}, "fc.weight should hold floats"),
    ],
)
def test_tensors_of_other_types_and_names_are_one_sentence(folders, copied, file, tensors, message):
    replaced = file == FEATURE and "feature.layers.\u00b2.a" not in tensors
    content = save((load_file(copied / FEATURE) if replaced else {}) | tensors)
    (copied / file).write_bytes(content)
    described = json.loads((copied / "pack.json").read_text())
    described["files"][file]["sha256"] = hashlib.sha256(content).hexdigest()
    (copied / "pack.json").write_text(json.dumps(described))
    again = load_checkpoint(folders / "target", pack=copied)
    readers = {VOCABULARY: again.pack.draft_vocabulary, EXITS: lambda: again.pack.adapter(2, again.config)}
    with pytest.raises(HierspecError, match=message) as error:
        readers.get(file, lambda: again.pack.feature(again.config))()
    assert str(error.value).isprintable()

"""An enlarged model computes the same function: the model, its exits and its drafters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hierspec
from hierspec import HierspecError, Plan, TierPlan
from hierspec.checkpoints.config import expected_tensors
from hierspec.checkpoints.enlarged import load_enlarged
from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.larger_sizes import NAMED_SIZES, enlarged_config, read_sizes, weights_read
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.rotary import Rotary
from hierspec.core.scoring import score_tokens
from hierspec.planner.memory import added_weights
from hierspec.testing.checkpoints import tiny_checkpoint, tiny_config
from hierspec.testing.packs import tiny_eagle, tiny_pack

LARGER = "hidden=160,heads=24,kv_heads=6,head_size=32,intermediate=256,layers=9"
TEXT = np.random.default_rng(0).integers(3, 259, 40).astype(np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a pack. Its epsilon is large, so that a wrong one shows."""
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", "qwen3", layers=6, intermediate=192, norm_eps=0.05)
    tiny_pack(root / "pack", root / "target")
    return root


def load(folder, backend="torch", **options):
    return hierspec.load(folder, backend=backend, dtype="float32", device="cpu", keep_learnt=False, **options)


def logits(scorer):
    rows = [answer.logits for _, answer in score_tokens(scorer, TEXT, 1)]
    return np.concatenate(rows)


def assert_same(small, large):
    """Within float32 rounding: what is multiplied and added is the same, in another order."""
    scored = np.isfinite(small)
    assert (np.isfinite(large) == scored).all()
    spread = small[scored].std()
    assert np.abs(small[scored] - large[scored]).max() < 2e-4 * spread


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hidden=st.integers(0, 100),
    intermediate=st.integers(0, 100),
    kv_heads=st.integers(0, 3),
    group=st.integers(0, 2),
    head_factor=st.integers(1, 3),
    layers=st.integers(0, 3),
    eps=st.sampled_from([1e-6, 0.05]),
)
def test_every_exit_has_the_same_logits(
    tmp_path, family, hidden, intermediate, kv_heads, group, head_factor, layers, eps
):
    changes = {"norm_eps": eps}
    folder = tmp_path / f"{eps}"
    if not folder.exists():
        tiny_checkpoint(folder, family, **changes)
    config = tiny_config(family, **changes)
    if config.rotary.scaling == "yarn":
        head_factor = 1
    more_keys = config.kv_heads + kv_heads
    sizes = {
        "hidden": config.hidden + hidden,
        "intermediate": config.intermediate + intermediate,
        "kv_heads": more_keys,
        "heads": more_keys * (config.heads // config.kv_heads + group),
        "head_size": config.head_size * head_factor,
        "layers": config.layers + layers,
    }
    small = load(folder)
    large = load(folder, enlarged=",".join(f"{name}={size}" for name, size in sizes.items()))
    assert {name: getattr(large.config, name) for name in sizes} == sizes
    for exit_layer in range(1, config.layers + 1):
        assert_same(logits(small.scorer(exit_layer)), logits(large.scorer(exit_layer)))
    assert_same(logits(small.scorer(config.layers)), logits(large.scorer(large.config.layers)))


def test_biases_are_enlarged_too(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", attention_bias=True, output_bias=True, mlp_bias=True)
    small, large = load(folder), load(folder, enlarged=LARGER)
    assert_same(logits(small.scorer(4)), logits(large.scorer(large.config.layers)))


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_drafters_draft_the_same(folders, backend):
    small, large = (
        load(folders / "target", backend, pack=folders / "pack", enlarged=sizes, weights="float32")
        for sizes in ("", LARGER)
    )
    catalogues = small.assembler.catalogue, large.assembler.catalogue
    assert_same(*(logits(each.exit(4, "adapter", weights="auto")) for each in catalogues))
    assert_same(*(logits(each.exit(2, "adapter", "full", weights="auto")) for each in catalogues))
    assert_same(*(logits(each.exit(3, "shared", "small", weights="auto")) for each in catalogues))
    assert_same(*(logits(each.small_model(weights="auto")) for each in catalogues))
    plans = [
        Plan(tiers=(TierPlan(draft="feature", gather=5, candidates=3, weights="auto"),), budget=12),
        Plan(
            tiers=(TierPlan(exit_layer=4, gather=3, weights="auto"), TierPlan(draft="small", gather=2, weights="auto"))
        ),
        Plan(tiers=(TierPlan(skip_layers=(1, 2), gather=3),)),
        Plan(),
    ]
    for plan in plans:
        answers = [model.generate("Once upon a time", plan=plan, max_tokens=20, raw=True) for model in (small, large)]
        assert answers[0].tokens == answers[1].tokens
        counts = [[(tier.calls, tier.proposed, tier.accepted) for tier in answer.stats.tiers] for answer in answers]
        assert counts[0] == counts[1]


def test_the_early_exit_variant_keeps_its_norms(folders):
    small, large = (
        load(folders / "target", pack=folders / "pack", enlarged=sizes).assembler.catalogue for sizes in ("", LARGER)
    )
    for catalogue in (small, large):
        catalogue.pack = catalogue.pack.early_exit()
    assert large.pack.exits_with_norm() == (2,)
    assert_same(*(logits(each.exit(2)) for each in (small, large)))
    assert_same(*(logits(each.exit(4)) for each in (small, large)))


def test_tensors_are_those_of_a_model_of_that_size(folders):
    checkpoint = load_enlarged(folders / "target", LARGER, torch.bfloat16, pack=folders / "pack")
    expected = expected_tensors(checkpoint.config)
    assert {name: tuple(tensor.shape) for name, tensor in checkpoint.weights.items()} == expected
    assert {tensor.dtype for tensor in checkpoint.weights.values()} == {torch.bfloat16}
    assert len(checkpoint.weights) == len(expected)
    assert "model.layers.8.mlp.up_proj.weight" in checkpoint.weights
    assert "model.layers.9.mlp.up_proj.weight" not in checkpoint.weights


@pytest.mark.parametrize("name", NAMED_SIZES)
def test_named_sizes_read_as_much_as_their_models(name):
    config = tiny_config("llama", layers=30, hidden=576, heads=9, kv_heads=3, head_size=64, intermediate=1536)
    sizes = NAMED_SIZES[name]
    large = enlarged_config(replace(config, vocabulary=49152), sizes)
    assert (large.hidden, large.heads, large.head_size) == (sizes.hidden, sizes.heads, sizes.head_size)
    assert large.layers >= 30
    assert weights_read(large) >= sizes.read
    # No more than a layer too much, or as deep as the small model.
    one_less = replace(large, layer_configs=large.layer_configs[1:])
    assert large.layers == 30 or weights_read(one_less) < sizes.read


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ("9B", "cannot be enlarged to '9B': choose 1B, 8B, 32B, or write sizes"),
        ("hidden=", "cannot be enlarged to"),
        ("hidden=0", "cannot be enlarged to"),
        ("hidden=99,hidden=99", "cannot be enlarged to"),
        ("read=99", "cannot be enlarged to"),
        ("vocabulary=999", "cannot be enlarged to"),
        ("hidden=32", "hidden 64 cannot be enlarged to 32"),
        ("intermediate=32", "intermediate 192 cannot be enlarged to 32"),
        ("kv_heads=1", "kv_heads 2 cannot be enlarged to 1"),
        ("kv_heads=4", "2 query heads for each of its key heads cannot be enlarged to 1"),
        ("kv_heads=3", "heads must be a multiple of kv_heads"),
        ("head_size=24", "which is no multiple"),
        ("layers=5", "6 layers cannot be enlarged to 5"),
    ],
)
def test_what_cannot_be_enlarged_is_one_sentence(folders, sizes, told):
    with pytest.raises(HierspecError) as refused:
        load(folders / "target", enlarged=sizes)
    assert told in str(refused.value)
    assert str(refused.value).count("\n") == 0


def test_frequencies_that_depend_on_the_head_size_are_refused():
    yarn = Rotary(10000.0, "yarn", factor=4.0, original_context=4096)
    config = replace(tiny_config("llama"), rotary=yarn)
    assert enlarged_config(config, read_sizes("hidden=128")).hidden == 128
    with pytest.raises(HierspecError, match="under the rotary scaling yarn"):
        enlarged_config(config, read_sizes("head_size=32"))


def test_formats_and_heads_that_only_the_small_model_has_are_refused(folders, tmp_path):
    with pytest.raises(HierspecError, match="no bits of a GGUF file"):
        load(folders / "target", enlarged=LARGER, weights="file")
    small = load(folders / "target")
    head = tiny_eagle(tmp_path / "eagle", small.config)
    with pytest.raises(HierspecError, match="is for a model of hidden size 64, and this one has 160"):
        load(folders / "target", enlarged=LARGER).generate("x", plan=Plan(tiers=(TierPlan(draft=str(head)),)))


def test_its_costs_and_its_name_are_its_own(folders, monkeypatch):
    monkeypatch.setattr("hierspec.backends.cpu.backend.packed_weights", None)  # nothing is packed into a file
    options = {"pack": folders / "pack", "enlarged": LARGER}
    large = load(folders / "target", "compiled", **options)
    monkeypatch.undo()
    small = load(folders / "target", "compiled", pack=folders / "pack")
    assert large.name == f"target enlarged to {LARGER}"
    assert small.about != large.about
    files = [model.costs._file(model.scorer(4)).path for model in (small, large)]
    assert files[0] != files[1]
    assert load_checkpoint(folders / "target").enlarged == ""


def test_what_drafters_add_is_said_in_its_size(folders):
    plan = Plan(tiers=(TierPlan(draft="feature"), TierPlan(exit_layer=4), TierPlan(draft="small")))
    for sizes in ("", LARGER):
        model = load(folders / "target", pack=folders / "pack", enlarged=sizes)
        said = added_weights(model, plan)
        hidden = model.config.hidden
        layer = expected_tensors(replace(model.config, layer_configs=model.config.layer_configs[:1]))
        numbers = sum(
            shape[0] * shape[1] for name, shape in layer.items() if len(shape) == 2 and name.startswith("model.layers")
        )
        assert said["small"] == 2 * numbers * 4
        assert said["adapter of exit 4"] == 2 * numbers * 4  # of two layers
        assert said["feature"] == (2 * numbers + 6 * hidden * hidden) * 4

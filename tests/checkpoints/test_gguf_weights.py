"""The tensors of a GGUF file, mapped: the same numbers as of the converted folder, and nothing written for them."""

import sys
import types

import numpy as np
import pytest
import torch
from checkpoints.test_gguf import K_KINDS, KINDS, WIDE, write_gguf
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.checkpoints import gguf_weights
from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.gguf_weights import GgufWeights, StoredMatrix, StoredRows, open_gguf
from hierspec.checkpoints.load import load_checkpoint, stored_in_blocks
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import tiny_checkpoint, tiny_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    tokenizer = types.ModuleType("hierspec.text.gguf_tokenizer")
    tokenizer.write_tokenizer = lambda metadata, folder: (folder / "tokenizer.json").write_text("{}")  # type: ignore
    monkeypatch.setitem(sys.modules, "hierspec.text.gguf_tokenizer", tokenizer)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.gguf.architecture])
def test_every_family_has_the_numbers_of_its_converted_folder(family, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_weights, "_CHUNK", 1000)  # many chunks a tensor
    path, config = tmp_path / "m.gguf", tiny_config(family)
    expected = write_gguf(path, config, Kind.Q8_0)
    checkpoint = load_checkpoint(path, as_stored=True)
    assert checkpoint.config == config
    assert set(checkpoint.weights) == set(expected)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert [item.name for item in checkpoint.folder.iterdir() if item.suffix == ".json"]
    converted = load_checkpoint(path).weights
    for name in expected:
        assert torch.equal(checkpoint.weights[name], converted[name]), name


@pytest.mark.parametrize("kind", [*KINDS, *K_KINDS], ids=lambda kind: kind.name)
def test_rows_of_every_quantisation(kind, tmp_path):
    config = tiny_config("qwen2", **{**WIDE, "vocabulary": 64})
    expected = write_gguf(tmp_path / "m.gguf", config, kind)["model.embed_tokens.weight"]
    weights = GgufWeights(open_gguf(tmp_path / "m.gguf"))
    rows = weights.rows("model.embed_tokens.weight")
    assert rows.shape == expected.shape
    wanted = np.array([5, 63, 0, 5])
    assert (rows[torch.from_numpy(wanted)].numpy() == expected[wanted]).all()
    assert (rows.few(wanted) == expected[wanted]).all()
    weights.release()  # the file is still there
    assert (rows.few(np.array([7])) == expected[[7]]).all()
    assert kind.name in str(weights)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 40))
def test_kept_rows_are_the_right_ones(passes, kept):
    table = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    rows = StoredRows(StoredMatrix(table.view(np.uint8).reshape(40, -1), "F32", 1, (40, 3), None))
    rows._kept, rows._owners = rows._kept[:kept], rows._owners[:kept]  # few places: rows push each other out
    for tokens in passes:
        assert (rows.few(np.array(tokens)) == table[tokens]).all()


def test_a_folder_and_the_early_exit_variant_have_no_bits_of_a_file(tmp_path):
    folder = tiny_checkpoint(tmp_path / "folder.gguf", "llama")  # whatever its name is
    assert not stored_in_blocks(folder)
    assert not stored_in_blocks("default-ee")
    assert stored_in_blocks(None)
    assert stored_in_blocks(tmp_path / "m.gguf")
    with pytest.raises(HierspecError, match="use --weights auto"):
        load_checkpoint(folder, as_stored=True)
    assert load_checkpoint(folder, as_stored=lambda config: True).file is None


def test_where_it_depends_on_the_model_a_file_of_floats_is_read_as_floats(tmp_path):
    path, config = tmp_path / "m.gguf", tiny_config("llama")
    write_gguf(path, config, Kind.Q8_0)
    asked = []
    assert load_checkpoint(path, as_stored=lambda config: not asked.append(config)).file == path
    assert asked == [config]
    assert load_checkpoint(path, as_stored=lambda config: False).file is None
    write_gguf(path, config, Kind.BF16)
    assert load_checkpoint(path, as_stored=lambda config: True).file is None
    assert load_checkpoint(path, as_stored=True).file == path


@pytest.mark.parametrize("as_stored", [True, lambda config: True], ids=["asked", "if it can"])
def test_what_is_no_gguf_file_is_one_sentence(as_stored, tmp_path):
    path = tmp_path / "m.gguf"
    for content in (None, b"", b"GG", b"GGML" + bytes(100), b"GGUF" + bytes(100)):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(HierspecError):
            load_checkpoint(path, as_stored=as_stored)

"""The folder of an enlarged model computes what the small one does, in another engine too."""

import json

import numpy as np
import pytest
import torch

import hierspec
from hierspec import HierspecError
from hierspec.checkpoints.enlarged import load_enlarged
from hierspec.checkpoints.enlarged_folder import write_enlarged
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.scoring import score_tokens
from hierspec.testing.checkpoints import tiny_checkpoint

LARGER = "hidden=192,heads=24,kv_heads=6,head_size=32,intermediate=256,layers=9"
TEXT = np.random.default_rng(0).integers(3, 259, 30).astype(np.int32)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Its epsilon is large, so that a wrong one shows."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "small", "llama", layers=6, intermediate=192, norm_eps=0.05
    )


def logits(folder):
    model = hierspec.load(folder, backend="torch", dtype="float32", device="cpu", keep_learnt=False)
    scorer = model.assembler.hierarchy(hierspec.Plan()).tiers[0].scorer
    return np.concatenate([answer.logits for _, answer in score_tokens(scorer, TEXT, 1)])


def assert_close(one, other):
    assert np.abs(one - other).max() < 2e-4 * one.std()


def test_the_folder_is_the_same_model(small, tmp_path):
    folder = write_enlarged(small, LARGER, tmp_path / "large", torch.float32)
    assert_close(logits(small), logits(folder))
    written, made = load_checkpoint(folder), load_enlarged(small, LARGER)
    assert written.config == made.config
    assert all(torch.equal(written.weights[name], tensor) for name, tensor in made.weights.items())
    assert (folder / "tokenizer.json").is_file()


def test_transformers_opens_it_and_computes_the_same(small, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_enlarged(small, LARGER, tmp_path / "large", torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.head_dim == 32
    with torch.no_grad():
        theirs = model(torch.from_numpy(TEXT.astype(np.int64))[None]).logits[0].numpy()
    ours = logits(small)
    assert_close(ours, theirs[: len(ours)])  # ours ends before the last token


def test_zeros_take_no_room_and_a_folder_is_written_once(small, tmp_path):
    folder = write_enlarged(small, "hidden=1024,intermediate=4096,layers=8", tmp_path / "large")
    weights = folder / "model.safetensors"
    stored = weights.stat()
    assert stored.st_blocks * 512 < stored.st_size / 2
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert write_enlarged("no such model", "8B", folder) == folder
    assert weights.stat().st_mtime_ns == stored.st_mtime_ns


def test_a_dtype_that_no_file_has_is_refused(small, tmp_path):
    with pytest.raises(HierspecError, match="float64"):
        write_enlarged(small, LARGER, tmp_path / "large", torch.float64)
    assert not (tmp_path / "large").exists()

"""What is said where the CUDA backend cannot run."""

from importlib.util import find_spec

import pytest
import torch

from hierspec.assembly.opening import open_decoder, why_not_cuda
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import tiny_checkpoint, tiny_config


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: tests of kernels are left out")
def test_kernels_can_be_tested_here():
    assert find_spec("hierspec.backends.cuda.products") is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_one_sentence_where_there_is_no_gpu(tmp_path, monkeypatch):
    config = tiny_config("llama")
    assert why_not_cuda(config, "bfloat16", "cpu") == "it runs on an NVIDIA GPU only"
    assert why_not_cuda(config, "bfloat16", "cuda", "torch") == "the torch backend was asked for"
    monkeypatch.setitem(__import__("sys").modules, "hierspec.backends.cuda.backend", None)
    assert why_not_cuda(config, "bfloat16", "cuda").startswith("it needs Triton")
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    with pytest.raises(HierspecError, match="The CUDA backend cannot run"):
        open_decoder(checkpoint, "cpu", backend="cuda")

"""Kernels compile for a Hopper GPU: the interpreter takes what the compiler may not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys
import numpy as np, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int8: "*i8", torch.int64: "*i64",
         torch.float64: "*fp64"}
compiled = set()

def compile_only(self, *arguments, grid, warmup, **options):
    signature, constants = {}, {}
    arguments = *arguments, options.pop("OVERLAP")  # the last of all kernels
    for number, (parameter, value) in enumerate(zip(self.params, arguments)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[number,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    key = self.fn.__name__, str(signature), str(constants)
    if key not in compiled:
        compiled.add(key)
        made = triton.compile(ASTSource(self, signature, constants), target=GPUTarget("cuda", 90, 32), options=options)
        assert "mma" in made.asm["ptx"] or "dot" not in self.src, self.fn.__name__

JITFunction.run = compile_only

from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.fused import gather_rows
from hierspec.backends.cuda.heads import CudaJoin, CudaShortlist
from hierspec.backends.cuda.launching import Compiling
from hierspec.backends.cuda.pick_kernels import launch_picks
from hierspec.backends.cuda.work import Work
from hierspec.testing.checkpoints import random_weights, tiny_config

class Backend:
    device = torch.device("cpu")

sizes = dict(heads=4, kv_heads=2, hidden=128, head_size=64, intermediate=256, vocabulary=320, layers=1)
cases = ("qwen3", "bfloat16", 1, 128), ("qwen2", "int8", 64, 128)
for family, format, width, hidden in (("llama", "bfloat16", 16, 2048), *cases):  # norms of large states are apart
    config = tiny_config(family, **{**sizes, "hidden": hidden})
    decoder = CudaDecoder(Backend, config, random_weights(config), format)
    memory = decoder.memory((1,), 1 << 22)
    work = Work(width, width, 4, width > 1, 16, np.zeros(0, np.int32))
    decoder.launch(memory, work, 0, 1, decoder.scratch.places(width, 4))
    gather_rows(torch.zeros(1, dtype=torch.int64), decoder.embedding, decoder.scratch.hidden, 1)
    decoder.logits(torch.zeros(1, hidden))
shortlist = CudaShortlist(decoder, np.arange(0, 320, 2, dtype=np.int32), "int8")
extra = shortlist.gather(np.array([1, 3], np.int32))
shortlist.logits(torch.zeros(2, 128), decoder.norm, [extra], [2])
join = CudaJoin(decoder, torch.zeros(128, 256), torch.zeros(128), "int8")
join(np.array([1]), memory.all_states, [0], np.array([3]), torch.ones(1, 128))
scratch = torch.zeros(99, dtype=torch.float64), torch.zeros(99, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
for dtype in (torch.float32, torch.float64):
    numbers = torch.zeros(99, dtype=torch.int64)
    launch_picks(torch.zeros(1, 320, dtype=dtype), numbers, scratch, numbers, 1, 2)
assert Compiling.seconds > 0  # so that no pass is blamed for it
print(sorted({name for name, *_ in compiled}))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all other tests compile them")
def test_every_kernel_compiles_for_hopper(tmp_path):
    triton = pytest.importorskip("triton")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this Triton has no assembler for NVIDIA GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "compile_kernels.py"  # Triton reads its kernels' source from files
    script.write_text(SCRIPT, encoding="utf-8")
    paths = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [sys.executable, script], env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    products = "qkv", "attend", "product", "gated", "listed"
    for kernel in ("norm", "add_norm", "enter", *products, "join_inputs", "pick", "gather"):
        assert f"'{kernel}_kernel'" in found.stdout

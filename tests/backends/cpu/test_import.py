"""Importing the compiled backend does no work: that is done at first use."""

import subprocess
import sys

# Libraries come first: their own set-up, also that of numba at the first function it is given, is not ours.
SCRIPT = """
import ctypes, pathlib, platform, zlib
import gguf, jinja2, numpy, safetensors, tokenizers, torch
import numba.extending
from llvmlite import binding
from numba.core import event

numba.njit(lambda: None)

def refuse(name):
    def refused(*arguments, **options):
        raise AssertionError(name)
    return refused

for owner, name in [
    (binding, "get_host_cpu_features"),  # what this CPU can do
    (binding, "get_host_cpu_name"),
    (binding, "parse_assembly"),
    (platform, "machine"),
    (platform, "system"),
    (ctypes, "CDLL"),  # permission for AMX
    (pathlib.Path, "read_bytes"),  # hashes of source files
    (zlib, "crc32"),
]:
    setattr(owner, name, refuse(name))

with event.install_recorder("numba:compile") as compiled, event.install_recorder("numba:run_pass") as passes:
    import hierspec.backends.cpu.decoder
    import hierspec.backends.cpu.heads
    import hierspec.backends.cpu.pick
    import hierspec.backends.cpu.speed
assert not compiled.buffer and not passes.buffer

from hierspec.backends.cpu import amx, compiled, features, layers, llvm, pick

for function in (layers.run_layers, layers.run_head, pick.greedy_rows, pick.sample_rows):
    assert function._dispatcher is None  # numba has not even looked for it on disk
uses = [
    amx.available, compiled.kernel_version, compiled.filter_version, features.has_wide_registers, features.is_arm,
    features.dot_instruction,
]
for use in uses:  # what was refused above is what first use does
    try:
        use()
    except AssertionError as error:
        print(use.__name__, error)
"""


def test_importing_the_compiled_backend_does_no_work():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()] == [
        "available",
        "kernel_version",
        "filter_version",
        "has_wide_registers",
        "is_arm",
        "dot_instruction",
    ], run.stdout

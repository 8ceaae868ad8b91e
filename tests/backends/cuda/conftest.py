"""Kernels without a GPU: in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None

if TRITON and not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported


def pytest_ignore_collect(collection_path):
    """Without Triton these files cannot even be imported; `test_without_triton.py` says so."""
    if not TRITON and collection_path.name.startswith("test_") and "without" not in collection_path.name:
        return True
    return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")


def _dot_in_order(self, a, b, d, input_precision, max_num_imprecise_acc):
    """The interpreter has no bfloat16 in products, and numpy's own sum in another order for other shapes."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _convert_float

    operands = []
    for operand in (a, b):
        numbers = operand.data
        if operand.dtype.scalar == tl.bfloat16:
            numbers = _convert_float(numbers, tl.bfloat16, tl.float32, None).view("float32")
        operands.append(numbers.reshape(operand.data.shape))
    left, right = operands
    # Along an axis that is not the last numpy adds one by one.
    total = (left[:, :, None] * right[None]).sum(axis=1, dtype=d.data.dtype)
    return TensorHandle(d.data + total, d.dtype.scalar)


if TRITON and not GPU:
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_dot = _dot_in_order
    patch_tensor = interpreter._patch_lang_tensor

    def _with_index(tensor, scope):
        """A loaded number is an array of one number, which numpy no longer takes as the end of a range."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _with_index

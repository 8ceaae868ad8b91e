"""A Hugging Face folder of an enlarged model, for engines that only open folders.

Nearly all of its numbers are zero. Those are holes of a sparse file, which take no space and no time to write.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hierspec.checkpoints.config import expected_tensors
from hierspec.checkpoints.enlarged import load_enlarged
from hierspec.checkpoints.families import family_named, to_huggingface
from hierspec.checkpoints.gguf_file import COMPLETE
from hierspec.checkpoints.load import Checkpoint
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_folder
from hierspec.progress import Progress, silent

_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LINE = 64  # bytes: the data begins on a cache line
_WEIGHTS = "model.safetensors"


def write_enlarged(
    source: str | Path | None,
    sizes: str,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Writes the model of `load_enlarged` into `folder`, unless it is already there.

    Tensors are made on the device, one at a time.
    """
    if (folder / _WEIGHTS).is_file():
        return folder
    if dtype not in _STORED_AS:
        raise HierspecError(f"Weights cannot be written as {dtype}: float32, bfloat16 and float16 are supported.")
    checkpoint = load_enlarged(source, sizes, dtype, device, progress, pack="none")
    with whole_folder(folder) as temporary:
        for item in checkpoint.folder.iterdir():  # the tokenizer; configuration and weights are replaced
            if item.is_file() and item.suffix != ".safetensors" and item.name != COMPLETE:
                shutil.copy(item, temporary)
        described = {**to_huggingface(checkpoint.config), "torch_dtype": str(dtype).removeprefix("torch.")}
        (temporary / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
        with (temporary / _WEIGHTS).open("wb") as file:
            _write_weights(file, checkpoint, progress or silent)
    return folder


def _write_weights(file: BinaryIO, checkpoint: Checkpoint, progress: Progress) -> None:
    shapes, stored_name = expected_tensors(checkpoint.config), family_named(checkpoint.config.family).names
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, total = {}, 0
    for name, shape in shapes.items():
        starts[name], size = total, math.prod(shape) * checkpoint.dtype.itemsize
        described = {"dtype": _STORED_AS[checkpoint.dtype], "shape": shape, "data_offsets": [total, total + size]}
        header[stored_name(name)] = described
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    file.write(len(text).to_bytes(8, "little") + text)
    begin = file.tell()
    for name, start in starts.items():
        _write_rows(file, begin + start, checkpoint.weights[name])
        progress("Writing the enlarged model", start, total)
    file.truncate(begin + total)  # the last rows may be zero
    progress("Writing the enlarged model", total, total)


def _write_rows(file: BinaryIO, begin: int, tensor: Tensor) -> None:
    """Writes the tensor's rows up to the last that is not zero."""
    rows = tensor.reshape(len(tensor), -1)
    filled = rows.any(1).nonzero()
    if not len(filled):
        return
    last = int(filled[-1]) + 1
    file.seek(begin)
    file.write(rows[:last].cpu().contiguous().view(torch.uint8).numpy().data)

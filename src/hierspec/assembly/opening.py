"""Which decoder runs a checkpoint."""

from __future__ import annotations

import torch

from hierspec.backends.torch.decoder import TorchDecoder
from hierspec.checkpoints.load import Checkpoint
from hierspec.core.errors import HierspecError
from hierspec.progress import Progress, silent
from hierspec.scorers.base import Decoder

BACKENDS = ("auto", "compiled", "compiled-vectors", "torch")
WEIGHTS = ("auto", "int8", "int4")


def open_decoder(
    checkpoint: Checkpoint, device: str, backend: str = "auto", weights: str = "auto", progress: Progress = silent
) -> Decoder:
    """The decoder that suits the checkpoint, the device and what is installed."""
    for value, known, name in ((backend, BACKENDS, "backend"), (weights, WEIGHTS, "weights")):
        if value not in known:
            raise HierspecError(f"Unknown {name} {value!r}; choose {', '.join(known)}.")
    reason = "it runs on a CPU only" if device != "cpu" else ""
    if backend != "torch" and not reason:
        try:
            from hierspec.backends.cpu.decoder import CpuDecoder, unsuited
            from hierspec.backends.cpu.packing import kind_for, packed_weights, unsuited_to_low_bits
        except ImportError:
            reason = "it needs numba (pip install numba)"
        else:
            reason = unsuited(checkpoint.config, checkpoint.dtype)
            if not reason and weights != "auto":
                reason = unsuited_to_low_bits(checkpoint.config)
            if not reason:
                name = str(checkpoint.dtype).removeprefix("torch.") if weights == "auto" else weights
                kind = kind_for(name, matrices=backend != "compiled-vectors")
                packed = packed_weights(checkpoint, kind, progress)
                progress("Compiling for this CPU (once)", 0, 0)
                decoder = CpuDecoder(checkpoint.config, checkpoint.weights, torch.get_num_threads(), packed)
                decoder.prepare(draft_heads=checkpoint.pack is not None)
                return decoder
    if backend.startswith("compiled"):
        raise HierspecError(f"The compiled backend cannot run {checkpoint.name} here: {reason}; use --backend torch.")
    if weights != "auto":
        why = reason or "the torch backend was asked for"
        raise HierspecError(f"Weights in {weights} need the compiled backend ({why}); use --weights auto.")
    return TorchDecoder(checkpoint.config, checkpoint.weights, device)

"""Which backend runs a checkpoint."""

from __future__ import annotations

import torch

from hierspec.backends.base import Decoder
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.load import Checkpoint
from hierspec.core.errors import HierspecError
from hierspec.progress import Progress, silent

BACKENDS = ("auto", "compiled", "compiled-vectors", "torch")
WEIGHTS = ("auto", "file", "int8", "int4")


def runs_in_file_bits(config: DecoderConfig, device: str, backend: str) -> bool:
    """Whether a GGUF file of such a model can run in its own bits here."""
    if device != "cpu" or backend == "torch":
        return False
    try:
        from hierspec.backends.cpu.backend import CpuBackend
    except ImportError:
        return False
    return not CpuBackend(1).refuses(config, "file")


def open_decoder(
    checkpoint: Checkpoint, device: str, backend: str = "auto", weights: str = "auto", progress: Progress = silent
) -> Decoder:
    """The decoder that suits the checkpoint, the device and what is installed."""
    for value, known, name in ((backend, BACKENDS, "backend"), (weights, WEIGHTS, "weights")):
        if value not in known:
            raise HierspecError(f"Unknown {name} {value!r}; choose {', '.join(known)}.")
    format = str(checkpoint.dtype).removeprefix("torch.") if weights == "auto" else weights
    reason = "it runs on a CPU only" if device != "cpu" else ""
    if backend != "torch" and not reason:
        try:
            from hierspec.backends.cpu.backend import CpuBackend
        except ImportError:
            reason = "it needs numba (pip install numba)"
        else:
            compiled = CpuBackend(torch.get_num_threads(), matrix_units=backend != "compiled-vectors")
            reason = compiled.refuses(checkpoint.config, format)
            if not reason:
                decoder = compiled.decoder(checkpoint.config, checkpoint.weights, format, checkpoint, progress)
                compiled.compile(draft_heads=checkpoint.pack is not None, progress=progress)
                return decoder
    if backend.startswith("compiled"):
        raise HierspecError(f"The compiled backend cannot run {checkpoint.name} here: {reason}; use --backend torch.")
    if weights != "auto":
        why = reason or "the torch backend was asked for"
        raise HierspecError(f"--weights {weights} needs the compiled backend ({why}); use --weights auto.")
    return _torch_backend(device).decoder(checkpoint.config, checkpoint.weights, format)


def _torch_backend(device: str) -> TorchBackend:
    if device == "cpu":
        try:
            from hierspec.backends.cpu.answers import answer
        except ImportError:  # without numba torch makes the picks too
            return TorchBackend(device)
        return TorchBackend(device, answer)
    return TorchBackend(device)

"""Which backend runs a checkpoint."""

from __future__ import annotations

import torch

from hierspec.backends.base import Decoder
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.load import Checkpoint
from hierspec.core.errors import HierspecError
from hierspec.progress import Progress, silent

BACKENDS = ("auto", "compiled", "compiled-vectors", "torch", "cuda")
WEIGHTS = ("auto", "file", "int8", "int4")


def why_not_compiled(config: DecoderConfig, format: str, device: str, backend: str = "auto") -> str:
    """Why the compiled backend does not run such a model with weights in this format; empty if it does."""
    if backend in ("torch", "cuda"):
        return f"the {backend} backend was asked for"
    if device != "cpu":
        return "it runs on a CPU only"
    try:
        from hierspec.backends.cpu.backend import CpuBackend
    except ImportError:
        return "it needs numba (pip install numba)"
    return CpuBackend(1).refuses(config, format)


def why_not_cuda(config: DecoderConfig, format: str, device: str, backend: str = "auto") -> str:
    """Why the CUDA backend does not run such a model with weights in this format; empty if it does."""
    if backend not in ("auto", "cuda"):
        return f"the {backend} backend was asked for"
    if backend == "auto" and not device.startswith("cuda"):
        return "it runs on an NVIDIA GPU only"
    try:
        from hierspec.backends.cuda.backend import CudaBackend
    except ImportError:
        return "it needs Triton (pip install triton)"
    return CudaBackend(device).refuses(config, format)


def runs_in_file_bits(config: DecoderConfig, device: str, backend: str) -> bool:
    """Whether a GGUF file of such a model can run here in the file's own quantisation."""
    return not why_not_compiled(config, "file", device, backend)


def open_decoder(
    checkpoint: Checkpoint, device: str, backend: str = "auto", weights: str = "auto", progress: Progress = silent
) -> Decoder:
    """The decoder that suits the checkpoint, the device and what is installed."""
    for value, known, name in ((backend, BACKENDS, "backend"), (weights, WEIGHTS, "weights")):
        if value not in known:
            raise HierspecError(f"Unknown {name} {value!r}; choose {', '.join(known)}.")
    format = str(checkpoint.dtype).removeprefix("torch.") if weights == "auto" else weights
    reason = why_not_compiled(checkpoint.config, format, device, backend)
    if not reason:
        from hierspec.backends.cpu.backend import CpuBackend

        # Weights that are in no file are not kept in the cache either.
        origin = None if checkpoint.enlarged else checkpoint
        compiled = CpuBackend(torch.get_num_threads(), matrix_units=backend != "compiled-vectors")
        decoder = compiled.decoder(checkpoint.config, checkpoint.weights, format, origin, progress)
        compiled.compile(draft_heads=checkpoint.pack is not None, progress=progress)
        return decoder
    gpu_reason = why_not_cuda(checkpoint.config, format, device, backend)
    if not gpu_reason:
        from hierspec.backends.cuda.backend import CudaBackend

        return CudaBackend(device).decoder(checkpoint.config, checkpoint.weights, format, checkpoint, progress)
    if backend == "cuda":
        raise HierspecError(f"The CUDA backend cannot run {checkpoint.name} here: {gpu_reason}; use --backend torch.")
    if backend.startswith("compiled"):
        raise HierspecError(f"The compiled backend cannot run {checkpoint.name} here: {reason}; use --backend torch.")
    if weights != "auto":
        needed = f"the CUDA backend ({gpu_reason})" if device.startswith("cuda") else f"the compiled backend ({reason})"
        raise HierspecError(f"--weights {weights} needs {needed}; use --weights auto.")
    return _torch_backend(device).decoder(checkpoint.config, checkpoint.weights, format)


def _torch_backend(device: str) -> TorchBackend:
    if device == "cpu":
        try:
            from hierspec.backends.cpu.answers import answer
        except ImportError:  # without numba torch makes the picks too
            return TorchBackend(device)
        return TorchBackend(device, answer)
    return TorchBackend(device)

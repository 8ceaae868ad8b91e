"""Measures the limits of the device: memory bandwidth and matrix products."""

from __future__ import annotations

import torch

from hierspec_bench.gpu.timing import seconds_of

_TIMES = 10
_GPU_FLOATS, _CPU_FLOATS = 1 << 29, 1 << 22  # of a copy: more than caches hold
_GPU_SIDE, _CPU_SIDE = 8192, 512  # of the matrices


def roofline(device: torch.device) -> dict[str, float | str]:
    """Terabytes per second of a large copy, reads plus writes, and teraflops of a large matrix product."""
    gpu = device.type == "cuda"
    side, dtype = (_GPU_SIDE, torch.bfloat16) if gpu else (_CPU_SIDE, torch.float32)
    return {
        "copy_terabytes_per_second": round(_copied(device, _GPU_FLOATS if gpu else _CPU_FLOATS) / 1e12, 4),
        "product_teraflops": round(_multiplied(device, side, dtype) / 1e12, 3),
        "product": f"{side} x {side} x {side} in {str(dtype).removeprefix('torch.')}",
    }


def _copied(device: torch.device, floats: int) -> float:
    """Bytes a second."""
    source = torch.ones(floats, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds_of(lambda: target.copy_(source), device, _TIMES)


def _multiplied(device: torch.device, side: int, dtype: torch.dtype) -> float:
    """Operations a second."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: left @ right, device, _TIMES)

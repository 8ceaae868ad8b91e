"""What this machine is, for records and for cache keys of what was measured on it."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The machine in words, without anything that names its owner."""
    return dict(_machine())


@cache  # part of cache keys, so every request may need it
def _machine() -> dict[str, Any]:
    described = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the processor, by the system's names; empty if the system has no list."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = (line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features")))
            return frozenset(next(flags, "").split())
    except OSError:
        return frozenset()


def peak_memory() -> int:
    """Peak memory of this process in bytes, including mapped files that were read; 0: unknown."""
    try:
        import resource
    except ImportError:  # not on every system
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _processor() -> str:
    """The processor's name, where the system has one."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = dict(line.split(":", 1) for line in lines if ":" in line)
    except OSError:
        return platform.processor()
    for key in ("model name", "Model", "CPU part"):
        for name, value in names.items():
            if name.strip() == key:
                return f"{platform.machine()} part {value.strip()}" if key == "CPU part" else value.strip()
    return platform.processor()

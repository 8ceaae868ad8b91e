"""Sizes in bytes as people write and read them."""

import re

from hierspec.core.errors import HierspecError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes from 500M, 4G and the like."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([KMGT]?)i?B?", text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        raise HierspecError(f"{text[:40]!r} is not a size; write it like 500M or 4G.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def written_size(count: int) -> str:
    """512 B, 1.5 KB, 20 MB: two digits or more, in units of 1024."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1024
    return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"

"""Sizes that a small checkpoint can be enlarged to: by name, or as a list."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

import numpy as np

from hierspec.checkpoints.config import DecoderConfig, expected_tensors, inverse_frequencies
from hierspec.checkpoints.values import listed
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown


@dataclass(frozen=True)
class LargerSizes:
    """Sizes of a larger model; 0 keeps the small model's size."""

    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    intermediate: int = 0
    layers: int = 0  # 0: as many as `read` requires, at least the small model's
    read: int = 0  # weights that a pass over one token reads, at least


# The vocabulary stays: the logit of an added token would be 0, which could be the largest. Extra layers make up for the
# weights that the named model's larger head reads.
NAMED_SIZES = {
    # TinyLlama 1.1B: as deep as small models, so that they fit into it.
    "1B": LargerSizes(2048, 32, 4, 64, 5632, read=22 * 44_040_192 + 32_000 * 2048),
    # Llama 3 8B.
    "8B": LargerSizes(4096, 32, 8, 128, 14336, read=32 * 218_103_808 + 128_256 * 4096),
    # Qwen2.5 32B.
    "32B": LargerSizes(5120, 40, 8, 128, 27648, read=64 * 487_587_840 + 152_064 * 5120),
}
_OWN = tuple(field.name for field in fields(LargerSizes) if field.name != "read")
_HOW = f"choose {', '.join(NAMED_SIZES)}, or write sizes such as hidden=4096,heads=32,layers=32"
_SIZE = re.compile(r"[0-9]{1,9}")


def read_sizes(text: str) -> LargerSizes:
    """Sizes by name, or as a list such as hidden=4096,heads=32 of the sizes that differ from the small model's."""
    if text in NAMED_SIZES:
        return NAMED_SIZES[text]
    given: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (each.strip() for each in part.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in _OWN or name in given or not _SIZE.fullmatch(size) or int(size) < 1:
            raise HierspecError(f"A model cannot be enlarged to {shown(text)}: {_HOW} (of {listed(_OWN)}).")
        given[name] = int(size)
    return LargerSizes(**given)


def enlarged_config(small: DecoderConfig, sizes: LargerSizes) -> DecoderConfig:
    """The configuration of the larger model; HierspecError if the small one does not fit into it."""
    hidden = sizes.hidden or small.hidden
    heads, kv_heads = sizes.heads or small.heads, sizes.kv_heads or small.kv_heads
    wider = replace(
        small,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=sizes.head_size or small.head_size,
        intermediate=sizes.intermediate or small.intermediate,
        # A norm's mean is over the wider row, of which only the first part is nonzero.
        norm_eps=small.norm_eps * small.hidden / hidden,
    )
    _check_widths(small, wider)
    layers = sizes.layers or max(small.layers, _layers_that_read(wider, sizes.read))
    if layers < small.layers:
        raise HierspecError(f"A model of {small.layers} layers cannot be enlarged to {layers}: {_HOW}.")
    # Windows and other layer settings repeat.
    return replace(wider, layer_configs=tuple(small.layer_configs[n % small.layers] for n in range(layers)))


def _check_widths(small: DecoderConfig, large: DecoderConfig) -> None:
    for name in ("hidden", "intermediate", "kv_heads"):
        before, after = getattr(small, name), getattr(large, name)
        if after < before:
            raise HierspecError(f"A model of {name} {before} cannot be enlarged to {after}: {_HOW}.")
    before, after = small.heads // small.kv_heads, large.heads // large.kv_heads
    if after < before:
        raise HierspecError(
            f"A model with {before} query heads for each of its key heads cannot be enlarged to {after} for each of "
            f"them: {_HOW}."
        )
    if large.head_size % small.head_size:
        raise HierspecError(
            f"Heads of size {small.head_size} cannot be enlarged to {large.head_size}, which is no multiple: {_HOW}."
        )
    if large.head_size > small.head_size and any(small.rotary_layers):
        step = large.head_size // small.head_size
        frequencies, wanted = (inverse_frequencies(each.rotary, each.head_size)[0] for each in (large, small))
        if not np.array_equal(frequencies[::step], wanted):
            raise HierspecError(
                f"Heads of size {small.head_size} cannot be enlarged to {large.head_size} under the rotary scaling "
                f"{small.rotary.scaling}, whose frequencies depend on the head size: keep head_size={small.head_size}."
            )


def weights_read(config: DecoderConfig) -> int:
    """Weights that a pass over one token reads."""
    tensors = expected_tensors(config).items()
    return sum(math.prod(shape) for name, shape in tensors if config.tied or "embed_tokens" not in name)


def _layers_that_read(config: DecoderConfig, weights: int) -> int:
    """How many such layers read this many weights, together with the head."""
    one, two = (weights_read(replace(config, layer_configs=config.layer_configs[:1] * count)) for count in (1, 2))
    return 1 + max(0, -(-(weights - one) // (two - one)))

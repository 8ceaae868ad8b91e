"""Drafts of full length on a GPU, so that vLLM replays a CUDA graph of a whole step.

vLLM 0.25 has graphs of whole steps only for batches in which every row verifies the longest draft. In all others it
starts attention layer by layer, and with a small model that takes longer than everything else. Filled drafts cost rows
that are rejected, which is free as long as a step mostly reads weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hierspec.hosts.vllm_options import read_options

# Up to about so many rows a step of a large GPU takes as long as with one (docs/scaling.md). Beyond them a step takes
# longer with every row, and starting its kernels one by one matters less.
_MOST_ROWS = 150


@dataclass(frozen=True)
class Filling:
    length: int  # of every draft
    token: int  # that fills them: where the target does write it, the text ends

    def fill(self, drafts: list[list[int]], sampled: Sequence[Sequence[int]]) -> None:
        """Fills the drafts of the rows that have sampled something; others still read their prompts."""
        if len(drafts) * (1 + self.length) > _MOST_ROWS:
            return
        for draft, tokens in zip(drafts, sampled, strict=True):
            if tokens:
                draft += [self.token] * (self.length - len(draft))


def filling_for(config: Any) -> Filling | None:
    """How drafts are filled under this vLLM configuration; None where there are no CUDA graphs, or by its options."""
    model = config.model_config
    if read_options(config.additional_config).fill == "off":
        return None
    if config.device_config.device_type != "cuda" or getattr(model, "enforce_eager", False):
        return None
    ends = getattr(model.hf_text_config, "eos_token_id", None)
    ends = ends[0] if isinstance(ends, list) and ends else ends
    return Filling(config.speculative_config.num_speculative_tokens, ends if isinstance(ends, int) else 0)

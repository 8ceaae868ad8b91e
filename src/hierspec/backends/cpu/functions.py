"""Lists of compiled functions by purpose. This imports no torch, so that compile workers start fast."""

from __future__ import annotations

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.amx_attention import run_tile_attention
from hierspec.backends.cpu.attention import run_attention
from hierspec.backends.cpu.compiled import CompiledFunction
from hierspec.backends.cpu.draft_passes import run_draft, run_keys
from hierspec.backends.cpu.head_passes import run_draft_head, run_join
from hierspec.backends.cpu.layers import run_head, run_layers
from hierspec.backends.cpu.pick import greedy_rows, sample_rows
from hierspec.backends.cpu.pick_batches import pick_batch
from hierspec.backends.cpu.text_passes import run_text


def needed_functions(draft_heads: bool, sampling: bool = False) -> list[CompiledFunction]:
    """For passes and greedy picks; `draft_heads`: for trained drafters; `sampling`: for temperatures above 0."""
    heads = [run_draft_head, run_join, run_keys, run_draft] if draft_heads else []
    attention = [run_attention, *([run_tile_attention] if amx.available() else [])]  # drafters may be in float32
    picks = [greedy_rows, *([sample_rows, pick_batch] if sampling else [])]
    return [run_head, run_layers, *attention, *picks, run_text, *heads]

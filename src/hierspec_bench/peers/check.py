"""Checks that an engine compiled here runs at all: it writes a few tokens from a tiny file, in its own process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hierspec_bench.peers.process import PeerError, Worker

_SECONDS = 120.0
_VOCABULARY, _WIDTH, _INNER, _LAYERS, _HEADS = 512, 256, 512, 2, 4
_MATRICES = {  # per layer: number format, rows, columns; all formats of files that `files` makes
    "attn_q": ("Q4_1", _WIDTH, _WIDTH),
    "attn_k": ("Q4_0", _WIDTH, _WIDTH),
    "attn_v": ("Q8_0", _WIDTH, _WIDTH),
    "attn_output": ("Q4_1", _WIDTH, _WIDTH),
    "ffn_gate": ("Q4_0", _INNER, _WIDTH),
    "ffn_up": ("Q8_0", _INNER, _WIDTH),
    "ffn_down": ("Q4_1", _WIDTH, _INNER),
}


def died_by(name: str, command: Sequence[str | Path]) -> str:
    """The signal that killed the engine while it wrote a few tokens; "" if it survived.

    Other failures do not come from compiler options; opening the engine reports them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_tiny_gguf(path)
        worker = Worker(name, command)
        try:
            for flash in (True, False):
                setting = {"threads": 2, "context": 128, "flash": flash}
                worker.ask({"do": "open", "model": str(path), "setting": setting}, _SECONDS)
                worker.ask(_REQUEST, _SECONDS)
        except PeerError:
            return worker.died_by
        finally:
            worker.close()
    return ""


_REQUEST = {
    "do": "generate",
    "prompt": list(range(3, 43)),  # many rows at once, then single ones: different code
    "max_tokens": 4,
    "temperature": 0.0,
    "seed": 0,
    "stop_ids": [],
    "fresh": True,
}


def write_tiny_gguf(path: Path) -> None:
    """A file like the default model's with random weights, large enough for the widest instructions."""
    import gguf

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer)
    _add_tokenizer(writer, gguf)

    def add(tensor: str, kind: str, *shape: int) -> None:
        number_format = gguf.GGMLQuantizationType[kind]
        values = random.normal(0, 0.05, shape).astype(np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
        writer.add_tensor(tensor, gguf.quantize(values, number_format), raw_dtype=number_format)

    add("token_embd.weight", "Q8_0", _VOCABULARY, _WIDTH)
    add("output_norm.weight", "F32", _WIDTH)
    for layer in range(_LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", "F32", _WIDTH)
        for matrix, (kind, rows, columns) in _MATRICES.items():
            add(f"blk.{layer}.{matrix}.weight", kind, rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(_VOCABULARY)


def _add_tokenizer(writer: Any, gguf: Any) -> None:
    """Adds a tokenizer: engines reject a file without one, but nothing is encoded with it."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(f"word{number}" for number in range(_VOCABULARY - len(special)))])
    writer.add_token_scores([0.0] * _VOCABULARY)
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (_VOCABULARY - len(kinds))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

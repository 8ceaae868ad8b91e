"""How long a large GGUF file takes to its first token, and how much memory: a random one, shaped like Qwen2.

The file is written once into the given folder: matrices of Q4_K, but for the head and half of the values and down
projections, which are Q6_K, as llama.cpp's Q4_K_M has them, and a vocabulary of the real size. Each measurement is a
new process. Cold: nothing is in the cache, compiled code included; warm: everything is. The last line is one JSON
document. It made docs/results/big-file.json and docs/results/big-file-7b.json.

example:
  python experiments/big_file.py FOLDER --output docs/results/big-file.json
  python experiments/big_file.py FOLDER --shape 7B
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from hierspec.machine import machine

_PROMPT = "The quick brown fox jumps over the lazy dog."
_WORKER = f"""
import json, sys
import hierspec
source, weights = sys.argv[1:]
model = hierspec.load(source, weights=weights)
for _ in model.stream({_PROMPT!r}, plan="plain", raw=True, max_tokens=1):
    pass
print("first token", flush=True)
answer = model.generate({_PROMPT!r}, plan="plain", raw=True, max_tokens=16)
print(json.dumps({{"decode_tokens_per_second": answer.decode_tokens_per_second, "weights": model.decoder.products,
                  "weights_bytes": model.decoder.weight_bytes, "peak": model.memory()["peak"]}}), flush=True)
"""


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int
    vocabulary: int
    head_size: int = 128


SHAPES = {
    "1.5B": Shape(1536, 12, 2, 8960, 28, 151_936),
    "7B": Shape(3584, 28, 4, 18_944, 28, 152_064),
    "tiny": Shape(256, 2, 1, 512, 2, 512),
}


def matrices(shape: Shape) -> dict[str, tuple[tuple[int, int], Kind]]:
    """Outputs, inputs and quantisation of every matrix."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    found = {"token_embd.weight": ((shape.vocabulary, shape.hidden), Kind.Q4_K)}
    for layer in range(shape.layers):
        rich = Kind.Q6_K if layer % 2 == 0 else Kind.Q4_K
        for name, size, kind in (
            ("attn_q", (queries, shape.hidden), Kind.Q4_K),
            ("attn_k", (keys, shape.hidden), Kind.Q4_K),
            ("attn_v", (keys, shape.hidden), rich),
            ("attn_output", (shape.hidden, queries), Kind.Q4_K),
            ("ffn_gate", (shape.intermediate, shape.hidden), Kind.Q4_K),
            ("ffn_up", (shape.intermediate, shape.hidden), Kind.Q4_K),
            ("ffn_down", (shape.hidden, shape.intermediate), rich),
        ):
            found[f"blk.{layer}.{name}.weight"] = size, kind
    found["output.weight"] = (shape.vocabulary, shape.hidden), Kind.Q6_K
    return found


def vectors(shape: Shape) -> dict[str, int]:
    """Sizes of norms and biases."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    found = {"output_norm.weight": shape.hidden}
    for layer in range(shape.layers):
        found |= {f"blk.{layer}.{name}.weight": shape.hidden for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{layer}.attn_{name}.bias": queries if name == "q" else keys for name in "qkv"}
    return found


def random_blocks(size: tuple[int, int], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Bytes of random blocks whose weights are about 0.02 in size."""
    numbers, octets = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (size[0], size[1] // numbers, octets), dtype=np.uint8)
    halves = {0: 1.4e-4, 2: 1.05e-3} if kind == Kind.Q4_K else {208: 1.5e-5}
    for start, value in halves.items():
        blocks[:, :, start : start + 2] = np.array([value], np.float16).view(np.uint8)
    return blocks.reshape(size[0], -1)


def write(path: Path, shape: Shape) -> None:
    """Writes the file with one matrix in memory at a time."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(4096)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, shape.vocabulary)
    rng = np.random.default_rng(0)
    for name, count in vectors(shape).items():
        writer.add_tensor_info(name, (count,), np.dtype(np.float32), 4 * count)
    for name, (size, kind) in matrices(shape).items():
        numbers, octets = gguf.GGML_QUANT_SIZES[kind]
        stored = size[0], size[1] // numbers * octets
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), stored[0] * stored[1], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, count in vectors(shape).items():
        noise = 0.1 * rng.standard_normal(count).astype(np.float32)
        writer.write_tensor_data(noise + np.float32("norm" in name))
    for size, kind in matrices(shape).values():
        writer.write_tensor_data(random_blocks(size, kind, rng))
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Adds a tokenizer with one token per byte, in GPT-2's alphabet; the other tokens are never used."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    tokens += [f"<unused {number}>" for number in range(vocabulary - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * 256, *[5] * (vocabulary - 257)])
    writer.add_token_merges([])
    writer.add_eos_token_id(0)


def measure(path: Path, cache: Path, weights: str) -> dict[str, Any]:
    """Runs one process: seconds until its first token, and its own report."""
    cpu_before = _cpu_seconds()
    environment = {**os.environ, "HIERSPEC_CACHE": str(cache), "NUMBA_CACHE_DIR": str(cache / "compiled")}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(path), weights], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - began
    last = process.stdout.readline()
    if process.wait() != 0 or line.strip() != "first token":
        sys.exit("The process ended before its first token; its error is above.")
    cpu = round(_cpu_seconds() - cpu_before, 2)  # of the whole process, so other work on the machine does not count
    return {"first_token_seconds": round(seconds, 2), "cpu_seconds": cpu, **json.loads(last)}


def _cpu_seconds() -> float:
    """CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the file, and for caches")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--weights", default="file")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(command)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path, cache = arguments.folder / f"random-{arguments.shape}.gguf", arguments.folder / "cache"
    if not path.is_file():
        partial = path.with_suffix(".part")
        write(partial, SHAPES[arguments.shape])
        partial.rename(path)
    shutil.rmtree(cache, ignore_errors=True)
    size = path.stat().st_size
    runs = {name: measure(path, cache, arguments.weights) for name in ("cold", "warm")}
    cached = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    document = {
        "command": f"python experiments/big_file.py FOLDER --shape {arguments.shape} --weights {arguments.weights}",
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "shape": arguments.shape,
        "asked": arguments.weights,
        "file_bytes": size,
        "cache_bytes": cached,
        **runs,
        "peak_share": {name: round(run["peak"] / size, 3) for name, run in runs.items()},
    }
    text = json.dumps(document)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

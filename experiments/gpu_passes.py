"""What does a forward pass cost on this GPU, and does a token have the same bits in every pass?

Random weights in the shapes of the default model, a 1B and an 8B one; nothing is downloaded. First the bandwidth of a
large copy; then, for each shape and context, the time of a pass over 1 to 64 tokens (kernels alone, and with Python,
head and pick), whether rows are the same bits over widths, one by one and in a tree, prefill, and plain decoding
through the engine. It stops before its time is up, prints a short table, and then one JSON document.
docs/results/base-cuda-bfloat16-greedy.json is what the torch backend took on such a GPU.

example:
  PYTHONPATH=src python experiments/gpu_passes.py --seconds 280 --output passes.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch
from hierspec.checkpoints.config import DecoderConfig, LayerConfig, Rotary, expected_tensors
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.machine import machine
from hierspec.scorers.catalogue import ScorerCatalogue
from hierspec.scorers.pool import StaircasePool

if TYPE_CHECKING:
    from hierspec.backends.cuda.decoder import CudaDecoder
    from hierspec.backends.cuda.memory import CudaMemory

SHAPES = {  # vocabulary, hidden, layers, heads, heads for keys, head size, intermediate, tied
    "default": (49152, 576, 30, 9, 3, 64, 1536, True),
    "1B": (128256, 2048, 16, 32, 8, 64, 8192, True),
    "8B": (128256, 4096, 32, 32, 8, 128, 14336, False),
}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 2048)
TIMES = 20  # a pass is timed
TOKENS = 128  # that plain decoding writes


def config_of(shape: str) -> DecoderConfig:
    vocabulary, hidden, layers, heads, kv_heads, size, intermediate, tied = SHAPES[shape]
    layer = LayerConfig()
    return DecoderConfig(
        family="llama",
        vocabulary=vocabulary,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        intermediate=intermediate,
        norm_eps=1e-5,
        context=8192,
        tied=tied,
        rotary=Rotary(500000.0),
        layer_configs=(layer,) * layers,
        bos_id=None,
        eos_ids=(),
    )


class RandomWeights(Mapping[str, Tensor]):
    """Weights that are made when they are asked for, on the device: a whole model of them is never held twice."""

    def __init__(self, config: DecoderConfig, device: str) -> None:
        self._shapes, self._device = expected_tensors(config), device

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return numbers.normal_(0, shape[1] ** -0.5, generator=generator)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def seconds_of(action: Callable[[], object], times: int = TIMES) -> float:
    """Of one call, after some that compile and record; the median of a few rounds."""
    for _ in range(3):
        action()
    rounds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            action()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - began) / times)
    return sorted(rounds)[1]


def bandwidth() -> float:
    """Terabytes a second, read and written, of a large copy."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source)) / 1e12


def a_chain(memory: CudaMemory, context: int, rows: int) -> Batch:
    """Tokens that follow a context, each after the one before it."""
    positions = np.arange(context, context + rows)
    return Batch(
        positions=positions,
        slots=positions.copy(),
        text_starts=np.array([0, rows]),
        tables=np.arange(-(-(context + rows) // memory.page))[None],
        lengths=positions + 1,
        path_starts=np.zeros(rows + 1, np.int64),
        paths=np.zeros(0, np.int64),
        drafted=np.zeros(0, np.int64),
    )


def a_tree(memory: CudaMemory, context: int, rows: int) -> Batch:
    """The same tokens as nodes of a tree, each twice: the second ones are leaves beside the chain."""
    chain = a_chain(memory, context, rows)
    slots = context + np.arange(2 * rows)  # node 2 i is token i, node 2 i + 1 its double
    paths = [[*slots[: 2 * row : 2], slots[2 * row + side]] for row in range(rows) for side in (0, 1)]
    return Batch(
        positions=np.repeat(chain.positions, 2),
        slots=slots,
        text_starts=np.array([0, 2 * rows]),
        tables=np.arange(-(-(context + 2 * rows) // memory.page))[None],
        lengths=np.full(2 * rows, context),
        path_starts=np.cumsum([0, *(len(path) for path in paths)]),
        paths=np.concatenate(paths).astype(np.int64),
        drafted=np.ones(2 * rows, np.int64),
    )


class Passes:
    """Passes of one model after one context."""

    def __init__(self, decoder: CudaDecoder, memory: CudaMemory, context: int) -> None:
        self.decoder, self.memory, self.context = decoder, memory, context
        generator = torch.Generator("cuda").manual_seed(1)
        for numbers in (memory.keys, memory.values):
            numbers[:, :, :context].normal_(generator=generator)
        self.tokens = np.random.default_rng(1).integers(0, decoder.config.vocabulary, 64)

    def logits(self, batch: Batch, tokens: np.ndarray) -> Tensor:
        decoder = self.decoder
        hidden = decoder.run(self.memory, batch, decoder.embed(tokens), 0, decoder.config.layers)
        return decoder.logits(hidden)

    def cost(self, rows: int) -> dict[str, float]:
        """Milliseconds: kernels alone, and with Python and a copy back."""
        from hierspec.backends.cuda.work import work_of

        decoder, memory, batch = self.decoder, self.memory, a_chain(self.memory, self.context, rows)
        config, tokens = decoder.config, self.tokens[:rows]
        whole = seconds_of(lambda: self.logits(batch, tokens).argmax(dim=1).cpu())
        work = work_of(batch, config.heads // config.kv_heads, 0, memory.spare)

        def kernels() -> None:
            decoder.replay(memory, work, 0, config.layers)
            decoder.logits(decoder.scratch.hidden[:rows])

        return {"kernels_ms": round(1e3 * seconds_of(kernels), 4), "pass_ms": round(1e3 * whole, 4)}

    def same_bits(self, widths: Sequence[int]) -> dict[str, bool]:
        """Rows over widths, one by one, and in a tree, against the widest pass."""
        widest = self.logits(a_chain(self.memory, self.context, max(widths)), self.tokens[: max(widths)]).clone()
        over = all(
            torch.equal(self.logits(a_chain(self.memory, self.context, rows), self.tokens[:rows]), widest[:rows])
            for rows in widths
        )
        single = all(
            torch.equal(self.logits(a_chain(self.memory, self.context + i, 1), self.tokens[i : i + 1])[0], widest[i])
            for i in range(8)
        )
        tree = self.logits(a_tree(self.memory, self.context, 16), np.repeat(self.tokens[:16], 2))
        return {"over_widths": over, "one_by_one": single, "in_a_tree": torch.equal(tree[::2], widest[:16])}


def plain(decoder: CudaDecoder, context: int, prefill: bool = False) -> dict[str, float]:
    """Plain decoding through the engine, Python included, after a prompt of so many tokens."""
    scorer = ScorerCatalogue("random", decoder, StaircasePool(decoder, 8 << 30), None).whole(decoder.config.layers)
    prompt = np.random.default_rng(2).integers(0, decoder.config.vocabulary, context)
    rates = []
    for seed in range(2):  # the first one records graphs
        scorer.forget()
        request = Request(prompt, Sampling(max_tokens=TOKENS, seed=seed), Hierarchy((Tier(scorer),)))
        times = [time.perf_counter()]
        for _ in Engine(time.perf_counter).run([request]):
            times.append(time.perf_counter())
        if request.error is not None:
            raise request.error
        rates.append(((TOKENS - 1) / (times[-1] - times[1]), context / (times[1] - times[0])))
    return {"tokens_per_second": round(rates[-1][0], 1), "prefill_tokens_per_second": round(rates[-1][1], 1)}


def examine(shape: str, format: str, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    from hierspec.backends.cuda.backend import CudaBackend

    config = config_of(shape)
    backend = CudaBackend("cuda")
    if reason := backend.refuses(config, format):
        yield {"shape": shape, "format": format, "refused": reason}
        return
    decoder = backend.decoder(config, RandomWeights(config, "cuda"), format)
    memory = decoder.memory((config.layers,), 4 << 30)
    for context in CONTEXTS:
        if left() < 15:
            return
        with torch.inference_mode():
            passes = Passes(decoder, memory, context)
            result: dict[str, Any] = {"shape": shape, "format": format, "context": context}
            result["gigabytes"] = round(decoder.weight_bytes / 1e9, 3)
            result["same_bits"] = passes.same_bits(WIDTHS)
            result["widths"] = {str(rows): passes.cost(rows) for rows in WIDTHS if left() > 5}
            result["plain"] = plain(decoder, context)
        yield result


def table(document: dict[str, Any]) -> str:
    lines = [f"copy: {document['copy_terabytes_per_second']:.2f} TB/s"]
    lines.append(
        "shape    format    context  bits  " + "".join(f"{rows:>8}" for rows in WIDTHS) + "  plain/s  prefill/s"
    )
    for result in document["results"]:
        if "error" in result or "refused" in result:
            lines.append(f"{result['shape']:8} {result['format']:9} {result.get('error') or result['refused']}")
            continue
        start = f"{result['shape']:8} {result['format']:9} {result['context']:7}  "
        bits = "same" if all(result["same_bits"].values()) else "NOT "
        for kind in ("kernels_ms", "pass_ms"):
            costs = "".join(f"{result['widths'].get(str(rows), {}).get(kind, float('nan')):8.3f}" for rows in WIDTHS)
            end = ""
            if kind == "kernels_ms":
                rates = result["plain"]
                end = f"  {rates['tokens_per_second']:7.1f}  {rates['prefill_tokens_per_second']:9.1f}"
            lines.append(f"{start}{bits}  {costs}{end}  {kind}")
    return "\n".join(lines)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    end = time.perf_counter() + arguments.seconds
    results: list[dict[str, Any]] = []
    document = {
        "machine": machine(),
        "command": "python " + " ".join(sys.argv),
        "copy_terabytes_per_second": bandwidth(),
        "results": results,
    }
    for case in arguments.cases.split(","):
        shape, _, format = case.partition(":")
        try:
            for result in examine(shape, format or "bfloat16", lambda: end - time.perf_counter()):
                results.append(result)
                print(json.dumps(result), flush=True)
        except Exception as error:  # one shape that fails must not take the others with it
            results.append({"shape": shape, "format": format, "error": f"{type(error).__name__}: {error}"[:500]})
            print(results[-1], flush=True)
        torch.cuda.empty_cache()
    return document


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = "default,8B,1B,8B:int8,default:int8"
    parser.add_argument("--cases", default=cases, help="shapes, each with :int8 for 8-bit weights (default: all)")
    parser.add_argument("--seconds", type=float, default=280, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, help="a file for the JSON document")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA GPU here.")
    document = measured(arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())

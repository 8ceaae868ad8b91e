"""The cost of a pass by shape, context and width, and whether a token has the same bits in every pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Backend, Batch, Decoder, Memory
from hierspec.backends.torch.backend import TorchBackend
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.scorers.catalogue import ScorerCatalogue
from hierspec.scorers.pool import StaircasePool
from hierspec_bench.gpu.random_models import RandomWeights, shape_config
from hierspec_bench.gpu.timing import Deadline, seconds_of

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 2048)
_TIMES = 20  # repetitions per timing
_TOKENS = 128  # tokens that plain decoding writes
_PREFILL = 64  # tokens per prefill pass
_KV_BYTES = 4 << 30


def measure_shape(
    shape: str,
    device: torch.device,
    format: str,
    contexts: Sequence[int],
    deadline: Deadline,
    widths: Sequence[int] = WIDTHS,
    tokens: int = _TOKENS,
) -> Iterator[dict[str, Any]]:
    """For every context: costs by width, whether bits are the same, plain decoding; or why it cannot run."""
    config = shape_config(shape)
    backend: Backend = _backend(device)
    about: dict[str, Any] = {"shape": shape, "format": format, "backend": backend.name}
    if reason := backend.refuses(config, format):
        yield about | {"refused": reason}
        return
    decoder = backend.decoder(config, RandomWeights(config, device), format)
    about["gigabytes"] = round(decoder.weight_bytes / 1e9, 3)
    memory = decoder.memory((config.layers,), _KV_BYTES)
    for context in contexts:
        if deadline.over:
            return
        with torch.inference_mode():
            passes = Passes(decoder, memory, context, max(widths))
            result = about | {"context": context, "same_bits": passes.same_bits(widths)}
            result["widths"] = {str(rows): passes.cost(rows) for rows in widths if not deadline.over}
            if not deadline.over:
                result["plain"] = plain(decoder, context, tokens)
        yield result


def _backend(device: torch.device) -> Backend:
    if device.type != "cuda":
        return TorchBackend(device)
    from hierspec.backends.cuda.backend import CudaBackend

    return CudaBackend(device)


def chain(memory: Memory, context: int, rows: int) -> Batch:
    """A batch of tokens that follow a context as a chain."""
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


def tree(memory: Memory, context: int, rows: int) -> Batch:
    """The same tokens as nodes of a tree, each twice: the second copies are leaves beside the chain."""
    of_chain = chain(memory, context, rows)
    slots = context + np.arange(2 * rows)  # node 2 i is token i, node 2 i + 1 its double
    paths = [[*slots[: 2 * row : 2], slots[2 * row + side]] for row in range(rows) for side in (0, 1)]
    return Batch(
        positions=np.repeat(of_chain.positions, 2),
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

    def __init__(self, decoder: Decoder, memory: Memory, context: int, widest: int) -> None:
        self.decoder, self.memory, self.context = decoder, memory, context
        random, vocabulary = np.random.default_rng(1), decoder.config.vocabulary
        self.tokens = random.integers(0, vocabulary, widest)
        for start in range(0, context, _PREFILL):
            rows = min(_PREFILL, context - start)
            self._states(chain(memory, start, rows), random.integers(0, vocabulary, rows))

    def _states(self, batch: Batch, tokens: np.ndarray) -> Tensor:
        decoder = self.decoder
        return decoder.run(self.memory, batch, decoder.embed(tokens), 0, decoder.config.layers)

    def logits(self, batch: Batch, tokens: np.ndarray) -> Tensor:
        return self.decoder.logits(self._states(batch, tokens))

    def cost(self, rows: int) -> dict[str, float]:
        """Milliseconds with Python and a copy back, and of the kernels alone if the backend records graphs."""
        batch, tokens = chain(self.memory, self.context, rows), self.tokens[:rows]
        device = self.decoder.backend.device
        whole = seconds_of(lambda: self.logits(batch, tokens).argmax(dim=1).cpu(), device, _TIMES)
        costs = {"pass_ms": round(1e3 * whole, 4)}
        if (kernels := self._kernels(batch)) is not None:
            costs["kernels_ms"] = round(1e3 * seconds_of(kernels, device, _TIMES), 4)
        return costs

    def _kernels(self, batch: Batch) -> Callable[[], None] | None:
        if self.decoder.backend.name != "cuda":
            return None
        from hierspec.backends.cuda.decoder import CudaDecoder
        from hierspec.backends.cuda.memory import CudaMemory
        from hierspec.backends.cuda.work import work_of

        decoder, memory = self.decoder, self.memory
        assert isinstance(decoder, CudaDecoder)
        assert isinstance(memory, CudaMemory)
        config = decoder.config
        work = work_of(batch, config.heads // config.kv_heads, 0, memory.spare)

        def kernels() -> None:
            decoder.replay(memory, work, 0, config.layers)
            decoder.logits(decoder.scratch.hidden[: work.rows])

        return kernels

    def same_bits(self, widths: Sequence[int]) -> dict[str, bool]:
        """Whether rows have the widest pass's bits in narrower passes, one at a time, and in a tree."""
        memory, context, most = self.memory, self.context, max(widths)
        widest = self.logits(chain(memory, context, most), self.tokens[:most]).clone()
        over = all(
            torch.equal(self.logits(chain(memory, context, rows), self.tokens[:rows]), widest[:rows]) for rows in widths
        )
        single = all(
            torch.equal(self.logits(chain(memory, context + i, 1), self.tokens[i : i + 1])[0], widest[i])
            for i in range(min(8, most))
        )
        few = min(16, most)
        in_tree = self.logits(tree(memory, context, few), np.repeat(self.tokens[:few], 2))
        return {"over_widths": over, "one_by_one": single, "in_a_tree": torch.equal(in_tree[::2], widest[:few])}


def plain(decoder: Decoder, context: int, tokens: int = _TOKENS) -> dict[str, float]:
    """Plain decoding through the engine, Python included, after a prompt of `context` tokens."""
    scorer = ScorerCatalogue("random", decoder, StaircasePool(decoder, _KV_BYTES), None).whole(decoder.config.layers)
    prompt = np.random.default_rng(2).integers(0, decoder.config.vocabulary, context)
    rates = (0.0, 0.0)
    for seed in range(2):  # the first run records graphs
        scorer.forget()
        request = Request(prompt, Sampling(max_tokens=tokens, seed=seed), Hierarchy((Tier(scorer),)))
        times = [time.perf_counter()]
        for _ in Engine(time.perf_counter).run([request]):
            times.append(time.perf_counter())
        if request.error is not None:
            raise request.error
        rates = (tokens - 1) / (times[-1] - times[1]), context / (times[1] - times[0])
    return {"tokens_per_second": round(rates[0], 1), "prefill_tokens_per_second": round(rates[1], 1)}

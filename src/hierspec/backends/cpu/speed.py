"""Measures how fast the compiled pass multiplies on this CPU, by format of weights and number of rows."""

from __future__ import annotations

import time

import numpy as np

from hierspec.backends.cpu.decoder import Scratch
from hierspec.backends.cpu.layers import run_head
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import kind_for, packed_bytes
from hierspec.backends.cpu.product import product_code
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.checkpoints.config import DecoderConfig

_ROUNDS = 3
_ONES = 0x3F803F80  # about 1 as a float32 and as two bfloat16: avoids denormals, which slow some CPUs down


class CompiledProducts:
    """Times `run_head` with synthetic weights: a norm, and a product with any number of outputs."""

    def __init__(self, config: DecoderConfig, threads: int, weight_bytes: int, matrices: bool) -> None:
        self._hidden, self._matrices = config.hidden, matrices
        self._team, self._scratch = ThreadTeam(threads), Scratch(config, threads)
        memory = np.full(weight_bytes // 4 + LANES, _ONES, np.int32)
        self._weights = memory[-memory.ctypes.data % 64 // 4 :]

    def seconds(self, dtype: str, rows: int, most: int) -> float:
        """Seconds per weight and pass, over at most `most` weights; the best of a few rounds, since noise only adds."""
        kind = kind_for(dtype, self._matrices)
        block = packed_bytes((LANES, self._hidden), kind)
        outputs = LANES * max(1, min((self._weights.nbytes - 64) // block, most // (LANES * self._hidden)))
        hidden = np.random.default_rng(0).standard_normal((rows, self._hidden)).astype(np.float32)
        norm, logits = np.ones(self._hidden, np.float32), np.empty((rows, outputs), np.float32)
        scratch, best = self._scratch.for_rows(rows, 0), float("inf")
        weights, memory = self._weights.ctypes.data, (scratch.normed, scratch.inputs, scratch.records)
        for _ in range(_ROUNDS + 1):  # the first round has cold caches or unmapped pages
            began = time.perf_counter()
            self._team.run(
                run_head, self._team.sync, hidden, norm, np.array([1e-5], np.float32), weights, product_code(kind),
                *memory, logits,
            )  # fmt: skip
            best = min(best, time.perf_counter() - began)
        return best / (outputs * self._hidden)

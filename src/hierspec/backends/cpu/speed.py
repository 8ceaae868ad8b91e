"""How fast products of the compiled pass are on this CPU, by the kind of weights and the number of rows."""

from __future__ import annotations

import time

import numpy as np

from hierspec.backends.cpu.decoder import Scratch
from hierspec.backends.cpu.layers import run_head
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import kind_for, packed_bytes
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.checkpoints.config import DecoderConfig

_ROUNDS = 3
_BOTH = 0x3F803F80  # about 1, as one float32 and as two bfloat16: numbers as any, at which no CPU stumbles


class CompiledProducts:
    """Times `run_head` over weights that are nobody's: a norm, and a product with any number of outputs."""

    def __init__(self, config: DecoderConfig, threads: int, weight_bytes: int, matrices: bool) -> None:
        self._hidden, self._matrices = config.hidden, matrices
        self._team, self._scratch = ThreadTeam(threads), Scratch(config, threads)
        memory = np.full(weight_bytes // 4 + LANES, _BOTH, np.int32)
        self._weights = memory[-memory.ctypes.data % 64 // 4 :]

    def seconds(self, dtype: str, rows: int, most: int) -> float:
        """Of one weight of one pass, from at most `most` weights; the best of a few rounds, since others only add."""
        kind = kind_for(dtype, self._matrices)
        block = packed_bytes((LANES, self._hidden), kind)
        outputs = LANES * max(1, min((self._weights.nbytes - 64) // block, most // (LANES * self._hidden)))
        hidden = np.random.default_rng(0).standard_normal((rows, self._hidden)).astype(np.float32)
        norm, logits = np.ones(self._hidden, np.float32), np.empty((rows, outputs), np.float32)
        scratch, best = self._scratch.for_rows(rows, 0), float("inf")
        for _ in range(_ROUNDS + 1):  # the first finds cold caches, or pages not yet there
            began = time.perf_counter()
            self._team.run(
                run_head, hidden, norm, np.float32(1e-5), self._weights.ctypes.data, kind, scratch.normed,
                scratch.inputs, scratch.records, logits,
            )  # fmt: skip
            best = min(best, time.perf_counter() - began)
        return best / (outputs * self._hidden)

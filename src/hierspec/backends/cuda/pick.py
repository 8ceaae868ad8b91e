"""Answers to asks on a GPU: one small copy in, one kernel, one small copy out."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cuda.filters import adjust, changes_logits, distributions
from hierspec.backends.cuda.graphs import Graphs, Inbox
from hierspec.backends.cuda.pick_kernels import GREEDY, PARAMETERS, SAMPLED, blocks_of, launch_picks
from hierspec.backends.cuda.work import bucket
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import NO_TOKEN, noise_keys

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_COUNTS = (1, 2, 4, 8)  # picks per row; more are picked in several rounds
_ONE_AS_BITS = struct.unpack("<q", struct.pack("<d", 1.0))[0]


class PickScratch:
    """Scratch memory of the pick kernel for this many rows, picks and tokens."""

    def __init__(self, rows: int, count: int, vocabulary: int, device: torch.device) -> None:
        listed = rows * blocks_of(vocabulary) * count
        self.arrays = (
            torch.zeros(listed, dtype=torch.float64, device=device),
            torch.zeros(listed, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


class Picker:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs = Graphs(device)
        self._inbox = Inbox(_ROWS[-1] * PARAMETERS, torch.int64, device)
        self._scratch: dict[int, PickScratch] = {}  # by vocabulary
        self._out = torch.zeros(_ROWS[-1] * (_COUNTS[-1] + 1), dtype=torch.int64, device=device)

    def answers(self, asks: Sequence[Ask], logits: Tensor) -> list[Answer]:
        if len(asks) == 1 and not asks[0].distributions and not changes_logits(asks[0]):
            return [self._plain_answer(asks[0], logits)]
        counts = [1 + len(ask.proposal) for ask in asks]
        if sum(counts) > _ROWS[-1]:
            parts = logits.split(counts)
            return [self.answers([ask], part)[0] for ask, part in zip(asks, parts, strict=True)]
        changed = [changes_logits(ask) for ask in asks]
        z = logits
        if any(changed) or any(ask.distributions for ask in asks):
            z = logits.double()
            for ask, part, change in zip(asks, z.split(counts), changed, strict=True):
                if change or (ask.distributions and ask.request.sampling.temperature > 0):
                    adjust(part, ask)
        if all(ask.distributions for ask in asks):
            return [
                Answer(distributions=distributions(part, ask).cpu().numpy())
                for ask, part in zip(asks, z.split(counts), strict=True)
            ]
        wanted = min(max(picks_wanted(ask) for ask in asks if not ask.distributions), z.shape[1])
        keys = np.concatenate([parameters(ask, change) for ask, change in zip(asks, changed, strict=True)])
        picks, leads = self._sorted(z, keys, wanted) if wanted > _COUNTS[-1] else self._best(z, keys, wanted)
        answers, row = [], 0
        for ask, count, part in zip(asks, counts, z.split(counts), strict=True):
            if ask.distributions:
                answers.append(Answer(distributions=distributions(part, ask).cpu().numpy()))
            else:
                mine = picks[row : row + count, : min(picks_wanted(ask), z.shape[1])]
                answers.append(Answer(picks=mine, leads=leads[row : row + count] if ask.leads else None))
            row += count
        return answers

    def _plain_answer(self, ask: Ask, logits: Tensor) -> Answer:
        """The fast path for the most frequent case: one request with unchanged logits."""
        wanted = min(picks_wanted(ask), logits.shape[1])
        pick = self._sorted if wanted > _COUNTS[-1] else self._best
        picks, leads = pick(logits, parameters(ask, False), wanted)
        return Answer(picks=picks[:, :wanted], leads=leads if ask.leads else None)

    def _best(self, z: Tensor, keys: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """Picks [rows, at least `wanted`], and leads."""
        rows, vocabulary = z.shape
        count, width = bucket(wanted, _COUNTS), bucket(rows, _ROWS)
        # Padding rows have zeros as parameters.
        self._inbox.put(np.concatenate((keys.ravel(), np.zeros((width - rows) * PARAMETERS, np.int64))))
        scratch = self._scratch.get(vocabulary)
        if scratch is None:
            scratch = self._scratch[vocabulary] = PickScratch(_ROWS[-1], _COUNTS[-1], vocabulary, self._device)
        given, arrays, out = self._inbox.buffer, scratch.arrays, self._out
        if z.dtype == torch.float64:  # adjusted logits have a new address each time, so there is no graph
            launch_picks(z, given, arrays, out, width, count)
        else:
            self._graphs.run(
                (z.data_ptr(), z.stride(0), vocabulary, width, count),
                lambda: launch_picks(z, given, arrays, out, width, count),
            )
        return unpacked(out[: rows * (count + 1)].to("cpu", copy=True).numpy().reshape(rows, count + 1))

    def _sorted(self, z: Tensor, keys: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for many picks: each round of the kernel leaves out what was already picked."""
        z = z.clone()
        found: list[np.ndarray] = []
        leads: np.ndarray | None = None
        while sum(part.shape[1] for part in found) < wanted:
            picks, lead = self._best(z, keys, _COUNTS[-1])
            leads = lead if leads is None else leads
            found.append(picks)
            z.scatter_(1, torch.from_numpy(picks.clip(0)).to(z.device), -torch.inf)
        assert leads is not None
        picks = np.concatenate(found, axis=1)
        picks[picks[:, 0] == NO_TOKEN] = NO_TOKEN
        return picks, leads


def unpacked(out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits the kernel's output into picks and leads."""
    return out[:, :-1], np.ascontiguousarray(out[:, -1]).view(np.float64)


def parameters_of_steps(ask: Ask, first: int, steps: int) -> np.ndarray:
    """[steps, PARAMETERS] for tokens that an ask without a proposal writes by itself, the first at position `first`."""
    rows = np.repeat(parameters(ask, False), steps, axis=0)
    if ask.request.sampling.temperature > 0:
        rows[:, :2] = [noise_keys(ask.request.seed, first + step) for step in range(steps)]
    return rows


def parameters(ask: Ask, adjusted: bool) -> np.ndarray:
    """[rows, PARAMETERS]: parameters of the pick kernel for the rows of an ask."""
    rows = np.zeros((1 + len(ask.proposal), PARAMETERS), np.int64)
    temperature = ask.request.sampling.temperature
    rows[:, 2] = GREEDY if temperature == 0 else SAMPLED
    if temperature > 0:
        seed, first = ask.request.seed, len(ask.context)
        depths = [0, *(depth + 1 for depth in ask.proposal.depths())]
        by_depth = [noise_keys(seed, first + depth) for depth in range(max(depths) + 1)]
        rows[:, :2] = [by_depth[depth] for depth in depths]
        rows[:, 3] = _ONE_AS_BITS if adjusted else struct.unpack("<q", struct.pack("<d", temperature))[0]
    return rows

"""Heads and joins of drafters through torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hierspec.backends.base import Decoder, ExtraRows


class TorchShortlist:
    """Some rows of a head as their own matrix."""

    def __init__(self, weight: Tensor, tokens: np.ndarray, eps: float) -> None:
        self._weight, self.tokens, self._eps = weight, tokens, eps
        self._index = torch.as_tensor(tokens, dtype=torch.long, device=weight.device)
        self._rows = weight[self._index]
        self.bytes = self._rows.numel() * self._rows.element_size()

    def gather(self, tokens: np.ndarray) -> ExtraRows:
        return ExtraRows(tokens, self._weight[torch.as_tensor(tokens, dtype=torch.long, device=self._weight.device)])

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]) -> Tensor:
        states = states.to(self._weight.dtype)
        if norm is not None:
            states = functional.rms_norm(states, (states.shape[-1],), norm.to(states), self._eps)
        logits = torch.full((len(states), len(self._weight)), -math.inf, device=states.device)
        logits[:, self._index] = functional.linear(states, self._rows).float()
        row = 0
        for extra, count in zip(extras, counts, strict=True):
            if len(extra.tokens):
                assert isinstance(extra.rows, Tensor)
                scores = functional.linear(states[row : row + count], extra.rows).float()
                columns = torch.as_tensor(extra.tokens, dtype=torch.long, device=states.device)
                logits[row : row + count, columns] = scores
            row += count
        return logits


class TorchJoin:
    def __init__(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None) -> None:
        device = decoder.backend.device
        self._decoder = decoder
        self._matrix = matrix.to(device, decoder.dtype)
        self._bias = None if bias is None else bias.to(device, decoder.dtype)
        self.bytes = self._matrix.numel() * self._matrix.element_size()

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        decoder, device = self._decoder, states.device
        index = torch.as_tensor(slots.clip(0), device=device)
        absent = torch.as_tensor(slots < 0, device=device)
        parts = [decoder.embed(tokens)]
        for number, tap in enumerate(taps):
            feature = states[tap, index]
            if norms is not None:
                weight = norms[number].to(feature)
                feature = functional.rms_norm(feature, (feature.shape[-1],), weight, decoder.config.norm_eps)
            feature[absent] = 0
            parts.append(feature)
        return functional.linear(torch.cat(parts, dim=1), self._matrix, self._bias)

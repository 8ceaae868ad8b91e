"""What only an EAGLE-3 head has: a layer that reads two states, and a head of its own. Both run in torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hierspec.backends.base import Backend, Decoder
from hierspec.backends.torch.decoder import Layer, TorchDecoder
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.eagle import HIDDEN_NORM
from hierspec.core.interfaces import Ask, RequestView


class EagleDecoder(TorchDecoder):
    """One layer on rows [rows, 2 * hidden]: embedding and feature. Its residual stream is the feature."""

    def __init__(self, backend: Backend, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__(backend, config, weights)
        self._hidden_norm = weights[HIDDEN_NORM].to(self.device)

    def _entering(self, hidden: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        embedded, feature = hidden.chunk(2, dim=-1)
        beside = self._normed(embedded, layer.attention_norm), self._normed(feature, self._hidden_norm)
        return feature, torch.cat(beside, dim=-1)


class EagleJoin:
    """`Join` for such rows. With a matrix, features are projected from the states at all taps; else they are states."""

    def __init__(self, decoder: Decoder, matrix: Tensor | None) -> None:
        self._decoder = decoder
        self._matrix = None if matrix is None else matrix.to(decoder.backend.device, decoder.dtype)
        self.bytes = 0 if self._matrix is None else self._matrix.numel() * self._matrix.element_size()

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        """[tokens, 2 * hidden]"""
        assert norms is None  # its layer has the norms
        index = torch.as_tensor(slots.clip(0), device=states.device)
        feature = torch.cat([states[tap, index] for tap in taps], dim=1)
        feature[torch.as_tensor(slots < 0, device=states.device)] = 0
        if self._matrix is not None:
            feature = functional.linear(feature, self._matrix)
        return torch.cat((self._decoder.embed(tokens), feature), dim=1)


class OwnHead:
    """A head of its own that scores only some of the tokens."""

    def __init__(self, weight: Tensor, norm: Tensor, tokens: np.ndarray, vocabulary: int, eps: float) -> None:
        self._weight, self._norm, self._vocabulary, self._eps = weight, norm, vocabulary, eps
        self._scored = {int(token) for token in tokens}
        self._index = torch.as_tensor(tokens, dtype=torch.long, device=weight.device)
        self.bytes = weight.numel() * weight.element_size()

    def logits(self, asks: Sequence[Ask], states: Tensor) -> Tensor:
        x = states.to(self._weight)
        x = functional.rms_norm(x, (x.shape[-1],), self._norm, self._eps)
        logits = torch.full((len(x), self._vocabulary), -math.inf, device=x.device)
        logits[:, self._index] = functional.linear(x, self._weight).float()
        parts = logits.split([1 + len(ask.proposal) for ask in asks])
        for ask, rows in zip(asks, parts, strict=True):
            bias = ask.request.sampling.logit_bias or {}
            forbidden = {token for token, value in bias.items() if value == -math.inf}
            if self._scored <= forbidden:  # allow one other token, so that there is something to draft
                rows[:, next(token for token in range(self._vocabulary) if token not in forbidden)] = 0
        return logits

    def release(self, request: RequestView) -> None:
        return

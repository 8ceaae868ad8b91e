"""Weights with a low-rank change merged in: the early-exit variant of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hierspec.core.errors import HierspecError


class ChangedWeights(Mapping[str, Tensor]):
    """W + b @ a for the matrices in a delta, computed on access. Packed weights already contain it."""

    def __init__(self, weights: Mapping[str, Tensor], delta: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        for part in delta:
            if not part.startswith("layers.") or not part.endswith(".a"):
                continue
            name, a, b = f"model.{part.removesuffix('.a')}", delta[part], delta.get(f"{part.removesuffix('.a')}.b")
            fits = (
                name in weights
                and b is not None
                and a.ndim == b.ndim == 2
                and a.is_floating_point()
                and b.is_floating_point()
                and a.shape[0] == b.shape[1]
                and weights[name].shape == (b.shape[0], a.shape[1])
            )
            if not fits or b is None:
                raise HierspecError(f"The delta of the early-exit variant does not fit the model at {name}.")
            self._factors[name] = a, b

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if name not in self._factors:
            return weight
        a, b = (factor.to(torch.float32) for factor in self._factors[name])
        return torch.addmm(weight.float(), b, a).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

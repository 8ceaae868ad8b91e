"""An early-exit variant of a model: a low-rank change that makes its exits speak, held to the original by an anchor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hierspec.train.divergence import Judged
from hierspec.train.network import Network
from hierspec.train.students import ExitAdapter, ExitNorm

_ANCHORED = 4  # every so many positions it is compared with the original
_FIRMER = 0.02  # how quickly the anchor's weight follows
_BESIDE = 0.2  # what an exit without an adapter counts for: it must not cost those that have one much


class LowRank(nn.Module):
    """A frozen linear layer plus b @ a; begins as the layer itself."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.a = nn.Parameter(torch.randn(rank, base.in_features, device=device) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


class Tuned:
    """Exit losses, each exit with an adapter of its own, while the whole stays near the original.

    `drift` is how far it may move, in nats a token: an anchor to the original is weighed heavier while it has moved
    further, lighter while it has not. `pull` lets exits draw the last layer a little towards what they can guess.
    Exits in `norms` have a norm only, in place of an adapter.
    """

    def __init__(
        self, original: Network, copied: Network, exits: Sequence[int], vocabulary: Tensor, drift: float = 0.05,
        rank: Callable[[int], int] = lambda layer: 32, pull: float = 0.25, norms: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.original, self.model, self.drift, self.pull = original, copied, drift, pull
        self.exits, self._beside = (*exits, *norms), {f"exit {layer}" for layer in norms}
        self._anchor = 1.0
        device = original.embedding.device
        self.adapters = nn.ModuleList(ExitAdapter(copied, layer) for layer in exits)
        self.adapters.extend(ExitNorm(copied, layer) for layer in norms)
        self.adapters.to(device)
        self.changes: dict[str, LowRank] = {}
        for number, block in enumerate(copied.blocks):
            for part in ("self_attn", "mlp"):
                group = getattr(block, part)
                for name in [name for name in group if name.endswith("_proj")]:
                    group[name] = LowRank(group[name], rank(number))
                    self.changes[f"layers.{number}.{part}.{name}.weight"] = group[name]
        self.rows = vocabulary.to(device, torch.long)
        self._head = original.head[self.rows]

    def trained(self) -> dict[str, nn.Parameter]:
        found = {f"adapters.{name}": parameter for name, parameter in self.adapters.named_parameters()}
        for name, change in self.changes.items():
            found[f"{name}.a"], found[f"{name}.b"] = change.a, change.b
        return found

    def tensors(self) -> dict[str, Tensor]:
        found = {name: tensor for adapter in self.adapters for name, tensor in adapter.tensors().items()}  # type: ignore[operator]
        for name, change in self.changes.items():
            found[f"{name}.a"], found[f"{name}.b"] = change.a, change.b
        return found

    def guesses(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        states = self.model(tokens, {last, *self.exits})
        feature = self.model.norm(states[last])
        found: dict[str, Tensor] = {}
        for adapter in self.adapters:
            found |= adapter.guesses(self.model, tokens, states, feature)  # type: ignore[operator]
        return feature, found

    def loss(self, tokens: Tensor, here: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        feature, found = self.guesses(tokens)
        # Everywhere alike, a part of the positions: what nobody drafts must stay too.
        some = feature[:, ::_ANCHORED].flatten(0, 1)
        with torch.no_grad():
            before = self.original.norm(self.original(tokens, {last})[last][:, ::_ANCHORED]).flatten(0, 1)
        anchor = Judged(before, self.original.head)
        moved = anchor.divergence(some).mean()
        total = self._anchor * moved
        moved = moved.detach()
        self._anchor = min(max(self._anchor * math.exp(_FIRMER * (float(moved) / self.drift - 1)), 0.02), 20.0)
        measured = {"drift": moved, "anchor": torch.tensor(self._anchor), "last kept": anchor.agrees(some)}
        last_feature = feature[here]
        judged = Judged(last_feature.detach(), self._head)
        for name, guess in found.items():
            guess = guess[here]
            beside = name in self._beside
            total = total + (_BESIDE if beside else 1.0) * judged.divergence(guess).mean()
            if self.pull and not beside:
                total = total + self.pull * Judged(guess.detach(), self._head).divergence(last_feature).mean()
            measured[name] = judged.agrees(guess)
        return total, measured

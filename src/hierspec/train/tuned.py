"""An early-exit variant of a model: a low-rank change that makes its exits draft better, anchored to the original."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hierspec.checkpoints.eight_bits import rounded
from hierspec.train.divergence import ReferenceDistribution
from hierspec.train.network import Network
from hierspec.train.students import ExitAdapter, ExitNorm

_ANCHOR_STRIDE = 4  # every so many positions the model is compared with the original
_ANCHOR_RATE = 0.02  # how quickly the anchor's weight follows the drift
_NORM_WEIGHT = 0.2  # of the loss of an exit without an adapter: it must not cost the others much


class LowRank(nn.Module):
    """A frozen linear layer plus b @ a; starts as the layer itself."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.a = nn.Parameter(torch.randn(rank, base.in_features, device=device) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def begin(self, a: Tensor, b: Tensor) -> None:
        """Start with this change: with its main directions where it has a higher rank, with new ones beside it where it
        has a lower one."""
        rank, given = len(self.a), len(a)
        a, b = (factor.to(self.a) for factor in (a, b))
        if given > rank:
            a, b = cut(a, b, rank)
        with torch.no_grad():
            self.a[: len(a)] = a
            self.b.zero_()
            self.b[:, : len(a)] = b

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


def cut(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest change of this rank to b @ a; rows of its `a` have length 1, about as new ones begin."""
    # The change is a product of thin matrices: its singular values are those of the product of their small factors.
    left, right = torch.linalg.qr(b.float()), torch.linalg.qr(a.float().T)
    u, values, v = torch.linalg.svd(left.R @ right.R.T)
    return v[:rank] @ right.Q.T, (left.Q @ u[:, :rank]) * values[:rank]


@dataclass(frozen=True)
class Exit:
    """An exit of an early-exit variant: how many layers its adapter has (0: a norm alone), how much its loss counts,
    and how much it draws the last layer towards what it can draft."""

    layer: int
    depth: int = 1
    weight: float = 1.0
    pull: float = 0.25


class TunedObjective:
    """Losses of the exits while the model stays near the original.

    `drift` is how far it may move, in nats per token: while it has moved further, the weight of the divergence from the
    original (the anchor) grows; while it has not, the weight shrinks. Exits in `norms` have only a norm, count little
    and take turns: one of them is trained in a step.
    """

    def __init__(
        self,
        original: Network,
        copied: Network,
        exits: Sequence[Exit],
        vocabulary: Tensor,
        drift: float = 0.05,
        rank: Callable[[int], int] = lambda layer: 32,
        norms: Sequence[int] = (),
    ) -> None:
        self.original, self.model, self.drift = original, copied, drift
        self.exits = {f"exit {each.layer}": each for each in exits}
        self.exits |= {f"exit {layer}": Exit(layer, 0, _NORM_WEIGHT, 0.0) for layer in norms}
        self._in_turn = [f"exit {layer}" for layer in norms]
        self._anchor, self._steps = 1.0, 0
        device = original.embedding.device
        self.adapters = nn.ModuleList(
            ExitAdapter(copied, each.layer, each.depth) if each.depth else ExitNorm(copied, each.layer)
            for each in self.exits.values()
        )
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
        parameters = {f"adapters.{name}": parameter for name, parameter in self.adapters.named_parameters()}
        for name, change in self.changes.items():
            parameters[f"{name}.a"], parameters[f"{name}.b"] = change.a, change.b
        return parameters

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: tensor for adapter in self.adapters for name, tensor in adapter.tensors().items()}  # type: ignore[operator]
        for name, change in self.changes.items():
            tensors[f"{name}.a"], tensors[f"{name}.b"] = change.a, change.b
        return tensors

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Start with the exits and the changes of a variant that was trained before, as far as it has them."""
        for adapter in self.adapters:
            adapter.begin(tensors)  # type: ignore[operator]
        for name, change in self.changes.items():
            if f"{name}.a" in tensors and f"{name}.b" in tensors:
                change.begin(tensors[f"{name}.a"], tensors[f"{name}.b"])

    def round_as_stored(self) -> None:
        """Let everything that was trained be what a pack will give back."""
        stored = rounded(self.tensors())
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(stored[name])

    def draft_features(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        states = self.model(tokens, {last, *(each.layer for each in self.exits.values())})
        feature = self.model.norm(states[last])
        drafts: dict[str, Tensor] = {}
        for adapter in self.adapters:
            drafts |= adapter.draft_features(self.model, tokens, states, feature)  # type: ignore[operator]
        return feature, drafts

    def loss(self, tokens: Tensor, selected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        feature, drafts = self.draft_features(tokens)
        # Evenly spaced, not only the selected positions: the model must not change elsewhere either.
        anchored = feature[:, ::_ANCHOR_STRIDE].flatten(0, 1)
        with torch.no_grad():
            before = self.original.norm(self.original(tokens, {last})[last][:, ::_ANCHOR_STRIDE]).flatten(0, 1)
        original = ReferenceDistribution(before, self.original.head)
        drift = original.divergence(anchored).mean()
        total = self._anchor * drift
        drift = drift.detach()
        self._anchor = min(max(self._anchor * math.exp(_ANCHOR_RATE * (float(drift) / self.drift - 1)), 0.02), 20.0)
        measured = {"drift": drift, "anchor": torch.tensor(self._anchor), "as original": original.agreement(anchored)}
        last_feature = feature[selected]
        reference = ReferenceDistribution(last_feature.detach(), self._head)
        for name in self._trained_now():
            draft, about = drafts[name][selected], self.exits[name]
            total = total + about.weight * reference.divergence(draft).mean()
            if about.pull:
                exit_distribution = ReferenceDistribution(draft.detach(), self._head)
                total = total + about.pull * exit_distribution.divergence(last_feature).mean()
            measured[name] = reference.agreement(draft)
        self._steps += 1
        return total, measured

    def _trained_now(self) -> list[str]:
        """Exits whose losses count in this step."""
        names = [name for name in self.exits if name not in self._in_turn]
        return names + self._in_turn[self._steps % len(self._in_turn) :][:1] if self._in_turn else names

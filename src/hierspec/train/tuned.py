"""An early-exit variant of a model: a low-rank change that makes its exits draft better, anchored to the original."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

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

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


class TunedObjective:
    """Losses of the exits, each with its own adapter, while the model stays near the original.

    `drift` is how far it may move, in nats per token: while it has moved further, the weight of the divergence from the
    original (the anchor) grows; while it has not, the weight shrinks. `pull` lets exits draw the last layer a little
    towards what they can draft. Exits in `norms` have only a norm, no adapter.
    """

    def __init__(
        self,
        original: Network,
        copied: Network,
        exits: Sequence[int],
        vocabulary: Tensor,
        drift: float = 0.05,
        rank: Callable[[int], int] = lambda layer: 32,
        pull: float = 0.25,
        norms: Sequence[int] = (),
    ) -> None:
        self.original, self.model, self.drift, self.pull = original, copied, drift, pull
        self.exits, self._norm_exits = (*exits, *norms), {f"exit {layer}" for layer in norms}
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
        parameters = {f"adapters.{name}": parameter for name, parameter in self.adapters.named_parameters()}
        for name, change in self.changes.items():
            parameters[f"{name}.a"], parameters[f"{name}.b"] = change.a, change.b
        return parameters

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: tensor for adapter in self.adapters for name, tensor in adapter.tensors().items()}  # type: ignore[operator]
        for name, change in self.changes.items():
            tensors[f"{name}.a"], tensors[f"{name}.b"] = change.a, change.b
        return tensors

    def draft_features(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        states = self.model(tokens, {last, *self.exits})
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
        for name, draft in drafts.items():
            draft = draft[selected]
            norm_only = name in self._norm_exits
            total = total + (_NORM_WEIGHT if norm_only else 1.0) * reference.divergence(draft).mean()
            if self.pull and not norm_only:
                exit_distribution = ReferenceDistribution(draft.detach(), self._head)
                total = total + self.pull * exit_distribution.divergence(last_feature).mean()
            measured[name] = reference.agreement(draft)
        return total, measured

"""An early-exit variant of a model: a low-rank change that makes its exits speak, held to the original by an anchor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hierspec.train.network import Network


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
    """Exit losses through the shared head, each exit with a norm of its own, and divergence from the original."""

    def __init__(
        self, original: Network, copied: Network, exits: Sequence[int], vocabulary: Tensor, anchor: float = 1.0,
        rank: Callable[[int], int] = lambda layer: 32,
    ) -> None:  # fmt: skip
        self.original, self.model, self.exits, self.anchor = original, copied, tuple(exits), anchor
        device = original.embedding.device
        self.changes: dict[str, LowRank] = {}
        for number, block in enumerate(copied.blocks):
            for part in ("self_attn", "mlp"):
                group = getattr(block, part)
                for name in [name for name in group if name.endswith("_proj")]:
                    group[name] = LowRank(group[name], rank(number))
                    self.changes[f"layers.{number}.{part}.{name}.weight"] = group[name]
        norms = {str(layer): nn.RMSNorm(original.config.hidden, eps=original.config.norm_eps) for layer in exits}
        self.norms = nn.ModuleDict(norms).to(device)
        for norm in self.norms.values():
            norm.load_state_dict(original.norm.state_dict())
        self.norms.float()
        self.rows = vocabulary.to(device, torch.long)
        self._head = original.head[self.rows]

    def trained(self) -> dict[str, nn.Parameter]:
        found = {f"norms.{name}": parameter for name, parameter in self.norms.named_parameters()}
        for name, change in self.changes.items():
            found[f"{name}.a"], found[f"{name}.b"] = change.a, change.b
        return found

    def tensors(self) -> dict[str, Tensor]:
        norms = self.norms.state_dict()  # "4.weight" and so on
        found: dict[str, Tensor] = {f"exit.{name.replace('.', '.norm.')}": tensor for name, tensor in norms.items()}
        for name, change in self.changes.items():
            found[f"{name}.a"], found[f"{name}.b"] = change.a, change.b
        return found

    def guesses(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        states = self.model(tokens, {last, *self.exits})
        found = {f"exit {layer}": self.norms[str(layer)](states[layer]) for layer in self.exits}
        return self.model.norm(states[last]), found

    def loss(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = self.original.config.layers
        with torch.no_grad():
            before = functional.linear(self.original.norm(self.original(tokens, {last})[last]), self.original.head)
            before = before.float().log_softmax(-1)
        feature, found = self.guesses(tokens)
        now = functional.linear(feature, self.original.head).float()
        kept = functional.kl_div(now.log_softmax(-1), before, log_target=True, reduction="none").sum(-1)
        total = self.anchor * kept.mean()  # everywhere: what nobody drafts must stay too
        measured = {"anchor": kept.mean().detach()}
        scale = weight.sum().clamp(min=1)
        law = now.detach()[..., self.rows].log_softmax(-1)
        best = {"last": law.argmax(-1)}
        for name, guess in found.items():
            logits = functional.linear(guess.to(self._head.dtype), self._head).float()
            divergence = (law.exp() * (law - logits.log_softmax(-1))).sum(-1)
            total = total + (divergence * weight).sum() / scale
            best[name] = logits.argmax(-1)
            measured[name] = ((best[name] == best["last"]) * weight).sum().detach() / scale
        measured["last kept"] = ((best["last"] == before[..., self.rows].argmax(-1)) * weight).sum() / scale
        return total, measured

"""What learns to guess beside a frozen target: exit adapters, a feature drafter, a small model.

A student says for every position of a text what it thinks comes next, as features [batch, length, hidden] whose
products with rows of the target's head are logits. All students learn from one pass of the target: the loss is the
divergence from the target's own law over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hierspec.checkpoints.config import DecoderConfig
from hierspec.train.divergence import Judged
from hierspec.train.network import Block, Network, attended


class Student(Protocol):
    taps: tuple[int, ...]  # layers of the target whose states it reads; the last layer is always there

    def guesses(self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor) -> dict[str, Tensor]:
        """By name: features for what follows each position. `feature` is the target's own."""

    def tensors(self) -> dict[str, Tensor]:
        """As a pack keeps them."""


class ExitAdapter(nn.Module):
    """One decoder layer and a norm of its own after so many layers of the target."""

    def __init__(self, target: Network, layer: int) -> None:
        super().__init__()
        self.layer, self.taps = layer, (layer,)
        config = target.config
        self.block = Block(config, layer)
        # Begins as the layer that would have come next, and the norm as the last one.
        self.block.load_state_dict(target.blocks[min(layer, config.layers - 1)].state_dict())
        self.norm = _norm_like(target)
        self.float()

    def guesses(self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor) -> dict[str, Tensor]:
        x = self.block(states[self.layer], target.rotation(0, tokens.shape[1]))
        return {f"exit {self.layer}": self.norm(x)}

    def tensors(self) -> dict[str, Tensor]:
        start = f"exit.{self.layer}."
        block = {f"{start}layer.{name}": tensor for name, tensor in self.block.state_dict().items()}
        return {**block, f"{start}norm.weight": self.norm.weight}


class ExitNorm(nn.Module):
    """Only a norm after so many layers of a target that learns beside it: an exit that takes next to no room."""

    def __init__(self, target: Network, layer: int) -> None:
        super().__init__()
        self.layer, self.taps = layer, (layer,)
        self.norm = _norm_like(target)
        self.float()

    def guesses(self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor) -> dict[str, Tensor]:
        return {f"exit {self.layer}": self.norm(states[self.layer])}

    def tensors(self) -> dict[str, Tensor]:
        return {f"exit.{self.layer}.norm.weight": self.norm.weight}


class FeatureDrafter(nn.Module):
    """Decoder layers on the next token's embedding and the feature before it; trained on several own steps.

    Step 1 reads the target's features: its last state, normed, and beside it states after the layers in `taps`. Step j
    reads what step j - 1 made of the position before, and attends to step 1's keys up to j - 1 positions back and to
    those of the steps in between, as it will when it drafts.
    """

    def __init__(self, target: Network, steps: int = 4, layers: int = 1, taps: Sequence[int] = ()) -> None:
        super().__init__()
        config, self.steps = target.config, steps
        self.taps = tuple(taps)
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        with torch.no_grad():  # begins by passing the embedding on, with a little of the feature
            self.fc.weight.zero_()
            self.fc.weight[:, : config.hidden] += torch.eye(config.hidden, device=self.fc.weight.device)
            self.fc.weight[:, config.hidden :] += 0.1 * torch.eye(config.hidden, device=self.fc.weight.device)
        self.first: nn.Linear | None = None
        if self.taps:  # what the target's positions enter through; begins like fc, blind to the taps
            self.first = nn.Linear((2 + len(self.taps)) * config.hidden, config.hidden, bias=False)
            with torch.no_grad():
                self.first.weight.zero_()
                self.first.weight[:, : 2 * config.hidden] += self.fc.weight
        self.blocks = nn.ModuleList()
        for number in range(config.layers - layers, config.layers):
            block = Block(config, number)
            block.load_state_dict(target.blocks[number].state_dict())
            self.blocks.append(block)
        self.norm = _norm_like(target)
        self.float()

    def guesses(self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor) -> dict[str, Tensor]:
        embedded = functional.embedding(tokens, target.embedding)
        length, hidden = tokens.shape[1], target.config.hidden
        tapped = [functional.rms_norm(states[tap], (hidden,), eps=target.config.norm_eps) for tap in self.taps]
        rotation, before = target.rotation(0, length), [feature, *tapped]
        keys: list[list[Tensor]] = [[] for _ in self.blocks]
        values: list[list[Tensor]] = [[] for _ in self.blocks]
        found: dict[str, Tensor] = {}
        for step in range(1, self.steps + 1):
            shifted = [functional.pad(part[:, :-1], (0, 0, 1, 0)).to(embedded.dtype) for part in before]
            join = self.first if step == 1 and self.first is not None else self.fc
            x = join(torch.cat((embedded, *shifted), dim=-1))
            mask = None if step == 1 else free_running(length, step, x.device)
            for number, block in enumerate(self.blocks):
                q, k, v = block.project(x, rotation)  # type: ignore[operator]
                keys[number].append(k)
                values[number].append(v)
                seen = attended(q, torch.cat(keys[number], dim=2), torch.cat(values[number], dim=2), mask)
                x = block.finish(x, seen)  # type: ignore[operator]
            before = [self.norm(x)]
            found[f"step {step}"] = before[0]
        return found

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {"feature.fc.weight": self.fc.weight, "feature.norm.weight": self.norm.weight}
        for number, block in enumerate(self.blocks):
            found |= {f"feature.layers.{number}.{name}": tensor for name, tensor in block.state_dict().items()}
        if self.first is not None:
            found["feature.first.weight"] = self.first.weight
            found["feature.taps"] = torch.tensor(self.taps, dtype=torch.int32)
        return found


def free_running(length: int, step: int, device: torch.device | str) -> Tensor:
    """[length, step * length]: what the query of a position sees of the keys of steps 1 .. step, side by side."""
    places = torch.arange(length, device=device)
    behind = places[:, None] - places[None, :]
    real = behind >= step - 1
    own = [behind == step - number for number in range(2, step + 1)]
    return torch.cat([real, *own], dim=1)


class SmallModel(nn.Module):
    """A copy of the target's first layers, tuned to end there; embeddings and head stay the target's."""

    def __init__(self, target: Network, layers: int = 4) -> None:
        super().__init__()
        self.taps: tuple[int, ...] = ()
        self.blocks = nn.ModuleList()
        for number in range(layers):
            block = Block(target.config, number)
            block.load_state_dict(target.blocks[number].state_dict())
            self.blocks.append(block)
        self.norm = _norm_like(target)
        self.float()

    def guesses(self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor) -> dict[str, Tensor]:
        x = functional.embedding(tokens, target.embedding)
        rotation = target.rotation(0, tokens.shape[1])
        for block in self.blocks:
            x = block(x, rotation)
        return {"small": self.norm(x)}

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {"small.norm.weight": self.norm.weight}
        for number, block in enumerate(self.blocks):
            found |= {f"small.layers.{number}.{name}": tensor for name, tensor in block.state_dict().items()}
        return found


class Frozen:
    """The objective of students beside a frozen target."""

    def __init__(self, target: Network, students: Sequence[nn.Module], vocabulary: Tensor) -> None:
        self.target = target
        self.students = nn.ModuleList(students).to(target.embedding.device)
        self.rows = vocabulary.to(target.embedding.device, torch.long)
        self._head = target.head[self.rows]

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.students.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for student in self.students for name, tensor in student.tensors().items()}  # type: ignore[operator]

    def guesses(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The target's feature at every position, and the students' by name."""
        last = self.target.config.layers
        with torch.no_grad():
            states = self.target(tokens, {last, *(tap for student in self.students for tap in student.taps)})  # type: ignore[union-attr]
            feature = self.target.norm(states[last])
        found: dict[str, Tensor] = {}
        for student in self.students:
            found |= student.guesses(self.target, tokens, states, feature)  # type: ignore[operator]
        return feature, found

    def loss(self, tokens: Tensor, here: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean divergence at the positions that are `here`, and each guess's share of agreement with the target."""
        feature, found = self.guesses(tokens)
        feature = feature[here]
        judged = Judged(feature, self._head)
        total = torch.zeros((), device=tokens.device)
        measured = {}
        for name, guess in found.items():
            guess = guess[here]
            total = total + judged.divergence(guess).mean()
            if name.startswith("step"):  # features to go on from, not only logits
                total = total + 0.1 * functional.smooth_l1_loss(guess.float(), feature.float())
            measured[name] = judged.agrees(guess)
        return total, measured


def restored(student: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The student with these weights, which have the names that it gives its own."""
    with torch.no_grad():
        for name, own in student.tensors().items():  # type: ignore[operator]
            own.copy_(tensors[name])
    return student


def _norm_like(target: Network) -> nn.RMSNorm:
    norm = nn.RMSNorm(target.config.hidden, eps=target.config.norm_eps)
    norm.load_state_dict(target.norm.state_dict())
    return norm


def draft_vocabulary(tokens: Tensor, size: int, config: DecoderConfig) -> Tensor:
    """The most frequent tokens, most frequent first; special ids that end a text are always among them."""
    counts = torch.bincount(tokens.flatten().long(), minlength=config.vocabulary)
    counts[list(config.eos_ids)] += int(counts.max()) + 1
    return counts.argsort(descending=True, stable=True)[: min(size, config.vocabulary)].int()

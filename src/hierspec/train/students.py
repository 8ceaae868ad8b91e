"""What learns to draft for a frozen target: exit adapters, a feature drafter, a small model.

A student predicts for every position of a text what comes next, as features [batch, length, hidden] whose products with
rows of the target's head are logits. All students learn from one pass of the target: the loss is the divergence from
the target's distribution over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.packs import adapter_layers
from hierspec.train.divergence import ReferenceDistribution
from hierspec.train.network import Block, Network, attended


class Student(Protocol):
    taps: tuple[int, ...]  # layers of the target whose states it reads; the last layer is always there

    def draft_features(
        self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor
    ) -> dict[str, Tensor]:
        """By name: features for what follows each position. `feature` is the target's own."""

    def tensors(self) -> dict[str, Tensor]:
        """By the names that a pack stores them under."""


class ExitAdapter(nn.Module):
    """One or a few more decoder layers and a norm after so many layers of the target.

    The first starts as the layer that would come next, and the norm as the last one. Others start as copies of the last
    layers that add nothing yet, so that a deeper adapter begins as a shallow one that was trained.
    """

    def __init__(self, target: Network, layer: int, depth: int = 1) -> None:
        super().__init__()
        self.layer, self.taps = layer, (layer,)
        self.blocks = nn.ModuleList()
        for number in adapter_layers(target.config, layer, depth):
            block = Block(target.config, number)
            block.load_state_dict(target.blocks[number].state_dict())
            if len(self.blocks):
                _add_nothing(block)
            self.blocks.append(block)
        self.norm = _norm_like(target)
        self.float()

    def begin(self, stored: Mapping[str, Tensor]) -> None:
        """Start as the trained adapter of this exit among these tensors, if there is one. Layers that it has not go on
        adding nothing."""
        prefix = f"exit.{self.layer}."
        named = {name.replace(".layer.", ".layers.0.", 1): tensor for name, tensor in stored.items()}
        for number, block in enumerate(self.blocks):
            start = f"{prefix}layers.{number}."
            weights = {name.removeprefix(start): named[name] for name in named if name.startswith(start)}
            if not weights:
                return
            block.load_state_dict(weights)
            self.norm.load_state_dict({"weight": named[f"{prefix}norm.weight"]})

    def draft_features(
        self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor
    ) -> dict[str, Tensor]:
        x, rotation = states[self.layer], target.rotation(0, tokens.shape[1])
        for block in self.blocks:
            x = block(x, rotation)
        return {f"exit {self.layer}": self.norm(x)}

    def tensors(self) -> dict[str, Tensor]:
        prefix = f"exit.{self.layer}."
        tensors: dict[str, Tensor] = {f"{prefix}norm.weight": self.norm.weight}
        for number, block in enumerate(self.blocks):
            start = f"{prefix}layer." if len(self.blocks) == 1 else f"{prefix}layers.{number}."
            tensors |= {start + name: tensor for name, tensor in block.state_dict().items()}
        return tensors


class ExitNorm(nn.Module):
    """Only a norm after so many layers of a target that is trained with it: an exit that takes next to no memory."""

    def __init__(self, target: Network, layer: int) -> None:
        super().__init__()
        self.layer, self.taps = layer, (layer,)
        self.norm = _norm_like(target)
        self.float()

    def draft_features(
        self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor
    ) -> dict[str, Tensor]:
        return {f"exit {self.layer}": self.norm(states[self.layer])}

    def begin(self, stored: Mapping[str, Tensor]) -> None:
        """Start as the norm of this exit among these tensors, if there is one without an adapter."""
        prefix = f"exit.{self.layer}."
        if [name for name in stored if name.startswith(prefix)] == [f"{prefix}norm.weight"]:
            self.norm.load_state_dict({"weight": stored[f"{prefix}norm.weight"]})

    def tensors(self) -> dict[str, Tensor]:
        return {f"exit.{self.layer}.norm.weight": self.norm.weight}


class FeatureDrafter(nn.Module):
    """Decoder layers on the next token's embedding and the feature before it; trained on several steps of drafting.

    Step 1 reads the target's features: its last state, normed, and states after the layers in `taps`. Step j reads the
    output of step j - 1 at the position before, and attends to step 1's keys up to j - 1 positions back and to those of
    the steps in between, as it will when it drafts.
    """

    def __init__(self, target: Network, steps: int = 4, layers: int = 1, taps: Sequence[int] = ()) -> None:
        super().__init__()
        config, self.steps = target.config, steps
        self.taps = tuple(taps)
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        with torch.no_grad():  # starts by passing the embedding on, with a little of the feature
            self.fc.weight.zero_()
            self.fc.weight[:, : config.hidden] += torch.eye(config.hidden, device=self.fc.weight.device)
            self.fc.weight[:, config.hidden :] += 0.1 * torch.eye(config.hidden, device=self.fc.weight.device)
        self.first: nn.Linear | None = None
        if self.taps:  # for positions that the target has run; starts like fc, with no weight on the taps
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

    def draft_features(
        self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor
    ) -> dict[str, Tensor]:
        embedded = functional.embedding(tokens, target.embedding)
        length, hidden = tokens.shape[1], target.config.hidden
        tapped = [functional.rms_norm(states[tap], (hidden,), eps=target.config.norm_eps) for tap in self.taps]
        rotation, before = target.rotation(0, length), [feature, *tapped]
        keys: list[list[Tensor]] = [[] for _ in self.blocks]
        values: list[list[Tensor]] = [[] for _ in self.blocks]
        drafts: dict[str, Tensor] = {}
        for step in range(1, self.steps + 1):
            shifted = [functional.pad(part[:, :-1], (0, 0, 1, 0)).to(embedded.dtype) for part in before]
            join = self.first if step == 1 and self.first is not None else self.fc
            x = join(torch.cat((embedded, *shifted), dim=-1))
            mask = None if step == 1 else free_running(length, step, x.device)
            for number, block in enumerate(self.blocks):
                q, k, v = block.project(x, rotation)  # type: ignore[operator]
                keys[number].append(k)
                values[number].append(v)
                attention = attended(q, torch.cat(keys[number], dim=2), torch.cat(values[number], dim=2), mask)
                x = block.finish(x, attention)  # type: ignore[operator]
            before = [self.norm(x)]
            drafts[f"step {step}"] = before[0]
        return drafts

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"feature.fc.weight": self.fc.weight, "feature.norm.weight": self.norm.weight}
        for number, block in enumerate(self.blocks):
            tensors |= {f"feature.layers.{number}.{name}": tensor for name, tensor in block.state_dict().items()}
        if self.first is not None:
            tensors["feature.first.weight"] = self.first.weight
            tensors["feature.taps"] = torch.tensor(self.taps, dtype=torch.int32)
        return tensors


def free_running(length: int, step: int, device: torch.device | str) -> Tensor:
    """[length, step * length]: the attention mask of a step; keys of steps 1 .. step are concatenated."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    of_step_1 = distance >= step - 1
    of_later = [distance == step - number for number in range(2, step + 1)]
    return torch.cat([of_step_1, *of_later], dim=1)


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

    def draft_features(
        self, target: Network, tokens: Tensor, states: dict[int, Tensor], feature: Tensor
    ) -> dict[str, Tensor]:
        x = functional.embedding(tokens, target.embedding)
        rotation = target.rotation(0, tokens.shape[1])
        for block in self.blocks:
            x = block(x, rotation)
        return {"small": self.norm(x)}

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"small.norm.weight": self.norm.weight}
        for number, block in enumerate(self.blocks):
            tensors |= {f"small.layers.{number}.{name}": tensor for name, tensor in block.state_dict().items()}
        return tensors


class FrozenTargetObjective:
    """Trains students; the target does not change."""

    def __init__(self, target: Network, students: Sequence[nn.Module], vocabulary: Tensor) -> None:
        self.target = target
        self.students = nn.ModuleList(students).to(target.embedding.device)
        self.rows = vocabulary.to(target.embedding.device, torch.long)
        self._head = target.head[self.rows]

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.students.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for student in self.students for name, tensor in student.tensors().items()}  # type: ignore[operator]

    def draft_features(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The target's features at every position, and the students' by name."""
        last = self.target.config.layers
        with torch.no_grad():
            states = self.target(tokens, {last, *(tap for student in self.students for tap in student.taps)})  # type: ignore[union-attr]
            feature = self.target.norm(states[last])
        drafts: dict[str, Tensor] = {}
        for student in self.students:
            drafts |= student.draft_features(self.target, tokens, states, feature)  # type: ignore[operator]
        return feature, drafts

    def loss(self, tokens: Tensor, selected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean divergence at the selected positions, and each draft's agreement with the target."""
        feature, drafts = self.draft_features(tokens)
        feature = feature[selected]
        reference = ReferenceDistribution(feature, self._head)
        total = torch.zeros((), device=tokens.device)
        measured = {}
        for name, draft in drafts.items():
            draft = draft[selected]
            total = total + reference.divergence(draft).mean()
            if name.startswith("step"):  # the next step continues from these features, not only from the logits
                total = total + 0.1 * functional.smooth_l1_loss(draft.float(), feature.float())
            measured[name] = reference.agreement(draft)
        return total, measured


def with_weights(student: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The student with these weights, by the names that `tensors` gives."""
    with torch.no_grad():
        for name, weight in student.tensors().items():  # type: ignore[operator]
            weight.copy_(tensors[name])
    return student


def _add_nothing(block: Block) -> None:
    """Let a layer pass on what enters it."""
    with torch.no_grad():
        for part, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            for parameter in getattr(block, part)[name].parameters():
                parameter.zero_()


def _norm_like(target: Network) -> nn.RMSNorm:
    norm = nn.RMSNorm(target.config.hidden, eps=target.config.norm_eps)
    norm.load_state_dict(target.norm.state_dict())
    return norm


def draft_vocabulary(tokens: Tensor, size: int, config: DecoderConfig) -> Tensor:
    """The most frequent tokens, most frequent first; special ids that end a text are always among them."""
    counts = torch.bincount(tokens.flatten().long(), minlength=config.vocabulary)
    counts[list(config.eos_ids)] += int(counts.max()) + 1
    return counts.argsort(descending=True, stable=True)[: min(size, config.vocabulary)].int()

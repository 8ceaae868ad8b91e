"""How often drafts agree with the model that verifies them, on text that was not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hierspec.train.network import Network, as_written
from hierspec.train.synthesise import Texts

IN_VOCABULARY = "in the draft vocabulary"  # the most that any draft can reach
_BATCH = 8  # texts: logits of a whole vocabulary are large


class Drafting(Protocol):
    rows: Tensor  # the draft vocabulary

    def draft_features(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The verifier's features at every position, and the drafts' by name."""


@torch.no_grad()
def agreement(
    objective: Drafting, head: Tensor, texts: Texts, tasks: Sequence[str], pairs: Sequence[tuple[str, str]] = ()
) -> dict[str, dict[str, float]]:
    """By task and over "all": the share of answer tokens where a draft's best token is the verifier's choice.

    "top 3 …" is the share where one of its 3 best is. Drafts choose from the draft vocabulary and the tokens of the
    text before the answer; how often the verifier's choice is among those is counted too.

    `pairs` names drafts to compare with each other: "exit 4 with exit 8" is how often they agree, "exit 4 and exit 8"
    how often both are right. The second over the first is the share of exit 4's tokens accepted by exit 8 that the
    verifier accepts too.
    """
    device = head.device
    hits: dict[str, dict[str, float]] = {"all": {}}
    counts: dict[str, float] = {}
    cuda = device.type == "cuda"
    for start in range(0, len(texts), _BATCH):
        tokens = texts.tokens[start : start + _BATCH].to(device, torch.long)
        answers = texts.answers[start : start + _BATCH].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda), as_written(device):
            feature, drafts = objective.draft_features(tokens)
        before_answers = torch.zeros_like(answers)
        before_answers[:, :-1] = answers[:, 1:]
        for row in range(len(tokens)):
            positions = before_answers[row].nonzero()[:, 0]
            if not len(positions):
                continue
            task = tasks[start + row]
            allowed = torch.full((len(head),), -torch.inf, device=device)
            allowed[objective.rows] = 0
            allowed[tokens[row, : int(positions[0]) + 1]] = 0
            chosen = functional.linear(feature[row, positions].to(head.dtype), head).argmax(-1)
            _count(hits, task, IN_VOCABULARY, allowed[chosen] == 0)
            best: dict[str, Tensor] = {}
            for name, draft in drafts.items():
                logits = functional.linear(draft[row, positions].to(head.dtype), head).float() + allowed
                three = logits.topk(3, dim=-1).indices
                best[name] = three[:, 0]
                _count(hits, task, name, best[name] == chosen)
                _count(hits, task, f"top 3 {name}", (three == chosen[:, None]).any(-1))
            for low, high in pairs:
                agree = best[low] == best[high]
                _count(hits, task, f"{low} with {high}", agree)
                _count(hits, task, f"{low} and {high}", agree & (best[low] == chosen))
            counts[task] = counts.get(task, 0) + len(positions)
            counts["all"] = counts.get("all", 0) + len(positions)
    return {
        task: {name: round(hit / counts[task], 4) for name, hit in by_name.items()} for task, by_name in hits.items()
    }


def _count(hits: dict[str, dict[str, float]], task: str, name: str, agree: Tensor) -> None:
    for key in (task, "all"):
        by_name = hits.setdefault(key, {})
        by_name[name] = by_name.get(name, 0) + float(agree.sum())


@torch.no_grad()
def perplexity(network: Network, tokens: Tensor) -> float:
    """Perplexity of the network on rows of text [rows, length]."""
    device, total, count = network.embedding.device, 0.0, 0
    last = network.config.layers
    for start in range(0, len(tokens), _BATCH):
        part = tokens[start : start + _BATCH].to(device, torch.long)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"), as_written(device):
            logits = functional.linear(network.norm(network(part, {last})[last]), network.head)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum")
        total, count = total + float(loss), count + part[:, 1:].numel()
    return math.exp(total / count)


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A table in Markdown: a row for each draft, a column for each task."""
    tasks = [*sorted(task for task in figures if task != "all"), "all"]
    names = list(figures["all"])
    lines = ["| | " + " | ".join(tasks) + " |", "|" + "---|" * (len(tasks) + 1)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{100 * figures[task].get(name, 0):.0f}%" for task in tasks) + " |")
    return "\n".join(lines)

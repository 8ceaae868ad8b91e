"""Picks and distributions through torch: `core/sampling.py` for all rows of an ask."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import NO_TOKEN, Sampling, noise_keys


def answer(ask: Ask, logits: Tensor) -> Answer:
    """Picks or distributions from logits [1 + nodes, vocabulary]: row 0 follows the context, row i + 1 node i."""
    sampling = ask.request.sampling
    z = adjust(logits, ask)
    not_numbers = ~torch.isfinite(z.amax(dim=1, keepdim=True))
    if ask.distributions:
        return Answer(distributions=_distributions(z, sampling).masked_fill_(not_numbers, math.nan).cpu().numpy())
    if sampling.temperature > 0:
        z = z + _noise(ask, z)
    if ask.candidates == 1 and not ask.leads:
        return Answer(picks=z.argmax(dim=1, keepdim=True).masked_fill_(not_numbers, NO_TOKEN).cpu().numpy())
    best = z.topk(min(picks_wanted(ask), z.shape[1]), dim=1)
    leads = (best.values[:, 0] - best.values[:, -1 if z.shape[1] < 2 else 1]).cpu().numpy() if ask.leads else None
    return Answer(picks=best.indices.masked_fill_(not_numbers, NO_TOKEN).cpu().numpy(), leads=leads)


def picks_wanted(ask: Ask) -> int:
    """Picks per row: a lead is the distance to the second, so it needs two."""
    return max(ask.candidates, 2) if ask.leads else ask.candidates


def perturbed(logits: Tensor, ask: Ask) -> Tensor:
    """Adjusted logits, plus the keyed noise if the ask samples: the largest in a row is the pick."""
    z = adjust(logits, ask)
    return z + _noise(ask, z) if ask.request.sampling.temperature > 0 else z


def adjust(logits: Tensor, ask: Ask) -> Tensor:
    z, sampling = logits, ask.request.sampling
    if sampling.penalised:
        seen, written = (torch.as_tensor(counts, device=z.device) for counts in _counts(ask, z.shape[1]))
        penalised = torch.where(z > 0, z / sampling.repetition_penalty, z * sampling.repetition_penalty)
        z = torch.where(seen > 0, penalised, z)
        z = z - (sampling.frequency_penalty * written + sampling.presence_penalty * (written > 0))
    if sampling.logit_bias:
        tokens = torch.tensor(list(sampling.logit_bias), device=z.device)
        values = torch.tensor(list(sampling.logit_bias.values()), device=z.device, dtype=z.dtype)
        z = z.index_add(1, tokens, values.expand(len(z), -1))
    if sampling.temperature == 0:
        return z
    z = z / sampling.temperature
    if 0 < sampling.top_k < z.shape[1]:
        least = z.topk(sampling.top_k, dim=1).values[:, -1:]
        z = z.masked_fill(z < least, -math.inf)
    if sampling.top_p < 1:
        order = z.sort(dim=1, descending=True, stable=True)
        probabilities = order.values.double().softmax(dim=1)
        before = probabilities.cumsum(dim=1) - probabilities  # the most likely token always stays
        out = torch.zeros_like(z, dtype=torch.bool).scatter(1, order.indices, before >= sampling.top_p)
        z = z.masked_fill(out, -math.inf)
    if sampling.min_p > 0:
        z = z.masked_fill(z < z.amax(dim=1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    return z


def _distributions(z: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature > 0:
        return z.double().softmax(dim=1)
    return torch.zeros_like(z, dtype=torch.float64).scatter(1, z.argmax(dim=1, keepdim=True), 1.0)


def _counts(ask: Ask, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each token occurs in the text before each row, and after the prompt, [rows, vocabulary] each."""
    proposal, prompt = ask.proposal, len(ask.request.prompt)
    seen = np.bincount(ask.context, minlength=vocabulary)[None].repeat(1 + len(proposal), axis=0)
    written = np.bincount(ask.context[prompt:], minlength=vocabulary)[None].repeat(1 + len(proposal), axis=0)
    for node in range(len(proposal)):
        for token in proposal.path(node):
            seen[node + 1, token] += 1
            written[node + 1, token] += 1
    return seen, written


def _noise(ask: Ask, z: Tensor) -> Tensor:
    """The keyed noise of `core.sampling.gumbel`, one row per position; nodes at the same depth share it."""
    first = len(ask.context)
    depths = [0] + [depth + 1 for depth in ask.proposal.depths()]
    rows = [gumbel(ask.request.seed, first + depth, z.shape[1], z.device) for depth in range(max(depths) + 1)]
    return torch.stack([rows[depth] for depth in depths])


def gumbel(seed: int, position: int, vocabulary: int, device: torch.device) -> Tensor:
    low, high = noise_keys(seed, position)
    h = torch.arange(vocabulary, device=device) * 0x9E3779B1 + low & 0xFFFFFFFF
    h = _mix(_mix(h) ^ high)
    # float32 is enough: small values of `uniform`, which give the large noise that wins, keep their precision.
    uniform = ((h >> 1).to(torch.float32) + 0.5) / 2**31
    return -torch.log(-torch.log1p(-uniform))


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    h = (h ^ (h >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return h ^ (h >> 16)

"""Penalties, bias and filters on the device, in float64 as in the reference, for requests that use them.

Nothing waits for the host. Sums of probabilities are sums of integers, so that they do not depend on a library's order
of additions.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cuda.graphs import on_device
from hierspec.core.interfaces import Ask
from hierspec.core.sampling import Sampling

_ONE = 2.0**45  # a probability of one as an integer: sums over any vocabulary fit in 63 bits


def changes_logits(ask: Ask) -> bool:
    """Whether the ask changes its logits by more than dividing them by the temperature."""
    return sampling_changes_logits(ask.request.sampling)


def sampling_changes_logits(sampling: Sampling) -> bool:
    """As `changes_logits`, of sampling options."""
    filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    return filtered or sampling.penalised or bool(sampling.logit_bias)


def adjust(z: Tensor, ask: Ask) -> Tensor:
    """`core.sampling.adjust` for all rows of an ask, from logits in float64, which it may overwrite."""
    sampling = ask.request.sampling
    if sampling.penalised:
        _penalise(z, ask)
    if sampling.logit_bias:
        tokens = on_device(np.array(list(sampling.logit_bias), np.int64), z.device)
        values = on_device(np.array(list(sampling.logit_bias.values()), np.float64), z.device)
        z[:, tokens] += values
    if sampling.temperature == 0:
        return z
    z /= sampling.temperature
    if 0 < sampling.top_k < z.shape[1]:
        least = z.topk(sampling.top_k, dim=1).values[:, -1:]
        z.masked_fill_(z < least, -math.inf)
    if sampling.top_p < 1:
        _keep_most_likely(z, sampling.top_p)
    if sampling.min_p > 0:
        z.masked_fill_(z < z.amax(dim=1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    return z


def distributions(z: Tensor, ask: Ask) -> Tensor:
    """Distributions of adjusted logits; at temperature 0 all mass is on the best token. NaN if logits are not
    finite."""
    best = z.amax(dim=1, keepdim=True)
    if ask.request.sampling.temperature > 0:
        e = (z - best).exp_()
        probabilities = e / e.sum(dim=1, keepdim=True)
    else:
        # Among equal logits take the first: ranks count down, so it has the largest rank.
        ranks = torch.arange(z.shape[1], 0, -1, device=z.device)
        first = torch.where(z == best, ranks, 0).argmax(dim=1, keepdim=True)
        probabilities = torch.zeros_like(z).scatter_(1, first, 1.0)
    return probabilities.masked_fill_(~torch.isfinite(best), math.nan)


def _keep_most_likely(z: Tensor, share: float) -> None:
    """Top-p: keeps a token if the tokens before it have less than this share of the probability."""
    order = z.sort(dim=1, descending=True, stable=True)
    weights = ((order.values - order.values[:, :1]).exp_() * _ONE).nan_to_num_(0.0).to(torch.int64)
    sums = weights.cumsum(dim=1)
    out = (sums - weights).double() >= share * sums[:, -1:].double()
    z.masked_fill_(torch.zeros_like(out).scatter_(1, order.indices, out), -math.inf)


def _penalise(z: Tensor, ask: Ask) -> None:
    """Penalises tokens that already occur in a row's text; there are few, so only those are touched."""
    sampling = ask.request.sampling
    rows, tokens, written = _occurrences(ask)
    index = on_device(np.stack((rows, tokens)), z.device)
    count = on_device(written.astype(np.float64), z.device)
    values = z[index[0], index[1]]
    values = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    values -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    z[index[0], index[1]] = values


def _occurrences(ask: Ask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, tokens that occur in the text before them, and how often each occurs after the prompt."""
    context, prompt, proposal = ask.context, len(ask.request.prompt), ask.proposal
    rows, tokens, written = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for row in range(1 + len(proposal)):
        path = proposal.path(row - 1) if row else []
        text = np.concatenate((context, np.array(path, context.dtype)))
        occurring = np.unique(text)
        tokens.append(occurring)
        rows.append(np.full(len(occurring), row))
        written.append(np.bincount(np.searchsorted(occurring, text[prompt:]), minlength=len(occurring)))
    return np.concatenate(rows), np.concatenate(tokens).astype(np.int64), np.concatenate(written)

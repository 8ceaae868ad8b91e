"""Answers to asks on a CPU: turns an ask into arguments of the compiled picks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.pick import adjust_rows, greedy_rows, sample_rows
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import NO_TOKEN, Sampling, noise_keys

_SHARED = 4  # with fewer rows, sampling is not worth waking other threads
_NO_TOKENS, _NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float64)


def answer(ask: Ask, logits: Tensor, team: ThreadTeam | None = None) -> Answer:
    """Picks or distributions from logits [1 + nodes, vocabulary]; the team's threads share the rows."""
    sampling, proposal = ask.request.sampling, ask.proposal
    rows, vocabulary = logits.shape
    context, tokens, parents = _NO_TOKENS, _NO_TOKENS, _NO_TOKENS
    if sampling.penalised:
        context = np.require(ask.context, np.int32, ["C", "W"])  # copies only if the layout or dtype differs
        tokens, parents = np.array(proposal.tokens, np.int32), np.array(proposal.parents, np.int32)
    bias_tokens, bias_values = _NO_TOKENS, _NO_VALUES
    if sampling.logit_bias:
        bias_tokens = np.array(list(sampling.logit_bias), np.int32)
        bias_values = np.array(list(sampling.logit_bias.values()), np.float64)
    picks = np.empty((rows, min(picks_wanted(ask), vocabulary)), np.int64)
    leads = np.empty(rows if ask.leads else 0)
    distributions = np.empty((rows if ask.distributions else 0, vocabulary), np.float64)
    numbers = logits.contiguous().numpy()
    penalties = tuple(map(float, (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)))
    changes = penalties, context, len(ask.request.prompt), tokens, parents, bias_tokens, bias_values
    if sampling.temperature == 0:
        if len(context) or len(bias_tokens) or vocabulary % LANES:
            padded = np.empty((rows, -(-vocabulary // LANES) * LANES), np.float32)
            adjust_rows(numbers, *changes, padded)
            numbers = padded
        _share(greedy_rows, numbers, vocabulary, picks, leads, distributions, team=team if rows > 1 else None)
    else:
        keys = np.zeros((rows, 2), np.int64) if ask.distributions else keys_of(ask)
        filters = filters_of(sampling, vocabulary)
        arguments = numbers, float(sampling.temperature), filters, *changes, keys, picks, leads, distributions
        _share(sample_rows, *arguments, team=team if rows >= _SHARED else None)
    if picks[:, 0].min() == NO_TOKEN:
        not_numbers = picks[:, 0] == NO_TOKEN
        picks[not_numbers] = NO_TOKEN
        distributions[not_numbers if ask.distributions else ()] = np.nan
    return (
        Answer(distributions=distributions)
        if ask.distributions
        else Answer(picks=picks, leads=leads if ask.leads else None)
    )


def filters_of(sampling: Sampling, vocabulary: int) -> tuple[int, float, float]:
    """Top-k, top-p and min-p, as `sample_rows` takes them."""
    return min(sampling.top_k, vocabulary), float(sampling.top_p), float(sampling.min_p)


def keys_of(ask: Ask, ahead: int = 0) -> np.ndarray:
    """[1 + nodes + ahead, 2]: `noise_keys` of each row, then of `ahead` tokens that follow a single row."""
    seed, first = ask.request.seed, len(ask.context)
    depths = [0, *(depth + 1 for depth in ask.proposal.depths()), *range(1, ahead + 1)]
    by_depth = [noise_keys(seed, first + depth) for depth in range(max(depths) + 1)]
    return np.array([by_depth[depth] for depth in depths], np.int64)


def _share(pick: Callable[..., None], *arguments: Any, team: ThreadTeam | None) -> None:
    """Shares the rows among the team's threads; without a team this thread takes them all."""
    if team is None:
        pick(0, 1, *arguments)
    else:
        team.run(pick, *arguments)

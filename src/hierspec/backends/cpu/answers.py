"""Answers to asks on a CPU: turns an ask into arguments of the compiled picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.pick import adjust_rows, greedy_rows, sample_rows
from hierspec.backends.cpu.pick_batches import pick_batch
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import NO_TOKEN, Sampling, noise_keys

_SHARED = 4  # with fewer rows, sampling is not worth waking other threads
_NO_TOKENS, _NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float64)
_NOTHING = _NO_TOKENS, _NO_VALUES, np.empty((0, 0), np.float64)


def answers(asks: Sequence[Ask], logits: Tensor, team: ThreadTeam) -> list[Answer]:
    """An answer for each ask; their logits follow each other.

    Asks without penalties or biases are answered in one call. With one call each, on a single thread, picks took 6% of
    the time with 64 requests.
    """
    ends = np.cumsum([1 + len(ask.proposal) for ask in asks]).tolist()
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    simple = [number for number, ask in enumerate(asks) if _is_simple(ask)] if logits.shape[1] % LANES == 0 else []
    batched = [number for number in simple if picks_wanted(asks[number]) == picks_wanted(asks[simple[0]])]
    done: dict[int, Answer] = {}
    if len(batched) > 1:
        done = dict(zip(batched, _in_one_call(asks, parts, batched, logits, team), strict=True))
    return [done.get(number) or answer(asks[number], logits[part], team) for number, part in enumerate(parts)]


def _is_simple(ask: Ask) -> bool:
    """Whether it wants picks from its logits as they are."""
    sampling = ask.request.sampling
    return not (ask.distributions or sampling.penalised or sampling.logit_bias)


def _in_one_call(
    asks: Sequence[Ask], parts: Sequence[slice], numbers: Sequence[int], logits: Tensor, team: ThreadTeam
) -> list[Answer]:
    """Answers to the asks with these numbers, which are simple and want the same number of picks per row."""
    rows, vocabulary = logits.shape
    requests, filters = np.empty((len(numbers), 3), np.int64), np.empty((len(numbers), 3))
    keys = np.zeros((rows, 2), np.int64)
    for index, number in enumerate(numbers):
        ask, part = asks[number], parts[number]
        sampling = ask.request.sampling
        top_k, top_p, min_p = filters_of(sampling, vocabulary)
        requests[index] = part.start, part.stop, top_k
        filters[index] = sampling.temperature, top_p, min_p
        if sampling.temperature:
            keys[part] = keys_of(ask)
    picks, leads = np.empty((rows, min(picks_wanted(asks[numbers[0]]), vocabulary)), np.int64), np.empty(rows)
    functions = greedy_rows, sample_rows
    needed = (filters[:, 0] == 0).any(), (filters[:, 0] != 0).any()  # only functions in use are compiled
    addresses = [function.address() if used else 0 for function, used in zip(functions, needed, strict=True)]
    arguments = logits.contiguous().numpy(), requests, filters, keys, _NOTHING, picks, leads
    team.run(pick_batch, np.array(addresses, np.int64), *arguments)
    not_numbers = picks[:, 0] == NO_TOKEN
    if not_numbers.any():
        picks[not_numbers] = NO_TOKEN
    taken = ((asks[number], parts[number]) for number in numbers)
    return [Answer(picks=picks[part], leads=leads[part] if ask.leads else None) for ask, part in taken]


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
    if not (ask.proposal.tokens or ahead):
        return np.array([noise_keys(seed, first)], np.int64)
    depths = [0, *(depth + 1 for depth in ask.proposal.depths()), *range(1, ahead + 1)]
    by_depth = [noise_keys(seed, first + depth) for depth in range(max(depths) + 1)]
    return np.array([by_depth[depth] for depth in depths], np.int64)


def _share(pick: Callable[..., None], *arguments: Any, team: ThreadTeam | None) -> None:
    """Shares the rows among the team's threads; without a team this thread takes them all."""
    if team is None:
        pick(0, 1, *arguments)
    else:
        team.run(pick, *arguments)

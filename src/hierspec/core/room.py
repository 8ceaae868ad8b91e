"""How much of the KV cache requests take: new ones wait, so that no running one loses its entries."""

from __future__ import annotations

from collections.abc import Sequence

from hierspec.core.request import Request

_LIKELY_TOKENS = 256  # expected output when a request is admitted; one that writes more may have to wait then


def room_taken(request: Request) -> float:
    """The part of the KV cache that the request's text takes now. 1 is all of it."""
    return _share(request, len(request.output))


def fits_for(requests: Sequence[Request], steps: int) -> bool:
    """Whether all of these have room together for this many more steps, whatever they write and verify."""
    return sum(_share(each, len(each.output) + steps * _most_of_a_step(each)) for each in requests) <= 1


def room_likely(request: Request) -> float:
    """The same part at the expected length of its output."""
    return _share(request, min(request.limit, max(len(request.output), _LIKELY_TOKENS)))


def room_at_most(request: Request) -> float:
    """The same part at its longest possible output."""
    return _share(request, request.limit)


def _most_of_a_step(request: Request) -> int:
    """The most tokens that one step of the request's target writes."""
    return 1 + request.hierarchy.tiers[0].budget


def _share(request: Request, written: int) -> float:
    tiers = request.hierarchy.tiers
    positions = len(request.prompt) + written + sum(tier.budget + tier.gather for tier in tiers)
    shares = [tier.scorer.share_of_memory(positions) for tier in tiers if hasattr(tier.scorer, "share_of_memory")]
    return max(shares, default=0.0)

"""How much of the KV cache requests take: some wait before any of those that run loses what was computed for it."""

from __future__ import annotations

from hierspec.core.request import Request

_LIKELY_TOKENS = 256  # that a request is taken to write when it is let in; those that write more may have to wait then


def room_taken(request: Request) -> float:
    """The part of the KV cache that the request's text takes now. 1 is all of it."""
    return _share(request, len(request.output))


def room_likely(request: Request) -> float:
    """The same once it has written as much as most do."""
    return _share(request, min(request.limit, max(len(request.output), _LIKELY_TOKENS)))


def room_at_most(request: Request) -> float:
    """The same at its longest."""
    return _share(request, request.limit)


def _share(request: Request, written: int) -> float:
    tiers = request.hierarchy.tiers
    positions = len(request.prompt) + written + sum(tier.budget + tier.gather for tier in tiers)
    shares = [tier.scorer.share_of_memory(positions) for tier in tiers if hasattr(tier.scorer, "share_of_memory")]
    return max(shares, default=0.0)

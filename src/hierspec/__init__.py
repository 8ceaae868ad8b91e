"""hierspec: language models write faster without changing what they write."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hierspec.async_language_model import AsyncLanguageModel, AsyncStream
    from hierspec.chat import Chat
    from hierspec.core.errors import Busy, HierspecError
    from hierspec.core.grammar import Grammar
    from hierspec.core.interfaces import Store
    from hierspec.core.logprobs import TokenLogprobs
    from hierspec.core.plan import Plan, TierPlan
    from hierspec.core.proposal import Proposal
    from hierspec.core.sampling import Sampling
    from hierspec.generation import Failure, Generation, Piece, SomeFailed, TextStep
    from hierspec.language_model import LanguageModel, load
    from hierspec.options import SamplingOptions, TemplateOptions
    from hierspec.streams import Stream, StreamMany

__version__ = "0.1.0"
__all__ = [
    "AsyncLanguageModel",
    "AsyncStream",
    "Busy",
    "Chat",
    "Failure",
    "Generation",
    "Grammar",
    "HierspecError",
    "LanguageModel",
    "Piece",
    "Plan",
    "Proposal",
    "Sampling",
    "SamplingOptions",
    "SomeFailed",
    "Store",
    "Stream",
    "StreamMany",
    "TemplateOptions",
    "TextStep",
    "TierPlan",
    "TokenLogprobs",
    "load",
]

_HOMES = {
    "async_language_model": ["AsyncLanguageModel", "AsyncStream"],
    "chat": ["Chat"],
    "core.errors": ["Busy", "HierspecError"],
    "core.grammar": ["Grammar"],
    "core.interfaces": ["Store"],
    "core.logprobs": ["TokenLogprobs"],
    "core.plan": ["Plan", "TierPlan"],
    "core.proposal": ["Proposal"],
    "core.sampling": ["Sampling"],
    "generation": ["Failure", "Generation", "Piece", "SomeFailed", "TextStep"],
    "language_model": ["LanguageModel", "load"],
    "options": ["SamplingOptions", "TemplateOptions"],
    "streams": ["Stream", "StreamMany"],
}


def __getattr__(name: str) -> object:
    """Names are imported when first used, so that `hierspec --help` and the numpy-only core do not import torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"hierspec.{home}"), name)
    raise AttributeError(f"module 'hierspec' has no attribute {name!r}")

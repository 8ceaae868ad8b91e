"""What a pass of the target did, for the page: which source drafted the accepted tokens, and what was rejected."""

from __future__ import annotations

from typing import Any

from hierspec.core.proposal import Proposal
from hierspec.generation import TextStep
from hierspec.text.tokenizer import Tokenizer


def details(step: TextStep, tokenizer: Tokenizer) -> dict[str, Any]:
    """For `"hierspec"` in a streamed chunk, if a request asked for `"details": true`.

    `pieces` have the source that drafted each first, and its `depth` in the verified draft (0: the target's own token).
    `rejected` are the drafted tokens that were rejected: `at` is the index of the step's token at which their branch
    left the text, `parent` the index in `rejected` of the token before them (-1: they are the first of their branch).
    """
    return {
        "pieces": [{"text": piece.text, "source": piece.source, "depth": piece.depth} for piece in step.pieces],
        "rejected": _rejected(step.draft, step.accepted, tokenizer),
        "tokens": len(step.tokens),
        "rows": 1 + len(step.draft),
        "seconds": round(step.seconds, 6),
    }


def _rejected(draft: Proposal, accepted: tuple[int, ...], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    written_before = {-1: 0} | {node: number for number, node in enumerate(accepted, 1)}
    entries: dict[int, tuple[int, int]] = {}  # node -> its index in the list, and where its branch left the text
    rejected: list[dict[str, Any]] = []
    for node, (token, parent, source) in enumerate(zip(draft.tokens, draft.parents, draft.sources, strict=True)):
        if node in written_before:
            continue
        above, at = entries[parent] if parent in entries else (-1, written_before[parent])
        entries[node] = len(rejected), at
        rejected.append({"text": _text(token, tokenizer), "source": source, "at": at, "parent": above})
    return rejected


def _text(token: int, tokenizer: Tokenizer) -> str:
    """The text of a single token. Special tokens are shown by name: a rejected end of text is worth seeing."""
    return tokenizer.piece(token, special=True).decode("utf-8", "replace")

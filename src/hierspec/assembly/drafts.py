"""Checkpoints as scorer catalogues: the target's, and those of draft models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hierspec.assembly.dtype import DTYPES
from hierspec.assembly.opening import open_decoder, why_not_compiled
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.load import Checkpoint, load_checkpoint, stored_in_blocks
from hierspec.checkpoints.small_model import small_checkpoint
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.catalogue import ScorerCatalogue
from hierspec.scorers.pool import StaircasePool
from hierspec.text.tokenizer import Tokenizer

DEFAULT_KV_MEMORY = 4 << 30  # bytes


@dataclass(frozen=True)
class LoadOptions:
    """How checkpoints are run: the same for a target and its draft models."""

    dtype: str = "float32"  # one of DTYPES
    device: str = "cpu"  # or cuda
    backend: str = "auto"
    weights: str = "auto"
    kv_memory: int = DEFAULT_KV_MEMORY  # most bytes of KV cache and hidden states, for each checkpoint


def open_catalogue(checkpoint: Checkpoint, options: LoadOptions, progress: Progress = silent) -> ScorerCatalogue:
    """The checkpoint on its device, with a KV cache of its own."""
    decoder = open_decoder(checkpoint, options.device, options.backend, options.weights, progress)
    return ScorerCatalogue(checkpoint.name, decoder, StaircasePool(decoder, options.kv_memory), checkpoint.pack)


class DraftModels:
    """Draft models by source and weights, each opened when a plan first names it."""

    def __init__(self, vocabulary: Vocabulary, options: LoadOptions) -> None:
        self._vocabulary, self._options = vocabulary, options
        self._catalogues: dict[tuple[str, str], ScorerCatalogue] = {}
        self._scorers: dict[tuple[str, str, bool], StateScorer] = {}
        self._names: dict[str, str] = {}  # of models, by their sources

    @property
    def catalogues(self) -> list[ScorerCatalogue]:
        """The catalogues of the draft models opened so far."""
        return list(self._catalogues.values())

    def catalogue(self, source: str, weights: str | None = None) -> ScorerCatalogue:
        """The catalogue of one draft model. It only drafts, so its weights may have fewer bits than the target's."""
        key = source, weights or self._options.weights
        if key not in self._catalogues:
            # "file" means a GGUF file's own quantisation, which other draft models do not have.
            as_stored = key[1] == "file" and stored_in_blocks(source)
            options = replace(self._options, weights="auto" if key[1] == "file" and not as_stored else key[1])
            checkpoint = load_checkpoint(source, DTYPES[options.dtype], as_stored=as_stored)
            tokenizer = Tokenizer.from_folder(checkpoint.folder)
            self._vocabulary.check_draft(source, checkpoint.config.vocabulary, tokenizer)
            self._catalogues[key] = open_catalogue(checkpoint, options)
        return self._catalogues[key]

    def scorer(self, source: str, weights: str | None = None, tokens: np.ndarray | None = None) -> StateScorer:
        """A whole draft model; with `tokens`, its head scores these alone (the target's draft vocabulary)."""
        key = source, weights or self._options.weights, tokens is not None
        if key not in self._scorers:
            draft = self.catalogue(source, weights)
            # Counts and costs of a tier are kept under its name, and two folders may hold models of the same name.
            same_name = any(name == draft.name and other != source for other, name in self._names.items())
            self._names[source] = draft.name
            scorer = draft.whole(draft.decoder.config.layers)
            scorer = replace(scorer, name=f"draft {source if same_name else draft.name}")
            if tokens is not None:
                head = draft.head(draft.decoder.norm, True, tokens=tokens)
                scorer = replace(scorer, head=head, kind="small vocabulary")
            self._scorers[key] = scorer
        return self._scorers[key]

    def small(self, target: Checkpoint, vocabulary: str = "auto", weights: str | None = None) -> StateScorer:
        """The pack's small model as a model of its own, for a target that runs in a host."""
        key = f"{target.folder}, small", weights or "", vocabulary != "full"
        if key not in self._scorers:
            checkpoint = small_checkpoint(target)
            options = self._options
            if weights is None and not why_not_compiled(checkpoint.config, "int8", options.device, options.backend):
                weights = "int8"  # the default of all drafts, where the backend has it
            catalogue = open_catalogue(checkpoint, replace(options, weights=weights or "auto"))
            self._catalogues[key[0], key[1]] = catalogue
            scorer = replace(catalogue.whole(checkpoint.config.layers), name="small model")
            whole = scorer.writer is not None and scorer.writer.instead_of_small_heads
            if vocabulary == "small" or (catalogue.is_small(vocabulary) and not whole):
                head = catalogue.head(catalogue.decoder.norm, catalogue.is_small("small"), weights)
                scorer = replace(scorer, head=head, kind="small vocabulary")
            self._scorers[key] = scorer
        return self._scorers[key]

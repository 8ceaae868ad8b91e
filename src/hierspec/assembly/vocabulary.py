"""The token ids that all tiers of a hierarchy share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hierspec.checkpoints.load import load_checkpoint, stored_in_blocks
from hierspec.core.errors import HierspecError
from hierspec.paths import cache_folder
from hierspec.progress import Progress
from hierspec.stores import Home
from hierspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The target's token ids, which its draft models and stores must use too."""

    model: str  # the target's name
    tokenizer: Tokenizer
    size: int  # rows of its output head, which may be more than the tokenizer has tokens

    def check_draft(self, source: str, size: int, tokenizer: Tokenizer) -> None:
        """Refuse a draft model with other token ids."""
        if size != self.size or not tokenizer.same_vocabulary(self.tokenizer):
            raise HierspecError(
                f"The draft {source} has another vocabulary than {self.model}; choose a draft of the same family."
            )

    def home(self, folder: str | Path | None = None, history: str | Path | None = None) -> Home:
        """Where databases with these ids are: `folder`, by default one in the cache. The history may be elsewhere."""
        vocabulary_hash = self.tokenizer.vocabulary_hash
        if folder is None:
            folder = cache_folder() / "stores" / f"{self.model.replace('/', '--')}-{vocabulary_hash[:12]}"
        return Home(Path(folder), vocabulary_hash, self.model, str(history or ""))


def open_home(
    source: str | Path | None = None,
    stores: str | Path | None = None,
    progress: Progress | None = None,
    history: str | Path | None = None,
) -> tuple[Tokenizer, int, Home]:
    """A model's tokenizer, the size of its vocabulary and where its databases are, without a decoder."""
    checkpoint = load_checkpoint(source, torch.float32, progress, as_stored=stored_in_blocks(source))
    vocabulary = Vocabulary(checkpoint.name, Tokenizer.from_folder(checkpoint.folder), checkpoint.config.vocabulary)
    return vocabulary.tokenizer, vocabulary.size, vocabulary.home(stores, history)

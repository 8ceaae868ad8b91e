"""Training data: conversations of the model with itself, real text, and conversations held back for measuring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hierspec.checkpoints.load import Checkpoint, load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.paths import make_folder, whole_file
from hierspec.progress import Progress, silent
from hierspec.stores.corpus_read import batches, identify
from hierspec.text.tokenizer import Tokenizer
from hierspec.train.network import Network
from hierspec.train.students import draft_vocabulary
from hierspec.train.synthesise import Texts, synthesise

_HELD_BACK = 64  # conversations that are not trained on, at most an eighth of all


@dataclass(frozen=True)
class Material:
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    target: Network  # frozen
    texts: Texts
    held_back: Texts
    vocabulary: Tensor  # the draft vocabulary


@dataclass(frozen=True)
class MaterialSettings:
    """How much to synthesise, and which files to read as well."""

    conversations: int = 4096
    length: int = 640
    vocabulary: int = 8192
    prompts: tuple[str, ...] = ()  # first user turns for a third of the conversations
    files: tuple[Path, ...] = ()  # text, JSONL or parquet
    seed: int = 0
    batch: int = 256  # conversations written at once

    def __post_init__(self) -> None:
        for name, least in (("conversations", 2), ("length", 16), ("vocabulary", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise HierspecError(f"{name} must be at least {least} to train on, not {getattr(self, name)}.")


def open_writer(
    source: str | Path | None, device: str = "auto", progress: Progress = silent
) -> tuple[Checkpoint, Tokenizer, Network]:
    """A model that can write conversations, frozen on a device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = load_checkpoint(source, torch.float32, progress)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    if not tokenizer.has_chat_template:
        raise HierspecError(
            f"{checkpoint.name} has no chat template, so it cannot write conversations; name a model that has one."
        )
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return checkpoint, tokenizer, Network(checkpoint.config, checkpoint.weights).frozen(device, dtype)


def gather_material(
    source: str | Path | None,
    folder: Path,
    settings: MaterialSettings,
    device: str = "auto",
    progress: Progress = silent,
) -> Material:
    """Loads the model, writes its conversations (once: they are cached in `folder`) and reads the files."""
    checkpoint, tokenizer, target = open_writer(source, device, progress)
    chat = _conversations(target, tokenizer, folder / "conversations.safetensors", checkpoint.name, settings, progress)
    held = min(_HELD_BACK, max(1, len(chat) // 8))
    parts = [Texts(chat.tokens[:-held], chat.answers[:-held])]
    if settings.files:
        rows = text_rows(tokenizer, settings.files, chat.tokens.shape[1], progress)
        parts.append(Texts(rows, torch.zeros_like(rows, dtype=torch.bool)))
    vocabulary = draft_vocabulary(chat.tokens[chat.answers], settings.vocabulary, checkpoint.config)
    held_back = Texts(chat.tokens[-held:], chat.answers[-held:])
    return Material(checkpoint, tokenizer, target, Texts.joined(parts), held_back, vocabulary)


def text_rows(tokenizer: Tokenizer, files: Sequence[Path], length: int, progress: Progress = silent) -> Tensor:
    """The files' text as rows [rows, length] of tokens."""
    tokens: list[int] = []
    for pieces in batches(identify(files, progress), 0, 0):
        for ids in tokenizer.encode_batch([piece.text for piece in pieces]):
            tokens += ids
    rows = len(tokens) // length
    if not rows:
        raise HierspecError(f"The text files hold {len(tokens)} tokens, less than one row of {length}: give more text.")
    return torch.tensor(tokens[: rows * length], dtype=torch.int32).view(rows, length)


def _conversations(
    target: Network, tokenizer: Tokenizer, path: Path, name: str, settings: MaterialSettings, progress: Progress
) -> Texts:
    about = json.dumps([name, settings.conversations, settings.length, list(settings.prompts), settings.seed])
    note = path.with_suffix(".json")
    if path.is_file() and note.is_file() and note.read_text(encoding="utf-8") == about:
        cached = load_file(path)
        return Texts(cached["tokens"], cached["answers"])
    texts = synthesise(
        target,
        tokenizer,
        settings.conversations,
        settings.length,
        settings.prompts,
        settings.seed,
        settings.batch,
        progress,
    )
    make_folder(path.parent)
    with whole_file(path) as temporary:
        save_file({"tokens": texts.tokens, "answers": texts.answers}, temporary)
    with whole_file(note) as temporary:
        temporary.write_text(about, encoding="utf-8")
    return texts

"""Fills a history with the model's own answers to a file of prompts; a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hierspec.chat import Chat
from hierspec.core.errors import HierspecError
from hierspec.language_model import LanguageModel
from hierspec.paths import whole_file
from hierspec.progress import Progress, silent
from hierspec.stores.history import PROMPT_TAIL, SHARED, HistoryStore


def fill_history(
    model: LanguageModel,
    store: HistoryStore,
    conversations: Sequence[Sequence[str]],
    max_tokens: int = 256,
    batch: int = 8,
    progress: Progress = silent,
) -> int:
    """Greedy answers to every turn, added to the namespace that all may see; how many were added.

    What is done is noted beside the store's file, by prompt, so that the same call does not answer anything twice.
    """
    if batch < 1:
        raise HierspecError(f"batch must be at least 1, not {batch}.")
    note = None if store.path is None else store.path.with_suffix(".done.json")
    done = _read(note)
    keys = [_key(model, turns, max_tokens) for turns in conversations]
    waiting = [place for place, key in enumerate(keys) if key not in done]
    added = 0
    for start in range(0, len(waiting), batch):
        group = waiting[start : start + batch]
        chats = {place: Chat(model) for place in group}
        for turn in range(max(len(conversations[place]) for place in group)):
            asking = [place for place in group if turn < len(conversations[place])]
            asked = [chats[place].ask(conversations[place][turn]) for place in asking]
            answers = model.generate_many(asked, plan="lookup", max_tokens=max_tokens)
            for place, prompt, answer in zip(asking, asked, answers, strict=True):
                chats[place].answer(answer.tokens)
                store.add([*prompt[-PROMPT_TAIL:], *answer.tokens], SHARED)
                added += 1
        store.flush()
        done |= {keys[place] for place in group}
        if note is not None:
            with whole_file(note) as temporary:
                temporary.write_text(json.dumps(sorted(done)) + "\n", encoding="utf-8")
        progress("Writing answers", len(conversations) - len(waiting) + start + len(group), len(conversations))
    return added


def _key(model: LanguageModel, turns: Sequence[str], max_tokens: int) -> str:
    return hashlib.sha256(json.dumps([model.name, model.weights, list(turns), max_tokens]).encode()).hexdigest()[:24]


def _read(note: Path | None) -> set[str]:
    if note is not None and note.is_file():
        with suppress(OSError, ValueError):  # damaged: answer again, copies are not kept twice
            return set(json.loads(note.read_text(encoding="utf-8")))
    return set()

"""Fills a history with the model's own answers to a file of prompts; a run that was stopped can be resumed."""

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
    """Add greedy answers to every turn to the namespace that all may see. Returns how many were added.

    Answered prompts are listed in a file next to the store's, so that a second call answers nothing twice.
    """
    if batch < 1:
        raise HierspecError(f"batch must be at least 1, not {batch}.")
    done_file = None if store.path is None else store.path.with_suffix(".done.json")
    done = _read(done_file)
    keys = [_key(model, turns, max_tokens) for turns in conversations]
    waiting = [number for number, key in enumerate(keys) if key not in done]
    added = 0
    for start in range(0, len(waiting), batch):
        group = waiting[start : start + batch]
        chats = {number: Chat(model) for number in group}
        for turn in range(max(len(conversations[number]) for number in group)):
            open_chats = [number for number in group if turn < len(conversations[number])]
            prompts = [chats[number].ask(conversations[number][turn]) for number in open_chats]
            answers = model.generate_many(prompts, plan="lookup", max_tokens=max_tokens)
            for number, prompt, answer in zip(open_chats, prompts, answers, strict=True):
                chats[number].answer(answer.tokens)
                store.add([*prompt[-PROMPT_TAIL:], *answer.tokens], SHARED)
                added += 1
        store.flush()
        done |= {keys[number] for number in group}
        if done_file is not None:
            with whole_file(done_file) as temporary:
                temporary.write_text(json.dumps(sorted(done)) + "\n", encoding="utf-8")
        progress("Writing answers", len(conversations) - len(waiting) + start + len(group), len(conversations))
    return added


def _key(model: LanguageModel, turns: Sequence[str], max_tokens: int) -> str:
    return hashlib.sha256(json.dumps([model.name, model.weights, list(turns), max_tokens]).encode()).hexdigest()[:24]


def _read(done_file: Path | None) -> set[str]:
    if done_file is not None and done_file.is_file():
        with suppress(OSError, ValueError, TypeError, RecursionError):  # damaged: answer again, stores drop copies
            return {str(key) for key in json.loads(done_file.read_text(encoding="utf-8"))}
    return set()

"""Text <-> ids for a model folder.

Built on the `tokenizers` library alone, because importing `transformers` takes seconds. What `transformers` does with
the same folder (beginning-of-text token, chat template, special tokens) is repeated here and compared in tests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_object, read_text, refusal, shown
from hierspec.text.chat_template import ChatTemplate
from hierspec.text.tokenizers_guard import (
    check_parts,
    has_patterns,
    library_errors,
    part,
    read_tokenizer,
    with_patience,
)
from hierspec.text.tool_formats import MARKER_TOKENS

_REMEDY = "fetch the model again"
_NOT_ENCODED = "The model's tokenizer fails on this text; fetch the model again or choose another one."
_LONGEST_REPLACEMENT = 64  # characters, or spaces at the start of a text: real decoders have one
_LARGEST_ID = 2**31 - 1
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Decoding:
    """How tokens become bytes: the decoder of a tokenizer.json, reduced to what the two supported kinds use."""

    byte_level: bool = False  # tokens are spelled in GPT-2's byte alphabet
    byte_fallback: bool = False  # "<0x0A>" is a byte
    replacements: tuple[tuple[str, str], ...] = ()  # usually "▁" -> " "
    leading_spaces: int = 0  # spaces to drop at the start of the whole text (SentencePiece adds one)
    dropped_at_start: str = ""  # a character the first token loses (the decoder called Metaspace)

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> Decoding:
        """`decoder` is the entry of that name in a tokenizer.json."""
        steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": "none"}]
        if any(_is_excessive(step) for step in steps):
            raise HierspecError("The model's tokenizer is damaged: its decoder makes every token far longer.")
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        replacements: list[tuple[str, str]] = []
        leading_spaces, dropped_at_start = 0, ""
        for position, step in enumerate(steps):
            match step:
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    replacements.append((old, new))
                case {"type": "ByteFallback"} | {"type": "Fuse"}:
                    pass
                # Before a Fuse this would strip every token, which no supported tokenizer does.
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if "Fuse" in kinds[:position]:
                    leading_spaces += start
                case {"type": "Metaspace", "replacement": mark}:
                    replacements.append((mark, " "))
                    dropped_at_start = mark if step.get("prepend_scheme", "always") != "never" else ""
                case _:
                    raise HierspecError(
                        f"This tokenizer decodes with {shown(step['type'])}, which hierspec does not know; "
                        "byte-level BPE and SentencePiece-style BPE are supported."
                    )
        return cls(
            byte_fallback="ByteFallback" in kinds,
            replacements=tuple(replacements),
            leading_spaces=leading_spaces,
            dropped_at_start=dropped_at_start,
        )

    def token_bytes(self, token: str, first: bool = False) -> bytes:
        """The bytes of one token, `first` when it is the first of a text."""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token is plain text, not in the byte alphabet
                return token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # a word that only looks like a byte
        if first and self.dropped_at_start:
            token = token.replace(self.dropped_at_start, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


class Tokenizer:
    """The tokenizer of one model. Immutable after loading and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        bos_id: int | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        check_parts(backend)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._has_patterns = has_patterns(backend)
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = ChatTemplate(chat_template) if chat_template else None
        added = backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(i for i, token in added if token.special and token.content not in MARKER_TOKENS)
        self._pieces: dict[int, bytes] = {}
        self.decoding = Decoding.from_json(part(backend.decoder))
        self.vocabulary_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = bos_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_ids))  # in the order of the files, each once

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, and from the files beside it special tokens, chat template and end-of-text ids."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise HierspecError(f"There is no tokenizer.json in {folder}; give a folder that holds a whole checkpoint.")
        backend = read_tokenizer(path, _REMEDY)
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        model = _read_json(folder / "config.json") | _read_json(folder / "generation_config.json")
        special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        _mark_special(backend, special_tokens.values())
        bos_id = _first_id(backend.token_to_id(special_tokens.get("bos_token", "")), model.get("bos_token_id"))
        eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=_chat_template(folder / "chat_template.jinja", config.get("chat_template")),
            bos_id=bos_id,
            # Fine-tunes often change the tokenizer's end token but not the model's, so both end a text.
            stop_ids=[*_ids(model.get("eos_token_id")), *_ids(eos_id)],
        )

    def encode(self, text: str, special: bool = False, begin: bool = True) -> list[int]:
        """Ids of a raw prompt.

        special: read "<|im_end|>" and the like in the text as control tokens, as `transformers` does; otherwise they
                 are ordinary characters, so that untrusted text cannot end a message.
        begin:   add what tokenizer.json puts around a text (usually a beginning-of-text token, often nothing). As in
                 `transformers` it decides, not add_bos_token of the configuration beside it.
        """
        backend = self._backend if special else self._literal_backend
        return self._encoded(backend, [text], begin)[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of many texts at once, without a beginning-of-text token; on all cores."""
        return self._encoded(self._literal_backend, texts, False)

    def _encoded(self, backend: tokenizers.Tokenizer, texts: list[str], begin: bool) -> list[list[int]]:
        for text in texts:
            _check_text(text)

        def encode() -> list[list[int]]:
            # The library releases the GIL only in batch encoding.
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=begin)]

        with library_errors(_NOT_ENCODED):
            if self._has_patterns:
                return with_patience(encode, sum(map(len, texts)))
            if len(texts) == 1:
                return [backend.encode(texts[0], add_special_tokens=begin).ids]
            return encode()

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ids; broken UTF-8 becomes replacement characters. `special` shows control tokens too."""
        parts: list[bytes] = []
        for token_id in ids:
            if self.is_shown(token_id, special):
                parts.append(self.piece(token_id, special) if parts else self.opening_piece(token_id))
        data = b"".join(parts)
        for _ in range(self.decoding.leading_spaces):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def piece(self, token_id: int, special: bool = False) -> bytes:
        """Exact bytes of one token inside a text. Control tokens are b"" unless `special`; unknown ids always."""
        if not special and token_id in self._special_ids:
            return b""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self.decoding.token_bytes(token)
        return piece

    def opening_piece(self, token_id: int) -> bytes:
        """Exact bytes of the first token of a text (before `decoding.leading_spaces` are dropped)."""
        token = self._token(token_id)
        return b"" if token is None else self.decoding.token_bytes(token, first=True)

    def is_shown(self, token_id: int, special: bool = False) -> bool:
        """Whether this id takes part in decoded text."""
        return (special or token_id not in self._special_ids) and self._token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every id means the same token in both, so that the models can exchange ids."""
        ours, theirs = (tokenizer._backend.get_vocab(with_added_tokens=True) for tokenizer in (self, other))
        return bool(ours == theirs)

    @cached_property
    def vocabulary_hash(self) -> str:
        """A hash that is equal for tokenizers in which every id means the same token."""
        vocabulary = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the template."""
        return self._chat_template.source if self._chat_template else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. The template can read `variables` by name (for example enable_thinking,
        tools)."""
        if self._chat_template is None:
            raise HierspecError("This model has no chat template; give it a raw prompt instead of messages.")
        names = {**self._special_tokens, **(variables or {})}
        return self._chat_template.render(messages, add_generation_prompt, names)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation. The template writes the beginning-of-text token itself, so none is added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, variables), special=True, begin=False)

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        # The option is state of the library's object; with a second object, neither kind of encoding needs a lock.
        with library_errors(_NOT_ENCODED):
            copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocabulary_size:  # embeddings are often padded beyond the vocabulary
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 character is its own byte, the other bytes are characters from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HierspecError(
            "The text holds half a character (a surrogate), which no tokenizer reads: give valid Unicode."
        ) from error


def _is_excessive(step: Mapping[str, Any]) -> bool:
    """Whether a decoder step could turn few tokens into an unbounded text."""
    old, content, start = step.get("pattern"), step.get("content"), step.get("start")
    return (
        (isinstance(old, dict) and old.get("String") == "")
        or (isinstance(content, str) and len(content) > _LONGEST_REPLACEMENT)
        or (isinstance(start, int) and start > _LONGEST_REPLACEMENT)
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, _REMEDY) if path.is_file() else {}


def _token_text(entry: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _ids(entry: Any) -> list[int]:
    """An end-of-text entry is one id, a list of ids, or nothing."""
    ids = [i for i in (entry if isinstance(entry, list) else [entry]) if i is not None]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise HierspecError(f"The model's config is damaged: {shown(i)} is not the id of a token; {_REMEDY}.")
    return [i for i in ids if 0 <= i <= _LARGEST_ID]  # -1 and the like mean none


def _first_id(*entries: Any) -> int | None:
    return next((i for entry in entries for i in _ids(entry)), None)


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Marks tokens that the configuration calls special, even if tokenizer.json does not."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(texts)
            if text not in added and backend.token_to_id(text) is not None
        ]
    )


def _chat_template(path: Path, entry: Any) -> str | None:
    """The template: chat_template.jinja, else the configuration's, which is one template or a list of named ones."""
    if path.is_file():
        return read_text(path, refusal(path, _REMEDY))
    if isinstance(entry, list):
        defaults = (item for item in entry if isinstance(item, dict) and item.get("name") == "default")
        entry = next(defaults, {}).get("template")
    return entry if isinstance(entry, str) else None

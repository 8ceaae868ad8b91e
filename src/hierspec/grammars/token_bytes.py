"""A tokenizer in llguidance's form: the bytes of every token, and how to tokenise a text.

A SentencePiece tokenizer spells the first token of a text differently: it drops a space. Such a vocabulary is given
twice, the second time with the spellings at the beginning of a text.
"""

from __future__ import annotations

from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.text.tokenizer import Tokenizer

_WORD = 32  # bits per word: masks are whole words
_MARK = "\n"  # a prefix text: what follows it is spelled as inside a text


class TokenBytes:
    """A model's vocabulary as bytes. Control tokens have none: no grammar asks for them."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        size = -(-vocabulary // _WORD) * _WORD
        pieces = [tokenizer.piece(token) for token in range(min(vocabulary, tokenizer.vocabulary_size))]
        self.pieces = pieces + [b""] * (size - len(pieces))
        decoding = tokenizer.decoding
        self.openings: list[bytes] = []
        if decoding.leading_spaces or decoding.dropped_at_start:
            spaces = b" " * decoding.leading_spaces
            for token, piece in enumerate(self.pieces):
                opening = tokenizer.opening_piece(token) if piece else b""
                # A token of fewer spaces than are dropped would drop some of the next token's: it never comes first.
                short = len(opening) < len(spaces) and not opening.strip(b" ")
                self.openings.append(b"" if short else opening.removeprefix(spaces) if spaces else opening)
        self.first_opening = size if self.openings else 0  # id of token 0 as it begins a text
        self._ids: dict[bytes, int] | None = None

    def for_llguidance(self) -> Any:
        """An `LLTokenizer`."""
        try:
            import llguidance
        except ImportError:
            raise HierspecError(
                "Grammars need the package llguidance, which is not installed: pip install 'hierspec[grammar]'."
            ) from None
        tokens = [*self.pieces, *self.openings]
        end = len(tokens)  # whether a text may end is asked separately
        described = _Described([*tokens, *[b""] * _WORD], end, self.encode)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(described), n_vocab=end + _WORD, eos_token=end)

    def encode(self, text: bytes) -> list[int]:
        """Tokens of these bytes as the model sees them inside a text; they always spell exactly the bytes."""
        try:
            ids = self._inside(text.decode())
        except (UnicodeDecodeError, HierspecError):
            ids = []
        return ids if b"".join(self.pieces[token] for token in ids) == text else self._longest_first(text)

    def opening_token(self, text: bytes) -> int | None:
        """The first token of a text of these bytes: the tokenizer's choice, else the longest."""
        try:
            first = self._tokenizer.encode(text.decode(errors="ignore"), begin=False)[:1]
        except HierspecError:
            first = []
        if first and self.openings[first[0]] and text.startswith(self.openings[first[0]]):
            return first[0]
        fitting = [token for token, opening in enumerate(self.openings) if opening and text.startswith(opening)]
        return max(fitting, key=lambda token: len(self.openings[token]), default=None)

    def _inside(self, text: str) -> list[int]:
        if not self.openings:
            return self._tokenizer.encode(text, begin=False)
        ids = self._tokenizer.encode(_MARK + text, begin=False)
        before = b""
        while ids and not before.endswith(_MARK.encode()):
            before += self.pieces[ids.pop(0)]
        return ids

    def _longest_first(self, text: bytes) -> list[int]:
        """The longest tokens that fit, one after the other, for bytes that the tokenizer cannot encode."""
        if self._ids is None:
            self._ids = {piece: token for token, piece in reversed(list(enumerate(self.pieces))) if piece}
            self._longest = max(map(len, self._ids), default=0)
        ids: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((length for length in lengths if text[:length] in self._ids), 0)
            if not length:  # the model cannot write this byte
                break
            ids.append(self._ids[text[:length]])
            text = text[length:]
        return ids


class _Described:
    """The attributes that llguidance reads."""

    def __init__(self, tokens: list[bytes], end: int, encode: Any) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id, self._encode = tokens, end, None, encode
        self.special_token_ids = [end]

    def __call__(self, text: bytes) -> list[int]:
        tokens: list[int] = self._encode(text)
        return tokens

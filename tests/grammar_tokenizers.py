"""Small tokenizers of both kinds, for tests of grammars."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hierspec.text.tokenizer import Tokenizer

MERGED = (
    '{"',
    '":',
    ' "',
    '",',
    '"}',
    "na",
    "name",
    "ag",
    "age",
    " tr",
    "true",
    "12",
    "ab",
    "ba",
    "é",
    "日",
    "日本",
    "🎉",
)


def byte_level(merged=MERGED):
    """All bytes, and longer tokens by merges of two: some of them hold part of a character."""
    stop = "<|im_end|>"
    letters = {byte: letter for letter, byte in _bytes().items()}
    vocabulary = {name: number for number, name in enumerate([stop, *sorted(letters.values())])}
    merges = []
    for text in merged:
        spelled = [letters[byte] for byte in text.encode()]
        left = spelled[0]
        for right in spelled[1:]:
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
            left += right
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(stop, special=True, normalized=False)])
    return Tokenizer(backend, stop_ids=[0])


def sentencepiece(
    words=("▁yes", "yes", "▁no", "no", "▁", "▁{", "{", '"', '▁"', "a", "b", ":", "▁1", "1", "}", "né", "▁né"),
):
    """Words with a mark for a space, bytes for all else, and a space that is dropped where a text begins."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(
        models.BPE(
            vocab={name: number for number, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:2]])
    return Tokenizer(backend, stop_ids=[1])


def _bytes():
    from hierspec.text.tokenizer import _BYTE_OF_CHARACTER

    return _BYTE_OF_CHARACTER

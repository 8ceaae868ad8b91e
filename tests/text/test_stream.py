"""Streamed text: whole characters, equal to decoding everything at once; stop strings, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from hierspec.core.errors import HierspecError
from hierspec.text.stream import Detokeniser, StopStrings
from hierspec.text.tokenizer import _BYTE_OF_CHARACTER, Tokenizer


def byte_level() -> Tokenizer:
    tokens = [*_BYTE_OF_CHARACTER, "Ġthe", "ðŁ", "ĺĢ", "Ã©", "ing"]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|begin|>"])
    backend.add_tokens([AddedToken("漢 字", normalized=False)])
    return Tokenizer(backend)


def byte_fallback(*last: object) -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "a", "é", "漢", "▁a▁b"]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    backend = Backend(models.BPE({"▁a": 0, "▁": 1, "b": 2, "▁c▁d": 3}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte level": byte_level(),
    "SentencePiece": byte_fallback(decoders.Strip(" ", 1, 0)),
    "SentencePiece without prefix": byte_fallback(),
    "Metaspace": metaspace(),
}


def chunks(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    return list(zip([0, *cuts], [*cuts, length], strict=True))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), special=st.booleans())
def test_stream_equals_decode(name: str, data: st.DataObject, special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # Ids beyond the vocabulary happen too: embeddings are padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size + 2), max_size=30))
    detokeniser = Detokeniser(tokenizer, special)
    spans = chunks(data.draw, len(ids))
    parts = [detokeniser.add(ids[start:end]) for start, end in spans]
    assert "".join(parts) + detokeniser.finish() == tokenizer.decode(ids, special)


@pytest.mark.parametrize("name", ["byte level", "Metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), special=st.booleans())
def test_decode_equals_the_library_on_any_ids(name: str, data: st.DataObject, special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size + 2), max_size=30))
    assert tokenizer.decode(ids, special) == tokenizer._backend.decode(ids, skip_special_tokens=not special)


@pytest.mark.parametrize("name", ["SentencePiece", "SentencePiece without prefix"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), special=st.booleans())
def test_decode_equals_the_library_on_whole_characters(name: str, data: st.DataObject, special: bool) -> None:
    # On broken runs of bytes the library also gives up the whole characters beside them; hierspec keeps those.
    tokenizer = TOKENIZERS[name]
    words = st.sampled_from([*range(257, tokenizer.vocabulary_size), 0])
    letters = st.characters(codec="utf-8").map(lambda letter: [1 + byte for byte in letter.encode()])
    drawn = data.draw(st.lists(words.map(lambda word: [word]) | letters, max_size=20))
    ids = [token_id for item in drawn for token_id in item]
    assert tokenizer.decode(ids, special) == tokenizer._backend.decode(ids, skip_special_tokens=not special)


@pytest.mark.parametrize("name", ["byte level", "SentencePiece without prefix"])
def test_a_character_is_never_split(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    byte_ids = [tokenizer.token_id(token) for token in (_BYTE_OF_CHARACTER if name == "byte level" else ())]
    id_of_byte = dict(zip(_BYTE_OF_CHARACTER.values(), byte_ids, strict=False)) or {b: b + 1 for b in range(256)}
    detokeniser = Detokeniser(tokenizer)
    parts = [detokeniser.add([id_of_byte[byte]]) for byte in "é漢😀".encode()]
    assert parts == ["", "é", "", "", "漢", "", "", "", "😀"]
    assert detokeniser.add([id_of_byte[0xF0], id_of_byte[0x9F]]) == ""
    assert detokeniser.finish() == "\N{REPLACEMENT CHARACTER}"


def test_broken_bytes_do_not_hide_their_neighbours() -> None:
    tokenizer = TOKENIZERS["SentencePiece"]
    broken = [1 + byte for byte in "é".encode() + b"\xff"]
    assert tokenizer.decode(broken) == "é\N{REPLACEMENT CHARACTER}"


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """One character at a time."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_stop_strings_equal_the_naive_reading(data: st.DataObject) -> None:
    letters = st.text("abc", max_size=40)
    text, stops = data.draw(letters), data.draw(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
    filtered, shown, met = StopStrings(stops), "", False
    expected, expected_met = naive(text, stops)
    for start, end in chunks(data.draw, len(text)):
        piece, met = filtered.add(text[start:end])
        shown += piece
        assert expected.startswith(shown)
    assert (shown + filtered.finish(), met) == (expected, expected_met)


def test_stop_strings_hold_back_no_more_than_needed() -> None:
    stops = StopStrings(["\nUser:"])
    assert stops.add("Hello\nUse") == ("Hello", False)
    assert stops.add("less") == ("\nUseless", False)
    assert stops.add("\nUser") == ("", False)
    assert stops.add(": hi") == ("", True)
    assert stops.add("more") == ("", True)
    assert stops.finish() == ""


def test_held_text_comes_out_at_the_end() -> None:
    stops = StopStrings(["END"])
    assert stops.add("the EN") == ("the ", False)
    assert stops.finish() == "EN"
    assert StopStrings([]).add("any") == ("any", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(HierspecError, match="empty"):
        StopStrings(["a", ""])

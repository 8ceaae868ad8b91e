"""The tokenizers library on files that mean harm: its panics, its patience, its appetite; one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import write_byte_tokenizer
from hierspec.text import tokenizers_guard
from hierspec.text.tokenizer import Tokenizer
from hierspec.text.tokenizers_guard import library_errors, with_patience

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
UNKNOWN = {"SpecialToken": {"id": "zz", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(*single: Any) -> dict[str, Any]:
    return {"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}}


def split(pattern: str) -> dict[str, Any]:
    behaviour = {"behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, **behaviour}}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[dict[str, Any]], Tokenizer]:
    """A tokenizer whose file has these parts instead of its own."""

    def change(parts: dict[str, Any]) -> Tokenizer:
        write_byte_tokenizer(tmp_path)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | parts))
        return Tokenizer.from_folder(tmp_path)

    return change


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not a tokenizer"),
        # It claims a table of four gigabytes, which the library would allocate.
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "not a tokenizer"),
        ({"model": {}}, "not a tokenizer"),
        (split("((("), "not a tokenizer"),
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 40}}, "more than 64 times as long"),
        ({"normalizer": REPLACE | {"content": "b" * 1000}}, "more than 64 times as long"),
        ({"normalizer": REPLACE | {"pattern": {"String": ""}}}, "replaces an empty text"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "more than 64 times as long"),
        (template(*[TEXT] * 1000), "more than 64 pieces"),
        ({"decoder": {"type": "Sequence", "decoders": [REPLACE | {"pattern": {"String": ""}}]}}, "decoder"),
        ({"decoder": {"type": "Sequence", "decoders": [REPLACE | {"content": "x" * 99}]}}, "decoder"),
    ],
)
def test_a_tokenizer_that_asks_for_too_much_is_refused(
    opened: Callable[..., Tokenizer], parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(HierspecError, match=message) as caught:
        opened(parts)
    assert str(caught.value).isprintable()


def test_a_word_hidden_in_escapes_is_found(opened: Callable[..., Tokenizer], tmp_path: Path) -> None:
    opened({})
    path = tmp_path / "tokenizer.json"
    hostile = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    text = json.dumps(json.loads(path.read_text()) | {"normalizer": hostile})
    path.write_text(text.replace("Precompiled", "\\u0050recompiled"))
    with pytest.raises(HierspecError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (template(UNKNOWN), "a"),  # a panic: no entry found for key
        (split("(a+)+$"), "a" * 40 + "b"),  # a panic: the pattern's own limit
    ],
)
def test_a_panic_is_one_sentence(opened: Callable[..., Tokenizer], parts: dict[str, Any], text: str) -> None:
    tokenizer = opened(parts)
    with pytest.raises(HierspecError, match="fails on this text"):
        tokenizer.encode(text)


def test_a_text_that_takes_for_ever_is_given_up(
    opened: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every position of the text takes as long as the pattern's own limit allows."""
    monkeypatch.setattr(tokenizers_guard, "_SECONDS", 0.2)
    tokenizer = opened(split("(?:a|a){17}\\d"))
    assert tokenizer.encode("abc")
    with pytest.raises(HierspecError, match="take too long on this text"):
        tokenizer.encode("a" * 400)


def test_patience_gives_back_what_a_task_does() -> None:
    assert with_patience(lambda: 7, 1) == 7
    with pytest.raises(ZeroDivisionError):
        with_patience(lambda: 1 // 0, 1)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, OSError])
def test_what_is_no_fault_of_the_library_passes(stop: type[BaseException]) -> None:
    with pytest.raises(stop), library_errors("never"):
        raise stop


def test_half_a_character_is_told(opened: Callable[..., Tokenizer]) -> None:
    tokenizer = opened({})
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(HierspecError, match="half a character"):
            encode("a\ud800")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", b'{"eos_token_id": "abc"}', "'abc' is not the id of a token"),
        ("generation_config.json", b'{"bos_token_id": {"a": 1}}', "is not the id of a token"),
        ("config.json", b'{"eos_token_id": [true]}', "True is not the id of a token"),
        ("special_tokens_map.json", b'{"a":' * 100_000, "nested too deeply"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "surrogates"),
        ("chat_template.jinja", b"\xff\xfe{{ x }}", "not UTF-8 text"),
    ],
)
def test_damaged_settings_are_one_sentence(
    opened: Callable[..., Tokenizer], tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    write_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(HierspecError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "entry", [[{"template": "x"}], [{"name": [1], "template": "x"}], ["x"], 5, {"name": "default"}]
)
def test_an_odd_list_of_templates_has_no_default(tmp_path: Path, entry: Any) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert not Tokenizer.from_folder(tmp_path).has_chat_template


def test_ids_that_no_token_has_are_left_out(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 0, 9999999999999999999999]}')
    assert Tokenizer.from_folder(tmp_path).stop_ids == (0, 2)

"""Files that anybody may have written: whole and of the right form, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from hierspec import untrusted
from hierspec.core.errors import HierspecError
from hierspec.untrusted import read_object, read_text, shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not text in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not text in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (rb'{"a": ["\ud800"]}', "surrogates"),
        (rb'{"\udc00": 1}', "surrogates"),
        (b"[1]", "no JSON object"),
        (b"5", "no JSON object"),
        (b" " * 300, "far too large"),
    ],
)
def test_whatever_a_file_holds_is_an_object_or_a_sentence(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    if message == "far too large":
        monkeypatch.setattr(untrusted, "_MOST_TEXT", 299)
    with pytest.raises(HierspecError, match=rf"config\.json .*{message}.*: fetch it again\.$") as caught:
        read_object(path, "fetch it again")
    assert str(caught.value).isprintable()


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 300)):
        with pytest.raises(HierspecError, match=r"(is not a file|cannot be read).*fetch it again\.$"):
            read_text(path, "fetch it again")


def test_values_are_shown_on_one_short_line() -> None:
    values = ("a\nb\x00\ud800", "x" * 10_000, 10**4000, [[1] * 1000] * 1000, {"a": {"b": "c" * 1000}}, None, 1.5)
    for value in values:
        text = shown(value)
        assert text.isprintable()
        assert len(text) < 200
        text.encode()
    assert [shown(value) for value in ("a", 3, None)] == ["'a'", "3", "None"]

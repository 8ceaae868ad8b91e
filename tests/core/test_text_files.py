"""Hostile plan, prompt and record files: each is one short sentence, soon, and what is valid is read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core import text_files
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.text_files import read_object, read_text, shown, shown_path
from hierspec.planner.formula import whatif
from hierspec.planner.simulation.replay import read_records
from hierspec.prompts import BenchPrompt, read_prompts

SECONDS = 60.0  # of processor time, on any machine: they take milliseconds, and without limits minutes or for ever
READERS = {"plan": Plan.read, "prompts": read_prompts, "records": read_records, "figures": whatif.read}


def refused(read, argument) -> str:
    began = time.process_time()
    with pytest.raises(HierspecError) as caught:
        read(argument)
    assert time.process_time() - began < SECONDS
    sentence = str(caught.value)
    assert len(sentence) < 900
    assert "\n" not in sentence
    assert "Error" not in sentence
    assert "Errno" not in sentence
    sentence.encode()
    return sentence


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_is_no_file_is_refused(read, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    reasons = {
        tmp_path / "missing": "there is no such file",
        tmp_path: "it is a folder",
        tmp_path / ("x" * 300): "its name is too long",
        tmp_path / "a\0b": "not one that a file can have",
        tmp_path / "file" / "inside": "a part of its path is a file",
        tmp_path / "loop": "a link that leads to itself",
    }
    for path, reason in reasons.items():
        assert reason in refused(read, path)
        assert reason in refused(read, str(path) if read is Plan.read else path)
    refused(read, Path("/dev/zero"))  # never ends
    refused(read, tmp_path / "\udcff")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_bytes_that_are_no_text_are_refused(read, tmp_path):
    path = tmp_path / "file"
    for content in (b"\xff\xfe\x00", b"\x00" * 100, "é".encode("latin-1"), b"\xed\xa0\x80", os.urandom(4096) + b"\xff"):
        path.write_bytes(content)
        refused(read, path)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert Plan.read(tmp_path / "pipe") == Plan()  # as of an empty file
    assert "is empty" in refused(read_prompts, tmp_path / "pipe")


def test_a_pipe_is_read_to_its_end():
    reading, writing = os.pipe()
    os.write(writing, b'{"turns": ["hello"]}\n')
    os.close(writing)
    assert read_prompts(Path(f"/dev/fd/{reading}")) == [BenchPrompt("all", ("hello",))]
    os.close(reading)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 30_000,
        "a = " + "[" * 500_000,
        "a = " + "{a=" * 10_000,
        "a." * 16_000 + "a = 1",
        "[" + "a." * 400 + "a]\n",
        "[" + "a." * 16_000 + "a]\n",
        "x = 1\n" * 10_000_000,
        "budget = " + "9" * 30_000,
        "budget = " + "9" * 4_000,
        "budget = 0x" + "f" * 30_000,
        "budget = 1e999",
        "budget = nan",
        "budget = 1000001",
        "budget = 1979-05-27",
        "stores = " + json.dumps([["a"] * 2000]),
        "stores = 'x'",
        "rule = '" + "x" * 30_000 + "'",
        "rule = 3",
        "x" * 30_000 + " = 1",
        "'a\\u0000' = 1",
        "model = '\0'",
        "merge = 'yes'",
        "[[tier]]\n" * 3_000,
        "[[tier]]\nexit_layer = 2\n" * 65,
        "[[tier]]\nexit_depth = " + "9" * 400,
        "[[tier]]\nexit_depth = -inf",
        "[[tier]]\nexit_depth = true",
        "[[tier]]\nexit_layer = 99999999999999999999",
        "[[tier]]\nexit_layer = 2.0",
        "[[tier]]\nskip_layers = [99999999999999999999]",
        "[[tier]]\nskip_layers = [true]",
        "[[tier]]\nexit_layer = 1\nuntil = '" + "x" * 9_000 + "'",
        "[[tier]]\nexit_layer = 1\nagrees = nan",
        "[tier]\nexit_layer = 1",
        "tier = 1",
    ],
    ids=lambda text: text[:40],
)
def test_hostile_plans_are_one_sentence(text, tmp_path):
    refused(Plan.from_toml, text)
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert str(path) in refused(Plan.read, path)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 10_000_000, "a\0b", "\udcff", "", "../plain", "plain.toml", None, 3])
def test_plan_names_are_one_sentence(name):
    assert "There is no plan or plan file" in refused(lambda name: Plan.named(name, 30), name)


def test_a_plan_with_a_byte_order_mark_or_other_line_ends_is_read(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbfbudget = 9\r\nmerge = true\r\n")
    assert Plan.read(path) == Plan(budget=9, merge=True)


def line(*turns: str, **more: object) -> str:
    return json.dumps({"turns": turns, **more}, ensure_ascii=False)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",)), min_size=1), min_size=1, max_size=3), st.data())
def test_every_text_that_json_can_hold_is_a_prompt(turns, data):
    """Characters that break lines elsewhere included: only a line feed ends a line of JSON."""
    ends = st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"])
    written = "".join(line(turn) + data.draw(ends) for turn in turns) + data.draw(st.sampled_from(["", line("last")]))
    reading, writing = os.pipe()
    os.write(writing, data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + written.encode())
    os.close(writing)
    try:
        read = [prompt.turns for prompt in read_prompts(Path(f"/dev/fd/{reading}"))]
    finally:
        os.close(reading)
    assert [turn for (turn,) in read][: len(turns)] == turns


def test_separators_of_unicode_may_stand_in_a_prompt(tmp_path):
    path, text = tmp_path / "prompts.jsonl", "a\u2028b\u2029c\u0085d\x0be\x1cf"
    path.write_text(f"{line(text)}\n{line('x')}\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(path)] == [(text,), ("x",)]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"turns": ' * 50_000, "nested too deeply"),
        ("9" * 5_000, "too many digits"),
        ('{"turns": ["' + "x" * (5 << 20) + '"]}', "longer than 4 MB"),
        ("{" * 10, "not JSON from column 2 on"),
        ('{"turns": ["a"]} {"turns": ["b"]}', "not JSON from column 18 on"),
        ('{"turns": ["a\0b"]}', "not JSON"),
        ("\r".join([line("a"), line("b")]), "not JSON"),
        ("null", "no object"),
        ('"text"', "no object"),
        ("3", "no object"),
        ('["turns"]', "no object"),
        ("{}", "a list of texts"),
        ('{"turns": {"a": 1}}', "a list of texts"),
        ('{"turns": []}', "a list of texts"),
        ('{"turns": [""]}', "none of them empty"),
        ('{"turns": [null]}', "none of them empty"),
        ('{"turns": [["a"]]}', "none of them empty"),
        ('{"turns": ["a"], "task": {}}', "task must be a text"),
        ('{"turns": ["a"], "category": 3}', "task must be a text"),
        ('{"turns": ["\\ud800"]}', "half a character"),
    ],
    ids=lambda value: value[:30],
)
def test_hostile_prompts_are_one_sentence_with_their_line(wrong, reason, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{line('fine')}\n\n{wrong}\n", encoding="utf-8")
    sentence = refused(read_prompts, path)
    assert f"{path}, line 3: " in sentence
    assert reason in sentence
    path.write_bytes(line("fine").encode() + b"\n\xff\n")
    assert "line 2: it is not UTF-8 text" in refused(read_prompts, path)


@pytest.mark.parametrize(
    "wrong",
    [
        "[" * 100_000,
        "3",
        "{}",
        '{"prompt": [], "output": []}',
        '{"prompt": ["1"], "output": []}',
        '{"prompt": [-1], "output": []}',
        '{"prompt": [1], "output": [99999999999]}',
        '{"prompt": [true], "output": []}',
    ],
    ids=lambda value: value[:30],
)
def test_hostile_records_are_one_sentence_with_their_line(wrong, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"prompt": [1], "output": [2], "task": "\u2028"}}\n{wrong}\n', encoding="utf-8")
    assert "line 2: " in refused(read_records, path)


def test_a_text_has_a_largest_size(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path, HierspecError, 6) == "abc"
    assert refused(lambda path: read_text(path, HierspecError, 5), path) == "it is larger than 5 bytes"


def test_what_a_sentence_quotes_is_short():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    values = ["x" * 10**6, 10**5000, -(10**5000), float("nan"), deep, {"a": deep}, (1,), None, object(), 3.5, True]
    assert all(len(shown(value)) < 200 for value in values)
    assert len(shown_path("x" * 10**6)) < 200
    shown_path("\udcff\0").encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (rb'{"a": ["\ud800"]}', "surrogates"),
        (rb'{"\udc00": 1}', "surrogates"),
        (b"[1]", "no JSON object"),
        (b"5", "no JSON object"),
        (b" " * 300, "larger than 299 bytes"),
    ],
)
def test_whatever_a_file_holds_is_an_object_or_a_sentence(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    if message == "larger than 299 bytes":
        monkeypatch.setattr(text_files, "_LARGEST_OBJECT", 299)
    with pytest.raises(HierspecError, match=rf"config\.json .*{message}.*; fetch it again\.$") as caught:
        read_object(path, "fetch it again")
    assert str(caught.value).isprintable()


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 300)):
        with pytest.raises(HierspecError, match=r"cannot be read: .*; fetch it again\.$"):
            read_object(path, "fetch it again")


def test_values_are_shown_on_one_short_line() -> None:
    values = ("a\nb\x00\ud800", "x" * 10_000, 10**4000, [[1] * 1000] * 1000, {"a": {"b": "c" * 1000}}, None, 1.5)
    for value in values:
        text = shown(value)
        assert text.isprintable()
        assert len(text) < 200
        text.encode()
    assert [shown(value) for value in ("a", 3, None)] == ["'a'", "3", "None"]

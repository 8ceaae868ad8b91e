"""The corpus store against a naive search, its builder stopped and resumed, and what it refuses."""

import gzip
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hierspec.core.errors import HierspecError
from hierspec.core.proposal import Proposal
from hierspec.stores import corpus_build, corpus_read
from hierspec.stores.corpus import Catalogue, CorpusStore, shard_paths
from hierspec.stores.corpus_build import build_corpus, sorted_positions

NARROW, WIDE = 65535, 70000  # the largest vocabulary of two bytes, and one of four
# Few different tokens make many matches; among them are the ids at the edges of the types.
IDS = {NARROW: [0, 1, 255, 65534], WIDE: [0, 65535, 65536, 69999]}
few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def encode(texts: list[str]) -> list[list[int]]:
    """The tokenizer of these tests: texts are numbers."""
    return [[int(number) for number in text.split()] for text in texts]


def write(path: Path, documents: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"text": " ".join(map(str, d))}) + "\n" for d in documents), encoding="utf-8")
    return path


def build(folder: Path, documents: list[list[int]], vocabulary: int = NARROW, shard_tokens: int = 1 << 20) -> Path:
    target = folder / "some.corpus"
    build_corpus(target, [write(folder / "some.jsonl", documents)], encode, vocabulary, "hash", shard_tokens)
    return target


def match_length(before: list[int], context: list[int], longest: int) -> int:
    length = 0
    while length < min(longest, len(before), len(context)) and before[-1 - length] == context[-1 - length]:
        length += 1
    return length


def naive_matches(documents: list[list[int]], context: list[int], longest: int) -> list[tuple[int, list[int]]]:
    """For every position with a token on either side: the match length before it, and what follows."""
    return [(match_length(d[:end], context, longest), d[end:]) for d in documents for end in range(1, len(d))]


def matches_in(store: CorpusStore, context: list[int]) -> list[tuple[int, list[int]]]:
    continuations, lengths = store.find(np.array(context, np.int32))
    return [(n, row[: row.index(-1)]) for n, row in zip(lengths.tolist(), continuations.tolist(), strict=True)]


@st.composite
def corpora(draw):
    vocabulary = draw(st.sampled_from([NARROW, WIDE]))
    token = st.sampled_from(IDS[vocabulary])
    documents = draw(
        st.lists(st.lists(token, max_size=30), min_size=1, max_size=8).filter(lambda d: max(map(len, d)) > 1)
    )
    phrase = draw(st.lists(token, min_size=18, max_size=24))  # longer than the tokens that positions are sorted by
    documents += [phrase + draw(st.lists(token, max_size=3)) for _ in range(draw(st.integers(0, 3)))]
    contexts = draw(st.lists(st.lists(token, max_size=6), min_size=1, max_size=4))
    contexts += [draw(st.lists(token, max_size=3)) + phrase[: draw(st.integers(1, 18))]]
    # One shard, or up to four: more would compile the search again.
    shard_tokens = draw(st.sampled_from([1 << 20, 1 + sum(len(d) + 1 for d in documents) // 2]))
    return vocabulary, documents, contexts, shard_tokens


@given(corpora(), st.integers(1, 3), st.integers(1, 12))
@few
def test_it_finds_the_longest_matches_over_all_shards(corpus, shortest, enough):
    vocabulary, documents, contexts, shard_tokens = corpus
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), documents, vocabulary, shard_tokens)
        store = CorpusStore(path, "hash", shortest=shortest, enough=enough, max_matches=12, depth=5)
        for context in contexts:
            naive = [match for match in naive_matches(documents, context, store.longest) if match[0] >= shortest]
            matches = matches_in(store, context)
            assert bool(matches) == bool(naive)
            checked = 0
            for length in sorted({n for n, _ in naive}, reverse=True):  # longest first, until there are enough
                if checked >= enough:
                    break
                expected = sorted(after[:5] for n, after in naive if n == length)
                actual = sorted(after for n, after in matches[checked:] if n == length)
                if len(expected) <= 12 - checked:
                    assert actual == expected
                else:
                    assert checked + len(actual) == 12
                    for after in actual:
                        expected.remove(after)  # every match is real, and none comes twice
                checked += len(actual)
            assert checked == len(matches)


@given(corpora(), st.integers(1, 20))
@few
def test_every_draft_is_a_continuation_in_the_corpus(corpus, budget):
    vocabulary, documents, contexts, shard_tokens = corpus
    with tempfile.TemporaryDirectory() as folder:
        store = CorpusStore(build(Path(folder), documents, vocabulary, shard_tokens), "hash")
        for context in contexts:
            draft = store.propose(np.array(context, np.int32), budget)
            matches = naive_matches(documents, context, store.longest)
            best = max(n for n, _ in matches)
            assert bool(draft.tokens) == (best >= store.shortest)
            assert len(draft) <= budget
            for node in range(len(draft)):
                path = draft.path(node)
                assert any(n >= store.shortest and after[: len(path)] == path for n, after in matches)
            if draft.tokens:  # the first node follows a longest match
                assert any(n == best and after[0] == draft.tokens[0] for n, after in matches)
                assert min(draft.evidence) > 0


@given(st.lists(st.integers(0, 4), max_size=60), st.sampled_from([np.uint16, np.uint32]), st.integers(1, 6))
@settings(deadline=None)
def test_compiled_and_numpy_passes_sort_the_same(tokens, dtype, depth):
    tokens = np.array([*tokens, 4, 4, 4], dtype)  # 4 is the separator
    with pytest.MonkeyPatch.context() as patch:
        orders = []
        for radix_pass in (corpus_build._counting_pass, corpus_build._numpy_pass):
            patch.setattr(corpus_build, "_pass", radix_pass)
            orders.append(sorted_positions(tokens, 4, depth).tolist())
    assert orders[0] == orders[1]
    positions = [p for p in range(1, len(tokens)) if tokens[p] < 4 and tokens[p - 1] < 4]
    assert orders[0] == sorted(positions, key=lambda p: ([*reversed(tokens[:p].tolist()), *[4] * depth])[:depth])


def test_sampled_matches_are_evenly_spaced(tmp_path):
    documents = [[1, 2, n] for n in range(10, 110)]
    store = CorpusStore(build(tmp_path, documents, shard_tokens=110), "hash", max_matches=10)
    sampled = [after[0] for _, after in matches_in(store, [1, 2])]
    assert len(set(sampled)) == 10
    assert [sum(first <= n < first + 27 for n in sampled) for first in (10, 37, 64, 91)] == [3, 3, 3, 1]  # by shard


def test_ids_outside_the_vocabulary_match_nothing(tmp_path):
    store = CorpusStore(build(tmp_path, [[1, 2, 3], [2, 3, 4]]), "hash", shortest=1)
    assert store.propose(np.array([NARROW], np.int32), 4) == Proposal()  # the separator itself
    assert store.propose(np.array([-1], np.int32), 4) == Proposal()
    assert store.propose(np.array([], np.int32), 4) == Proposal()
    assert store.propose(np.array([2], np.int32), 0) == Proposal()
    assert store.propose(np.array([NARROW, 1, 2]), 4).tokens[0] == 3


def test_requests_share_it_and_it_learns_nothing(tmp_path):
    store = CorpusStore(build(tmp_path, [[1, 2, 3]]), "hash", "mine")
    view = store.begin(np.array([5, 6, 7], np.int32), "somebody")
    view.learn([5, 6, 7])
    assert view is store
    assert store.propose(np.array([5, 6]), 4) == Proposal()
    assert store.propose(np.array([1, 2]), 4).sources == ("mine",)


def test_info_counts_what_is_in_it(tmp_path):
    info = CorpusStore(build(tmp_path, [[1, 2, 3], [4, 5]], shard_tokens=5), "hash").info()
    expected = {"kind": "corpus", "tokens": 9, "places": 3, "shards": 2, "bytes": 30, "sources": ["some.jsonl"]}
    assert {key: info[key] for key in expected} == expected
    json.dumps(info)


# ---- building


class Stopped(Exception):
    pass


def stopping_after(batches: int, seen: list[str]):
    def stopping(texts):
        if len(seen) == batches:
            raise Stopped
        seen.extend(texts)
        return encode(texts)

    return stopping


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("stop", [0, 1, 4, 7, 10])
def test_a_stopped_build_resumes(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(corpus_read, "_BATCH", 1)  # every piece is a batch
    records = write(tmp_path / "records.jsonl", [[n, n + 1, n + 2] for n in range(6)])
    text = tmp_path / "text.txt"
    monkeypatch.setattr(corpus_read, "_PIECE", 8)
    text.write_text("20 21\n\n22 23\n\n24 25 26 27\n28 29 30", encoding="utf-8")
    whole, target = tmp_path / "whole.corpus", tmp_path / "stopped.corpus"
    build_corpus(whole, [records, text], encode, NARROW, "hash", 13)
    shards = Catalogue.read(whole).shards
    assert len(shards) == 4
    seen: list[str] = []
    with pytest.raises(Stopped):
        build_corpus(target, [records, text], stopping_after(stop, seen), NARROW, "hash", 13)
    finished = Catalogue.read(target).shards
    assert finished == shards[: len(finished)]
    with pytest.raises(HierspecError, match="half built"):
        CorpusStore(target, "hash")
    shard_paths(target, len(finished))[0].write_bytes(b"what a killed process may leave")
    encoded_again: list[str] = []
    build_corpus(target, [records, text], stopping_after(99, encoded_again), NARROW, "hash", 13)
    assert contents(target) == contents(whole)
    assert len(encoded_again) < 12 or not finished  # finished shards are not encoded again
    CorpusStore(target, "hash").check()
    build_corpus(target, [records, text], stopping_after(0, []), NARROW, "hash", 13)  # finished: nothing is encoded


def test_resuming_with_other_arguments_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_read, "_BATCH", 1)
    source = write(tmp_path / "a.jsonl", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    target = tmp_path / "a.corpus"
    with pytest.raises(Stopped):
        build_corpus(target, [source], stopping_after(2, []), NARROW, "hash", 5)
    before = contents(target)
    for arguments in [(NARROW, "another hash", 5), (NARROW - 1, "hash", 5), (NARROW, "hash", 6)]:
        with pytest.raises(HierspecError, match="started with other"):
            build_corpus(target, [source], encode, *arguments)
    write(source, [[1, 2, 3], [4, 5, 6], [7, 8, 8]])
    with pytest.raises(HierspecError, match="started with other files"):
        build_corpus(target, [source], encode, NARROW, "hash", 5)
    assert contents(target) == before
    write(source, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])  # the same content with another modification time
    build_corpus(target, [source], encode, NARROW, "hash", 5)
    assert CorpusStore(target, "hash").propose(np.array([7, 8]), 1).tokens == (9,)


def test_a_file_that_changes_during_the_build_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_read, "_BATCH", 1)
    source = write(tmp_path / "a.jsonl", [[1, 2, 3]])

    def growing(texts):  # the file grows as fast as it is read
        with source.open("a") as file:
            file.write('{"text": "4 5"}\n')
        return encode(texts)

    with pytest.raises(HierspecError, match="changed during the build"):
        build_corpus(tmp_path / "a.corpus", [source], growing, NARROW, "hash")


def test_a_folder_with_other_files_is_refused(tmp_path):
    source = write(tmp_path / "a.jsonl", [[1, 2, 3]])
    with pytest.raises(HierspecError, match="holds other files"):
        build_corpus(tmp_path, [source], encode, NARROW, "hash")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("ids", "message"), [([1, NARROW], "outside the vocabulary"), ([-1, 3], "outside the vocabulary"), ([], "no text")]
)
def test_impossible_token_ids_are_refused(tmp_path, ids, message):
    with pytest.raises(HierspecError, match=message):
        build_corpus(
            tmp_path / "a.corpus",
            [write(tmp_path / "a.jsonl", [[1]])],
            lambda texts: [ids] * len(texts),
            NARROW,
            "hash",
        )


def test_too_many_shards_are_refused(tmp_path):
    with pytest.raises(HierspecError, match="larger shards"):
        build(tmp_path, [[1, 2]] * 70, shard_tokens=4)


# ---- reading


def texts_of(path: Path) -> list[str]:
    inputs = corpus_read.identify([path], lambda *_: None)
    return [piece.text for batch in corpus_read.batches(inputs, 0, 0) for piece in batch]


RECORDS = [
    {"text": "plain", "id": "no text"},
    {"prompt": "ask", "answer": "reply", "category": "no text"},
    {"question": "why", "solution": "because", "score": 3},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]},
    {"conversations": [{"from": "human", "value": "ping"}, {"from": "gpt", "value": "pong"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}]}]},
    {"turns": ["first", "second"], "answer": None},
]
TEXTS = ["plain", "ask", "reply", "why", "because", "hello", "hi", "ping", "pong", "look", "first", "second"]


def test_records_are_read_under_the_usual_keys(tmp_path):
    lines = "\n\n".join(map(json.dumps, RECORDS))
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert texts_of(tmp_path / "a.jsonl") == TEXTS
    assert texts_of(tmp_path / "b.jsonl.gz") == TEXTS
    (tmp_path / "c.jsonl").write_text('{"text": "half \\ud83d a face \u00e9"}', encoding="utf-8")
    assert texts_of(tmp_path / "c.jsonl") == ["half ? a face \u00e9"]


def test_parquet_is_read_like_records(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, record in enumerate(RECORDS):
        parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / f"{number}.parquet")
    assert [text for number in range(len(RECORDS)) for text in texts_of(tmp_path / f"{number}.parquet")] == TEXTS
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(HierspecError, match="cannot be read as Parquet"):
        texts_of(tmp_path / "bad.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"anything")
    with pytest.raises(HierspecError, match="pip install pyarrow"):
        build_corpus(tmp_path / "a.corpus", [tmp_path / "a.parquet"], encode, NARROW, "hash")


@given(st.text(st.sampled_from("a \n"), max_size=300), st.integers(1, 50))
def test_long_texts_are_split_without_loss(text, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_read, "_PIECE", 16)
        pieces = list(corpus_read._split(text[at : at + chunk] for at in range(0, len(text), chunk)))
    joined = "".join(pieces)
    assert text.startswith(joined)
    assert not text[len(joined) :].strip()
    assert all(len(piece) <= 16 for piece in pieces)


def test_text_files_are_split_at_blank_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_read, "_PIECE", 48)
    text = "one two three four\n\nfive six seven eight\nnine\n\nten eleven"
    (tmp_path / "a.txt").write_bytes(text.replace("\n", "\r\n").encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    expected = ["one two three four\n\nfive six seven eight\nnine\n\n", "ten eleven"]
    assert texts_of(tmp_path / "a.txt") == expected
    assert texts_of(tmp_path / "a.txt.gz") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b", "not a supported file type"),
        ("a.parquet.gz", b"", "not a supported file type"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": ', "Line 2 of .* is not JSON"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.txt.gz", b"not gzipped", "cannot be read"),
        ("b.txt.gz", gzip.compress(b"cut short" * 99, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl", b'{"id": "no text here"}', "no text in a.jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HierspecError, match=message):
        build_corpus(tmp_path / "a.corpus", [tmp_path / name], lambda t: [[1, 2]] * len(t), NARROW, "hash")


def test_missing_files_are_named_before_anything_is_written(tmp_path):
    with pytest.raises(HierspecError, match="There is no file"):
        build_corpus(tmp_path / "a.corpus", [tmp_path / "b.txt"], encode, NARROW, "hash")
    with pytest.raises(HierspecError, match="at least one file"):
        build_corpus(tmp_path / "a.corpus", [], encode, NARROW, "hash")
    assert not any(tmp_path.iterdir())


# ---- damage


@pytest.fixture
def corpus(tmp_path):
    generator = np.random.default_rng(7)
    return build(tmp_path, generator.integers(0, 50, (40, 30)).tolist())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def rewrite(path: Path, change) -> None:
    dtype = np.uint16 if path.name.startswith("tokens") else np.uint32
    content = np.frombuffer(path.read_bytes(), dtype).copy()
    change(content)
    path.write_bytes(content.tobytes())


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: truncate(c / "tokens.000"), "damaged"),
        (lambda c: truncate(c / "order.000"), "damaged"),
        (lambda c: (c / "order.000").unlink(), "it is not there"),
        (lambda c: (c / "corpus.json").unlink(), "holds no corpus"),
        (lambda c: truncate(c / "corpus.json") or truncate(c / "corpus.json"), "damaged"),
        (lambda c: (c / "corpus.json").write_text("[]"), "damaged"),
        (lambda c: edit(c / "corpus.json", shards=[{"tokens": 3}]), "damaged"),
        (lambda c: edit(c / "corpus.json", depth=...), "damaged"),
        (lambda c: edit(c / "corpus.json", depth="16"), "depth is '16'"),
        (lambda c: edit(c / "corpus.json", surprise=1), "not what a build writes"),
        (lambda c: edit(c / "corpus.json", vocabulary=70000), "do not fit together"),
        (lambda c: edit(c / "corpus.json", format="hierspec corpus 0"), "another version"),
        (lambda c: edit(c / "corpus.json", finished=False), "half built"),
        (lambda c: rewrite(c / "tokens.000", lambda t: t.fill(3)), "separator"),
        (lambda c: rewrite(c / "order.000", lambda o: o.fill(0)), "outside the text"),
        (lambda c: rewrite(c / "order.000", lambda o: o.fill(1 << 31)), "outside the text"),
        (lambda c: rewrite(c / "order.000", lambda o: np.copyto(o, o[::-1].copy())), "not sorted"),
    ],
)
def test_damage_is_refused_at_opening(corpus, damage, message):
    CorpusStore(corpus, "hash")
    damage(corpus)
    with pytest.raises(HierspecError, match=message):
        CorpusStore(corpus, "hash")


def test_another_vocabulary_is_refused(corpus):
    with pytest.raises(HierspecError, match="another model's vocabulary"):
        CorpusStore(corpus, "another hash")


@pytest.mark.parametrize("name", ["tokens.000", "order.000"])
def test_a_check_finds_a_single_wrong_bit(corpus, name):
    store = CorpusStore(corpus, "hash")
    store.check()
    content = bytearray((corpus / name).read_bytes())
    content[len(content) // 2 + 1] ^= 4
    (corpus / name).write_bytes(content)
    with pytest.raises(HierspecError, match=f"{name} is damaged .its checksum differs"):
        store.check()


def test_unnoticed_damage_makes_bad_drafts_and_no_crash(corpus):
    generator = np.random.default_rng(3)
    rewrite(corpus / "order.000", lambda o: np.copyto(o[70:], generator.integers(0, 1 << 32, o.size - 70, np.uint32)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CorpusStore, "_check_samples", lambda *_: None)
        store = CorpusStore(corpus, "hash", shortest=1)
    for _ in range(300):
        draft = store.propose(generator.integers(0, 50, 20).astype(np.int32), 16)
        assert all(token < NARROW for token in draft.tokens)

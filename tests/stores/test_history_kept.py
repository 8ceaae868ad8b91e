"""Nothing that a history was given is lost: interrupts, failures, kills, limits, long names and long documents."""

from __future__ import annotations

import gc
import json
import os
import runpy
import sqlite3
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hierspec.core.errors import HierspecError
from hierspec.stores.archive import LEAST_LIMIT, Archive, namespace_key
from hierspec.stores.history import SHARED, HistoryStore
from hierspec.stores.ngram_index import NgramIndex

LONG = "x" * 1000
# The last looks like the key under which a long name is stored.
NAMES = ("", "anna", SHARED, LONG, LONG + "y", namespace_key(LONG).decode("latin-1"))
LIMIT = 1 << 20
FAILURES = (KeyboardInterrupt, MemoryError, OSError, HierspecError, sqlite3.OperationalError)


class Interrupted:
    """Fails at the statement of this number that SQLite is given, before or after it runs."""

    def __init__(self, store: HistoryStore, statement: int, after: bool, failure: type[BaseException]) -> None:
        self.file, self.left, self.after, self.failure = store._archive._file, statement, after, failure

    def __enter__(self):
        self.real = self.file.run
        self.file.run = self.run

    def __exit__(self, *_):
        del self.file.run

    def run(self, statement, values=()):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.failure("here")
        result = self.real(statement, values)
        if self.left == 0:
            raise self.failure("here")
        return result


class KeptHistory(RuleBasedStateMachine):
    """Against a model: what is certainly in the file, and what may be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "history"
        self.saved, self.unsaved = defaultdict(set), defaultdict(set)
        self.number = 0
        self.store = self.open()

    def open(self) -> HistoryStore:
        return HistoryStore(self.path, limit=LIMIT, vocabulary_hash="v")

    def document(self, name: int, length: int) -> tuple[int, ...]:
        self.number += 1
        return (name, self.number, *(number * self.number % 1000 for number in range(length)))

    def all_saved(self) -> None:
        for name in NAMES:
            self.saved[name] |= self.unsaved.pop(name, set())

    @rule(name=st.sampled_from(range(len(NAMES))), length=st.integers(0, 600))
    def add(self, name, length):
        document = self.document(name, length)
        self.unsaved[NAMES[name]].add(document)
        self.store.add(document, NAMES[name])

    @rule(name=st.sampled_from(range(len(NAMES))), what=st.sampled_from(["append", "__init__"]))
    def add_without_memory(self, name, what):
        document = self.document(name, 40)
        self.unsaved[NAMES[name]].add(document)

        def failing(*_, **__):
            raise MemoryError

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(NgramIndex, what, failing)
            self.store.add(document, NAMES[name])

    @rule()
    def flush(self):
        self.store.flush()
        self.all_saved()
        assert self.store.info()["unsaved"] == 0

    @rule(statement=st.integers(1, 40), after=st.booleans(), failure=st.sampled_from(FAILURES), close=st.booleans())
    def fail(self, statement, after, failure, close):
        try:
            with Interrupted(self.store, statement, after, failure):
                if close:
                    self.store.close()
                else:
                    self.store.flush()
        except (*FAILURES,):
            return
        self.all_saved()
        if close:
            self.store = self.open()

    @rule()
    def reopen(self):
        self.store.close()
        self.all_saved()
        self.store = self.open()

    @rule()
    def kill(self):
        """Without closing: batches that are due have been written, and the rest is gone."""
        del self.store
        gc.collect()
        self.store = self.open()
        for name in NAMES:
            held = self.held(name)
            assert self.saved[name] <= held
            self.saved[name] = held
        self.unsaved.clear()

    @rule(name=st.sampled_from(range(len(NAMES))))
    def another_process_adds(self, name):
        document = self.document(name, 30)
        with self.open() as other:
            other.add(document, NAMES[name])
        self.saved[NAMES[name]].add(document)

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name):
        self.store.drop(name)
        self.saved.pop(name, None)
        self.unsaved.pop(name, None)

    def held(self, name: str) -> set[tuple[int, ...]]:
        documents = [tuple(document.tolist()) for document in self.store.documents(name)]
        assert len(set(documents)) == len(documents)  # none was written twice
        return set(documents)

    @invariant()
    def everything_is_there_once_and_in_its_namespace(self):
        for name in NAMES:
            held = self.held(name)
            assert self.saved[name] <= held <= self.saved[name] | self.unsaved[name]

    @invariant()
    def it_stays_within_its_limit(self):
        info = self.store.info()
        assert info["file_bytes"] <= LIMIT
        assert info["bytes"] <= LIMIT

    def teardown(self):
        self.store.close()
        self.all_saved()
        self.store = self.open()
        self.everything_is_there_once_and_in_its_namespace()
        self.store.close()
        self.folder.cleanup()


KeptHistory.TestCase.settings = settings(max_examples=8, stateful_step_count=16, deadline=None)
test_whatever_happens_nothing_saved_is_lost = KeptHistory.TestCase


def test_the_soak_runs_and_writes_its_record(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    soak = runpy.run_path(str(Path(__file__).parents[1] / "soak" / "history.py"))
    assert soak["main"](["--seed", "3", "--count", "1", "--output", str(tmp_path / "record.json")]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["seed"], record["histories"], record["failures"]) == (3, 1, [])


def document(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, length).tolist()


def held(store: HistoryStore, name: str = "") -> list[list[int]]:
    return [document.tolist() for document in store.documents(name)]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, sqlite3.OperationalError])
def test_whatever_stops_a_flush_wherever_the_next_one_saves_everything_once(tmp_path, failure, after):
    documents = [document(seed) for seed in range(3)]
    for statement in range(1, 40):
        store = HistoryStore(tmp_path / f"{statement}", limit=LEAST_LIMIT)
        for tokens in documents:
            store.add(tokens)
        try:
            with Interrupted(store, statement, after, failure):
                store.flush()
        except (*FAILURES,):
            store.flush()
            assert held(store) == documents, statement
            store.close()
        else:
            assert held(store) == documents
            return
    pytest.fail("there is a statement more every time")


def test_an_answer_that_ends_while_the_file_fails_is_saved_later(tmp_path):
    """Each of these comes out of SQLite or the system while a request ends."""
    for number, failure in enumerate((MemoryError, OSError, sqlite3.OperationalError)):
        store = HistoryStore(tmp_path / str(number), limit=LEAST_LIMIT)
        for seed in range(store._batch_size):
            with Interrupted(store, 1, False, failure):
                view = store.begin(np.array([1, 2, 3], np.int32))
                view.learn(document(seed))
                view.end()  # the last one's flush fails
        trouble = store.info()["trouble"]
        assert trouble.endswith(".")
        assert failure.__name__ not in trouble
        store.close()
        with HistoryStore(tmp_path / str(number), limit=LEAST_LIMIT) as store:
            assert store.info()["documents"] == store._batch_size


def test_ctrl_c_while_a_request_ends_loses_nothing(tmp_path):
    store = HistoryStore(tmp_path / "history", limit=LEAST_LIMIT)
    store._last_flush -= 100  # a batch is due
    view = store.begin(np.array([1, 2, 3], np.int32))
    view.learn(document(1))
    with pytest.raises(KeyboardInterrupt), Interrupted(store, 3, False, KeyboardInterrupt):
        view.end()
    view.end()  # whoever caught it may end the request again
    store.close()
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        assert held(store) == [[1, 2, 3, *document(1)]]


def test_a_close_that_fails_can_be_repeated(tmp_path):
    store = HistoryStore(tmp_path / "history")
    store.add(document(1))
    with pytest.raises(HierspecError, match="cannot be used"), Interrupted(store, 2, False, sqlite3.OperationalError):
        store.close()
    assert store.info()["unsaved"] == 1
    store.close()
    with HistoryStore(tmp_path / "history") as store:
        assert held(store) == [document(1)]


@pytest.mark.parametrize("on_disk", [False, True])
def test_of_a_very_long_answer_the_newest_part_is_kept(tmp_path, on_disk):
    store = HistoryStore(tmp_path / "history" if on_disk else None, limit=LEAST_LIMIT)
    store.add(document(1))
    answer = document(2, 40_000)
    view = store.begin(np.array([1], np.int32))
    view.learn(answer)
    view.end()
    store.flush()
    assert not store.info()["trouble"]
    assert list(store.begin(np.array([1])).propose(np.array(answer[-20:-8]), 8).tokens) == answer[-8:]
    if on_disk:
        pieces = held(store)
        assert pieces[0] == document(1)  # which it did not push out
        assert pieces[-1] == answer[-len(pieces[-1]) :]
        assert store.info()["file_bytes"] <= LEAST_LIMIT
    store.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_long_name_is_a_name_like_any_other(tmp_path, on_disk):
    store = HistoryStore(tmp_path / "history" if on_disk else None, limit=LEAST_LIMIT)
    for user in range(5):
        store.add(document(user), f"user {user}")
    for user in range(5, 10):
        store.add(document(user), "x" * 600_000 + str(user))
    assert store.info()["namespaces"] == 10
    for user in range(10):
        name = f"user {user}" if user < 5 else "x" * 600_000 + str(user)
        for other in range(10):
            draft = store.begin(np.array([1]), name).propose(np.array(document(other)[:20]), 8)
            assert bool(draft.tokens) == (user == other)
    store.close()


def test_names_count_towards_the_limit(tmp_path):
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        for user in range(900):
            store.add(document(user, 10), f"{user:0256d}")
            assert store._archive.file_bytes() <= LEAST_LIMIT
        assert store.info()["bytes"] <= LEAST_LIMIT
        assert 100 < store.info()["namespaces"] < 900


def test_namespaces_have_keys_of_their_own():
    names = ["", "a", "x" * 256, "x" * 257, "x" * 10_000, "é" * 128, "é" * 129, "\udcff", "\xff" * 300]
    names += [namespace_key(name).decode("latin-1") for name in names]
    keys = {namespace_key(name) for name in names}
    assert len(keys) == len(set(names))
    assert max(map(len, keys)) <= 256
    for wrong in (None, 3, b"anna", ["anna"]):
        with pytest.raises(HierspecError, match="A namespace must be a text"):
            HistoryStore().begin(np.array([1]), wrong)


@pytest.mark.parametrize("wrong", [[-1], [1.5], ["a"], [[1], [2]], [[1], 2], [2**31], [2**70], [None], 7, [1, None]])
def test_only_token_ids_make_a_document(wrong):
    with pytest.raises(HierspecError, match="must be a list of token ids"):
        HistoryStore().add(wrong)


def test_a_file_that_fails_for_long_costs_bounded_memory(tmp_path, monkeypatch):
    def full(*_):
        raise HierspecError("The disk is full.")

    monkeypatch.setattr(Archive, "write", full)
    store = HistoryStore(tmp_path / "history", limit=LEAST_LIMIT)
    for seed in range(400):
        store.add(document(seed, 50), f"user {seed}")
    assert store.info()["bytes"] <= LEAST_LIMIT
    monkeypatch.undo()
    store.close()
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        assert held(store, "user 399") == [document(399, 50)]  # the newest are kept


def test_a_reader_that_stands_still_does_not_let_the_log_grow(tmp_path):
    """As a process would that was stopped while it read. What cannot be written waits."""
    store = HistoryStore(tmp_path / "history", limit=LEAST_LIMIT)
    store.add(document(0))
    store.flush()
    reader = sqlite3.connect(tmp_path / "history", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM documents").fetchone()
    for seed in range(300):
        store.add(document(seed, 500))
        assert store.info()["file_bytes"] <= LEAST_LIMIT
    assert "another process reads it" in store.info()["trouble"]
    assert store.info()["unsaved"] > 0
    reader.close()
    store.close()
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        assert document(299, 500) in held(store)


def test_dropping_says_when_the_bytes_are_still_there(tmp_path, monkeypatch):
    monkeypatch.setattr("hierspec.sqlite_file._BUSY_SECONDS", 0.1)
    store = HistoryStore(tmp_path / "history")
    store.add(document(1), "anna")
    store.flush()
    reader = sqlite3.connect(tmp_path / "history", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM documents").fetchone()
    with pytest.raises(HierspecError, match="still among the bytes"):
        store.drop("anna")
    reader.close()
    store.drop("anna")
    assert all(np.array(document(1)[5:15], "<i4").tobytes() not in file.read_bytes() for file in tmp_path.iterdir())
    store.close()


def test_dropping_much_stays_within_the_limit(tmp_path):
    store = HistoryStore(tmp_path / "history", limit=LEAST_LIMIT)
    for seed in range(400):
        store.add(document(seed, 500), f"user {seed % 3}")
    store.flush()
    sizes = []
    real = store._archive._file.transaction

    def measured(*arguments):
        sizes.append(store._archive.file_bytes())
        return real(*arguments)

    store._archive._file.transaction = measured
    store.drop()
    assert len(sizes) > 3
    assert max(sizes) <= LEAST_LIMIT
    assert store.info()["documents"] == 0
    store.close()


def test_a_file_with_a_larger_limit_is_made_smaller(tmp_path):
    with HistoryStore(tmp_path / "history", limit=8 * LEAST_LIMIT) as store:
        for seed in range(900):
            store.add(document(seed, 500))
    assert (tmp_path / "history").stat().st_size > LEAST_LIMIT
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        assert store.info()["file_bytes"] <= LEAST_LIMIT
        assert held(store)[-1] == document(899, 500)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("x" * 300, "choose another name"), ("a\0b", "choose another name"), ("pipe", "a folder or a device")],
)
def test_what_cannot_be_a_file_is_refused_in_one_sentence(tmp_path, name, sentence):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HierspecError, match=sentence):
        HistoryStore(tmp_path / name)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (sqlite3.SQLITE_FULL, "The disk is full while writing"),
        (sqlite3.SQLITE_READONLY, "cannot be written: change the permissions"),
        (sqlite3.SQLITE_IOERR, "cannot be used: check the disk"),
        (sqlite3.SQLITE_CORRUPT, "is damaged"),
        (sqlite3.SQLITE_BUSY, "locked by another process"),
    ],
)
def test_errors_of_sqlite_are_sentences_without_its_words(tmp_path, code, sentence):
    def failing(text):
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = code
        return error

    store = HistoryStore(tmp_path / "history")
    store.add(document(1))
    with pytest.raises(HierspecError, match=sentence) as caught, Interrupted(store, 2, False, failing):
        store.flush()
    assert "here" not in str(caught.value)
    store.close()

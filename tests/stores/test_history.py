"""The history store against a naive search, its limits, its file, and what is left of it after being killed.

`python experiments/store_soak.py` runs the long soak; `python tests/test_store_history.py` times guesses from a file.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import killed_writer
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from killed_writer import DOCUMENTS, document
from store_soak import held_batches, kill_while_writing, learn_requests

from hierspec.core.errors import HierspecError
from hierspec.core.proposal import Proposal
from hierspec.stores.archive import LEAST_LIMIT, Archive
from hierspec.stores.history import SHARED, HistoryStore
from hierspec.stores.rings import Ring

NAMES = ("", "anna", "bert", SHARED)


def ids(tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def text(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, length).tolist()


def leaves(found: Proposal) -> list[list[int]]:
    return [found.path(node) for node in range(len(found)) if node not in found.parents]


def naive_places(documents: list[list[int]], context: list[int]) -> list[list[int]]:
    """What follows in these documents wherever the last two tokens of the context, or more, stand in them."""
    places = []
    for known in documents:
        places += [known[end:] for end in range(2, len(known)) if known[end - 2 : end] == context[-2:]]
    return places


def write(store: HistoryStore, prompt: list[int], output: list[int], namespace: str = "") -> None:
    """A request that writes this."""
    view = store.begin(ids(prompt), namespace)
    for token in output:
        view.learn([token])
    view.end()


def guess(store: HistoryStore, context: list[int], namespace: str = "", budget: int = 8) -> Proposal:
    return store.begin(ids([0]), namespace).propose(ids(context), budget)


tokens = st.lists(st.integers(0, 3), max_size=40)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(NAMES), tokens), max_size=12), tokens, st.integers(1, 12), st.booleans())
def test_what_it_guesses_has_followed_such_a_match_in_the_same_namespace(documents, context, budget, shared):
    store = HistoryStore(limit=LEAST_LIMIT, shared=shared)
    for name, known in documents:
        store.add(known, name)
    for name in NAMES:
        seen = {name, SHARED} if shared else {name}
        places = naive_places([known for other, known in documents if other in seen], context)
        found = store.begin(ids([0]), name).propose(ids(context), budget)
        assert len(found) <= budget
        assert bool(found.tokens) == bool(places)
        for path in leaves(found):
            assert any(place[: len(path)] == path for place in places)
        assert all(1 <= kind <= 40 for kind in found.evidence)
        assert set(found.sources) <= {"history"}


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_what_is_left_of_a_ring_that_ran_over_is_still_what_was_written(seed, spaces):
    """Rings that grow, shrink, wrap and vanish: guesses come from the namespace, and its newest document is known."""
    rng = np.random.default_rng(seed)
    store, after = HistoryStore(limit=LEAST_LIMIT), defaultdict(list)
    for _ in range(100):
        name = f"n{int(rng.integers(spaces)) ** 2}"
        known = rng.integers(0, 40, int(rng.integers(2, 900))).tolist()
        store.add(known, name)
        for end in range(2, len(known)):
            after[name, *known[end - 2 : end]].append(known[end : end + 8])
        assert store.info()["bytes"] <= store.limit
        cut = int(rng.integers(2, len(known) + 1))
        for asked in (name, "n0"):
            found = guess(store, known[:cut], asked)
            for path in leaves(found):
                assert any(place[: len(path)] == path for place in after[asked, *known[cut - 2 : cut]])
            if asked == name and cut < len(known):
                assert known[cut] in found.tokens


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(2, 90), st.sampled_from([-64, -128, -256])), max_size=30), st.integers(0, 99))
def test_a_ring_keeps_the_newest_text_whatever_its_size_becomes(steps, seed):
    """A positive step is a document of so many tokens, a negative one another size of the ring."""
    ring, known, kept = Ring("", 128), [], 0
    for number, step in enumerate(steps):
        if step > 0:
            document = text(1000 * seed + number, step)
            ring.fill([ids(document).tobytes()])
            known += [*document, -1]
            kept = min(kept + step + 1, ring.index.capacity)
        else:
            ring.resize(-step)
            kept = min(kept, -step)
        newest = known[len(known) - kept :]
        assert ring.held() == (newest.count(-1), kept - newest.count(-1))
        for end in range(2, kept):
            if -1 not in newest[end - 2 : end + 1]:
                found = ring.index.find(ids(newest[end - 2 : end]))
                assert newest[end] in ring.index.tokens[found.ends]


def test_a_request_is_learnt_when_it_ends_with_the_end_of_its_prompt():
    store, prompt, output = HistoryStore(), text(1), text(2)
    view = store.begin(ids(prompt))
    view.learn(output[:30])
    assert not view.propose(ids(output[:10]), 8).tokens
    view.end()
    found = guess(store, prompt)
    assert list(found.tokens) == output[:8]
    assert not guess(store, prompt[:-8]).tokens  # of the prompt only the last 8
    view.end()
    view.learn(output[30:])
    assert store.info()["documents"] == 1
    assert store.info()["tokens"] == 38


def test_short_outputs_are_not_learnt():
    store = HistoryStore()
    write(store, text(1), text(2)[:7])
    assert store.info()["documents"] == 0
    write(store, text(1), text(2)[:8])
    assert store.info()["documents"] == 1


def test_the_same_document_is_kept_once_but_not_once_it_is_old():
    store = HistoryStore(limit=LEAST_LIMIT)
    for _ in range(5):
        store.add(text(1))
    assert store.info()["documents"] == 1
    store.add(text(1), "another")
    assert store.info()["documents"] == 2
    for seed in range(2000):  # more than the ring holds; the first one comes again now and then and stays
        store.add(text(1000 + seed))
        if seed % 20 == 0:
            store.add(text(1))
    assert guess(store, text(1)[:10]).tokens
    assert not guess(store, text(1000)[:10]).tokens


def test_documents_longer_than_the_limit_allows_come_in_pieces_that_overlap():
    store = HistoryStore(limit=LEAST_LIMIT)
    known = text(3, 2500)
    store.add(known)
    for cut in range(100, 2400, 50):
        assert guess(store, known[:cut]).tokens[0] == known[cut]


def test_requests_read_the_shared_namespace_and_never_write_it():
    store = HistoryStore(shared=True)
    store.add(text(1), SHARED)
    write(store, text(2), text(3), SHARED)
    assert list(guess(store, text(1)[:10], "anna").tokens) == text(1)[10:18]
    assert list(guess(store, text(1)[:10], SHARED).tokens) == text(1)[10:18]
    assert not guess(store, text(3)[:10], "anna").tokens
    alone = HistoryStore()
    alone.add(text(1), SHARED)
    assert not guess(alone, text(1)[:10], "anna").tokens


def test_the_longer_match_comes_first_whosever_it_is():
    common, own, other = text(1, 20), text(2, 20), text(3, 20)
    store = HistoryStore(shared=True)
    store.add(common[-2:] + own, "anna")
    store.add(common + other, SHARED)
    assert guess(store, common, "anna", 30).tokens[0] == other[0]
    assert own[0] in guess(store, common, "anna", 30).tokens
    assert guess(store, common[-2:], "anna", 30).tokens[0] == own[0]


def test_a_namespace_that_is_dropped_is_forgotten_with_the_requests_that_run(tmp_path):
    with HistoryStore(tmp_path / "history", vocabulary_hash="v") as store:
        secret = text(1)
        store.add(secret, "anna")
        store.flush()
        store.add(secret[::-1], "anna")
        store.add(text(2), "bert")
        view, other = store.begin(ids([1]), "anna"), store.begin(ids([1]), "bert")
        view.learn(text(3))
        other.learn(text(4))
        store.drop("anna")
        view.learn(text(3))
        view.end()
        other.end()
        assert store.info()["namespaces"] == 1
        assert not any(guess(store, known[:9], "anna").tokens for known in (secret, secret[::-1], text(3)))
        assert all(guess(store, known[:9], "bert").tokens for known in (text(2), text(4)))
        for file in tmp_path.iterdir():  # not even in pages that are no longer used
            assert ids(secret).tobytes()[8:40] not in file.read_bytes()
        store.drop()
        assert store.info()["documents"] == 0
    with HistoryStore(tmp_path / "history", vocabulary_hash="v") as store:
        assert store.info()["documents"] == 0


def test_the_file_brings_everything_back(tmp_path):
    path = tmp_path / "deep" / "history"
    names = ["", "anna", "läufer/../x", "\udc80", "x" * 500]
    with HistoryStore(path, vocabulary_hash="v") as store:
        for seed in range(100):
            write(store, text(1000 + seed), text(seed), names[seed % 5])
        before = store.info()
        guesses = [guess(store, text(seed)[:20], names[seed % 5]) for seed in range(100)]
    assert before["documents"] == 100
    assert before["namespaces"] == 5
    with HistoryStore(path, vocabulary_hash="v") as store:
        assert store.info()["documents"] == 100
        assert store.info()["tokens"] == before["tokens"] == 4800
        assert store.info()["bytes"] == 0  # nothing is read before it is needed
        for seed in range(100):
            found = guess(store, text(seed)[:20], names[seed % 5])
            assert found == guesses[seed]
            assert list(found.tokens) == text(seed)[20:28]
            assert not guess(store, text(seed)[:20], names[(seed + 1) % 5]).tokens
        store.add(np.concatenate((text(1000)[-8:], text(0))))  # known already
        assert store.info()["documents"] == 100
        assert store.info()["bytes"] > 0


def full_disk(*_: object) -> None:
    raise HierspecError("The disk is full.")


def test_a_namespace_that_left_memory_comes_back_with_what_is_not_written_yet(tmp_path, monkeypatch):
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        store.add(text(1), "anna")
        store.flush()
        with monkeypatch.context() as patched:
            patched.setattr(Archive, "write", full_disk)
            store.add(text(2), "anna")
            for other in range(80):
                store.add(text(100 + other), f"other {other}")
            assert store.info()["unsaved"] == 81
            assert store.propose(ids(text(1)[:9]), 8, "anna") == Proposal()
            for seed in (1, 2):
                assert list(guess(store, text(seed)[:9], "anna").tokens) == text(seed)[9:17]


@pytest.mark.parametrize("kept", [False, True])
def test_who_writes_a_lot_does_not_push_out_the_others(tmp_path, kept):
    path = tmp_path / "history" if kept else None
    store = HistoryStore(path, limit=1 << 20)
    for quiet in range(5):
        store.add(text(quiet), f"quiet {quiet}")
    for seed in range(1500):
        store.add(text(1000 + seed, 500), f"loud {seed % 2}")
    sizes = [len(guess(store, text(1000 + seed, 500)[:20], f"loud {seed % 2}")) for seed in range(1500)]
    if kept:
        store.close()
        store = HistoryStore(path, limit=1 << 20)
        assert store.info()["documents"] < 1505  # they do not all fit into the file either
    for quiet in range(5):
        assert guess(store, text(quiet)[:20], f"quiet {quiet}").tokens
    assert sizes[-20:] == [8] * 20  # the newest are there,
    assert sizes[:20] == [0] * 20  # the oldest are gone,
    assert sum(map(bool, sizes)) * 500 * 30 > store.limit // 3  # and the limit is made use of
    store.close()


def test_namespaces_that_come_once_do_not_push_out_one_that_stays(tmp_path):
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        for seed in range(600):
            store.add(text(seed, 300), f"once {seed}")
            if seed % 10 == 0:
                store.add(text(1000 + seed), "always")
        assert store.info()["bytes"] <= store.limit
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        assert 100 < store.info()["namespaces"] < 400
        assert all(guess(store, text(1000 + seed)[:20], "always").tokens for seed in range(0, 600, 10))
        assert guess(store, text(599, 300)[:20], "once 599").tokens
        assert not guess(store, text(0, 300)[:20], "once 0").tokens


def test_a_ring_that_cannot_grow_leaves_the_others_alone():
    store = HistoryStore(limit=LEAST_LIMIT)
    for quiet in range(20):
        store.add(text(quiet), f"quiet {quiet}")
    for seed in range(300):
        store.add(text(1000 + seed, 500), "loud")
    before = [quiet for quiet in range(20) if guess(store, text(quiet)[:20], f"quiet {quiet}").tokens]
    for seed in range(300):
        store.add(text(2000 + seed, 500), "loud")
    after = [quiet for quiet in range(20) if guess(store, text(quiet)[:20], f"quiet {quiet}").tokens]
    assert after == before
    assert len(after) > 5


def test_room_comes_from_the_ring_that_has_more():
    store = HistoryStore(limit=LEAST_LIMIT)
    for quiet in range(5):
        store.add(text(quiet), f"quiet {quiet}")
    for seed in range(300):
        store.add(text(1000 + seed, 500), "loud")
    for seed in range(100):
        store.add(text(3000 + seed, 100), "second")
    assert sum(bool(guess(store, text(3000 + seed, 100)[:20], "second").tokens) for seed in range(100)) > 20
    assert all(guess(store, text(quiet)[:20], f"quiet {quiet}").tokens for quiet in range(5))
    assert guess(store, text(1299, 500)[:20], "loud").tokens


@pytest.mark.parametrize(("kept", "others"), [(False, 100), (True, 100), (True, 20)])
def test_the_shared_namespace_does_not_give_way(tmp_path, kept, others):
    path = tmp_path / "history" if kept else None
    store = HistoryStore(path, limit=LEAST_LIMIT, shared=True)
    for seed in range(10):
        store.add(text(seed, 500), SHARED)
    for seed in range(400):
        store.add(text(1000 + seed, 500), f"n{seed % others}")
    if kept:
        store.close()
        store = HistoryStore(path, limit=LEAST_LIMIT, shared=True)
        assert store.info()["documents"] < 400
    for seed in range(10):
        assert guess(store, text(seed, 500)[:20], "n1").tokens
    for seed in range(400):  # written to without end it is kept within bounds as well
        store.add(text(2000 + seed, 500), SHARED)
    assert store.info()["bytes"] <= LEAST_LIMIT
    assert store.info()["file_bytes"] <= LEAST_LIMIT
    assert guess(store, text(2399, 500)[:20], "n1").tokens
    store.close()


def test_a_foreign_vocabulary_is_refused(tmp_path):
    HistoryStore(tmp_path / "history", vocabulary_hash="one").close()
    with pytest.raises(HierspecError, match=r"another vocabulary .*delete it or choose another"):
        HistoryStore(tmp_path / "history", vocabulary_hash="two")
    HistoryStore(tmp_path / "history", vocabulary_hash="one").close()


def test_a_foreign_or_newer_file_is_refused_and_left_alone(tmp_path):
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE mine (a)")
    other.close()
    with pytest.raises(HierspecError, match="another program"):
        HistoryStore(tmp_path / "other")
    HistoryStore(tmp_path / "newer").close()
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 9")
    newer.close()
    with pytest.raises(HierspecError, match="format 9"):
        HistoryStore(tmp_path / "newer")
    (tmp_path / "words").write_text("Just a text that somebody wrote. " * 100)
    with pytest.raises(HierspecError, match=r"damaged .*delete it"):
        HistoryStore(tmp_path / "words")
    assert (tmp_path / "words").read_text().startswith("Just a text")
    with pytest.raises(HierspecError, match="choose another place"):
        HistoryStore(tmp_path)
    with pytest.raises(HierspecError, match="allow at least"):
        HistoryStore(limit=1000)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_damage_is_refused_or_does_no_harm(data):
    """Whatever bytes are overwritten, and wherever the file is cut: an error that says so, or the documents."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history"
        with HistoryStore(path, vocabulary_hash="v") as store:
            for seed in range(30):
                store.add(text(seed, 100), str(seed % 2))
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            wrong = data.draw(st.binary(min_size=1, max_size=64))
            content[place : place + len(wrong)] = wrong
        else:
            del content[max(place, 1) :]  # an empty file is a new one
        path.write_bytes(content)
        try:
            store = HistoryStore(path, vocabulary_hash="v")
        except HierspecError as error:
            event(re.sub(r"/\S*history", "history", str(error)))
            return
        with store:
            for seed in range(30):
                found = guess(store, text(seed, 100)[:20], str(seed % 2))
                assert list(found.tokens) == text(seed, 100)[20:28]


def test_a_changed_token_is_noticed(tmp_path):
    path = tmp_path / "history"
    with HistoryStore(path) as store:
        store.add(text(1, 100))
    content = path.read_bytes()
    at = content.index(ids(text(1, 100)[40:44]).tobytes())
    path.write_bytes(content[:at] + b"\x01\x02" + content[at + 2 :])
    with pytest.raises(HierspecError, match=r"damaged .*not what was written.*delete it"):
        HistoryStore(path)


def test_a_file_that_cannot_be_written_does_not_make_requests_fail(tmp_path, monkeypatch):
    store = HistoryStore(tmp_path / "history")
    with monkeypatch.context() as patched:
        patched.setattr(Archive, "write", full_disk)
        for seed in range(200):
            write(store, [1], text(seed))
        assert guess(store, text(199)[:20]).tokens
        assert store.info()["trouble"] == "The disk is full."
        with pytest.raises(HierspecError, match="full"):
            store.flush()
    store.close()
    assert not store.info()["trouble"]
    write(store, [1], text(1000))  # after closing: in memory only
    assert guess(store, text(1000)[:20]).tokens
    with HistoryStore(tmp_path / "history") as store:
        assert store.info()["documents"] == 200


def test_requests_may_end_in_other_threads(tmp_path):
    with HistoryStore(tmp_path / "history", limit=2 << 20) as store:
        failures: list[BaseException] = []

        def serve(worker: int) -> None:
            try:
                for seed in range(100):
                    write(store, [1, 2], text(1000 * worker + seed), f"w{worker}")
                    found = guess(store, text(1000 * worker + seed)[:9], f"w{worker}")
                    assert found.tokens[:1] == (text(1000 * worker + seed)[9],)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.info()["documents"] == 400


def test_a_process_that_is_killed_leaves_every_batch_it_committed():
    found = kill_while_writing(40)
    assert found.pop("kills") == 40
    assert found.pop("committed") > 40
    assert found.pop("half_done") <= 40
    assert found == {"lost": 0, "corrupted": 0, "over_limit": 0}


def test_a_batch_that_is_lost_or_torn_would_be_seen(monkeypatch):
    def forgetful(path, limit, size, first, while_opening, rng):
        """Writes two batches of which the second lacks a document, and says that it wrote three."""
        archive = Archive(path, limit, "v")
        archive.write([("anna", document(first, number, size)) for number in range(DOCUMENTS)])
        archive.write([("anna", document(first + 1, number, size)) for number in range(torn, DOCUMENTS)])
        archive.close()
        return [first, first + 1, first + 2]

    monkeypatch.setattr("store_soak._killed", forgetful)
    torn = 0
    assert kill_while_writing(2)["lost"] == 2
    torn = 1
    assert kill_while_writing(2)["corrupted"] == 2


def test_several_processes_write_to_one_file(tmp_path):
    path = tmp_path / "history"
    arguments = [sys.executable, killed_writer.__file__, str(path), str(64 << 20)]
    children = [subprocess.Popen([*arguments, name, "0", "100", "50"], stdout=subprocess.DEVNULL) for name in "abc"]
    assert [child.wait() for child in children] == [0, 0, 0]
    archive = Archive(path, 64 << 20, "v")
    for name in "abc":
        assert held_batches(archive, name, 50) == list(range(100))
    archive.close()


@pytest.mark.parametrize(("kept", "requests"), [(False, 4000), (True, 1000)])
def test_it_stays_within_its_limit(tmp_path, kept, requests):
    found = learn_requests(requests, 1 << 20, tmp_path / "history" if kept else None)
    assert found["within_limit"]
    assert found["most_bytes"] > 1 << 19
    assert (found["most_file_bytes"] > 0) == kept


def test_it_counts_its_bytes_over_many_requests(tmp_path):
    found = learn_requests(15_000, 4 << 20, tmp_path / "history", trace=False)
    assert found["within_limit"]
    assert found["most_bytes"] > 2 << 20


def speed(size: int = 10_000_000) -> dict[str, float]:
    """Seconds to learn and to read back `size` tokens, and microseconds a guess among them."""
    rng = np.random.default_rng(1)
    phrases = [(rng.zipf(1.2, int(rng.integers(5, 40))) % 49_152).astype(np.int32) for _ in range(100_000)]

    def written(length: int) -> np.ndarray:
        picked = [phrases[place] for place in rng.integers(0, len(phrases), length // 5)]
        return np.concatenate(picked)[:length]

    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder) / "history", {}
        with HistoryStore(path, limit=512 << 20) as store:
            documents = [written(200) for _ in range(size // 200)]
            began = time.perf_counter()
            for known in documents:
                store.add(known)
            times["learn"] = time.perf_counter() - began
        began = time.perf_counter()
        with HistoryStore(path, limit=512 << 20) as store:
            times["open"] = time.perf_counter() - began
            view = store.begin(documents[0])
            times["read"] = time.perf_counter() - began - times["open"]
            guesses = []
            for _ in range(5000):
                context = written(200)
                began = time.perf_counter()
                view.propose(context, 16)
                guesses.append(1e6 * (time.perf_counter() - began))
    return times | {"guess_median": float(np.median(guesses)), "guess_95": float(np.percentile(guesses, 95))}


if __name__ == "__main__":
    print(speed())

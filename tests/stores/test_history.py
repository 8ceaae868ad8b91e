"""The history store against a naive search, its limits, its file, and what kill -9 leaves of it.

`python experiments/store_soak.py` runs the long soak; `python tests/stores/test_history.py` times drafts from a file.
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


def leaves(proposal: Proposal) -> list[list[int]]:
    return [proposal.path(node) for node in range(len(proposal)) if node not in proposal.parents]


def naive_continuations(documents: list[list[int]], context: list[int]) -> list[list[int]]:
    """What follows every match of the context's last two tokens in these documents."""
    continuations = []
    for tokens in documents:
        continuations += [tokens[end:] for end in range(2, len(tokens)) if tokens[end - 2 : end] == context[-2:]]
    return continuations


def write(store: HistoryStore, prompt: list[int], output: list[int], namespace: str = "") -> None:
    """Runs a request that writes this."""
    view = store.begin(ids(prompt), namespace)
    for token in output:
        view.learn([token])
    view.end()


def draft(store: HistoryStore, context: list[int], namespace: str = "", budget: int = 8) -> Proposal:
    return store.begin(ids([0]), namespace).propose(ids(context), budget)


tokens = st.lists(st.integers(0, 3), max_size=40)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(NAMES), tokens), max_size=12), tokens, st.integers(1, 12), st.booleans())
def test_every_draft_is_a_continuation_in_the_same_namespace(documents, context, budget, shared):
    store = HistoryStore(limit=LEAST_LIMIT, shared=shared)
    for name, added in documents:
        store.add(added, name)
    for name in NAMES:
        visible = {name, SHARED} if shared else {name}
        continuations = naive_continuations([tokens for other, tokens in documents if other in visible], context)
        proposal = store.begin(ids([0]), name).propose(ids(context), budget)
        assert len(proposal) <= budget
        assert bool(proposal.tokens) == bool(continuations)
        for path in leaves(proposal):
            assert any(continuation[: len(path)] == path for continuation in continuations)
        assert all(1 <= evidence <= 40 for evidence in proposal.evidence)
        assert set(proposal.sources) <= {"history"}


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_ring_that_wrapped_around_still_drafts_what_was_written(seed, spaces):
    """Rings that grow, shrink, wrap and are evicted: drafts come from the namespace, also from its newest document."""
    rng = np.random.default_rng(seed)
    store, continuations = HistoryStore(limit=LEAST_LIMIT), defaultdict(list)
    for _ in range(100):
        name = f"n{int(rng.integers(spaces)) ** 2}"
        document = rng.integers(0, 40, int(rng.integers(2, 900))).tolist()
        store.add(document, name)
        for end in range(2, len(document)):
            continuations[name, *document[end - 2 : end]].append(document[end : end + 8])
        assert store.info()["bytes"] <= store.limit
        end = int(rng.integers(2, len(document) + 1))
        for namespace in (name, "n0"):
            proposal = draft(store, document[:end], namespace)
            expected = continuations[namespace, *document[end - 2 : end]]
            for path in leaves(proposal):
                assert any(continuation[: len(path)] == path for continuation in expected)
            if namespace == name and end < len(document):
                assert document[end] in proposal.tokens


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(2, 90), st.sampled_from([-64, -128, -256])), max_size=30), st.integers(0, 99))
def test_a_ring_holds_the_newest_text_through_every_resize(steps, seed):
    """A positive step adds a document of so many tokens, a negative one resizes the ring."""
    ring, tokens, size = Ring(b"", 128), [], 0
    for number, step in enumerate(steps):
        if step > 0:
            document = text(1000 * seed + number, step)
            ring.fill([ids(document).tobytes()])
            tokens += [*document, -1]
            size = min(size + step + 1, ring.index.capacity)
        else:
            ring.resize(-step)
            size = min(size, -step)
        newest = tokens[len(tokens) - size :]
        assert ring.counts() == (newest.count(-1), size - newest.count(-1))
        for end in range(2, size):
            if -1 not in newest[end - 2 : end + 1]:
                matches = ring.index.find(ids(newest[end - 2 : end]))
                assert newest[end] in ring.index.tokens[matches.ends]


def test_a_request_is_learnt_when_it_ends_with_the_last_tokens_of_its_prompt():
    store, prompt, output = HistoryStore(), text(1), text(2)
    view = store.begin(ids(prompt))
    view.learn(output[:30])
    assert not view.propose(ids(output[:10]), 8).tokens
    view.end()
    assert list(draft(store, prompt).tokens) == output[:8]
    assert not draft(store, prompt[:-8]).tokens  # of the prompt only the last 8
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


def test_a_document_that_comes_again_is_stored_once_and_stays():
    store = HistoryStore(limit=LEAST_LIMIT)
    for _ in range(5):
        store.add(text(1))
    assert store.info()["documents"] == 1
    store.add(text(1), "another")
    assert store.info()["documents"] == 2
    for seed in range(2000):  # more than the ring holds; the first document comes again now and then
        store.add(text(1000 + seed))
        if seed % 20 == 0:
            store.add(text(1))
    assert draft(store, text(1)[:10]).tokens
    assert not draft(store, text(1000)[:10]).tokens


def test_long_documents_are_split_into_overlapping_pieces():
    store = HistoryStore(limit=LEAST_LIMIT)
    document = text(3, 2500)
    store.add(document)
    for end in range(100, 2400, 50):
        assert draft(store, document[:end]).tokens[0] == document[end]


def test_requests_read_the_shared_namespace_and_never_write_it():
    store = HistoryStore(shared=True)
    store.add(text(1), SHARED)
    write(store, text(2), text(3), SHARED)
    assert list(draft(store, text(1)[:10], "anna").tokens) == text(1)[10:18]
    assert list(draft(store, text(1)[:10], SHARED).tokens) == text(1)[10:18]
    assert not draft(store, text(3)[:10], "anna").tokens
    alone = HistoryStore()
    alone.add(text(1), SHARED)
    assert not draft(alone, text(1)[:10], "anna").tokens


def test_the_longer_match_comes_first_in_either_namespace():
    context, private, shared = text(1, 20), text(2, 20), text(3, 20)
    store = HistoryStore(shared=True)
    store.add(context[-2:] + private, "anna")
    store.add(context + shared, SHARED)
    assert draft(store, context, "anna", 30).tokens[0] == shared[0]
    assert private[0] in draft(store, context, "anna", 30).tokens
    assert draft(store, context[-2:], "anna", 30).tokens[0] == private[0]


def test_dropping_a_namespace_deletes_it_and_what_runs_in_it(tmp_path):
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
        assert not any(draft(store, tokens[:9], "anna").tokens for tokens in (secret, secret[::-1], text(3)))
        assert all(draft(store, tokens[:9], "bert").tokens for tokens in (text(2), text(4)))
        for file in tmp_path.iterdir():  # not even in free pages
            assert ids(secret).tobytes()[8:40] not in file.read_bytes()
        store.drop()
        assert store.info()["documents"] == 0
    with HistoryStore(tmp_path / "history", vocabulary_hash="v") as store:
        assert store.info()["documents"] == 0


def test_a_reopened_file_gives_the_same_drafts(tmp_path):
    path = tmp_path / "deep" / "history"
    names = ["", "anna", "läufer/../x", "\udc80", "x" * 500]
    with HistoryStore(path, vocabulary_hash="v") as store:
        for seed in range(100):
            write(store, text(1000 + seed), text(seed), names[seed % 5])
        before = store.info()
        drafts = [draft(store, text(seed)[:20], names[seed % 5]) for seed in range(100)]
    assert before["documents"] == 100
    assert before["namespaces"] == 5
    with HistoryStore(path, vocabulary_hash="v") as store:
        assert store.info()["documents"] == 100
        assert store.info()["tokens"] == before["tokens"] == 4800
        assert store.info()["bytes"] == 0  # nothing is read before it is needed
        for seed in range(100):
            proposal = draft(store, text(seed)[:20], names[seed % 5])
            assert proposal == drafts[seed]
            assert list(proposal.tokens) == text(seed)[20:28]
            assert not draft(store, text(seed)[:20], names[(seed + 1) % 5]).tokens
        store.add(np.concatenate((text(1000)[-8:], text(0))))  # stored already
        assert store.info()["documents"] == 100
        assert store.info()["bytes"] > 0


def full_disk(*_: object) -> None:
    raise HierspecError("The disk is full.")


def test_an_evicted_namespace_comes_back_with_its_unsaved_documents(tmp_path, monkeypatch):
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        store.add(text(1), "anna")
        store.flush()
        with monkeypatch.context() as patched:
            patched.setattr(Archive, "write", full_disk)
            store.add(text(2), "anna")
            for other in range(70):
                store.add(text(100 + other), f"other {other}")
            assert store.info()["unsaved"] == 71
            assert store.propose(ids(text(1)[:9]), 8, "anna") == Proposal()
            for seed in (1, 2):
                assert list(draft(store, text(seed)[:9], "anna").tokens) == text(seed)[9:17]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_busy_namespace_does_not_evict_the_others(tmp_path, on_disk):
    path = tmp_path / "history" if on_disk else None
    store = HistoryStore(path, limit=1 << 20)
    for quiet in range(5):
        store.add(text(quiet), f"quiet {quiet}")
    for seed in range(1500):
        store.add(text(1000 + seed, 500), f"loud {seed % 2}")
    sizes = [len(draft(store, text(1000 + seed, 500)[:20], f"loud {seed % 2}")) for seed in range(1500)]
    if on_disk:
        store.close()
        store = HistoryStore(path, limit=1 << 20)
        assert store.info()["documents"] < 1505  # they do not all fit into the file either
    for quiet in range(5):
        assert draft(store, text(quiet)[:20], f"quiet {quiet}").tokens
    assert sizes[-20:] == [8] * 20  # the newest are there,
    assert sizes[:20] == [0] * 20  # the oldest are gone,
    assert sum(map(bool, sizes)) * 500 * 30 > store.limit // 3  # and the limit is used
    store.close()


def test_namespaces_used_once_do_not_evict_one_in_use(tmp_path):
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        for seed in range(600):
            store.add(text(seed, 300), f"once {seed}")
            if seed % 10 == 0:
                store.add(text(1000 + seed), "always")
        assert store.info()["bytes"] <= store.limit
    with HistoryStore(tmp_path / "history", limit=LEAST_LIMIT) as store:
        assert 100 < store.info()["namespaces"] < 400
        assert all(draft(store, text(1000 + seed)[:20], "always").tokens for seed in range(0, 600, 10))
        assert draft(store, text(599, 300)[:20], "once 599").tokens
        assert not draft(store, text(0, 300)[:20], "once 0").tokens


def test_a_ring_that_cannot_grow_does_not_evict_the_others():
    store = HistoryStore(limit=LEAST_LIMIT)
    for quiet in range(20):
        store.add(text(quiet), f"quiet {quiet}")
    for seed in range(300):
        store.add(text(1000 + seed, 500), "loud")
    before = [quiet for quiet in range(20) if draft(store, text(quiet)[:20], f"quiet {quiet}").tokens]
    for seed in range(300):
        store.add(text(2000 + seed, 500), "loud")
    after = [quiet for quiet in range(20) if draft(store, text(quiet)[:20], f"quiet {quiet}").tokens]
    assert after == before
    assert len(after) > 5


def test_a_growing_ring_takes_space_from_a_larger_one():
    store = HistoryStore(limit=LEAST_LIMIT)
    for quiet in range(5):
        store.add(text(quiet), f"quiet {quiet}")
    for seed in range(300):
        store.add(text(1000 + seed, 500), "loud")
    for seed in range(100):
        store.add(text(3000 + seed, 100), "second")
    assert sum(bool(draft(store, text(3000 + seed, 100)[:20], "second").tokens) for seed in range(100)) > 20
    assert all(draft(store, text(quiet)[:20], f"quiet {quiet}").tokens for quiet in range(5))
    assert draft(store, text(1299, 500)[:20], "loud").tokens


@pytest.mark.parametrize(("on_disk", "others"), [(False, 100), (True, 100), (True, 20)])
def test_the_shared_namespace_is_not_evicted(tmp_path, on_disk, others):
    path = tmp_path / "history" if on_disk else None
    store = HistoryStore(path, limit=LEAST_LIMIT, shared=True)
    for seed in range(10):
        store.add(text(seed, 500), SHARED)
    for seed in range(400):
        store.add(text(1000 + seed, 500), f"n{seed % others}")
    if on_disk:
        store.close()
        store = HistoryStore(path, limit=LEAST_LIMIT, shared=True)
        assert store.info()["documents"] < 400
    for seed in range(10):
        assert draft(store, text(seed, 500)[:20], "n1").tokens
    for seed in range(400):  # it stays within the limit too, however much is written to it
        store.add(text(2000 + seed, 500), SHARED)
    assert store.info()["bytes"] <= LEAST_LIMIT
    assert store.info()["file_bytes"] <= LEAST_LIMIT
    assert draft(store, text(2399, 500)[:20], "n1").tokens
    store.close()


def test_another_vocabulary_is_refused(tmp_path):
    HistoryStore(tmp_path / "history", vocabulary_hash="one").close()
    with pytest.raises(HierspecError, match=r"another vocabulary .*delete it or choose another"):
        HistoryStore(tmp_path / "history", vocabulary_hash="two")
    HistoryStore(tmp_path / "history", vocabulary_hash="one").close()


def test_a_foreign_or_newer_file_is_refused_and_not_changed(tmp_path):
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
    with pytest.raises(HierspecError, match="choose another file"):
        HistoryStore(tmp_path)
    with pytest.raises(HierspecError, match="allow at least"):
        HistoryStore(limit=1000)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_damage_is_refused_or_harmless(data):
    """Whatever bytes are overwritten, and wherever the file is truncated: an error that says so, or the documents."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history"
        with HistoryStore(path, vocabulary_hash="v") as store:
            for seed in range(30):
                store.add(text(seed, 100), str(seed % 2))
        content = bytearray(path.read_bytes())
        offset = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            wrong = data.draw(st.binary(min_size=1, max_size=64))
            content[offset : offset + len(wrong)] = wrong
        else:
            del content[max(offset, 1) :]  # an empty file is a new one
        path.write_bytes(content)
        try:
            store = HistoryStore(path, vocabulary_hash="v")
        except HierspecError as error:
            event(re.sub(r"/\S*history", "history", str(error)))
            return
        with store:
            for seed in range(30):
                proposal = draft(store, text(seed, 100)[:20], str(seed % 2))
                assert list(proposal.tokens) == text(seed, 100)[20:28]


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
        assert draft(store, text(199)[:20]).tokens
        assert store.info()["trouble"] == "The disk is full."
        with pytest.raises(HierspecError, match="full"):
            store.flush()
    store.close()
    assert not store.info()["trouble"]
    write(store, [1], text(1000))  # after closing: in memory only
    assert draft(store, text(1000)[:20]).tokens
    with HistoryStore(tmp_path / "history") as store:
        assert store.info()["documents"] == 200


def test_requests_may_end_in_other_threads(tmp_path):
    with HistoryStore(tmp_path / "history", limit=2 << 20) as store:
        failures: list[BaseException] = []

        def serve(worker: int) -> None:
            try:
                for seed in range(100):
                    write(store, [1, 2], text(1000 * worker + seed), f"w{worker}")
                    proposal = draft(store, text(1000 * worker + seed)[:9], f"w{worker}")
                    assert proposal.tokens[:1] == (text(1000 * worker + seed)[9],)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.info()["documents"] == 400


def test_a_killed_process_leaves_every_batch_it_committed():
    counts = kill_while_writing(40)
    assert counts.pop("kills") == 40
    assert counts.pop("committed") > 40
    assert counts.pop("half_done") <= 40
    assert counts == {"lost": 0, "corrupted": 0, "over_limit": 0}


def test_a_lost_or_torn_batch_would_be_noticed(monkeypatch):
    def forgetful(path, limit, size, first, **_):
        """Writes two batches, the second without a document, and claims to have written three."""
        archive = Archive(path, limit, "v")
        archive.write([(b"anna", document(first, number, size)) for number in range(DOCUMENTS)])
        archive.write([(b"anna", document(first + 1, number, size)) for number in range(torn, DOCUMENTS)])
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


@pytest.mark.parametrize(("on_disk", "requests"), [(False, 4000), (True, 1000)])
def test_it_stays_within_its_limit(tmp_path, on_disk, requests):
    result = learn_requests(requests, 1 << 20, tmp_path / "history" if on_disk else None)
    assert result["within_limit"]
    assert result["most_bytes"] > 1 << 19
    assert (result["most_file_bytes"] > 0) == on_disk


def test_it_counts_its_bytes_over_many_requests(tmp_path):
    result = learn_requests(6_000, 4 << 20, tmp_path / "history", trace=False)
    assert result["within_limit"]
    assert result["most_bytes"] > 2 << 20


def speed(size: int = 10_000_000) -> dict[str, float]:
    """Seconds to learn and to read back `size` tokens, and microseconds per draft."""
    rng = np.random.default_rng(1)
    phrases = [(rng.zipf(1.2, int(rng.integers(5, 40))) % 49_152).astype(np.int32) for _ in range(100_000)]

    def written(length: int) -> np.ndarray:
        sampled = [phrases[number] for number in rng.integers(0, len(phrases), length // 5)]
        return np.concatenate(sampled)[:length]

    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder) / "history", {}
        with HistoryStore(path, limit=512 << 20) as store:
            documents = [written(200) for _ in range(size // 200)]
            started = time.perf_counter()
            for tokens in documents:
                store.add(tokens)
            times["learn"] = time.perf_counter() - started
        started = time.perf_counter()
        with HistoryStore(path, limit=512 << 20) as store:
            times["open"] = time.perf_counter() - started
            view = store.begin(documents[0])
            times["read"] = time.perf_counter() - started - times["open"]
            drafting = []
            for _ in range(5000):
                context = written(200)
                started = time.perf_counter()
                view.propose(context, 16)
                drafting.append(1e6 * (time.perf_counter() - started))
    return times | {"draft_median": float(np.median(drafting)), "draft_95": float(np.percentile(drafting, 95))}


if __name__ == "__main__":
    print(speed())

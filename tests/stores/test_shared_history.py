"""One history for many servers: nothing crosses namespaces, nothing flushed is lost, nobody waits for a database."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer, free_port, needs_redis, until

from hierspec.core.errors import HierspecError
from hierspec.stores import Home, check_history, open_store
from hierspec.stores.archive import namespace_key
from hierspec.stores.history import SHARED
from hierspec.stores.redis_address import RedisAddress
from hierspec.stores.redis_database import RedisDatabase
from hierspec.stores.shared_history import SharedHistory

pytestmark = needs_redis
LIMIT = 1 << 20
PATIENT = 60.0  # seconds: a slow machine makes no difference
MODELS = itertools.count()


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def servers(url: str, count: int = 2, limit: int = LIMIT, patience: float = PATIENT) -> list[SharedHistory]:
    """Histories of one model that nobody else has."""
    model = f"model {next(MODELS)}"
    return [SharedHistory(url, limit, "v", model, patience=patience) for _ in range(count)]


def text(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 5000, length).tolist()


def draft(store: SharedHistory, context: list[int], namespace: str, budget: int = 8) -> list[int]:
    return list(store.begin(np.array(context, np.int32), namespace).propose(np.array(context, np.int32), budget).tokens)


def held(store: SharedHistory, namespace: str = "") -> list[list[int]]:
    return [document.tolist() for document in store.documents(namespace)]


def test_what_one_server_learns_the_others_draft(redis):
    first, second = servers(redis.url)
    assert draft(second, text(1)[:10], "anna") == []
    for seed in (1, 2, 3):  # into an empty namespace, into one that was fetched, and again
        first.add(text(seed), "anna")
        first.flush()
        assert draft(second, text(seed)[:10], "anna") == text(seed)[10:18]
        second.add(text(seed + 10), "anna")
        second.flush()
        assert draft(first, text(seed + 10)[:10], "anna") == text(seed + 10)[10:18]
    assert draft(second, text(1)[:10], "bert") == []
    assert len(held(first, "anna")) == 6


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 1),  # server
        st.sampled_from(("", "anna", "bert", "x" * 300, "a\0b", "é")),
        st.sampled_from(("add", "add", "begin", "flush", "drop")),
        st.lists(st.integers(0, 3), min_size=2, max_size=30),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_no_draft_and_no_document_crosses_namespaces(redis, actions):
    """Tokens of a few values, so that contexts match everywhere; each namespace has values of its own."""
    both = servers(redis.url)
    names = {name: number for number, name in enumerate(dict.fromkeys(action[1] for action in actions))}
    written = defaultdict(list)
    for server, name, action, values in actions:
        store, tokens = both[server], [10 * names[name] + value for value in values]
        if action == "add":
            written[name].append(tokens)
            store.add(tokens, name)
        elif action == "flush":
            store.flush()
        elif action == "drop":
            for each in both:
                each.flush()
            store.drop(name)
            written[name].clear()
        # A context of every namespace, drafted in this one.
        for other in names.values():
            context = [10 * other + value for value in values]
            drafted = draft(store, context, name)
            assert {token // 10 for token in drafted} <= {names[name]}
            if action == "drop":
                assert not drafted
    for store in both:
        store.flush()
    for name in names:
        assert {*map(tuple, held(both[0], name))} == {*map(tuple, written[name])}
        assert held(both[0], name) == held(both[1], name)
    for store in both:
        store.close()


def test_an_entry_of_another_namespace_is_not_read(redis):
    (store,) = servers(redis.url, 1)
    database = store._database
    store.add(text(1), "anna")
    store.flush()
    entry = database._redis.xrange(database._stream(b"anna"))[0][1]
    database._redis.xadd(database._stream(b"bert"), entry)
    database._redis.hset(database._key("births"), b"bert", b"forged")
    assert held(store, "bert") == []
    assert draft(store, text(1)[:10], "bert") == []


def test_models_and_vocabularies_have_histories_of_their_own(redis):
    for name, vocabulary in (("a", "v"), ("b", "v"), ("a", "w")):
        with SharedHistory(redis.url, LIMIT, vocabulary, name) as store:
            assert held(store) == []
            store.add(text(1))


def test_what_one_server_drops_the_others_forget_when_their_next_request_begins(redis):
    first, second = servers(redis.url)
    first.add(text(1), "anna")
    first.add(text(2), "bert")
    first.flush()
    assert draft(second, text(1)[:10], "anna")
    first.drop("anna")
    assert draft(second, text(1)[:10], "anna") == []
    assert draft(second, text(2)[:10], "bert")
    first.add(text(3), "anna")  # written again: what was dropped does not come back
    first.flush()
    assert draft(second, text(3)[:10], "anna") == text(3)[10:18]
    assert draft(second, text(1)[:10], "anna") == []
    first.drop()
    assert held(second, "bert") == []
    assert second.info()["file_bytes"] == 0


def test_a_document_that_two_servers_write_is_kept_once(redis):
    first, second = servers(redis.url)
    for store in (first, second, first):
        store.add(text(1), "anna")
        store.flush()
    assert held(first, "anna") == [text(1)]


def test_the_limit_holds_and_a_busy_namespace_evicts_its_own(redis):
    first, second = servers(redis.url, limit=1 << 19)
    second.add(text(0), "quiet")
    second.add(text(0, 400), SHARED)
    second.flush()
    for seed in range(400):
        first.add(text(seed, 500), "busy")
        first.flush()  # so small a limit leaves little room for what is unsaved
    assert first.info()["file_bytes"] <= 1 << 19
    newest = held(first, "busy")
    assert newest == [text(seed, 500) for seed in range(400 - len(newest), 400)]
    assert len(newest) > 100
    assert held(second, "quiet") == [text(0)]
    usage = first._database.usage()
    assert usage.namespaces == 3
    assert usage.documents == len(newest) + 2
    assert usage.bytes == 4 * (500 * len(newest) + 440)
    for seed in range(200):  # namespaces that wrote once: the least recent go, the shared one stays
        second.add(text(seed, 500), f"user {seed}")
        second.flush()
    assert second.info()["file_bytes"] <= 1 << 19
    assert len(held(second, SHARED)) == 1
    assert held(second, "user 199")
    assert not held(second, "quiet")


def test_a_database_that_goes_and_comes_back_costs_no_request_and_no_answer(own_redis, caplog):
    first, second = servers(own_redis.url)
    first.add(text(1), "anna")
    first.flush()
    assert draft(second, text(1)[:10], "anna")
    own_redis.kill()
    with caplog.at_level(logging.WARNING, "hierspec"):
        for seed in range(2, 12):
            assert draft(second, text(1)[:10], "anna") == text(1)[10:18]  # of memory
            second.add(text(seed), "anna")
            assert draft(second, text(seed)[:10], "anna") == text(seed)[10:18]
        until(lambda: caplog.records, "the warning")
    with pytest.raises(HierspecError, match="No Redis server answers"):
        second.flush()
    assert second.info()["unsaved"] == 10
    assert second.info()["trouble"]
    own_redis.start()
    until(lambda: not second.info()["unsaved"], "what was unsaved")  # by itself
    assert held(first, "anna") == [text(seed) for seed in range(1, 12)]
    assert draft(first, text(11)[:10], "anna") == text(11)[10:18]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "go on without the history" in warnings[0].getMessage()


def test_a_database_that_stands_still_delays_no_request(own_redis, caplog):
    (store,) = servers(own_redis.url, 1, patience=0.01)
    store.add(text(1), "anna")
    store.flush()
    own_redis.freeze()
    try:
        with caplog.at_level(logging.WARNING, "hierspec"):
            for _ in range(200):  # of which the first waits for a hundredth of a second, and none for an answer
                view = store.begin(np.array(text(1)[:10], np.int32), "anna")
                view.learn(text(2))
                view.end()
        assert len(caplog.records) == 1
    finally:
        own_redis.go_on()
    until(lambda: not store.info()["unsaved"], "what was unsaved")
    assert len(held(store, "anna")) == 2


def test_a_namespace_that_cannot_be_read_does_not_keep_the_others_from_it(redis):
    first, second = servers(redis.url)
    first.add(text(1), "anna")
    first.flush()
    database = first._database
    database._redis.set(database._stream(b"bert"), b"no stream")
    assert draft(second, text(1)[:10], "bert") == []
    second.begin(np.array(text(1), np.int32), "anna")
    until(lambda: second._rings.get(b"anna"), "the other namespace")
    assert draft(second, text(1)[:10], "anna") == text(1)[10:18]


def test_unsaved_answers_are_bounded_and_the_newest_are_kept(own_redis):
    (store,) = servers(own_redis.url, 1, limit=1 << 19)
    own_redis.kill()
    for seed in range(100):
        store.add(text(seed, 500), "anna")
    kept = store.info()["unsaved"]
    assert 1 < kept < 100
    assert store._unsaved.memory <= (1 << 19) // 16
    own_redis.start()
    until(lambda: not store.info()["unsaved"], "what was unsaved")
    assert held(store, "anna") == [text(seed, 500) for seed in range(100 - kept, 100)]


WRITER = """
import os, sys
from hierspec.stores.redis_address import RedisAddress
from hierspec.stores.redis_database import RedisDatabase
database = RedisDatabase(RedisAddress.of(sys.argv[1]), 1 << 22, ("killed", "v"))
for number in range(100000):
    pair = (2 * number, 2 * number + 1)
    database.write([(b"anna", each.to_bytes(4, "little") * (each % 50 + 1)) for each in pair])
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.parametrize("database_too", [False, True])
def test_kill_9_of_a_writer_and_of_the_database_loses_nothing_that_was_flushed(tmp_path, database_too):
    # Redis answers before a batch is on disk unless it is told to sync always; an orderly stop writes it in any case.
    own_redis = RedisServer(tmp_path, *(["--appendfsync", "always"] if database_too else []))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, own_redis.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        for _ in range(50):
            flushed = int(writer.stdout.readline())
        writer.kill()
        flushed = max([flushed, *map(int, writer.stdout.read().split(b"\n")[:-1])])
    if database_too:
        own_redis.kill()
    else:
        own_redis.stop()
    own_redis.start()
    database = RedisDatabase(RedisAddress.of(own_redis.url), 1 << 22, ("killed", "v"))
    numbers = [int.from_bytes(document[:4], "little") for document in database.read(b"anna")]
    assert len(numbers) % 2 == 0  # whole batches
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 2 * (flushed + 1)
    own_redis.kill()


def test_an_evicted_namespace_is_fetched_again_with_its_unsaved_answers(redis):
    (store,) = servers(redis.url, 1)
    store.add(text(1), "anna")
    store.flush()
    store._rings.remove(namespace_key("anna"))
    store._save_if_due = lambda: None
    store.add(text(2), "anna")
    for seed in (1, 2):
        assert draft(store, text(seed)[:10], "anna") == text(seed)[10:18]


def test_no_database_is_refused_in_one_sentence(tmp_path, redis):
    nobody = f"redis://:secret@127.0.0.1:{free_port()}/0"
    for refused in (check_history, lambda url: open_store("history", Home(tmp_path, "v", named_history=url))):
        with pytest.raises(HierspecError, match="No Redis server answers at redis://127") as error:
            refused(nobody)
        assert "secret" not in str(error.value)
    with pytest.raises(HierspecError, match="--history"):
        check_history(nobody)
    for url in ("postgres://h/0", "redis://h:99999/0", "redis://h/zero", "redis://h/0?timeout=1"):
        with pytest.raises(HierspecError, match="redis://HOST:PORT/NUMBER"):
            check_history(url)
    with pytest.raises(HierspecError, match="refuses"):  # a database's number that it does not have
        check_history(redis.url.replace("/0", "/999"))


def test_a_wrong_password_and_a_server_that_forgets_are_told(tmp_path, caplog):
    server = RedisServer(tmp_path, "--requirepass", "right", "--appendonly", "no")
    try:
        with pytest.raises(HierspecError, match="user or password") as error:
            check_history(server.url.replace("//", "//:wrong@"))
        assert "wrong" not in str(error.value)
        SharedHistory(server.url.replace("//", "//:right@"), LIMIT).close()
        assert "append-only" in caplog.text
        assert "right" not in caplog.text
    finally:
        server.kill()


def test_an_address_is_loopback_unless_it_says_otherwise():
    assert str(RedisAddress.of("redis://")) == "redis://127.0.0.1:6379/0"
    assert str(RedisAddress.of("rediss://anna:p%40ss@[::1]:7000/3")) == "rediss://[::1]:7000/3"
    assert RedisAddress.of("redis://anna:p%40ss@h").password == "p@ss"
    assert "p@ss" not in repr(RedisAddress.of("redis://anna:p%40ss@h"))

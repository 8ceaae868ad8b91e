"""The cache's content by kind and model, and what goes when it is pruned."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hierspec import cache, in_use
from hierspec.cache import DERIVED, KINDS, ONLY_BY_NAME, entries, keep_within_limit, prune
from hierspec.core.errors import HierspecError
from hierspec.in_use import claim, deletable, mark_used
from hierspec.paths import temporary_name

KEY = "0123456789abcdef0123"
HOUR = 3600


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HIERSPEC_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(cache, "_kernels", lambda: iter(()))  # those of this installation are left alone
    monkeypatch.setattr(in_use, "_claims", type(in_use._claims)())
    yield tmp_path / "cache"
    for file in in_use._claims.values():
        os.close(file)


def put(path: Path, size: int, hours_ago: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    then = time.time() - hours_ago * HOUR
    os.utime(path, (then, then))
    return path


@pytest.fixture
def filled(root):
    """A little of every kind that lies in the folder; the least recently used weights are b's."""
    put(root / "models" / "a.Q4.gguf", 100, 1)
    put(root / "models" / "a.Q4.gguf.sha256", 1, 1)
    put(root / "converted" / f"a.Q4-{KEY}" / "model.safetensors", 1000, 5)
    put(root / "converted" / f"a.Q4-{KEY}" / "complete.json", 10, 1)
    put(root / "converted" / f"org--b-{KEY}" / "model.safetensors", 2000, 9)
    put(root / "packed" / f"a.Q4-{KEY}-{KEY}.weights", 500, 2)
    put(root / "packed" / f"org--b-{KEY}.weights", 600, 8)
    put(root / "costs" / f"{KEY}.json", 0, 3).write_text(json.dumps({"about": [{}, 1, 4, [f"/x/a.Q4-{KEY}", "int8"]]}))
    put(root / "costs" / "damaged.json", 3, 3)
    put(root / "plans" / f"{KEY}.toml", 0).write_text("# chosen for the model in /hub/models--org--b/snapshots/1f\n")
    for folder in ("learnt", "traces", "prompts", "peers", "peer-files", "peer-settings"):
        put(root / folder / "something", 7, 4)
    put(root / "stores" / "org--b-0123456789ab" / "history.sqlite", 50, 99)
    put(root / "stores" / "org--b-0123456789ab" / "history.sqlite-wal", 5, 99)
    put(root / "stores" / "org--b-0123456789ab" / "history.done.json", 5, 99)
    put(root / "stores" / "org--b-0123456789ab" / "corpus" / "shard", 80, 99)
    put(root / "file-hashes.json", 11)
    put(root / "holiday.jpg", 12, 999)
    put(temporary_name(root / "packed" / "c.weights"), 900, 30)
    return root


def names(listed):
    return sorted((entry.kind, entry.model, entry.path.name) for entry in listed)


def test_everything_is_listed_once_with_its_kind_model_and_bytes(filled):
    listed = entries()
    assert sum(entry.bytes for entry in listed) == sum(
        path.stat().st_size for path in filled.rglob("*") if path.is_file()
    )
    assert {entry.kind for entry in listed} == KINDS.keys() - {"kernels"}
    models = {(entry.kind, entry.model) for entry in listed if entry.model}
    assert models >= {(kind, "a.Q4") for kind in ("models", "converted", "packed", "costs")}
    assert models >= {(kind, "org/b") for kind in ("converted", "packed", "plans", "histories", "corpora")}
    assert [kind for kind in KINDS if kind in {entry.kind for entry in listed}] == list(
        dict.fromkeys(entry.kind for entry in listed)
    )


def test_a_history_is_one_entry_with_its_database_first(filled):
    [history] = [entry for entry in entries() if entry.kind == "histories"]
    assert history.bytes == 60
    assert history.path.name == "history.sqlite"
    prune(["histories"])
    assert [path.name for path in (filled / "stores" / "org--b-0123456789ab").iterdir()] == ["corpus"]
    prune(["corpora"])
    assert list((filled / "stores").iterdir()) == []  # a folder without stores goes too


def test_what_people_made_goes_only_when_it_is_named(filled):
    prune()
    assert {entry.kind for entry in entries()} == set(ONLY_BY_NAME)
    prune(ONLY_BY_NAME)
    assert entries() == []


def test_by_kind_by_model_and_by_age(filled):
    assert names(prune(["packed"], model="a*").deleted) == [("packed", "a.Q4", f"a.Q4-{KEY}-{KEY}.weights")]
    assert {entry.model for entry in prune(model="org/b", dry_run=True).deleted} == {"org/b"}
    assert names(prune(DERIVED, older_than=8.5 * HOUR).deleted) == [("converted", "org/b", f"org--b-{KEY}")]
    assert prune(model="c").deleted == ()
    with pytest.raises(HierspecError, match="kinds are models, converted"):
        prune(["weights"])


def test_down_to_a_size_the_least_recently_used_go_first(filled):
    pruned = prune(DERIVED, max_bytes=1600)
    assert names(pruned.deleted) == [
        ("converted", "org/b", f"org--b-{KEY}"),
        ("packed", "org/b", f"org--b-{KEY}.weights"),
    ]
    assert pruned.bytes == 2600
    assert sum(entry.bytes for entry in entries() if entry.kind in DERIVED) == 1510
    assert prune(DERIVED, max_bytes=1600).deleted == ()


def test_a_dry_run_deletes_nothing(filled):
    before = names(entries())
    would = prune(dry_run=True)
    assert names(entries()) == before
    assert names(prune().deleted) == names(would.deleted)


def test_the_last_use_is_marked_and_the_time_of_change_stays(filled):
    complete = filled / "converted" / f"org--b-{KEY}" / "model.safetensors"
    changed = complete.stat().st_mtime_ns
    mark_used(complete, filled / "no such file")
    assert complete.stat().st_mtime_ns == changed
    assert names(prune(DERIVED, max_bytes=3600).deleted) == [("packed", "org/b", f"org--b-{KEY}.weights")]


def test_what_another_process_uses_stays_until_it_ends(filled):
    folder, history = filled / "converted" / f"org--b-{KEY}", filled / "stores" / "org--b-0123456789ab"
    code = (
        "import sys, pathlib; from hierspec.in_use import claim\n"
        "for path in sys.argv[1:]: claim(pathlib.Path(path))\n"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder), str(history)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        assert {entry.path for entry in entries() if entry.in_use} == {folder, history / "history.sqlite"}
        pruned = prune([*DERIVED, "histories"])
        assert {entry.path for entry in pruned.in_use} == {folder, history / "history.sqlite"}
        assert folder.is_dir()
        other.kill()
    assert {entry.path for entry in prune([*DERIVED, "histories"]).deleted} == {folder, history / "history.sqlite"}


def test_claiming_what_is_not_there_or_is_being_moved_away_fails_nobody(filled, monkeypatch):
    claim(filled / "packed" / "nothing.weights")
    path = filled / "packed" / f"org--b-{KEY}.weights"
    monkeypatch.setattr(in_use, "_WAIT_SECONDS", 0.05)
    with deletable(path) as free:
        assert free
        claim(path)  # waits a little, and goes on without
        path.rename(temporary_name(path))
    claim(path)
    assert not in_use._claims


def test_claims_do_not_use_up_the_open_files_of_a_process(filled, monkeypatch):
    monkeypatch.setattr(in_use, "_MAX_CLAIMS", 3)
    paths = [put(filled / "packed" / f"{number}.weights", 1) for number in range(6)]
    for path in [*paths, paths[-1]]:
        claim(path)
    assert {entry.path for entry in entries() if entry.in_use} == set(paths[3:])


def test_links_are_deleted_and_what_they_point_to_is_not(filled, tmp_path):
    outside = put(tmp_path / "elsewhere" / "weights.safetensors", 5000).parent
    (filled / "converted" / f"linked-{KEY}").symlink_to(outside)
    (filled / "converted" / f"a.Q4-{KEY}" / "inside").symlink_to(outside)
    (filled / "learnt" / "something").unlink()
    (filled / "learnt").rmdir()
    (filled / "learnt").symlink_to(outside)  # a whole kind on another disk: not ours to empty
    assert sum(entry.bytes for entry in entries()) < 10_000
    prune()
    prune(ONLY_BY_NAME)
    assert entries() == []
    assert [path.name for path in outside.iterdir()] == ["weights.safetensors"]


def test_an_unfinished_file_that_may_still_be_written_stays(filled):
    young = put(temporary_name(filled / "packed" / "d.weights"), 900)
    assert [entry.path for entry in prune(["unfinished"]).in_use] == [young]
    assert [entry.path for entry in entries() if entry.kind == "unfinished"] == [young]


def test_a_deletion_that_was_interrupted_leaves_nothing_half(filled, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cache, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(["converted"], model="org/b")
    assert not (filled / "converted" / f"org--b-{KEY}").exists()
    [left] = [entry for entry in entries() if entry.kind == "unfinished" and entry.bytes == 2000]
    assert left.path.parent == filled / "converted"


def test_what_cannot_be_deleted_is_reported(filled, monkeypatch):
    def refused(self, target):
        raise PermissionError

    monkeypatch.setattr(Path, "rename", refused)
    pruned = prune(["packed"])
    assert (len(pruned.deleted), len(pruned.failed)) == (0, 2)
    assert pruned.bytes == 0


def test_derived_files_stay_within_the_limit(filled, monkeypatch):
    keep_within_limit()
    assert len([entry for entry in entries() if entry.kind in DERIVED]) == 4  # 20 GB by default
    claim(filled / "converted" / f"org--b-{KEY}")  # as whoever has just written it does
    monkeypatch.setenv("HIERSPEC_CACHE_LIMIT", "2K")
    keep_within_limit()
    left = [entry for entry in entries() if entry.kind in DERIVED]
    assert names(left) == [("converted", "org/b", f"org--b-{KEY}")]
    monkeypatch.setenv("HIERSPEC_CACHE_LIMIT", "0")
    assert cache.limit() is None
    monkeypatch.setenv("HIERSPEC_CACHE_LIMIT", "plenty")
    with pytest.raises(HierspecError, match="HIERSPEC_CACHE_LIMIT must be a size like 500M or 20G"):
        keep_within_limit()


def test_a_cache_that_changes_while_it_is_listed_is_no_error(filled, monkeypatch):
    real = cache._listed

    def vanishing(folder):
        listed = real(folder)
        if folder.name in ("packed", f"a.Q4-{KEY}"):
            for path in listed:
                path.unlink()
        return listed

    monkeypatch.setattr(cache, "_listed", vanishing)
    assert entries()
    monkeypatch.undo()


def test_compiled_code_is_listed_with_its_indices_first(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "package" / "cache.py"))
    folder = tmp_path / "package" / "cpu" / "__pycache__"
    for name in ("layers.run-1.py311.1.nbc", "layers.run-1.py311.nbi", "layers.cpython-311.pyc"):
        put(folder / name, 9)
    [kernels] = entries()
    assert (kernels.kind, kernels.bytes, kernels.path.suffix) == ("kernels", 18, ".nbi")
    prune(["kernels"])
    assert [path.name for path in folder.iterdir()] == ["layers.cpython-311.pyc"]

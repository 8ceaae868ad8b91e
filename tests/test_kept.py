"""Measured once, kept by machine: read where it is there, measured again where it is not or is damaged."""

import hashlib
import json
from contextlib import contextmanager

import pytest
import torch

from hierspec import kept
from hierspec.core.errors import HierspecError
from hierspec.kept import KeptFile
from hierspec.machine import machine


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))


def measured(file, measurements):
    """What the file says; every measurement is noted."""

    def measure():
        measurements.append(1)
        return 2.5

    return file.read_or_measure(lambda found: float(found["seconds"]), measure, lambda value: {"seconds": value})


def test_it_is_measured_once(tmp_path):
    measurements = []
    for _ in range(3):
        assert measured(KeptFile.here("costs", "a model", 1), measurements) == 2.5
    assert len(measurements) == 1
    [path] = (tmp_path / "costs").iterdir()
    assert json.loads(path.read_text())["about"][2:] == ["a model", 1]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "{}", '{"seconds": "fast"}', "\x00"])
def test_a_damaged_file_is_measured_again_and_repaired(damage):
    file, measurements = KeptFile.here("costs", 1), []
    measured(file, measurements)
    file.path.write_text(damage)
    assert measured(file, measurements) == 2.5
    assert measured(file, measurements) == 2.5
    assert len(measurements) == 2


def test_everything_that_it_depends_on_gives_another_file(monkeypatch):
    paths = {KeptFile.here("costs", *about).path for about in (("a", 1), ("b", 1), ("a", 2))}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(KeptFile.here("costs", "a", 1).path)
    monkeypatch.setattr(kept, "machine", lambda: {"processor": "another"})
    paths.add(KeptFile.here("costs", "a", 1).path)
    assert len(paths) == 5


def test_files_of_before_are_found_again(tmp_path):
    """The names that were given before this module had them in one place."""
    identity = [machine(), torch.get_num_threads(), ("a", "b"), 1]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    assert KeptFile.here("plans", ("a", "b"), 1, name="{key}.toml").path == tmp_path / "plans" / f"{key[:20]}.toml"
    search = ["openvino:lookup", "1", ["m", "2"], machine()]
    key = hashlib.sha256(json.dumps(search, sort_keys=True).encode()).hexdigest()
    found = KeptFile.of("peer-settings", search, "openvino-lookup-{key}.json", digits=16)
    assert found.path == tmp_path / "peer-settings" / f"openvino-lookup-{key[:16]}.json"


def test_a_full_disk_stops_nobody(monkeypatch):
    @contextmanager
    def full(path):
        raise HierspecError("The disk is full.")
        yield

    monkeypatch.setattr(kept, "whole_file", full)
    file = KeptFile.here("costs", 1)
    assert measured(file, []) == 2.5
    with pytest.raises(HierspecError, match="full"):
        file.write("asked for, so it is told")

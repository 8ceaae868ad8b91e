"""What is compiled, and that it is what calls need."""

import numpy as np
import pytest

from hierspec.backends.cpu import functions, pick
from hierspec.backends.cpu.compiled import library
from hierspec.backends.cpu.routines import RoutineLibrary, routine
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import load
from hierspec.stores.tree import DRAFTING
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack


def test_functions_are_called_with_the_types_they_are_declared_with(tmp_path):
    """Otherwise numba compiles them once more, while a request waits."""
    folder = tiny_checkpoint(tmp_path / "model", "llama", layers=6, intermediate=192)
    tiny_pack(tmp_path / "pack", folder)
    model = load(folder, device="cpu", backend="compiled", pack=tmp_path / "pack")
    for tiers in ((), (TierPlan(draft="feature", gather=3),)):
        plan = Plan(stores=("context",), tiers=tiers)
        for options in ({}, {"repetition_penalty": 1.2}, {"temperature": 0.8, "top_p": 0.9}):
            model.generate([1, 2, 3, 1, 2], plan=plan, max_tokens=12, **options)
            model.generate_many([[1, 2, 3, 1, 2], [4, 5]], plan=plan, max_tokens=4, **options)
    for function in (*functions.needed_functions(draft_heads=True, sampling=True), pick.adjust_rows):
        assert len(function.dispatcher().overloads) == 1, function.name
    assert DRAFTING.cached()


@routine(2)
def store_number(w, target, number):
    w.b.store(number, w.at(target, number.type(0)))


def stored_by(routines: RoutineLibrary) -> int:
    from ctypes import CFUNCTYPE, c_int64

    out = np.zeros(1, np.int64)
    CFUNCTYPE(None, c_int64, c_int64)(int(routines.addresses()[0]))(out.ctypes.data, 42)
    return int(out[0])


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-3], lambda content: content[::-1]])
def test_object_code_is_kept_and_a_damaged_file_is_as_good_as_none(tmp_path, monkeypatch, damage):
    def one() -> RoutineLibrary:
        return RoutineLibrary("one", {"store": store_number}, lambda key: tmp_path / key)

    assert not one().cached()
    assert stored_by(one()) == 42
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    assert one().cached()
    with monkeypatch.context() as patch:
        patch.setattr(RoutineLibrary, "_compiled", lambda self: pytest.fail("compiled again"))
        assert stored_by(one()) == 42
    file.write_bytes(damage(content))
    assert not one().cached()
    assert stored_by(one()) == 42
    assert file.read_bytes() == content


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch):
    from hierspec.backends.cpu import compiled

    def refuse(**options):
        raise RuntimeError("cannot cache function")

    monkeypatch.setattr(compiled, "njit", refuse)
    assert stored_by(library("one", {"store": store_number})) == 42


def test_workers_compile_nothing_for_a_process_that_cannot_read_it(monkeypatch):
    from hierspec.backends.cpu import compiled

    jit = compiled.njit

    def without_a_folder(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function")
        return jit(**options)

    def add_one(number, version=0):
        return number + 1

    monkeypatch.setattr(compiled, "njit", without_a_folder)
    function = compiled.compiled(compiled.kernel_version, compiled.INT, seconds=1)(add_one)
    assert function.cached()
    function.load()
    assert function.dispatcher()(41) == 42

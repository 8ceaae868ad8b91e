"""Faults that come into small models: a few of each kind of `make soak`, and the places that are hard to hit."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import subjects
from safetensors.torch import load_file, save_file
from soaking import run

import hierspec
from hierspec.backends.arena import is_refused, reserve
from hierspec.backends.cpu.threads import BROKEN, ThreadTeam
from hierspec.core.errors import OutOfMemory
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.proposal import Proposal
from hierspec.scorers.timing import PassTimer
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore

BACKENDS = ["compiled", "torch"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return subjects(tmp_path_factory.mktemp("faults"), most=2)


@pytest.mark.parametrize("script", ["interruptions", "allocations"])
def test_what_follows_a_fault_is_plain_decoding_s(made, script):
    """A dozen of the many of `make soak`."""
    spec = importlib.util.spec_from_file_location(script, Path(__file__).parent / "soak" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for subject in made:
        subject.sizes.clear()
    soak = run(module.attack, made, seed=1, count=12)
    assert soak.failures == []
    assert module.summary(soak)["by_file"]


# Memory.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_beyond_the_memory_runs_one_after_another_and_computes_little_twice(tmp_path, backend):
    """Each text alone has room, three have not: two wait for the first, instead of all losing their pages in turn."""
    folder = tiny_checkpoint(tmp_path / "model", "llama", eos_ids=())
    page = hierspec.load(folder, backend=backend, device="cpu").decoder.memory((4,), 0).bytes_per_page
    model = hierspec.load(folder, backend=backend, device="cpu", kv_memory=2 * page)
    prompts = [[number] * 50 for number in (5, 6, 7)]
    alone = [model.generate(prompt, plan="plain", max_tokens=40).tokens for prompt in prompts]
    model.forget()
    before = model.decoder.layer_rows
    together = [generation.tokens for generation in model.generate_many(prompts, plan="plain", max_tokens=40)]
    assert together == alone
    rows = (model.decoder.layer_rows - before) / model.config.layers
    assert rows < 3 * (50 + 40) + 2 * (50 + 40)  # at worst each that waits is computed once more


def test_an_arena_takes_what_the_machine_has_and_tries_again_for_more(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "model", "llama", eos_ids=())
    model = hierspec.load(folder, backend="compiled", device="cpu", kv_memory=1 << 22)
    prompt = [*range(10, 200)]
    expected = model.generate(prompt, plan="plain", max_tokens=3).tokens
    pool = model.assembler.catalogue.pool
    page = pool.pages.memory.bytes_per_page
    pool._drop_memory()
    zeros = np.zeros

    def scarce(shape, *arguments, **named):
        if np.prod(shape) > page // 4:  # elements of one page at most
            raise MemoryError
        return zeros(shape, *arguments, **named)

    monkeypatch.setattr(np, "zeros", scarce)
    with pytest.raises(OutOfMemory, match="--kv-memory"):
        model.generate(prompt, plan="plain", max_tokens=3)
    monkeypatch.setattr(np, "zeros", zeros)
    assert model.generate(prompt, plan="plain", max_tokens=3).tokens == expected
    assert pool.pages.memory.pages == (1 << 22) // page


def test_what_refuses_memory_is_known():
    refused = [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ]
    assert all(is_refused(error) for error in refused)
    assert not is_refused(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_refused(ValueError("out of memory"))

    def allocate(pages):
        if pages > 3:
            raise refused[pages % 5]
        return "arrays"

    assert reserve(100, allocate) == (3, "arrays")
    assert reserve(2, allocate) == (2, "arrays")
    with pytest.raises(OutOfMemory, match="lower --kv-memory"):
        reserve(100, lambda pages: allocate(pages + 4))
    with pytest.raises(TypeError):
        reserve(100, lambda pages: allocate(None))


def test_a_broken_barrier_is_mended_before_the_next_job():
    team = ThreadTeam(2)
    team.sync[BROKEN] = 1
    broken = []
    team.run(lambda number, threads: broken.append(int(team.sync[BROKEN])))
    assert broken == [0, 0]


# What was assumed for timing.


def test_what_timing_assumed_is_never_read_by_a_text(tmp_path):
    """Also where Ctrl-C ends the timing, so that nobody cleans up."""
    folder = tiny_checkpoint(tmp_path / "model", "llama", eos_ids=())
    model = hierspec.load(folder, backend="compiled", device="cpu")
    exit_two, target = model.scorer(2), model.scorer(4)
    context = np.arange(10, 90, dtype=np.int32)
    exit_two.forget()
    expected = model.generate([*context.tolist(), 7], plan="plain", max_tokens=6).tokens
    timer = PassTimer(target, context, computed_layers=2)
    tokens = np.array([7, 8, 9, 10], np.int32)
    timer.run(tokens)
    [request] = [timer._request]
    pool = target.pool
    [staircase] = [staircase for staircase in pool.staircases() if staircase.assumed]
    assert staircase.finished(context) == 0
    del timer
    assert model.generate([*context.tolist(), 7], plan="plain", max_tokens=6).tokens == expected
    request.cancel()
    assert staircase not in pool.staircases()


# Logits that are not numbers.


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The embedding of token 50 is not a number."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("damaged") / "model", "llama", eos_ids=(), tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][50] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
@pytest.mark.parametrize("length", [2, 20])
def test_a_drafted_token_that_is_not_a_number_spoils_nothing_around_it(damaged, backend, rule, length):
    """Neither the row of the context, nor its siblings, nor what is kept of them for the next passes and texts."""
    model = hierspec.load(damaged, backend=backend, device="cpu")
    prompt = [1, *[5, 6] * length]
    expected = model.generate(prompt, plan="plain", max_tokens=12).tokens
    assert 50 not in expected
    model.forget()

    def draft(context, budget):
        right = expected[len(context) - len(prompt) :][:2]
        tree = Proposal((50, *right[:1]), (-1, -1)[: 1 + len(right[:1])])
        return tree if len(right) < 2 else Proposal((50, right[0], 50, 4, right[1]), (-1, -1, 1, 0, 1))

    model.add_store(FakeStore("bad", draft))
    for tiers in ((), (TierPlan(exit_layer=2, gather=2, stores=("bad",), merge=True),)):
        plan = Plan(rule=rule, stores=("bad",), budget=8, merge=True, tiers=tiers)
        generation = model.generate(prompt, plan=plan, max_tokens=12)
        assert generation.tokens == expected
        assert generation.stats.tiers[0].accepted.total() > 3
    assert model.generate([*prompt, *expected[:4]], plan="plain", max_tokens=8).tokens == expected[4:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_fails_leaves_nothing_for_one_that_begins_alike(damaged, backend):
    model = hierspec.load(damaged, backend=backend, device="cpu")
    prompt = [1, 5, 6, 5, 6]
    expected = model.generate(prompt, plan="plain", max_tokens=6).tokens
    model.forget()
    with pytest.raises(hierspec.HierspecError, match="not numbers at position 6;"):
        model.generate([*prompt, 50], plan="plain", max_tokens=6)
    assert model.generate(prompt, plan="plain", max_tokens=6).tokens == expected

"""What `backends/base.py` promises, for every backend, against the torch one. A new one adds a line to BACKENDS."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from texts import Texts, states

from hierspec.backends.base import Backend
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.torch.backend import TorchBackend
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.scorers.climb import advance
from hierspec.testing.checkpoints import random_weights, tiny_config

BACKENDS = {
    "torch": TorchBackend,
    "torch with compiled picks": lambda: _with_compiled_picks(),
    "compiled": lambda: CpuBackend(2),
    "compiled, vectors only": lambda: CpuBackend(2, matrix_units=False),
    "cuda through torch": lambda: TorchBackend("cuda"),
    "cuda": lambda: _cuda(),
}
NEAR = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.01, "int8": 0.1, "int4": 0.8}  # relative errors
# Sizes that every format takes, and that leave threads uneven shares.
CONFIG = tiny_config("llama", heads=4, kv_heads=2, hidden=128, head_size=32, intermediate=192, vocabulary=320, layers=4)
WEIGHTS = random_weights(CONFIG)


def _with_compiled_picks() -> TorchBackend:
    from hierspec.backends.cpu.answers import answer

    return TorchBackend("cpu", answer)


def _cuda() -> Backend:
    from hierspec.backends.cuda.backend import CudaBackend

    return CudaBackend()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> Backend:
    if request.param.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU here")
    return BACKENDS[request.param]()


@pytest.fixture(scope="module")
def decoders(backend):
    """In every format that the backend has: of torch's on this CPU float32 alone, the others take torch minutes."""
    formats = {}
    for format in backend.formats if backend.exact or backend.device.type != "cpu" else ("float32",):
        if format == "file":  # of a GGUF file: see cpu/test_file_blocks.py
            continue
        assert backend.refuses(CONFIG, format) == ""
        dtype = torch.float32 if format.startswith("int") else getattr(torch, format)
        weights = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
        formats[format] = backend.decoder(CONFIG, weights, format)
    return formats


@pytest.fixture(scope="module")
def reference():
    return TorchBackend().decoder(CONFIG, WEIGHTS, "float32")


def a_tree(rng: random.Random, nodes: int) -> Proposal:
    parents = tuple(rng.randrange(-1, node) for node in range(nodes))
    return Proposal(tuple(rng.randrange(CONFIG.vocabulary) for _ in range(nodes)), parents)


def some_texts(rng: random.Random, count: int) -> list[tuple[np.ndarray, Proposal]]:
    lengths = [rng.randrange(1, 150) for _ in range(count)]
    contexts = [np.array([rng.randrange(320) for _ in range(length)], np.int32) for length in lengths]
    return [(context, a_tree(rng, rng.randrange(9))) for context in contexts]


def logits_of(decoder, wanted, taps=(), stops=(CONFIG.layers,)) -> list[torch.Tensor]:
    """Of all tokens of these contexts and proposals, in one batch, in as many layer ranges as there are stops."""
    texts = Texts(decoder, taps)
    staircases = [texts.new(len(context) + len(tree)) for context, tree in wanted]
    with torch.inference_mode():
        for staircase, (context, tree) in zip(staircases, wanted, strict=True):
            staircase.align(context, tree)
        for stop in stops:
            advance(decoder, staircases, stop)
        return [decoder.logits(states(staircase, 0, staircase.used)).cpu() for staircase in staircases]


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_trees_have_the_reference_logits(decoders, reference, seed):
    wanted = some_texts(random.Random(seed), 1 + seed)
    expected = logits_of(reference, wanted)
    for format, decoder in decoders.items():
        assert decoder.layer_rows >= 0
        for found, right in zip(logits_of(decoder, wanted), expected, strict=True):
            assert found.dtype == torch.float32
            assert (found - right).norm() / right.norm() < NEAR[format], format


@pytest.mark.parametrize("seed", range(2))
def test_layer_ranges_and_company_change_nothing_or_nearly(backend, decoders, seed):
    """To the bit where the backend says that it is exact."""
    wanted = some_texts(random.Random(10 + seed), 3)
    for format, decoder in decoders.items():
        together = logits_of(decoder, wanted, taps=(1, 3), stops=(1, 3, 4))
        for text, found in zip(wanted, together, strict=True):
            [alone] = logits_of(decoder, [text])
            if backend.exact:
                assert torch.equal(found, alone), format
            else:
                assert (found - alone).norm() / alone.norm() < NEAR[format]


def test_states_after_every_tap_are_kept_and_slots_are_copied_all_at_once(decoders):
    rng = random.Random(3)
    for decoder in decoders.values():
        texts = Texts(decoder, (1, 2))
        staircase = texts.new(200)
        memory = staircase.memory
        assert memory.taps == (1, 2, 4)
        with torch.inference_mode():
            staircase.align(np.array([rng.randrange(320) for _ in range(100)], np.int32), Proposal())
            advance(decoder, [staircase], 4)
            before = memory.states[:, staircase.slots[:100]].clone()
            assert before.abs().sum(dim=2).gt(0).all()
            assert not torch.equal(before[0], before[1])
            # A cycle of three, and a page boundary in between.
            to, source = staircase.slots[[5, 70, 90]], staircase.slots[[70, 90, 5]]
            memory.copy(to, source)
            after = memory.states[:, staircase.slots[:100]]
            assert torch.equal(after[:, [5, 70, 90]], before[:, [70, 90, 5]])
            memory.copy(source, to)
            assert torch.equal(memory.states[:, staircase.slots[:100]], before)


def test_a_memory_keeps_to_its_bytes(decoders):
    for decoder in decoders.values():
        page = decoder.memory((4,), 0).bytes_per_page
        for pages in (0, 1, 7):
            memory = decoder.memory((2, 4), pages * decoder.memory((2, 4), 0).bytes_per_page + 5)
            assert memory.pages == pages
            assert memory.states.shape == (2, pages * memory.page, CONFIG.hidden)
            assert memory.bytes_per_page > page


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, seed=4, top_k=20, top_p=0.9),
    Sampling(temperature=1.3, seed=5, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    Sampling(temperature=0.8, seed=6, logit_bias={3: 4.0, 9: -8.0}),
]


class Nobody:
    name, vocabulary = "nobody", CONFIG.vocabulary


@pytest.mark.parametrize("distributions", [False, True])
def test_picks_of_all_asks_at_once_are_the_reference_picks(backend, distributions):
    rng, generator = random.Random(8), torch.Generator().manual_seed(8)
    asks = []
    for sampling in SAMPLINGS:
        request = Request([1, 2, 3, 9, 9], sampling, Hierarchy((Tier(Nobody()),)))
        context = np.array([1, 2, 3, 9, 9, 17, 17], np.int32)
        request.output = [17, 17]
        ask = Ask(Nobody(), context, a_tree(rng, rng.randrange(6)), request, 3, distributions, TierStats(""))
        asks.append(ask if distributions else replace(ask, leads=True))
    rows = sum(1 + len(ask.proposal) for ask in asks)
    logits = 3 * torch.randn(rows, CONFIG.vocabulary, generator=generator)
    expected = TorchBackend().pick(asks, logits)
    given = logits.clone().to(backend.device)
    answers = backend.pick(asks, given)
    assert len(answers) == len(asks)
    assert torch.equal(given.cpu(), logits)
    for ask, found, right in zip(asks, answers, expected, strict=True):
        if distributions:
            assert np.allclose(found.distributions, right.distributions, atol=1e-6)
        else:
            filtered = ask.request.sampling.top_k or ask.request.sampling.top_p < 1 or ask.request.sampling.min_p
            picks = 1 if filtered else 3  # where fewer are possible the others are anything
            assert np.array_equal(found.picks[:, :picks], right.picks[:, :picks])
            assert np.allclose(found.leads, right.leads, atol=1e-3)


def test_drafters_heads_and_joins_are_the_reference_ones(backend, decoders, reference):
    generator, tokens = torch.Generator().manual_seed(1), np.arange(0, 320, 3, dtype=np.int32)
    features = torch.randn(5, CONFIG.hidden, generator=generator)
    norm = torch.rand(CONFIG.hidden, generator=generator) + 0.5
    matrix = torch.randn(CONFIG.hidden, 3 * CONFIG.hidden, generator=generator) / 8
    kept = torch.randn(2, 40, CONFIG.hidden, generator=generator)
    slots, extra = np.array([3, -1, 39, 0, 7]), np.array([1, 5, 200], np.int32)

    def both(backend: Backend, decoder, format: str) -> tuple[torch.Tensor, torch.Tensor]:
        here = {"device": backend.device, "dtype": decoder.dtype}
        with torch.inference_mode():
            shortlist = backend.shortlist(decoder, tokens, format)
            nothing, some = (shortlist.gather(which) for which in (np.empty(0, np.int32), extra))
            logits = shortlist.logits(features.to(**here), norm.to(decoder.norm), [nothing, some], [2, 3]).cpu().clone()
            join = backend.join(decoder, matrix, None, format)
            joined = join(tokens[:5], kept.to(**here), [1, 0], slots, torch.stack([norm, norm]).to(decoder.norm))
            assert shortlist.bytes > 0
            assert join.bytes > 0
            return logits, joined.float().cpu()

    right_logits, right_joined = both(reference.backend, reference, "float32")
    for format, decoder in decoders.items():
        logits, joined = both(backend, decoder, format)
        scored = torch.isfinite(right_logits)
        assert torch.equal(torch.isfinite(logits), scored)
        assert torch.isinf(logits[:2, extra]).all()
        assert (logits - right_logits)[scored].norm() / right_logits[scored].norm() < NEAR[format]
        assert (joined - right_joined).norm() / right_joined.norm() < NEAR[format]


def test_what_it_cannot_run_is_said_in_words(backend):
    assert backend.refuses(CONFIG, "float8_of_another_world")
    assert backend.bytes_per_weight("float32") == 4.0
    for format in backend.formats:
        assert 0.5 <= backend.bytes_per_weight(format) <= 4.0
    backend.synchronize()

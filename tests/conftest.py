"""Shared by all tests."""

import os
from itertools import count

import pytest
import torch

import hierspec
from hierspec.assembly import measured_costs
from hierspec.assembly.measured_costs import CostBook
from hierspec.core.request import Request
from hierspec.pacing.costs import Costs, Prefill
from hierspec.scorers.base import StateScorer

# For this process, beside its siblings (`pytest -n`). The threads of a pass wait for each other: where there are more
# of them than cores, a pass takes many times as long.
_CORES = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.fixture(autouse=True, scope="session")
def _threads_of_started_processes():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", str(_CORES))
        yield


@pytest.fixture(autouse=True, scope="module")
def _threads_of_models(request):
    """Tiny models run faster on one thread, also those that a file shares; real ones get all cores. Tests of threads
    ask for as many as they need."""
    torch.set_num_threads(_CORES if "real" in request.path.parts else 1)


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch):
    """Commands name what takes longer than two seconds, on stderr: no test may depend on what that is here."""
    monkeypatch.setattr("hierspec.cli.console._LINES_AFTER_SECONDS", 3600.0)


_MEASURED = {book: (book.costs, book.prefill) for book in (CostBook, measured_costs._CostsApart)}


def _made_up_costs(book: CostBook, scorer: StateScorer, computed_layers: int = 0) -> Costs:
    """Costs by the number of layers that a pass runs, those of a drafter thin: rows beyond the first cost a twelfth of
    it each."""
    branch = getattr(scorer, "layer", None)
    alone = 1e-3 * (1 + scorer.layers - computed_layers) if branch is None else 1e-4 * branch.decoder.config.layers
    key = f"{scorer.name}, {scorer.kind}", computed_layers
    return book._costs.setdefault(key, Costs((1, 32), (alone, alone * (1 + 31 / 12))))


def _made_up_prefill(book: CostBook, scorer: StateScorer) -> Prefill:
    """As the rows of wide passes."""
    costs = book.costs(scorer)
    return Prefill((costs.seconds(32) - costs.seconds(16)) / 16)


@pytest.fixture(autouse=True, scope="session")
def _no_clock():
    """What passes cost is made up and stays so: what is drafted, and how many passes a text takes, must not depend on
    how fast this machine is now. Nothing is learnt from runs before, or kept for others."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HIERSPEC_LEARNT", "off")
        for book in (CostBook, measured_costs._CostsApart):
            patched.setattr(book, "costs", _made_up_costs)
            patched.setattr(book, "prefill", _made_up_prefill)
        readings = count()  # every ask of a store takes the same time, to the last bit
        patched.setattr(Request, "clock", lambda _: next(readings) * 2.0**-18)
        yield


@pytest.fixture(autouse=True)
def _clock_where_it_is_tested(request, monkeypatch):
    if request.node.get_closest_marker("measures_costs") is not None:
        for book, (costs, prefill) in _MEASURED.items():
            monkeypatch.setattr(book, "costs", costs)
            monkeypatch.setattr(book, "prefill", prefill)


@pytest.fixture(scope="session")
def default_model():
    """The real default model, fetched and converted on first use."""
    before = torch.get_num_threads()
    torch.set_num_threads(_CORES)
    try:
        return hierspec.load()
    finally:
        torch.set_num_threads(before)

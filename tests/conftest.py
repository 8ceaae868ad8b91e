"""Shared by all tests."""

import pytest
import torch

import hierspec


@pytest.fixture(autouse=True)
def _threads(request):
    """Tiny models run faster on one thread; the real one gets all."""
    before = torch.get_num_threads()
    if "default_model" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch):
    """Commands name what takes longer than two seconds, on stderr: no test may depend on what that is here."""
    monkeypatch.setattr("hierspec.cli.console._LINES_AFTER_SECONDS", 3600.0)


@pytest.fixture(scope="session")
def default_model():
    """The real default model, fetched and converted on first use."""
    return hierspec.load()

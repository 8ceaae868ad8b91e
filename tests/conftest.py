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


@pytest.fixture(scope="session")
def default_model():
    """The real default model, fetched and converted on first use."""
    return hierspec.load()

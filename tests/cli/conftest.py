"""One tiny model for all tests of the command line: loading it again for each would be most of their time."""

import sys

import pytest

import hierspec
from hierspec.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Its folder."""
    return str(tiny_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", "llama"))


@pytest.fixture(scope="session")
def tiny_model(tiny):
    return hierspec.load(tiny)


@pytest.fixture
def loaded(tiny_model, monkeypatch):
    """Commands get this model, whatever they name; the list says how often one was loaded."""
    loads = []

    def load(*arguments, **options):
        loads.append(arguments)
        return tiny_model

    monkeypatch.setattr("hierspec.language_model.load", load)
    return loads


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Standard output is a terminal."""
    # Of the class: pytest puts other streams in place between setting up and running a test.
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout)
    return capsys

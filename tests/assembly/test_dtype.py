"""Which dtype `auto` takes on a CPU: by what passes take, kept per machine, and told."""

import json
import subprocess
import sys

import pytest

import hierspec
from hierspec.assembly import dtype as dtypes
from hierspec.assembly.dtype import DtypeChoice, TorchProducts, choose_dtype, fastest, request_seconds, weights
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import random_weights, tiny_checkpoint, tiny_config

MODEL = tiny_config("llama", hidden=576, intermediate=1536, vocabulary=49152, layers=2)


class FakeProducts:
    """Seconds of a weight: `narrow` or `wide` by dtype. Counts how often it is asked."""

    def __init__(self, narrow, wide):
        self.narrow, self.wide, self.asked = narrow, wide, 0

    def seconds(self, dtype, rows, most):
        self.asked += 1
        assert most > 0
        return (self.wide if rows > 16 else self.narrow)[dtype]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Let the products be fake ones, in a cache of the test's own."""
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))

    def with_products(narrow, wide, compiled=True):
        products = FakeProducts(narrow, wide)
        monkeypatch.setattr(dtypes, "_products", lambda *_: products)
        monkeypatch.setattr(dtypes, "_compiled_code", lambda _: 7 if compiled else None)
        return products

    return with_products


def test_a_request_is_one_wide_pass_and_many_narrow_ones():
    products = FakeProducts({"float32": 2.0, "bfloat16": 1.0}, {"float32": 10.0, "bfloat16": 100.0})
    found = request_seconds(products, 3)
    assert found["float32"] == pytest.approx(3 * (10 + 128 / 1.8 * 2))
    assert found["bfloat16"] == pytest.approx(3 * (100 + 128 / 1.8))


@pytest.mark.parametrize(("half", "expected"), [(1.2, "float32"), (0.96, "float32"), (0.94, "bfloat16")])
def test_ties_go_to_the_more_exact(half, expected):
    choice = fastest({"float32": 1.0, "bfloat16": half})
    assert choice.dtype == expected
    assert f"{half:.2f} s in bfloat16" in str(choice)


def test_it_is_measured_once_for_each_shape_and_code(measured, monkeypatch, tmp_path):
    fast = {"float32": 2.0, "bfloat16": 1.0}
    products = measured(fast, fast)
    first = choose_dtype(MODEL)
    assert first.dtype == "bfloat16"
    assert products.asked == 4
    assert choose_dtype(MODEL) == first
    assert products.asked == 4
    [file] = (tmp_path / "cache" / "costs").glob("dtype-*.json")
    assert json.loads(file.read_text())["dtype"] == "bfloat16"
    file.write_text("{}")  # damaged: measured again
    assert choose_dtype(MODEL) == first
    assert products.asked == 8
    choose_dtype(tiny_config("llama", hidden=576, intermediate=1536, vocabulary=49152, layers=3))
    assert products.asked == 12
    monkeypatch.setattr(dtypes, "_compiled_code", lambda _: 8)  # the compiled code has changed
    choose_dtype(MODEL)
    assert products.asked == 16


def test_small_models_and_torch_without_instructions_are_not_measured(measured, monkeypatch):
    fast = {"float32": 2.0, "bfloat16": 1.0}
    products = measured(fast, fast, compiled=False)
    assert choose_dtype(tiny_config("llama")) == DtypeChoice("float32")
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: frozenset({"avx2"}))
    assert choose_dtype(MODEL) == DtypeChoice("float32")
    assert products.asked == 0
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert choose_dtype(MODEL).dtype == "bfloat16"
    assert products.asked == 4


def test_weights_are_counted_as_a_pass_reads_them():
    for tied in (True, False):
        config = tiny_config("qwen3", tied=tied)
        numbers = sum(tensor.numel() for name, tensor in random_weights(config).items() if tensor.dim() == 2)
        assert weights(config) == numbers - (0 if tied else config.vocabulary * config.hidden)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_real_products_are_timed(name):
    assert 0 < TorchProducts(64).seconds(name, 3, 64 * 256) < 1
    from hierspec.backends.cpu.speed import CompiledProducts

    products = CompiledProducts(tiny_config("llama"), 1, 1 << 16, matrices=True)
    assert 0 < products.seconds(name, 3, 1 << 20) < 1
    assert 0 < products.seconds(name, 20, 1 << 10) < 1


def test_load_takes_and_tells_it(measured, monkeypatch, tmp_path, capsys):
    folder = tiny_checkpoint(tmp_path / "tiny", "llama")
    monkeypatch.setattr(dtypes, "_SMALL", 0)
    fast = {"float32": 2.0, "bfloat16": 1.0}
    measured(fast, fast)
    model = hierspec.load(folder)
    assert model.dtype == "bfloat16"
    assert model.decoder.products.startswith("bfloat16")
    assert model.dtype_choice.seconds["float32"] == 2 * model.dtype_choice.seconds["bfloat16"]
    assert hierspec.load(folder, dtype="float32").dtype_choice == DtypeChoice("float32")
    assert hierspec.load(folder, dtype="float32").decoder.products == "float32"
    assert hierspec.load(folder, backend="torch", dtype="bfloat16").decoder.products == "torch bfloat16"
    vectors = hierspec.load(folder, backend="compiled-vectors")
    assert (vectors.dtype, vectors.decoder.products) == ("bfloat16", "bfloat16")
    with pytest.raises(HierspecError, match="compiled-vectors"):
        hierspec.load(folder, backend="tiles")

    from hierspec.cli.main import main

    assert main(["generate", str(folder), "-p", "a", "--raw", "--max-tokens", "2", "--verbose"]) == 0
    assert "dtype: bfloat16, as measured" in capsys.readouterr().err


def test_the_dtype_can_be_chosen_without_numba():
    """As where it is not installed: nothing of the compiled backend may be needed."""
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "from hierspec.assembly import dtype as dtypes\n"
        "from hierspec.testing.checkpoints import tiny_config\n"
        "dtypes.cpu_flags = lambda: frozenset()\n"
        "config = tiny_config('llama', hidden=576, intermediate=1536, vocabulary=49152)\n"
        "print(dtypes.choose_dtype(config))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float32, without measuring"

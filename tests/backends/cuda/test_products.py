"""Products in Triton: near torch's, and the same bits whatever the number of tokens."""

import pytest
import torch

from hierspec.backends.cuda.fused import gated
from hierspec.backends.cuda.norms import Entering, Norm, add_norm, enter_norm, groups_of, norm
from hierspec.backends.cuda.products import ADD, ADD_AND_TAP, STORE_PARTS, Weight, parts_needed, product, weight
from hierspec.backends.cuda.tiling import Tiles, guessed, tiles_for

WIDTHS = (1, 3, 16, 17, 40)
TILES = [Tiles(32, 64, 1), Tiles(16, 64, 2, warps=2), Tiles(32, 64, 3)]


def made(matrix, format, tiles, device) -> Weight:
    whole = weight("output", matrix, format, device)
    return Weight(whole.matrix, whole.scales, tiles)


def scratch(weight: Weight, device, halves: int = 1):
    floats, counters = parts_needed(weight.matrix.shape[0], weight.tiles, max(WIDTHS), halves)
    return torch.zeros(max(floats, 1), device=device), torch.zeros(max(counters, 1), dtype=torch.int32, device=device)


def entry(rows: int, hidden: int, device) -> Entering:
    return Entering(
        torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device),
        torch.zeros(rows, groups_of(hidden), device=device),
    )


def near(found, right, bound=0.02) -> bool:
    return float((found - right).norm() / right.norm()) < bound


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.splits} splits")
def test_sums_are_right_and_do_not_depend_on_width(device, format, tiles):
    torch.manual_seed(1)
    matrix, x = torch.randn(80, 176) / 13, torch.randn(max(WIDTHS), 176)
    placed = made(matrix, format, tiles, device)
    given, splitting = x.to(device, torch.bfloat16), scratch(placed, device)
    results = {}
    for rows in WIDTHS:
        out = torch.full((max(WIDTHS), 80), 7.0, device=device)
        product(given, placed, out, rows, splitting, end=ADD.value)
        assert (out[rows:] == 7).all()
        results[rows] = out.cpu()
    widest = results[max(WIDTHS)]
    assert near(widest - 7, x @ matrix.T)
    assert all(torch.equal(results[rows][:rows], widest[:rows]) for rows in WIDTHS)
    assert not splitting[1].any()  # counters are zero again, for the next kernel


@pytest.mark.parametrize("splits", [1, 2])
def test_a_norm_is_finished_by_the_product_behind_it(device, splits):
    torch.manual_seed(2)
    matrix, x, gain = torch.randn(48, 1100) / 33, 3 * torch.randn(40, 1100), torch.rand(1100) + 0.5
    placed = made(matrix, "bfloat16", Tiles(32, 64, splits), device)
    results = {}
    for rows in WIDTHS:
        entering, out = entry(40, 1100, device), torch.zeros(40, 48, device=device)
        enter_norm(x.to(device), gain.to(device), entering, rows)
        product(entering.scaled, placed, out, rows, scratch(placed, device), norm=Norm(entering.squares, 1e-5))
        results[rows] = out.cpu()
    assert near(results[40], torch.nn.functional.rms_norm(x, (1100,), gain, 1e-5) @ matrix.T)
    assert all(torch.equal(results[rows][:rows], results[40][:rows]) for rows in WIDTHS)


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.outputs} outputs, {tiles.splits} splits")
def test_sums_enter_a_norm_as_states_from_memory_do(device, tiles):
    """So a token may stop after a layer and go on later with the same bits."""
    torch.manual_seed(6)
    matrix, x, gain = torch.randn(88, 128) / 11, torch.randn(40, 128), torch.rand(88)
    placed = made(matrix, "bfloat16", tiles, device)
    for rows in WIDTHS:
        hidden = torch.randn(40, 88).to(device)
        at_once, later = entry(40, 88, device), entry(40, 88, device)
        given, splitting = x.to(device, torch.bfloat16), scratch(placed, device)
        product(given, placed, hidden, rows, splitting, end=ADD.value, enters=(gain.to(device), at_once))
        enter_norm(hidden, gain.to(device), later, rows)
        assert torch.equal(at_once.scaled, later.scaled)
        assert torch.equal(at_once.squares, later.squares)
        assert at_once.squares[:rows].all()


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("splits", [1, 2])
def test_gate_and_activation(device, format, splits):
    torch.manual_seed(3)
    matrix, x = torch.randn(2 * 80, 128) / 9, torch.randn(40, 128)
    placed = made(matrix, format, Tiles(16, 64, splits, warps=2), device)
    gate, up = (x @ matrix.T).chunk(2, dim=1)
    results = {}
    for rows in WIDTHS:
        out = torch.zeros(40, 80, dtype=torch.bfloat16, device=device)
        gated(x.to(device, torch.bfloat16), placed, out, rows, scratch(placed, device, 2))
        results[rows] = out.cpu().float()
    assert near(results[40], torch.nn.functional.silu(gate) * up)
    assert all(torch.equal(results[rows][:rows], results[40][:rows]) for rows in WIDTHS)


def test_a_tap_keeps_what_was_added_to(device):
    torch.manual_seed(4)
    matrix, x = torch.randn(64, 64) / 8, torch.randn(3, 64)
    placed = made(matrix, "bfloat16", Tiles(32, 64, 2), device)
    hidden, states = torch.randn(3, 64), torch.zeros(10, 64, device=device)
    out, slots = hidden.clone().to(device), torch.tensor([7, 2, 4], dtype=torch.int32, device=device)
    product(x.to(device, torch.bfloat16), placed, out, 3, scratch(placed, device), ADD_AND_TAP.value, (states, slots))
    assert near(out.cpu(), hidden + x @ matrix.T)
    assert torch.equal(states[[7, 2, 4]], out)
    assert not states[[0, 1, 3]].any()


def test_a_norm_is_torchs(device):
    x, gain = 5 * torch.randn(3, 80), torch.rand(80)
    out = torch.zeros(3, 80, dtype=torch.bfloat16, device=device)
    norm(x.to(device), gain.to(device), out, 3, 1e-5)
    assert near(out.cpu().float(), torch.nn.functional.rms_norm(x, (80,), gain, 1e-5), 0.01)


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("tiles", TILES)
def test_parts_are_added_and_normed_alike_whatever_the_width(device, format, tiles):
    torch.manual_seed(5)
    matrix, x, hidden, gain = torch.randn(80, 144) / 12, torch.randn(40, 144), torch.randn(40, 80), torch.rand(80)
    placed, given = made(matrix, format, tiles, device), x.to(device, torch.bfloat16)
    right = hidden + x @ matrix.T
    kept: dict[int, list[torch.Tensor]] = {}
    for rows in WIDTHS:
        parts, out = torch.zeros(tiles.splits, rows, 80, device=device), hidden.clone().to(device)
        normed = torch.zeros(rows, 80, dtype=torch.bfloat16, device=device)
        states, slots = torch.zeros(50, 80, device=device), torch.arange(49, 49 - rows, -1, device=device).int()
        product(given, placed, parts, rows, scratch(placed, device), STORE_PARTS.value)
        add_norm(parts, tiles.splits, out, gain.to(device), normed, rows, 1e-5, (states, slots))
        assert torch.equal(states[slots.long()], out[:rows])
        assert torch.equal(out[rows:].cpu(), hidden[rows:])
        kept[rows] = [out[:rows], normed]
    assert near(kept[40][0].cpu(), right)
    assert near(kept[40][1].cpu().float(), torch.nn.functional.rms_norm(right, (80,), gain, 1e-5))
    for rows in WIDTHS:
        assert all(torch.equal(found, whole[:rows]) for found, whole in zip(kept[rows], kept[40], strict=True))


def test_states_may_be_added_to_without_a_norm(device):
    hidden, parts = torch.randn(2, 48), torch.randn(3, 2, 48)
    out, normed = hidden.clone().to(device), torch.zeros(2, 48, dtype=torch.bfloat16, device=device)
    add_norm(parts.to(device), 3, out, None, normed, 2, 1e-5)
    assert torch.equal(out.cpu(), hidden + parts[0] + parts[1] + parts[2])
    assert not normed.any()


def test_tiles_depend_on_the_shape_alone():
    assert tiles_for("down", 4096, 14336, 16).splits == 2
    for what in ("qkv", "output", "gated", "down", "head", "join"):
        for outputs, inputs in ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (128256, 4096)):
            tiles = guessed(what, outputs, inputs)
            assert tiles.outputs in (16, 32, 64)


@pytest.mark.parametrize("what", ["qkv", "output", "gated", "down", "head", "join"])
def test_tiles_of_bytes_read_from_many_places_at_once(what):
    for outputs, inputs in ((6144, 4096), (4096, 16384), (28672, 4096), (16384, 2048), (2048, 4000)):
        for widest in (16, 64):
            tiles = tiles_for(what, outputs, inputs, 8, widest)
            assert tiles.outputs == min(widest, 32)
            assert tiles.splits == 1 or (what != "head" and inputs >= 4 * tiles.inputs * tiles.splits)
    assert tiles_for("output", 4096, 4096, 8).splits > 1
    assert tiles_for(what, 1024, 4096, 8) == guessed(what, 1024, 4096)  # too small to gain by it

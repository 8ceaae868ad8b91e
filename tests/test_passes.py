"""`bench --passes` measures what it says, on a tiny model."""

import hierspec
from hierspec.bench.passes import measure_passes
from hierspec.testing.checkpoints import tiny_checkpoint


def test_every_width_and_context_is_measured(tmp_path):
    model = hierspec.load(tiny_checkpoint(tmp_path / "tiny", "llama"))
    before = model.decoder.layer_rows
    found = measure_passes(model, widths=(1, 4), contexts=(32, 64, 9999))
    assert [(item["context"], item["tokens"]) for item in found["passes"]] == [(32, 1), (32, 4), (64, 1), (64, 4)]
    for item in found["passes"]:
        assert item["ms"] > 0
        assert item["layers_ms"] + item["head_ms"] + item["pick_ms"] > 0
    assert found["prefill"][0]["tokens"] == model.config.context - 1
    # Every pass really ran its rows through all layers: 5 repeats of 1 + 4 rows at each context, and the readings.
    rows = 2 * 5 * (1 + 4) + (32 + 1) + (64 + 1) + 3 * (model.config.context - 1)
    assert model.decoder.layer_rows - before == rows * model.config.layers

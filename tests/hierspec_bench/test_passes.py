"""`bench passes` measures what it says, on a tiny model."""

import hierspec
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec_bench.passes import measure_passes
from hierspec_bench.peers import open_peer


def test_every_width_and_context_is_measured(tmp_path):
    model = hierspec.load(tiny_checkpoint(tmp_path / "tiny", "llama"))
    peer = open_peer("transformers", model.folder, "float32", "cpu", model.stop_ids)
    before = model.decoder.layer_rows
    found = measure_passes(model, peer, widths=(1, 4), contexts=(32, 64, 9999))
    ours = [item for item in found["passes"] if "by" not in item]
    theirs = [item for item in found["passes"] if "by" in item]
    assert [(item["context"], item["tokens"]) for item in ours] == [(32, 1), (32, 4), (64, 1), (64, 4)]
    assert [(item["context"], item["by"]) for item in theirs] == [(32, "transformers"), (64, "transformers")]
    assert all(item["ms"] > 0 for item in found["passes"])
    assert all(item["layers_ms"] + item["head_ms"] + item["pick_ms"] > 0 for item in ours)
    assert [item["by"] for item in found["prefill"]] == ["hierspec", "transformers"]
    assert found["prefill"][0]["tokens"] == model.config.context - 1
    # Every pass really ran its rows through all layers: 5 repeats of 1 + 4 rows at each context, and the readings.
    rows = 2 * 5 * (1 + 4) + (32 + 1) + (64 + 1) + 3 * (model.config.context - 1)
    assert model.decoder.layer_rows - before == rows * model.config.layers

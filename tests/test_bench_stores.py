"""The benchmark of stores, small, and the text that it makes up."""

import json

import numpy as np

from hierspec.bench.stores import MadeUpText, measure_stores


def test_it_measures_every_store(tmp_path):
    seen = []
    result = measure_stores(
        lambda what, done, total: seen.append((done, total)),
        contexts=(300,), histories=(2_000,), corpora=(2_000, 3_000), calls=20, folder=tmp_path,
    )  # fmt: skip
    json.dumps(result)
    assert [row["tokens"] for row in result["corpus"]] == [2_000, 3_000]
    for name in ("context", "history", "corpus"):
        for row in result[name]:
            assert 0 < row["propose_us"]["median"] <= row["propose_us"]["p99"]
            assert 0 < row["nodes"] <= result["budget"]
    assert result["context"][0]["learn_us"]["median"] > 0
    assert result["history"][0]["learn_us"]["median"] > 0
    assert not list(tmp_path.iterdir())
    assert seen[-1] == (7_300, 7_300)


def test_made_up_text_repeats_phrases_but_not_itself():
    text = MadeUpText(phrases=5_000)
    one, again, other = text.tokens(20_000, 1), text.tokens(20_000, 1), text.tokens(20_000, 2)
    np.testing.assert_array_equal(one, again)
    assert one.dtype == np.int32
    assert len(one) == 20_000
    runs = {tuple(one[i : i + 4]) for i in range(len(one) - 3)}
    known = np.mean([tuple(other[i : i + 4]) in runs for i in range(len(other) - 3)])
    assert 0.05 < known < 0.9

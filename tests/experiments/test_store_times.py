"""The benchmark of stores, small, and the text that it makes up."""

import json

import numpy as np
import store_times
from store_times import MadeUpText, chart, main, measure_stores, no_larger


def test_it_measures_every_store(tmp_path):
    seen = []
    result = measure_stores(
        lambda what, done, total: seen.append((done, total)),
        contexts=(300,),
        histories=(2_000,),
        corpora=(2_000, 3_000),
        calls=20,
        folder=tmp_path,
    )
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


def test_sizes_may_be_capped():
    assert no_larger((10, 100, 1000), None) == (10, 100, 1000)
    assert no_larger((10, 100, 1000), 100) == (10, 100)
    assert no_larger((10, 100, 1000), 5) == (5,)


def test_the_command_writes_the_document_and_the_chart(tmp_path, capsys, monkeypatch):
    def quick(progress, *sizes):
        return measure_stores(progress, *sizes, calls=10)

    monkeypatch.setattr(store_times, "measure_stores", quick)
    output = tmp_path / "stores.json"
    assert main(["--largest", "2000", "--output", str(output)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(output.read_text())
    assert [row["tokens"] for row in document["context"]] == [1000]
    assert [row["tokens"] for row in document["history"]] == [2000]
    assert (tmp_path / "stores.svg").read_text() == chart(document).svg()
    assert main(["--largest", "5"]) == 2
    drawn = tmp_path / "again.svg"
    assert main(["--draw", str(output), "--output", str(drawn)]) == 0
    assert drawn.read_text() == chart(document).svg()


def test_made_up_text_repeats_phrases_but_not_itself():
    text = MadeUpText(phrases=5_000)
    one, again, other = text.tokens(20_000, 1), text.tokens(20_000, 1), text.tokens(20_000, 2)
    np.testing.assert_array_equal(one, again)
    assert one.dtype == np.int32
    assert len(one) == 20_000
    runs = {tuple(one[i : i + 4]) for i in range(len(one) - 3)}
    known = np.mean([tuple(other[i : i + 4]) in runs for i in range(len(other) - 3)])
    assert 0.05 < known < 0.9

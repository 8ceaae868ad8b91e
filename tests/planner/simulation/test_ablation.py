"""The ablation: every combination, each with fresh stores, and no answer seen before."""

import json

import numpy as np
import pytest

from hierspec.assembly.measured_costs import read_costs
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.pacing.costs import Costs
from hierspec.planner.simulation.ablation import ablation, answered_before, distinct
from hierspec.planner.simulation.replay import Record, write_records
from hierspec.stores.context import ContextStore
from hierspec.stores.history import HistoryStore
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore, scripted

ANSWER = tuple(range(20, 60))
RECORDS = [Record("one", (1, 2, 3), ANSWER), Record("two", (4, 5, 6), ANSWER)]


def opener(name: str):
    if name == "none":
        return None
    kinds = {"history": HistoryStore, "context": ContextStore, "knows": lambda: FakeStore("knows", scripted(text))}
    text = [*RECORDS[0].prompt, *ANSWER]
    return kinds[name]()


def test_every_combination_has_fresh_stores():
    names = ["knows", "history", "none", "context", "history"]
    reported = []
    results = ablation(RECORDS, names, opener, 7, 99, progress=lambda *report: reported.append(report[1:]))
    assert [result.stores for result in results] == [
        ("knows",),
        ("history",),
        ("context",),
        ("knows", "history"),
        ("knows", "context"),
        ("history", "context"),
        ("knows", "history", "context"),
    ]
    assert reported[-1] == (14, 14)
    figures = {result.stores: result.figures() for result in results}
    for stores, figure in figures.items():
        # Only the store "knows" has the answer to the first record, however many replays came before.
        assert (figure["tasks"]["one"]["tokens_per_pass"] > 1) == ("knows" in stores)
        assert (figure["tasks"]["two"]["tokens_per_pass"] > 4) == ("history" in stores or "knows" in stores)
        assert figure["drafting_us_per_pass"] > 0
        assert "predicted_speedup" not in figure
    assert figures["context",]["nodes_per_pass"] == 0
    assert figures["history",]["tasks"]["one"]["nodes_per_pass"] == 0


def test_costs_choose_and_predict():
    free, expensive = (Costs((1, 2, 32), (1.0, slope, 31 * slope)) for slope in (1.0 + 1e-9, 50.0))
    [cheap] = ablation(RECORDS, ["knows"], opener, 7, 99, free)
    assert cheap.figures()["tasks"]["one"]["predicted_speedup"] > 0.2
    [choosy] = ablation(RECORDS, ["knows"], opener, 7, 99, expensive)
    figures = choosy.figures()
    assert figures["nodes_per_pass"] == 0
    assert figures["predicted_speedup"] == pytest.approx(1.0, abs=0.01)


def test_a_prompt_comes_once_and_answers_seen_before_are_counted():
    again = [*RECORDS, Record("one", (1, 2, 3), (7, 7))]
    assert distinct(again) == RECORDS
    other = Record("three", (9,), tuple(range(60, 99)))
    documents = [np.array((1, 2, 3, *ANSWER)), np.array((5, 5))]
    assert answered_before([*RECORDS, other], documents) == 2
    assert answered_before([other, Record("empty", (1,), ())], documents) == 0


def test_costs_come_from_a_document_of_passes(tmp_path):
    path = tmp_path / "passes.json"
    passes = [
        {"context": 1024, "tokens": 1, "ms": 9.0, "ratio": 1.0},
        {"context": 128, "tokens": 4, "ms": 3.0, "ratio": 1.5},
        {"context": 128, "tokens": 1, "ms": 2.0, "ratio": 1.0},
        {"context": 128, "tokens": 1, "ms": 50.0, "by": "transformers"},
    ]
    path.write_text(json.dumps({"passes": passes}))
    costs = read_costs(path)
    assert (costs.rows, costs.measured) == ((1, 4), (0.002, 0.003))
    for bad in ("[]", '{"passes": []}', "not json", json.dumps({"passes": passes[1:2]})):
        path.write_text(bad)
        with pytest.raises(HierspecError, match="bench passes"):
            read_costs(path)


def test_the_command_says_what_stores_start_with(tmp_path, capsys):
    folder, home = str(tiny_checkpoint(tmp_path / "tiny", "llama")), tmp_path / "stores"
    record, output, passes = tmp_path / "r.jsonl", tmp_path / "out.json", tmp_path / "passes.json"
    write_records(record, [*RECORDS, RECORDS[0]])
    passes.write_text('{"passes": [{"context": 8, "tokens": 1, "ms": 1.0, "ratio": 1.0}]}')
    at = ["--model", folder, "--stores", str(home)]
    command = ["store", "replay", str(record), "--ablation", "--budget", "9", *at]
    assert main([*command, "--output", str(output)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(output.read_text())
    assert list(document["combinations"]) == ["context", "history", "context + history"]
    assert document["stores"] == {"history": "empty", "frequent": "none", "corpus": "none"}
    assert (document["records"], document["repeats_left_out"], document["answers_known_before"]) == (2, 1, 0)
    assert document["combinations"]["context"]["tasks"]["one"]["tokens_per_pass"] == 1

    from hierspec.assembly.vocabulary import open_home
    from hierspec.stores.history import SHARED

    where = open_home(folder, home)[2]
    with HistoryStore(where.history, vocabulary_hash=where.vocabulary_hash) as built:
        built.add((*RECORDS[0].prompt, *ANSWER), SHARED)
    assert main([*command, "--costs", str(passes)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["stores"]["history"] == "a copy of what was built"
    assert document["answers_known_before"] == 2
    assert "knows their answers" in err
    assert document["combinations"]["history"]["tasks"]["one"]["predicted_speedup"] > 0
    assert main([*command, "--first-only"]) == 2

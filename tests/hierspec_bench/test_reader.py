"""One reader of bench records: those of every age, and what readers make of them."""

import json

import pytest
from made_up_record import RESULTS, made_up_record

from hierspec.core.errors import HierspecError
from hierspec_bench.cli.table import show
from hierspec_bench.compare import compare_records
from hierspec_bench.readme import results
from hierspec_bench.record import PEER, PLAIN, PLAN, Record

DOCUMENTS = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
BENCH = [path for path, document in DOCUMENTS.items() if isinstance(document.get("plans"), dict)]


def test_there_are_records_of_several_ages():
    assert len(BENCH) > 30
    assert {DOCUMENTS[path].get("kind") for path in BENCH} == {None, "bench"}


@pytest.mark.parametrize("path", BENCH, ids=lambda path: path.stem)
def test_a_record_of_any_age_is_read_with_all_its_figures(path, capsys):
    document, record = DOCUMENTS[path], Record.read(path)
    parts = [document, *document.get("other_temperatures", ())]
    assert len(record.settings) == len(parts)
    for setting, part in zip(record.settings, parts, strict=True):
        sources = {**part["plans"], **part["peers"]}
        assert [entry.name for entry in setting.entries] == [*sources]
        for entry in setting.entries:
            source = sources[entry.name]
            assert entry.kind == (PEER if entry.name in part["peers"] else PLAIN if entry.name == PLAIN else PLAN)
            for key in ("prompts", "identical", "ties", "tokens", "seconds", "speedup", "tokens_per_second"):
                assert getattr(entry.figures, key) == source[key]
            assert entry.figures.speedup_interval == tuple(source["speedup_interval"])
            assert [*entry.tasks] == [*source["tasks"]]
            assert [tier.proposed for tier in entry.tiers] == [tier["proposed"] for tier in source.get("tiers", ())]
            assert len(entry.by_prompt) == len(source.get("by_prompt", ()))
            assert len(entry.first_differences) == len(source.get("first_differences", ()))
            assert entry.distribution.p == source.get("law", {}).get("p")
            assert entry.promises_text == source.get("promises_text", True)
    assert record.plain.figures.speedup == 1
    assert compare_records(record, record)["passed"] == record.complete
    assert f"| `{record.plain.name}` | {record.plain.figures.tokens_per_second:.1f} | 1 |" in results(record)
    show(record)
    assert all(f" {entry.figures.tokens_per_second:.1f} " in capsys.readouterr().err for entry in [record.plain])


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path not in BENCH], ids=lambda path: path.stem)
def test_a_record_of_another_kind_is_refused_in_a_sentence(path):
    with pytest.raises(
        HierspecError, match=r"cannot be used \(This is not a bench record.*hierspec bench run --output"
    ):
        Record.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"plans": []}', "\x00"])
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(HierspecError, match=r"record\.json cannot be used"):
        Record.read(path)
    with pytest.raises(HierspecError, match="there is no such file"):
        Record.read(tmp_path / "absent.json")


def test_what_is_absent_or_odd_is_none_or_empty():
    record = Record.of(
        {"plans": {"odd": {"speedup": "fast", "tokens": 1.5, "tiers": 3, "tasks": [], "by_prompt": [{}]}}}
    )
    [entry] = record.main.entries
    assert (entry.figures.speedup, entry.figures.tokens, entry.tiers, entry.by_prompt) == (None, None, (), ())
    assert (entry.outliers, entry.time, record.complete) == (None, {}, True)
    with pytest.raises(HierspecError, match="no figures of plain"):
        compare_records(record, record)


def test_times_of_prompts_are_all_read_or_none():
    rows = [{"prompt": number, "repeat": 0, "task": "a", "tokens": 5, "seconds": 1.0} for number in range(3)]
    whole = Record.of({"plans": {"a": {"by_prompt": rows}}}).main.entries[0]
    assert [time.prompt for time in whole.by_prompt] == [0, 1, 2]
    rows[1] = {**rows[1], "seconds": None}
    assert Record.of({"plans": {"a": {"by_prompt": rows}}}).main.entries[0].by_prompt == ()


def test_everything_that_the_page_shows_is_read():
    record = Record.of(made_up_record())
    assert record.best.name == "eagle+"
    assert record.best_peer.name == "openvino"
    assert [setting.temperature for setting in record.settings] == [0, 0.5, 1.0]
    last = record.main.named(PLAN)[-1]
    assert [difference.tie for difference in last.first_differences] == [True, False]
    assert last.outliers[0].usual == 41.25
    assert record.best_peer.tried_settings[0].setting == {"num_assistant_tokens": 5}
    assert {piece.source for piece in record.answers[0].by_plan["plain"]} == {"target"}
    assert "vllm" in record.absent

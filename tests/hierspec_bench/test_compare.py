"""Two records beside each other, the table of the README, and prompt sets by name."""

import copy
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hierspec import equality as compare
from hierspec import prompt_sets
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.prompt_sets import PromptSet, find_prompts
from hierspec.prompts import BenchPrompt
from hierspec_bench.compare import compare_records
from hierspec_bench.readme import with_results, write_results
from hierspec_bench.record import Record

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "results" / "auto-greedy.json"


def figures(speedup=1.0, spread=0.05, **changes):
    own = {
        "speedup": speedup,
        "speedup_interval": [speedup - spread, speedup + spread],
        "tokens_per_second": 10 * speedup,
    }
    return (
        own
        | {"prompts": 10, "identical": 10, "ties": 0, "tasks": {"qa": own | {"prompts": 10, "identical": 10}}}
        | changes
    )


def compared(before, after, tolerance=0.05):
    return compare_records(Record.of(before), Record.of(after), tolerance)


def document(**plans):
    return {"model": "m", "temperature": 0.0, "plans": {"plain": figures()} | plans, "peers": {"other": figures(0.5)}}


def test_changes_within_the_intervals_pass():
    found = compared(document(lookup=figures(1.30)), document(lookup=figures(1.27)))
    assert found["passed"]
    [row] = [row for row in found["rows"] if row["name"] == "lookup"]
    assert (row["change"], row["outside"], row["slower"]) == (pytest.approx(1.27 / 1.3, abs=1e-4), False, False)
    assert row["tasks"]["qa"]["speedups"] == [1.30, 1.27]
    assert found["farthest_apart"] == {"name": "lookup", "percent": 2.36}


def test_slower_beyond_intervals_and_tolerance_fails():
    before, after = document(lookup=figures(1.30)), document(lookup=figures(1.10))
    assert compared(before, after)["slower"] == ["lookup"]
    assert not compared(before, after)["passed"]
    assert compared(after, before)["passed"]  # faster
    assert compared(before, after, tolerance=0.2)["passed"]
    wide = document(lookup=figures(1.10, spread=0.3))
    assert compared(before, wide)["passed"]  # nobody can tell
    assert compared(document(), document() | {"peers": {"other": figures(0.2)}})["passed"]  # not ours


def test_lost_equality_fails_and_ties_do_not():
    before = document(lookup=figures(1.3))
    assert compared(before, document(lookup=figures(1.3, identical=9)))["lost_equality"] == ["lookup"]
    assert compared(before, document(lookup=figures(1.3, identical=9, ties=1)))["passed"]
    distribution = figures(1.3, identical=0, promises_text=False)
    assert compared(before, document(lookup=distribution))["passed"]


def test_a_stopped_run_passes_no_comparison():
    whole, stopped = document(lookup=figures(1.3)), document(lookup=figures(1.3)) | {"complete": False}
    assert compared(whole, whole)["passed"]
    found = compared(whole, stopped)
    assert (found["passed"], found["incomplete"]) == (False, ["after"])
    assert compared(stopped, whole)["incomplete"] == ["before"]


def test_a_tie_is_one_of_the_two_tokens_that_differ(monkeypatch):
    """A third token is wrong, however near the two best ones are."""
    scores = torch.zeros(8)
    scores[5], scores[6] = 1.0, 1.0 - 1e-5
    monkeypatch.setattr(compare, "next_scores", lambda *arguments: scores)
    model = SimpleNamespace(dtype="float32")
    found = [
        compare.first_difference(model, [1], [5], other, Sampling(), 0).is_tie
        for other in ([6], [6, 7], [7], [5, 6], [99])
    ]
    assert found == [True, True, False, False, False]


def test_temperatures_and_strangers_are_kept_apart():
    before, after = document(old=figures()), document(new=figures()) | {"model": "n"}
    before["other_temperatures"] = [{"temperature": 1.0, "plans": {"plain": figures(), "a": figures(1.2)}, "peers": {}}]
    after["other_temperatures"] = copy.deepcopy(before["other_temperatures"])
    after["other_temperatures"][0]["plans"]["a"] = figures(1.0)
    found = compared(before, after)
    assert (found["only_before"], found["only_after"]) == (["old"], ["new"])
    assert found["other_settings"] == ["model"]
    assert found["slower"] == ["a at 1"]


def test_the_command_compares(tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, speedup in zip(paths, (1.3, 1.0), strict=True):
        path.write_text(json.dumps(document(lookup=figures(speedup))))
    command = ["bench", "compare", *map(str, paths)]
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["slower"] == ["lookup"]
    assert "lookup is slower" in err
    assert main(["bench", "compare", str(paths[0]), str(paths[0])]) == 0
    assert "at most 0.0% apart" in capsys.readouterr().err
    assert main([*command, "--tolerance", "0.5"]) == 0
    assert main([*command, "--tolerance", "2"]) == 2
    paths[1].write_text("{}")
    assert main(command) == 2
    assert "not a bench record" in capsys.readouterr().err


def test_documents_of_before_are_read(capsys):
    """Those in docs/results were written before there were intervals by task."""
    assert main(["bench", "compare", str(COMMITTED), str(COMMITTED), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize("page", ["results.md", "own-model.md"])
def test_the_tables_of_documents_agree_with_the_records_they_name(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text == with_results(text, ROOT / "docs"), f"run: python -m hierspec_bench.readme docs/{page}"


def test_tables_take_their_places_between_the_marks(tmp_path):
    page, source = tmp_path / "page.md", tmp_path / "docs" / "r.json"
    block = "<!-- results: docs/r.json{} -->\nold\n<!-- end of results -->\n"
    page.write_text("above\n" + block.format("") + "between\n" + block.format(" lookup other") + "below\n")
    source.parent.mkdir()
    full = json.loads(COMMITTED.read_text())
    full["peers"] = {"other": full["plans"]["draft"] | {"ties": 2, "about": {"weights": "8 bits"}}}
    full["absent_peers"] = {"vllm": "It did not install."}
    full["plans"]["lookup"] |= {"promises_text": False, "law": {"p": 0.4}}
    source.write_text(json.dumps(full))
    write_results(page)
    whole, part = page.read_text().split("between\n")
    assert whole.startswith("above\n<!-- results: docs/r.json -->\n")
    assert part.endswith("<!-- end of results -->\nbelow\n")
    assert "old\n" not in page.read_text()
    told = ("| other (8 bits) | ", "24 of 24, 2 ties", "same distribution (p 0.4)", full["command"], "| `plain` | ")
    assert all(words in whole and words in part for words in told)
    assert "not run: It did not install." in whole
    assert "| `draft` | " in whole
    assert "not run" not in part
    assert "| `draft` | " not in part
    page.write_text(block.format(" nobody"))
    with pytest.raises(HierspecError, match="no plan or engine 'nobody'"):
        write_results(page)
    page.write_text("no marks")
    with pytest.raises(HierspecError, match="no place for results"):
        write_results(page)
    with pytest.raises(HierspecError, match=r"cannot be read .* give a Markdown file"):
        write_results(tmp_path / "nowhere.md")


LINES = (
    '{"question_id": 81, "category": "writing", "turns": ["a", "b"]}\n'
    '{"question_id": 161, "category": "translation", "turns": ["c"], "reference": ["d"]}\n'
)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A prompt set at an address of this machine's disk."""
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "question.jsonl"
    source.write_text(LINES)
    known = PromptSet(source.as_uri(), hashlib.sha256(LINES.encode()).hexdigest())
    monkeypatch.setattr(prompt_sets, "SETS", {"spec-bench": known})
    return source


def test_a_named_set_is_fetched_once(served):
    wanted = "spec-bench", [BenchPrompt("mt_bench", ("a", "b")), BenchPrompt("translation", ("c",))]
    assert find_prompts("spec-bench") == wanted
    served.unlink()
    assert find_prompts("spec-bench") == wanted
    kept = next((served.parent / "cache" / "prompts").iterdir())
    kept.write_text(LINES[:20])  # damaged: it would be fetched again
    with pytest.raises(HierspecError, match=r"could not be fetched.*--prompts FILE"):
        find_prompts("spec-bench")


def test_another_file_is_never_taken_for_a_named_set(served):
    served.write_text(LINES + LINES)
    with pytest.raises(HierspecError, match="its hash differs"):
        find_prompts("spec-bench")
    assert not list((served.parent / "cache").rglob("*.jsonl"))


def test_names_and_paths(served):
    assert find_prompts(None) == find_prompts("own")
    assert len(find_prompts("own")[1]) == 36
    assert find_prompts(str(served)) == ("question.jsonl", find_prompts("spec-bench")[1])
    with pytest.raises(HierspecError, match="choose own, spec-bench or a file"):
        find_prompts("spec-bnech")
    with pytest.raises(HierspecError, match="cannot be read"):
        find_prompts("missing.jsonl")

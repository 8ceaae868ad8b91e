"""The script that trains variants of an early-exit recipe: it pauses, goes on, measures and keeps the best."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import train_early_exit

from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import open_pack
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack
from hierspec.train.questions import gather_questions
from hierspec.train.synthesise import greedy_answers


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A call with a tiny model, its pack and its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hierspec.train.recipes.greedy_answers", partial(greedy_answers, most=8))
    tiny_pack("pack", tiny_checkpoint("model"), exits=(1, 2))
    Path("ask.jsonl").write_text('{"question": "what is it"}\n{"instruction": "do", "input": "this"}\n')
    Path("measure.jsonl").write_text('{"task": "a", "turns": ["hello there"]}\n')
    Path("text.txt").write_text("some plain text to read as well. " * 40)
    files = (
        "--model model --begin pack --prompts ask.jsonl --text text.txt --held-text text.txt --measure measure.jsonl"
    )
    sizes = (
        "--layers 1,2 --norm-layers 3 --conversations 12 --write-batch 8 --length 48 --steps 2 --batch 4 --measured 1"
    )
    return f"{files} {sizes} --device cpu --work work --best best --results record.json".split()


def test_a_call_that_pauses_goes_on_and_leaves_the_best_pack(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["--variants", "two-layers"]
    assert train_early_exit.main([*command, *variants, "--minutes", "0"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["finished"], list(first["variants"])) == (False, ["begin"])
    assert train_early_exit.main([*command, *variants, "--minutes", "9"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["finished"]
    assert list(last["variants"]) == ["begin", "two-layers", "two-layers-longer"]
    assert last["best"] in last["variants"]
    least = min(about["short"] for name, about in last["variants"].items() if name != "begin")
    assert last["variants"][last["best"]]["short"] == least
    record = json.loads(Path("record.json").read_text())
    assert record["variants"]["two-layers"]["depths"] == [1, 2]
    assert record["variants"]["two-layers"]["steps"] == 2
    checkpoint = load_checkpoint("model", pack="none")
    pack = open_pack("best", checkpoint.config, checkpoint.weights)
    assert pack.early_exit().exits() == (1, 2)


def test_a_variant_that_fails_does_not_stop_the_others(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = train_early_exit.train_tuned

    def failing(material, exits, *rest, **options):
        if exits[1].depth == 1:
            raise RuntimeError("no memory")
        return train(material, exits, *rest, **options)

    monkeypatch.setattr(train_early_exit, "train_tuned", failing)
    calls = [*command, "--variants", "weighted,norm-draft", "--minutes", "9", "--final-minutes", "0"]
    assert train_early_exit.main(calls) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["variants"]["weighted"] == {"failed": "no memory"}
    assert last["best"] == "norm-draft"
    assert train_early_exit.main([*command, "--variants", "other", "--minutes", "1"]) != 0
    assert "There is no variant 'other'" in capsys.readouterr().err


def test_aims_are_missed_by_what_lacks() -> None:
    reached = {"draft": 0.5, "verifier": 0.8, "stands": 0.83, "perplexity": 1.13}
    assert train_early_exit.shortfall(reached) == pytest.approx(0.1 + 0.05 + 0.03)


def test_a_variant_goes_on_with_the_drift_that_is_left() -> None:
    assert train_early_exit.next_drift(0.08, 1.093) == 0.08
    assert train_early_exit.next_drift(0.08, 1.5) == pytest.approx(0.048)
    assert train_early_exit.next_drift(0.08, 0.99) == pytest.approx(0.1)


def test_every_source_of_questions_has_its_share(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"turns": ["one", "two"]}\n{"question": "three"}\n')
    (tmp_path / "text.txt").write_text("word " * 600)
    asked = gather_questions([tmp_path / "a.jsonl"], [tmp_path / "text.txt"], 4)
    assert asked[:4] == ["one", "three", "one", "three"]
    assert [question.split()[0] for question in asked[4:]] == ["Summarize"] * 4 + ["Answer"] * 4
    (tmp_path / "a.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(HierspecError, match="line 1: it has no turns, no question and no instruction"):
        gather_questions([tmp_path / "a.jsonl"], [], 4)

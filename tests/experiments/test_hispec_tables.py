"""HiSpec's tables, small: every part, equal blocks, and a run that has no time."""

import json

import hispec_tables
import pytest
from hispec_tables import Tables, ladder, one_exit

import hierspec
from hierspec import Sampling
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tables")
    tiny_pack(root / "pack", tiny_checkpoint(root / "model", layers=8), exits=(1, 2))
    (root / "ask.jsonl").write_text('{"task": "a", "turns": ["hello", "more"]}\n')
    return root


def test_every_part_is_in_the_record_and_every_text_is_plains(folder, monkeypatch, capsys):
    monkeypatch.setattr(hispec_tables, "DRAFT_LENGTHS", (2,))
    monkeypatch.setattr(hispec_tables, "BLOCKS", (4,))
    monkeypatch.chdir(folder)
    command = "model --pack pack --prompts ask.jsonl --agreement ask.jsonl --batch 2 --exits 1,2 --max-tokens 6"
    assert hispec_tables.main([*command.split(), "--output", "record.json"]) == 0
    record = json.loads((folder / "record.json").read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["part"], row["complete"]) for row in record["parts"]] == [(part, True) for part in hispec_tables.PARTS]
    assert set(record["named"]) == {"plain", *hispec_tables.PLANS}
    assert set(record["blocks"]) == {"plain", "4 alone", "2 x 4"}
    assert set(record["accepted_at_the_target"]) == {"4"}
    assert set(record["pairs"]) == {"plain", "1 alone", "2 alone", "1 under 2"}
    assert "hispec, batch of 2" in record["batches"]
    assert {"drafting", "intermediate", "final"} < set(record["time"]["hispec"])
    assert record["time"]["layerskip"]["intermediate"] == 0
    assert "exit 1 and exit 2" in record["agreement"]["ask"]["agreement"]["all"]
    assert all(row["prompts"] == row["identical"] for part in ("named", "blocks") for row in record[part].values())


def test_without_time_nothing_is_begun(folder):
    model = hierspec.load(folder / "model", pack=folder / "pack")
    tables, kept = Tables(model, [BenchPrompt("a", ("hello",))], Sampling(max_tokens=4), (1, 2)), []
    tables.run(["named", "blocks"], 0.0, lambda: kept.append(len(tables.record["parts"])))
    assert [row["complete"] for row in tables.record["parts"]] == [False, False]
    assert kept == [1, 2]


def test_blocks_hold_what_their_last_round_may_bring():
    plan = ladder(4, 8, 6, 16)
    assert (plan.budget, [tier.gather for tier in plan.tiers]) == (22, [16, 6])
    assert one_exit(4, 12).budget == 12
    assert hispec_tables.main(["--parts", "other"]) != 0

"""Every script of experiments/ has a command line, and names the record that it made."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hispec_pairs import chart, main

ROOT = Path(__file__).parents[2]
HELPERS = {"early_exit_variants", "killed_writer", "vllm_gpu_engine"}  # used by others
SCRIPTS = sorted(path for path in (ROOT / "experiments").glob("*.py") if path.stem not in HELPERS)


def test_the_experiments_are_all_there():
    assert [path.stem for path in SCRIPTS] == [
        *(
            "batches",
            "big_file",
            "equality",
            "first_prompts",
            "gpu_passes",
            "hero",
            "hispec_pairs",
            "hispec_synthetic",
            "hispec_tables",
            "long_prompts",
            "phases",
        ),
        *(
            "prompt_beside_streams",
            "recorded_texts",
            "search_growth",
            "steps_in_turn",
            "store_access",
            "store_orders",
            "store_soak",
            "store_times",
            "structured",
            "train_early_exit",
            "train_ladder",
            "two_commits",
        ),
        *("vllm_batches", "vllm_drafts", "vllm_gpu", "vllm_host", "vllm_propose_times"),
    ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_has_an_example_and_the_records_it_made(path, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module(path.stem).main(["--help"])
    assert stopped.value.code == 0
    described, _, examples = capsys.readouterr().out.partition("example")
    records = re.findall(r"docs/results/[\w-]+\.json", described)
    assert records
    assert all((ROOT / record).is_file() for record in records)
    assert f"python experiments/{path.name}" in examples


def test_a_script_runs_by_its_path(tmp_path):
    drawn = tmp_path / "search.svg"
    script, record = ROOT / "experiments" / "search_growth.py", ROOT / "docs" / "results" / "plan-search.json"
    subprocess.run([sys.executable, script, "--draw", record, "--output", drawn], check=True, cwd=tmp_path)
    assert drawn.read_text() == (ROOT / "docs/pictures/plan-search.svg").read_text()


def test_pairs_of_exits_are_drawn_again_from_their_record(tmp_path):
    drawn = tmp_path / "exits.svg"
    assert main(["--draw", str(ROOT / "docs/results/exits-table.json"), "--output", str(drawn)]) == 0
    assert drawn.read_text() == (ROOT / "docs/pictures/exits-table.svg").read_text()
    assert chart([{"draft": 2, "verifier": None, "measured": 1.1, "formula": 1.2}]).svg()

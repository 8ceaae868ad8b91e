"""The experiment with first prompts runs, in both of its ways to take turns, and finds the same texts."""

import json

import first_prompts
import pytest

pytestmark = pytest.mark.usefixtures("default_model")


@pytest.mark.parametrize("more", [[], ["--in-turn", "--one-process", "--factor", "3"]], ids=["processes", "in turn"])
def test_first_prompts_are_compared(more, tmp_path, capsys):
    prompts = [{"task": task, "turns": [f"Name one {task}."]} for task in ("river", "lake")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    assert first_prompts.main([str(file), "--weights", "int8", "--max-tokens", "6", *more]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert set(run["auto_over_plain"]) == {"river", "lake"}
    assert run["same_texts"] == run["texts"] == 2
    assert all(min(answer["plain"], answer["auto"]) > 0 for answer in run["answers"])
